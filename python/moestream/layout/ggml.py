"""What ggml knows about its types: sizes, names, validity of bytes, values."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import llama_cpp
import numpy as np

from .._native import LIBRARY

__all__ = [
    "BF16",
    "F16",
    "F32",
    "I8",
    "UNQUANTISED",
    "TypeTraits",
    "dequantise",
    "needs_imatrix",
    "quantise",
    "row_bytes",
    "traits",
    "type_name",
    "type_named",
    "valid",
]

F32, F16, I8, BF16 = 0, 1, 24, 30
UNQUANTISED = (F32, F16, BF16)


class _Traits(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("block_interleave", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t),
        ("is_quantised", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        ("from_float", ctypes.c_void_p),
    ]


_ggml = ctypes.CDLL(str(LIBRARY))
_ggml.ggml_get_type_traits.argtypes = [ctypes.c_int]
_ggml.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
_ggml.ggml_validate_row_data.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
_ggml.ggml_validate_row_data.restype = ctypes.c_bool
_ggml.ggml_quantize_chunk.argtypes = [
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
]  # fmt: skip
_ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
_ggml.ggml_quantize_requires_imatrix.argtypes = [ctypes.c_int]
_ggml.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
_TYPES = llama_cpp.llama_model_quantize_default_params().output_tensor_type  # its default is GGML_TYPE_COUNT


@dataclass(frozen=True)
class TypeTraits:
    """A ggml type: `block` values are stored in `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int
    is_quantised: bool

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row; `columns` must be a multiple of the block."""
        return columns // self.block * self.block_bytes


@cache
def traits(type: int) -> TypeTraits | None:
    """What ggml knows about a type, None if it does not know it."""
    if not 0 <= type < _TYPES:
        return None
    found = _ggml.ggml_get_type_traits(type).contents
    if not found.name or found.block <= 0 or found.block_bytes <= 0:
        return None
    return TypeTraits(found.name.decode().upper(), found.block, found.block_bytes, found.is_quantised)


def type_name(type: int) -> str:
    """Its name as people write it, `Q4_0`, or the number of a type that ggml does not know."""
    known = traits(type)
    return known.name if known else f"type {type}"


def type_named(name: str) -> int | None:
    """The number of the type called `name`, None if there is none."""
    return next((type for type in range(_TYPES) if (known := traits(type)) and known.name == name.upper()), None)


def row_bytes(type: int, columns: int) -> int:
    """Bytes of a row of a known type."""
    known = traits(type)
    assert known is not None
    return known.row_bytes(columns)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """ggml prints what it finds; the caller tells it in a sentence that names the expert."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def valid(type: int, data: np.ndarray) -> bool:
    """Whether bytes of a type hold no infinity and no NaN where ggml can tell. `data` is whole blocks."""
    assert data.flags.c_contiguous
    with _without_stderr():
        return bool(_ggml.ggml_validate_row_data(type, data.ctypes.data, data.nbytes))


def dequantise(type: int, data: np.ndarray) -> np.ndarray:
    """The values of bytes of a type, as f32[values]."""
    known = traits(type)
    assert known is not None and data.flags.c_contiguous
    if type == F32:
        return data.view(np.float32)
    values = np.empty(data.nbytes // known.block_bytes * known.block, dtype=np.float32)
    _ggml.ggml_get_type_traits(type).contents.to_float(data.ctypes.data, values.ctypes.data, values.size)
    return values


def quantise(type: int, values: np.ndarray) -> np.ndarray:
    """Bytes of a type for f32[rows, columns]; `columns` must be a multiple of the type's block."""
    assert values.dtype == np.float32 and values.flags.c_contiguous
    rows, columns = values.shape
    out = np.empty(rows * row_bytes(type, columns), dtype=np.uint8)
    wrote = _ggml.ggml_quantize_chunk(type, values.ctypes.data, out.ctypes.data, 0, rows, columns, None)
    assert wrote == out.nbytes
    return out


def needs_imatrix(type: int) -> bool:
    """Whether ggml cannot quantise to a type without an importance matrix."""
    return bool(_ggml.ggml_quantize_requires_imatrix(type))
