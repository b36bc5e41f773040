"""The tables of a laid file: what docs/layout.md says, in its words; made for a model, written as keys, read and checked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ModelError
from . import ggml
from .gguf_file import (
    ALIGNMENT,
    ARCHITECTURE,
    I32,
    SPLIT_KEYS,
    STRING,
    U8,
    U16,
    U32,
    U64,
    GgufFile,
    Model,
    Tensor,
    padded,
    pair,
)
from .interleaving import Interleaving

__all__ = [
    "NEURON_MAJOR",
    "PLAIN",
    "LaidLayer",
    "Part",
    "Tables",
    "group_experts",
    "lay_out",
    "read_tables",
    "table_pairs",
]

FORMAT_VERSION = 1
LAID_ARCHITECTURE = "moestream"
LAID_ALIGNMENT = 4096
PART_ALIGNMENT = 64
PLAIN, NEURON_MAJOR = 0, -1
PLAIN_TARGET = "plain"
_PREFIX = "moestream."
_EXPERT_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\.ffn_(gate|up|down|gate_up)_exps\.weight")
_ORDER = ("gate", "up", "gate_up", "down")

# Keys that every laid file has: the type of the value, and whether it is an array.
_KEYS = {
    "version": (U32, False),
    "tool": (STRING, False),
    "architecture": (STRING, False),
    "source.name": (STRING, False),
    "source.sha256": (STRING, False),
    "source.alignment": (U32, False),
    "source.tensors": (STRING, True),
    "target": (STRING, False),
    "layer.block": (U32, True),
    "layer.parts": (U32, True),
    "part.tensor": (STRING, True),
    "part.type": (U32, True),
    "part.columns": (U64, True),
    "part.rows": (U64, True),
    "part.offset": (U64, True),
    "part.bytes": (U64, True),
    "part.form": (I32, True),
    "checksums": (U32, True),
}
_INTERLEAVING_KEYS = {
    "name": (STRING, False),
    "type": (U32, False),
    "rows": (U32, False),
    "bits": (U16, True),
    "inverted": (U8, True),
}
_MAX_VALUE = 1 << 40  # of columns and rows: their product with a type's size stays a number that C can hold too


@dataclass(frozen=True)
class Part:
    """One matrix in a record: a slice of `tensor`, `columns` x `rows` values in `bytes` bytes at `offset`.

    Attributes:
        form: 0 plain, -1 neuron-major, I as interleaving I says.
    """

    tensor: str
    type: int
    columns: int
    rows: int
    offset: int
    bytes: int
    form: int

    @property
    def matrix(self) -> str:
        """ "down" of "blk.7.ffn_down_exps.weight"."""
        return matrix_of(self.tensor)


@dataclass(frozen=True)
class LaidLayer:
    """The records of one layer. `records` is their tensor in the file, None while there is no file."""

    block: int
    experts: int
    parts: tuple[Part, ...]
    record_bytes: int
    records: Tensor | None = None

    @property
    def name(self) -> str:
        return f"{_PREFIX}blk.{self.block}.experts"

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Ranges of a record that no part takes: they are zero."""
        end = 0
        for part in self.parts:
            if part.offset > end:
                yield end, part.offset
            end = part.offset + part.bytes
        if end < self.record_bytes:
            yield end, self.record_bytes


@dataclass(frozen=True)
class Tables:
    """Everything a laid file says of itself."""

    tool: str
    architecture: str
    source_name: str
    source_sha256: str
    source_alignment: int
    source_tensors: tuple[str, ...]
    target: str
    layers: tuple[LaidLayer, ...]
    interleavings: tuple[Interleaving, ...]
    checksums: np.ndarray = field(repr=False)

    @property
    def n_records(self) -> int:
        return sum(layer.experts for layer in self.layers)

    def interleaving(self, part: Part) -> Interleaving | None:
        """How a part is interleaved, None if it is not."""
        return self.interleavings[part.form - 1] if part.form > 0 else None


def matrix_of(tensor: str) -> str:
    """ "gate_up" of "blk.0.ffn_gate_up_exps.weight"; empty for what is no matrix of experts."""
    found = _EXPERT_TENSOR.fullmatch(tensor)
    return found[2] if found else ""


def is_laid(file: GgufFile) -> bool:
    """Whether a GGUF says that it is a laid file."""
    return file.architecture == LAID_ARCHITECTURE


