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

from .disk import SECTOR_BYTES, scratch_folder
from .figure import MeasurementError, note

__all__ = ["Subject", "made"]

MAKE_MODEL = Path(__file__).resolve().parent.parent / "make_model"

# What the loader never reads: the weights of the experts. Their biases and scales are small and belong to the dense part.
_EXPERT_WEIGHTS = re.compile(r"_exps\.weight$")


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
        return [
            (int(t.data_offset), int(t.n_bytes)) for t in self._reader.tensors if not _EXPERT_WEIGHTS.search(t.name)
        ]

    @cached_property
    def dense_bytes(self) -> int:
        return sum(size for _, size in self.dense_ranges)

    @cached_property
    def vocabulary(self) -> int:
        return int(next(t for t in self._reader.tensors if t.name == "token_embd.weight").shape[1])

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
