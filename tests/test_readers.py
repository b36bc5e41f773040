"""Readers alone: the bytes asked for arrive, or the error says why they do not."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import native
from moestream import memory
from native import failure, ffi, lib

SIZE = 1_000_003  # no multiple of anything
READERS = ("uring", "pread")


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(0).randbytes(SIZE)


@pytest.fixture
def fd(tmp_path: Path, content: bytes) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


class Batch:
    """Reads of one file, submitted together; `results` maps the number of each to (status, bytes)."""

    def __init__(self, fd: int, ranges: list[tuple[int, int, int]]) -> None:
        """Ranges are (offset, size, needed)."""
        self.results: dict[int, tuple[int, bytes]] = {}
        self._finished = threading.Event()
        self._done = ffi.callback("void(struct ms_read *, int)", self._ended)
        self._memory = [mmap.mmap(-1, size) for _, size, _ in ranges]  # aligned to a page, as direct reads want
        self._reads = ffi.new("struct ms_read[]", len(ranges))
        for i, (offset, size, needed) in enumerate(ranges):
            read = self._reads[i]
            read.fd, read.offset, read.size_bytes, read.needed_bytes = fd, offset, size, needed
            read.destination = ffi.cast("uint8_t *", ffi.from_buffer(self._memory[i]))
            read.done = self._done
            read.owner = ffi.cast("void *", i)
            read.next = ffi.addressof(self._reads[i + 1]) if i + 1 < len(ranges) else ffi.NULL

    def _ended(self, read: Any, status: int) -> None:
        number = int(ffi.cast("uintptr_t", read.owner))
        assert number not in self.results
        self.results[number] = (status, bytes(self._memory[number][: read.got_bytes]))
        if len(self.results) == len(self._memory):
            self._finished.set()

    def submit(self, reader: Any) -> Batch:
        reader.submit(reader, self._reads)
        return self

    def wait(self) -> dict[int, tuple[int, bytes]]:
        assert self._finished.wait(10), f"{len(self.results)} of {len(self._memory)} reads ended"
        return self.results


def random_ranges(n: int) -> list[tuple[int, int, int]]:
    rng = random.Random(n)
    ranges = []
    for _ in range(n):
        offset = rng.randrange(SIZE - 1)
        size = rng.randint(1, min(SIZE - offset, 20_000))
        ranges.append((offset, size, size))
    return ranges


@pytest.mark.parametrize("name", READERS)
def test_any_range_arrives_even_when_more_are_asked_for_than_go_at_once(name: str, fd: int, content: bytes) -> None:
    ranges = random_ranges(300)
    with native.reader(name, 4) as reader:
        results = Batch(fd, ranges).submit(reader).wait()
        counters = lib.ms_reader_read_counters(reader)
    for i, (offset, size, _) in enumerate(ranges):
        assert results[i] == (0, content[offset : offset + size])
    assert (counters.reads, counters.bytes) == (300, sum(size for _, size, _ in ranges))
    assert counters.busy_ns > 0


@pytest.mark.parametrize("name", READERS)
def test_several_threads_may_ask(name: str, fd: int, content: bytes) -> None:
    with native.reader(name, 2) as reader:
        batches = [(ranges := random_ranges(n), Batch(fd, ranges)) for n in range(40, 48)]
        threads = [threading.Thread(target=batch.submit, args=(reader,)) for _, batch in batches]
        for thread in threads:
            thread.start()
        for ranges, batch in batches:
            results = batch.wait()
            for i, (offset, size, _) in enumerate(ranges):
                assert results[i] == (0, content[offset : offset + size])
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("name", READERS)
def test_padding_after_the_last_tensor_may_be_missing(name: str, direct: bool, fd: int, content: bytes, tmp_path: Path) -> None:
    if direct:
        try:
            fd = os.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT)
            os.preadv(fd, [mmap.mmap(-1, 4096)], 0)
        except OSError as error:
            pytest.skip(f"the file system of the temporary folder refuses direct reads: {error}")
    begin = SIZE // 4096 * 4096
    there = SIZE - begin
    with native.reader(name) as reader:
        batch = Batch(fd, [(begin, 4096, there), (begin, 4096, there + 1), (begin - 4096, 8192, 4096 + there)])
        results = batch.submit(reader).wait()
    assert results[0] == (0, content[begin:])
    assert results[1][0] == -errno.ENODATA
    assert results[2] == (0, content[begin - 4096 :])


@pytest.mark.parametrize("name", READERS)
def test_what_lies_beyond_the_end_is_no_data(name: str, fd: int) -> None:
    with native.reader(name) as reader:
        results = Batch(fd, [(SIZE, 512, 512), (SIZE * 10, 512, 1), (SIZE - 1, 2, 2)]).submit(reader).wait()
    assert {status for status, _ in results.values()} == {-errno.ENODATA}


@pytest.mark.parametrize("name", READERS)
def test_a_descriptor_that_cannot_be_read_is_an_error_and_the_others_arrive(name: str, fd: int, content: bytes, tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    with native.reader(name) as reader:
        bad = Batch(folder, [(0, 512, 512)] * 3).submit(reader)
        good = Batch(fd, [(7, 100, 100)]).submit(reader)
        assert {status for status, _ in bad.wait().values()} == {-errno.EISDIR}
        assert good.wait()[0] == (0, content[7:107])
    os.close(folder)


@pytest.mark.parametrize("name", READERS)
def test_closing_waits_for_what_is_in_flight(name: str, fd: int, content: bytes) -> None:
    ranges = random_ranges(200)
    batch = Batch(fd, ranges)
    with native.reader(name, 2) as reader:
        batch.submit(reader)
    assert len(batch.results) == 200
    assert all(batch.results[i] == (0, content[o : o + n]) for i, (o, n, _) in enumerate(ranges))


@pytest.mark.parametrize("name", READERS)
def test_a_reader_leaves_no_thread_and_no_descriptor(name: str) -> None:
    def open_things() -> tuple[int, int]:
        time.sleep(0.1)  # a thread that was joined is listed for a moment more
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    with native.reader(name):
        pass
    before = open_things()
    for _ in range(20):
        with native.reader(name):
            pass
    assert open_things() == before


def test_reading_threads_promise_themselves_no_memory(fd: int) -> None:
    """What they allocate and never touch would be taken from cache="auto"."""
    before, _ = memory.private_bytes()
    with native.reader("pread", 16), native.reader("uring", 64):
        assert memory.private_bytes()[0] - before < 16 << 20


# What n bytes mean for a read: (size, needed, [(n, goes on, status), ...])
ARRIVALS = {
    "all at once": (4096, 4096, [(4096, 0, 0)]),
    "in pieces": (4096, 4096, [(1000, 1, 0), (3000, 1, 0), (96, 0, 0)]),
    "interrupted": (4096, 4096, [(-errno.EINTR, 1, 0), (-errno.EAGAIN, 1, 0), (4096, 0, 0)]),
    "without the padding": (4096, 4000, [(2000, 1, 0), (2000, 0, 0)]),
    "cut short": (4096, 4096, [(1000, 1, 0), (0, 0, -errno.ENODATA)]),
    "cut short inside a direct block": (4096, 4096, [(1000, 1, 0), (-errno.EINVAL, 0, -errno.ENODATA)]),
    "refused": (4096, 4096, [(-errno.EINVAL, 0, -errno.EINVAL)]),
    "broken": (4096, 4096, [(1024, 1, 0), (-errno.EIO, 0, -errno.EIO)]),
}


@pytest.mark.parametrize("arrival", ARRIVALS)
def test_a_short_read_is_continued_and_only_the_end_of_the_file_ends_it(arrival: str) -> None:
    size, needed, steps = ARRIVALS[arrival]
    read, status = ffi.new("struct ms_read *"), ffi.new("int *")
    read.size_bytes, read.needed_bytes = size, needed
    for n, goes_on, expected in steps:
        assert (lib.ms_reader_progress(read, n, status), status[0]) == (goes_on, expected)


def test_uring_says_what_to_do_where_it_is_not_to_be_had() -> None:
    code, message = failure(lambda: native.reader("uring", 0).__enter__())
    assert code == -errno.EINVAL
    assert 'use reader="pread"' in message
