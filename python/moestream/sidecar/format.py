"""The sidecar file of docs/sidecar.md: trained heads and a LoRA beside a model, in one GGUF."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._whole_file import writing_whole
from ..errors import ModelError, OutputError, SidecarError
from ..layout import ggml
from ..layout.gguf_file import (
    ARCHITECTURE,
    DEFAULT_ALIGNMENT,
    F32,
    I32,
    STRING,
    U32,
    GgufFile,
    header_bytes,
    open_gguf,
    padded,
    pair,
)

__all__ = ["HEAD_TYPES", "LORA_TYPES", "SIDECAR", "Base", "Head", "Heads", "Lora", "LoraPair", "Matrix", "Sidecar"]

SIDECAR = "moestream-sidecar"
VERSION = 1

Q4_0, Q8_0 = 2, 8
HEAD_TYPES = {"F32": ggml.F32, "F16": ggml.F16, "Q8_0": Q8_0, "Q4_0": Q4_0}
"""What heads may be stored as, by the name of the type."""
LORA_TYPES = {"F32": ggml.F32, "F16": ggml.F16}
"""What the matrices of a LoRA may be stored as, by the name of the type."""

_PREFIX = "moestream.sidecar."
_PARTS = ("linear.h", "linear.onehot", "fc1.h", "fc1.onehot", "fc2")
_HEAD_TENSOR = re.compile(r"head\.(\d+)\.(linear\.h|linear\.onehot|fc1\.h|fc1\.onehot|fc2)")
_LORA_TENSOR = re.compile(r"(.+)\.lora_([ab])")

_TYPES: dict[str, tuple[int, bool]] = {
    "version": (U32, False),
    "base.hash": (STRING, False),
    "base.name": (STRING, False),
    "base.architecture": (STRING, False),
    "tool": (STRING, False),
    "provenance": (STRING, False),
    "quality": (STRING, False),
    "heads.owners": (I32, True),
    "heads.width": (U32, False),
    "heads.experts": (U32, False),
    "heads.columns": (U32, False),
    "heads.top_k": (U32, False),
    "lora.alpha": (F32, False),
    "lora.rank": (U32, False),
}
"""Of each key behind `moestream.sidecar.`: its type, and whether it is an array."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix as it is stored.

    Attributes:
        type: Its ggml type.
        ne: Its lengths as ggml has them: columns, rows, and the number of experts if there is one for each.
        data: Its bytes, u8[size].
    """

    type: int
    ne: tuple[int, ...]
    data: npt.NDArray[np.uint8] = field(repr=False)

    @classmethod
    def of(cls, values: npt.NDArray[np.floating[Any]], type: int) -> Matrix:
        """Values of any float type, [rows, columns] or [experts, rows, columns], stored as a ggml type.

        Rows that the type's blocks do not divide are stored as F16.
        """
        columns = values.shape[-1]
        known = ggml.traits(type)
        assert known is not None
        if columns % known.block:
            type = ggml.F16
        if type in (ggml.F32, ggml.F16):
            with np.errstate(over="ignore"):  # what becomes infinite is found by whoever looks for it
                rounded = np.ascontiguousarray(values, dtype=np.float32 if type == ggml.F32 else np.float16)
            data = rounded.view(np.uint8).reshape(-1)
        else:
            data = ggml.quantise(type, np.ascontiguousarray(values, dtype=np.float32).reshape(-1, columns))
        return cls(type, tuple(reversed(values.shape)), data)

    @property
    def type_name(self) -> str:
        return ggml.type_name(self.type)

    @property
    def row_bytes(self) -> int:
        return ggml.row_bytes(self.type, self.ne[0])

    def values(self) -> npt.NDArray[np.float32]:
        """The values, [rows, columns] or [experts, rows, columns]."""
        return ggml.dequantise(self.type, self.data).reshape(tuple(reversed(self.ne)))


@dataclass(frozen=True, eq=False)
class Head:
    """The head of layer N: from what N saw and ran at a token, the routing of N + 1 at the next one.

        z = linear_h . h + rows of linear_onehot + fc2 . gelu(fc1_h . h + rows of fc1_onehot)

    h is what enters the experts of layer N; the rows are i of each expert i that N ran at this token, and experts + i of
    those that it ran at the token before. gelu is the exact one, 0.5 x (1 + erf(x / sqrt 2)).

    Attributes:
        owner: N.
        linear_h: ne {columns, experts}.
        linear_onehot: ne {experts, 2 experts}.
        fc1_h: ne {columns, width}.
        fc1_onehot: ne {width, 2 experts}, of the type of `linear_onehot`.
        fc2: ne {width, experts}.
    """

    owner: int
    linear_h: Matrix
    linear_onehot: Matrix
    fc1_h: Matrix
    fc1_onehot: Matrix
    fc2: Matrix

    @classmethod
    def of(
        cls,
        owner: int,
        *,
        linear: npt.NDArray[np.floating[Any]],
        fc1: npt.NDArray[np.floating[Any]],
        fc2: npt.NDArray[np.floating[Any]],
        columns: int,
        type: int,
    ) -> Head:
        """The head of three matrices as they are trained.

        Args:
            linear: [experts, columns + 2 experts], over (h, experts at this token, experts at the one before).
            fc1: [width, columns + 2 experts].
            fc2: [experts, width].
            columns: Length of h.
            type: ggml type to store them as.
        """
        known = ggml.traits(type)
        assert known is not None
        onehot_type = ggml.F16 if any(len(matrix) % known.block for matrix in (linear, fc1)) else type
        return cls(
            owner,
            linear_h=Matrix.of(linear[:, :columns], type),
            linear_onehot=Matrix.of(linear[:, columns:].T, onehot_type),
            fc1_h=Matrix.of(fc1[:, :columns], type),
            fc1_onehot=Matrix.of(fc1[:, columns:].T, onehot_type),
            fc2=Matrix.of(fc2, type),
        )

    def matrices(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """`linear`, `fc1` and `fc2` as `of` takes them."""
        linear = np.concatenate([self.linear_h.values(), self.linear_onehot.values().T], axis=1)
        fc1 = np.concatenate([self.fc1_h.values(), self.fc1_onehot.values().T], axis=1)
        return linear, fc1, self.fc2.values()

    def parts(self) -> Iterator[tuple[str, Matrix]]:
        """The matrices by the names that they have in a file."""
        matrices = (self.linear_h, self.linear_onehot, self.fc1_h, self.fc1_onehot, self.fc2)
        for part, matrix in zip(_PARTS, matrices, strict=True):
            yield f"head.{self.owner}.{part}", matrix

    def bytes_per_token(self, top_k: int) -> int:
        """Bytes that a token with `top_k` experts reads of it: of the one-hot parts only the rows of experts that ran."""
        whole = sum(matrix.data.nbytes for matrix in (self.linear_h, self.fc1_h, self.fc2))
        return whole + 2 * top_k * (self.linear_onehot.row_bytes + self.fc1_onehot.row_bytes)


@dataclass(frozen=True, eq=False)
class Heads:
    """All heads of a sidecar.

    Attributes:
        width: Of the hidden layer of each.
        experts: In each layer of the model.
        columns: Length of h, the model's embedding length.
        top_k: Experts a token that they were trained with.
        heads: By owner, ascending.
    """

    width: int
    experts: int
    columns: int
    top_k: int
    heads: tuple[Head, ...]

    @property
    def owners(self) -> tuple[int, ...]:
        return tuple(head.owner for head in self.heads)

    @property
    def size_bytes(self) -> int:
        return sum(matrix.data.nbytes for head in self.heads for _, matrix in head.parts())

    def bytes_per_token(self, top_k: int | None = None) -> int:
        """Bytes that a token reads of all of them."""
        return sum(head.bytes_per_token(top_k or self.top_k) for head in self.heads)


@dataclass(frozen=True, eq=False)
class LoraPair:
    """y = W x + scale (alpha / rank) B A x, with the rank of this pair.

    Attributes:
        a: ne {columns of W, rank}; of experts a third length, their number.
        b: ne {rank, rows of W}, likewise. Of `token_embd.weight` llama.cpp has A and B in each other's place: a is
            {rank, vocabulary} and b {rank, embedding length}.
    """

    a: Matrix
    b: Matrix

    @property
    def rank(self) -> int:
        return self.b.ne[0]


@dataclass(frozen=True, eq=False)
class Lora:
    """An adapter, as llama.cpp names its matrices.

    Attributes:
        alpha: What is divided by the rank of each pair.
        pairs: By the name of the model's tensor, `blk.0.attn_q.weight`.
    """

    alpha: float
    pairs: Mapping[str, LoraPair]

    @property
    def rank(self) -> int:
        """The largest there is."""
        return max(pair.rank for pair in self.pairs.values())

    @property
    def size_bytes(self) -> int:
        return sum(pair.a.data.nbytes + pair.b.data.nbytes for pair in self.pairs.values())

    def matrices(self) -> Iterator[tuple[str, Matrix]]:
        """All matrices by the names that they have in a file."""
        for name, both in self.pairs.items():
            yield f"{name}.lora_a", both.a
            yield f"{name}.lora_b", both.b


@dataclass(frozen=True)
class Base:
    """The model that a sidecar is for.

    Attributes:
        hash: What :func:`moestream.sidecar.base_hash` says of it.
        name: For people.
        architecture: Of the stock model.
    """

    hash: str
    name: str
    architecture: str


@dataclass(frozen=True, eq=False)
class Sidecar:
    """Heads and a LoRA, or one of them, with the model that they are for.

    >>> sidecar = Sidecar.read("model.sidecar.gguf")
    >>> sidecar.heads.owners, sidecar.lora.rank

    Attributes:
        provenance: Of what data, with which seeds and steps, under which licences it was made.
        quality: What was measured with it.
        tool: What wrote it; "" before it is written.
        path: Of the file that it was read from.
    """

    base: Base
    heads: Heads | None = None
    lora: Lora | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    quality: Mapping[str, Any] = field(default_factory=dict)
    tool: str = ""
    path: Path | None = None

    def matrices(self) -> Iterator[tuple[str, Matrix]]:
        """All that is stored, by name."""
        for head in self.heads.heads if self.heads is not None else ():
            yield from head.parts()
        if self.lora is not None:
            yield from self.lora.matrices()

    @property
    def size_bytes(self) -> int:
        """Of all matrices."""
        return sum(matrix.data.nbytes for _, matrix in self.matrices())

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, whole or not at all.

        Raises:
            SidecarError: It would be none: what is in it is incomplete, or no numbers.
            OutputError: It cannot be written.
        """
        where = Path(path)
        check(where, self)
        about: dict[str, Any] = {
            "version": VERSION,
            "base.hash": self.base.hash,
            "base.name": self.base.name,
            "base.architecture": self.base.architecture,
            "tool": f"moestream {importlib.metadata.version('moestream')}",
            "provenance": _json_text(where, "provenance", self.provenance),
            "quality": _json_text(where, "quality", self.quality),
        }
        if self.heads is not None:
            about |= {f"heads.{name}": getattr(self.heads, name) for name in ("owners", *_HEAD_NUMBERS)}
        if self.lora is not None:
            about |= {"lora.alpha": self.lora.alpha, "lora.rank": self.lora.rank}
        pairs = [pair(ARCHITECTURE, STRING, SIDECAR)]
        pairs += [pair(_PREFIX + name, _TYPES[name][0], value) for name, value in about.items()]
        with writing_whole(where, OutputError) as file:
            for piece in file_pieces(pairs, dict(self.matrices())):
                file.write(piece)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Sidecar:
        """Reads a file, all of it, and checks it.

        Raises:
            SidecarError: It is no sidecar, a damaged one, or one of a later version.
        """
        where = Path(path)
        try:
            file = open_gguf(where)
        except ModelError as exc:
            reason = str(exc).removeprefix(f"{where}: ").split(";")[0]
            raise SidecarError(f"{where}: cannot be read as a sidecar: {reason}; get or pack it again") from exc
        keys = _keys(file)
        matrices = file_matrices(file)
        sidecar = cls(
            base=Base(keys["base.hash"], keys["base.name"], keys["base.architecture"]),
            heads=_heads(where, keys, matrices),
            lora=_lora(where, keys, matrices),
            provenance=_json(where, "provenance", keys),
            quality=_json(where, "quality", keys),
            tool=keys["tool"],
            path=where,
        )
        if matrices:
            raise SidecarError(f"{where}: has the tensor {next(iter(matrices))}, which no sidecar has; {_AGAIN}")
        check(where, sidecar)
        return sidecar


