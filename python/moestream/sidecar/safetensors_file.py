"""Reading and writing safetensors files. The package of that name gives NumPy no BF16, which adapters often are."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._whole_file import writing_whole
from ..errors import OutputError, SidecarError

__all__ = ["SafetensorsFile", "write_safetensors"]

_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 100_000_000  # what the format allows


@dataclass(frozen=True)
class SafetensorsFile:
    """The tensors of a file.

    Attributes:
        about: Its `__metadata__`.
        shapes: Of each tensor, in the order of the file.
    """

    path: Path
    about: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    _types: Mapping[str, str] = field(repr=False)
    _places: Mapping[str, tuple[int, int]] = field(repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> SafetensorsFile:
        """Reads the header and holds it against the size of the file.

        Raises:
            SidecarError: It is no safetensors file, a truncated or a damaged one.
        """
        where = Path(path)
        try:
            with open(where, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                head = file.read(8)
                length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
                if not 2 <= length <= _MAX_HEADER_BYTES:
                    raise SidecarError(f"{where}: is no safetensors file; give one, or a GGUF")
                if length > size - 8:
                    raise SidecarError(
                        f"{where}: truncated: its header is {length} bytes long, the file {size}; download it again"
                    )
                header = json.loads(file.read(length))
        except OSError as exc:
            raise SidecarError(f"{where}: cannot be read: {exc.strerror}; check the path") from exc
        except (ValueError, RecursionError) as exc:
            if isinstance(exc, SidecarError):
                raise
            raise SidecarError(f"{where}: its safetensors header is no JSON: {exc}; download it again") from exc
        return cls._checked(where, header, 8 + length, size)

    @classmethod
    def _checked(cls, path: Path, header: Any, base: int, size: int) -> SafetensorsFile:
        shapes, types, places = {}, {}, {}
        try:
            about = {name: _text(value) for name, value in (header.pop("__metadata__", None) or {}).items()}
            for name, entry in header.items():
                begin, end = map(_count, entry["data_offsets"])
                shapes[name], types[name] = tuple(map(_count, entry["shape"])), _text(entry["dtype"])
                places[name] = base + begin, end - begin
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise SidecarError(f"{path}: its safetensors header is damaged ({exc}); download it again") from exc
        for name, (begin, length) in places.items():
            item = _SIZES.get(types[name])
            wanted = length if item is None else item * math.prod(shapes[name])
            if length < 0 or wanted != length:
                raise SidecarError(f"{path}: {name} takes {length} bytes, its shape {wanted}; download it again")
            if begin + length > size:
                raise SidecarError(
                    f"{path}: truncated: {name} ends at byte {begin + length}, the file at {size}; download it again"
                )
        in_order = sorted(places, key=places.__getitem__)
        for one, other in zip(in_order, in_order[1:], strict=False):
            if sum(places[one]) > places[other][0]:
                raise SidecarError(f"{path}: {one} and {other} are in the same bytes; download it again")
        return cls(path, about, shapes, types, places)

    def read(self, name: str) -> npt.NDArray[np.floating[Any]]:
        """A tensor as it is stored; BF16 becomes F32.

        Raises:
            SidecarError: It holds no floats, or cannot be read.
        """
        type, (begin, length) = self._types[name], self._places[name]
        if type not in _SIZES:
            raise SidecarError(
                f"{self.path}: {name} is {type}, not one of {', '.join(_SIZES)}; store it as one of them"
            )
        try:
            with open(self.path, "rb") as file:
                file.seek(begin)
                data = file.read(length)
        except OSError as exc:
            raise SidecarError(f"{self.path}: {name} cannot be read: {exc.strerror}; check the disk") from exc
        if len(data) < length:
            raise SidecarError(f"{self.path}: ends within {name}; download it again")
        if type == "BF16":
            values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(data, f"<f{_SIZES[type]}")
        return values.reshape(self.shapes[name])


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no length and no place")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, npt.NDArray[np.float32]], about: Mapping[str, str]
) -> None:
    """Writes F32 tensors, the file whole or not at all.

    Raises:
        OutputError: It cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    at = 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with writing_whole(path, OutputError) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in tensors.values():
            file.write(np.ascontiguousarray(values, dtype="<f4").tobytes())
