"""What all three phases share: the learning rate, checkpoints, stopping."""

from __future__ import annotations

import hashlib
import io
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .._whole_file import writing_whole
from ..errors import OptionError, TrainingError

__all__ = ["Interrupted", "cosine", "load_checkpoint", "remove_checkpoint", "require_other", "save_checkpoint"]

_MAGIC = b"moestream training checkpoint 1\n"
_REMEDY = "remove it to begin anew"


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop. The message says where the checkpoint is that it goes on from."""


def require_other(out: str | os.PathLike[str], inputs: Iterable[Path]) -> None:
    """Raises OptionError if what is to be written is one of the files that are read."""
    if found := next((file for file in inputs if file.exists() and Path(out).exists() and file.samefile(out)), None):
        raise OptionError(f"{out}: is read from, as {found}; give the output another name")


def cosine(step: int, steps: int, warm_up: int, floor: float = 0.02) -> float:
    """Share of the full learning rate at a step: up in a line, then down along half a cosine to `floor`.

    After Loshchilov and Hutter, SGDR (2017), without restarts.
    """
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return floor + (1 - floor) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


def save_checkpoint(path: Path, about: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Writes what training needs to go on bit for bit, as PATH.part and then renamed.

    Args:
        about: What makes results what they are: options, data. Another run's checkpoint is known by it.
        state: Tensors and plain values.

    Raises:
        TrainingError: It cannot be written; the one before is as it was.
    """
    payload = io.BytesIO()
    torch.save({"about": dict(about), "state": dict(state)}, payload)
    with writing_whole(path, TrainingError) as file:
        file.write(_MAGIC)
        file.write(hashlib.sha256(payload.getbuffer()).digest())
        file.write(payload.getbuffer())


def load_checkpoint(path: Path, about: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state that was saved, or None if there is no file.

    Raises:
        TrainingError: The file is damaged, no checkpoint, or one of another run.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise TrainingError(f"{path}: cannot be read: {exc.strerror}; {_REMEDY}") from exc
    begin = len(_MAGIC) + hashlib.sha256().digest_size
    if not content.startswith(_MAGIC):
        raise TrainingError(f"{path}: not a checkpoint of training; name another file, or {_REMEDY}")
    if hashlib.sha256(content[begin:]).digest() != content[len(_MAGIC) : begin]:
        raise TrainingError(
            f"{path}: the checkpoint is damaged ({len(content)} bytes, its checksum differs); {_REMEDY}"
        )
    saved = torch.load(io.BytesIO(content[begin:]), weights_only=True)
    theirs = saved["about"]
    if differing := sorted(name for name in about.keys() | theirs.keys() if about.get(name) != theirs.get(name)):
        told = ", ".join(f"{name} is {theirs.get(name)}, now {about.get(name)}" for name in differing)
        raise TrainingError(
            f"{path}: the checkpoint is of another training: {told}; give what it was begun with, or {_REMEDY}"
        )
    return saved["state"]


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint that is no longer wanted."""
    if path.exists():
        os.remove(path)
