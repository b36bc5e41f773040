"""Train the LoRA on what the student writes, as the teacher sees it: phase 3.

The student, with the weights of the GGUF, the sidecar's LoRA and routed by its
heads, goes on from prompts drawn from FILE; the teacher, the model's Hugging
Face weights, says at each token what it would have thought. The loss is the
reverse divergence over the teacher's likeliest tokens and all others together.
OUT.distill.json and OUT.distill.png are the curves.

  moestream train distill -m MODEL.gguf --hf DIR --sidecar sft.gguf \\
                          -f text.txt -o MODEL.sidecar.gguf
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...train.plans import LoraPlan
from ._recovery import add_recovery_arguments, show, trained

if TYPE_CHECKING:
    from ...train.recovery import LoraResult


def distill(
    *,
    model: str | os.PathLike[str] | None = None,
    hf_repo: str | None = None,
    hf_file: str | None = None,
    hf: str | os.PathLike[str],
    sidecar: str | os.PathLike[str],
    file: Sequence[str | os.PathLike[str]],
    validation: Sequence[str | os.PathLike[str]] | None = None,
    output: str | os.PathLike[str],
    experts_used: int | None = None,
    steps: int = LoraPlan.steps,
    batch: int = LoraPlan.batch,
    prompt_tokens: int = LoraPlan.prompt_tokens,
    new_tokens: int = LoraPlan.new_tokens,
    texts: int = LoraPlan.texts,
    temperature: float = LoraPlan.temperature,
    top_p: float = LoraPlan.top_p,
    rank: int = LoraPlan.rank,
    alpha: float = LoraPlan.alpha,
    top_k: int = LoraPlan.top_k,
    soft_targets: bool = LoraPlan.soft_targets,
    train_heads: bool = LoraPlan.train_heads,
    learning_rate: float = LoraPlan.learning_rate,
    validate_every: int = LoraPlan.validate_every,
    patience: int = LoraPlan.patience,
    seed: int = LoraPlan.seed,
    threads: int | None = None,
    on_validation: Callable[[int, float], None] = lambda step, loss: None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> LoraResult:
    """What `moestream train distill` does, with the long names of its options.

    Args:
        model: The GGUF that the sidecar is for. By default the one that ships with the package.
        hf_repo, hf_file: As in `moestream generate`.
        hf: A folder of the model's Hugging Face weights.
        file, validation: Files of text, or of token ids (`.npy`).
        output: The sidecar to write.
        threads: By default one per physical core this process may use.
        sidecar, experts_used, on_validation, progress, should_stop: As in `moestream.train.distill.train_distill`; the others as in its `LoraPlan`.

    Raises:
        MoestreamError: The options or the files are no good, or do not belong together.
        moestream.train.recovery.Interrupted: `should_stop` said so.
    """
    return trained("distill", **locals())


def run(**options: Any) -> int:
    """Runs `distill` for the command line and returns the exit code."""
    return show(distill, **options)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `distill`."""
    add_recovery_arguments(parser)
