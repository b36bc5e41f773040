"""Capture what heads are trained on: states, router outputs and experts.

Each FILE is a text of its own, or token ids (.npy). One longer than the
context is cut into several. The model is streamed, so it may be larger than
memory; text goes through as a prompt, whose routing is that of decoding but
for rounding (-ub 1 computes as decoding does). Per token and owner the data
takes 2 d + 2 E bytes; how much that makes is told first.

  moestream train capture -m MODEL.gguf -f text.txt -o data --owners 6-38
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
from ._texts import layers, read_texts

if TYPE_CHECKING:
    from ...train import Capture


def capture(
    *,
    model: str | os.PathLike[str] | None = None,
    hf_repo: str | None = None,
    hf_file: str | None = None,
    file: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    owners: str | None = None,
    ctx_size: int = 512,
    ubatch_size: int = 512,
    threads: int | None = None,
    expert_cache: int | str = "auto",
    kernels: str = "auto",
    reader: str = "auto",
    experts_used: int | None = None,
    load_progress: Callable[[float], None] | None = None,
    on_size: Callable[[int, int], None] = lambda tokens, size_bytes: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Capture:
    """The data of texts in files; what `moestream train capture` does, with the long names of its options.

    Args:
        model: A GGUF file. By default the one that ships with the package.
        hf_repo: Instead of `model`, "user/repo" or "user/repo:quant" on the Hugging Face Hub.
        hf_file: The file in that repository.
        file: Files of text, or of token ids (`.npy`), each a text of its own.
        output: The folder to make.
        owners: Layers to train heads of, like "6-38"; all that can be by default.
        ctx_size: Tokens of the longest text; longer ones are cut.
        ubatch_size: Tokens computed at once at most; 1 computes as decoding does.
        threads: By default one per physical core this process may use.
        expert_cache, kernels, reader, experts_used: As in `moestream.ExpertStreaming`.
        load_progress, on_size, progress: As in `moestream.train.capture`; what they raise breaks off.

    Raises:
        MoestreamError: The options, the model or a file are no good, or experts could not be read.
    """
    from ...train import capture as capture_texts

    require_sizes(ctx_size, ubatch_size, threads)
    wanted = layers(owners)
    texts = read_texts(file)
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
        return capture_texts(
            llm, texts, output, owners=wanted, context=ctx_size, source=source, on_size=on_size, progress=progress
        )


def run(*, output: str, **options: Any) -> int:
    """Runs `capture` for the command line and returns the exit code."""
    if Path(output).exists():
        raise OptionError(f"--output {output}: exists already; name another folder, or remove it")
    require_writable(output)
    started = time.perf_counter()
    try:
        with Interrupt() as interrupt, Progress(interrupt.requested) as progress:

            def told(tokens: int, size_bytes: int) -> None:
                progress.hide()
                print(f"moestream: {tokens:,} tokens will take {format_size(size_bytes)}", file=sys.stderr)

            def captured(done: int, total: int) -> None:
                if interrupt.requested():
                    raise KeyboardInterrupt
                progress.show("capturing", done, total, unit="tokens")

            data = capture(**options, output=output, load_progress=progress.load, on_size=told, progress=captured)
    except KeyboardInterrupt:
        print(f"moestream: interrupted: {output} was not written", file=sys.stderr)
        return INTERRUPTED
    head, seconds = data.header, time.perf_counter() - started
    texts = f"{len(data.starts)} text{'s' if len(data.starts) > 1 else ''}"
    owners = f"owners {head.owners[0]} to {head.owners[-1]}, {len(head.owners)} in all"
    print(f"{output}: {head.tokens:,} tokens of {texts} in {seconds:.1f} s; {owners}; {format_size(head.size_bytes)}")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `capture`. They have the names that they have in `generate`."""
    add_model_arguments(parser)
    parser.add_argument(
        "-f", "--file", metavar="FILE", action="append", required=True, help="a text; may be given several times"
    )
    parser.add_argument("-o", "--output", metavar="DATA", required=True, help="the folder to make")
    parser.add_argument(
        "--owners", metavar="LAYERS", help="layers to train heads of, like 6-38 (default: all that can be)"
    )
    add_text_arguments(parser, ctx_size=512)
