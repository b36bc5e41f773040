"""Giving the stock file back that a laid file was made from."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ModelError
from . import ggml
from .format import NEURON_MAJOR
from .gguf_file import DEFAULT_ALIGNMENT, header_bytes, padded
from .source import ExpertTensor, Source, open_source
from .stream import Inputs, Piece, RowPart, Rows, chunks
from .writer import OutputFile, plan_hash, write_files

__all__ = ["ExportResult", "export"]


@dataclass(frozen=True)
class ExportResult:
    """What was written.

    Attributes:
        notes: What is not as it was in the source, and why; one sentence each.
    """

    path: Path
    size_bytes: int
    tensors: int
    seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Place:
    name: str
    ne: tuple[int, ...]
    type: int
    offset: int
    size_bytes: int


def export(
    laid: str | os.PathLike[str],
    stock: str | os.PathLike[str],
    *,
    force: bool = False,
    resume: bool = False,
    progress: bool = True,
) -> ExportResult:
    """Writes the stock file of a laid one: keys, tensors, their order and bytes as they were in the source.

    A source of several shards comes back as one file. Down matrices that are stored neuron-major become F32: what they
    were quantised from is not in the file.

    Args:
        laid: The laid file, or the first of its shards.
        stock: The file to write.
        force: Replace it if it is there.
        resume: Continue an export that was broken off.
        progress: Draw a bar on stderr if that is a terminal.

    Raises:
        ModelError: `laid` is no laid file, or a damaged one.
        OutputError: `stock` exists, or the disk is full.
    """
    began, out = time.monotonic(), Path(stock)
    source = open_source(Path(laid))
    if source.tables is None:
        raise ModelError(f"{laid}: is a stock file already; only laid files are exported")
    places = tuple(_places(source))
    alignment = source.alignment or DEFAULT_ALIGNMENT
    header = header_bytes(
        source.pairs(architecture=source.architecture, alignment=source.alignment),
        [(place.name, place.ne, place.type, place.offset) for place in places],
        alignment,
    )
    size = len(header) + max((padded(place.offset + place.size_bytes, alignment) for place in places), default=0)
    with Inputs(source.model) as inputs:
        write_files(
            out,
            [OutputFile(out, size)],
            [piece for place in places for piece in _pieces(source, place, inputs, len(header))],
            lambda _: [header],
            source=source.model,
            plan=plan_hash(header, [file.identity for file in source.model.files]),
            what="exporting",
            resume=resume,
            force=force,
            progress=progress,
        )
    return ExportResult(out, size, len(places), time.monotonic() - began, tuple(_notes(source)))


def _places(source: Source) -> Iterator[_Place]:
    at = 0
    for name in source.order:
        if tensor := source.dense.get(name):
            place = _Place(name, tensor.ne, tensor.type, at, tensor.size_bytes)
        else:
            expert = source.experts[name]
            place = _Place(name, expert.ne, expert.plain_type, at, expert.plain_bytes * expert.experts)
        yield place
        at = padded(at + place.size_bytes, source.alignment or DEFAULT_ALIGNMENT)


def _pieces(source: Source, place: _Place, inputs: Inputs, base: int) -> Iterator[Piece]:
    at = base + place.offset
    if tensor := source.dense.get(place.name):
        return chunks(inputs, tensor, 0, at)
    expert = source.experts[place.name]
    part = RowPart(0, expert.plain_bytes, expert.slices, _change(expert))
    return Rows(expert.experts, expert.plain_bytes, (part,)).pieces(inputs, 0, at, checksums=False)


def _change(tensor: ExpertTensor) -> Callable[[np.ndarray, np.ndarray], None] | None:
    if tensor.form == 0:
        return None

    def change(stored: np.ndarray, out: np.ndarray) -> None:
        out[:] = tensor.plain(stored)

    return change


def _notes(source: Source) -> Iterator[str]:
    lost = [tensor for tensor in source.experts.values() if tensor.form == NEURON_MAJOR]
    if lost:
        yield (
            f"{len(lost)} down matrices are stored neuron-major in {ggml.type_name(lost[0].type)}: they are written as F32, "
            "for their quantisation in the source cannot be got back"
        )
