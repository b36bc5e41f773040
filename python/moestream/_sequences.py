"""Which rows of a batch go on where their sequence was left: what predicted routing must know of a context.

A step of decoding is routed by what heads said in the step before it. That holds as long as nothing happened to the
sequence in between. So each change of a context's memory is noted here; whoever changes it past this object (through the C
functions of llama.cpp) makes the next step a first one by `forget`.
"""

from __future__ import annotations

import contextlib
import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ._native import ffi, lib

__all__ = ["Sequences"]

_SAVED = struct.Struct("<Iq")  # before what heads said: checksum of the heads, position of the step


class Sequences:
    """The sequences of one context: how far each was decoded step by step, and what heads said of its next step.

    Attributes:
        prompt: The rows of the next batches are of a prompt, however few they are.
    """

    def __init__(self, engine: Any, heads_checksum: int) -> None:
        self._engine = engine
        self._heads_checksum = heads_checksum
        self._next: dict[int, int] = {}  # position of the step that goes on
        self._memories: dict[int, Any] = {}
        self.prompt = False

    def saved(self, sequence: int) -> bytes | None:
        """What heads said of a sequence's next step, with its position; None if nothing was."""
        if (position := self._next.get(sequence)) is None:
            return None
        memory = self._memories[sequence]
        said = ffi.new("uint8_t[]", lib.ms_head_memory_bytes(memory))
        lib.ms_head_memory_save(memory, said)
        return _SAVED.pack(self._heads_checksum, position) + bytes(ffi.buffer(said))

    def restore(self, sequence: int, saved: bytes | None) -> None:
        """After the sequence's state was restored. What is none of these heads is as if nothing had been said."""
        self.forget(sequence)
        if saved is None or len(saved) < _SAVED.size:
            return
        checksum, position = _SAVED.unpack_from(saved)
        said = ffi.new("uint8_t[]", len(saved) - _SAVED.size)
        ffi.memmove(said, saved[_SAVED.size :], len(said))
        if checksum == self._heads_checksum and lib.ms_head_memory_restore(self._memory(sequence), said, len(said)):
            self._next[sequence] = position

    def _memory(self, sequence: int) -> Any:
        if sequence not in self._memories:
            memory = lib.ms_engine_head_memory(self._engine)
            if memory == ffi.NULL:
                raise MemoryError("out of memory for what heads say")
            self._memories[sequence] = ffi.gc(memory, lib.ms_head_memory_free)
        return self._memories[sequence]

    def forget(self, sequence: int | None = None) -> None:
        """The next step of a sequence, or of all, is a first one."""
        if sequence is None:
            self._next.clear()
        else:
            self._next.pop(sequence, None)

    def keep(self, sequence: int) -> None:
        """All others are forgotten."""
        self._next = {s: position for s, position in self._next.items() if s == sequence}

    def cut(self, sequence: int, begin: int, end: int) -> None:
        """Positions from `begin` to `end` (both included if negative: the first, the last) were removed."""
        position = self._next.get(sequence)
        if position is not None and begin < position and (end < 0 or end > max(begin, 0)):
            del self._next[sequence]

    @contextlib.contextmanager
    def announced(self, batch: Any) -> Iterator[None]:
        """Around the decoding of a `llama_batch` by this thread.

        Raises:
            MemoryError: There is no memory for its rows.
        """
        rows = [_row(batch, i) for i in range(batch.n_tokens)]
        count = Counter(sequence for sequences, _, _ in rows for sequence in sequences)
        steps = [
            not self.prompt and position >= 0 and len(sequences) == 1 and count[sequences[0]] == 1
            for sequences, position, _ in rows
        ]
        flags = [
            lib.MS_ROW_OUTPUT * output
            + lib.MS_ROW_CONTINUES * (step and self._next.get(sequences[0]) == position)
            for (sequences, position, output), step in zip(rows, steps, strict=True)
        ]
        for sequence in count:
            self.forget(sequence)  # until it has been decoded
        firsts, positions = [sequences[0] for sequences, _, _ in rows], [position for _, position, _ in rows]
        memories = [self._memory(first) if step else ffi.NULL for first, step in zip(firsts, steps, strict=True)]
        if lib.ms_engine_decode_rows(self._engine, len(rows), memories, positions, flags) < 0:
            raise MemoryError("out of memory for the rows of a batch")
        try:
            yield
        finally:
            lib.ms_engine_decode_rows(self._engine, 0, ffi.NULL, ffi.NULL, ffi.NULL)
        self._next |= {s: position + 1 for s, position, step in zip(firsts, positions, steps, strict=True) if step}


def _row(batch: Any, i: int) -> tuple[list[int], int, bool]:
    """(sequences, position, whether its logits are asked for) of a row, as llama.cpp fills in what a batch leaves out; of positions
    only it knows what these are: -1."""
    sequences = [batch.seq_id[i][s] for s in range(batch.n_seq_id[i])] if batch.n_seq_id and batch.seq_id else [0]
    output = bool(batch.logits[i]) if batch.logits else i == batch.n_tokens - 1
    return sequences, batch.pos[i] if batch.pos else -1, output
