"""A model to lay or to give back, stock or laid: its keys as bytes, its tensors, where each expert's matrix is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..errors import ModelError
from . import ggml
from .format import NEURON_MAJOR, LaidLayer, Part, Tables, group_experts, is_laid, matrix_of, read_tables
from .gguf_file import (
    ALIGNMENT,
    ARCHITECTURE,
    SPLIT_KEYS,
    STRING,
    U32,
    GgufFile,
    Model,
    Tensor,
    open_gguf,
    open_shards,
    open_stock,
    pair,
)
from .interleaving import Interleaving
from .stream import Slices

__all__ = ["ExpertTensor", "Source", "open_source"]


@dataclass(frozen=True)
class ExpertTensor:
    """A matrix of every expert of a block, as the model means it and as it lies in a file.

    Attributes:
        type: Of the stored bytes.
        form: 0 plain, -1 neuron-major, else interleaved by `interleaving`.
    """

    name: str
    block: int
    columns: int
    rows: int
    experts: int
    type: int
    form: int
    slices: Slices
    interleaving: Interleaving | None = None

    @property
    def matrix(self) -> str:
        return matrix_of(self.name)

    @property
    def ne(self) -> tuple[int, int, int]:
        return self.columns, self.rows, self.experts

    def plain(self, stored: np.ndarray) -> np.ndarray:
        """The plain bytes of one expert's matrix; of a neuron-major one the values, as F32."""
        if self.form == NEURON_MAJOR:
            values = ggml.dequantise(self.type, stored).reshape(self.columns, self.rows)
            return np.ascontiguousarray(values.T).view(np.uint8).reshape(-1)
        if self.interleaving is not None:
            return self.interleaving.invert(stored, self.columns, self.rows)
        return stored

    @property
    def plain_type(self) -> int:
        """The type of what `plain` gives."""
        return ggml.F32 if self.form == NEURON_MAJOR else self.type

    @property
    def plain_bytes(self) -> int:
        return ggml.row_bytes(self.plain_type, self.columns) * self.rows


@dataclass(frozen=True)
class Source:
    """A model, stock or laid, as its stock file has it.

    Attributes:
        tables: Of a laid file; None of a stock one.
        alignment: `general.alignment` of the stock file, 0 if it has no such key.
        order: Names of all tensors, in the stock file's order.
        dense: Tensors outside of the experts' matrices, by name.
        experts: The experts' matrices, by name.
    """

    model: Model
    tables: Tables | None
    architecture: str
    name: str
    sha256: str
    alignment: int
    order: tuple[str, ...]
    dense: dict[str, Tensor] = field(repr=False)
    experts: dict[str, ExpertTensor] = field(repr=False)

    def blocks(self) -> dict[int, list[ExpertTensor]]:
        """The experts' matrices by block, ascending, in the order of a record."""
        blocks: dict[int, list[ExpertTensor]] = {}
        for tensor in self.experts.values():
            blocks.setdefault(tensor.block, []).append(tensor)
        return dict(sorted(blocks.items()))

    def pairs(self, *, architecture: str, alignment: int) -> list[bytes]:
        """The keys of the model in their order, byte for byte, but for these two; not those of shards or of laid files.

        Args:
            alignment: 0: without `general.alignment`.
        """
        pairs, has_alignment = [], False
        for key in self.model.first.keys:
            if key.name in SPLIT_KEYS or (self.tables is not None and key.name.startswith("moestream.")):
                continue
            if key.name == ARCHITECTURE:
                pairs.append(pair(ARCHITECTURE, STRING, architecture))
            elif key.name == ALIGNMENT:
                has_alignment = True
                if alignment:
                    pairs.append(pair(ALIGNMENT, U32, alignment))
            else:
                pairs.append(self.model.first.pair(key))
        if alignment and not has_alignment:
            pairs.append(pair(ALIGNMENT, U32, alignment))
        return pairs


def open_source(path: Path) -> Source:
    """Opens a stock model or a laid file.

    Raises:
        ModelError: It is neither, or a damaged one.
    """
    first = _header(path)
    return _laid(open_shards(first)) if first is not None and is_laid(first) else _stock(open_stock(path, first))


def _header(path: Path) -> GgufFile | None:
    try:
        return open_gguf(path)
    except ModelError:
        return None  # ggml's reader says why


def _stock(model: Model) -> Source:
    if matching := [key.name for key in model.first.keys if key.name.startswith("moestream.")]:
        raise ModelError(f"{model.path}: has the key {matching[0]}, but is no laid file: it cannot be laid")
    experts: dict[str, ExpertTensor] = {}
    try:
        blocks = group_experts(model.tensors)
    except ModelError as exc:
        raise ModelError(f"{model.path}: {exc}") from exc
    for block, tensors in blocks.items():
        for t in tensors:
            columns, rows, n = t.ne
            size = t.size_bytes // n
            slices = Slices(t.file, t.offset, size, size)
            experts[t.name] = ExpertTensor(t.name, block, columns, rows, n, t.type, 0, slices)
    first = model.first
    return Source(
        model=model,
        tables=None,
        architecture=first.architecture,
        name=first.path.name,
        sha256=model.sha256,
        alignment=first.alignment if first.key(ALIGNMENT) else 0,
        order=tuple(tensor.name for tensor in model.tensors),
        dense={tensor.name: tensor for tensor in model.tensors if tensor.name not in experts},
        experts=experts,
    )


def _laid(model: Model) -> Source:
    tables = read_tables(model)
    experts = {
        part.tensor: _of_part(layer, part, tables.interleaving(part)) for layer in tables.layers for part in layer.parts
    }
    records = {layer.name for layer in tables.layers}
    return Source(
        model=model,
        tables=tables,
        architecture=tables.architecture,
        name=tables.source_name,
        sha256=tables.source_sha256,
        alignment=tables.source_alignment,
        order=tables.source_tensors,
        dense={tensor.name: tensor for tensor in model.tensors if tensor.name not in records},
        experts=experts,
    )


def _of_part(layer: LaidLayer, part: Part, interleaving: Interleaving | None) -> ExpertTensor:
    assert layer.records is not None
    slices = Slices(layer.records.file, layer.records.offset + part.offset, layer.record_bytes, part.bytes)
    return ExpertTensor(
        part.tensor, layer.block, part.columns, part.rows, layer.experts, part.type, part.form, slices, interleaving
    )


def checked(source: Source, tensor: ExpertTensor, wanted: bool) -> Callable[[int, np.ndarray], None] | None:
    """Raises ModelError for an expert whose values are no numbers; None if that is not wanted."""
    if not wanted:
        return None

    def check(expert: int, stored: np.ndarray) -> None:
        if not ggml.valid(tensor.plain_type, tensor.plain(stored)):
            path = source.model.files[tensor.slices.file].path
            at = tensor.slices.offset + expert * tensor.slices.stride
            raise ModelError(f"{path}: {tensor.name}, expert {expert} at byte {at} holds values that are no numbers")

    return check


def checked_dense(source: Source, tensor: Tensor, wanted: bool) -> Callable[[int, np.ndarray], None] | None:
    """As `checked`, of a tensor that every token needs."""
    if not wanted:
        return None

    def check(at: int, stored: np.ndarray) -> None:
        if not ggml.valid(tensor.type, stored):
            path = source.model.files[tensor.file].path
            raise ModelError(
                f"{path}: {tensor.name} holds values that are no numbers, behind byte {tensor.offset + at}"
            )

    return check
