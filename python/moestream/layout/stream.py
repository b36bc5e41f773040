"""Bytes on their way from files to a file: reads that run ahead of the work, into a few buffers that are used again."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from ..errors import ModelError
from . import ggml
from .gguf_file import Model, Tensor

__all__ = ["CHUNK_BYTES", "Inputs", "Piece", "Rows", "RowPart", "Slices", "chunks", "run_ahead"]

CHUNK_BYTES = 8 << 20
_BUFFERS = 4
_MAX_ROWS = 512  # one system call takes no more than 1024 buffers


class Inputs:
    """The open files of a model. Reads are made by one thread; the cache of the system is told of them."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._opened = contextlib.ExitStack()
        self._files = [self._opened.enter_context(open(file.path, "rb", buffering=0)) for file in model.files]

    def __enter__(self) -> Inputs:
        return self

    def __exit__(self, *exc: object) -> None:
        self._opened.close()

    def read(self, file: int, offset: int, buffers: Sequence[np.ndarray]) -> None:
        """Fills buffers with what follows `offset` of a file, and asks the system for as much behind it.

        Raises:
            ModelError: The file ends before, or cannot be read.
        """
        fd, size = self._files[file].fileno(), sum(buffer.nbytes for buffer in buffers)
        os.posix_fadvise(fd, offset + size, 2 * size, os.POSIX_FADV_WILLNEED)
        left, at = list(buffers), offset
        try:
            while left:
                n = os.preadv(fd, left, at)
                if n == 0:
                    raise ModelError(
                        f"{self.model.files[file].path}: ends at byte {at}; it was longer when it was opened"
                    )
                at += n
                while left and n >= left[0].nbytes:
                    n -= left.pop(0).nbytes
                if n:
                    left[0] = left[0][n:]
        except OSError as exc:
            if isinstance(exc, ModelError):
                raise
            path = self.model.files[file].path
            raise ModelError(f"{path}: cannot be read at byte {at}: {exc.strerror}; check the disk") from exc
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True)
class Slices:
    """Where the matrix of expert e lies: `bytes` bytes at `offset` + e `stride` of a file."""

    file: int
    offset: int
    stride: int
    bytes: int


@dataclass(frozen=True)
class RowPart:
    """A part of the rows that are made.

    Attributes:
        offset, bytes: Of the part in a row.
        slices: Where it comes from.
        change: Makes what is stored from what was read: change(read, out). None: it is stored as it was read.
        check: Raises ModelError if what was read by expert e is no sound data.
    """

    offset: int
    bytes: int
    slices: Slices
    change: Callable[[np.ndarray, np.ndarray], None] | None = None
    check: Callable[[int, np.ndarray], None] | None = None


@dataclass(frozen=True)
class Piece:
    """A run of bytes of the file that is made: read in one thread, finished in another.

    Attributes:
        file, offset, size: Where it goes.
        buffer_bytes: What it needs of a buffer; the first `size` bytes are the result.
        row_bytes: Of a row, if it is one of those with checksums; else 0.
    """

    file: int
    offset: int
    size: int
    buffer_bytes: int
    row_bytes: int
    read: Callable[[np.ndarray], None]
    finish: Callable[[np.ndarray], None]


def chunks(
    inputs: Inputs, tensor: Tensor, file: int, offset: int, check: Callable[[int, np.ndarray], None] | None = None
) -> Iterator[Piece]:
    """A tensor as it is, to `offset` of file number `file`.

    Args:
        check: As that of `RowPart`, of bytes at an offset in the tensor.
    """
    block_bytes = ggml.row_bytes(tensor.type, _block(tensor.type))
    step = CHUNK_BYTES // block_bytes * block_bytes
    for at in range(0, tensor.size_bytes, step):
        size = min(step, tensor.size_bytes - at)

        def read(buffer: np.ndarray, at: int = at, size: int = size) -> None:
            inputs.read(tensor.file, tensor.offset + at, [buffer[:size]])

        def finish(buffer: np.ndarray, at: int = at, size: int = size) -> None:
            if check is not None:
                check(at, buffer[:size])

        yield Piece(file, offset + at, size, size, 0, read, finish)


def _block(type: int) -> int:
    known = ggml.traits(type)
    assert known is not None
    return known.block