_HEAD_NUMBERS = ("width", "experts", "columns", "top_k")
_AGAIN = "get or pack it again"


def file_pieces(pairs: list[bytes], matrices: Mapping[str, Matrix]) -> Iterator[bytes | memoryview]:
    """The bytes of a GGUF with these keys and matrices."""
    infos, at = [], 0
    for name, matrix in matrices.items():
        infos.append((name, matrix.ne, matrix.type, at))
        at = padded(at + matrix.data.nbytes, DEFAULT_ALIGNMENT)
    yield header_bytes(pairs, infos, DEFAULT_ALIGNMENT)
    for matrix in matrices.values():
        yield memoryview(matrix.data)
        yield bytes(padded(matrix.data.nbytes, DEFAULT_ALIGNMENT) - matrix.data.nbytes)


# ------------------------------------------------------------------ checking


def check(path: Path, sidecar: Sidecar) -> None:
    """Raises SidecarError unless a sidecar keeps all rules of docs/sidecar.md that do not ask for the model."""
    if sidecar.heads is None and sidecar.lora is None:
        raise SidecarError(f"{path}: holds neither heads nor a LoRA; pack at least one of them")
    if not re.fullmatch(r"[0-9a-f]{64}", sidecar.base.hash):
        raise SidecarError(f"{path}: {_PREFIX}base.hash is {sidecar.base.hash!r}, no SHA-256; {_AGAIN}")
    if sidecar.heads is not None:
        _check_heads(path, sidecar.heads)
    if sidecar.lora is not None:
        _check_lora(path, sidecar.lora)
    for name, matrix in sidecar.matrices():
        if not ggml.valid(matrix.type, matrix.data):
            raise SidecarError(
                f"{path}: {name} holds values that are no numbers (NaN or infinite); train it anew, or pack it as F32"
            )


