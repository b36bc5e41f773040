"""Tokens a second at one cache size: a routing replayed on a machine's numbers (`moestream.simulate`), once it is warm."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..simulation import SimulatedRun, simulate
from .machine import Costs, Machine
from .routing import Routing
from .shape import ModelShape

__all__ = ["Forecast", "forecast"]

POLICY = "lrfu"
LOOKAHEAD_RECALL = 0.8  # one layer ahead (docs/reading-ahead.md)
_TRIED_FROM = 0.03  # of the time is waiting: where there is less the engine does not guess
_COMPUTE_ERROR = 0.10
_ASSUMED_COMPUTE_ERROR = 0.40
_ROUTING_ERROR = 0.20  # of the misses, where the routing is not this model's
_STRETCH_TOKENS = 32  # tokens near each other miss alike
_TEXT_TOKENS = 256  # of a text that may be luckier or not
_DRAWS = 400


@dataclass(frozen=True)
class Forecast:
    """What a cache gives, when it is warm.

    Attributes:
        cache_experts, cache_bytes, cache_share: Its size.
        experts_used: Of a layer, for a token.
        hit_rate: Share of experts found in memory when nothing is read ahead.
        read_bytes: Of a token.
        disk: Bytes per second at which they come.
        read_s, compute_s: Of a token.
        wait_s: Of a token: computation blocked on experts that are read on demand.
        on_demand_tokens_per_s: With `prefetch="off"`.
        ahead: What reading ahead multiplies that by: at least, and at most.
        tokens_per_s: With `prefetch="auto"`; low and high as the uncertainties have it.
    """

    cache_experts: int
    cache_bytes: int
    cache_share: float
    experts_used: int
    hit_rate: float
    read_bytes: float
    disk: float
    read_s: float
    compute_s: float
    wait_s: float
    on_demand_tokens_per_s: float
    ahead: tuple[float, float]
    tokens_per_s: float
    low: float
    high: float

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return asdict(self)


def forecast(shape: ModelShape, machine: Machine, routing: Routing, cache_experts: int, *, depth: int) -> Forecast:
    """What a cache of so many experts gives after `depth` tokens of context. The experts used are those of the routing."""
    twice, warm = routing.twice(), len(routing.trace.tokens)
    top_k = routing.trace.top_k
    only_hits = simulate(twice, cache=cache_experts, policy=POLICY, skip_tokens=warm).runs[0]
    missed = only_hits.misses / only_hits.tokens
    in_a_layer = missed / shape.moe_layers
    at_once = in_a_layer / -math.expm1(-in_a_layer) if in_a_layer else 1.0  # in a layer that misses any
    read_bytes = missed * shape.slot_bytes
    rate = machine.disk_rate(shape, at_once)
    costs = machine.costs(shape, depth=depth, top_k=top_k, read_bytes=read_bytes)

    def run(disk: float, predictor: str = "none", ahead: int | None = None) -> SimulatedRun:
        return _run(twice, warm, shape, costs, cache_experts, disk, predictor, ahead)

    usual = run(rate.usual)
    demand_s = _mean_s(usual)
    gains = (1.0, 1.0)
    if shape.routed_before_attention:
        known = max(1.0, demand_s / _mean_s(run(rate.usual, "oracle", 0)))
        gains = (known, known)
    elif usual.wait_s and usual.wait_s >= _TRIED_FROM * usual.seconds:
        gains = (1.0, max(1.0, demand_s / _mean_s(run(rate.usual, f"recall={LOOKAHEAD_RECALL}", 1))))
    token_s = demand_s / math.sqrt(gains[0] * gains[1])
    slower, faster = _errors(machine, routing, costs, usual, _mean_s(run(rate.low)) / demand_s - 1 if missed else 0.0)
    return Forecast(
        cache_experts=cache_experts,
        cache_bytes=round(cache_experts * shape.slot_bytes),
        cache_share=cache_experts / (shape.moe_layers * shape.experts),
        experts_used=top_k,
        hit_rate=only_hits.hit_rate,
        read_bytes=read_bytes,
        disk=rate.usual,
        read_s=read_bytes / rate.usual,
        compute_s=costs.token_s,
        wait_s=(usual.wait_s or 0.0) / usual.tokens,
        on_demand_tokens_per_s=1 / demand_s,
        ahead=gains,
        tokens_per_s=1 / token_s,
        low=1 / (token_s * (1 + math.hypot(slower, math.sqrt(gains[1] / gains[0]) - 1))),
        high=1 / token_s * (1 + math.hypot(faster, math.sqrt(gains[1] / gains[0]) - 1)),
    )


def _run(
    trace: Any,
    warm: int,
    shape: ModelShape,
    costs: Costs,
    cache_experts: int,
    disk: float,
    predictor: str,
    ahead: int | None,
) -> SimulatedRun:
    return simulate(
        trace,
        cache=cache_experts,
        policy=POLICY,
        predictor=predictor,
        ahead=ahead,
        expert_bytes=math.ceil(shape.slot_bytes),
        disk=max(1, round(disk)),
        layer_ms=costs.layer_s * 1e3,
        attention_ms=costs.attention_s * 1e3,
        rest_ms=costs.rest_s * 1e3,
        skip_tokens=warm,
    ).runs[0]


def _mean_s(run: SimulatedRun) -> float:
    assert run.seconds is not None
    return run.seconds / run.tokens


def _errors(
    machine: Machine, routing: Routing, costs: Costs, run: SimulatedRun, slow_disk: float
) -> tuple[float, float]:
    """By what share of its time a token may be slower, and faster: of all uncertainties, which do not know of each other."""
    taken = _mean_s(run)
    computing = (_ASSUMED_COMPUTE_ERROR if machine.assumed else _COMPUTE_ERROR) * costs.token_s / taken
    waiting = 0.0 if routing.own else _ROUTING_ERROR * (run.wait_s or 0.0) / run.tokens / taken
    slower, faster = _of_texts(run)
    both = (computing, waiting)
    return math.hypot(slower, slow_disk, *both), math.hypot(faster, *both)


def _of_texts(run: SimulatedRun) -> tuple[float, float]:
    """How much slower and faster than the mean one text in ten is, by drawing stretches of the routing."""
    n = max(1, len(run.token_s) // _STRETCH_TOKENS)
    stretches = np.array([part.mean() for part in np.array_split(np.array(run.token_s), n)])
    draw = np.random.default_rng(0)
    texts = stretches[draw.integers(n, size=(_DRAWS, max(1, _TEXT_TOKENS // _STRETCH_TOKENS)))].mean(axis=1)
    fast, slow = np.quantile(texts, [0.1, 0.9]) / stretches.mean()
    return max(0.0, float(slow) - 1), max(0.0, 1 - float(fast))
