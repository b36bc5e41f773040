"""Tokens on disk, and which of them make up the batch of a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np


class Batches:
    """Windows of a token stream in an order that depends on seed and step alone, so that a resumed run sees what it would have seen.

    Each epoch cuts the stream at another offset and shuffles the windows anew.

    Args:
        tokens: [n], uint16; may be a memory map.
        context: Tokens a window.
        batch: Windows a step.
    """

    def __init__(self, tokens: np.ndarray, context: int, batch: int, seed: int) -> None:
        self.windows_per_epoch = (len(tokens) - 1) // context - 1
        if self.windows_per_epoch < batch:
            raise ValueError(f"{len(tokens)} tokens are too few for a batch of {batch} windows of {context}")
        self._tokens, self._context, self._batch, self._seed = tokens, context, batch, seed
        self._epoch, self._offset, self._order = -1, 0, np.empty(0)

    def at(self, step: int) -> np.ndarray:
        """[batch, context + 1] tokens, int64: the inputs and, one further, their targets."""
        return np.stack([self._window(step * self._batch + row) for row in range(self._batch)]).astype(np.int64)

    def _window(self, index: int) -> np.ndarray:
        epoch, place = divmod(index, self.windows_per_epoch)
        if epoch != self._epoch:
            random = np.random.default_rng([self._seed, epoch])
            self._offset = int(random.integers(self._context))
            self._order = random.permutation(self.windows_per_epoch)
            self._epoch = epoch
        start = self._offset + int(self._order[place]) * self._context
        return self._tokens[start : start + self._context + 1]


def windows(tokens: np.ndarray, context: int, most: int | None = None) -> np.ndarray:
    """[count, context + 1] tokens, int64: the stream cut into windows, evenly thinned to `most` of them."""
    count = (len(tokens) - 1) // context
    chosen = np.arange(count) if most is None or most >= count else np.linspace(0, count - 1, most).astype(int)
    return np.stack([tokens[i * context : i * context + context + 1] for i in chosen]).astype(np.int64)


def load_tokens(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r")
