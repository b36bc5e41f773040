"""Laid files with a property, for tests: written from docs/layout.md with the gguf package alone, not with moestream."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from moestream._native import ffi, lib

Keys = dict[str, tuple[Any, gguf.GGUFValueType, gguf.GGUFValueType | None]]
_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(?:gate|up|down|gate_up)_exps\.weight")
_U32, _U64, _I32, _TEXT, _ARRAY = (
    gguf.GGUFValueType[name] for name in ("UINT32", "UINT64", "INT32", "STRING", "ARRAY")
)


def lay_plain(
    stock: Path, out: Path, *, change: Callable[[Keys], None] = lambda keys: None, gap: int = 0, record_padding: int = 0
) -> Path:
    """A laid file of plain parts, with the tensors of a stock one.

    Args:
        change: Called with the keys under `moestream.`, {key: (value, type, type of entries)}, to damage them.
        gap: Bytes left free before each part, a multiple of 64.
        record_padding: Bytes added to each record, a multiple of 4096.
    """
    reader = gguf.GGUFReader(stock)
    experts: dict[int, list[gguf.ReaderTensor]] = {}
    dense = []
    for tensor in reader.tensors:
        if match := _EXPERT.fullmatch(tensor.name):
            experts.setdefault(int(match[1]), []).append(tensor)
        else:
            dense.append(tensor)
    parts: list[tuple[gguf.ReaderTensor, int, int]] = []
    records: dict[int, np.ndarray] = {}
    checksums: list[int] = []
    for block in sorted(experts):
        at, slices = 0, []
        for tensor in experts[block]:
            slices.append(tensor.data.reshape(int(tensor.shape[2]), -1).view(np.uint8))
            at = -(-(at + gap) // 64) * 64
            parts.append((tensor, at, slices[-1].shape[1]))
            at += slices[-1].shape[1]
        record = np.zeros((len(slices[0]), -(-at // 4096) * 4096 + record_padding), np.uint8)
        for (_, offset, size), values in zip(parts[-len(slices) :], slices, strict=True):
            record[:, offset : offset + size] = values
        records[block] = record
        checksums += [lib.ms_crc32c(0, ffi.from_buffer(row.tobytes()), len(row)) for row in record]

    field = reader.fields["general.architecture"]
    keys: Keys = {
        "moestream.version": (1, _U32, None),
        "moestream.tool": ("tests", _TEXT, None),
        "moestream.architecture": (field.contents(), _TEXT, None),
        "moestream.source.name": (stock.name, _TEXT, None),
        "moestream.source.sha256": ("0" * 64, _TEXT, None),
        "moestream.source.alignment": (0, _U32, None),
        "moestream.source.tensors": ([tensor.name for tensor in reader.tensors], _ARRAY, _TEXT),
        "moestream.target": ("plain", _TEXT, None),
        "moestream.layer.block": (sorted(experts), _ARRAY, _U32),
        "moestream.layer.parts": ([len(experts[block]) for block in sorted(experts)], _ARRAY, _U32),
        "moestream.part.tensor": ([tensor.name for tensor, _, _ in parts], _ARRAY, _TEXT),
        "moestream.part.type": ([int(tensor.tensor_type) for tensor, _, _ in parts], _ARRAY, _U32),
        "moestream.part.columns": ([int(tensor.shape[0]) for tensor, _, _ in parts], _ARRAY, _U64),
        "moestream.part.rows": ([int(tensor.shape[1]) for tensor, _, _ in parts], _ARRAY, _U64),
        "moestream.part.offset": ([offset for _, offset, _ in parts], _ARRAY, _U64),
        "moestream.part.bytes": ([size for _, _, size in parts], _ARRAY, _U64),
        "moestream.part.form": ([0] * len(parts), _ARRAY, _I32),
        "moestream.checksums": (checksums, _ARRAY, _U32),
    }
    change(keys)
    writer = gguf.GGUFWriter(out, "moestream")
    writer.add_custom_alignment(4096)
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "split.")) and key not in ("general.architecture", "general.alignment"):
            writer.add_key_value(
                key, field.contents(), field.types[0], field.types[-1] if field.types[0] == _ARRAY else None
            )
    for key, (value, kind, entry) in keys.items():
        writer.add_key_value(key, value, kind, entry)
    for tensor in dense:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for block, record in records.items():
        writer.add_tensor(f"moestream.blk.{block}.experts", record.view(np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
