"""Routing that no model made, with the locality that others measured in real ones.

docs/trace.md tells the model behind it and where the figures of PRESETS are from.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ._locality import WINDOW
from .errors import OptionError
from .trace import RoutingTrace

__all__ = ["PRESETS", "Preset", "synthesise_trace", "transferred_trace"]

_Floats = npt.NDArray[np.float32]

_CONTEXT_TOKENS = 4.0  # after which what is asked of a context is 1/e as much as now
_TOPIC_TOKENS = 100.0
_FITTED_TOKENS = 1000
_FITTED_SCORES = 1024  # experts of so many layers, at least, are fitted to
_CLOSE = 0.004  # how near the targets a fit ends
_NEAR = 0.01  # and must end
_BATCH_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model's shape, and the locality of its routing as far as it is published or can be told from that of others.

    Attributes:
        layers: With experts.
        experts: In each of them.
        top_k: Of these, used for a token.
        reused_last, reused_window, balance: As `moestream trace show` measures them.
    """

    layers: int
    experts: int
    top_k: int
    reused_last: float
    reused_window: float
    balance: float


PRESETS = {
    "mixtral": Preset(layers=32, experts=8, top_k=2, reused_last=0.33, reused_window=0.90, balance=0.98),
    "qwen3-30b-a3b": Preset(layers=48, experts=128, top_k=8, reused_last=0.45, reused_window=0.80, balance=0.89),
    "smallthinker-21b": Preset(layers=52, experts=64, top_k=6, reused_last=0.35, reused_window=0.75, balance=0.95),
    "smallthinker-4b": Preset(layers=32, experts=32, top_k=4, reused_last=0.37, reused_window=0.81, balance=0.96),
}


@dataclass(frozen=True)
class _Strengths:
    """How much each part of a score counts, in standard deviations of the token's own noise."""

    popularity: float
    topic: float
    context: float


def synthesise_trace(
    *,
    like: str | None = None,
    tokens: int = 2000,
    layers: int | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    reused_last: float | None = None,
    reused_window: float | None = None,
    balance: float | None = None,
    seed: int = 0,
) -> RoutingTrace:
    """A routing with a given locality.

    In each layer an expert's score for a token is the sum of four normal variables: its popularity, which never changes;
    the topic's liking of it, which is another after some hundred tokens; the context's, which is another after a few;
    and noise of the token's own. The experts of the highest scores are taken. The first three are made as strong as the
    targets ask for. The text is one; its token ids are all 0; the weights are a softmax over the scores taken.

    >>> trace = synthesise_trace(like="qwen3-30b-a3b", tokens=500)
    >>> round(routing_statistics(trace).reused_last, 2)
    0.45

    Args:
        like: One of PRESETS, for what is not given.
        tokens: How many.
        layers, experts, top_k: The shape: layers with experts, experts in each, experts used for a token.
        reused_last: Share of a token's experts that the token before it used too.
        reused_window: Share that one of the 8 tokens before it used.
        balance: Entropy of the load as a share of that of even load; 1 is even.
        seed: The same one gives the same trace.

    Raises:
        OptionError: No such preset, something is neither given nor preset, or no such routing was found.
    """
    given = {"layers": layers, "experts": experts, "top_k": top_k}
    given |= {"reused_last": reused_last, "reused_window": reused_window, "balance": balance}
    wanted = _wanted(like, given)
    if tokens < 1:
        raise OptionError(f"tokens={tokens}: give a number of at least 1")
    fitted = (
        f"fitted to reuse of {wanted.reused_last:.0%} by the next token, {wanted.reused_window:.0%} within {WINDOW}, "
        f"balance {wanted.balance:.0%}; seed {seed}"
    )
    model = like or f"{wanted.layers} layers, {wanted.top_k} of {wanted.experts} experts"
    return _drawn(wanted, _fitted(wanted), tokens, seed, model, fitted)


