"""Sidecars with random heads for models of the factory, and what such a head says, in numpy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moestream import describe
from moestream.sidecar import HEAD_TYPES, Base, BaseModel, Head, Heads, Sidecar

__all__ = ["head_logits", "make_heads", "make_sidecar"]

_erf = np.vectorize(math.erf, otypes=[float])


def head_logits(
    head: Head, columns: int, state: npt.NDArray[Any], now: Sequence[int], before: Sequence[int]
) -> npt.NDArray[np.float64]:
    """z = L x + W2 gelu(W1 x), x = [h, a, b], of the weights as they are stored: in 64 bits, multiplied out."""
    linear, fc1, fc2 = (matrix.astype(np.float64) for matrix in head.matrices())
    experts = len(linear)
    x = np.zeros(columns + 2 * experts)
    x[:columns] = state
    x[columns + np.array(now, int)] = 1
    x[columns + experts + np.array(before, int)] = 1
    hidden = fc1 @ x
    return linear @ x + fc2 @ (hidden / 2 * (1 + _erf(hidden / math.sqrt(2))))


def make_heads(
    owners: Iterable[int],
    *,
    columns: int = 128,
    experts: int = 16,
    width: int = 64,
    top_k: int = 3,
    type: str = "Q8_0",
    seed: int = 0,
) -> Heads:
    """Random heads whose three inputs have about the same weight, so that what they say varies and forgets none of them."""
    made = []
    for owner in owners:
        rng = np.random.default_rng([seed, owner])
        spread = [(columns, 1 / math.sqrt(columns)), (experts, 0.7), (experts, 0.7)]
        linear, fc1 = (
            np.concatenate([rng.normal(0, scale, (rows, n)) for n, scale in spread], axis=1)
            for rows in (experts, width)
        )
        fc2 = rng.normal(0, 1.5 / math.sqrt(width), (experts, width))
        made.append(Head.of(owner, linear=linear, fc1=fc1, fc2=fc2, columns=columns, type=HEAD_TYPES[type]))
    return Heads(width, experts, columns, top_k, tuple(made))


def make_sidecar(model: Path, path: Path, owners: Iterable[int] | None = None, **heads: Any) -> Path:
    """A sidecar with heads for a model: by default of every layer that can have one."""
    found = describe(model)
    layers = [layer.layer for layer in found.moe_layers]
    if owners is None:
        owners = [layer for layer in layers if layer + 1 in layers]
    experts = {"experts": found.moe_layers[0].experts, "top_k": found.experts_used, **heads}
    base = BaseModel.open(model)
    Sidecar(Base(base.hash(), base.name, base.architecture), make_heads(owners, **experts)).write(path)
    return path
