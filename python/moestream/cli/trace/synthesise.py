"""Make up a routing trace with the locality that others measured.

It is what caches and policies can be tried on where there is no model. The file
says that no model made it. --like takes the shape and locality of a model; the
other options change them.

  moestream trace synthesise --like qwen3-30b-a3b --tokens 2000 -o qwen3.trace
  moestream trace synthesise --layers 24 --experts 64 --top-k 4 \\
      --reused-last 0.3 --reused-window 0.7 --balance 0.97 -o made-up.trace
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from ...memory import format_size
from ...synthesis import PRESETS
from .._output import require_writable


def run(*, output: str, **options: Any) -> int:
    """Runs `moestream.synthesise_trace` for the command line, writes the trace, and returns the exit code."""
    from ... import synthesise_trace

    require_writable(output)
    started = time.perf_counter()
    trace = synthesise_trace(**options)
    trace.write(output)
    seconds, size, tokens = time.perf_counter() - started, Path(output).stat().st_size, len(trace.tokens)
    print(f"{output}: {tokens:,} tokens in {seconds:.1f} s; {format_size(size)}, {size / tokens:.1f} bytes a token")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `synthesise`."""
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="the trace to write")
    parser.add_argument("--like", metavar="MODEL", help=f"the model: {', '.join(PRESETS)}")
    parser.add_argument(
        "-n", "--tokens", type=int, default=2000, metavar="N", help="tokens of the text (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="layers with experts")
    parser.add_argument("--experts", type=int, metavar="N", help="experts in each")
    parser.add_argument("--top-k", type=int, metavar="N", help="experts used for a token")
    parser.add_argument(
        "--reused-last", type=float, metavar="SHARE", help="of a token's experts, used by the token before too"
    )
    parser.add_argument("--reused-window", type=float, metavar="SHARE", help="used by one of the 8 tokens before")
    parser.add_argument("--balance", type=float, metavar="SHARE", help="of the load, as trace show has it; 1 is even")
    parser.add_argument("-s", "--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
