"""What `moestream generate` tells about a generation: in lines for people, or as JSON."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..memory import format_size
from ._output import print_columns, versions

if TYPE_CHECKING:
    from ..stats import ExpertStats
    from .generate import Generation

_WIDTH = 96
_LABEL_WIDTH = 7
_ENDS = {
    "stop": "the model ended the text",
    "length": "as many tokens as asked for (-n)",
    "interrupted": "interrupted",
}


def print_summary(generation: Generation) -> None:
    """Prints what the generation took in time, memory and reading to stderr."""
    print(file=sys.stderr)
    print_columns(_phases(generation), right=range(1, 7), file=sys.stderr)
    print(file=sys.stderr)
    for label, text in _facts(generation):
        for number, line in enumerate(textwrap.wrap(text, _WIDTH - _LABEL_WIDTH - 2)):
            print(f"{label if number == 0 else '':<{_LABEL_WIDTH}}  {line}", file=sys.stderr)


def generation_as_json(generation: Generation, options: Mapping[str, Any]) -> dict[str, Any]:
    """The same as one JSON object, with the options it ran under and the versions of all that matters."""
    return {
        "model": str(generation.model),
        **made_as_json(generation),
        "options": {**options, "seed": generation.seed, "threads": generation.threads},
        "versions": versions(),
    }


def made_as_json(generation: Generation) -> dict[str, Any]:
    """What was made and what it took, as JSON."""
    return {
        "text": generation.text,
        "tokens": list(generation.tokens),
        "finish_reason": generation.finish_reason,
        "error": None if generation.error is None else str(generation.error),
        "timings": {
            "load_s": generation.load_s,
            "prompt_tokens": generation.prompt_tokens,
            "prompt_s": generation.prompt_s,
            "prompt_tokens_per_s": generation.prompt_tokens_per_s,
            "first_token_s": generation.first_token_s,
            "decode_tokens": generation.decode_tokens,
            "decode_s": generation.decode_s,
            "decode_tokens_per_s": generation.decode_tokens_per_s,
        },
        "memory": {
            "rss_before_bytes": generation.rss_before_bytes,
            "peak_rss_bytes": generation.peak_rss_bytes,
            "bytes_on_disk": generation.bytes_on_disk,
        },
        "experts": {
            "prompt": generation.prompt_stats.as_dict(),
            "decode": generation.decode_stats.as_dict(),
            "since_load": generation.stats.as_dict(),
        }
        if generation.stats is not None
        else None,
    }


def _phases(generation: Generation) -> Iterator[tuple[str, ...]]:
    streamed = generation.stats is not None
    yield (" " * _LABEL_WIDTH, "tokens", "time", "speed", *(("hit rate", "read/token", "waiting") if streamed else ()))
    for label, tokens, seconds, stats in (
        ("prompt", generation.prompt_tokens, generation.prompt_s, generation.prompt_stats),
        ("decode", generation.decode_tokens, generation.decode_s, generation.decode_stats),
    ):
        speed = f"{tokens / seconds:.2f} tok/s" if tokens else "-"
        row = (label, str(tokens), _duration(seconds), speed)
        if stats is not None:
            hit_rate = f"{stats.hit_rate:.1%}" if stats.hits + stats.misses else "-"
            read = f"{stats.bytes_read / tokens / 2**20:.2f} MiB" if tokens else "-"
            row += (hit_rate, read, _duration(stats.wait_s))
        yield row


def _facts(generation: Generation) -> Iterator[tuple[str, str]]:
    stats = generation.stats
    resident, on_disk = format_size(generation.peak_rss_bytes), format_size(generation.bytes_on_disk)
    yield "memory", f"{resident} peak RSS, {on_disk} on disk"
    threads = f"{generation.threads} thread{'s' if generation.threads > 1 else ''}"
    if stats is None:
        yield "experts", "not streamed: the whole model was loaded"
        yield "compute", threads
    else:
        experts = format_size(stats.expert_bytes)
        if stats.slots_total:
            used = f"{stats.slots_used} of {stats.slots_total} slots used"
            yield "experts", f"{format_size(stats.cache_bytes)} of cache for {experts} of experts, {used}"
        else:
            yield "experts", f"{experts}, cached by the kernel"
        access = "direct I/O" if stats.direct else "through the page cache"
        speed = f" at {format_size(stats.read_bandwidth)}/s" if stats.bytes_read else ""
        yield "reading", f"{stats.reader}, {access}; {format_size(stats.bytes_read)} read{speed}"
        if stats.head_layers:
            yield "heads", heads_told(generation.decode_stats or stats)
        if stats.guessed:
            outcomes = f"{stats.useful} there in time, {stats.late} on their way, {stats.wasted} in vain"
            yield "ahead", f"{stats.guessed} experts asked for before they were wanted: {outcomes}"
        yield "compute", f"{stats.kernels} kernels, {threads}"
        if generation.decode_stats is not None and generation.decode_stats.tokens:
            yield "token", _parts(generation.decode_stats)
    first_token_s = generation.first_token_s
    first_token = "" if first_token_s is None else f", then {_duration(first_token_s)} to the first token"
    yield "load", f"{_duration(generation.load_s)}{first_token}"
    yield "end", how_it_ended(generation)
    if stats is not None:
        for note in stats.notes:
            yield "note", note


def _parts(stats: ExpertStats) -> str:
    """Where the time of a token goes, in hundredths."""
    parts = {
        "attention": stats.attention_s,
        "router": stats.router_s,
        "experts": stats.compute_s,
        **({"heads": stats.heads_s} if stats.heads_s else {}),
        "waiting": stats.wait_s,
        "other": stats.other_s,
    }
    whole = sum(parts.values())
    return ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in parts.items())


def heads_told(stats: ExpertStats) -> str:
    """What heads do, what that cost in these tokens, and how many experts were dropped for it, which is none."""
    what = "choose the experts of" if stats.prerouter == "route" else "say ahead what is chosen in"
    told = f"{what} {stats.head_layers} layer{'s' if stats.head_layers > 1 else ''}"
    if not stats.heads_bytes:
        return f"{told}, but no token came by itself"
    cost = f"{stats.heads_s / stats.tokens * 1e3:.3f} ms and {format_size(stats.heads_bytes // stats.tokens)} of weights a token"
    return f"{told}: {cost}; {stats.dropped} experts dropped"


def how_it_ended(generation: Generation) -> str:
    """Why the text is no longer."""
    if generation.finish_reason != "context":
        return _ENDS[generation.finish_reason]
    if generation.context_tokens == generation.trained_tokens:
        return f"the context is full: the model was trained with {generation.trained_tokens} tokens"
    return "the context is full (-c makes it larger)"


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
