"""How each phase trains; known without PyTorch, so that the command line can tell the defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import OptionError

__all__ = ["HeadPlan", "LoraPlan"]


def _require_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise OptionError(f"seed={seed}: give a number from 0 to {2**32 - 1}")


@dataclass(frozen=True)
class HeadPlan:
    """How heads are trained; what changes a result is here."""

    width: int | None = None
    """Of the hidden layer; by default a quarter of d, as published heads have, and 32 at least."""
    steps: int = 3000
    batch: int = 1024
    """Tokens a step, the same for all heads."""
    learning_rate: float = 2e-3
    warm_up: int = 100
    weight_decay: float = 0.01
    validation: float = 0.1
    """Share of the tokens that is kept for validation: whole texts, if there are several."""
    validate_every: int = 200
    patience: int = 5
    """Validations without a head that does better, after which training ends."""
    seed: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "validate_every", "patience", "threads"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: give a number of at least 1")
        if self.width is not None and self.width < 1:
            raise OptionError(f"width={self.width}: give a number of at least 1")
        if self.warm_up < 0 or not 0 <= self.weight_decay < math.inf or not 0 < self.learning_rate < math.inf:
            raise OptionError("warm_up and weight_decay must be at least 0, learning_rate more")
        _require_seed(self.seed)
        if not 0 < self.validation < 1:
            raise OptionError(f"validation={self.validation}: give a share between 0 and 1")


@dataclass(frozen=True)
class LoraPlan:
    """How a LoRA is trained; what changes a result is here."""

    steps: int = 200
    batch: int = 8
    """Texts a step."""
    prompt_tokens: int = 32
    """Of each text, which the gate routes."""
    new_tokens: int = 224
    """Of each text, written by the teacher (phase 2) or the student (phase 3)."""
    texts: int = 512
    """Texts that the teacher writes; an eighth is for validation."""
    temperature: float = 1.0
    top_p: float = 1.0
    rank: int = 16
    alpha: float = 32.0
    top_k: int = 32
    """Phase 3: tokens of the teacher whose shares are compared one by one."""
    soft_targets: bool = False
    """Phase 2: learn the teacher's shares of all tokens at each place, not only the token that it drew there."""
    train_heads: bool = False
    """Train the heads too, by the same loss: the weights of the experts that they choose carry its gradient to them."""
    learning_rate: float = 5e-4
    warm_up: int = 10
    clip: float = 1.0
    """Largest norm of all gradients together."""
    validate_every: int = 20
    patience: int = 5
    """Validations that are not better than the best, after which training ends."""
    seed: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch",
            "prompt_tokens",
            "new_tokens",
            "rank",
            "top_k",
            "validate_every",
            "patience",
            "threads",
        ):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: give a number of at least 1")
        if self.texts < 2:
            raise OptionError(f"texts={self.texts}: at least one to train on and one for validation are needed")
        if (
            not 0 <= self.temperature < math.inf
            or not 0 < self.top_p <= 1
            or not 0 < self.alpha < math.inf
            or not 0 < self.learning_rate < math.inf
            or not self.clip > 0
            or self.warm_up < 0
        ):
            raise OptionError(
                "temperature and warm_up must be at least 0, top_p above 0 and at most 1, alpha, learning_rate and clip above 0"
            )
        _require_seed(self.seed)

    @property
    def held_out(self) -> int:
        return max(1, self.texts // 8)
