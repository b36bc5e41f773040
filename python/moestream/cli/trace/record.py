"""Record which experts a model takes for each token of a text.

Each FILE is a text of its own. One longer than the context is cut into several.

  moestream trace record -m MODEL.gguf -f text.txt -o text.trace
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import OptionError
from ...memory import format_size
from .._interrupt import INTERRUPTED, Interrupt
from .._model import add_model_arguments
from .._output import Progress, require_writable
from .._watched import add_arguments as add_text_arguments
from .._watched import opened, require_sizes

if TYPE_CHECKING:
    from ... import RoutingTrace


def record(
    *,
    model: str | os.PathLike[str] | None = None,
    hf_repo: str | None = None,
    hf_file: str | None = None,
    file: Sequence[str | os.PathLike[str]],
    ctx_size: int = 4096,
    ubatch_size: int = 512,
    threads: int | None = None,
    expert_cache: int | str = "auto",
    kernels: str = "auto",
    reader: str = "auto",
    experts_used: int | None = None,
    load_progress: Callable[[float], None] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RoutingTrace:
    """The routing of texts in files; what `moestream trace record` writes, with the long names of its options.

    Args:
        model: A GGUF file. By default the one that ships with the package.
        hf_repo: Instead of `model`, "user/repo" or "user/repo:quant" on the Hugging Face Hub.
        hf_file: The file in that repository.
        file: Files of text, each a text of its own.
        ctx_size: Tokens of the longest text; longer ones are cut.
        ubatch_size: Tokens computed at once at most; 1 computes as decoding does.
        threads: By default one per physical core this process may use.
        expert_cache, kernels, reader, experts_used: As in `moestream.ExpertStreaming`.
        load_progress: Is told the share of the model that is loaded, from 0 to 1; what it raises breaks loading off.
        progress: Is told how many tokens of how many are done; what it raises breaks the recording off.

    Raises:
        MoestreamError: The options, the model or a file are no good, or experts could not be read.
    """
    from ... import record_routing

    require_sizes(ctx_size, ubatch_size, threads)
    texts = [_text(name) for name in file]
    with opened(
        model,
        hf_repo,
        hf_file,
        ctx_size=ctx_size,
        ubatch_size=ubatch_size,
        threads=threads,
        load_progress=load_progress,
        cache=expert_cache,
        kernels=kernels,
        reader=reader,
        experts_used=experts_used,
    ) as llm:
        source = ", ".join(Path(name).name for name in file)
        return record_routing(llm, texts, context=ctx_size, source=source, progress=progress)


def run(*, output: str, **options: Any) -> int:
    """Runs `record` for the command line, writes the trace, and returns the exit code."""
    require_writable(output)
    started = time.perf_counter()
    try:
        with Interrupt() as interrupt, Progress(interrupt.requested) as progress:

            def recorded(done: int, total: int) -> None:
                if interrupt.requested():
                    raise KeyboardInterrupt
                progress.show("recording", done, total, unit="tokens")

            trace = record(**options, load_progress=progress.load, progress=recorded)
        trace.write(output)
    except KeyboardInterrupt:
        print(f"moestream: interrupted: {output} was not written", file=sys.stderr)
        return INTERRUPTED
    seconds, size, tokens = time.perf_counter() - started, Path(output).stat().st_size, len(trace.tokens)
    texts = f"{len(trace.starts)} text{'s' if len(trace.starts) > 1 else ''}"
    print(
        f"{output}: {tokens:,} tokens of {texts} in {seconds:.1f} s; {format_size(size)}, {size / tokens:.1f} bytes a token"
    )
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `record`. They have the names that they have in `generate`."""
    add_model_arguments(parser)
    parser.add_argument(
        "-f", "--file", metavar="FILE", action="append", required=True, help="a text; may be given several times"
    )
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="the trace to write")
    add_text_arguments(parser, ctx_size=4096)


def _text(path: str | os.PathLike[str]) -> bytes:
    try:
        text = Path(path).read_bytes()
    except OSError as exc:
        raise OptionError(f"cannot read the text {path}: {exc.strerror}") from exc
    if not text:
        raise OptionError(f"the text {path} is empty: leave it out")
    return text