def group_experts(tensors: Sequence[Tensor]) -> dict[int, list[Tensor]]:
    """The matrices of experts by block, ascending; within one in the order gate, up, down.

    Raises:
        ModelError: The matrices of a block are not of one number of experts.
    """
    blocks: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if found := _EXPERT_TENSOR.fullmatch(tensor.name):
            blocks.setdefault(int(found[1]), []).append(tensor)
    for block, matrices in blocks.items():
        matrices.sort(key=lambda tensor: _ORDER.index(matrix_of(tensor.name)))
        if any(len(tensor.ne) != 3 for tensor in matrices) or len({tensor.ne[2] for tensor in matrices}) != 1:
            shapes = ", ".join(f"{t.name} {'x'.join(map(str, t.ne))}" for t in matrices)
            raise ModelError(f"the matrices of block {block} are not of the same experts: {shapes}")
    return dict(sorted(blocks.items()))


def lay_out(block: int, experts: int, parts: Sequence[tuple[str, int, int, int, int, int]]) -> LaidLayer:
    """A layer whose parts lie one behind the other.

    Args:
        parts: Tensor, type, columns, rows, bytes and form of each.
    """
    placed, end = [], 0
    for tensor, type, columns, rows, size, form in parts:
        offset = padded(end, PART_ALIGNMENT)
        placed.append(Part(tensor, type, columns, rows, offset, size, form))
        end = offset + size
    return LaidLayer(block, experts, tuple(placed), padded(end, LAID_ALIGNMENT))


# ------------------------------------------------------------------ written


def table_pairs(tables: Tables) -> list[bytes]:
    """The keys under `moestream.`, as they stand in a file; as long for any checksums."""
    parts = [part for layer in tables.layers for part in layer.parts]
    values: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "tool": tables.tool,
        "architecture": tables.architecture,
        "source.name": tables.source_name,
        "source.sha256": tables.source_sha256,
        "source.alignment": tables.source_alignment,
        "source.tensors": tables.source_tensors,
        "target": tables.target,
        "layer.block": [layer.block for layer in tables.layers],
        "layer.parts": [len(layer.parts) for layer in tables.layers],
        **{f"part.{name}": [getattr(part, name) for part in parts] for name in _PART_FIELDS},
        "checksums": tables.checksums,
    }
    pairs = [pair(_PREFIX + name, type, values[name]) for name, (type, _) in _KEYS.items()]
    for number, interleaving in enumerate(tables.interleavings, 1):
        for name, (type, _) in _INTERLEAVING_KEYS.items():
            pairs.append(pair(f"{_PREFIX}interleaving.{number}.{name}", type, getattr(interleaving, name)))
    return pairs


_PART_FIELDS = tuple(name.removeprefix("part.") for name in _KEYS if name.startswith("part."))


# ------------------------------------------------------------------ read


class _Wrong(Exception):
    """A rule that a file breaks; the text begins with the key."""


def read_tables(model: Model) -> Tables:
    """Reads the tables of a laid file and checks every rule that a header can break.

    Raises:
        ModelError: The file, the key and what is wrong with it.
    """
    try:
        return _read(model)
    except _Wrong as exc:
        raise ModelError(f"{model.path}: damaged laid file: {exc}; convert the model again") from None


def _read(model: Model) -> Tables:
    first = model.first
    if not is_laid(first):
        raise ModelError(f"{model.path}: {ARCHITECTURE} is {first.architecture!r}: it is not a laid file")
    values = _values(model)
    _check_container(model)
    interleavings = _interleavings(model)
    layers = _layers(model, values, interleavings)
    _check_tensors(model, values["source.tensors"], layers)
    records = sum(layer.experts for layer in layers)
    if len(values["checksums"]) != records:
        raise _Wrong(f"moestream.checksums: there are {len(values['checksums'])} for {records} records")
    if not re.fullmatch("[0-9a-f]{64}", values["source.sha256"]):
        raise _Wrong(f"moestream.source.sha256 is {values['source.sha256'][:80]!r}, not 64 hexadecimal digits")
    alignment = int(values["source.alignment"])
    if alignment & (alignment - 1):
        raise _Wrong(f"moestream.source.alignment is {alignment}, not a power of two")
    return Tables(
        tool=values["tool"],
        architecture=values["architecture"],
        source_name=values["source.name"],
        source_sha256=values["source.sha256"],
        source_alignment=alignment,
        source_tensors=tuple(values["source.tensors"]),
        target=values["target"],
        layers=layers,
        interleavings=interleavings,
        checksums=values["checksums"],
    )


def _values(model: Model) -> dict[str, Any]:
    """The values of the keys that must be there, each of its type."""
    first = model.first
    version = first.key(_PREFIX + "version")
    if version is not None and (version.type, version.count) == (U32, None) and first.value(version) != FORMAT_VERSION:
        raise ModelError(
            f"{model.path}: a laid file of version {first.value(version)}, and this moestream reads version "
            f"{FORMAT_VERSION}: update moestream, or convert the model again"
        )
    for key in first.keys:
        name = key.name.removeprefix(_PREFIX)
        if key.name.startswith(_PREFIX) and name not in _KEYS and not _interleaving_key(name):
            raise _Wrong(f"{key.name}: unknown key")
    return {name: _value(first, _PREFIX + name, *kind) for name, kind in _KEYS.items()}


