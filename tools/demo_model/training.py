"""Training one demo model: steps, progress, checkpoints, and a picture of the loss."""

from __future__ import annotations

import contextlib
import hashlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from . import checkpoint
from .config import ModelConfig
from .files import completed
from .model import DemoModel, LayerReport
from .optimiser import Optimiser
from .stream import Batches

SAVE_EVERY_SECONDS = 240
VALIDATION_WINDOWS = 48


@dataclass(frozen=True)
class Plan:
    """How a model is trained. What changes a result is here, so that a checkpoint can tell whether it belongs to it."""

    model: ModelConfig
    steps: int = 2200
    batch: int = 16
    seed: int = 1
    warm_up: int = 60
    cool_down: float = 0.45  # share of the steps in which the learning rate falls, at the end
    quantised: float = 0.12  # share of the steps, at the end, that see the weights as Q4_0 has them
    balance: float = 0.04  # weight of the loss that spreads tokens over experts
    sparsity: float = 0.05  # weight of the loss that favours zeros behind ReLU, in a model that has it
    router: float = 0.001  # weight of the loss that keeps the router's logits small
    threads: int = 2
    validate_every: int = 100

    @property
    def tokens(self) -> int:
        return self.steps * self.batch * self.model.context

    def rate(self, step: int) -> float:
        """The share of the full learning rate at a step: up, flat, then down to a fiftieth."""
        up = min(1.0, (step + 1) / self.warm_up)
        left = (self.steps - step) / (self.cool_down * self.steps)
        return up * max(0.02, min(1.0, left))

    def sees_quantised(self, step: int) -> bool:
        return step >= self.steps * (1 - self.quantised)


@dataclass
class History:
    """What the loss was. Losses are in nats a token."""

    train: list[float] = field(default_factory=list)  # one a step
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)
    seconds: float = 0.0


class Interrupted(Exception):
    """Training was told to stop; the checkpoint has all that was done."""


def train(
    plan: Plan,
    tokens: np.ndarray,
    validation: np.ndarray,
    file: Path,
    *,
    on_report: Callable[[History], None] = lambda _: None,
) -> tuple[DemoModel, History]:
    """Trains to the end, going on from `file` if it is there. SIGINT and SIGTERM end it at the next step, with a checkpoint.

    Args:
        tokens: [n], uint16, the stream to train on.
        validation: [windows, context + 1], int64.
        on_report: Called after each validation.

    Raises:
        Interrupted: A signal came.
        CheckpointError: `file` is damaged, of another plan, or cannot be written.
    """
    torch.set_num_threads(plan.threads)
    model = DemoModel(plan.model, plan.seed)
    optimiser = Optimiser(model)
    data = hashlib.sha256(np.ascontiguousarray(tokens)).hexdigest()
    done, history = _resume(plan, data, model, optimiser, file)
    batches = Batches(tokens, plan.model.context, plan.batch, plan.seed)
    started = saved = time.monotonic()
    before = history.seconds

    def save(done: int) -> None:
        history.seconds = before + time.monotonic() - started
        state = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
        checkpoint.save(file, {"plan": asdict(plan), "data": data, "done": done, "history": asdict(history), **state})

    bar = tqdm(total=plan.steps, initial=done, unit="step", desc=plan.model.kind, mininterval=1.0)
    with bar, _stop_requests() as stop:
        while done < plan.steps:
            loss, reports = _step(plan, model, optimiser, batches, done)
            history.train.append(loss)
            done += 1
            bar.update()
            bar.set_postfix_str(describe(loss, reports), refresh=False)
            if done % plan.validate_every == 0 or done == plan.steps:
                history.validation.append((done, mean_loss(model, validation[:VALIDATION_WINDOWS])))
                history.seconds = before + time.monotonic() - started
                bar.write(_line(plan, history, reports))
                on_report(history)
            if stop or done == plan.steps or time.monotonic() - saved > SAVE_EVERY_SECONDS:
                save(done)
                saved = time.monotonic()
            if stop and done < plan.steps:
                raise Interrupted(f"stopped after {done} of {plan.steps} steps; the same command goes on from {file}")
    model.set_quantised(False)
    return model, history