def _check_heads(path: Path, heads: Heads) -> None:
    for name in _HEAD_NUMBERS:
        if getattr(heads, name) < 1:
            raise SidecarError(f"{path}: {_PREFIX}heads.{name} is {getattr(heads, name)}; {_AGAIN}")
    if heads.top_k > heads.experts:
        raise SidecarError(
            f"{path}: {_PREFIX}heads.top_k is {heads.top_k}, more than the {heads.experts} experts; {_AGAIN}"
        )
    owners = heads.owners
    if not owners or list(owners) != sorted(set(owners)) or owners[0] < 0:
        raise SidecarError(f"{path}: {_PREFIX}heads.owners are {list(owners)}, not layers in ascending order; {_AGAIN}")
    columns, experts, width = heads.columns, heads.experts, heads.width
    shapes = ((columns, experts), (experts, 2 * experts), (columns, width), (width, 2 * experts), (width, experts))
    for head in heads.heads:
        for (name, matrix), ne in zip(head.parts(), shapes, strict=True):
            _require(path, name, matrix, HEAD_TYPES)
            if matrix.ne != ne:
                raise SidecarError(
                    f"{path}: {name} is {_shape(matrix.ne)}, but heads of {columns} columns, {experts} experts and width "
                    f"{width} have {_shape(ne)} there; {_AGAIN}"
                )
        if head.linear_onehot.type != head.fc1_onehot.type:
            raise SidecarError(
                f"{path}: head.{head.owner}.linear.onehot is {head.linear_onehot.type_name}, head.{head.owner}.fc1.onehot "
                f"{head.fc1_onehot.type_name}: they must be of one type; {_AGAIN}"
            )


