"""Importance matrices of llama-imatrix: how much each input of a matrix matters, in either of its file formats."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from ..errors import ModelError
from . import ggml
from .gguf_file import Tensor, open_gguf

__all__ = ["read_imatrix"]

_SUMS, _COUNTS = ".in_sum2", ".counts"


def read_imatrix(path: Path) -> dict[str, np.ndarray]:
    """The mean square of each input, f32[experts x columns], by the name of the matrix.

    Raises:
        ModelError: It cannot be read, is damaged, or no importance matrix at all.
    """
    try:
        with open(path, "rb") as opened:
            magic = opened.read(4)
    except OSError as exc:
        raise ModelError(f"{path}: {exc.strerror}; check the path of the importance matrix") from exc
    found = _of_gguf(path) if magic == b"GGUF" else _of_legacy(path)
    if not found:
        raise ModelError(f"{path}: holds no importance matrix; make one with llama-imatrix")
    for name, values in found.items():
        if not np.isfinite(values).all():
            raise ModelError(f"{path}: the importance matrix of {name} holds values that are no numbers")
    return found


def _of_gguf(path: Path) -> dict[str, np.ndarray]:
    tensors = {tensor.name: tensor for tensor in open_gguf(path).tensors}
    found = {}
    for name, sums_tensor in tensors.items():
        if not name.endswith(_SUMS):
            continue
        matrix = name.removesuffix(_SUMS)
        counts_tensor = tensors.get(matrix + _COUNTS)
        if counts_tensor is None or sums_tensor.type != ggml.F32 or counts_tensor.type != ggml.F32:
            raise ModelError(f"{path}: {name} has no {matrix}{_COUNTS} of F32: a damaged importance matrix")
        sums, counts = _values(path, sums_tensor), np.rint(_values(path, counts_tensor))
        if sums.size % counts.size:
            raise ModelError(f"{path}: {name} has {sums.size} values for {counts.size} counts")
        sums, counts = sums.reshape(counts.size, -1), counts[:, None]
        # An expert that was never asked says nothing about its inputs.
        found[matrix] = np.where(counts > 0, sums / np.maximum(counts, 1), 1).astype(np.float32).reshape(-1)
    return found


def _values(path: Path, tensor: Tensor) -> np.ndarray:
    return np.fromfile(path, dtype="<f4", count=tensor.size_bytes // 4, offset=tensor.offset)


def _of_legacy(path: Path) -> dict[str, np.ndarray]:
    """Entries of name, calls and sums over them; behind them a note on the data, which is not needed."""
    data = path.read_bytes()
    found: dict[str, np.ndarray] = {}
    try:
        (entries,), at = struct.unpack_from("<i", data, 0), 4
        for _ in range(entries):
            (length,) = struct.unpack_from("<i", data, at)
            name = data[at + 4 : at + 4 + length].decode()
            at += 4 + length
            calls, count = struct.unpack_from("<ii", data, at)
            if length < 1 or count < 1 or count > (len(data) - at - 8) // 4:
                raise ValueError(f"{count} values at byte {at}")
            sums = np.frombuffer(data, dtype="<f4", count=count, offset=at + 8)
            found[name] = sums / np.float32(calls) if calls > 0 else sums.copy()
            at += 8 + 4 * count
    except (struct.error, ValueError) as exc:
        raise ModelError(f"{path}: is no importance matrix of llama-imatrix, or a damaged one ({exc})") from exc
    return found
