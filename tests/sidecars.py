"""What a head says, in numpy, and sidecars with random heads for models of the factory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moestream.sidecar import Head
from synthetic.heads import make_heads, make_sidecar

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
