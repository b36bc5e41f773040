"""The model file that figures are measured on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import gguf

from moestream.bench.disk import SECTOR_BYTES

from .disk import scratch_folder
from .figure import MeasurementError, note

__all__ = ["Subject", "made"]

MAKE_MODEL = Path(__file__).resolve().parent.parent / "make_model"

# What the loader never reads: the weights of the experts, one expert after the other, in three tensors a layer of a stock file and
# in one of a laid file. Their biases and scales are small and belong to the dense part.
_EXPERTS = re.compile(r"blk\.(\d+)\.(?:ffn_\w+_exps\.weight|experts)$")


@dataclass(frozen=True)
class Subject:
    """A GGUF file as the yardstick sees it: through the gguf package, so that moestream's own accounts can be held against it."""

    path: Path

    @cached_property
    def _reader(self) -> gguf.GGUFReader:
        return gguf.GGUFReader(self.path)

    @cached_property
    def dense_ranges(self) -> list[tuple[int, int]]:
        """(offset, size) in the file of every tensor that stays in memory."""
        return [(int(t.data_offset), int(t.n_bytes)) for t in self._reader.tensors if not _EXPERTS.search(t.name)]

    @cached_property
    def dense_bytes(self) -> int:
        return sum(size for _, size in self.dense_ranges)

    @cached_property
    def vocabulary(self) -> int:
        return int(next(t for t in self._reader.tensors if t.name == "token_embd.weight").shape[1])

    @cached_property
    def _experts(self) -> dict[int, list[tuple[int, int]]]:
        """By layer: offset of the first expert and bytes of one, for each tensor that has a part of the experts."""
        found: dict[int, list[tuple[int, int]]] = {}
        for tensor in self._reader.tensors:
            if layer := _EXPERTS.search(tensor.name):
                run = (int(tensor.data_offset), int(tensor.n_bytes) // int(tensor.shape[-1]))
                found.setdefault(int(layer[1]), []).append(run)
        return found

    def expert_ranges(self, layer: int, expert: int) -> list[tuple[int, int]]:
        """(offset, size) in the file of all that one expert needs."""
        return [(offset + expert * size, size) for offset, size in self._experts[layer]]

    def bytes_of_a_token(self, experts_used: int) -> int:
        """Weights that decoding one token reads: all the dense ones, its experts, and of the embeddings only one row.

        Where there is no output matrix, the embeddings are one, and all of them are read.
        """
        tensors = {t.name: t for t in self._reader.tensors}
        embeddings = tensors["token_embd.weight"]
        looked_up = int(embeddings.n_bytes) if "output.weight" in tensors else 0
        experts = sum(experts_used * size for runs in self._experts.values() for _, size in runs)
        return self.dense_bytes - looked_up + experts

    def kv_bytes(self, n_ctx: int) -> int:
        """K and V of full attention in f16: every layer keeps heads x (key + value length) halves for each cell of the context.

        llama.cpp rounds the context up to 256 cells.
        """
        layers, heads = self._key("block_count"), self._key("attention.head_count")
        kv_heads = self._key("attention.head_count_kv", heads)
        head_length = self._key("embedding_length") // heads
        lengths = self._key("attention.key_length", head_length) + self._key("attention.value_length", head_length)
        return layers * kv_heads * lengths * 2 * (-(-n_ctx // 256) * 256)

    def _key(self, name: str, default: int | None = None) -> int:
        architecture = self._reader.fields["general.architecture"].contents()
        entry = self._reader.fields.get(f"{architecture}.{name}")
        if entry is None and default is None:
            raise KeyError(f"{self.path} has no {architecture}.{name}")
        return default if entry is None else int(entry.contents())


@contextmanager
def made(shape: list[str], *, needed_bytes: int, keep: bool) -> Iterator[Path]:
    """A model that tools/make_model writes for these options, on a disk outside the repository; deleted afterwards unless kept."""
    with scratch_folder(needed_bytes, keep=keep) as folder:
        path = folder / "model.gguf"
        note(f"making {path} ({' '.join(shape)})")
        if (status := subprocess.run([sys.executable, MAKE_MODEL, path, *shape], stdout=sys.stderr).returncode) != 0:
            raise MeasurementError(f"tools/make_model {path} {' '.join(shape)} ended with {status}")
        # Whole sectors, so that a loop device shows all of it.
        os.truncate(path, -(-path.stat().st_size // SECTOR_BYTES) * SECTOR_BYTES)
        if keep:
            note(f"{path} stays; remove it with: rm -r {folder}")
        yield path