def _check_lora(path: Path, lora: Lora) -> None:
    if not lora.pairs:
        raise SidecarError(f"{path}: its LoRA has no matrices; {_AGAIN}")
    if not valid_alpha(lora.alpha):
        raise SidecarError(f"{path}: {_PREFIX}lora.alpha is {lora.alpha}, which is no positive number; {_AGAIN}")
    for name, matrix in lora.matrices():
        _require(path, name, matrix, LORA_TYPES)
    for name, both in lora.pairs.items():
        a, b = both.a.ne, both.b.ne
        rank_of_a = a[0] if name == "token_embd.weight" else a[1] if len(a) > 1 else 0
        if len(a) not in (2, 3) or len(a) != len(b) or a[2:] != b[2:] or rank_of_a != b[0]:
            raise SidecarError(
                f"{path}: {name}.lora_a is {_shape(a)} and .lora_b is {_shape(b)}, which make no product; {_AGAIN}"
            )


def valid_alpha(alpha: float) -> bool:
    """Whether it is above 0, and a number also as F32."""
    of_f32 = np.finfo(np.float32)
    return float(of_f32.tiny) <= alpha <= float(of_f32.max)


def _require(path: Path, name: str, matrix: Matrix, types: Mapping[str, int]) -> None:
    if matrix.type not in types.values():
        raise SidecarError(f"{path}: {name} is {matrix.type_name}, not one of {', '.join(types)}; {_AGAIN}")


