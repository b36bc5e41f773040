"""Phase 1: heads learn to say at token t what the router of the next layer will say at token t + 1.

    result = train_heads("data", "model.gguf", "model.sidecar.gguf")
    for owner in result.owners:
        print(owner.layer, owner.recall, owner.lookahead, owner.repeat, owner.kept)

For the owner N and each token t that has a next one in its text, the input is x = [h, a, b] of layer N at t (see
:mod:`moestream.train.head_arrays`), the target the router's output of layer N + 1 at t + 1. Nothing else is trained, and inputs
are data, so no gradient reaches the model. The loss is :func:`moestream.train.head_model.head_loss`, averaged over heads; what
is differentiated is the sum, so that no head's steps depend on how many others are trained with it. Each head keeps the weights
that did best on validation; training ends when for some time none did better.

What it is compared with: :mod:`moestream.train.accuracy`.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .._capture import fingerprint
from ..errors import OptionError, TrainingError
from ..sidecar import Sidecar
from ._gguf import GgufWeights
from ._run import Interrupted, cosine, load_checkpoint, remove_checkpoint, require_other, save_checkpoint
from .accuracy import overlap, predicted
from .curves import History, write_curves
from .dataset import Capture
from .head_arrays import HeadArrays, multi_hot, packed, require_type
from .head_model import StackedHeads, head_loss
from .plans import HeadPlan

__all__ = ["HeadsResult", "OwnerQuality", "split", "train_heads", "worth_keeping"]

_VALIDATION_TOKENS = 8192  # while training; what is told at the end is of all
_TOKENS_AT_ONCE = 2048
_SAVE_EVERY_S = 60.0


@dataclass(frozen=True)
class OwnerQuality:
    """What one owner's head is worth on the validation tokens. Lookahead is None where the norm is not known."""

    layer: int
    loss: float
    recall: float
    exact: float
    untrained_recall: float
    untrained_exact: float
    lookahead_recall: float | None
    lookahead_exact: float | None
    repeat_recall: float
    repeat_exact: float
    chance: float
    """K / E."""
    kept: bool


@dataclass(frozen=True)
class HeadsResult:
    """What phase 1 gives."""

    sidecar: Path
    curves: Path
    picture: Path
    owners: tuple[OwnerQuality, ...]
    steps: int
    """Steps done; fewer than planned if it ended early."""
    train_tokens: int
    validation_tokens: int
    history: History


