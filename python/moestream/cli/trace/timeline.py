"""What `moestream trace` does without a command."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._timeline_files import require_suffix
from ...memory import format_size
from .._interrupt import INTERRUPTED, Interrupt
from .._model import add_model_arguments
from .._output import Progress, print_columns, print_json, require_writable
from .._summary import generation_as_json
from ..generate import (
    Generation,
    add_running_arguments,
    add_sampling_arguments,
    add_streaming_arguments,
    add_text_arguments,
    generate,
)

if TYPE_CHECKING:
    from ... import LayerTimes, Llama, Timeline, TimelineSummary

_TIMES = ("attention", "prefetch", "bubble", "experts", "wait")
_READS = ("demand", "useful", "late", "wasted")


def trace(*, n_predict: int = 30, **options: Any) -> tuple[Generation, Timeline]:
    """Writes a text as `generate` does, and gives the timeline of it besides.

    Args:
        n_predict: Tokens to write at most.
        **options: As of `moestream.cli.generate.generate`.

    Raises:
        MoestreamError: As of `generate`.
    """
    timelines: list[Timeline] = []

    @contextlib.contextmanager
    def watch(llm: Llama) -> Iterator[None]:
        with llm.record_timeline() as timeline:
            timelines.append(timeline)
            yield

    generation = generate(n_predict=n_predict, **options, watch=watch)
    return generation, timelines[0]


def run(*, output: list[str], json: bool, **options: Any) -> int:
    """Runs `trace` for the command line, writes the timeline, and returns the exit code."""
    for path in output:
        require_suffix(Path(path))
        require_writable(path)
    with Interrupt() as interrupt, Progress(interrupt.requested) as progress:
        generation, timeline = trace(
            **options,
            load_progress=progress.load,
            prompt_progress=progress.prompt,
            should_stop=interrupt.requested,
        )
    if generation.error is not None:
        raise generation.error
    written = [_write(timeline, path) for path in output]
    decode = timeline.summary("decode")
    phase, summary = ("decode", decode) if decode.evaluations else ("prompt", timeline.summary("prompt"))
    if json:
        told = dataclasses.asdict(summary) | {
            "tokens_per_s": summary.tokens_per_s,
            "rest_s": summary.rest_s,
            "dropped": timeline.dropped,
        }
        about = generation_as_json(generation, options)
        print_json({**about, "timeline": {"phase": phase, **told}, "output": output})
    else:
        _print(timeline, phase, summary)
        print(*written, sep="\n")
    return INTERRUPTED if generation.finish_reason == "interrupted" else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `trace`: those of `generate`, and where to write."""
    add_model_arguments(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        action="append",
        required=True,
        help="what to write: .html, .json or .npz; may be given several times",
    )
    add_text_arguments(parser, n_predict=30)
    add_sampling_arguments(parser)
    add_running_arguments(parser)
    add_streaming_arguments(parser)


def _write(timeline: Timeline, path: str) -> str:
    started = time.perf_counter()
    timeline.write(path)
    seconds = time.perf_counter() - started
    return f"{path}: {len(timeline.events):,} events, {format_size(os.path.getsize(path))} in {seconds:.1f} s"


def _print(timeline: Timeline, phase: str, summary: TimelineSummary) -> None:
    rows = [("layer", "attention", "prefetch", "bubble", "experts", "waits", "hidden", *_READS)]
    rows += [_row(str(layer.layer), layer) for layer in summary.layers]
    print_columns([*rows, _row("mean", summary.total)], right=range(len(rows[0])))
    print()
    print_columns(_facts(timeline, phase, summary))
    print()
    if timeline.dropped:
        print(
            f"moestream: the first {timeline.dropped:,} events are missing, for which there was no room: "
            "give a smaller -n",
            file=sys.stderr,
        )


def _row(name: str, times: LayerTimes) -> tuple[str, ...]:
    """Means of a window: times in milliseconds, experts hidden, and reads."""
    n = times.windows
    if n == 0:
        return (name, *["-"] * (len(_TIMES) + 1 + len(_READS)))
    cells = [f"{getattr(times, f'{what}_s') / n * 1e3:.3f} ms" for what in _TIMES]
    return (name, *cells, f"{times.hidden / n:.2f}", *[f"{times.reads[outcome] / n:.2f}" for outcome in _READS])


def _facts(timeline: Timeline, phase: str, summary: TimelineSummary) -> Iterator[tuple[str, str]]:
    total, tokens = summary.total, summary.tokens
    if not tokens or summary.tokens_per_s is None:
        yield phase, "nothing was recorded"
        return
    yield phase, f"{tokens} tokens at {summary.tokens_per_s:.2f} tok/s, {summary.wall_s / tokens * 1e3:.2f} ms each"
    parts = {
        "attention": total.attention_s,
        "router": total.router_s,
        "experts": total.experts_s,
        "waiting": total.wait_s,
        "guessing": summary.predict_s,
        "other": summary.other_s,
        "rest": summary.rest_s,
    }
    yield "time", ", ".join(f"{name} {seconds / summary.wall_s:.0%}" for name, seconds in parts.items())
    of_each = ", ".join(f"{name} {format_size(size // tokens)}" for name, size in total.read_bytes.items() if size)
    yield "read", f"{of_each} a token" if of_each else "nothing"
    if summary.reading_s:
        rate = int(sum(total.read_bytes.values()) / summary.reading_s)
        yield "disk", f"{summary.reading_s / summary.wall_s:.0%} of the time, {format_size(rate)}/s while reading"
    yield "with", ", ".join(f"{name} {value}" for name, value in timeline.settings.items() if name != "cache")
