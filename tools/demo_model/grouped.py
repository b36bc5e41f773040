"""Tokens grouped by expert, so that an expert is one matrix product over just the tokens that chose it.

Each group is padded to one of a few dozen sizes, for which oneDNN keeps its compiled kernels. With groups as they fall, nearly
every product has a new shape, and compiling it takes many times as long as multiplying. Padding rows, about one in twenty, carry
weight 0 into the second product, so that they add nothing, forward or backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST = 64


@dataclass(frozen=True)
class Groups:
    """Where the rows of each expert are. `rows` counts all rows, with padding; `top_k` experts a token."""

    counts: Tensor  # [n_experts], int64: tokens of each expert
    starts: list[int]  # [n_experts + 1]: first row of each expert
    source: Tensor  # [rows], int64: which token a row is of (0 for padding)
    position: Tensor  # [tokens, top_k], int64: which row holds it

    def weights(self, weights: Tensor) -> Tensor:
        """Routing weights [tokens, top_k] by row, 0 for padding: [rows]."""
        return weights.new_zeros(len(self.source)).index_put((self.position.flatten(),), weights.flatten())


def group_by_expert(experts: Tensor, n_experts: int) -> Groups:
    """Groups of experts [tokens, top_k], int64."""
    tokens, top_k = experts.shape
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=n_experts)
    padded = _padded(counts)
    ends = padded.cumsum(0)
    first = ends - padded
    rank = torch.arange(tokens * top_k) - (counts.cumsum(0) - counts)[flat[order]]
    row = first[flat[order]] + rank
    position = torch.empty_like(flat)
    position[order] = row
    source = torch.zeros(int(ends[-1]), dtype=torch.int64)
    source[row] = order // top_k
    return Groups(counts, [0, *ends.tolist()], source, position.view(tokens, top_k))


def _padded(counts: Tensor) -> Tensor:
    """Each count rounded up to one of at most eight sizes between a power of two and the next; 0 stays 0."""
    step = 2 ** (torch.log2(counts.clamp_min(1).double() - 0.5).floor() - 2).clamp_min(math.log2(SMALLEST)).long()
    return (counts + step - 1) // step * step


def dispatch(x: Tensor, groups: Groups) -> Tensor:
    """Each token's row copied to all its experts: [tokens, d] -> [rows, d]."""
    return _Dispatch.apply(x, groups)


def collect(rows: Tensor, groups: Groups) -> Tensor:
    """The sum over each token's experts: [rows, d] -> [tokens, d]."""
    return _Collect.apply(rows, groups)


def grouped_linear(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """Each group of rows times its expert's matrix: [rows, in], [n_experts, out, in] -> [rows, out]."""
    return _GroupedLinear.apply(x, weight, groups)


def _sum_of_rows(rows: Tensor, groups: Groups) -> Tensor:
    return rows[groups.position].sum(dim=1)


# Each of the two is the other's gradient: neither scatters, so results do not depend on the order of threads.


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(context, x, groups):
        context.groups = groups
        return x[groups.source]

    @staticmethod
    def backward(context, gradient):
        return _sum_of_rows(gradient, context.groups), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(context, rows, groups):
        context.groups = groups
        return _sum_of_rows(rows, groups)

    @staticmethod
    def backward(context, gradient):
        return gradient[context.groups.source], None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight, groups):
        context.save_for_backward(x, weight)
        context.groups = groups
        out = x.new_empty(len(x), weight.shape[1])
        for expert, rows in _groups(groups):
            torch.mm(x[rows], weight[expert].T, out=out[rows])
        return out

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        to_x = torch.empty_like(x)
        to_weight = torch.zeros_like(weight)
        for expert, rows in _groups(context.groups):
            torch.mm(gradient[rows], weight[expert], out=to_x[rows])
            torch.mm(gradient[rows].T, x[rows], out=to_weight[expert])
        return to_x, to_weight, None


def _groups(groups: Groups):
    """(expert, its rows), of the experts that have any."""
    for expert, (start, end) in enumerate(zip(groups.starts, groups.starts[1:], strict=False)):
        if end > start:
            yield expert, slice(start, end)
