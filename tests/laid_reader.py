"""A reader of laid files written from docs/layout.md alone, on top of gguf's own reader; and a way to damage one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from moestream.layout.gguf_file import header_bytes, open_gguf

__all__ = ["LaidFile", "crc32c", "rewritten", "stock_experts", "tensor_bytes"]


class LaidFile:
    """A laid file, or all shards of one."""

    def __init__(self, path: Path) -> None:
        self.readers = [gguf.GGUFReader(shard) for shard in _shards(path)]
        self.tensors = {tensor.name: tensor for reader in self.readers for tensor in reader.tensors}
        parts = list(
            zip(
                *(self["part." + name] for name in ("tensor", "type", "columns", "rows", "offset", "bytes", "form")),
                strict=True,
            )
        )
        self.layers = {}
        for block, count in zip(self["layer.block"], self["layer.parts"], strict=True):
            self.layers[block], parts = parts[:count], parts[count:]

    def __getitem__(self, name: str) -> Any:
        return self.readers[0].fields["moestream." + name].contents()

    def records(self, block: int) -> np.ndarray:
        """u8[experts, record bytes]"""
        return self.tensors[f"moestream.blk.{block}.experts"].data.view(np.uint8)

    def stored(self, block: int, expert: int, tensor: str) -> tuple[np.ndarray, tuple[Any, ...]]:
        """The bytes of a part, and its entries in the tables."""
        part = next(part for part in self.layers[block] if part[0] == tensor)
        return self.records(block)[expert][part[4] : part[4] + part[5]], part

    def plain(self, block: int, expert: int, tensor: str) -> bytes:
        """The bytes that the source has for an expert: the bits of an interleaved part are put back one by one."""
        stored, (_, type, columns, rows, _, _, form) = self.stored(block, expert, tensor)
        if form == 0:
            return stored.tobytes()
        group = self[f"interleaving.{form}.rows"]
        bits, inverted = (np.array(self[f"interleaving.{form}.{name}"]) for name in ("bits", "inverted"))
        values, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type)]
        blocks = columns // values
        runs = np.unpackbits(stored.reshape(-1, group * block_bytes), axis=1, bitorder="little")
        back = np.zeros_like(runs)
        for i, bit in enumerate(bits):
            back[:, bit] = runs[:, i] ^ inverted[i]
        run_bytes = np.packbits(back, axis=1, bitorder="little").reshape(rows // group, blocks, group, block_bytes)
        plain = np.empty((rows, blocks, block_bytes), dtype=np.uint8)
        for g in range(rows // group):
            for b in range(blocks):
                for r in range(group):
                    plain[g * group + r, b] = run_bytes[g, b, r]
        return plain.tobytes()


def _shards(path: Path) -> list[Path]:
    if not (found := re.search(r"-00001-of-(\d{5})\.gguf$", path.name)):
        return [path]
    stem, count = path.name[: found.start()], int(found[1])
    return [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def tensor_bytes(path: Path) -> dict[str, tuple[tuple[int, ...], int, bytes]]:
    """Shape, type and bytes of every tensor of a model."""
    return {
        tensor.name: (tuple(map(int, tensor.shape)), int(tensor.tensor_type), tensor.data.tobytes())
        for shard in _shards(path)
        for tensor in gguf.GGUFReader(shard).tensors
    }


def stock_experts(path: Path) -> dict[str, list[bytes]]:
    """Of every matrix of experts of a stock model the bytes of each expert."""
    found = {}
    for name, (shape, _, data) in tensor_bytes(path).items():
        if re.fullmatch(r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.weight", name):
            size = len(data) // shape[2]
            found[name] = [data[e * size : (e + 1) * size] for e in range(shape[2])]
    return found


def crc32c(data: bytes) -> int:
    """Bit by bit, as RFC 3720 has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def rewritten(
    path: Path,
    out: Path,
    keys: Mapping[str, bytes | None] | None = None,
    tensors: Mapping[str, tuple[tuple[int, ...], int]] | None = None,
    rename: Mapping[str, str] | None = None,
) -> Path:
    """A copy of a one-file GGUF with other keys, or none (None), and other shapes and types of tensors; data as it was."""
    file = open_gguf(path)
    pairs = []
    more = dict(keys or {})
    for key in file.keys:
        pair = more.pop(key.name, file.pair(key))
        if pair is not None:
            pairs.append(pair)
    pairs += [pair for pair in more.values() if pair is not None]
    infos = []
    for tensor in file.tensors:
        ne, type = (tensors or {}).get(tensor.name, (tensor.ne, tensor.type))
        infos.append(((rename or {}).get(tensor.name, tensor.name), ne, type, tensor.offset - file.data_offset))
    out.write_bytes(header_bytes(pairs, infos, file.alignment) + path.read_bytes()[file.data_offset :])
    return out
