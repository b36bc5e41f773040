"""Writes a model to disk tensor by tensor, in bounded memory."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from . import architectures, tokenizer, weights
from .architectures import Shape
from .tensors import tensors
from .weights import Weights


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file; `ne[0]` is the length of a row."""

    name: str
    ne: tuple[int, ...]
    type: Type

    @property
    def size_bytes(self) -> int:
        block, block_bytes = gguf.GGML_QUANT_SIZES[self.type]
        return math.prod(self.ne) // block * block_bytes


def plan(arch: str, shape: Shape, wanted: Callable[[str], Type]) -> list[Tensor]:
    """The tensors of a model, in the order of the file.

    Args:
        wanted: The type of a matrix by its name. What is not a matrix, or cannot have that type, gets another: see
            `weights.type_of`.

    Raises:
        ValueError: No such architecture, or not with this shape.
        LlamaCppError: llama.cpp cannot make this model.
    """
    return [Tensor(name, ne, weights.type_of(name, ne, wanted(name))) for name, ne in tensors(arch, shape).items()]


def write(
    path: str | os.PathLike[str],
    arch: str,
    shape: Shape,
    planned: Sequence[Tensor],
    drawn: Weights,
    *,
    tokens: str = "none",
    alignment: int = gguf.GGUF_DEFAULT_ALIGNMENT,
    shards: int = 1,
    big_endian: bool = False,
    wrote: Callable[[int], None] = lambda size_bytes: None,
) -> list[pathlib.Path]:
    """Writes the model and returns its files, which get their names when all of them are complete.

    Args:
        tokens: Kind of tokenizer, see `tokenizer.KINDS`.
        alignment: Multiple of bytes at which tensors start.
        shards: Number of files; above one they are named `<stem>-00001-of-0000N.gguf`, and the tensors go round them,
            so that a layer's are in several.
        big_endian: Numbers with their first byte highest, in models of unquantised types only.
        wrote: Told the number of bytes after each piece.

    Raises:
        OSError: No room, or a write failed; nothing is left behind.
        ValueError: `big_endian` with a quantised type.
    """
    path = pathlib.Path(path)
    paths = [path] if shards == 1 else [shard_path(path, i, shards) for i in range(shards)]
    _check_room(path, sum(t.size_bytes for t in planned))
    parts = [p.with_name(p.name + ".part") for p in paths]
    try:
        for i, part in enumerate(parts):
            mine = planned[i::shards]
            endian = gguf.GGUFEndian.BIG if big_endian else gguf.GGUFEndian.LITTLE
            header = gguf.GGUFWriter(part, arch, endianess=endian)
            header.add_custom_alignment(alignment)
            if i == 0:
                header.add_name(f"synthetic {arch}")
                header.add_quantization_version(gguf.GGML_QUANT_VERSION)
                architectures.add_keys(header, arch, shape)
                tokenizer.add_keys(header, tokens, shape.vocab)
            if shards > 1:
                header.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_NO, i)
                header.add_uint16(gguf.Keys.Split.LLM_KV_SPLIT_COUNT, shards)
                header.add_int32(gguf.Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, len(planned))
            with open_for_tensors(header, mine) as out:
                for tensor in mine:
                    for chunk in drawn.chunks(tensor.name, tensor.ne, tensor.type):
                        out.write(_swapped(chunk, tensor) if big_endian else chunk)
                        wrote(len(chunk))
                    out.write(bytes(-tensor.size_bytes % alignment))
        for part, final in zip(parts, paths, strict=True):
            os.replace(part, final)
    except BaseException:
        for part in parts:
            part.unlink(missing_ok=True)
        raise
    return paths


def shard_path(path: pathlib.Path, index: int, count: int) -> pathlib.Path:
    """The name that llama.cpp looks for, of shard `index` (from 0) of `count`."""
    return path.with_name(f"{path.stem}-{index + 1:05d}-of-{count:05d}.gguf")


@contextlib.contextmanager
def open_for_tensors(header: gguf.GGUFWriter, planned: Sequence[Tensor]) -> Iterator[BinaryIO]:
    """Writes keys and tensor table. The file is then open where the first tensor starts; pad each to the alignment."""
    for tensor in planned:
        header.add_tensor_info(tensor.name, tensor.ne[::-1], None, tensor.size_bytes, raw_dtype=tensor.type)
    header.write_header_to_file()
    header.write_kv_data_to_file()
    header.write_ti_data_to_file()
    with header.fout[0] as out:
        out.write(bytes(-out.tell() % header.data_alignment))
        yield out


def _check_room(path: pathlib.Path, size_bytes: int) -> None:
    free = shutil.disk_usage(path.absolute().parent).free
    if free < size_bytes:
        raise OSError(f"{path} needs {size_bytes / 1e9:.1f} GB, and its file system has {free / 1e9:.1f} GB free")


def _swapped(chunk: memoryview, tensor: Tensor) -> bytes:
    widths = {Type.F32: np.uint32, Type.F16: np.uint16, Type.BF16: np.uint16}
    if tensor.type not in widths:
        raise ValueError(f"{tensor.name} is {tensor.type.name}: only F32, F16 and BF16 can be big-endian")
    return np.frombuffer(chunk, dtype=widths[tensor.type]).byteswap().tobytes()
