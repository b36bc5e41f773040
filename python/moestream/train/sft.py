"""Phase 2: the LoRA learns to write as the teacher does, while routing follows the heads.

The teacher (the HF weights, in float32, by its gates) goes on from prompts. The student (the GGUF's weights, dequantised; routing
forced through the heads; see :mod:`moestream.train.student`) is trained to say the same tokens:

    loss = - mean over the teacher's tokens v at j of log softmax(logits of the student at j - 1)[v]

With `soft_targets` the teacher is asked again what its shares p of all tokens at j were, and the loss is - sum_v p_v log q_v. It is
what the other is on average over what the teacher could have drawn at j, so that both pull the same way and this one is far less
noisy (Rao and Blackwell; in distillation Hinton and others, Distilling the Knowledge in a Neural Network, 2015).

Only A and B of the LoRA are trained. Gradients go through the weights of the experts into the heads' inputs, so that states
learn to be predicted well; the choice of experts itself has no gradient.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .plans import LoraPlan
from .recovery import LoraResult, Recovery

__all__ = ["train_sft"]


def train_sft(
    folder: str | os.PathLike[str],
    model: str | os.PathLike[str],
    sidecar: str | os.PathLike[str],
    texts: Sequence[Sequence[int]],
    out: str | os.PathLike[str],
    *,
    plan: LoraPlan | None = None,
    validation: Sequence[Sequence[int]] | None = None,
    experts_used: int | None = None,
    on_validation: Callable[[int, float], None] = lambda step, loss: None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> LoraResult:
    """Trains a LoRA on texts of the teacher and writes a sidecar with the heads and it.

    Goes on where it was interrupted: from OUT.checkpoint, and with the texts in OUT.texts.npz and OUT.held-out.npz.

    Args:
        folder: Hugging Face weights of the model: the teacher.
        model: Its GGUF, quantised as it will run: the student.
        sidecar: Heads for that GGUF. A LoRA in it is trained on.
        texts: Tokens of texts, out of which prompts are drawn.
        out: The sidecar; OUT.sft.json and OUT.sft.png are the curves.
        validation: Tokens of texts to measure perplexity and divergence on, before and after.
        experts_used: K in place of the model's own, for the student.
        on_validation: Is told steps done and the loss on what is held out.
        progress: Is told what is done ("teacher" writes, "training"), and how much of how much.
        should_stop: Is asked between steps; then all is kept and `Interrupted` raised.

    Raises:
        Interrupted: `should_stop` said so.
        TrainingError, ModelError, SidecarError: Inputs do not belong together or are not supported; the message says which.
        OutputError: A file cannot be written.
    """
    plan = plan or LoraPlan()
    run = Recovery(
        "sft",
        folder,
        model,
        sidecar,
        texts,
        out,
        plan,
        validation=validation,
        experts_used=experts_used,
        on_validation=on_validation,
        progress=progress,
        should_stop=should_stop,
    )
    run.begin_lora()
    held_out, written = run.teacher_texts(held_out=True), run.teacher_texts(held_out=False)

    def loss_of(tokens: Tensor) -> Tensor:
        return next_token_loss(run.student.text(tokens[:, :-1], run.first_step(tokens)), tokens, plan.prompt_tokens)

    def loss_at(step: int) -> Tensor:
        tokens = written[rows_of(step, len(written), plan.batch, plan.seed)]
        if not plan.soft_targets:
            return loss_of(tokens)
        first = run.first_step(tokens)
        with torch.no_grad():
            theirs = run.teacher.text(tokens[:, :-1], first)
        return soft_loss(run.student.text(tokens[:, :-1], first), theirs, plan.prompt_tokens)

    return run.train(loss_at, lambda: run.mean_loss(loss_of, held_out))


def next_token_loss(logits: Tensor, tokens: Tensor, prompt: int) -> Tensor:
    """Mean cross entropy in nats of the tokens [texts, T] behind the prompt, by logits [texts, T - 1, vocabulary] of those before."""
    return functional.cross_entropy(logits[:, prompt - 1 :].flatten(0, 1), tokens[:, prompt:].flatten())


def soft_loss(student: Tensor, teacher: Tensor, prompt: int) -> Tensor:
    """Mean cross entropy in nats of the teacher's shares behind the prompt, both by logits [texts, T - 1, vocabulary]."""
    p, log_q = teacher[:, prompt - 1 :].softmax(-1), student[:, prompt - 1 :].log_softmax(-1)
    return -(p * log_q).sum(-1).mean()


def rows_of(step: int, count: int, batch: int, seed: int) -> Tensor:
    """Indices of the texts of a step; each time through, all are in a new order."""
    size = min(batch, count)
    epoch, place = divmod(step, count // size)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    return order[place * size : (place + 1) * size]
