"""What the demo models are: their shape, and how large a file may ship."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("smallthinker", "qwen3moe")
"""The names of their architectures in llama.cpp."""
MOST_BYTES = 12_000_000
"""Of a Q4_0 file in the package."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a demo model. `d_expert` is the width of one expert, `context` the length that it is trained with."""

    kind: str
    vocab_size: int = 8192
    n_layers: int = 8
    d_model: int = 256
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    n_experts: int = 32
    top_k: int = 4
    d_expert: int = 64
    context: int = 512
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind of model {self.kind!r}; known: {', '.join(KINDS)}")

    @property
    def parameters(self) -> int:
        """All weights of the model; the output is the embedding, used twice."""
        attention = self.d_model * self.head_dim * 2 * (self.n_heads + self.n_kv_heads)
        experts = self.n_experts * 3 * self.d_model * self.d_expert
        norms = 2 * self.d_model + (2 * self.head_dim if self.kind == "qwen3moe" else 0)
        router = self.n_experts * self.d_model
        return self.vocab_size * self.d_model + self.d_model + self.n_layers * (attention + experts + norms + router)

    @property
    def active_parameters(self) -> int:
        """The weights that one token is multiplied with."""
        idle = self.n_layers * (self.n_experts - self.top_k) * 3 * self.d_model * self.d_expert
        return self.parameters - idle