def _shape(ne: tuple[int, ...]) -> str:
    return " x ".join(map(str, ne))


# ------------------------------------------------------------------ reading


def _keys(file: GgufFile) -> dict[str, Any]:
    """The values behind `moestream.sidecar.`, of the types that they must have."""
    path = file.path
    if file.architecture != SIDECAR:
        raise SidecarError(
            f"{path}: is no sidecar but a GGUF of the architecture {file.architecture or '(none)'}; "
            "a LoRA adapter goes to lora_path, or into a sidecar by: moestream sidecar pack"
        )
    version = file.integer(_PREFIX + "version", -1)
    if version > VERSION:
        raise SidecarError(
            f"{path}: is a sidecar of version {version}, this moestream reads version {VERSION}: update moestream"
        )
    values: dict[str, Any] = {}
    for key in file.keys:
        if not key.name.startswith(_PREFIX):
            continue
        name = key.name.removeprefix(_PREFIX)
        if name not in _TYPES:
            raise SidecarError(f"{path}: has the key {key.name}, which no sidecar of version {VERSION} has; {_AGAIN}")
        if (key.type, key.count is not None) != _TYPES[name]:
            raise SidecarError(f"{path}: {key.name} is {key.type_name}, which it must not be; {_AGAIN}")
        values[name] = file.value(key)
    wanted = [name for name in _TYPES if not name.startswith(("heads.", "lora."))]
    if "heads.owners" in values:
        wanted += [name for name in _TYPES if name.startswith("heads.")]
    if "lora.alpha" in values:
        wanted.append("lora.rank")
    for name in wanted:
        if name not in values:
            raise SidecarError(f"{path}: lacks the key {_PREFIX}{name}; {_AGAIN}")
    if version != VERSION:
        raise SidecarError(f"{path}: is a sidecar of version {version}, which never was; {_AGAIN}")
    return values


def file_matrices(file: GgufFile) -> dict[str, Matrix]:
    """All tensors by name, read into memory: a file that shrinks meanwhile is an error, not a signal.

    Raises:
        SidecarError: They cannot be read.
    """
    matrices = {}
    try:
        with open(file.path, "rb") as opened:
            for tensor in file.tensors:
                opened.seek(tensor.offset)
                data = np.fromfile(opened, dtype=np.uint8, count=tensor.size_bytes)
                if data.nbytes != tensor.size_bytes:
                    raise SidecarError(
                        f"{file.path}: ends within {tensor.name}: it was cut while it was read; {_AGAIN}"
                    )
                matrices[tensor.name] = Matrix(tensor.type, tensor.ne, data)
    except OSError as exc:
        raise SidecarError(f"{file.path}: cannot be read: {exc.strerror}; check the disk") from exc
    return matrices


