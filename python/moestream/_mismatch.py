"""How the experts that a run took differ from those that its model's gate, or a base run, would take."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import OptionError
from .stats import Predictions
from .trace import RoutingTrace

__all__ = ["RoutingDifference", "RoutingMismatch", "difference", "require_same_layers", "require_same_tokens"]


@dataclass(frozen=True)
class RoutingDifference:
    """Between the choices of a run and those of a base run on the same tokens. Shares are from 0 to 1."""

    tokens: int
    choices_changed: float
    """Of the choices (one a token and layer), those with another set of experts."""
    experts_missing: float
    """Of the base's experts, those that this run did not take."""
    weight_missing: float
    """What these weighed in the base run, of all that its experts weighed."""


@dataclass(frozen=True)
class RoutingMismatch:
    """What became of the gate's choices, of all tokens evaluated. Shares are from 0 to 1."""

    choices: int
    """Experts taken: one count a token, layer and place of the top-k."""
    cache_aware: float
    """The option."""
    replaced: int
    """Of these, other ones than the gate's, because they were in memory (``cache_aware``)."""
    experts_used: int
    experts_of_model: int
    """Taken of a layer by a token, here and by the model's own number."""
    predictions: tuple[Predictions, ...]
    """Against what the gate chose, by how far ahead they were made."""
    against_base: RoutingDifference | None

    @property
    def replaced_share(self) -> float:
        return self.replaced / self.choices if self.choices else 0.0

    @property
    def left_out(self) -> float:
        """Share of the experts of the model's own top-k that are not taken for want of ``experts_used``."""
        return max(0.0, 1 - self.experts_used / self.experts_of_model)


def require_same_tokens(
    base: RoutingTrace, path: str | os.PathLike[str], inputs: npt.NDArray[np.int32], *, chunks: int
) -> None:
    """Refuses a base that is not of these chunks [chunks * context], in this order, as they were evaluated.

    Raises:
        OptionError: It is not.
    """
    wanted = len(inputs) // chunks * np.arange(chunks)
    if len(base.tokens) < len(inputs) or (base.tokens[: len(inputs)] != inputs).any():
        raise OptionError(
            f"{path}: is the routing of other tokens: record the base with the same text, -c and --chunks: moestream eval --save-routing"
        )
    if not np.isin(wanted, base.starts).all() or np.sum(base.starts < len(inputs)) != chunks:
        raise OptionError(f"{path}: is the routing of texts cut elsewhere: record the base with the same -c")


def require_same_layers(base: RoutingTrace, path: str | os.PathLike[str], layers: Sequence[int]) -> None:
    """Refuses a base of a model with experts in other layers than these.

    Raises:
        OptionError: It is.
    """
    if list(base.layers) != list(layers):
        raise OptionError(
            f"{path}: is the routing of a model with experts in layers {list(base.layers)}, and this one's are {list(layers)}"
        )


def difference(base: RoutingTrace, experts: npt.NDArray[np.integer]) -> RoutingDifference:
    """Between a base and the experts [tokens, layers, top_k] that its first tokens took here."""
    tokens = len(experts)
    chosen = base.experts[:tokens].astype(np.int64)
    missing = ~(chosen[..., None] == experts[..., None, :]).any(axis=3)
    weights = np.abs(base.weights[:tokens].astype(np.float64))
    changed = missing.any(axis=2) | (chosen.shape[2] != experts.shape[2])
    return RoutingDifference(
        tokens=tokens,
        choices_changed=float(changed.mean()),
        experts_missing=float(missing.mean()),
        weight_missing=float((weights * missing).sum() / weights.sum()) if weights.any() else 0.0,
    )
