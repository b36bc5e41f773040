"""Statistics of what a model predicts, and of how it differs from a base: those that llama-perplexity prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

__all__ = ["Chunk", "Divergence", "Estimate", "Scored", "chunk_of", "divergence_of"]

_Array = npt.NDArray[np.float64]
_KL_PERCENTILES = (100, 99.9, 99, 95, 90, 50, 10, 5, 1, 0.1, 0)
_CHANGE_PERCENTILES = (100, 99.9, 99, 95, 90, 75, 50, 25, 10, 5, 1, 0.1, 0)


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error, as if tokens were independent; 0 of a single token."""

    value: float
    error: float

    @property
    def exp(self) -> Estimate:
        """Of e to the value, with the error that follows from the value's to the first order."""
        value = float(np.exp(self.value))
        return Estimate(value, value * self.error)


@dataclass(frozen=True)
class Scored:
    """Of tokens that were predicted, each array one value a token; all but the first empty without a base."""

    nats: _Array
    """-log of the probability of the token that came."""
    base_nats: _Array
    kl: _Array
    change: _Array
    """Of the probability of the token that came, from the base's."""
    same_top: _Array
    """1 where both think the same token the likeliest, else 0."""

    @staticmethod
    def together(parts: Sequence[Scored]) -> Scored:
        return Scored(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Scored)))


@dataclass(frozen=True)
class Chunk:
    """Where the figures stand after a chunk of the text; all but perplexity are None without a base."""

    chunk: int
    """From 1."""
    tokens: int
    """Scored so far."""
    perplexity: Estimate
    log_ratio: Estimate | None = None
    kl: Estimate | None = None
    change_rms: Estimate | None = None
    same_top: Estimate | None = None


@dataclass(frozen=True)
class Divergence:
    """How far a model is from a base. Divergences are in nats, shares and probabilities from 0 to 1.

    Percentiles are of single tokens, by percent, the largest first: 100 is the maximum, 50 the median, 0 the minimum.
    """

    base_perplexity: Estimate
    """As the file of its logits has it, which cuts what is over 16 nats less likely than the likeliest token."""
    correlation: float | None
    """Pearson's, of the two models' -log of the probability of the token that came; None where one of them does not vary."""
    log_ratio: Estimate
    """Of the perplexities, ours over the base's; the next two are that itself, and their difference."""
    ratio: Estimate
    difference: Estimate
    kl: Estimate
    kl_percentiles: dict[float, float]
    change: Estimate
    """Of the probability of the token that came."""
    change_percentiles: dict[float, float]
    change_rms: Estimate
    same_top: Estimate
    """Share of tokens for which both think the same token the likeliest."""


def chunk_of(number: int, scored: Scored) -> Chunk:
    """What stands after chunk `number` with all that were scored so far."""
    perplexity = _mean(scored.nats).exp
    if not len(scored.base_nats):
        return Chunk(number, len(scored.nats), perplexity)
    return Chunk(
        number,
        len(scored.nats),
        perplexity,
        log_ratio=_mean(scored.nats - scored.base_nats),
        kl=_mean(scored.kl),
        change_rms=_root_mean_square(scored.change),
        same_top=_mean(scored.same_top),
    )


def divergence_of(scored: Scored) -> Divergence:
    """The statistics over all scored tokens."""
    nats, base_nats = scored.nats, scored.base_nats
    ours, base = _mean(nats), _mean(base_nats)
    log_ratio = _mean(nats - base_nats)
    # var(x - y) of the weighted is var(x) + var(y) - 2 cov(x, y) of the perplexities' errors
    difference = _mean(ours.exp.value * (nats - ours.value) - base.exp.value * (base_nats - base.value))
    varies = ours.error > 0 and base.error > 0
    return Divergence(
        base_perplexity=base.exp,
        correlation=float(np.corrcoef(nats, base_nats)[0, 1]) if varies else None,
        log_ratio=log_ratio,
        ratio=log_ratio.exp,
        difference=Estimate(ours.exp.value - base.exp.value, difference.error),
        kl=_mean(scored.kl),
        kl_percentiles=_percentiles(scored.kl, _KL_PERCENTILES),
        change=_mean(scored.change),
        change_percentiles=_percentiles(scored.change, _CHANGE_PERCENTILES),
        change_rms=_root_mean_square(scored.change),
        same_top=_mean(scored.same_top),
    )


def _mean(values: _Array) -> Estimate:
    n = len(values)
    return Estimate(float(values.mean()), float(np.sqrt(values.var() / (n - 1))) if n > 1 else 0.0)


def _root_mean_square(values: _Array) -> Estimate:
    square = _mean(values**2)
    root = float(np.sqrt(square.value))
    return Estimate(root, square.error / (2 * root) if root else 0.0)


def _percentiles(values: _Array, percents: Sequence[float]) -> dict[float, float]:
    return dict(zip(percents, np.percentile(values, percents).tolist(), strict=True))