def _value(file: GgufFile, name: str, type: int, is_array: bool) -> Any:
    key = file.key(name)
    if key is None:
        raise _Wrong(f"{name}: missing")
    if key.type != type or (key.count is not None) != is_array:
        raise _Wrong(f"{name} is {key.type_name}")
    return file.value(key)


def _interleaving_key(name: str) -> tuple[int, str] | None:
    found = re.fullmatch(r"interleaving\.([1-9][0-9]{0,5})\.(\w+)", name)
    return (int(found[1]), found[2]) if found and found[2] in _INTERLEAVING_KEYS else None


def _check_container(model: Model) -> None:
    for file in model.files:
        alignment = file.alignment
        if alignment < LAID_ALIGNMENT:
            raise _Wrong(f"{ALIGNMENT} of {file.path.name} is {alignment}, less than {LAID_ALIGNMENT}")
        version = int.from_bytes(file.header[4:8], "little")
        if version != 3:
            raise _Wrong(f"{file.path.name} is a GGUF of version {version}, not 3")
    for number, file in enumerate(model.files[1:], 1):
        if file.integer("split.no", 0) != number or file.integer("split.count", 0) != len(model.files):
            raise _Wrong(
                f"split.no and split.count of {file.path.name} do not say that it is shard {number + 1} of {len(model.files)}"
            )
        for key in file.keys:
            if key.name not in (ALIGNMENT, *SPLIT_KEYS):
                raise _Wrong(f"{key.name}: only the first shard may have it, but {file.path.name} has it too")


def _interleavings(model: Model) -> tuple[Interleaving, ...]:
    file = model.first
    numbers = sorted(
        {found[0] for key in file.keys if (found := _interleaving_key(key.name.removeprefix(_PREFIX))) is not None}
    )
    if numbers != list(range(1, len(numbers) + 1)):
        raise _Wrong(f"{_PREFIX}interleaving.{numbers[-1]}: they are not numbered 1, 2, ...")
    return tuple(_interleaving(file, number) for number in numbers)


def _interleaving(file: GgufFile, number: int) -> Interleaving:
    prefix = f"{_PREFIX}interleaving.{number}."
    name, type, rows, bits, inverted = (_value(file, prefix + key, *kind) for key, kind in _INTERLEAVING_KEYS.items())
    known = ggml.traits(type)
    if known is None:
        raise _Wrong(f"{prefix}type is {type}, which ggml does not know")
    if rows < 1 or len(bits) != 8 * rows * known.block_bytes:
        raise _Wrong(f"{prefix}bits has {len(bits)} entries for {rows} rows of {known.name}")
    if len(inverted) != len(bits):
        raise _Wrong(f"{prefix}inverted has {len(inverted)} entries, bits {len(bits)}")
    if not np.array_equal(np.sort(bits), np.arange(len(bits))):
        raise _Wrong(f"{prefix}bits is no permutation")
    if inverted.max(initial=0) > 1:
        raise _Wrong(f"{prefix}inverted has a {inverted.max()}")
    return Interleaving.from_table(name, type, rows, bits, inverted)


def _layers(model: Model, values: dict[str, Any], interleavings: Sequence[Interleaving]) -> tuple[LaidLayer, ...]:
    blocks, counts = values["layer.block"].tolist(), values["layer.parts"].tolist()
    if not blocks or any(one >= other for one, other in zip(blocks, blocks[1:], strict=False)):
        raise _Wrong("moestream.layer.block is empty or not ascending")
    if len(counts) != len(blocks):
        raise _Wrong(f"moestream.layer.parts has {len(counts)} entries, layer.block {len(blocks)}")
    columns = {name: list(values[f"part.{name}"]) for name in _PART_FIELDS}
    for name, column in columns.items():
        if len(column) != sum(counts):
            raise _Wrong(
                f"moestream.part.{name} has {len(column)} entries, but moestream.layer.parts sums up to {sum(counts)}"
            )
    parts = [
        Part(tensor, *map(int, numbers))
        for tensor, *numbers in zip(*(columns[name] for name in _PART_FIELDS), strict=True)
    ]
    tensors = {tensor.name: tensor for tensor in model.tensors}
    layers, at = [], 0
    for block, count in zip(blocks, counts, strict=True):
        layers.append(_layer(block, parts[at : at + count], tensors, interleavings))
        at += count
    return tuple(layers)


