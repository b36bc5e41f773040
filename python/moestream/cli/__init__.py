"""The `moestream` command.

One module per command. Each has `add_arguments(parser)`, the public function of the command's name, and
`run(**options)`, which calls that function with the parsed options by name and prints what it gives.

Exit codes: 0 done, 1 an error told in one line on stderr, 2 wrong usage, 130 ended by Ctrl-C, 141 the reader of our
output left.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from .._log import forward_llama_cpp_log
from ..errors import MoestreamError
from . import generate, inspect
from ._output import versions

__all__ = ["main"]

_COMMANDS = {"generate": generate, "inspect": inspect}
_LOG_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)
_LLAMA_CPP_LOG_LEVELS = (logging.CRITICAL, logging.CRITICAL, logging.INFO, logging.DEBUG)


class _Parser(argparse.ArgumentParser):
    """A parser whose usage errors are one line and a pointer, not a page."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nSee '{self.prog} --help'.\n")


class _LogHandler(logging.StreamHandler):
    """Writes log lines to stderr without tearing a progress bar that is being drawn there."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        with tqdm.external_write_mode(file=sys.stderr):
            super().emit(record)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="moestream",
        description="Run Mixture-of-Experts GGUF models larger than RAM: the experts stay on the SSD.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version",
        action="version",
        version="\n".join(f"{name:<17}{version}" for name, version in versions().items()),
        help="print the versions of moestream and of what it runs on",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, module in _COMMANDS.items():
        summary, _, details = (module.__doc__ or "").partition("\n")
        command = commands.add_parser(
            name,
            help=summary[0].lower() + summary[1:].rstrip("."),
            description=summary,
            epilog=details.strip() or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.set_defaults(parser=command)
        command.add_argument(
            "-v",
            "--verbose",
            action="count",
            default=0,
            help="log what happens, and show tracebacks; twice: llama.cpp's log too; three times: its debug log",
        )
    return parser


def _log_to_stderr(verbose: int) -> None:
    handler = _LogHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s: %(levelname)s: %(message)s"))
    logger = logging.getLogger("moestream")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(_LOG_LEVELS[min(verbose, len(_LOG_LEVELS) - 1)])
    # What goes wrong in llama.cpp is told by the exception that follows; its own lines are for those who ask.
    logging.getLogger("moestream.llama_cpp").setLevel(_LLAMA_CPP_LOG_LEVELS[min(verbose, 3)])
    forward_llama_cpp_log()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` (default: the process's own arguments) names and returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a replaced stream may not be able to
            stream.reconfigure(errors="replace")
    parser = _parser()
    parsed, unknown = parser.parse_known_args(argv)
    options = vars(parsed)
    name = options.pop("command")
    if unknown:
        options.get("parser", parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if name is None:
        parser.print_help()
        return 0
    del options["parser"]
    verbose = options.pop("verbose")
    _log_to_stderr(verbose)
    try:
        code = _COMMANDS[name].run(**options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit; let it do so where nobody complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("moestream: interrupted", file=sys.stderr)
        return 130
    except MoestreamError as exc:
        if verbose:
            traceback.print_exc()
        print(f"moestream: error: {exc}", file=sys.stderr)
        return 1
    except Exception as exc:
        if verbose:
            traceback.print_exc()
        reason = " ".join(str(exc).split())
        print(f"moestream: error: {type(exc).__name__}: {reason} (--verbose shows where)", file=sys.stderr)
        return 1