def train_heads(
    data: str | os.PathLike[str] | Capture,
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    plan: HeadPlan | None = None,
    owners: Sequence[int] | None = None,
    keep: float = 0.5,
    kind: str = "Q8_0",
    checkpoint: str | os.PathLike[str] | None = None,
    provenance: dict[str, Any] | None = None,
    on_validation: Callable[[int, float], None] = lambda step, loss: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> HeadsResult:
    """Trains heads on captured data and writes a sidecar with those that are worth it, and the curves beside it.

    Goes on from the checkpoint if there is one, and then ends with the same weights as without a break. All heads are trained
    together: memory is 20 bytes a weight, (d + 2 E) (E + w) + E w weights a head.

    Args:
        data: A folder of :func:`moestream.train.capture`.
        model: The GGUF that was captured: its routers are what heads begin as, and its hash binds the sidecar.
        out: The sidecar; OUT.heads.json and OUT.heads.png are the curves.
        owners: Layers whose heads are trained and kept; by default all that were captured, and the rule of `keep` decides.
        keep: See :func:`worth_keeping`; without effect if `owners` is given.
        kind: Type of the heads in the sidecar: Q8_0, Q4_0, F16 or F32.
        checkpoint: By default OUT.checkpoint; removed at the end.
        provenance: Is added to what the sidecar says of its making.
        on_validation: Is told steps done and the mean loss.
        progress: Is told steps done and wanted.
        should_stop: Is asked after each step; then the checkpoint is written and training ends.

    Raises:
        Interrupted: `should_stop` said so.
        TrainingError: Data, model and checkpoint do not belong together, or there is too little data.
        OptionError: An option makes no sense.
        OutputError: A file cannot be written.
    """
    plan = plan or HeadPlan()
    require_type(kind)
    if not 0 <= keep <= 1:
        raise OptionError(f"keep={keep}: give a share of what the best head finds, from 0 to 1")
    capture = data if isinstance(data, Capture) else Capture(data)
    weights = GgufWeights(model)
    require_other(out, [file.path for file in weights.model.model.files])
    if fingerprint(file.path for file in weights.model.model.files) != capture.header.model_hash:
        raise TrainingError(
            f"{capture.path}: was captured from {capture.header.model}, not from {model}; name that model, or capture this one"
        )
    chosen = _chosen(capture, owners)
    head = capture.header
    width = plan.width or max(32, head.d // 4)
    train, validation = split(capture, plan.validation, plan.seed)
    routers = {owner: weights.router(owner + 1) for owner in chosen}
    for owner, router in routers.items():
        if router.shape != (head.n_experts, head.d):
            raise TrainingError(
                f"{model}: the router of layer {owner + 1} reads {router.shape[1]} numbers, and the experts of layer {owner} {head.d}: "
                "heads cannot begin as this router"
            )
    initial = [HeadArrays.untrained(owner, routers[owner], width, plan.seed) for owner in chosen]
    heads, history, done = _trained(
        capture,
        plan,
        initial,
        train,
        validation,
        Path(checkpoint or f"{os.fspath(out)}.checkpoint"),
        on_validation,
        progress,
        should_stop,
    )

    stored = [one.stored(kind) for one in heads]
    measured = [_quality(capture, one, weights, validation) for one in stored]
    kept = (
        set(chosen)
        if owners is not None
        else worth_keeping({q["layer"]: q["recall"] for q in measured}, head.top_k / head.n_experts, keep)
    )
    if not kept:
        raise TrainingError(
            f"no head finds more than chance, {head.top_k} of {head.n_experts}; capture more text, or name the layers whose heads are kept (--owners)"
        )
    found = tuple(OwnerQuality(**one, kept=one["layer"] in kept) for one in measured)
    about = {
        "phase": "heads",
        "data": {
            "source": head.source,
            "tokens": head.tokens,
            "texts": len(capture.starts),
            "tokens_at_once": head.tokens_at_once,
        },
        "plan": {**asdict(plan), "width": width},
        "steps": done,
        **(provenance or {}),
    }
    quality = {"heads": {"tokens": len(validation), "owners": [asdict(one) for one in found]}}
    Sidecar(
        base=weights.model.base,
        heads=packed([one for one in heads if one.owner in kept], top_k=head.top_k, kind=kind),
        provenance={"heads": about},
        quality=quality,
    ).write(out)
    curves, picture = write_curves(history, out, "heads", f"Heads of {head.model}", {**about, **quality})
    remove_checkpoint(Path(checkpoint or f"{os.fspath(out)}.checkpoint"))
    return HeadsResult(Path(out), curves, picture, found, done, len(train), len(validation), history)


def split(capture: Capture, share: float, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Tokens t to train on and to validate on; each has a next token in its text.

    Whole texts are kept apart, drawn with the seed until they have the share; of a single text it is the end, and the token
    before that is left out, because its target is in it. Texts of one token count for nothing.

    Raises:
        TrainingError: One of both would be empty.
    """
    texts = [i for i, text in enumerate(capture.texts()) if text.stop - text.start > 1]
    lengths = np.array([text.stop - text.start for text in capture.texts()])[texts]
    if len(texts) < 2:
        pairs = capture.pairs()
        cut = len(pairs) - round(share * len(pairs))
        train, validation = pairs[: max(0, cut - 1)], pairs[cut:]
    else:
        order = np.random.default_rng(seed).permutation(len(texts))
        apart = int(np.searchsorted(np.cumsum(lengths[order]), share * lengths.sum())) + 1
        apart = min(apart, len(texts) - 1)
        train, validation = (capture.pairs(sorted(texts[i] for i in part)) for part in (order[apart:], order[:apart]))
    if not len(train) or not len(validation):
        raise TrainingError(
            f"{capture.path}: {capture.header.tokens} tokens are too few to train on some and to validate on others; capture more text"
        )
    return train, validation


def worth_keeping(recall: dict[int, float], chance: float, keep: float) -> set[int]:
    """The layers whose head finds, beyond chance, at least the share `keep` of what the best head finds beyond chance.

    Early layers route by the token itself, which a head does not know, and predict badly; how many they are depends on the
    model. They keep their own gate. None is worth it where the best finds no more than chance.
    """
    best = max(recall.values()) - chance
    return {layer for layer, found in recall.items() if best > 0 and found - chance >= keep * best}


# Training -------------------------------------------------------------------------------------------------------------


def _trained(
    capture: Capture,
    plan: HeadPlan,
    initial: Sequence[HeadArrays],
    train: npt.NDArray[np.int64],
    validation: npt.NDArray[np.int64],
    checkpoint: Path,
    on_validation: Callable[[int, float], None],
    progress: Callable[[int, int], None],
    should_stop: Callable[[], bool],
) -> tuple[list[HeadArrays], History, int]:
    """The best weights of each head, the losses, and the steps done."""
    torch.set_num_threads(plan.threads)
    owners = [head.owner for head in initial]
    model = StackedHeads(initial)
    best = StackedHeads(initial)
    optimiser = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay)
    batches, order = _Batches(capture, owners), _Order(train, plan.batch, plan.seed)
    watched = validation[:: max(1, len(validation) // _VALIDATION_TOKENS)]
    about = {
        **asdict(plan),
        "width": initial[0].width,
        "owners": owners,
        "data": _identity(capture),
        "torch": str(torch.__version__),
    }

    history, done, lowest, since = History(), 0, torch.full((len(owners),), math.inf), 0
    if (state := load_checkpoint(checkpoint, about)) is not None:
        model.load_state_dict(state["model"])
        best.load_state_dict(state["best"])
        optimiser.load_state_dict(state["optimiser"])
        history, done, lowest, since = History.of(state["history"]), state["done"], state["lowest"], state["since"]
    started, before, saved = time.monotonic(), history.seconds, time.monotonic()

    def save() -> None:
        history.seconds = before + time.monotonic() - started
        state = {"model": model.state_dict(), "best": best.state_dict(), "optimiser": optimiser.state_dict()}
        save_checkpoint(
            checkpoint, about, {**state, "history": history.as_dict(), "done": done, "lowest": lowest, "since": since}
        )

    progress(done, plan.steps)
    while done < plan.steps and since < plan.patience:
        for group in optimiser.param_groups:
            group["lr"] = plan.learning_rate * cosine(done, plan.steps, plan.warm_up)
        x, gate = batches.at(order.at(done))
        losses = head_loss(model(x), gate, capture.header.gating).mean(dim=1)
        optimiser.zero_grad(set_to_none=True)
        losses.sum().backward()
        optimiser.step()
        mean = float(losses.detach().mean())
        if not math.isfinite(mean):
            raise TrainingError(
                f"the loss is no number after {done + 1} steps; train with a lower learning rate than {plan.learning_rate}"
            )
        history.train.append(mean)
        done += 1
        if done % plan.validate_every == 0 or done == plan.steps:
            now = _mean_losses(model, batches, watched, capture.header.gating)
            history.validation.append((done, float(now.mean())))
            for owner, loss in zip(owners, now.tolist(), strict=True):
                history.parts.setdefault(f"layer {owner}", []).append(loss)
            better = now < lowest * 0.999
            since = 0 if bool(better.any()) else since + 1
            improved = now < lowest
            lowest = torch.minimum(now, lowest)
            for mine, theirs in zip(best.parameters(), model.parameters(), strict=True):
                mine.data[improved] = theirs.data[improved]
            on_validation(done, float(now.mean()))
        progress(done, plan.steps)
        stop = should_stop() and done < plan.steps
        if stop or time.monotonic() - saved > _SAVE_EVERY_S:
            save()
            saved = time.monotonic()
        if stop:
            raise Interrupted(f"stopped after {done} of {plan.steps} steps; the same command goes on from {checkpoint}")
    save()  # what remains may fail, for want of space say
    return best.arrays(), history, done


class _Order:
    """Which tokens a step trains on: the next of an order that is drawn anew for each time through the data."""

    def __init__(self, train: npt.NDArray[np.int64], batch: int, seed: int) -> None:
        self._train, self._seed, self._size = train, seed, min(batch, len(train))
        self._epoch, self._order = -1, train

    def at(self, step: int) -> npt.NDArray[np.int64]:
        epoch, place = divmod(step, len(self._train) // self._size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(self._train)
        return np.sort(
            self._order[place * self._size : (place + 1) * self._size]
        )  # ascending: neighbours are read together


class _Batches:
    """Inputs and targets of heads at tokens, out of the memory-mapped arrays."""

    def __init__(self, capture: Capture, owners: Sequence[int]) -> None:
        self._capture, self._owners, self._first = capture, owners, capture.firsts()

    def at(self, t: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """x [heads, n, d + 2 E] of tokens t, and what the consumers' routers gave at t + 1, [heads, n, E]."""
        rows = [head_inputs(self._capture, owner, t, self._first) for owner in self._owners]
        targets = [self._capture.gate(owner + 1)[t + 1].astype(np.float32) for owner in self._owners]
        return torch.from_numpy(np.stack(rows)), torch.from_numpy(np.stack(targets))


def head_inputs(
    capture: Capture, owner: int, t: npt.NDArray[np.int64], first: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float32]:
    """x [n, d + 2 E] of an owner at tokens t; the first token of a text has none before it."""
    n_experts, executed = capture.header.n_experts, capture.experts(owner)
    nothing = np.zeros(len(t), bool)
    now, then = (
        multi_hot(executed[t], nothing, n_experts),
        multi_hot(executed[np.maximum(t - 1, 0)], first[t], n_experts),
    )
    return np.concatenate([capture.hidden(owner)[t].astype(np.float32), now, then], axis=1)


@torch.no_grad()
def _mean_losses(model: StackedHeads, batches: _Batches, t: npt.NDArray[np.int64], gating: str) -> torch.Tensor:
    """[heads]: mean loss of each over tokens."""
    total = torch.zeros(len(model.owners))
    for begin in range(0, len(t), _TOKENS_AT_ONCE):
        x, gate = batches.at(t[begin : begin + _TOKENS_AT_ONCE])
        total += head_loss(model(x), gate, gating).sum(dim=1)
    return total / len(t)


def _chosen(capture: Capture, owners: Sequence[int] | None) -> list[int]:
    if owners is None:
        return capture.header.owners
    if not owners:
        raise OptionError("owners is empty: name at least one layer, or leave it out for all")
    if missing := [owner for owner in owners if owner not in capture.header.owners]:
        raise OptionError(
            f"{capture.path}: has no data for a head of layer {missing[0]}; it has them for {capture.header.owners}"
        )
    return sorted(set(owners))


def _identity(capture: Capture) -> str:
    """Tells captured data apart: by its header, tokens and texts."""
    digest = hashlib.sha256(repr(capture.header).encode())
    digest.update(np.ascontiguousarray(capture.tokens).tobytes())
    digest.update(np.ascontiguousarray(capture.starts).tobytes())
    return digest.hexdigest()


# Measuring ------------------------------------------------------------------------------------------------------------


def _quality(capture: Capture, head: HeadArrays, weights: GgufWeights, t: npt.NDArray[np.int64]) -> dict[str, Any]:
    """The fields of an `OwnerQuality` but `kept`."""
    owner, gating = head.owner, capture.header.gating
    executed, hidden, first = capture.experts(owner), capture.hidden(owner), capture.firsts()
    sums: dict[str, npt.NDArray[np.float64]] = {}
    loss = 0.0
    for begin in range(0, len(t), _TOKENS_AT_ONCE):
        now = t[begin : begin + _TOKENS_AT_ONCE]
        wanted = capture.experts(owner + 1)[now + 1]
        z = head.forward(hidden[now], executed[now], executed[np.maximum(now - 1, 0)], first[now])
        gate = torch.from_numpy(capture.gate(owner + 1)[now + 1].astype(np.float32))
        loss += float(head_loss(torch.from_numpy(z), gate, gating).sum())
        for name, experts in predicted(capture, head, weights, now).items():
            sums[name] = sums.get(name, np.zeros(2)) + np.array(overlap(experts, wanted)) * len(now)
    found: dict[str, Any] = {
        "layer": owner,
        "loss": loss / len(t),
        "chance": capture.header.top_k / capture.header.n_experts,
    }
    for name, prefix in (("head", ""), ("untrained", "untrained_"), ("lookahead", "lookahead_"), ("repeat", "repeat_")):
        recall, exact = (sums[name] / len(t)).tolist() if name in sums else (None, None)
        found |= {f"{prefix}recall": recall, f"{prefix}exact": exact}
    return found
