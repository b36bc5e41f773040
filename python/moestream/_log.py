"""llama.cpp's own log, as records of :mod:`logging`."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterator

import llama_cpp

__all__ = ["forward_llama_cpp_log", "without_llama_cpp_log"]

logger = logging.getLogger("moestream.llama_cpp")

_CONTINUED = 5
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}  # ggml_log_level; 0 is none


class _Lines:
    """Puts together the lines that ggml logs in pieces: a line ends with a newline, or where a new one begins."""

    def __init__(self) -> None:
        self._level = logging.INFO
        self._begun = ""

    def add(self, level: int, text: str) -> None:
        if level != _CONTINUED:
            self._log(self._begun)
            self._begun = ""
            self._level = _LEVELS.get(level, logging.INFO)
        *whole, self._begun = (self._begun + text).split("\n")
        for line in whole:
            self._log(line)

    def _log(self, line: str) -> None:
        if line.strip():
            logger.log(self._level, "%s", line.rstrip())


_lines = _Lines()


@llama_cpp.llama_log_callback
def _forward(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    _lines.add(level, text.decode("utf-8", "replace"))


def forward_llama_cpp_log() -> None:
    """Hands what llama.cpp and ggml log to the logger ``moestream.llama_cpp``, in this whole process from now on.

    llama-cpp-python prints it to stderr instead, and takes errors for debug messages. Its ``verbose=False`` still
    discards what is logged while a model loads.
    """
    llama_cpp.llama_log_set(_forward, ctypes.c_void_p(0))


@llama_cpp.llama_log_callback
def _discard(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    pass


@contextlib.contextmanager
def without_llama_cpp_log() -> Iterator[None]:
    """What llama.cpp and ggml log within the block is lost."""
    callback, user_data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(callback), ctypes.byref(user_data))
    llama_cpp.llama_log_set(_discard, ctypes.c_void_p(0))
    try:
        yield
    finally:
        llama_cpp.llama_log_set(callback, user_data)
