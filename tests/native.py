"""The C core's inner modules, as its own headers declare them: the cache without a model, readers without a cache."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cffi import FFI

from moestream._native import LIBRARY, MESSAGE_BYTES
from moestream._native import ffi as moestream_ffi

__all__ = [
    *(
        "PythonReader",
        "Store",
        "called",
        "direct",
        "failure",
        "ffi",
        "interleaving",
        "lib",
        "opened",
        "reader",
        "store",
    ),
    *("timeline_ffi", "timeline_lib"),
]

CSRC = Path(__file__).resolve().parent.parent / "csrc"
HEADERS = (
    *("checksum.h", "layout.h", "source.h", "kernels.h", "policy.h", "reader.h", "rows.h", "store.h"),
    *("guesses.h", "reuse.h", "trial.h", "routers.h", "routing.h"),
)


def _declarations(header: str) -> str:
    """The header as cffi reads it: numeric macros filled in, then without preprocessor lines, comments and bodies."""
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    header = re.sub(r"^static inline .*?^\}$", "", header, flags=re.DOTALL | re.MULTILINE)
    numbers = dict(re.findall(r"^#define (\w+) (\d+)\s*$", header, re.MULTILINE))
    lines = "\n".join(line for line in header.splitlines() if not line.startswith("#"))
    for name, number in numbers.items():
        lines = re.sub(rf"\b{name}\b", number, lines)
    return lines.replace("enum ggml_type", "int")


ffi = FFI()
ffi.cdef("\n".join(_declarations((CSRC / name).read_text()) for name in HEADERS))
lib: Any = ffi.dlopen(str(LIBRARY))
# The timeline is made of what moestream.h declares, of which the headers above have some too.
timeline_ffi = FFI()
timeline_ffi.include(moestream_ffi)
timeline_ffi.cdef(_declarations((CSRC / "timeline.h").read_text()))
timeline_lib: Any = timeline_ffi.dlopen(str(LIBRARY))


class _Failure(AssertionError):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{os.strerror(-code)} ({code}): {message}")
        self.code = code
        self.message = message


def called(function: Callable[..., int], *args: Any) -> None:
    """Calls a function that ends in (err, errlen); a negative return is an AssertionError with `code` and `message`."""
    message = ffi.new("char[]", MESSAGE_BYTES)
    code = function(*args, message, MESSAGE_BYTES)
    if code < 0:
        raise _Failure(code, ffi.string(message).decode())


def failure(function: Callable[..., Any], *args: Any) -> tuple[int, str]:
    """What a call fails with: (-errno, sentence)."""
    try:
        function(*args)
    except _Failure as error:
        return error.code, error.message
    raise AssertionError("the call succeeded")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The `struct ms_source` of a model."""
    out = ffi.new("struct ms_source **")
    called(lib.ms_source_open, str(path).encode(), out)
    try:
        yield out[0]
    finally:
        lib.ms_source_close(out[0])


def direct(source: Any) -> bool:
    """Makes the source read past the page cache; False where its file system refuses."""
    return lib.ms_source_use_direct(source, ffi.NULL, 0) == 0


@contextlib.contextmanager
def interleaving(source: Any) -> Iterator[Any]:
    """The `struct ms_interleaving` of a source; NULL where this build of ggml interleaves nothing."""
    out = ffi.new("struct ms_interleaving **")
    called(lib.ms_interleaving_open, source, out)
    try:
        yield out[0]
    finally:
        lib.ms_interleaving_close(out[0])


@contextlib.contextmanager
def reader(name: str, workers: int = 8) -> Iterator[Any]:
    """A real `struct ms_reader`: "uring" (with `workers` as its depth) or "pread" (with as many threads)."""
    out = ffi.new("struct ms_reader **")
    called(getattr(lib, f"ms_reader_{name}_open"), workers, out)
    try:
        yield out[0]
    finally:
        out[0].close(out[0])


