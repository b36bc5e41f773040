"""Merge a LoRA into a model's weights, and measure what that loses.

Weights are quantised again as they were, and a change that is small against
their steps is rounded away. What is left is measured on a text: the share of
the LoRA's change of the logits that the merged model makes. Applied unmerged
(--lora, or a sidecar) all of it is there, and experts are streamed even so.

  moestream sidecar merge -m MODEL.gguf --lora adapter.gguf -o MERGED.gguf
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from ...errors import OptionError
from ...memory import format_size
from ...models import validation_text
from .._interrupt import Interrupt
from .._output import Progress, print_json


def run(*, file: str | None, json: bool, **options: Any) -> int:
    """Runs `moestream.sidecar.merge` for the command line and returns the exit code."""
    from ...sidecar import merge

    text = validation_text() if file is None else _text(file)
    with Interrupt() as interrupt, Progress(interrupt.requested) as bar:

        def show(what: str, share: float) -> None:
            if interrupt.requested():
                raise KeyboardInterrupt
            bar.show(what, share, 1.0)

        merged = merge(text=text, progress=show, **options)
    if json:
        print_json({**dataclasses.asdict(merged), "path": str(merged.path)})
        return 0
    print(f"{merged.path}: {len(merged.tensors)} matrices merged, {format_size(merged.path.stat().st_size)}")
    print(
        f"of what the LoRA changes in the logits of {merged.tokens} tokens {merged.survives:.0%} survives; the merged model "
        f"changes them {merged.size:.2f} times as much, and agrees in {merged.top_token:.0%} of the likeliest tokens"
    )
    print("unmerged, by --lora or in a sidecar, all of it is there")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `merge`."""
    parser.add_argument("-m", "--model", metavar="BASE", required=True, help="the stock model")
    parser.add_argument(
        "--lora", metavar="FILE", required=True, help="an adapter GGUF, a PEFT folder, safetensors, or a sidecar"
    )
    parser.add_argument("-o", "--output", metavar="OUT", required=True, help="the model to write")
    parser.add_argument("--alpha", type=float, metavar="N", help="of a LoRA whose file does not say it")
    parser.add_argument("--scale", type=float, default=1.0, metavar="N", help="of the LoRA (default: 1)")
    parser.add_argument("-f", "--file", metavar="FILE", help="the text to measure on (default: one that is shipped)")
    parser.add_argument("-n", "--tokens", type=int, default=256, metavar="N", help="of it at most (default: 256)")
    parser.add_argument("-t", "--threads", type=int, metavar="N", help="threads (default: the physical cores)")
    parser.add_argument("--force", action="store_true", help="replace the output if it is there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as exc:
        raise OptionError(f"cannot read the text {path}: {exc.strerror}") from exc
