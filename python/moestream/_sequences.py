"""Which rows of a batch go on where their sequence was left: what predicted routing must know of a context.

A step of decoding is routed by what heads said in the step before it. That holds as long as nothing happened to the
sequence in between. So each change of a context's memory is noted here; whoever changes it past this object (through the C
functions of llama.cpp) makes the next step a first one by `forget`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ._native import ffi, lib

__all__ = ["Sequences"]


class Sequences:
    """The sequences of one context, and how far each was decoded step by step.

    Attributes:
        prompt: The rows of the next batches are of a prompt, however few they are.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._next: dict[int, int] = {}  # position of the step that goes on
        self.prompt = False

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
        steps = [not self.prompt and len(sequences) == 1 and count[sequences[0]] == 1 for sequences, _, _ in rows]
        flags = [
            lib.MS_ROW_OUTPUT * output
            + step * (lib.MS_ROW_STEP + lib.MS_ROW_CONTINUES * (self._next.get(sequences[0]) == position))
            for (sequences, position, output), step in zip(rows, steps, strict=True)
        ]
        for sequence in count:
            self.forget(sequence)  # until it has been decoded
        firsts, positions = [sequences[0] for sequences, _, _ in rows], [position for _, position, _ in rows]
        if lib.ms_engine_decode_rows(self._engine, len(rows), firsts, positions, flags) < 0:
            raise MemoryError("out of memory for the rows of a batch")
        try:
            yield
        finally:
            lib.ms_engine_decode_rows(self._engine, 0, ffi.NULL, ffi.NULL, ffi.NULL)
        self._next |= {s: position + 1 for s, position, step in zip(firsts, positions, steps, strict=True) if step}


def _row(batch: Any, i: int) -> tuple[list[int], int, bool]:
    """(sequences, position, whether its logits are asked for) of a row, as llama.cpp fills in what a batch leaves out."""
    sequences = [batch.seq_id[i][s] for s in range(batch.n_seq_id[i])] if batch.n_seq_id and batch.seq_id else [0]
    output = bool(batch.logits[i]) if batch.logits else i == batch.n_tokens - 1
    return sequences, batch.pos[i] if batch.pos else -1, output
