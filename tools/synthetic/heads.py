"""Sidecars with random heads: of a trained model's shape, speaking of nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from moestream import describe
from moestream.sidecar import HEAD_TYPES, Base, BaseModel, Head, Heads, Sidecar

__all__ = ["make_heads", "make_sidecar"]


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
    base = BaseModel.open(model)
    shape = {
        "columns": base.number("embedding_length"),
        "experts": found.moe_layers[0].experts,
        "top_k": found.experts_used,
        **heads,
    }
    Sidecar(Base(base.hash(), base.name, base.architecture), make_heads(owners, **shape)).write(path)
    return path
