"""Show what a routing trace holds and how local its routing is.

The columns of the table of layers:
  least, most  use of the least and the most used expert; 1 is a fair share
  <0.2         experts that get less than 0.2 of a fair share
  balance      entropy of the use: 100% is perfectly even
  last 1       share of a token's experts that the token before it used too
  last 8       share that one of the 8 tokens before it used
The row "chance" is what reuse would be at this load if tokens chose
independently. The LRU cache is one for all layers, as moestream's is, empty at
first, and sees the tokens one by one.

  moestream trace show text.trace
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...memory import format_size
from .._output import print_columns, print_json
from ..inspect import layer_ranges

if TYPE_CHECKING:
    from ... import RoutingStatistics, RoutingTrace


def show(*, file: str | os.PathLike[str]) -> tuple[RoutingTrace, RoutingStatistics]:
    """A trace and its statistics; what `moestream trace show` prints.

    Raises:
        TraceError: The file is no sound routing trace.
    """
    from ... import RoutingTrace, routing_statistics

    trace = RoutingTrace.read(file)
    return trace, routing_statistics(trace)


def run(*, json: bool, **options: Any) -> int:
    """Runs `show` for the command line and returns the exit code."""
    trace, statistics = show(**options)
    size_bytes = Path(options["file"]).stat().st_size
    if json:
        print_json(_as_json(trace, statistics, size_bytes))
        return 0
    print(f"{trace.model} ({trace.architecture})" if trace.architecture else trace.model)
    print_columns(_facts(trace, size_bytes), indent=2)
    print()
    print_columns(_layers(statistics), right=range(7))
    print()
    print_columns(_caches(statistics), right=range(3))
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `show`."""
    parser.add_argument("file", metavar="FILE", help="the trace")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _facts(trace: RoutingTrace, size_bytes: int) -> Iterator[tuple[str, str]]:
    n_texts = len(trace.starts)
    yield "experts", f"{trace.n_experts} in each of layers {layer_ranges(trace.layers)}, {trace.top_k} used for a token"
    texts = f"{len(trace.tokens):,} tokens in {n_texts:,} text{'s' if n_texts > 1 else ''}"
    yield "text", f"{texts}, from {trace.source}" if trace.source else texts
    if trace.synthetic:
        yield "made", f"by {trace.tool}, not recorded from a model: {trace.synthetic}"
    else:
        yield "made", f"by {trace.tool}, {trace.tokens_at_once} token{'s' if trace.tokens_at_once > 1 else ''} at once"
    if trace.model_hash:
        yield "model", f"{trace.model_hash[:16]} (start of its hash)"
    yield "size", f"{format_size(size_bytes)}, {size_bytes / len(trace.tokens):.1f} bytes a token"


def _layers(statistics: RoutingStatistics) -> Iterator[tuple[str, ...]]:
    yield "layer", "least", "most", "<0.2", "balance", "last 1", "last 8"
    for layer in statistics.layers:
        yield (
            str(layer.layer),
            f"{min(layer.load):.2f}",
            f"{max(layer.load):.2f}",
            str(layer.starved),
            _percent(layer.entropy),
            _percent(layer.reused_last),
            _percent(layer.reused_window),
        )
    if len(statistics.layers) > 1:
        reused = _percent(statistics.reused_last), _percent(statistics.reused_window)
        yield ("mean", "", "", "", "", *reused)
    yield "chance", "", "", "", "", _percent(statistics.chance_last), _percent(statistics.chance_window)


def _caches(statistics: RoutingStatistics) -> Iterator[tuple[str, ...]]:
    yield "cache", "experts", "LRU hits"
    for cache in statistics.lru:
        share = f"{cache.share:.0%}"
        if cache.holds_a_token:
            yield share, str(cache.experts), _percent(cache.hit_rate)
        else:
            yield share, str(cache.experts), "-", "cannot hold the experts of one token"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def _as_json(trace: RoutingTrace, statistics: RoutingStatistics, size_bytes: int) -> dict[str, Any]:
    about = (
        "model",
        "model_hash",
        "architecture",
        "n_experts",
        "top_k",
        "source",
        "tool",
        "tokens_at_once",
        "synthetic",
    )
    return {
        **{name: getattr(trace, name) for name in about},
        "size_bytes": size_bytes,
        "starts": trace.starts.tolist(),
        "statistics": statistics.as_dict(),
    }
