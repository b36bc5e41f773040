"""moestream: Mixture-of-Experts GGUF models larger than RAM, on top of llama-cpp-python."""

from importlib.metadata import version

from . import _native, memory  # noqa: F401  the ABI is verified here, before anything is built on it
from ._capture import record_routing
from ._locality import LayerRouting, LruHitRate, RoutingStatistics, routing_statistics
from .errors import CacheTooSmallError, ExpertReadError, ModelError, MoestreamError, OptionError, TraceError
from .llama import Llama
from .model import ExpertMatrix, ModelDescription, ModelFile, MoeLayer, describe
from .models import demo_model
from .options import ExpertStreaming
from .stats import ExpertStats
from .trace import RoutingTrace

__version__ = version("moestream")

__all__ = [
    "CacheTooSmallError",
    "ExpertMatrix",
    "ExpertReadError",
    "ExpertStats",
    "ExpertStreaming",
    "LayerRouting",
    "Llama",
    "LruHitRate",
    "ModelDescription",
    "ModelError",
    "ModelFile",
    "MoeLayer",
    "MoestreamError",
    "OptionError",
    "RoutingStatistics",
    "RoutingTrace",
    "TraceError",
    "__version__",
    "demo_model",
    "describe",
    "record_routing",
    "routing_statistics",
]