def _layer(
    block: int, parts: Sequence[Part], tensors: dict[str, Tensor], interleavings: Sequence[Interleaving]
) -> LaidLayer:
    name = f"{_PREFIX}blk.{block}.experts"
    records = tensors.get(name)
    if records is None:
        raise _Wrong(f"moestream.layer.block has {block}, but there is no tensor {name}")
    ne = records.ne[:2] if len(records.ne) >= 2 and set(records.ne[2:]) <= {1} else None
    if records.type != ggml.I8 or ne is None:
        raise _Wrong(
            f"{name} is {'x'.join(map(str, records.ne))} {ggml.type_name(records.type)}, not two dimensions of I8"
        )
    record_bytes, experts = ne
    if record_bytes % LAID_ALIGNMENT:
        raise _Wrong(f"{name}: a record has {record_bytes} bytes, not a multiple of {LAID_ALIGNMENT}")
    if not parts:
        raise _Wrong(f"moestream.layer.parts is 0 for block {block}")
    end = 0
    for part in parts:
        _check_part(part, block, interleavings)
        if part.offset % PART_ALIGNMENT or part.offset < end:
            raise _Wrong(
                f"moestream.part.offset of {part.tensor} is {part.offset}: before {end}, or not a multiple of {PART_ALIGNMENT}"
            )
        end = part.offset + part.bytes
    if end > record_bytes:
        raise _Wrong(f"moestream.part.bytes of {parts[-1].tensor}: it ends at {end} of a record of {record_bytes}")
    return LaidLayer(block, experts, tuple(parts), record_bytes, records)


def _check_part(part: Part, block: int, interleavings: Sequence[Interleaving]) -> None:
    found = _EXPERT_TENSOR.fullmatch(part.tensor)
    if found is None or int(found[1]) != block:
        raise _Wrong(f"moestream.part.tensor {part.tensor[:80]!r} is no matrix of the experts of block {block}")
    known = ggml.traits(part.type)
    if known is None:
        raise _Wrong(f"moestream.part.type of {part.tensor} is {part.type}, which ggml does not know")
    if not (0 < part.columns < _MAX_VALUE and 0 < part.rows < _MAX_VALUE):
        raise _Wrong(f"moestream.part.columns and rows of {part.tensor} are {part.columns} and {part.rows}")
    if not NEURON_MAJOR <= part.form <= len(interleavings):
        raise _Wrong(
            f"moestream.part.form of {part.tensor} is {part.form}, and there are {len(interleavings)} interleavings"
        )
    if part.form == NEURON_MAJOR and part.matrix != "down":
        raise _Wrong(f"moestream.part.form of {part.tensor}: only ffn_down_exps can be neuron-major")
    stored_columns, stored_rows = (part.rows, part.columns) if part.form == NEURON_MAJOR else (part.columns, part.rows)
    if stored_columns % known.block:
        raise _Wrong(f"moestream.part.type of {part.tensor}: rows of {stored_columns} values cannot be {known.name}")
    wanted = known.row_bytes(stored_columns) * stored_rows
    if part.bytes != wanted:
        raise _Wrong(f"moestream.part.bytes of {part.tensor} is {part.bytes}, and {known.name} takes {wanted}")
    if part.form > 0:
        interleaving = interleavings[part.form - 1]
        if interleaving.type != part.type:
            raise _Wrong(f"moestream.part.form of {part.tensor}: interleaving {part.form} is not for {known.name}")
        if part.rows % interleaving.rows:
            raise _Wrong(
                f"moestream.part.rows of {part.tensor} is {part.rows}, not a multiple of the {interleaving.rows} of interleaving {part.form}"
            )


def _check_tensors(model: Model, source_tensors: Sequence[str], layers: Sequence[LaidLayer]) -> None:
    """The source's tensors are those of the file that hold no records, and those that parts stand for."""
    names = [tensor.name for tensor in model.tensors]
    if len(set(names)) != len(names):
        raise _Wrong("a tensor is in two shards")
    parts = [part.tensor for layer in layers for part in layer.parts]
    if len(set(parts)) != len(parts):
        twice = Counter(parts).most_common(1)[0][0]
        raise _Wrong(f"moestream.part.tensor has {twice} twice")
    have = set(names) - {layer.name for layer in layers}
    if doubled := have.intersection(parts):
        raise _Wrong(f"moestream.part.tensor has {min(doubled)}, which is a tensor of the file too")
    have.update(parts)
    listed = set(source_tensors)
    if len(listed) != len(source_tensors):
        raise _Wrong("moestream.source.tensors has a name twice")
    if strange := have - listed:
        raise _Wrong(f"moestream.source.tensors lacks {min(strange)}")
    if missing := listed - have:
        raise _Wrong(
            f"moestream.source.tensors has {min(missing)[:80]!r}, which is neither in the file nor in the records"
        )
