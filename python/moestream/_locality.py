"""How local the routing of a trace is: load balance, experts used again, hit rates of an LRU cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import OptionError
from .trace import RoutingTrace

__all__ = ["LayerRouting", "LruHitRate", "RoutingStatistics", "routing_statistics"]

WINDOW = 8
CACHED_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
STARVED = 0.2


@dataclass(frozen=True)
class LayerRouting:
    """The routing of one layer. A fair share is what each expert would get if all were used alike.

    Attributes:
        layer: Its number in the model.
        load: What each expert got, in fair shares: 1.0 is fair, 0.0 never used.
        entropy: Of the load, as a share of that of fair load: 1.0 is perfect balance, 0.0 always the same expert.
        reused_last: Share of a token's experts that the token before it in the text used as well.
        reused_window: Share that one of the WINDOW tokens before it used.
        chance_last: What `reused_last` would be if tokens chose independently of each other, with the same load.
        chance_window: The same of `reused_window`.
    """

    layer: int
    load: tuple[float, ...]
    entropy: float
    reused_last: float
    reused_window: float
    chance_last: float
    chance_window: float

    @property
    def starved(self) -> int:
        """Experts that get less than STARVED of their fair share."""
        return sum(share < STARVED for share in self.load)


@dataclass(frozen=True)
class LruHitRate:
    """The hit rate of a cache that holds `experts`, `share` of all, and evicts the least recently used.

    `holds_a_token` is False if it cannot hold the experts of one token, in which case moestream refuses it.
    """

    share: float
    experts: int
    hit_rate: float
    holds_a_token: bool


@dataclass(frozen=True)
class RoutingStatistics:
    """What :func:`routing_statistics` finds in a trace.

    Attributes:
        tokens: Of all texts.
        texts: Their number.
        experts: Of all layers together.
        used: Of these, how many were used at all: as many misses has even a cache that holds all.
        reused_last, reused_window, chance_last, chance_window: As in :class:`LayerRouting`, mean of the layers. NaN
            where no text has two tokens.
        lru: Hit rates by cache size.
    """

    tokens: int
    texts: int
    experts: int
    used: int
    layers: tuple[LayerRouting, ...]
    lru: tuple[LruHitRate, ...]

    @property
    def reused_last(self) -> float:
        return self._mean("reused_last")

    @property
    def reused_window(self) -> float:
        return self._mean("reused_window")

    @property
    def chance_last(self) -> float:
        return self._mean("chance_last")

    @property
    def chance_window(self) -> float:
        return self._mean("chance_window")

    def _mean(self, name: str) -> float:
        return float(np.mean([getattr(layer, name) for layer in self.layers]))

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON: what is not defined is None."""
        value = dataclasses.asdict(self)
        for layer, described in zip(value["layers"], self.layers, strict=True):
            layer["starved"] = described.starved
        for name in ("reused_last", "reused_window", "chance_last", "chance_window"):
            value[name] = getattr(self, name)
        return _without_nan(value)


def routing_statistics(trace: RoutingTrace, *, cached_shares: Sequence[float] = CACHED_SHARES) -> RoutingStatistics:
    """Load balance, reuse and LRU hit rates of a trace.

    The cache is one for all layers, as moestream's is, empty at first and kept from text to text. It sees the tokens one
    by one, as decoding does; the experts of a token in one layer are asked for together, so none of them evicts another.

    Args:
        trace: The routing.
        cached_shares: Cache sizes, as shares of all experts.

    Raises:
        OptionError: A share that is not within 0 and 1.
    """
    for share in cached_shares:
        if not 0 < share <= 1:
            raise OptionError(f"cached_shares: {share!r} is no share of the experts; give numbers above 0, up to 1")
    n_tokens, n_layers, top_k = trace.experts.shape
    total = n_layers * trace.n_experts
    previous = _previous_access(trace)
    counts = np.stack([np.bincount(trace.experts[:, i].ravel(), minlength=trace.n_experts) for i in range(n_layers)])
    reused = _reused(trace, previous)
    layers = tuple(_layer(trace, i, counts[i], reused[i]) for i in range(n_layers))

    distances = _stack_distances(previous, top_k)
    hits = np.concatenate([[0], np.cumsum(np.bincount(distances[distances >= 0], minlength=total))])
    sizes = [(share, max(1, round(share * total))) for share in cached_shares]
    lru = tuple(
        LruHitRate(share, size, float(hits[size] / trace.experts.size), size >= n_layers * top_k)
        for share, size in sizes
    )
    return RoutingStatistics(n_tokens, len(trace.starts), total, int((counts > 0).sum()), layers, lru)


