"""How many bytes a second all cores read from memory together, in a loop that does nothing else.

    with MemoryReader(bytes=3 << 29) as memory:
        print(memory.bytes_per_s())

The loop is C, compiled when it is needed: NumPy's sums do not reach what the memory gives.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import mmap
import os
import tempfile
import time
from pathlib import Path
from types import TracebackType

from .compiler import shared_library

__all__ = ["MemoryReader"]

# Several sums, so that adding never waits for the addition before; what it returns keeps the reads from being left out.
_SOURCE = """
#include <stddef.h>
#include <stdint.h>
uint64_t total(const uint64_t *words, size_t n) {
    uint64_t sums[16] = {0};
    for (size_t i = 0; i + 16 <= n; i += 16)
        for (int k = 0; k < 16; k++) sums[k] += words[i + k];
    uint64_t all = 0;
    for (int k = 0; k < 16; k++) all += sums[k];
    return all;
}
"""
PASSES = 6


class MemoryReader:
    """Memory that no cache holds, written once, inside the `with` block.

    Args:
        bytes: How much; more than a GiB passes by any cache.

    Raises:
        MeasurementError: there is no C compiler.
    """

    def __init__(self, *, bytes: int) -> None:
        self._threads = len(os.sched_getaffinity(0))
        self._part_bytes = bytes // self._threads // mmap.PAGESIZE * mmap.PAGESIZE

    def __enter__(self) -> MemoryReader:
        self._total = _compiled()
        self._memory = mmap.mmap(-1, self._part_bytes * self._threads)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # As the slots of experts are: with small pages it would be address translation that is measured.
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ctypes.memset(self._start, 1, self._part_bytes * self._threads)
        self._pool = concurrent.futures.ThreadPoolExecutor(self._threads)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def bytes_per_s(self) -> float:
        """The best of some passes: a limit is what the memory gives when nothing disturbs."""
        return max(self._pass() for _ in range(PASSES))

    def _pass(self) -> float:
        begun = time.perf_counter()
        list(self._pool.map(self._read_part, range(self._threads)))
        return self._part_bytes * self._threads / (time.perf_counter() - begun)

    def _read_part(self, index: int) -> None:
        # ctypes lets other threads run meanwhile.
        self._total(self._start + index * self._part_bytes, self._part_bytes // 8)


def _compiled() -> ctypes._CFuncPtr:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "total.c")
        source.write_text(_SOURCE)
        total = ctypes.CDLL(str(shared_library(source, Path(folder)))).total  # which stays loaded when the file is gone
    total.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    total.restype = ctypes.c_uint64
    return total
