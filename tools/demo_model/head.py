"""The output layer and its loss in one, a few hundred tokens at a time: so many logits fit the processor's cache."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 256


def next_token_loss(hidden: Tensor, matrix: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean cross entropy in nats of targets [tokens] under softmax(hidden @ matrix.T).

    Args:
        hidden: [tokens, d], float32.
        matrix: [vocab, d], float32.
        dtype: What the products are computed in; the softmax is float32.
    """
    return _Loss.apply(hidden, matrix, targets, dtype)


class _Loss(torch.autograd.Function):
    """Gradients are made on the way forward, while a chunk's logits are at hand."""

    @staticmethod
    def forward(context, hidden, matrix, targets, dtype):
        narrow, weight = hidden.detach().to(dtype), matrix.detach().to(dtype)
        with_gradients = any(context.needs_input_grad[:2])
        to_hidden = torch.empty_like(narrow)
        to_matrix = torch.zeros_like(matrix)
        total = hidden.new_zeros(())
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            logits = (narrow[part] @ weight.T).float()
            target = targets[part, None]
            wanted = logits.gather(1, target)
            highest = logits.amax(dim=-1, keepdim=True)
            shares = logits.sub_(highest).exp_()
            sums = shares.sum(dim=-1, keepdim=True)
            total += (highest + sums.log() - wanted).sum()
            if with_gradients:
                slope = shares.mul_(1 / (sums * len(hidden)))
                slope.scatter_add_(1, target, slope.new_full(target.shape, -1.0 / len(hidden)))
                slope = slope.to(dtype)
                to_hidden[part] = slope @ weight
                to_matrix += slope.T @ narrow[part]
        context.save_for_backward(to_hidden, to_matrix)
        return total / len(hidden)

    @staticmethod
    def backward(context, gradient):
        to_hidden, to_matrix = context.saved_tensors
        return gradient * to_hidden.float(), gradient * to_matrix, None, None