def _layer(trace: RoutingTrace, i: int, counts: npt.NDArray[np.int64], reused: tuple[float, float]) -> LayerRouting:
    used = counts[counts > 0] / counts.sum()
    chosen = counts / len(trace.tokens)  # probability that a token takes an expert
    missed = 1 - chosen
    return LayerRouting(
        layer=trace.layers[i],
        load=tuple((counts * trace.n_experts / counts.sum()).tolist()),
        entropy=float(-(used * np.log(used)).sum() / np.log(trace.n_experts)) if trace.n_experts > 1 else 1.0,
        reused_last=reused[0],
        reused_window=reused[1],
        chance_last=float((chosen * chosen).sum() / trace.top_k),
        chance_window=float(sum((chosen * (1 - missed**depth)).sum() * n for depth, n in _depths(trace)) / trace.top_k),
    )


def _depths(trace: RoutingTrace) -> list[tuple[int, float]]:
    """How many tokens the window holds, with the share of tokens that look back on so many; the first of a text does on none."""
    lengths = np.array([text.stop - text.start for text in trace.texts()])
    looking = [(depth, int((lengths > depth).sum())) for depth in range(1, WINDOW)]
    looking.append((WINDOW, int(np.maximum(lengths - WINDOW, 0).sum())))
    all_of_them = sum(n for _, n in looking)
    return [(depth, n / all_of_them if all_of_them else np.nan) for depth, n in looking]


def _previous_access(trace: RoutingTrace) -> npt.NDArray[np.int64]:
    """For each access (token by token, layer by layer) the index of the access before it to that expert of that layer; -1: none."""
    n_tokens, n_layers, top_k = trace.experts.shape
    keys = (trace.experts + (np.arange(n_layers, dtype=np.int64) * trace.n_experts)[:, None]).ravel()
    if n_layers * trace.n_experts <= 65536:
        keys = keys.astype(np.uint16)  # which numpy sorts several times faster
    order = np.argsort(keys, kind="stable")
    previous = np.full(len(keys), -1, np.int64)
    same = keys[order[1:]] == keys[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _reused(trace: RoutingTrace, previous: npt.NDArray[np.int64]) -> list[tuple[float, float]]:
    """Per layer the share of experts used by the token before, and by one of the WINDOW tokens before, of the same text."""
    n_tokens, n_layers, top_k = trace.experts.shape
    lengths = np.diff([*trace.starts, n_tokens])
    own_start = np.repeat(trace.starts, lengths)
    token = np.arange(n_tokens)
    before = np.where(previous >= 0, previous // (n_layers * top_k), -1).reshape(trace.experts.shape)
    gap = np.where(before >= own_start[:, None, None], token[:, None, None] - before, WINDOW + 1)
    gap = gap[token > own_start]
    if len(gap) == 0:
        return [(np.nan, np.nan)] * n_layers
    last, window = (gap == 1).mean(axis=(0, 2)), (gap <= WINDOW).mean(axis=(0, 2))
    return list(zip(last.tolist(), window.tolist(), strict=True))


def _stack_distances(previous: npt.NDArray[np.int64], top_k: int) -> npt.NDArray[np.int64]:
    """For each access, how many other experts were used since the one before it to the same expert; -1: there is none.

    An LRU cache of `size` experts hits where that is less than `size`. Accesses come in groups of `top_k` made at once:
    those of an access's own group do not count.

    Of the accesses between p and the group, those that are the first of their expert there have their own previous
    access at p or before. So the distance is what lies between, less those whose previous access is after p; and only
    accesses after p have a previous access after p, so they are counted from the beginning: a count of inversions.
    """
    groups = previous.reshape(-1, top_k)
    in_own_group = np.zeros(groups.shape, np.int64)
    for i in range(1, top_k):
        in_own_group[:, i] = (groups[:, :i] > groups[:, i, None]).sum(axis=1)
    begin = np.repeat(np.arange(len(groups)) * top_k, top_k)
    again = previous >= 0
    distances = np.full(len(previous), -1, np.int64)
    larger_before = _larger_before(previous[again])
    distances[again] = (begin - previous - 1 + in_own_group.ravel())[again] - larger_before
    return distances


def _larger_before(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each of several distinct values, how many of those before it are larger.

    Ranks are split by their bits, the highest first, as in a wavelet tree: among those that agree so far, a rank with a
    0 is passed by each earlier one with a 1. In each round all ranks that agree so far lie side by side, in their
    original order, from the smallest rank that they could be on.
    """
    n = len(values)
    ranks = np.empty(n, np.int32)
    ranks[np.argsort(values)] = np.arange(n, dtype=np.int32)
    larger = np.zeros(n, np.int32)  # by rank
    here = ranks.copy()
    position = np.arange(n, dtype=np.int32)
    for bit in reversed(range(n.bit_length())):
        is_one = (here >> bit) & 1
        ones_before = np.concatenate([[0], np.cumsum(is_one, dtype=np.int32)]).astype(np.int32)
        start = here >> (bit + 1) << (bit + 1)
        ones = ones_before[:-1] - ones_before[start]
        zero = is_one == 0
        larger[here[zero]] += ones[zero]
        target = np.where(zero, position - ones, start + (1 << bit) + ones)
        split = np.empty_like(here)
        split[target] = here
        here = split
    return larger[ranks].astype(np.int64)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and np.isnan(value) else value