def _step(
    plan: Plan, model: DemoModel, optimiser: Optimiser, batches: Batches, step: int
) -> tuple[float, list[LayerReport]]:
    model.set_quantised(plan.sees_quantised(step))
    batch = torch.from_numpy(batches.at(step))
    loss, reports = model.loss(batch[:, :-1], batch[:, 1:])
    weights = {"balance": plan.balance, "router": plan.router}
    if plan.model.kind == "smallthinker":
        weights["activity"] = plan.sparsity
    extra = sum(weight * getattr(report, name) for name, weight in weights.items() for report in reports) / len(reports)
    (loss + extra).backward()
    optimiser.step(plan.rate(step))
    return loss.item(), reports


def _resume(plan: Plan, data: str, model: DemoModel, optimiser: Optimiser, file: Path) -> tuple[int, History]:
    if not file.exists():
        return 0, History()
    state = checkpoint.load(file)
    if state["plan"] != asdict(plan):
        ours, theirs = asdict(plan), state["plan"]
        differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        raise checkpoint.CheckpointError(
            f"{file}: the checkpoint is of another training: {', '.join(f'{n} is {theirs.get(n)}, now {ours.get(n)}' for n in differing)}; "
            f"remove it to begin this model anew, or give the options it was begun with"
        )
    if state["data"] != data:
        raise checkpoint.CheckpointError(
            f"{file}: the checkpoint is of another text than the one at hand; remove it to begin this model anew"
        )
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    kept = state["history"]
    return state["done"], History(kept["train"], [tuple(point) for point in kept["validation"]], kept["seconds"])


@torch.no_grad()
def mean_loss(model: DemoModel, windows: np.ndarray, batch: int = 16) -> float:
    """Nats a token over windows [count, context + 1]."""
    total = 0.0
    for start in range(0, len(windows), batch):
        part = torch.from_numpy(windows[start : start + batch])
        total += model.loss(part[:, :-1], part[:, 1:])[0].item() * len(part)
    return total / len(windows)


def describe(loss: float, reports: list[LayerReport]) -> str:
    """A step's loss; how many experts, of all layers, had less than a fifth of their fair share of its tokens; zeros behind ReLU."""
    starved = sum((report.counts < 0.2 * report.counts.float().mean()).sum().item() for report in reports)
    zeros = sum(report.zeros.item() for report in reports) / len(reports)
    balance = sum(report.balance.item() for report in reports) / len(reports)
    return f"loss {loss:.3f}, balance {balance:.2f}, starved experts {starved}, zeros {zeros:.0%}"


def _line(plan: Plan, history: History, reports: list[LayerReport]) -> str:
    done, loss = history.validation[-1]
    return (
        f"{plan.model.kind} {done}/{plan.steps} steps, {done * plan.batch * plan.model.context / 1e6:.1f}M tokens, "
        f"{history.seconds / 60:.1f} min: validation {loss:.4f} nats (perplexity {math.exp(loss):.2f}); "
        + describe(float(np.mean(history.train[-50:])), reports)
    )


@contextlib.contextmanager
def _stop_requests() -> Iterator[list]:
    """A list that is empty until SIGINT or SIGTERM comes."""
    requests: list = []
    before = {
        number: signal.signal(number, lambda number, _: requests.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def draw_losses(history: dict[str, History], baselines: dict[str, float], file: Path) -> None:
    """A PNG of the losses over steps, one line a model, with baselines {name: nats} across."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=110, layout="constrained")
    for colour, (name, one) in zip(("tab:blue", "tab:orange"), history.items(), strict=False):
        width = max(1, min(25, len(one.train) // 4))
        smooth = np.convolve(one.train, np.ones(width) / width, mode="valid")
        axes.plot(
            np.arange(width, len(one.train) + 1),
            smooth,
            color=colour,
            alpha=0.5,
            label=f"{name}, training (mean of {width} steps)",
        )
        steps, losses = zip(*one.validation, strict=True) if one.validation else ((), ())
        axes.plot(steps, losses, "o-", markersize=3, color=colour, label=f"{name}, validation")
    for name, nats in baselines.items():
        axes.axhline(nats, linestyle="--", linewidth=1, color="grey")
        axes.annotate(
            f"{name}: {nats:.2f}",
            (1, nats),
            (-4, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            color="grey",
        )
    axes.set(xlabel="steps", ylabel="loss, nats a token", title="Loss of the demo models")
    axes.set_ylim(
        top=max([*baselines.values(), *(loss for one in history.values() for _, loss in one.validation)]) + 0.3
    )
    axes.grid(alpha=0.3)
    axes.legend()
    with completed(file) as part:
        figure.savefig(part, format="png")
    pyplot.close(figure)
