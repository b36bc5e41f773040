"""The file in which llama-perplexity keeps what a base model predicts, to compare others with (``--kl-divergence-base``).

    "_logits_"                     8 bytes
    context, vocabulary, chunks    int32 each
    tokens                         int32 [chunks, context], as the text has them
    rows                           [chunks, context - 1 - context // 2] of
        scale, lowest              float32 each
        codes                      uint16 [vocabulary, to even]

Numbers have their lowest byte first. A row is what one token of a chunk's second half predicts: the logarithm of the probability
of token i is scale * codes[i] + lowest. Logits over 16 below the largest are put there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ._whole_file import writing_whole
from .errors import OptionError, OutputError
from .memory import format_size

__all__ = ["LogitsFile", "encode", "scored_tokens", "size_bytes", "writing_logits"]

_MAGIC = b"_logits_"
_HEAD = struct.Struct("<8s3i")
_DEEPEST = np.float32(16)  # nats below the likeliest token that are still told apart
_CODES = np.float32(65535)
_REMEDY = "write it anew: moestream eval --kl-divergence-base FILE, without --kl-divergence"


def scored_tokens(context: int) -> int:
    """Tokens of a chunk that are predicted and counted: those behind its first half and one."""
    return context - 1 - context // 2


def size_bytes(*, context: int, n_vocab: int, chunks: int) -> int:
    """Size of such a file."""
    return _HEAD.size + chunks * (4 * context + scored_tokens(context) * _row(n_vocab).itemsize)


def encode(logits: npt.NDArray[np.float32]) -> bytes:
    """Rows of logits [token, vocabulary] as the file has them, rounded where llama-perplexity rounds."""
    largest = logits.max(axis=1, keepdims=True)
    lowest = np.maximum(logits.min(axis=1, keepdims=True), largest - _DEEPEST)
    exact = (logits - largest).astype(np.float64)
    log_sum = np.log(np.exp(exact).sum(axis=1, keepdims=True)).astype(np.float32)
    scale = (largest - lowest) / _CODES
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    rows = np.zeros(len(logits), _row(logits.shape[1]))
    rows["scale"], rows["lowest"] = scale[:, 0], (lowest - largest - log_sum)[:, 0]
    rows["codes"][:, : logits.shape[1]] = np.rint(inverse * (np.maximum(logits, lowest) - lowest))
    return rows.tobytes()


@dataclass(frozen=True)
class LogitsFile:
    """Such a file, opened by its head."""

    path: Path
    context: int
    n_vocab: int
    chunks: int
    tokens: npt.NDArray[np.int32]
    """Of all chunks, one behind the other."""

    @staticmethod
    def read(path: str | os.PathLike[str]) -> LogitsFile:
        """The head of a file.

        Raises:
            OptionError: There is none, it is of another kind, or not whole.
        """
        path = Path(path)
        try:
            with open(path, "rb") as file:
                head = file.read(_HEAD.size)
                if not head.startswith(_MAGIC):
                    raise OptionError(f"{path}: is no file of a base run's logits: {_REMEDY}")
                if len(head) < _HEAD.size:
                    raise OptionError(f"{path}: is truncated: {_REMEDY}")
                _, context, n_vocab, chunks = _HEAD.unpack(head)
                if context < 3 or n_vocab < 1 or chunks < 1:
                    raise OptionError(
                        f"{path}: is damaged: a context of {context}, {n_vocab} tokens in the vocabulary, {chunks} chunks: {_REMEDY}"
                    )
                wanted, found = size_bytes(context=context, n_vocab=n_vocab, chunks=chunks), path.stat().st_size
                if found != wanted:
                    what = "truncated" if found < wanted else "damaged"
                    raise OptionError(f"{path}: is {what}: it has {found} bytes, and {wanted} by its head: {_REMEDY}")
                tokens = np.frombuffer(file.read(4 * chunks * context), "<i4")
        except OSError as exc:
            raise OptionError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
        if ((tokens < 0) | (tokens >= n_vocab)).any():
            raise OptionError(f"{path}: is damaged: it has tokens that are not in its vocabulary: {_REMEDY}")
        return LogitsFile(path, context, n_vocab, chunks, tokens)

    def log_probabilities(self, chunk: int, first: int, count: int) -> npt.NDArray[np.float32]:
        """[count, vocabulary] of the scored tokens of a chunk, from `first` on.

        Raises:
            OptionError: They cannot be read.
        """
        row = _row(self.n_vocab)
        at = _HEAD.size + self.tokens.nbytes + (chunk * scored_tokens(self.context) + first) * row.itemsize
        try:
            with open(self.path, "rb") as file:
                file.seek(at)
                data = file.read(count * row.itemsize)
        except OSError as exc:
            raise OptionError(f"{self.path}: cannot be read: {exc.strerror or exc}") from exc
        if len(data) < count * row.itemsize:
            raise OptionError(f"{self.path}: became shorter while it was read: {_REMEDY}")
        rows = np.frombuffer(data, row)
        codes = rows["codes"][:, : self.n_vocab].astype(np.float32)
        return rows["scale"][:, None] * codes + rows["lowest"][:, None]


@contextlib.contextmanager
def writing_logits(
    path: str | os.PathLike[str], tokens: npt.NDArray[np.int32], *, context: int, n_vocab: int
) -> Iterator[Callable[[npt.NDArray[np.float32]], object]]:
    """Gives the function that takes the logits of the scored tokens, row by row of the file; it is whole or not there.

    Raises:
        OutputError: It exists, the disk has no room for it, or it cannot be written.
    """
    require_room(path, context=context, n_vocab=n_vocab, chunks=len(tokens) // context)
    with writing_whole(path, OutputError) as file:
        file.write(_HEAD.pack(_MAGIC, context, n_vocab, len(tokens) // context))
        file.write(np.asarray(tokens, "<i4").tobytes())
        yield lambda logits: file.write(encode(logits))


def require_new(path: str | os.PathLike[str]) -> None:
    """Raises OutputError where a file is already: it may have taken hours."""
    path = Path(path)
    if path.exists():
        raise OutputError(f"{path}: exists: add --kl-divergence to compare with it, or name another file to write")
    if not path.parent.is_dir():
        raise OutputError(f"{path}: there is no folder {path.parent}; make it first")


def require_room(path: str | os.PathLike[str], *, context: int, n_vocab: int, chunks: int) -> None:
    """Raises OutputError unless a new file of that size fits on the disk."""
    require_new(path)
    wanted = size_bytes(context=context, n_vocab=n_vocab, chunks=chunks)
    if wanted > (free := shutil.disk_usage(Path(path).parent).free):
        raise OutputError(
            f"{path}: {format_size(wanted)} are needed for {chunks} chunks of {context} tokens, and the disk has {format_size(free)} free: "
            "take fewer (--chunks), or another disk"
        )


def _row(n_vocab: int) -> np.dtype[np.void]:
    return np.dtype([("scale", "<f4"), ("lowest", "<f4"), ("codes", "<u2", n_vocab + n_vocab % 2)])