class PythonReader:
    """A `struct ms_reader` that completes reads as a test wants: any order, late, with errors.

    Args:
        shuffle: Completes what is pending in random order.
        fails: Asked for each read (its file offset); a negative errno instead of 0 is what the read ends with, and
            nothing is read.
        late_s: Seconds before each completion.
    """

    def __init__(
        self, *, shuffle: random.Random | None = None, fails: Callable[[int], int] | None = None, late_s: float = 0
    ) -> None:
        self.struct = ffi.new("struct ms_reader *")
        self.batches: list[list[tuple[int, int]]] = []  # per submit: (offset, size) of its reads
        self.fails = fails or (lambda offset: 0)
        self._shuffle = shuffle
        self._late_s = late_s
        self._pending: list[Any] = []
        self._changed = threading.Condition()
        self._closing = False
        self._held = False
        self._allowed = 0  # completions, while the others are held
        self._completed = 0
        self._submit = ffi.callback("void(struct ms_reader *, struct ms_read *)", self._submitted)
        self.struct.submit = self._submit
        self._thread = threading.Thread(target=self._complete)
        self._thread.start()

    def hold(self) -> None:
        """Completes nothing until `resume`."""
        with self._changed:
            self._held = True

    def resume(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def step(self, n: int = 1) -> None:
        """While held: completes n reads, and returns when that is done."""
        with self._changed:
            self._allowed += n
            wanted = self._completed + n
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._completed >= wanted, timeout=10), f"{len(self._pending)} reads"

    @property
    def n_pending(self) -> int:
        with self._changed:
            return len(self._pending)

    def wait_until_idle(self) -> None:
        """Until all that was asked for, and what was asked for because of that, is done."""
        with self._changed:
            asked = lambda: sum(map(len, self.batches))  # noqa: E731
            assert self._changed.wait_for(lambda: self._completed == asked(), timeout=10), f"{len(self._pending)} reads"

    def wait_for_pending(self, n: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._pending) >= n, timeout=10), f"{len(self._pending)} reads"

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self.resume()
        self._thread.join()

    def _submitted(self, reader: Any, read: Any) -> None:
        lib.ms_reader_began(reader, ffi.new("struct ms_read *[]", [read]))
        reads = []
        while read != ffi.NULL:
            reads.append(read)
            read = read.next
        with self._changed:
            self.batches.append([(r.offset, r.size_bytes) for r in reads])
            self._pending += reads
            self._changed.notify_all()

    def _complete(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._may_complete)
                if not self._pending:
                    return
                self._allowed -= self._held
            if self._late_s:
                threading.Event().wait(self._late_s)
            with self._changed:
                read = self._pending.pop(self._shuffle.randrange(len(self._pending)) if self._shuffle else 0)
            status, n = self.fails(read.offset), 0
            if status == 0:
                n = os.preadv(read.fd, [ffi.buffer(read.destination, read.size_bytes)], read.offset)
                assert n >= read.needed_bytes
            lib.ms_reader_ended(self.struct, n)
            read.done(read, status)
            with self._changed:
                self._completed += 1
                self._changed.notify_all()

    def _may_complete(self) -> bool:
        return bool(self._pending and (not self._held or self._allowed)) or (self._closing and not self._pending)