def _heads(path: Path, keys: Mapping[str, Any], matrices: dict[str, Matrix]) -> Heads | None:
    """The heads, whose matrices are taken out of `matrices`."""
    owners = [int(owner) for owner in keys.get("heads.owners", ())]
    for name in matrices:
        found = _HEAD_TENSOR.fullmatch(name)
        if found and int(found[1]) not in owners:
            raise SidecarError(
                f"{path}: has {name}, but {_PREFIX}heads.owners does not name layer {found[1]}; {_AGAIN}"
            )
    if "heads.owners" not in keys:
        if stray := [name for name in keys if name.startswith("heads.")]:
            raise SidecarError(f"{path}: has {_PREFIX}{stray[0]}, but no {_PREFIX}heads.owners; {_AGAIN}")
        return None
    heads = []
    for owner in owners:
        names = [f"head.{owner}.{part}" for part in _PARTS]
        if missing := [name for name in names if name not in matrices]:
            raise SidecarError(f"{path}: the head of layer {owner} lacks {', '.join(missing)}; {_AGAIN}")
        heads.append(Head(owner, *(matrices.pop(name) for name in names)))
    return Heads(*(int(keys[f"heads.{name}"]) for name in _HEAD_NUMBERS), heads=tuple(heads))


def _lora(path: Path, keys: Mapping[str, Any], matrices: dict[str, Matrix]) -> Lora | None:
    """The LoRA, whose matrices are taken out of `matrices`."""
    pairs = lora_pairs(path, matrices)
    if "lora.alpha" not in keys:
        if "lora.rank" in keys:
            raise SidecarError(f"{path}: has {_PREFIX}lora.rank, but no {_PREFIX}lora.alpha; {_AGAIN}")
        if pairs:
            raise SidecarError(f"{path}: has {next(iter(pairs))}.lora_a, but no {_PREFIX}lora.alpha; {_AGAIN}")
        return None
    lora = Lora(float(keys["lora.alpha"]), pairs)
    if pairs and keys["lora.rank"] != lora.rank:
        raise SidecarError(
            f"{path}: {_PREFIX}lora.rank is {keys['lora.rank']}, but the largest of its ranks is {lora.rank}; {_AGAIN}"
        )
    return lora


def lora_pairs(path: Path, matrices: dict[str, Matrix]) -> dict[str, LoraPair]:
    """Pairs of matrices called `<tensor>.lora_a` and `.lora_b`, which are taken out of `matrices`.

    Raises:
        SidecarError: One is there without the other.
    """
    names = [found[1] for name in matrices if (found := _LORA_TENSOR.fullmatch(name))]
    pairs = {}
    for name in dict.fromkeys(names):
        for half in ("lora_a", "lora_b"):
            if f"{name}.{half}" not in matrices:
                raise SidecarError(
                    f"{path}: {name} has only one of lora_a and lora_b: {name}.{half} is missing; {_AGAIN}"
                )
        pairs[name] = LoraPair(matrices.pop(f"{name}.lora_a"), matrices.pop(f"{name}.lora_b"))
    return pairs


def _json_text(path: Path, name: str, value: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(dict(value), ensure_ascii=False, allow_nan=False)
        return text.encode(errors="backslashreplace").decode()  # halves of characters stay escaped
    except (TypeError, ValueError, RecursionError) as exc:
        raise SidecarError(f"{path}: its {name} is nothing that JSON can hold: {exc}") from exc


def _json(path: Path, name: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    try:
        value = json.loads(keys[name])
        json.dumps(value, allow_nan=False)  # no NaN, which no JSON has
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise SidecarError(f"{path}: {_PREFIX}{name} is no JSON object; {_AGAIN}")
    return value
