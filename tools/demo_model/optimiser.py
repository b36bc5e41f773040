"""Muon for matrices, AdamW for the rest: with few tokens, Muon reaches the same loss in about half as many.

Muon (K. Jordan, 2024): the momentum of a matrix is replaced by its nearest orthogonal matrix, so that every direction learns alike.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .model import DemoModel

MUON_RATE = 0.02
ADAM_RATE = 0.003
ROUTER_RATE = 0.003


class Optimiser:
    """Steps all weights of a model; its whole state is in `state_dict`."""

    def __init__(self, model: DemoModel) -> None:
        named = dict(model.named_parameters())
        by_muon = [name for name in named if _is_for_muon(name)]
        self.muon = [named[name] for name in by_muon]
        self.momentum = [torch.zeros_like(p) for p in self.muon]
        routers = [p for name, p in named.items() if "router" in name]
        rest = [p for name, p in named.items() if name not in by_muon and "router" not in name]
        groups = [{"params": rest, "full_rate": ADAM_RATE}, {"params": routers, "full_rate": ROUTER_RATE}]
        self.adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True)

    def step(self, rate: float) -> None:
        """One step at `rate` (0 to 1) of the full learning rates; forgets the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = group["full_rate"] * rate
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for weight, momentum in zip(self.muon, self.momentum, strict=True):
            _muon_step(weight, momentum, MUON_RATE * rate)
            weight.grad = None

    def state_dict(self) -> dict:
        return {"adam": self.adam.state_dict(), "momentum": self.momentum}

    def load_state_dict(self, state: dict) -> None:
        self.adam.load_state_dict(state["adam"])
        for mine, theirs in zip(self.momentum, state["momentum"], strict=True):
            mine.copy_(theirs)


def _is_for_muon(name: str) -> bool:
    """Whether a weight is a matrix between hidden states. Routers, norms and the embedding are left to AdamW."""
    return name.startswith("layers.") and not any(part in name for part in ("norm", "router"))


@torch.no_grad()
def _muon_step(weight: nn.Parameter, momentum: Tensor, rate: float) -> None:
    momentum.lerp_(weight.grad, 0.05)
    direction = weight.grad.lerp(momentum, 0.95)
    rows, columns = weight.shape[-2:]
    weight.add_(orthogonal(direction), alpha=-rate * math.sqrt(max(1.0, rows / columns)))


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest orthogonal matrix to each [..., rows, columns], by five Newton-Schulz steps in bfloat16."""
    wide = matrix.shape[-1] >= matrix.shape[-2]
    x = matrix.to(torch.bfloat16)
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x if wide else x.mT).to(matrix.dtype)
