"""The `moestream` command.

One module per command. Each has `add_arguments(parser)`, the public function of the command's name, and
`run(**options)`, which calls that function with the parsed options by name and prints what it gives. A command of
several parts is a package whose `COMMANDS` are such modules; it may be such a module besides, for use without a part.

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ..errors import MoestreamError
from . import (
    bench,
    convert,
    demo,
    eval,
    export,
    generate,
    inspect,
    plan,
    probe,
    sidecar,
    simulate,
    trace,
    train,
    verify,
)
from ._logging import log_to_stderr
from ._output import versions

__all__ = ["main"]

_COMMANDS = {
    "bench": bench,
    "convert": convert,
    "demo": demo,
    "eval": eval,
    "export": export,
    "generate": generate,
    "inspect": inspect,
    "probe": probe,
    "plan": plan,
    "sidecar": sidecar,
    "simulate": simulate,
    "trace": trace,
    "train": train,
    "verify": verify,
}
_LOG_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)
_LLAMA_CPP_LOG_LEVELS = (logging.CRITICAL, logging.CRITICAL, logging.INFO, logging.DEBUG)


class _Parser(argparse.ArgumentParser):
    """A parser whose usage errors are one line and a pointer, not a page.

    Attributes:
        run: What its command does, given the parsed options; None where one of its commands is still to be named.
        parts: Of a command that does something itself, the parser of what comes after the name of one of its commands.
    """

    run: Callable[..., int] | None = None
    parts: _Parser | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As ever; with `parts`, the first word says whose the options are, so that they do not mix."""
        if self.parts is None:
            return super().parse_known_args(args, namespace)
        if not args:
            return argparse.Namespace(parser=self), []
        parse = super().parse_known_args if args[0].startswith("-") else self.parts.parse_known_args
        return parse(args, namespace)

    def format_usage(self) -> str:
        return super().format_usage() + (f"       {self.prog} COMMAND ...\n" if self.parts else "")

    def format_help(self) -> str:
        if self.parts is None:
            return super().format_help()
        usage, commands = argparse.ArgumentParser.format_usage(self), self.parts.format_help().partition("\n\n")[2]
        return (
            super()
            .format_help()
            .replace(usage, self.format_usage(), 1)
            .replace("\noptions:", f"\n{commands}\noptions:", 1)
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nSee '{self.prog} --help'.\n")


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
    _add_commands(parser, _COMMANDS)
    return parser


def _add_commands(parser: _Parser, modules: Mapping[str, Any]) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, module in modules.items():
        summary, _, details = (module.__doc__ or "").partition("\n")
        command = commands.add_parser(
            name,
            help=summary[0].lower() + summary[1:].rstrip("."),
            description=summary,
            epilog=details.strip() or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.set_defaults(parser=command)
        if hasattr(module, "COMMANDS"):
            command.parts = _Parser(prog=command.prog, add_help=False) if hasattr(module, "run") else None
            _add_commands(command.parts or command, module.COMMANDS)
            if command.parts is None:
                continue
        command.run = module.run
        module.add_arguments(command)
        command.add_argument(
            "-v",
            "--verbose",
            action="count",
            default=0,
            help="log what happens, and show tracebacks; twice: llama.cpp's log too; three times: its debug log",
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` (default: the process's own arguments) names and returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a replaced stream may not be able to
            stream.reconfigure(errors="replace")
    parser = _parser()
    parsed, unknown = parser.parse_known_args(argv)
    options = vars(parsed)
    del options["command"]
    command = options.pop("parser", parser)
    if unknown:
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    if not options:  # nothing was asked for
        command.print_help()
        return 0
    verbose = options.pop("verbose")
    # What goes wrong in llama.cpp is told by the exception that follows; its own lines are for those who ask.
    log_to_stderr(_LOG_LEVELS[min(verbose, 2)], _LLAMA_CPP_LOG_LEVELS[min(verbose, 3)])
    try:
        code = command.run(**options)
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
