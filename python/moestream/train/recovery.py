"""What phases 2 and 3 share: options, prompts, the teacher's texts, and the loop that trains a LoRA."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .._capture import fingerprint
from .._whole_file import writing_whole
from ..errors import OutputError, TrainingError
from ..sidecar import Heads, Sidecar, sidecar_for
from ._run import Interrupted, cosine, load_checkpoint, remove_checkpoint, require_other, save_checkpoint
from .curves import History, write_curves
from .head_arrays import packed, unpacked
from .plans import LoraPlan
from .student import Measured, Model, add_lora, load_lora, load_model, lora_of, measure, without_lora, write_text

__all__ = ["LoraResult", "Recovery", "draw_prompts", "teacher_texts"]

_SAVE_EVERY_S = 120.0
_TEXTS_AT_ONCE = 32
_MEASURED_WINDOWS = 16


@dataclass(frozen=True)
class LoraResult:
    """What a phase gives. Measured is the student on validation texts: by its gates, on its path without a LoRA, before and after."""

    sidecar: Path
    curves: Path
    picture: Path
    steps: int
    history: History
    gate: Measured | None
    without: Measured | None
    before: Measured | None
    after: Measured | None


def draw_prompts(texts: Sequence[Sequence[int]], count: int, length: int, seed: int) -> npt.NDArray[np.int64]:
    """Beginnings [count, length] for texts to be written: places in the texts, each as probable as any other.

    Raises:
        TrainingError: No text is that long.
    """
    long = [np.asarray(text, np.int64) for text in texts if len(text) >= length]
    if not long:
        raise TrainingError(f"no text has the {length} tokens of a prompt: give longer texts, or shorter prompts")
    ends = np.cumsum([len(text) - length + 1 for text in long])
    places = np.random.default_rng(seed).integers(0, ends[-1], count)
    which = np.searchsorted(ends, places, side="right")
    first = places - np.concatenate([[0], ends[:-1]])[which]
    return np.stack([long[text][at : at + length] for text, at in zip(which, first, strict=True)])


def teacher_texts(
    teacher: Model,
    identity: str,
    prompts: npt.NDArray[np.int64],
    plan: LoraPlan,
    file: Path,
    progress: Callable[[int, int], None],
    should_stop: Callable[[], bool],
) -> npt.NDArray[np.int64]:
    """Texts [count, prompt + new tokens] that the teacher writes; they are kept in a file, and written on from it.

    Args:
        identity: Tells the teacher from others.

    Raises:
        TrainingError: The file is damaged, or of other prompts or options.
        Interrupted: `should_stop` said so.
    """
    about = {name: getattr(plan, name) for name in ("prompt_tokens", "new_tokens", "temperature", "top_p", "seed")}
    about["prompts"] = hashlib.sha256(prompts.tobytes()).hexdigest()
    about["teacher"] = identity
    done = np.zeros((0, plan.prompt_tokens + plan.new_tokens), np.int64)
    if file.exists():
        done = _kept_texts(file, about)
    progress(len(done), len(prompts))
    while len(done) < len(prompts):
        part = torch.from_numpy(prompts[len(done) : len(done) + _TEXTS_AT_ONCE])
        written = write_text(
            teacher, part, plan.new_tokens, temperature=plan.temperature, top_p=plan.top_p, seed=[plan.seed, len(done)]
        )
        done = np.concatenate([done, written.numpy()])
        with writing_whole(file, OutputError) as out:
            np.savez(out, about=np.frombuffer(json.dumps(about).encode(), np.uint8), texts=done.astype(np.int32))
        progress(len(done), len(prompts))
        if should_stop() and len(done) < len(prompts):
            raise Interrupted(
                f"stopped after {len(done)} of {len(prompts)} texts of the teacher; the same command goes on from {file}"
            )
    return done


def _kept_texts(file: Path, about: Mapping[str, Any]) -> npt.NDArray[np.int64]:
    try:
        with np.load(file, allow_pickle=False) as members:
            theirs, texts = json.loads(members["about"].tobytes()), members["texts"].astype(np.int64)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as exc:
        raise TrainingError(
            f"{file}: no texts of a teacher, or damaged ones ({exc}); remove it to have them written anew"
        ) from exc
    if differing := sorted(name for name in about if theirs.get(name) != about[name]):
        raise TrainingError(
            f"{file}: its texts were written with another {', '.join(differing)}; give the same as then, or remove it"
        )
    return texts


class Recovery:
    """A phase: teacher, student, what is trained on, and where things go.

    Raises:
        TrainingError, ModelError, SidecarError: They do not belong together, or are none.
    """

    def __init__(
        self,
        phase: str,
        folder: str | os.PathLike[str],
        model: str | os.PathLike[str],
        sidecar: str | os.PathLike[str],
        texts: Sequence[Sequence[int]],
        out: str | os.PathLike[str],
        plan: LoraPlan,
        *,
        validation: Sequence[Sequence[int]] | None,
        experts_used: int | None,
        on_validation: Callable[[int, float], None],
        progress: Callable[[str, int, int], None],
        should_stop: Callable[[], bool],
    ) -> None:
        torch.set_num_threads(plan.threads)
        self.phase, self.plan, self.out, self.model_path = phase, plan, Path(out), Path(model)
        self.on_validation, self.progress, self.should_stop = on_validation, progress, should_stop
        require_other(out, [Path(model), Path(sidecar)])
        self.sidecar = sidecar_for(model, sidecar)
        if self.sidecar.heads is None:
            raise TrainingError(
                f"{sidecar}: has no heads, so there is no path to train on; begin with `moestream train heads`"
            )
        self.teacher = load_model(folder)
        self.student = load_model(folder, weights=model, heads=unpacked(self.sidecar.heads), experts_used=experts_used)
        _require_tokens([*texts, *(validation or ())], self.teacher.hf.config.vocab_size, folder)
        self.checkpoint = Path(f"{os.fspath(out)}.checkpoint")
        prompts = draw_prompts(texts, plan.texts, plan.prompt_tokens, plan.seed)
        self.prompts = prompts[plan.held_out :]
        self._held_out_prompts = prompts[: plan.held_out]
        self.windows = None if validation is None else _windows(validation, plan.prompt_tokens + plan.new_tokens)
        self.about = {
            "phase": phase,
            **asdict(plan),
            "experts_used": experts_used,
            "prompts": hashlib.sha256(prompts.tobytes()).hexdigest(),
            "sidecar": _hash_of(Path(sidecar)),
            "teacher": fingerprint(sorted([*Path(folder).glob("*.safetensors"), *Path(folder).glob("*.bin")])),
            "torch": str(torch.__version__),
        }

    def teacher_texts(self, *, held_out: bool) -> Tensor:
        """Texts of the teacher for validation, or for training."""
        name = "held-out" if held_out else "texts"
        prompts = self._held_out_prompts if held_out else self.prompts
        file = Path(f"{self.out}.{name}.npz")
        written = teacher_texts(
            self.teacher,
            self.about["teacher"],
            prompts,
            self.plan,
            file,
            lambda done, total: self.progress("teacher", done, total),
            self.should_stop,
        )
        return torch.from_numpy(written)

    def first_step(self, tokens: Tensor) -> Tensor:
        """[texts]: the position behind the prompt, which is decoded first."""
        return torch.full((len(tokens),), self.plan.prompt_tokens, dtype=torch.long)

    def train(self, loss_at: Callable[[int], Tensor], validate: Callable[[], float]) -> LoraResult:
        """Trains the student's LoRA, keeps what validates best, and writes the sidecar and the curves.

        Args:
            loss_at: The loss of a step, which is all that a step depends on besides the weights.
            validate: The loss on what is held out.

        Raises:
            Interrupted: `should_stop` said so; the checkpoint is written.
            TrainingError: The loss is no number, or the checkpoint is another's.
        """
        gate, without, before = self._measure(gate=True), self._measure(without=True), self._measure()
        history, done = self._loop(loss_at, validate)
        heads = self._heads()
        after = self._measure()
        told = {
            name: asdict(one)
            for name, one in (("gate", gate), ("without", without), ("before", before), ("after", after))
            if one is not None
        }
        about = {
            **{name: value for name, value in self.about.items() if name not in ("sidecar", "prompts", "teacher")},
            "steps_done": done,
        }
        Sidecar(
            base=self.sidecar.base,
            heads=heads,
            lora=lora_of(self.student),
            provenance={**self.sidecar.provenance, self.phase: about},
            quality={**self.sidecar.quality, self.phase: told},
        ).write(self.out)
        title = {"sft": "LoRA on the teacher's texts", "distill": "LoRA on the student's own texts"}[self.phase]
        curves, picture = write_curves(history, self.out, self.phase, title, {**about, "measured": told})
        remove_checkpoint(self.checkpoint)
        return LoraResult(self.out, curves, picture, done, history, gate, without, before, after)

    def _heads(self) -> Heads:
        """The sidecar's heads. Trained ones are stored as those are, and the student has them from here on as they are stored."""
        heads = self.sidecar.heads
        assert heads is not None
        if self.plan.train_heads:
            arrays = [head.arrays(owner) for owner, head in self.student.heads.items()]
            heads = packed(arrays, top_k=heads.top_k, kind=heads.heads[0].linear_h.type_name)
            for owner, stored in unpacked(heads).items():
                self.student.heads[owner].take(stored)
        return heads

    def _measure(self, *, gate: bool = False, without: bool = False) -> Measured | None:
        if self.windows is None:
            return None
        if gate or without:
            with without_lora(self.student):
                return measure(self.teacher, self.student, self.windows, gate=gate)
        return measure(self.teacher, self.student, self.windows)

    def _loop(self, loss_at: Callable[[int], Tensor], validate: Callable[[], float]) -> tuple[History, int]:
        plan, parameters = self.plan, self.student.parameters()
        optimiser = torch.optim.AdamW(parameters, lr=plan.learning_rate, weight_decay=0.0)
        history, done, lowest, since = History(), 0, math.inf, 0
        best = [parameter.detach().clone() for parameter in parameters]
        if (state := load_checkpoint(self.checkpoint, self.about)) is not None:
            for parameter, kept in zip(parameters, state["lora"], strict=True):
                parameter.data.copy_(kept)
            optimiser.load_state_dict(state["optimiser"])
            best, history = state["best"], History.of(state["history"])
            done, lowest, since = state["done"], state["lowest"], state["since"]
        else:
            lowest = validate()
            history.validation.append((0, lowest))
            self.on_validation(0, lowest)
        begun, earlier, saved = time.monotonic(), history.seconds, time.monotonic()

        def save() -> None:
            history.seconds = earlier + time.monotonic() - begun
            state = {
                "lora": [parameter.detach() for parameter in parameters],
                "best": best,
                "optimiser": optimiser.state_dict(),
            }
            save_checkpoint(
                self.checkpoint,
                self.about,
                {**state, "history": history.as_dict(), "done": done, "lowest": lowest, "since": since},
            )

        self.progress("training", done, plan.steps)
        while done < plan.steps and since < plan.patience:
            for group in optimiser.param_groups:
                group["lr"] = plan.learning_rate * cosine(done, plan.steps, plan.warm_up)
            loss = loss_at(done)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, plan.clip)
            optimiser.step()
            history.train.append(float(loss.detach()))
            if not math.isfinite(history.train[-1]):
                raise TrainingError(
                    f"the loss is no number after {done + 1} steps; train with a lower learning rate than {plan.learning_rate}"
                )
            done += 1
            if done % plan.validate_every == 0 or done == plan.steps:
                now = validate()
                history.validation.append((done, now))
                self.on_validation(done, now)
                since = 0 if now < lowest else since + 1
                if now < lowest:
                    lowest, best = now, [parameter.detach().clone() for parameter in parameters]
            self.progress("training", done, plan.steps)
            stop = self.should_stop() and done < plan.steps
            if stop or time.monotonic() - saved > _SAVE_EVERY_S:
                save()
                saved = time.monotonic()
            if stop:
                raise Interrupted(
                    f"stopped after {done} of {plan.steps} steps; the same command goes on from {self.checkpoint}"
                )
        save()  # what remains may fail, for want of space say
        for parameter, value in zip(parameters, best, strict=True):
            parameter.data.copy_(value)
        return history, done

    @torch.no_grad()
    def mean_loss(self, loss_of: Callable[[Tensor], Tensor], texts: Tensor) -> float:
        """Over texts [n, tokens], of which `loss_of` takes a batch at a time."""
        return sum(float(loss_of(part)) * len(part) for part in texts.split(self.plan.batch)) / len(texts)

    def begin_lora(self) -> None:
        """Gives the student the sidecar's LoRA to go on with, or a new one; and thaws its heads if they are trained too."""
        if self.sidecar.lora is not None:
            load_lora(self.student, self.sidecar.lora)
        else:
            add_lora(self.student, rank=self.plan.rank, alpha=self.plan.alpha, seed=self.plan.seed)
        if self.plan.train_heads:
            for head in self.student.heads.values():
                head.requires_grad_(True)


def _windows(texts: Sequence[Sequence[int]], length: int) -> npt.NDArray[np.int64]:
    """Up to 16 windows [count, length] of texts, spread over all there are."""
    found = [
        np.asarray(text[at : at + length], np.int64)
        for text in texts
        for at in range(0, len(text) - length + 1, length)
    ]
    if not found:
        raise TrainingError(
            f"no validation text has {length} tokens: give a longer one, or fewer prompt and new tokens"
        )
    return np.stack(found[:: max(1, -(-len(found) // _MEASURED_WINDOWS))])


def _require_tokens(texts: Sequence[Sequence[int]], count: int, folder: str | os.PathLike[str]) -> None:
    for text in texts:
        if len(text) and not 0 <= (wrong := min(text) if min(text) < 0 else max(text)) < count:
            raise TrainingError(f"token {wrong} does not exist: the model in {folder} has {count}; give texts of its tokenizer")


def _hash_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
