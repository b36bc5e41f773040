"""Heads in PyTorch: the formula of :mod:`moestream.train.head_arrays`, with gradients.

z = linear x + fc2 gelu(fc1 x),  x = [h, a, b] of d + 2 E numbers;  exact erf GELU, no biases
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from .head_arrays import HeadArrays

__all__ = ["Head", "StackedHeads", "features", "head_loss", "one_hots"]


def one_hots(executed: Tensor, n_experts: int, there: Tensor | None = None) -> Tensor:
    """[..., E] of 0 and 1 from experts [..., K]; rows for which `there` [...] is false are zeros."""
    hot = torch.zeros(*executed.shape[:-1], n_experts, device=executed.device).scatter_(-1, executed.long(), 1.0)
    return hot if there is None else hot * there.unsqueeze(-1)


def features(h: Tensor, executed: Tensor, before: Tensor, before_there: Tensor, n_experts: int) -> Tensor:
    """x [..., d + 2 E] from h [..., d], the experts executed at t and at t - 1 [..., K], and whether there were any [...]."""
    return torch.cat([h, one_hots(executed, n_experts), one_hots(before, n_experts, before_there)], dim=-1)


def _forward(linear: Tensor, fc1: Tensor, fc2: Tensor, x: Tensor) -> Tensor:
    return x @ linear.mT + functional.gelu(x @ fc1.mT) @ fc2.mT


class Head(nn.Module):
    """The head of one owner. Its parameters have the names of published files: linear_init, fc1, fc2, each `.weight`."""

    def __init__(self, d: int, n_experts: int, width: int) -> None:
        super().__init__()
        self.d, self.n_experts = d, n_experts
        self.linear_init = nn.Linear(d + 2 * n_experts, n_experts, bias=False)
        self.fc1 = nn.Linear(d + 2 * n_experts, width, bias=False)
        self.fc2 = nn.Linear(width, n_experts, bias=False)

    @staticmethod
    def of(arrays: HeadArrays) -> Head:
        head = Head(arrays.d, arrays.n_experts, arrays.width)
        head.take(arrays)
        return head

    def take(self, arrays: HeadArrays) -> None:
        """Puts these weights in place of its own."""
        for layer, array in ((self.linear_init, arrays.linear), (self.fc1, arrays.fc1), (self.fc2, arrays.fc2)):
            layer.weight.data.copy_(torch.from_numpy(array))

    def arrays(self, owner: int) -> HeadArrays:
        return HeadArrays(
            owner, *(layer.weight.detach().float().numpy().copy() for layer in (self.linear_init, self.fc1, self.fc2))
        )

    def forward(self, x: Tensor) -> Tensor:
        """z [..., E] for x [..., d + 2 E]."""
        return _forward(self.linear_init.weight, self.fc1.weight, self.fc2.weight, x)


class StackedHeads(nn.Module):
    """Heads of equal shape, trained together: one batched product for all. They share nothing.

    Args:
        heads: In the order of the first dimension of all that is given and returned.
    """

    def __init__(self, heads: Sequence[HeadArrays]) -> None:
        super().__init__()
        self.owners = tuple(head.owner for head in heads)
        self.linear = nn.Parameter(torch.from_numpy(np.stack([head.linear for head in heads])))
        self.fc1 = nn.Parameter(torch.from_numpy(np.stack([head.fc1 for head in heads])))
        self.fc2 = nn.Parameter(torch.from_numpy(np.stack([head.fc2 for head in heads])))

    def forward(self, x: Tensor) -> Tensor:
        """z [heads, n, E] for x [heads, n, d + 2 E]."""
        return _forward(self.linear, self.fc1, self.fc2, x)

    def arrays(self) -> list[HeadArrays]:
        stacked = [parameter.detach().numpy() for parameter in (self.linear, self.fc1, self.fc2)]
        return [HeadArrays(owner, *(part[i].copy() for part in stacked)) for i, owner in enumerate(self.owners)]


def head_loss(z: Tensor, gate: Tensor, gating: str) -> Tensor:
    """How far predictions z are from the router's output, [...] in nats; 0 where they say the same. Both are [..., E].

    softmax: KL(softmax(gate) || softmax(z)), Kullback and Leibler's divergence.

    sigmoid: the sum over experts of KL(Bernoulli(sigmoid(gate)) || Bernoulli(sigmoid(z))), which is binary cross entropy less
    what is left when z = gate. Sigmoid scores are not shares of one: a bias may be added to them before the choice, and not all
    models make the weights' sum one. So each score has to be right by itself; a divergence of normalised scores would leave
    their common scale open.
    """
    if gating == "softmax":
        log_p, log_q = gate.log_softmax(-1), z.log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    p = gate.sigmoid()
    on = functional.logsigmoid(gate) - functional.logsigmoid(z)
    off = functional.logsigmoid(-gate) - functional.logsigmoid(-z)
    return (p * on + (1 - p) * off).sum(-1)
