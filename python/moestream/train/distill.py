"""Phase 3: the student writes on its own path, the teacher says what it would have thought, and the LoRA learns from that.

Each step the student, routed by its heads, goes on from prompts; the teacher sees the same tokens by its gates. With q the
student's distribution of the next token, p the teacher's, and T the k tokens that the teacher thinks the likeliest, the loss is
the reverse divergence over k + 1 outcomes, those of T and all the rest together:

    loss = mean over the student's tokens of  sum_{v in T} q_v ln(q_v / p_v)  +  q_r ln(q_r / p_r),
    q_r = 1 - sum_{v in T} q_v,  p_r likewise

Without its last term (a top-k divergence alone) a student could move mass out of T unseen. By the log-sum inequality it is at
most the full KL(q || p), and at least 0; it equals the full one for k = vocabulary. Training on the student's own texts (Agarwal
and others, On-Policy Distillation of Language Models, 2023; Gu and others, MiniLLM, 2023) shows it its own mistakes; no gradient
goes through the drawing of tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .plans import LoraPlan
from .recovery import LoraResult, Recovery
from .sft import rows_of
from .student import write_text

__all__ = ["tail_aware_divergence", "train_distill"]


def train_distill(
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
    """Trains the LoRA of a sidecar, or a new one, on what the student itself writes, and writes a sidecar with it.

    Validation is the same loss on texts of the teacher that are held out. Arguments, files and errors are those of
    :func:`moestream.train.sft.train_sft`, with `distill` in place of `sft` in the names of the curves.
    """
    plan = plan or LoraPlan()
    run = Recovery(
        "distill",
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
    held_out = run.teacher_texts(held_out=True)
    prompts = torch.from_numpy(run.prompts)

    def loss_of(tokens: Tensor) -> Tensor:
        first = run.first_step(tokens)
        with torch.no_grad():
            theirs = run.teacher.text(tokens[:, :-1], first)
        logits = run.student.text(tokens[:, :-1], first)
        return tail_aware_divergence(
            logits[:, plan.prompt_tokens - 1 :], theirs[:, plan.prompt_tokens - 1 :], plan.top_k
        ).mean()

    def loss_at(step: int) -> Tensor:
        chosen = prompts[rows_of(step, len(prompts), plan.batch, plan.seed)]
        own = write_text(
            run.student,
            chosen,
            plan.new_tokens,
            temperature=plan.temperature,
            top_p=plan.top_p,
            seed=[plan.seed, 1, step],
        )
        return loss_of(own)

    return run.train(loss_at, lambda: run.mean_loss(loss_of, held_out))


def tail_aware_divergence(student: Tensor, teacher: Tensor, top_k: int) -> Tensor:
    """The loss of each position [...] in nats, by logits [..., vocabulary]; see the top of the module.

    Logarithms of the rest are sums over the rest, not 1 minus a sum, so that a rest of 1e-12 is still a number.
    """
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    chosen = log_p.topk(min(top_k, log_p.shape[-1]), dim=-1).indices
    q, p = log_q.gather(-1, chosen), log_p.gather(-1, chosen)
    head = (q.exp() * (q - p)).sum(-1)
    if chosen.shape[-1] == log_p.shape[-1]:
        return head
    rest = torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, chosen, True)
    q_rest, p_rest = (one.masked_fill(rest, float("-inf")).logsumexp(-1) for one in (log_q, log_p))
    return head + q_rest.exp() * (q_rest - p_rest)
