"""A head as arrays, and its forward in NumPy.

The head owned by layer N runs at token t and predicts the router's output of layer N + 1 at token t + 1:

    x = [h, a, b]                      d + 2 E numbers
    z = linear x + fc2 gelu(fc1 x)     E numbers, in place of the router's output; gelu(y) = y (1 + erf(y / sqrt 2)) / 2

h is the input of layer N's experts at t, a the one-hots of the K experts executed there, b those at t - 1 (zeros if there are
none). There are no biases. A product with one-hots is a sum of K columns, which a sidecar stores as rows (docs/sidecar.md).
The head is that of Edge0's published files, whose names are `layers.N.{linear_init,fc1,fc2}.weight`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import OptionError, TrainingError
from ..sidecar.format import HEAD_TYPES, Head, Heads

__all__ = ["HeadArrays", "gelu", "multi_hot", "packed", "require_type", "unpacked"]

Floats = npt.NDArray[np.float32]

_erf = np.frompyfunc(math.erf, 1, 1)


def gelu(y: Floats) -> Floats:
    """y times the normal distribution's share below y, with the exact erf (no tanh)."""
    return (y * (1 + _erf(y * math.sqrt(0.5)).astype(np.float32)) / 2).astype(np.float32)


def multi_hot(executed: npt.NDArray[np.integer], none: npt.NDArray[np.bool_], n_experts: int) -> Floats:
    """[n, E]: 1 where an expert is among a row of `executed` [n, K], and zeros in rows for which `none` [n] is true."""
    hot = np.zeros((len(executed), n_experts), np.float32)
    np.put_along_axis(hot, executed.astype(np.int64), 1, axis=1)
    hot[none] = 0
    return hot


@dataclass(frozen=True, eq=False)
class HeadArrays:
    """The weights of one owner's head, float32.

    Attributes:
        linear: [E, d + 2 E].
        fc1: [w, d + 2 E].
        fc2: [E, w].

    Raises:
        TrainingError: Shapes that do not fit each other, or numbers that are not finite.
    """

    owner: int
    linear: Floats
    fc1: Floats
    fc2: Floats

    def __post_init__(self) -> None:
        n_experts, width = self.fc2.shape
        columns = self.linear.shape[1]
        wanted = {"linear": (n_experts, columns), "fc1": (width, columns), "fc2": (n_experts, width)}
        for name, shape in wanted.items():
            array = getattr(self, name)
            if array.shape != shape or columns <= 2 * n_experts:
                raise TrainingError(
                    f"the head of layer {self.owner}: {name} is {array.shape}, not {shape} as its other matrices want; train it again"
                )
            if not np.isfinite(array).all():
                raise TrainingError(
                    f"the head of layer {self.owner}: {name} holds numbers that are not finite; train it again, with a lower learning rate"
                )

    @property
    def n_experts(self) -> int:
        return self.fc2.shape[0]

    @property
    def width(self) -> int:
        return self.fc2.shape[1]

    @property
    def d(self) -> int:
        return self.linear.shape[1] - 2 * self.n_experts

    @staticmethod
    def untrained(owner: int, router: Floats, width: int, seed: int) -> HeadArrays:
        """What training begins with: z is the product of h with the router [E, d] of layer owner + 1.

        fc1 is drawn with variance 1 / (d + 2 E) from a generator of the seed and the owner, fc2 is zero.
        """
        n_experts, d = router.shape
        columns = d + 2 * n_experts
        fc1 = np.random.default_rng([seed, owner]).normal(scale=columns**-0.5, size=(width, columns))
        linear = np.concatenate([router, np.zeros((n_experts, 2 * n_experts), np.float32)], axis=1)
        return HeadArrays(
            owner, linear.astype(np.float32), fc1.astype(np.float32), np.zeros((n_experts, width), np.float32)
        )

    def forward(
        self,
        h: npt.NDArray[np.floating],
        executed: npt.NDArray[np.integer],
        before: npt.NDArray[np.integer],
        first: npt.NDArray[np.bool_],
    ) -> Floats:
        """z [n, E] for h [n, d] and the experts executed at t and at t - 1 [n, K]; `before` counts as none where `first` [n].

        In the order of a sidecar's reader: the product with h, plus gathered rows; the GELU; the product with fc2.
        """
        state, d = h.astype(np.float32), self.d
        now, then = executed.astype(np.int64), before.astype(np.int64) + self.n_experts

        def product(matrix: Floats) -> Floats:
            rows = matrix[:, d:].T
            return state @ matrix[:, :d].T + rows[now].sum(axis=1) + (rows[then] * ~first[:, None, None]).sum(axis=1)

        return (product(self.linear) + gelu(product(self.fc1)) @ self.fc2.T).astype(np.float32)

    def stored(self, kind: str) -> HeadArrays:
        """The head as a sidecar of a type (Q8_0, Q4_0, F16, F32) gives it back."""
        return HeadArrays(self.owner, *_packed(self, kind).matrices())


def packed(heads: Iterable[HeadArrays], *, top_k: int, kind: str = "Q8_0") -> Heads:
    """Heads for a sidecar, by owner, stored as a type.

    Args:
        top_k: Experts a token that they were trained with.
    """
    ordered = sorted(heads, key=lambda head: head.owner)
    first = ordered[0]
    return Heads(
        width=first.width,
        experts=first.n_experts,
        columns=first.d,
        top_k=top_k,
        heads=tuple(_packed(head, kind) for head in ordered),
    )


def unpacked(heads: Heads) -> dict[int, HeadArrays]:
    """The heads of a sidecar by owner, dequantised."""
    return {head.owner: HeadArrays(head.owner, *head.matrices()) for head in heads.heads}


def require_type(kind: str) -> None:
    """Raises OptionError unless heads can be stored as a type of this name."""
    if kind not in HEAD_TYPES:
        raise OptionError(f"type {kind!r}: heads are stored as one of {', '.join(HEAD_TYPES)}")


def _packed(head: HeadArrays, kind: str) -> Head:
    require_type(kind)
    return Head.of(head.owner, linear=head.linear, fc1=head.fc1, fc2=head.fc2, columns=head.d, type=HEAD_TYPES[kind])
