"""The headers of GGUF files: keys as the bytes they are, tensors as ranges of the file.

Nothing is taken on trust: every count and length is held against what is left of the file before anything is made of it.
What `moestream.describe` (ggml's own reader) says about a stock model is asked first, by `open_stock`.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError
from ..model import describe
from . import ggml

__all__ = [
    "GgufFile",
    "Key",
    "Model",
    "Tensor",
    "header_bytes",
    "header_is_whole",
    "open_gguf",
    "open_stock",
    "padded",
]

ALIGNMENT = "general.alignment"
ARCHITECTURE = "general.architecture"
DEFAULT_ALIGNMENT = 32
SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_SCALARS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
_NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")
_NAME_BYTES = 1 << 16
_MAX_DIMS = 4
_MAX_HEADER_BYTES = 256 << 20  # the largest vocabularies take some ten million bytes


def padded(size: int, alignment: int) -> int:
    """`size`, or the next multiple of `alignment`."""
    return -(-size // alignment) * alignment


@dataclass(frozen=True)
class Key:
    """A key and where its value is.

    Attributes:
        type: Of the value, or of an array's elements.
        count: Elements of an array; None if it is none.
        begin, value, end: Of the pair, of its value (an array's first element), and its end, in bytes of the file.
    """

    name: str
    type: int
    count: int | None
    begin: int
    value: int
    end: int

    @property
    def type_name(self) -> str:
        return _NAMES[self.type] if self.count is None else f"[{_NAMES[self.type]}]"


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file; `offset` is in the file, `file` the index of its file in the model."""

    name: str
    ne: tuple[int, ...]
    type: int
    offset: int
    size_bytes: int
    file: int = 0

    @property
    def columns(self) -> int:
        return self.ne[0]


@dataclass(frozen=True)
class GgufFile:
    """The header of one file, and what tells whether the file is still the same."""

    path: Path
    size_bytes: int
    mtime_ns: int
    header: bytes = field(repr=False)
    keys: tuple[Key, ...]
    tensors: tuple[Tensor, ...]
    data_offset: int

    @property
    def identity(self) -> tuple[str, int, int]:
        """What a file that was written from this one may be continued by: path, size, time of the last change."""
        return str(self.path.absolute()), self.size_bytes, self.mtime_ns

    def key(self, name: str) -> Key | None:
        return next((key for key in self.keys if key.name == name), None)

    def value(self, key: Key) -> Any:
        """A number, a str, a list of str, or an array of numbers."""
        if key.count is None:
            return _string(self.header, key.value) if key.type == STRING else _scalar(self.header, key.type, key.value)
        if key.type == STRING:
            return list(_strings(self.header, key))
        return np.frombuffer(self.header, dtype=f"<{_SCALARS[key.type]}", count=key.count, offset=key.value)

    def pair(self, key: Key) -> bytes:
        """The bytes of a key with its value."""
        return self.header[key.begin : key.end]

    def integer(self, name: str, default: int) -> int:
        """The value of a key that is an integer, `default` if it is absent or something else."""
        key = self.key(name)
        if key is None or key.count is not None or key.type in (STRING, F32, F64, BOOL):
            return default
        return int(self.value(key))

    @property
    def alignment(self) -> int:
        return self.integer(ALIGNMENT, DEFAULT_ALIGNMENT)

    @property
    def architecture(self) -> str:
        key = self.key(ARCHITECTURE)
        return self.value(key) if key is not None and key.count is None and key.type == STRING else ""


@dataclass(frozen=True)
class Model:
    """All files of a model; its keys are those of the first."""

    path: Path
    files: tuple[GgufFile, ...]

    @property
    def first(self) -> GgufFile:
        return self.files[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for file in self.files for tensor in file.tensors)

    @property
    def sha256(self) -> str:
        """Of the headers of all files, one after the other."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(file.header)
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """Raises ModelError if a file is not what it was when it was opened."""
        for file in self.files:
            try:
                now = os.stat(file.path)
                with open(file.path, "rb") as reopened:
                    same = reopened.read(len(file.header)) == file.header
            except OSError as exc:
                raise ModelError(f"{file.path}: vanished while it was read: {exc.strerror}") from exc
            if not same or (now.st_size, now.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
                raise ModelError(f"{file.path}: was changed while it was read; run the command again when it rests")


# ------------------------------------------------------------------ reading


class _Damaged(Exception):
    """What is wrong with a header, without the file's name."""


class _TooShort(_Damaged):
    """Something reaches beyond the bytes that there are."""


class _Header:
    """A position in a header that cannot pass its end."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self.data = data
        self.at = 0
        self.left_to = min(len(data), _MAX_HEADER_BYTES)

    def skip(self, size: int, what: str) -> int:
        """Goes on by `size` bytes and returns where they begin."""
        begin = self.at
        if size > self.left_to - begin:
            raise _TooShort(f"{what} at byte {begin} is {size} bytes long, which is beyond byte {self.left_to}")
        self.at += size
        return begin

    def number(self, type: int, what: str) -> int:
        size = struct.calcsize(_SCALARS[type])
        return _scalar(self.data, type, self.skip(size, what))

    def name(self, what: str) -> str:
        size = self.number(U64, f"the length of {what}")
        if size > _NAME_BYTES:
            raise _Damaged(f"{what} at byte {self.at - 8} is {size} bytes long")
        begin = self.skip(size, what)
        return self.data[begin : begin + size].decode("utf-8", "surrogateescape")


def open_gguf(path: str | os.PathLike[str], *, file: int = 0) -> GgufFile:
    """Reads the header of one file.

    Raises:
        ModelError: No such file, not a GGUF of version 2 or 3, or one whose header is damaged, whose tensors overlap or
            lie outside of it.
    """
    path = Path(path)
    try:
        with open(path, "rb") as opened:
            status = os.fstat(opened.fileno())
            if status.st_size < 24:
                raise ModelError(f"{path}: not a GGUF file: it has only {status.st_size} bytes; download it again")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, status, data, file)
    except _Damaged as exc:
        raise ModelError(f"{path}: the GGUF header is damaged: {exc}; download or convert the model again") from None
    except (OSError, ValueError) as exc:
        if isinstance(exc, ModelError):
            raise
        raise ModelError(f"{path}: {getattr(exc, 'strerror', None) or exc}; check the path") from exc


def header_is_whole(head: bytes) -> bool:
    """Whether the beginning of a file holds its header; also if it is no sound one, and more of it would not help."""
    if head[:4] != b"GGUF":
        return len(head) >= 4
    header = _Header(head)
    try:
        header.skip(8, "magic and version")
        n_tensors, n_keys = header.number(U64, "the number of tensors"), header.number(U64, "the number of keys")
        for index in range(n_keys):
            _parse_key(header, index)
        for index in range(n_tensors):
            _parse_tensor(header, index)
    except _TooShort:
        return False
    except _Damaged:
        return True
    return True


def _parse(path: Path, status: os.stat_result, data: mmap.mmap, file: int) -> GgufFile:
    if data[:4] != b"GGUF":
        raise ModelError(f"{path}: not a GGUF file; convert the model to GGUF first")
    header = _Header(data)
    header.skip(4, "the magic")
    version = header.number(U32, "the version")
    if version not in (2, 3):
        raise _Damaged(f"version {version} is neither 2 nor 3")
    n_tensors, n_keys = header.number(U64, "the number of tensors"), header.number(U64, "the number of keys")
    # A pair takes at least 13 bytes, a tensor 24: no more of them than the file can hold.
    if n_keys > status.st_size // 13 or n_tensors > status.st_size // 24:
        raise _Damaged(f"{n_tensors} tensors and {n_keys} keys are more than {status.st_size} bytes can hold")
    keys: dict[str, Key] = {}
    for index in range(n_keys):
        key = _parse_key(header, index)
        if keys.setdefault(key.name, key) is not key:
            raise _Damaged(f"key {key.name} is there twice")
    infos = [_parse_tensor(header, index) for index in range(n_tensors)]
    alignment = keys.get(ALIGNMENT)
    alignment_bytes = DEFAULT_ALIGNMENT
    if alignment is not None:
        if alignment.count is not None or alignment.type != U32:
            raise _Damaged(f"{ALIGNMENT} is {alignment.type_name}, not u32")
        alignment_bytes = _scalar(data, U32, alignment.value)
        if alignment_bytes == 0 or alignment_bytes & (alignment_bytes - 1):
            raise _Damaged(f"{ALIGNMENT} is {alignment_bytes}, not a power of two")
    data_offset = padded(header.at, alignment_bytes) if infos else header.at
    tensors = _tensors(path, infos, data_offset, alignment_bytes, status.st_size, file)
    return GgufFile(
        path=path,
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        header=data[:data_offset],
        keys=tuple(keys.values()),
        tensors=tensors,
        data_offset=data_offset,
    )


def _parse_key(header: _Header, index: int) -> Key:
    begin = header.at
    name = header.name(f"the name of key {index}")
    if not name or "\0" in name:
        raise _Damaged(f"the name of key {index} is empty or holds a zero byte")
    type = header.number(U32, f"the type of {name}")
    count = None
    if type == ARRAY:
        type = header.number(U32, f"the type of {name}")
        count = header.number(U64, f"the length of {name}")
    if type == ARRAY or type >= len(_NAMES):
        raise _Damaged(f"key {name} is of the unknown type {type}")
    value = header.at
    if type == STRING:
        # At least eight bytes a string: a count that cannot be is refused before any of them is read.
        if count is not None and count > (header.left_to - value) // 8:
            raise _TooShort(f"{name} at byte {value} has {count} strings, which is beyond byte {header.left_to}")
        for _ in range(1 if count is None else count):
            header.skip(header.number(U64, f"the length of a string of {name}"), f"a string of {name}")
    else:
        header.skip(struct.calcsize(_SCALARS[type]) * (1 if count is None else count), name)
    return Key(name, type, count, begin, value, header.at)


def _parse_tensor(header: _Header, index: int) -> tuple[str, tuple[int, ...], int, int]:
    name = header.name(f"the name of tensor {index}")
    if not name or "\0" in name:
        raise _Damaged(f"the name of tensor {index} is empty or holds a zero byte")
    n_dims = header.number(U32, f"the dimensions of {name}")
    if not 1 <= n_dims <= _MAX_DIMS:
        raise _Damaged(f"tensor {name} has {n_dims} dimensions")
    ne = tuple(header.number(U64, f"the dimensions of {name}") for _ in range(n_dims))
    return name, ne, header.number(U32, f"the type of {name}"), header.number(U64, f"the offset of {name}")


def _tensors(
    path: Path, infos: Sequence[tuple[str, tuple[int, ...], int, int]], base: int, alignment: int, end: int, file: int
) -> tuple[Tensor, ...]:
    tensors: dict[str, Tensor] = {}
    for name, ne, type, offset in infos:
        known = ggml.traits(type)
        if known is None:
            raise _Damaged(f"tensor {name} is of the unknown type {type}")
        size = known.block_bytes
        for length in ne:
            size *= length
        if ne[0] % known.block or size == 0:
            raise _Damaged(f"tensor {name} of {'x'.join(map(str, ne))} cannot be {known.name}")
        size //= known.block
        if offset % alignment:
            raise _Damaged(f"tensor {name} begins at {offset}, not a multiple of {alignment}")
        begin = base + offset
        if size > end - begin:
            raise ModelError(
                f"{path}: truncated: tensor {name} is at bytes {begin} to {begin + size}, but the file ends at {end}; "
                "download it again"
            )
        if name in tensors:
            raise _Damaged(f"tensor {name} is there twice")
        tensors[name] = Tensor(name, ne, type, begin, size, file)
    in_order = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for one, other in zip(in_order, in_order[1:], strict=False):
        if one.offset + one.size_bytes > other.offset:
            raise _Damaged(f"tensors {one.name} and {other.name} overlap at byte {other.offset}")
    return tuple(tensors.values())


def open_stock(path: str | os.PathLike[str], first: GgufFile | None = None) -> Model:
    """Opens a stock model, all shards of it.

    Args:
        first: Its first file, if that is open already.

    Raises:
        ModelError: What `moestream.describe` says, or what `open_gguf` does.
    """
    described = describe(path)
    others = (open_gguf(file.path, file=index) for index, file in enumerate(described.files[1:], 1))
    return Model(Path(path), (first or open_gguf(path), *others))


def open_shards(first: GgufFile) -> Model:
    """A GGUF with the other shards that it says it has, without a word of ggml on it."""
    path = first.path
    count = first.integer("split.count", 1)
    if count <= 1:
        return Model(first.path, (first,))
    if first.integer("split.no", 0) != 0:
        raise ModelError(f"{path}: is not the first of {count} shards; give that one, ...-00001-of-{count:05}.gguf")
    ending = f"-00001-of-{count:05}.gguf"
    if count > 0xFFFF or not first.path.name.endswith(ending):
        raise ModelError(f"{path}: the first of {count} shards must be named like NAME{ending}; rename it")
    stem = first.path.name[: -len(ending)]
    files = [first]
    for number in range(2, count + 1):
        shard = first.path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf")
        if not shard.exists():
            raise ModelError(f"{shard}: shard {number} of {count} is missing; bring it into the same folder")
        files.append(open_gguf(shard, file=number - 1))
    return Model(first.path, tuple(files))


def _scalar(data: Any, type: int, at: int) -> int:
    return struct.unpack_from("<" + _SCALARS[type], data, at)[0]


def _string(data: bytes, at: int) -> str:
    size = struct.unpack_from("<Q", data, at)[0]
    return data[at + 8 : at + 8 + size].decode("utf-8", "surrogateescape")


def _strings(data: bytes, key: Key) -> Iterator[str]:
    at = key.value
    for _ in range(key.count or 0):
        size = struct.unpack_from("<Q", data, at)[0]
        yield data[at + 8 : at + 8 + size].decode("utf-8", "surrogateescape")
        at += 8 + size


# ------------------------------------------------------------------ writing


def _text(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(encoded)) + encoded


def pair(name: str, type: int, value: Any) -> bytes:
    """A key with its value, as bytes; a list or an array becomes an array of `type`."""
    if type == STRING:
        if isinstance(value, str):
            return _text(name) + struct.pack("<I", STRING) + _text(value)
        return _text(name) + struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_text, value))
    if isinstance(value, (list, tuple, np.ndarray)):
        numbers = np.asarray(value, dtype=f"<{_SCALARS[type]}")
        return _text(name) + struct.pack("<IIQ", ARRAY, type, numbers.size) + numbers.tobytes()
    return _text(name) + struct.pack("<I" + _SCALARS[type], type, value)


def header_bytes(
    pairs: Sequence[bytes], tensors: Sequence[tuple[str, tuple[int, ...], int, int]], alignment: int
) -> bytes:
    """The header of a file, padded to where its data begins.

    Args:
        tensors: Name, ne, type, and offset from the beginning of the data.
    """
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(pairs)), *pairs]
    for name, ne, type, offset in tensors:
        head.append(_text(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, type, offset))
    size = sum(map(len, head))
    return b"".join([*head, bytes(padded(size, alignment) - size)])
