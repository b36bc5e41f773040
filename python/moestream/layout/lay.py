"""Laying: the experts of a model, stock or laid already, into records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from ..errors import ModelError, OptionError
from . import ggml
from .format import (
    LAID_ALIGNMENT,
    LAID_ARCHITECTURE,
    NEURON_MAJOR,
    PLAIN,
    PLAIN_TARGET,
    LaidLayer,
    Part,
    Tables,
    lay_out,
    table_pairs,
)
from .gguf_file import ALIGNMENT, I32, U16, U32, header_bytes, padded, pair
from .interleaving import TARGETS, Interleaving, native_target
from .source import ExpertTensor, Source, checked, checked_dense
from .stream import Inputs, Piece, RowPart, Rows, chunks
from .writer import OutputFile, plan_hash, shard_path, write_files

__all__ = ["LayPlan", "LayResult", "lay", "plan_lay", "resolve_target"]


@dataclass(frozen=True)
class _Shard:
    """Tensors of one file: name, ne, type, and offset behind the header; the bytes of all of them."""

    tensors: tuple[tuple[str, tuple[int, ...], int, int], ...]
    data_bytes: int


@dataclass(frozen=True)
class NeuronMajor:
    """Matrices of the source that are to be stored neuron-major, by name: the type that each is quantised to."""

    types: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LayPlan:
    """What a laid file will hold.

    Attributes:
        tables: With checksums of zero.
        shards: Tensors by file.
        notes: What is not as it was asked for, and why; one sentence each.
    """

    source: Source
    out: Path
    tables: Tables
    shards: tuple[_Shard, ...] = field(repr=False)
    headers: tuple[bytes, ...] = field(repr=False)
    notes: tuple[str, ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files."""
        return tuple(shard_path(self.out, number, len(self.shards)) for number in range(len(self.shards)))

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(len(header) + shard.data_bytes for header, shard in zip(self.headers, self.shards, strict=True))


@dataclass(frozen=True)
class LayResult:
    """What was written."""

    paths: tuple[Path, ...]
    size_bytes: int
    records: int
    seconds: float


def resolve_target(target: str) -> str:
    """The machine that a file is for: "native" is this one.

    Raises:
        OptionError: There is no such target.
    """
    if target == "native":
        return native_target()
    if target not in TARGETS:
        raise OptionError(f"--target {target}: unknown; known are native, {', '.join(TARGETS)}")
    return target


def plan_lay(
    source: Source,
    out: Path,
    *,
    target: str = "native",
    split_max_bytes: int | None = None,
    neuron_major: NeuronMajor | None = None,
    source_name: str | None = None,
    source_sha256: str | None = None,
) -> LayPlan:
    """Lays out a file; nothing is read but what `source` has read.

    Args:
        target: "native", "plain" or a machine: the order of bits in the records.
        split_max_bytes: Shards are made that are no larger, where tensors are not.
        neuron_major: Which matrices to store neuron-major.
        source_name, source_sha256: Of the model that the user has, if `source` is only a step from it.
    """
    builder = _Layout(resolve_target(target), target == "native", neuron_major or NeuronMajor())
    layers = tuple(builder.layer(block, tensors) for block, tensors in source.blocks().items())
    tables = Tables(
        tool=f"moestream {version('moestream')}",
        architecture=source.architecture,
        source_name=source_name or source.name,
        source_sha256=source_sha256 or source.sha256,
        source_alignment=source.alignment,
        source_tensors=source.order,
        target=builder.target,
        layers=layers,
        interleavings=tuple(builder.interleavings),
        checksums=np.zeros(sum(layer.experts for layer in layers), dtype=np.uint32),
    )
    shards = _shards(source, layers, split_max_bytes)
    headers = _headers(source, tables, shards)
    return LayPlan(source, out, tables, shards, headers, tuple(builder.notes))


