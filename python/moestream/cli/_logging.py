from __future__ import annotations

import logging
import sys

from .._log import forward_llama_cpp_log


class _LogHandler(logging.StreamHandler):
    """Writes log lines to stderr without tearing a progress bar that is being drawn there."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        with tqdm.external_write_mode(file=sys.stderr):
            super().emit(record)


def log_to_stderr(level: int, llama_cpp_level: int) -> None:
    """Shows the log of moestream and that of llama.cpp, each from its level on."""
    handler = _LogHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s: %(levelname)s: %(message)s"))
    logger = logging.getLogger("moestream")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level)
    logging.getLogger("moestream.llama_cpp").setLevel(llama_cpp_level)
    forward_llama_cpp_log()


def log_levels() -> tuple[int, int]:
    """What `log_to_stderr` was given, for a process that is to log as this one does."""
    ours, llama_cpps = (logging.getLogger(name).getEffectiveLevel() for name in ("moestream", "moestream.llama_cpp"))
    return ours, llama_cpps
