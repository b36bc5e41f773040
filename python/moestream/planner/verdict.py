"""A plan in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..memory import format_size
from .forecast import Forecast

if TYPE_CHECKING:
    from .planning import Plan

__all__ = ["rate", "span", "verdict"]

_LIMITS = {
    "disk": "the disk is the limit",
    "both": "disk and processor are the limit alike",
    "processor": "the processor is the limit",
}


def verdict(plan: Plan) -> Iterator[str]:
    """Sentences: does it run, how fast, what is in the way, what would help."""
    chosen = plan.chosen
    if chosen is None:
        wanted = plan.memory.available_bytes + plan.missing_bytes
        yield (
            f"Does not run: with the smallest cache it wants {format_size(wanted)} of memory, and "
            f"{format_size(plan.missing_bytes)} of that is missing."
        )
    else:
        yield _runs(plan, chosen)
        if not plan.fits(chosen):
            missing = plan.memory.wanted_bytes(chosen.cache_bytes) - plan.memory.available_bytes
            yield f"This cache does not fit: {format_size(missing)} of memory is missing."
    if plan.fewer_experts is not None:
        yield _with_fewer(plan, plan.fewer_experts)


def _runs(plan: Plan, chosen: Forecast) -> str:
    if chosen.cache_share == 1:
        cache = f"with every expert in memory ({format_size(chosen.cache_bytes)})"
    else:
        cache = f"with a {format_size(chosen.cache_bytes)} cache ({chosen.cache_share:.0%} of the experts)"
    assert plan.limit is not None
    faster = ""
    if plan.faster_disk is not None:
        disk, tokens_per_s = plan.faster_disk
        faster = f"; a {rate(disk)} SSD would make it {speed(tokens_per_s)}"
    return f"Runs at {span(chosen)} tok/s {cache}; {_LIMITS[plan.limit]}{faster}."


def _with_fewer(plan: Plan, fewer: Forecast) -> str:
    runs = "it runs" if plan.chosen is None else "it is faster"
    return (
        f"With --experts-used {fewer.experts_used} instead of {plan.shape.top_k} {runs}: {span(fewer)} tok/s with a "
        f"{format_size(fewer.cache_bytes)} cache. What the model says changes then, for the worse: fewer experts than it was "
        "trained with lose quality, steeply where there are few."
    )


def span(found: Forecast) -> str:
    """ "6.1-8.2": as precise as the lower one needs."""
    low, high = speed(found.low), speed(found.high)
    return low if low == high else f"{low}-{high}"


def speed(tokens_per_s: float) -> str:
    return (
        f"{tokens_per_s:.0f}"
        if tokens_per_s >= 10
        else f"{tokens_per_s:.1f}"
        if tokens_per_s >= 1
        else f"{tokens_per_s:.2f}"
    )


def rate(bytes_per_s: float) -> str:
    """ "5 GB/s" """
    return f"{bytes_per_s / 1e9:.3g} GB/s"