class _Layout:
    """Decides the form of each part; collects the interleavings that are used, and what could not be."""

    def __init__(self, target: str, is_native: bool, neuron_major: NeuronMajor) -> None:
        self.target = target
        self.interleavings: list[Interleaving] = []
        self.notes: list[str] = []
        self._is_native = is_native
        self._neuron_major = neuron_major
        self._forms: dict[tuple[int, int, int], int] = {}

    def layer(self, block: int, tensors: Sequence[ExpertTensor]) -> LaidLayer:
        names = {tensor.matrix for tensor in tensors if tensor.form == NEURON_MAJOR or tensor.name in self._neuron_major.types}
        # Where a row of down may be left out, so may that of up, if its gate says so first: it must not be interleaved.
        by_row = {"up"} if "down" in names and any(tensor.matrix == "gate" for tensor in tensors) else set()
        return lay_out(block, tensors[0].experts, [self._part(tensor, tensor.matrix in by_row) for tensor in tensors])

    def _part(self, tensor: ExpertTensor, by_row: bool) -> tuple[str, int, int, int, int, int]:
        if tensor.name in self._neuron_major.types:
            type = self._neuron_major.types[tensor.name]
            size = ggml.row_bytes(type, tensor.rows) * tensor.columns
            return tensor.name, type, tensor.columns, tensor.rows, size, NEURON_MAJOR
        if tensor.form == NEURON_MAJOR:
            form = NEURON_MAJOR
        else:
            form = PLAIN if by_row else self._form(tensor.type, tensor.columns, tensor.rows)
        return tensor.name, tensor.type, tensor.columns, tensor.rows, tensor.slices.bytes, form

    def _form(self, type: int, columns: int, rows: int) -> int:
        """The number of the interleaving for a matrix, 0 for none."""
        if self.target == PLAIN_TARGET:
            return PLAIN
        key = (type, columns, rows)
        if key not in self._forms:
            self._forms[key] = self._new_form(type, columns, rows)
        return self._forms[key]

    def _new_form(self, type: int, columns: int, rows: int) -> int:
        if self._is_native:
            found = Interleaving.native(type, columns, rows)
        else:
            found = Interleaving.for_target(self.target, type, columns, rows)
        if found is None:
            shape = f"{ggml.type_name(type)} of {columns} x {rows}"
            self.notes.append(f"{shape} has no interleaved kernel on {self.target}, or none known here: plain")
            return PLAIN
        if found not in self.interleavings:
            self.interleavings.append(found)
        return self.interleavings.index(found) + 1


# ------------------------------------------------------------------ the files


def _shards(source: Source, layers: Sequence[LaidLayer], split_max_bytes: int | None) -> tuple[_Shard, ...]:
    """The tensors by shard: the dense ones in the source's order, then the records."""
    wanted: list[tuple[str, tuple[int, ...], int, int]] = [
        (name, source.dense[name].ne, source.dense[name].type, source.dense[name].size_bytes)
        for name in source.order
        if name in source.dense
    ]
    wanted += [
        (layer.name, (layer.record_bytes, layer.experts), ggml.I8, layer.record_bytes * layer.experts)
        for layer in layers
    ]
    shards: list[_Shard] = []
    tensors: list[tuple[str, tuple[int, ...], int, int]] = []
    at = 0
    for name, ne, type, size in wanted:
        if tensors and split_max_bytes is not None and at + size > split_max_bytes:
            shards.append(_Shard(tuple(tensors), at))
            tensors, at = [], 0
        tensors.append((name, ne, type, at))
        at = padded(at + size, LAID_ALIGNMENT)
    shards.append(_Shard(tuple(tensors), at))
    return tuple(shards)


def _headers(source: Source, tables: Tables, shards: Sequence[_Shard]) -> tuple[bytes, ...]:
    """The headers; those for other checksums are as long."""
    n_tensors = sum(len(shard.tensors) for shard in shards)
    headers = []
    for number, shard in enumerate(shards):
        if number == 0:
            pairs = source.pairs(architecture=LAID_ARCHITECTURE, alignment=LAID_ALIGNMENT) + table_pairs(tables)
        else:
            pairs = [pair(ALIGNMENT, U32, LAID_ALIGNMENT)]
        if len(shards) > 1:
            pairs += [
                pair("split.no", U16, number),
                pair("split.count", U16, len(shards)),
                pair("split.tensors.count", I32, n_tensors),
            ]
        headers.append(header_bytes(pairs, shard.tensors, LAID_ALIGNMENT))
    return tuple(headers)


