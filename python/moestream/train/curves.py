"""Losses over steps, as JSON and as a picture."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .._whole_file import writing_whole
from ..errors import OutputError

__all__ = ["History", "curve_files", "write_curves"]

_NAMED_PARTS = 8


@dataclass
class History:
    """What the loss was, in nats a token."""

    train: list[float] = field(default_factory=list)
    """One value a step."""
    validation: list[tuple[int, float]] = field(default_factory=list)
    """(steps done, mean loss)."""
    parts: dict[str, list[float]] = field(default_factory=dict)
    """The validation loss in parts, such as one for each head; as long as `validation`."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(kept: Mapping[str, Any]) -> History:
        """The inverse of `as_dict`."""
        validation = [(int(step), float(loss)) for step, loss in kept["validation"]]
        return History(
            list(kept["train"]), validation, {name: list(part) for name, part in kept["parts"].items()}, kept["seconds"]
        )


def curve_files(out: str | os.PathLike[str], phase: str) -> tuple[Path, Path]:
    """Where the curves of a sidecar's phase go: OUT.PHASE.json and OUT.PHASE.png."""
    return Path(f"{os.fspath(out)}.{phase}.json"), Path(f"{os.fspath(out)}.{phase}.png")


def write_curves(
    history: History, out: str | os.PathLike[str], phase: str, title: str, about: Mapping[str, Any]
) -> tuple[Path, Path]:
    """Writes both files, and returns their paths.

    Args:
        about: Goes into the JSON beside the losses.

    Raises:
        OutputError: They cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    as_json, as_picture = curve_files(out, phase)
    with writing_whole(as_json, OutputError) as file:
        file.write(json.dumps({**about, "history": history.as_dict()}, indent=1, allow_nan=False).encode() + b"\n")

    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=110, layout="constrained")
    try:
        width = max(1, min(25, len(history.train) // 4))
        if history.train:
            smooth = np.convolve(history.train, np.ones(width) / width, mode="valid")
            label = f"training, mean of {width} steps" if width > 1 else "training"
            at = np.arange(width, len(history.train) + 1)
            axes.plot(at, smooth, color="tab:blue", alpha=0.6, zorder=3, label=label)
        steps = [step for step, _ in history.validation]
        last = len(history.parts) - 1
        for number, (name, losses) in enumerate(history.parts.items()):
            named = last < _NAMED_PARTS or number in (0, last)  # the names of all would hide what they name
            axes.plot(
                steps,
                losses,
                linewidth=0.8,
                color=pyplot.get_cmap("viridis")(0.3 + 0.6 * number / max(1, last)),
                label=f"validation, {name}" if named else None,
            )
        label = "validation, mean" if history.parts else "validation"
        losses = [loss for _, loss in history.validation]
        axes.plot(steps, losses, "o-", markersize=3, color="tab:red", zorder=4, label=label)
        axes.set(xlabel="steps", ylabel="loss, nats a token", title=title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        picture = io.BytesIO()
        figure.savefig(picture, format="png", metadata={"Software": None})
    finally:
        pyplot.close(figure)
    with writing_whole(as_picture, OutputError) as file:
        file.write(picture.getbuffer())
    return as_json, as_picture
