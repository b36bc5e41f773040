"""The two demo models in PyTorch: the graphs of llama.cpp's `smallthinker` and `qwen3moe`, made for training on a CPU.

Both are decoders with RMS norms, grouped-query attention with rotary positions (NEOX order) and a Mixture-of-Experts block in every
layer. They differ where streaming cares:

  smallthinker  the router reads the residual that *enters* the layer, before attention; sigmoid scores; ReGLU experts
  qwen3moe      the router reads the norm that the experts read, after attention; softmax scores; SwiGLU experts; norms of q and k

In both, the weights of the chosen experts are divided by their sum.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .grouped import Groups, collect, dispatch, group_by_expert, grouped_linear
from .head import next_token_loss


class Routing(NamedTuple):
    """What one layer's router decided, beside what training wants of it."""

    experts: Tensor  # [tokens, top_k], int64
    weights: Tensor  # [tokens, top_k], float32, sum 1
    probabilities: Tensor  # [tokens, n_experts], float32, sum 1: softmax of the logits, whatever the scores are
    logits: Tensor  # [tokens, n_experts], float32


class LayerReport(NamedTuple):
    """What a layer adds to the loss, and what the figures count."""

    balance: Tensor  # 1 when all experts are used alike
    activity: Tensor  # what ReLU lets through, by the gate's own scale: 0.4 if half of it, less if less
    router: (
        Tensor  # mean square of the router's logits; if they grow, sigmoids round to 1 and the choice is left to ties
    )
    counts: Tensor  # [n_experts], int64: how many tokens each was given
    zeros: Tensor  # share of the gate's outputs that the activation makes exactly 0