class Store:
    """A `struct ms_store` of slots, and what the files say should be in it."""

    def __init__(self, source: Any, pointer: Any) -> None:
        self.source = source
        self._store = pointer

    def capacity(self, layer: int) -> int:
        return self._store.capacity(self._store, layer)

    def acquire(self, layer: int, experts: Sequence[int]) -> list[int]:
        indices = ffi.new("int32_t[]", max(1, len(experts)))
        called(self._store.acquire, self._store, layer, ffi.new("int32_t[]", list(experts)), len(experts), indices)
        return list(indices)[: len(experts)]

    def release(self, layer: int, indices: Sequence[int]) -> None:
        self._store.release(self._store, layer, ffi.new("int32_t[]", list(indices)), len(indices))

    def begin(
        self, layer: int, experts: Sequence[int], indices: Sequence[int] | None = None, *, room: str = "ANY"
    ) -> list[int]:
        """The indices afterwards; -1 where nothing was pinned. Asserts that the count returned is that of new ones."""
        which = getattr(lib, f"MS_ROOM_{room}")
        before = [-1] * len(experts) if indices is None else list(indices)
        after = ffi.new("int32_t[]", before)
        message = ffi.new("char[]", MESSAGE_BYTES)
        asked = ffi.new("int32_t[]", list(experts))
        code = self._store.begin(self._store, layer, asked, len(experts), which, after, message, MESSAGE_BYTES)
        if code < 0:
            raise _Failure(code, ffi.string(message).decode())
        assert code == before.count(-1) - list(after).count(-1)
        return list(after)

    def presence(self, layer: int, index: int) -> int:
        return self._store.presence(self._store, layer, index)

    def failure(self, layer: int, index: int) -> tuple[int, str]:
        message = ffi.new("char[]", MESSAGE_BYTES)
        return self._store.failure(self._store, layer, index, message, MESSAGE_BYTES), ffi.string(message).decode()

    def events(self) -> int:
        return self._store.events(self._store)

    def wait(self, seen: int) -> None:
        self._store.wait(self._store, seen)

    def wait_for_events(self, seen: int, n: int) -> None:
        """Until there are n more than `seen`."""
        while (now := self.events()) < seen + n:
            self.wait(now)

    def cool(self, layer: int, indices: Sequence[int]) -> None:
        self._store.cool(self._store, layer, ffi.new("int32_t[]", list(indices)), len(indices))

    def prefetch(self, layer: int, experts: Sequence[int]) -> int:
        return self._store.prefetch(self._store, layer, ffi.new("int32_t[]", list(experts)), len(experts))

    def settle(self) -> None:
        self._store.settle(self._store)

    def enter(self, layer: int, *, new_batch: bool = False) -> None:
        self._store.enter(self._store, layer, new_batch)

    def expect(self, layer: int, experts: Mapping[int, float]) -> None:
        """Of each expert its confidence."""
        which, confidences = ffi.new("int32_t[]", list(experts)), ffi.new("float[]", list(experts.values()))
        self._store.expect(self._store, layer, which, confidences, len(experts))

    def holds(self, layer: int) -> list[int]:
        """Experts of the layer that are in memory."""
        held = ffi.new("bool[]", n := self.source.layers[layer].n_experts)
        self._store.holds(self._store, layer, n, held)
        return [expert for expert in range(n) if held[expert]]

    def pace(self, rate: int) -> None:
        """Bytes per second at which reads arrive from now on; 0: as they come."""
        assert self._store.pace(self._store, rate) == 0

    def stop(self) -> None:
        self._store.stop(self._store)

    def fair_share(self, layer: int) -> int:
        return self._store.fair_share(self._store, layer)

    def counters(self) -> Any:
        return self._store.counters(self._store)

    def view(self, layer: int, matrix: int) -> Any:
        return self._store.view(self._store, layer, matrix)

    def held(self, layer: int, matrix: int, index: int) -> bytes:
        """The bytes of one matrix at an index of the view."""
        view = self.view(layer, matrix)
        assert 0 <= index < view.n
        slice_bytes = self.source.layers[layer].matrices[matrix].slice_bytes
        return bytes(ffi.buffer(view.data + index * view.stride_bytes, slice_bytes))

    def on_disk(self, layer: int, matrix: int, expert: int) -> bytes:
        """The same bytes as the file has them."""
        m = self.source.layers[layer].matrices[matrix]
        return os.pread(self.source.files[m.file].fd, m.slice_bytes, m.offset + expert * m.stride_bytes)

    def check(self, layer: int, experts: Sequence[int], indices: Sequence[int]) -> None:
        """Asserts that every matrix of the experts is where `indices` say."""
        assert len(set(indices)) == len(indices)
        for expert, index in zip(experts, indices, strict=True):
            for matrix in range(self.source.layers[layer].n_matrices):
                assert self.held(layer, matrix, index) == self.on_disk(layer, matrix, expert), (layer, expert, matrix)


@contextlib.contextmanager
def store(
    source: Any, reader: Any, budget: int, *, interleaving: Any = ffi.NULL, verify: bool = False, policy: str = "lru"
) -> Iterator[Store]:
    """Slots of `budget` bytes, filled by a reader (`struct ms_reader`, or a `PythonReader`)."""
    out = ffi.new("struct ms_store **")
    pointer = reader.struct if isinstance(reader, PythonReader) else reader
    name = ffi.new("char[]", policy.encode())
    options = {"budget_bytes": budget, "verify": verify, "wanted": ffi.NULL, "policy": name}
    called(lib.ms_slots_open, source, pointer, interleaving, ffi.new("struct ms_slots_options *", options)[0], out)
    faulthandler.dump_traceback_later(60, exit=True)  # a thread that waits in acquire for ever cannot be interrupted
    try:
        yield Store(source, out[0])
    finally:
        faulthandler.cancel_dump_traceback_later()
        out[0].close(out[0])