@dataclass(frozen=True)
class Rows:
    """Rows of equal length, one an expert, made of the experts' matrices; what no part takes is zero."""

    count: int
    row_bytes: int
    parts: tuple[RowPart, ...]
    gaps: tuple[tuple[int, int], ...] = ()

    def pieces(self, inputs: Inputs, file: int, offset: int, *, checksums: bool) -> Iterator[Piece]:
        """The rows one behind the other, to `offset` of file number `file`; a few megabytes each, or one row."""
        changed = sum(part.slices.bytes for part in self.parts if part.change is not None)
        step = max(1, min(_MAX_ROWS, CHUNK_BYTES // self.row_bytes))
        for first in range(0, self.count, step):
            n = min(step, self.count - first)

            def read(buffer: np.ndarray, first: int = first, n: int = n) -> None:
                self._read(inputs, first, n, buffer)

            def finish(buffer: np.ndarray, first: int = first, n: int = n) -> None:
                self._finish(first, n, buffer)

            yield Piece(
                file=file,
                offset=offset + first * self.row_bytes,
                size=n * self.row_bytes,
                buffer_bytes=n * (self.row_bytes + changed),
                row_bytes=self.row_bytes if checksums else 0,
                read=read,
                finish=finish,
            )

    def _places(self, n: int, buffer: np.ndarray) -> Iterator[tuple[RowPart, list[np.ndarray], list[np.ndarray]]]:
        """Each part with where it is read to and where it is stored, by expert."""
        scratch = n * self.row_bytes
        for part in self.parts:
            begins = range(part.offset, n * self.row_bytes, self.row_bytes)
            stored = [buffer[begin : begin + part.bytes] for begin in begins]
            if part.change is None:
                yield part, stored, stored
                continue
            size = part.slices.bytes
            yield part, [buffer[scratch + i * size : scratch + (i + 1) * size] for i in range(n)], stored
            scratch += n * size

    def _read(self, inputs: Inputs, first: int, n: int, buffer: np.ndarray) -> None:
        for begin, end in self.gaps:
            buffer[: n * self.row_bytes].reshape(n, self.row_bytes)[:, begin:end] = 0
        for part, read, _ in self._places(n, buffer):
            slices = part.slices
            if slices.stride == slices.bytes:
                inputs.read(slices.file, slices.offset + first * slices.stride, read)
                continue
            for i, buffers in enumerate(read):
                inputs.read(slices.file, slices.offset + (first + i) * slices.stride, [buffers])

    def _finish(self, first: int, n: int, buffer: np.ndarray) -> None:
        for part, read, stored in self._places(n, buffer):
            for i in range(n):
                if part.check is not None:
                    part.check(first + i, read[i])
                if part.change is not None:
                    part.change(read[i], stored[i])


T = TypeVar("T")


@dataclass
class _Read(Generic[T]):
    piece: T | None = None
    buffer: np.ndarray | None = None
    error: BaseException | None = None


def run_ahead(pieces: Iterable[Piece], buffer_bytes: int) -> Iterator[tuple[Piece, np.ndarray]]:
    """The pieces in order, each read: a thread reads those that follow while the caller works on one.

    A buffer is valid until the next piece is asked for. What fails while reading is raised here.

    Args:
        buffer_bytes: Of the largest piece.
    """
    free: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
    ready: queue.SimpleQueue[_Read[Piece]] = queue.SimpleQueue()
    for _ in range(_BUFFERS):
        free.put(np.empty(buffer_bytes, dtype=np.uint8))

    def work() -> None:
        try:
            for piece in pieces:
                buffer = free.get()
                if buffer is None:
                    return
                piece.read(buffer)
                ready.put(_Read(piece, buffer))
            ready.put(_Read())
        except BaseException as exc:
            ready.put(_Read(error=exc))

    reader = threading.Thread(target=work, name="moestream-read-ahead", daemon=True)
    reader.start()
    try:
        while (got := ready.get()).piece is not None:
            assert got.buffer is not None
            yield got.piece, got.buffer
            free.put(got.buffer)
        if got.error is not None:
            raise got.error
    finally:
        free.put(None)  # behind those that are free: the thread takes at most these
        reader.join()