def transferred_trace(
    *, like: str, layers: int, experts: int, top_k: int, tokens: int = 2000, seed: int = 0
) -> RoutingTrace:
    """A routing of any shape, whose scores are made of the same parts as those that give a preset its locality.

    Where a shape makes other experts more or less probable to be chosen by chance, reuse is more or less than the preset's.

    Args:
        like: One of PRESETS.
        layers, experts, top_k, tokens, seed: As `synthesise_trace` has them.

    Raises:
        OptionError: No such preset, or a shape that is none.
    """
    targets = dict.fromkeys(("reused_last", "reused_window", "balance"))
    shape = _wanted(like, {"layers": layers, "experts": experts, "top_k": top_k, **targets})
    model = f"{layers} layers, {top_k} of {experts} experts"
    return _drawn(shape, _fitted(PRESETS[like]), tokens, seed, model, f"scores fitted to {like}; seed {seed}")


def _drawn(shape: Preset, strengths: _Strengths, tokens: int, seed: int, model: str, synthetic: str) -> RoutingTrace:
    chosen, weights = _chosen(shape, strengths, tokens, np.random.default_rng(seed))
    return RoutingTrace(
        model=model,
        model_hash="",
        architecture="",
        layers=tuple(range(shape.layers)),
        n_experts=shape.experts,
        tokens=np.zeros(tokens, np.int32),
        experts=chosen.astype(np.uint8 if shape.experts <= 256 else np.uint16),
        weights=weights.astype(np.float16),
        starts=np.zeros(1, np.int64),
        source="",
        tool=f"moestream {importlib.metadata.version('moestream')}",
        tokens_at_once=0,
        synthetic=synthetic,
    )


def _wanted(like: str | None, given: dict[str, int | float | None]) -> Preset:
    """Shape and targets: what is given, and the rest from the preset."""
    if like is not None and like not in PRESETS:
        raise OptionError(f"like={like!r}: expected one of {', '.join(map(repr, PRESETS))}")
    values = {
        name: value if value is not None else getattr(PRESETS.get(like or ""), name, None)
        for name, value in given.items()
    }
    if missing := [name for name, value in values.items() if value is None]:
        raise OptionError(f"{missing[0]}: give it, or the name of a preset with like")
    wanted = Preset(**values)  # type: ignore[arg-type]
    if wanted.layers < 1:
        raise OptionError(f"layers={wanted.layers}: give a number of at least 1")
    if not 2 <= wanted.experts <= 65536:
        raise OptionError(f"experts={wanted.experts}: give a number from 2 to 65536")
    if not 1 <= wanted.top_k < wanted.experts:
        raise OptionError(
            f"top_k={wanted.top_k}: give a number from 1 to {wanted.experts - 1}: fewer than there are experts"
        )
    for name in ("reused_last", "reused_window", "balance"):
        if not 0 < getattr(wanted, name) < 1:
            raise OptionError(f"{name}={getattr(wanted, name)}: give a share between 0 and 1")
    return wanted


# Scores


def _wandering(shape: tuple[int, ...], correlated_tokens: float, draw: np.random.Generator) -> Iterator[_Floats]:
    """Standard normal variables token by token, correlated by exp(-distance / correlated_tokens)."""
    keep = np.float32(np.exp(-1 / correlated_tokens))
    fresh = np.float32(np.sqrt(1 - keep**2))
    now = draw.standard_normal(shape, np.float32)
    while True:
        yield now
        now = keep * now + fresh * draw.standard_normal(shape, np.float32)


@dataclass(frozen=True)
class _Parts:
    """What scores are summed from: popularity [layers, experts], the others [tokens, layers, experts]."""

    popularity: _Floats
    topic: _Floats
    context: _Floats
    noise: _Floats

    def scores(self, strengths: _Strengths) -> _Floats:
        of_topic, of_context = np.float32(strengths.topic), np.float32(strengths.context)
        return (
            np.float32(strengths.popularity) * self.popularity
            + of_topic * self.topic
            + of_context * self.context
            + self.noise
        )


