"""What a training run needs to go on bit for bit, in one file that is never half-written and never believed unchecked."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

import torch

from .files import completed

MAGIC = b"moestream checkpoint 1\n"


class CheckpointError(Exception):
    """A checkpoint cannot be used, or not be written; the message names the file and what to do."""


def save(path: Path, state: dict) -> None:
    """Writes `state` (tensors and plain values) as PATH.part and renames it; the one before stays until then."""
    payload = io.BytesIO()
    torch.save(state, payload)
    try:
        with completed(path) as part, open(part, "wb") as file:
            file.write(MAGIC)
            file.write(hashlib.sha256(payload.getbuffer()).digest())
            file.write(payload.getbuffer())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        kept = f"; {path} from before is as it was" if path.exists() else ""
        raise CheckpointError(
            f"{path}: cannot write a checkpoint of {payload.getbuffer().nbytes / 1e6:.0f} MB: {error.strerror}{kept}"
        ) from error


def load(path: Path) -> dict:
    """Reads what `save` wrote.

    Raises:
        CheckpointError: The file is not a checkpoint, or not all of it is as it was written.
    """
    remedy = "remove it to begin this model anew"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if not content.startswith(MAGIC):
        raise CheckpointError(
            f"{path}: not a checkpoint of this program (it does not begin with {MAGIC[:-1].decode()!r}); {remedy}"
        )
    digest_end = len(MAGIC) + hashlib.sha256().digest_size
    payload = memoryview(content)[digest_end:]
    if hashlib.sha256(payload).digest() != content[len(MAGIC) : digest_end]:
        raise CheckpointError(f"{path}: the checkpoint is damaged ({len(content)} bytes, checksum differs); {remedy}")
    return torch.load(io.BytesIO(payload), weights_only=True)
