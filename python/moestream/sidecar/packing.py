"""Making a sidecar of heads and an adapter, and giving them back."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._whole_file import writing_whole
from ..errors import OptionError, OutputError
from ..layout.writer import check_output
from .adapter import adapter_bytes
from .base import BaseModel
from .format import Sidecar
from .imports import lora_files, read_heads, read_lora, write_heads

__all__ = ["pack", "unpack"]

HEADS, ADAPTER, ABOUT = "heads.safetensors", "adapter.gguf", ("provenance", "quality")


def pack(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    heads: str | os.PathLike[str] | None = None,
    lora: str | os.PathLike[str] | None = None,
    type: str = "Q8_0",
    alpha: float | None = None,
    top_k: int | None = None,
    provenance: Mapping[str, Any] | None = None,
    quality: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Sidecar:
    """Writes a sidecar for a model.

    Args:
        model: The model that heads and LoRA were trained for, stock or laid.
        output: The file to write.
        heads: Safetensors of heads; see :func:`read_heads`.
        lora: Adapter GGUF, PEFT folder, or safetensors; see :func:`read_lora`.
        type: What heads are stored as: Q8_0, Q4_0, F16 or F32.
        alpha: Of a LoRA whose file does not say it.
        top_k: Experts a token that the heads were trained with, if that is not the model's own number.
        provenance: Added to the names and hashes of the files that it is made of.
        quality: What was measured with it.
        force: Replace `output` if it is there.

    Raises:
        OptionError: Neither heads nor a LoRA, or options that contradict each other.
        SidecarError: What is given is damaged, or does not fit the model.
        ModelError: The model cannot be read.
        OutputError: `output` cannot be written.
    """
    if heads is None and lora is None:
        raise OptionError("a sidecar needs something to hold: give --heads FILE, --lora FILE, or both")
    if heads is None and top_k is not None:
        raise OptionError(f"--top-k {top_k} is what heads were trained with: give them with --heads FILE")
    if lora is None and alpha is not None:
        raise OptionError(f"--alpha {alpha:g} is of a LoRA: give it with --lora FILE")
    opened = BaseModel.open(model)
    inputs = [file.path for file in opened.model.files]
    inputs += [] if heads is None else [Path(heads)]
    inputs += [] if lora is None else lora_files(lora)
    check_output(Path(output), inputs, force=force)
    made_of = {
        name: {"file": Path(path).name, "sha256": _sha256(Path(path))}
        for name, path in (("heads", heads), ("lora", lora))
        if path is not None
    }
    sidecar = Sidecar(
        base=opened.base,
        heads=None if heads is None else read_heads(heads, opened, type=type, top_k=top_k),
        lora=None if lora is None else read_lora(lora, opened, alpha=alpha),
        provenance={**made_of, **(provenance or {})},
        quality=quality or {},
    )
    sidecar.write(output)
    return dataclasses.replace(sidecar, path=Path(output))


def unpack(path: str | os.PathLike[str], folder: str | os.PathLike[str], *, force: bool = False) -> list[Path]:
    """Writes what is in a sidecar as files of its own: heads.safetensors, adapter.gguf, provenance.json, quality.json.

    Args:
        folder: Is made if it is not there; the one that it is to be in must be.
        force: Replace files that are there.

    Returns:
        The files, those that there is something for.

    Raises:
        SidecarError: `path` is no sidecar, or a damaged one.
        OutputError: The files are there already, or cannot be written.
    """
    sidecar, into = Sidecar.read(path), Path(folder)
    about = {f"{name}.json": getattr(sidecar, name) for name in ABOUT if getattr(sidecar, name)}
    names = [HEADS] * (sidecar.heads is not None) + [ADAPTER] * (sidecar.lora is not None) + list(about)
    try:
        into.mkdir(exist_ok=True)
    except OSError as exc:
        raise OutputError(f"{into}: cannot be made a folder: {exc.strerror}; name another") from exc
    for name in names:
        check_output(into / name, [Path(path)], force=force)
    if sidecar.heads is not None:
        write_heads(into / HEADS, sidecar.heads)
    if sidecar.lora is not None:
        with writing_whole(into / ADAPTER, OutputError) as file:
            file.write(adapter_bytes(sidecar.lora, sidecar.base.architecture))
    for name, value in about.items():
        with writing_whole(into / name, OutputError) as file:
            file.write(json.dumps(value, indent=2, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
    return [into / name for name in names]


def _sha256(path: Path) -> str:
    """Of a file; of a PEFT folder, of its adapter. "" of one that is not there, which its reader tells better."""
    digest = hashlib.sha256()
    try:
        with open(lora_files(path)[-1], "rb") as opened:
            while piece := opened.read(1 << 20):
                digest.update(piece)
    except OSError:
        return ""
    return digest.hexdigest()
