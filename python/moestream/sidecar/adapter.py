"""LoRA adapters as llama.cpp takes them: GGUF files, or one in memory that is made of a sidecar's."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError, SidecarError
from ..layout import ggml
from ..layout.gguf_file import ARCHITECTURE, F32, STRING, open_gguf, pair
from .format import LORA_TYPES, Lora, LoraPair, Matrix, file_matrices, file_pieces, lora_pairs, valid_alpha

__all__ = ["adapter_bytes", "adapter_names", "in_memory", "read_adapter", "require_alpha", "scaled"]

_ALPHA, _TYPE, _KIND = "adapter.lora.alpha", "adapter.type", "general.type"
_INVOCATION = "adapter.alora.invocation_tokens"


def adapter_bytes(lora: Lora, architecture: str) -> bytes:
    """The GGUF that llama.cpp loads as a LoRA adapter."""
    pairs = [
        pair(ARCHITECTURE, STRING, architecture),
        pair(_KIND, STRING, "adapter"),
        pair(_TYPE, STRING, "lora"),
        pair(_ALPHA, F32, lora.alpha),
    ]
    return b"".join(file_pieces(pairs, dict(lora.matrices())))


@contextlib.contextmanager
def in_memory(content: bytes) -> Iterator[str]:
    """A path by which `content` can be opened within the block: of memory where the system has that, else of a file.

    Raises:
        SidecarError: There is neither memory nor room for it.
    """
    with contextlib.ExitStack() as stack:
        try:
            if hasattr(os, "memfd_create"):
                file: Any = stack.enter_context(open(os.memfd_create("moestream-lora", os.MFD_CLOEXEC), "wb"))
                path = f"/proc/self/fd/{file.fileno()}"
            else:
                file = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".gguf"))
                path = file.name
            file.write(content)
            file.flush()
        except OSError as exc:
            raise SidecarError(f"no room for a LoRA of {len(content)} bytes: {exc.strerror}; free some") from exc
        yield path


def adapter_names(path: str | os.PathLike[str]) -> list[str]:
    """The tensors of the model that an adapter is for, as it names them; [] if it is no sound GGUF."""
    try:
        tensors = open_gguf(path).tensors
    except ModelError:
        return []
    return [tensor.name.removesuffix(".lora_a") for tensor in tensors if tensor.name.endswith(".lora_a")]


def read_adapter(path: Path) -> tuple[str, Lora]:
    """The architecture of an adapter's model, and the adapter. Matrices of other types than a sidecar has become F32.

    Raises:
        SidecarError: It is no LoRA adapter, a damaged one, or has what cannot be applied; by name.
    """
    try:
        file = open_gguf(path)
    except ModelError as exc:
        raise SidecarError(f"{path}: cannot be read as a LoRA adapter: {str(exc).removeprefix(f'{path}: ')}") from exc
    about = {key.name: file.value(key) for key in file.keys if key.name in (_KIND, _TYPE, _ALPHA)}
    if about.get(_KIND) != "adapter" or about.get(_TYPE) != "lora":
        raise SidecarError(
            f"{path}: is no LoRA adapter: its {_KIND} is {about.get(_KIND)!r}, its {_TYPE} {about.get(_TYPE)!r}"
        )
    if file.key(_INVOCATION):
        raise SidecarError(
            f"{path}: is switched on by tokens of the prompt ({_INVOCATION}), which a sidecar cannot say"
        )
    matrices = {
        name: matrix if matrix.type in LORA_TYPES.values() else Matrix.of(matrix.values(), ggml.F32)
        for name, matrix in file_matrices(file).items()
    }
    pairs = lora_pairs(path, matrices)
    if matrices:
        raise SidecarError(f"{path}: {next(iter(matrices))} is no lora_a or lora_b, and llama.cpp would ignore it")
    if not pairs:
        raise SidecarError(f"{path}: has no lora_a and lora_b")
    alpha = float(about.get(_ALPHA, 0.0))
    if alpha:
        require_alpha(path, alpha)
        return file.architecture, Lora(alpha, pairs)
    return file.architecture, scaled(pairs, dict.fromkeys(pairs, 1.0))  # what llama.cpp makes of no alpha


def require_alpha(path: Path, alpha: float) -> None:
    """Raises SidecarError for an alpha that a sidecar cannot have."""
    if not valid_alpha(alpha):
        raise SidecarError(f"{path}: its alpha is {alpha:g}, and a LoRA is taken with one above 0 only; train it anew")


def scaled(pairs: Mapping[str, LoraPair], scales: Mapping[str, float]) -> Lora:
    """A LoRA in which the product B A of each pair counts with a factor of its own.

    llama.cpp multiplies each with alpha / (rank of the pair). One alpha does for all where the factors are so related; what
    is left over is multiplied into B, which is then stored as F32.
    """
    first = next(iter(pairs))
    alpha = scales[first] * pairs[first].rank
    done = {}
    for name, both in pairs.items():
        rest = scales[name] * both.rank / alpha
        done[name] = (
            both if abs(rest - 1) < 1e-9 else LoraPair(both.a, Matrix.of(both.b.values() * np.float32(rest), ggml.F32))
        )
    return Lora(alpha, done)