def lay(
    plan: LayPlan,
    *,
    check_tensors: bool = False,
    resume: bool = False,
    force: bool = False,
    progress: bool = True,
    options: object = None,
) -> LayResult:
    """Writes what was planned, in memory of a few records.

    Args:
        check_tensors: Refuse weights that are no numbers.
        options: Whatever else decides the bytes: a file of other options is not continued.

    Raises:
        OutputError, ModelError, OptionError: See `writer.write_files`.
    """
    source, began = plan.source, time.monotonic()
    files = [
        OutputFile(path, len(header) + shard.data_bytes)
        for path, header, shard in zip(plan.paths, plan.headers, plan.shards, strict=True)
    ]

    def headers(checksums: np.ndarray) -> tuple[bytes, ...]:
        return _headers(source, replace(plan.tables, checksums=checksums), plan.shards)

    with Inputs(source.model) as inputs:
        write_files(
            plan.out,
            files,
            list(_pieces(plan, inputs, check_tensors)),
            headers,
            source=source.model,
            plan=plan_hash(plan.headers, [file.identity for file in source.model.files], check_tensors, options),
            what="laying",
            resume=resume,
            force=force,
            progress=progress,
        )
    return LayResult(plan.paths, plan.size_bytes, plan.tables.n_records, time.monotonic() - began)


def _pieces(plan: LayPlan, inputs: Inputs, check_tensors: bool) -> Iterator[Piece]:
    source = plan.source
    layers = {layer.name: layer for layer in plan.tables.layers}
    for number, (shard, header) in enumerate(zip(plan.shards, plan.headers, strict=True)):
        for name, _, _, offset in shard.tensors:
            at = len(header) + offset
            if name in layers:
                yield from _records(plan, layers[name], check_tensors).pieces(inputs, number, at, checksums=True)
                continue
            tensor = source.dense[name]
            yield from chunks(inputs, tensor, number, at, checked_dense(source, tensor, check_tensors))


def _records(plan: LayPlan, layer: LaidLayer, check_tensors: bool) -> Rows:
    parts = []
    for part in layer.parts:
        tensor = plan.source.experts[part.tensor]
        change = _change(tensor, part, plan.tables.interleaving(part))
        parts.append(
            RowPart(part.offset, part.bytes, tensor.slices, change, checked(plan.source, tensor, check_tensors))
        )
    return Rows(layer.experts, layer.record_bytes, tuple(parts), tuple(layer.gaps()))


def _change(
    tensor: ExpertTensor, part: Part, wanted: Interleaving | None
) -> Callable[[np.ndarray, np.ndarray], None] | None:
    """What makes the stored part of what is in the source; None if these are the same bytes."""
    if part.form == NEURON_MAJOR:
        return None if tensor.form == NEURON_MAJOR else _to_neuron_major(tensor, part.type)
    if tensor.interleaving == wanted:
        return None

    def change(stored: np.ndarray, out: np.ndarray) -> None:
        plain = tensor.plain(stored)
        if wanted is None:
            out[:] = plain
        else:
            wanted.apply(plain, tensor.columns, tensor.rows, out=out)

    return change


def _to_neuron_major(tensor: ExpertTensor, type: int) -> Callable[[np.ndarray, np.ndarray], None]:
    def change(stored: np.ndarray, out: np.ndarray) -> None:
        values = ggml.dequantise(tensor.plain_type, tensor.plain(stored)).reshape(tensor.rows, tensor.columns)
        out[:] = ggml.quantise(type, np.ascontiguousarray(values.T))

    return change


def check_relaid(plan: LayPlan) -> None:
    """Raises ModelError if a laid file would be laid as it is already."""
    tables = plan.source.tables
    if tables is None:
        return
    if _stored(tables) == _stored(plan.tables):
        raise ModelError(
            f"{plan.source.model.path}: is laid for {tables.target} already; name another --target, "
            "or give the stock file back with: moestream export"
        )


def _stored(tables: Tables) -> list[tuple[str, int, bool, Interleaving | None]]:
    """How each part is stored."""
    parts = (part for layer in tables.layers for part in layer.parts)
    return [(part.tensor, part.type, part.form == NEURON_MAJOR, tables.interleaving(part)) for part in parts]