def _parts(tokens: int, layers: int, experts: int, draw: np.random.Generator) -> Iterator[_Parts]:
    """Those of some tokens at once, until there are `tokens`."""
    shape = (layers, experts)
    popularity = draw.standard_normal(shape, np.float32)
    topic, context = _wandering(shape, _TOPIC_TOKENS, draw), _wandering(shape, _CONTEXT_TOKENS, draw)
    for first in range(0, tokens, _BATCH_TOKENS):
        n = min(_BATCH_TOKENS, tokens - first)
        both = [(next(topic), next(context)) for _ in range(n)]
        yield _Parts(
            popularity,
            np.stack([some for some, _ in both]),
            np.stack([some for _, some in both]),
            draw.standard_normal((n, *shape), np.float32),
        )


def _chosen(
    wanted: Preset, strengths: _Strengths, tokens: int, draw: np.random.Generator
) -> tuple[npt.NDArray[np.int64], _Floats]:
    """Experts and weights, [tokens, layers, top_k], the highest scores first."""
    experts, weights = [], []
    for parts in _parts(tokens, wanted.layers, wanted.experts, draw):
        scores = parts.scores(strengths)
        best = np.argpartition(-scores, wanted.top_k - 1, axis=2)[..., : wanted.top_k]
        taken = np.take_along_axis(scores, best, axis=2)
        order = np.argsort(-taken, axis=2)
        experts.append(np.take_along_axis(best, order, axis=2))
        taken = np.take_along_axis(taken, order, axis=2)
        likely = np.exp(taken - taken[..., :1])
        weights.append(likely / likely.sum(axis=2, keepdims=True))
    return np.concatenate(experts), np.concatenate(weights)


# Fitting


@cache
def _fitted(wanted: Preset) -> _Strengths:
    """The strengths that meet the targets, by Newton's method on one long sample, which is always the same.

    Raises:
        OptionError: None was found.
    """
    layers = max(4, -(-_FITTED_SCORES // wanted.experts))
    batches = list(_parts(_FITTED_TOKENS, layers, wanted.experts, np.random.default_rng(0)))
    sample = _Parts(
        batches[0].popularity,
        *(np.concatenate([getattr(b, name) for b in batches]) for name in ("topic", "context", "noise")),
    )
    target = np.array([wanted.reused_last, wanted.reused_window, wanted.balance])

    def measured(logarithms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return _measured(sample.scores(_Strengths(*np.exp(logarithms))), wanted.top_k)

    at = np.log([0.5, 1.0, 1.0])
    found = measured(at)
    best, nearest = at, found
    for _ in range(15):
        missing = target - found
        if np.abs(missing).max() < np.abs(target - nearest).max():
            best, nearest = at, found
        if np.abs(missing).max() < _CLOSE:
            break
        slopes = np.stack([(measured(at + 0.1 * step) - found) / 0.1 for step in np.eye(3)], axis=1)
        move = np.linalg.solve(slopes.T @ slopes + 1e-3 * np.eye(3), slopes.T @ missing)
        at = np.clip(at + np.clip(move, -0.7, 0.7), -5, 4)
        found = measured(at)
    if np.abs(target - nearest).max() > _NEAR:
        got = "reused_last={:.2f}, reused_window={:.2f}, balance={:.2f}".format(*nearest)
        raise OptionError(
            f"no routing of {wanted.top_k} of {wanted.experts} experts was found with reused_last={wanted.reused_last:g}, "
            f"reused_window={wanted.reused_window:g} and balance={wanted.balance:g}; the nearest has {got}"
        )
    return _Strengths(*np.exp(best).tolist())


def _measured(scores: _Floats, top_k: int) -> npt.NDArray[np.float64]:
    """reused_last, reused_window and balance, as `routing_statistics` has them for one text."""
    used = np.zeros(scores.shape, bool)
    np.put_along_axis(used, np.argpartition(-scores, top_k - 1, axis=2)[..., :top_k], True, axis=2)
    total = used[1:].sum()
    lately = np.zeros_like(used)
    for distance in range(1, WINDOW + 1):
        lately[distance:] |= used[:-distance]
    load = used.sum(axis=0) / used[:, 0].sum()
    entropy = -(load * np.log(np.maximum(load, 1e-30))).sum(axis=1).mean() / np.log(scores.shape[2])
    return np.array([(used[1:] & used[:-1]).sum() / total, (used & lately).sum() / total, entropy])
