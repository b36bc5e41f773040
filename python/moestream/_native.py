"""The C core: libmoestream, opened beside the llama.cpp that llama-cpp-python brings.

Importing this module checks that both belong together; a mismatch is an
ImportError that names the versions and the remedy.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cffi import FFI

from . import _openmp
from .errors import ExpertReadError, MoestreamError

__all__ = ["LIBRARY", "check", "ffi", "lib", "text"]

_REMEDY = "pip install --force-reinstall --no-deps llama-cpp-python=={} && pip install --force-reinstall --no-deps moestream"

ffi = FFI()
MESSAGE_BYTES = 1024
_FOLDER = Path(__file__).parent
LIBRARY = next(iter(sorted(_FOLDER.glob("libmoestream.*"))), None)
"""The file of our library, through which ggml's functions are found too; None in sources that are not installed."""


def _declarations(header: str) -> str:
    """The header as cffi reads it: without preprocessor lines and comments."""
    without_comments = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    return "\n".join(line for line in without_comments.splitlines() if not line.startswith("#"))


def _open() -> Any:
    try:
        with _openmp.short_spins():
            import llama_cpp  # noqa: F401  loads the libraries that ours is linked against
    except ImportError as error:
        raise ImportError(f"moestream needs llama-cpp-python: pip install llama-cpp-python ({error})") from error
    ffi.cdef(_declarations((_FOLDER / "moestream.h").read_text()))
    if LIBRARY is None:
        raise ImportError(f"moestream's library is not in {_FOLDER}: install the package (pip install .) rather than importing its sources")
    installed = importlib.metadata.version("llama-cpp-python")
    try:
        lib = ffi.dlopen(str(LIBRARY))
    except OSError as error:
        raise ImportError(f"moestream's library does not fit the installed llama-cpp-python {installed}: {error}") from error
    built_for = ffi.string(lib.ms_built_for()).decode()
    verify_versions(installed, built_for)
    verify_interface(lib, installed, built_for)
    return lib


def verify_versions(installed: str, built_for: str) -> None:
    """Raises ImportError unless the installed llama-cpp-python is the one compiled against."""
    if installed != built_for:
        raise ImportError(
            f"moestream was built for llama-cpp-python {built_for}, but {installed} is installed; " + _REMEDY.format(built_for)
        )


def verify_interface(lib: Any, installed: str, built_for: str) -> None:
    """Raises ImportError unless llama.cpp's plug-in structs are laid out as ours."""
    message = ffi.new("char[]", MESSAGE_BYTES)
    if lib.ms_abi_check(message, MESSAGE_BYTES) < 0:
        raise ImportError(
            f"{text(message)}: moestream was built for llama-cpp-python {built_for}, {installed} is installed; " + _REMEDY.format(built_for)
        )


def text(pointer: Any) -> str:
    """A C string as str."""
    return ffi.string(pointer).decode("utf-8", "replace") if pointer else ""


def check(call: Callable[..., int], *args: Any, error: type[MoestreamError] = ExpertReadError) -> None:
    """Calls a C function that takes (..., err, errlen) and raises its sentence as ``error``."""
    message = ffi.new("char[]", MESSAGE_BYTES)
    if call(*args, message, MESSAGE_BYTES) < 0:
        raise error(text(message))


lib = _open()
