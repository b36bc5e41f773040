"""The routing that a forecast is made with: a recorded one, or one made up with published locality."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass

import numpy as np

from .._locality import WINDOW, routing_statistics
from ..errors import OptionError
from ..synthesis import PRESETS, transferred_trace
from ..trace import RoutingTrace
from .shape import ModelShape

__all__ = ["Routing", "routing_for"]

_MADE_TOKENS = 800
_MOST_ACCESSES = 1_000_000


@dataclass(frozen=True)
class Routing:
    """A routing of a model's shape.

    Attributes:
        trace: The routing, once.
        source: Where it is from, in words.
        own: It was recorded from this model, not made up or another's.
    """

    trace: RoutingTrace
    source: str
    own: bool

    def twice(self) -> RoutingTrace:
        """The routing and once more: the first time fills a cache."""
        trace = self.trace
        again = {name: np.concatenate([getattr(trace, name)] * 2) for name in ("tokens", "experts", "weights")}
        return dataclasses.replace(trace, **again)

    def with_experts(self, used: int) -> Routing:
        """The routing of a model told to use fewer experts: those that its routers name first."""
        first = {name: np.ascontiguousarray(getattr(self.trace, name)[:, :, :used]) for name in ("experts", "weights")}
        return dataclasses.replace(self, trace=dataclasses.replace(self.trace, **first))


def routing_for(shape: ModelShape, trace: str | os.PathLike[str] | None = None) -> Routing:
    """The routing in the file `trace`, or without one a made-up one.

    Raises:
        TraceError: The file is no sound trace.
        OptionError: It is of another shape; or a token uses all experts, so that there is nothing to choose.
    """
    return _recorded(shape, trace) if trace is not None else _made(shape)


def _recorded(shape: ModelShape, path: str | os.PathLike[str]) -> Routing:
    trace = RoutingTrace.read(path)
    found, wanted = (len(trace.layers), trace.n_experts, trace.top_k), (shape.moe_layers, shape.experts, shape.top_k)
    if found != wanted:
        raise OptionError(
            f"--trace={os.fspath(path)}: is of {found[0]} layers with {found[2]} of {found[1]} experts, and {shape.name} has "
            f"{wanted[0]} with {wanted[2]} of {wanted[1]}; give a trace of this model, or leave it out"
        )
    longest = max(1, _MOST_ACCESSES // (shape.moe_layers * shape.top_k))
    kept = {name: getattr(trace, name)[:longest] for name in ("tokens", "experts", "weights")}
    shorter = dataclasses.replace(trace, **kept, starts=trace.starts[trace.starts < longest])
    source = f"{os.path.basename(path)}: {len(shorter.tokens):,} tokens of {trace.model}"
    return Routing(shorter, source, own=not trace.synthetic)


def _made(shape: ModelShape) -> Routing:
    if shape.top_k == shape.experts:
        raise OptionError(
            f"{shape.name} uses all {shape.experts} experts of a layer for every token: no cache can save reading them"
        )
    like = _nearest(shape)
    trace = transferred_trace(
        like=like, layers=shape.moe_layers, experts=shape.experts, top_k=shape.top_k, tokens=_MADE_TOKENS, seed=1
    )
    found = routing_statistics(trace)
    source = (
        f"made up like {like}: {found.reused_last:.0%} of a token's experts used by the next one too, "
        f"{found.reused_window:.0%} within {WINDOW} (docs/trace.md has the source)"
    )
    return Routing(trace, source, own=False)


def _nearest(shape: ModelShape) -> str:
    """The preset whose numbers of experts are nearest in proportion; for SmallThinker one of its own."""

    def distance(name: str) -> float:
        preset = PRESETS[name]
        return abs(math.log(preset.experts / shape.experts)) + abs(math.log(preset.top_k / shape.top_k))

    own = [name for name in PRESETS if name.startswith("smallthinker")]
    return min(own if shape.architecture == "smallthinker" else PRESETS, key=distance)
