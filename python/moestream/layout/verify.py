"""Reading all of a model and checking what can be checked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import ggml
from .format import LaidLayer
from .gguf_file import Tensor
from .interleaving import crc32c
from .progress import bytes_bar
from .source import ExpertTensor, Source, open_source
from .stream import Inputs, Piece, RowPart, Rows, Slices, chunks, run_ahead

__all__ = ["Damage", "VerifyReport", "verify"]


@dataclass(frozen=True)
class Damage:
    """Something that is wrong: with an expert, or with a tensor that is none (`layer` and `expert` are None).

    Attributes:
        tensor: The tensor, or that of the records.
        file, offset: Where the expert's bytes begin; of a tensor, the part in which it was found.
        reason: What is wrong, in words.
    """

    layer: int | None
    expert: int | None
    tensor: str
    file: Path
    offset: int
    reason: str

    def __str__(self) -> str:
        what = self.tensor if self.expert is None else f"layer {self.layer}, expert {self.expert} ({self.tensor})"
        return f"{what}: {self.reason}, at byte {self.offset} of {self.file}"


@dataclass(frozen=True)
class VerifyReport:
    """What was read, and what is wrong with it.

    Attributes:
        laid: Whether the file is a laid one: then every expert has a checksum.
        experts: Experts of all layers.
        first: The first damage in the order of the file; None if all is well.
        bad_experts, bad_tensors: How many are damaged; tensors are those that every token needs.
    """

    path: Path
    laid: bool
    size_bytes: int
    experts: int
    tensors: int
    seconds: float
    first: Damage | None
    bad_experts: int
    bad_tensors: int

    @property
    def ok(self) -> bool:
        return self.first is None


def verify(path: str | os.PathLike[str], *, check_tensors: bool = False, progress: bool = True) -> VerifyReport:
    """Reads a whole model, stock or laid, and tells what is damaged.

    Of a laid file every record is held against its checksum. Of a stock file, and of what lies outside of the records,
    nothing is known but the values: where they are no numbers, something is wrong.

    Args:
        check_tensors: Look at the values in the records of a laid file too.
        progress: Draw a bar on stderr if that is a terminal.

    Raises:
        ModelError: It is no model, or its header is damaged, or it cannot be read.
    """
    began = time.monotonic()
    source = open_source(Path(path))
    found = _Found(source)
    with Inputs(source.model) as inputs:
        pieces = list(_pieces(source, inputs, found, check_tensors))
        total = sum(piece.size for piece in pieces)
        bar = bytes_bar("verifying", total, progress=progress)
        with bar:
            for piece, buffer in run_ahead(pieces, max(piece.buffer_bytes for piece in pieces)):
                piece.finish(buffer)
                bar.update(piece.size)
    source.model.check_unchanged()
    return VerifyReport(
        path=Path(path),
        laid=source.tables is not None,
        size_bytes=sum(file.size_bytes for file in source.model.files),
        experts=sum(tensors[0].experts for tensors in source.blocks().values()),
        tensors=len(source.dense),
        seconds=time.monotonic() - began,
        first=found.first,
        bad_experts=len(found.experts),
        bad_tensors=len(found.tensors),
    )


class _Found:
    """What is damaged so far."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.first: Damage | None = None
        self.experts: set[tuple[int, int]] = set()
        self.tensors: set[str] = set()

    def expert(self, layer: int, expert: int, tensor: str, slices: Slices, reason: str) -> None:
        self.experts.add((layer, expert))
        path = self._source.model.files[slices.file].path
        self._note(Damage(layer, expert, tensor, path, slices.offset + expert * slices.stride, reason))

    def tensor(self, tensor: Tensor, at: int, reason: str) -> None:
        self.tensors.add(tensor.name)
        path = self._source.model.files[tensor.file].path
        self._note(Damage(None, None, tensor.name, path, tensor.offset + at, reason))

    def _note(self, damage: Damage) -> None:
        self.first = self.first or damage


def _pieces(source: Source, inputs: Inputs, found: _Found, check_tensors: bool) -> Iterator[Piece]:
    for tensor in source.dense.values():
        yield from chunks(inputs, tensor, 0, 0, _dense_check(tensor, found))
    if source.tables is None:
        for expert in source.experts.values():
            check = _values_check(expert, found)
            rows = Rows(
                expert.experts, expert.slices.bytes, (RowPart(0, expert.slices.bytes, expert.slices, None, check),)
            )
            yield from rows.pieces(inputs, 0, 0, checksums=False)
        return
    at = 0
    for layer in source.tables.layers:
        tensors = [source.experts[part.tensor] for part in layer.parts]
        checksums = source.tables.checksums[at : at + layer.experts]
        at += layer.experts
        assert layer.records is not None
        slices = Slices(layer.records.file, layer.records.offset, layer.record_bytes, layer.record_bytes)
        check = _record_check(layer, slices, checksums, tensors if check_tensors else [], found)
        rows = Rows(layer.experts, layer.record_bytes, (RowPart(0, layer.record_bytes, slices, None, check),))
        yield from rows.pieces(inputs, 0, 0, checksums=False)


def _dense_check(tensor: Tensor, found: _Found) -> Callable[[int, np.ndarray], None]:
    def check(at: int, stored: np.ndarray) -> None:
        if not ggml.valid(tensor.type, stored):
            found.tensor(tensor, at, _NO_NUMBERS)

    return check


def _values_check(tensor: ExpertTensor, found: _Found) -> Callable[[int, np.ndarray], None]:
    def check(expert: int, stored: np.ndarray) -> None:
        if not ggml.valid(tensor.plain_type, tensor.plain(stored)):
            found.expert(tensor.block, expert, tensor.name, tensor.slices, _NO_NUMBERS)

    return check


_NO_NUMBERS = "holds values that are no numbers"


def _record_check(
    layer: LaidLayer, slices: Slices, checksums: np.ndarray, tensors: list[ExpertTensor], found: _Found
) -> Callable[[int, np.ndarray], None]:
    gaps = tuple(layer.gaps())
    values = [
        (part, _values_check(tensor, found)) for part in layer.parts for tensor in tensors if tensor.name == part.tensor
    ]

    def check(expert: int, record: np.ndarray) -> None:
        wrong = crc32c(record) != checksums[expert]
        if wrong:
            found.expert(layer.block, expert, layer.name, slices, "its checksum is another")
        elif any(record[begin:end].any() for begin, end in gaps):
            found.expert(layer.block, expert, layer.name, slices, "bytes between its parts are not zero")
        for part, check_values in values:
            check_values(expert, record[part.offset : part.offset + part.bytes])

    return check
