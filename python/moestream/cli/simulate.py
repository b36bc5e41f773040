"""Replay a routing trace through caches, policies and predictors.

No model is needed: it takes seconds, and nothing is read from the disk. Bytes
need the size of an expert (--expert-bytes, or --model to take it from), tokens
per second the time to compute a layer as well (--layer-ms).

  hits     experts in memory when they were wanted, however they came there
  guessed  of these, because a guess was right and in time
  wasted   of the bytes read, those of guesses that were wrong
  bound    of the speed that reading and computing would have if they hid each
           other completely

  moestream simulate text.trace --cache 20%,50% --policy lru,belady
  moestream simulate text.trace -m MODEL.gguf --disk 1GiB --layer-ms 1.2 \\
      --predictor none,recall=0.8 --policy lrfu
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..memory import format_size
from ..simulation import POLICIES, PREDICTORS
from ._output import print_columns, print_json

if TYPE_CHECKING:
    from .. import SimulationResult
    from ..simulation import SimulatedRun


def run(*, json: bool, **options: Any) -> int:
    """Runs `moestream.simulate` for the command line and returns the exit code."""
    from .. import simulate

    result = simulate(**options)
    if json:
        print_json(_as_json(result))
        return 0
    trace = result.trace
    print(f"{trace.model} ({trace.architecture})" if trace.architecture else trace.model)
    print_columns(_facts(result), indent=2)
    print()
    rows = list(_rows(result))
    print_columns(rows, right=[i for i, name in enumerate(rows[0]) if name not in ("policy", "predictor")])
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `simulate`."""
    parser.add_argument("trace", metavar="TRACE", help="the routing trace")
    parser.add_argument(
        "--cache",
        metavar="SIZE|SHARE%|N,..",
        help="caches: bytes like 3GiB, a share of all experts like 20%%, or a number of experts (default: usual shares)",
    )
    parser.add_argument(
        "--policy",
        default="all",
        metavar="NAME,..",
        help=f"some of {', '.join(POLICIES)}, or all; belady knows the future (default: %(default)s)",
    )
    parser.add_argument(
        "--predictor",
        default="none",
        metavar="NAME,..",
        help=f"some of {', '.join(PREDICTORS)}; R of the guesses are right (default: %(default)s)",
    )
    parser.add_argument(
        "--ahead",
        type=int,
        metavar="LAYERS",
        help="how early guesses are made (default: a token's layers; recall: 1)",
    )
    parser.add_argument("-m", "--model", metavar="FILE", help="a GGUF file to take the size of an expert from")
    parser.add_argument("--expert-bytes", metavar="SIZE", help="or that size")
    parser.add_argument("--disk", default="1GiB", metavar="BYTES", help="read in a second (default: %(default)s)")
    parser.add_argument(
        "--layer-ms", type=float, metavar="MS", help="time to compute a layer that is in memory, attention included"
    )
    parser.add_argument(
        "--attention-ms", type=float, metavar="MS", help="of that, before its experts are wanted (default: a third)"
    )
    parser.add_argument(
        "--rest-ms", type=float, default=0.0, metavar="MS", help="time to compute what comes after the last layer"
    )
    parser.add_argument(
        "--skip-tokens",
        type=int,
        default=0,
        metavar="N",
        help="of the trace, tokens at the beginning that only fill the cache and are not counted",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of what is drawn for random and recall (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _facts(result: SimulationResult) -> Iterator[tuple[str, str]]:
    trace = result.trace
    of_a_token = len(trace.layers) * trace.top_k
    skipped = result.skip_tokens
    yield (
        "routing",
        f"{len(trace.tokens) - skipped:,} tokens, {of_a_token} of {len(trace.layers) * trace.n_experts} experts each"
        + (f"; {skipped:,} before them fill the cache" if skipped else ""),
    )
    if trace.synthetic:
        yield "made", f"not recorded from a model: {trace.synthetic}"
    if result.expert_bytes is not None:
        token = format_size(of_a_token * result.expert_bytes)
        yield (
            "experts",
            f"{format_size(result.expert_bytes)} each, {token} a token; {format_size(result.disk)}/s from the disk",
        )
    if result.layer_ms is not None:
        token_ms = len(trace.layers) * result.layer_ms + result.rest_ms
        yield (
            "compute",
            f"{result.layer_ms:.2f} ms a layer, {result.attention_ms:.2f} ms of it attention"
            + (f": {1000 / token_ms:.1f} tok/s from memory" if token_ms else ""),
        )


def _rows(result: SimulationResult) -> Iterator[list[str]]:
    guesses = any(run.predictor != "none" for run in result.runs)
    yield [name for name, shown in _columns(result, guesses) if shown]
    last = None
    for run in result.runs:
        cells = _cells(run)
        if run.cache_experts == last:
            cells["cache"] = cells["experts"] = ""
        last = run.cache_experts
        yield [cells[name] for name, shown in _columns(result, guesses) if shown]


def _columns(result: SimulationResult, guesses: bool) -> list[tuple[str, bool]]:
    """All that there are, with whether they are shown."""
    sized, timed = result.expert_bytes is not None, result.layer_ms is not None
    return [
        ("cache", True),
        ("experts", True),
        ("policy", True),
        ("predictor", guesses),
        ("hits", True),
        ("guessed", guesses),
        ("read/token", sized),
        ("wasted", guesses),
        ("tok/s", timed),
        ("bound", timed),
    ]


def _cells(run: SimulatedRun) -> dict[str, str]:
    read = run.misses + run.guessed
    cells = {
        "cache": f"{run.cache_share:.0%}",
        "experts": str(run.cache_experts),
        "policy": run.policy,
        "predictor": run.predictor,
        "hits": f"{run.hit_rate:.1%}",
        "guessed": f"{run.useful / run.wanted:.1%}",
        "wasted": f"{run.wasted / read:.1%}" if read else "-",
    }
    if run.bytes_per_token is not None:
        cells["read/token"] = format_size(run.bytes_per_token)
    if run.tokens_per_s is not None and run.limit_tokens_per_s is not None:
        cells["tok/s"] = f"{run.tokens_per_s:.2f}"
        cells["bound"] = f"{run.tokens_per_s / run.limit_tokens_per_s:.0%}"
    return cells


def _as_json(result: SimulationResult) -> dict[str, Any]:
    trace = result.trace
    about = ("model", "model_hash", "architecture", "n_experts", "top_k", "source", "tool", "synthetic")
    options = ("expert_bytes", "disk", "layer_ms", "attention_ms", "rest_ms", "skip_tokens")
    return {
        **{name: getattr(trace, name) for name in about},
        "layers": list(trace.layers),
        **{name: getattr(result, name) for name in options},
        "runs": [run.as_dict() for run in result.runs],
    }
