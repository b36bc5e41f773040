"""The figures of the prerouter: what it hides, and what the options that change results cost in quality."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import demo_model, quality
from .figure import Figure

__all__ = ["FIGURES", "Bench", "open_bench"]


@dataclass(frozen=True)
class Bench:
    """What the figures share."""

    demo: demo_model.Bench


@contextlib.contextmanager
def open_bench(model: Path | None, quick: bool, keep: bool) -> Iterator[Bench]:
    with demo_model.open_bench(None, quick=quick, keep=keep) as demo:
        yield Bench(demo)


def fewer_experts(bench: Bench) -> Iterator[Figure]:
    yield from quality.of_fewer_experts(bench.demo)


def cache_aware(bench: Bench) -> Iterator[Figure]:
    yield from quality.of_cache_aware(bench.demo)


FIGURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    function.__name__: function for function in (fewer_experts, cache_aware)
}