class DemoModel(nn.Module):
    """`loss(tokens, targets)` for training, `logits(tokens)` for comparison with llama.cpp."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        random = torch.Generator().manual_seed(seed)
        self.embed = Matrix((config.vocab_size, config.d_model), 0.02, random, may_quantise=False)
        self.layers = nn.ModuleList(Layer(config, random) for _ in range(config.n_layers))
        self.norm = Norm(config.d_model, config.norm_eps)

    def hidden(self, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[LayerReport], list[Routing]]:
        """The last norm's output [batch * length, d_model], and what every layer reports.

        Args:
            tokens: [batch, length], int64.
            dtype: What matrices are multiplied in. The residual stream, the norms and the routers are float32 always.
        """
        rotation = rotary_angles(tokens.shape[1], self.config)
        residual = F.embedding(tokens, self.embed.weight)
        reports, routings = [], []
        for layer in self.layers:
            residual, report, routing = layer(residual, rotation, dtype)
            reports.append(report)
            routings.append(routing)
        return self.norm(residual).flatten(0, 1), reports, routings

    def loss(
        self, tokens: Tensor, targets: Tensor, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[Tensor, list[LayerReport]]:
        """Mean cross entropy in nats of targets [batch, length] given the tokens before them."""
        hidden, reports, _ = self.hidden(tokens, dtype)
        return next_token_loss(hidden, self.embed.weight, targets.flatten(), dtype), reports

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, length, vocab_size], all in float32."""
        hidden, _, _ = self.hidden(tokens, torch.float32)
        return (hidden @ self.embed.weight.T).view(*tokens.shape, -1)

    def set_quantised(self, quantised: bool) -> None:
        """Whether the forward pass uses the weights as Q4_0 would have them; gradients go to the weights as they are.

        The embedding, which is the output matrix too, is left out: llama.cpp's quantiser keeps it at 6 bits.
        """
        for module in self.modules():
            if isinstance(module, Matrix) and module.may_quantise:
                module.quantised = quantised

    def export(self) -> dict[str, Tensor]:
        """All weights by the names that export.py knows, float32."""
        return {_exported(name): tensor.detach() for name, tensor in self.state_dict().items()}

    def load_export(self, weights: Mapping[str, Tensor]) -> None:
        """The opposite of `export`. Raises RuntimeError if names or shapes differ."""
        names = {_exported(name): name for name in self.state_dict()}
        self.load_state_dict({names.get(name, name): tensor for name, tensor in weights.items()})


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, random: torch.Generator) -> None:
        super().__init__()
        self.config = config
        c = config
        std = 0.5 / math.sqrt(c.d_model)
        # What adds to the residual stream starts small, so that depth does not make the sum large.
        out = std / math.sqrt(2 * c.n_layers)
        self.attention_norm = Norm(c.d_model, c.norm_eps)
        self.q = Matrix((c.n_heads * c.head_dim, c.d_model), std, random)
        self.k = Matrix((c.n_kv_heads * c.head_dim, c.d_model), std, random)
        self.v = Matrix((c.n_kv_heads * c.head_dim, c.d_model), std, random)
        self.o = Matrix((c.d_model, c.n_heads * c.head_dim), out, random)
        if c.kind == "qwen3moe":
            self.q_norm = Norm(c.head_dim, c.norm_eps)
            self.k_norm = Norm(c.head_dim, c.norm_eps)
        self.ffn_norm = Norm(c.d_model, c.norm_eps)
        self.router = Matrix((c.n_experts, c.d_model), std, random, may_quantise=False)
        self.gate = Matrix((c.n_experts, c.d_expert, c.d_model), std, random)
        self.up = Matrix((c.n_experts, c.d_expert, c.d_model), std, random)
        self.down = Matrix((c.n_experts, c.d_model, c.d_expert), out * 2, random)

    def forward(self, residual: Tensor, rotation: Tensor, dtype: torch.dtype) -> tuple[Tensor, LayerReport, Routing]:
        entered = residual
        residual = residual + self.attention(self.attention_norm(residual).to(dtype), rotation)
        normed = self.ffn_norm(residual)
        seen = entered if self.config.kind == "smallthinker" else normed
        routing = self.route(seen.flatten(0, 1))
        added, report = self.experts(normed.flatten(0, 1).to(dtype), routing)
        return residual + added.view_as(residual), report, routing

    def attention(self, x: Tensor, rotation: Tensor) -> Tensor:
        c, (batch, length, _) = self.config, x.shape
        q = self.q(x).view(batch, length, c.n_heads, c.head_dim)
        k = self.k(x).view(batch, length, c.n_kv_heads, c.head_dim)
        v = self.v(x).view(batch, length, c.n_kv_heads, c.head_dim)
        if c.kind == "qwen3moe":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(t, rotation).to(x.dtype).transpose(1, 2) for t in (q, k))
        k, v = (t.repeat_interleave(c.n_heads // c.n_kv_heads, dim=1) for t in (k, v.transpose(1, 2)))
        mixed = causal_attention(q, k, v)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def route(self, x: Tensor) -> Routing:
        logits = x @ self.router.weight.T
        probabilities = torch.softmax(logits, dim=-1)
        scores = torch.sigmoid(logits) if self.config.kind == "smallthinker" else probabilities
        chosen, experts = torch.topk(scores, self.config.top_k, dim=-1)
        return Routing(experts, chosen / chosen.sum(dim=-1, keepdim=True).clamp_min(2**-14), probabilities, logits)

    def experts(self, x: Tensor, routing: Routing) -> tuple[Tensor, LayerReport]:
        c = self.config
        groups = group_by_expert(routing.experts, c.n_experts)
        rows = dispatch(x, groups)
        into = torch.cat([self.gate.effective(), self.up.effective()], dim=1).to(x.dtype)
        gate, up = grouped_linear(rows, into, groups).chunk(2, dim=-1)
        activation = F.relu(gate) if c.kind == "smallthinker" else F.silu(gate)
        weights = groups.weights(routing.weights).to(x.dtype)
        rows = grouped_linear(activation * up * weights[:, None], self.down.effective().to(x.dtype), groups)
        return collect(rows, groups), self.report(routing, groups, gate, activation)

    def report(self, routing: Routing, groups: Groups, gate: Tensor, activation: Tensor) -> LayerReport:
        share = groups.counts.float() / groups.counts.sum()
        balance = self.config.n_experts * (share * routing.probabilities.mean(dim=0)).sum()
        sample = groups.position.flatten()[:8192]
        gate, activation = gate[sample].float(), activation[sample].float()
        activity = activation.mean() * gate.square().mean().clamp_min(1e-12).rsqrt()
        zeros = (activation.detach() == 0).float().mean()
        return LayerReport(balance, activity, routing.logits.square().mean(), groups.counts, zeros)


class Norm(nn.Module):
    """RMS norm with a weight, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Matrix(nn.Module):
    """A weight [out, in], or one for each expert, [n_experts, out, in]; seen as Q4_0 would have it if `quantised`."""

    def __init__(self, shape: tuple[int, ...], std: float, random: torch.Generator, may_quantise: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, generator=random) * std)
        self.may_quantise = may_quantise
        self.quantised = False

    def effective(self) -> Tensor:
        return straight_through_q4_0(self.weight) if self.quantised else self.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.effective().to(x.dtype))


def _exported(name: str) -> str:
    """A weight's name in files: experts' are `layers.N.gate`, `.up` and `.down`, without more."""
    return re.sub(r"\.(gate|up|down)\.weight$", r".\1", name)


def straight_through_q4_0(weight: Tensor) -> Tensor:
    """The weight rounded to Q4_0 along its rows, with the gradient of the weight itself."""
    return weight + (q4_0(weight.detach()) - weight.detach())


def q4_0(weight: Tensor) -> Tensor:
    """What ggml's Q4_0 makes of a weight: blocks of 32 with one float16 scale, -8 times which is the value of largest size."""
    blocks = weight.reshape(-1, 32)
    largest = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
    scale = largest / -8
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    steps = torch.floor(blocks * inverse + 8.5).clamp(0, 15) - 8
    return (steps * scale.half().float()).view_as(weight)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of [batch, heads, length, head_dim] to the positions up to its own.

    In float32 it is PyTorch's. In bfloat16, on a CPU, two halves of plain products take half the time of that.
    """
    if q.dtype == torch.float32:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    length = q.shape[2]
    hidden = torch.full((length, length), -math.inf, dtype=q.dtype).triu(1)
    q = q * (1 / math.sqrt(q.shape[3]))
    halves = []
    for rows in (slice(0, length // 2), slice(length // 2, length)):
        scores = q[:, :, rows] @ k[:, :, : rows.stop].transpose(2, 3) + hidden[rows, : rows.stop]
        halves.append(scores.softmax(dim=-1) @ v[:, :, : rows.stop])
    return torch.cat(halves, dim=2)


def rotary_angles(length: int, config: ModelConfig) -> Tensor:
    """[2, length, 1, head_dim / 2]: cosines and sines."""
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()])[:, :, None, :]


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary positions, NEOX order: the first half of a head is turned with the second. x: [batch, length, heads, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rotation
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
