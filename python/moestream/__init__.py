"""moestream: Mixture-of-Experts GGUF models larger than RAM, on top of llama-cpp-python."""

from importlib.metadata import version

from . import _native, memory  # noqa: F401  the ABI is verified here, before anything is built on it
from .errors import CacheTooSmallError, ExpertReadError, ModelError, MoestreamError, OptionError
from .llama import Llama
from .model import ExpertMatrix, ModelDescription, ModelFile, MoeLayer, describe
from .options import ExpertStreaming
from .stats import ExpertStats

__version__ = version("moestream")

__all__ = [
    "CacheTooSmallError",
    "ExpertMatrix",
    "ExpertReadError",
    "ExpertStats",
    "ExpertStreaming",
    "Llama",
    "ModelDescription",
    "ModelError",
    "ModelFile",
    "MoeLayer",
    "MoestreamError",
    "OptionError",
    "__version__",
    "describe",
]
