"""Files below the page cache: cold reads, what the disk gives at best, room for large files."""

from __future__ import annotations

import concurrent.futures
import json
import mmap
import os
import queue
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moestream.bench.disk import block_device_of, drop_caches

from .figure import MeasurementError

__all__ = ["FioJob", "scratch_folder", "seconds_to_read_cold", "seconds_to_read_slices"]

@contextmanager
def scratch_folder(needed_bytes: int, *, keep: bool = False) -> Iterator[Path]:
    """A folder on a disk with room for `needed_bytes`, deleted at the end unless kept. Memory file systems are no disk.

    Raises:
        MeasurementError: neither TMPDIR nor /var/tmp has a disk with that much room.
    """
    for parent in (Path(tempfile.gettempdir()), Path("/var/tmp")):
        try:
            block_device_of(parent)
        except (MeasurementError, OSError):
            continue
        if shutil.disk_usage(parent).free > needed_bytes:
            folder = Path(tempfile.mkdtemp(prefix="moestream-figures-", dir=parent))
            try:
                yield folder
            finally:
                if not keep:
                    shutil.rmtree(folder)
            return
    raise MeasurementError(
        f"no disk with {needed_bytes / 1e9:.1f} GB free for the model; set TMPDIR to one, or give --model FILE"
    )


# ---------------------------------------------------------------------------------------------------------------- cold reads


def seconds_to_read_cold(path: Path, ranges: Iterable[tuple[int, int]]) -> float:
    """Seconds that plain preads take for the (offset, size) ranges of a file, nothing of it cached before."""
    ranges = sorted(ranges)
    buffer = memoryview(bytearray(4 << 20))
    drop_caches(path)
    file = os.open(path, os.O_RDONLY)
    try:
        start = time.perf_counter()
        for offset, size in ranges:
            end = offset + size
            while offset < end:
                got = os.preadv(file, [buffer[: min(len(buffer), end - offset)]], offset)
                if got == 0:
                    raise MeasurementError(f"{path} ends at byte {offset}, inside its tensors")
                offset += got
        return time.perf_counter() - start
    finally:
        os.close(file)


def seconds_to_read_slices(path: Path, slices: Iterable[tuple[int, int]], *, depth: int, direct: bool) -> float:
    """Seconds that one read for each (offset, size) takes, in their order, `depth` of them at a time, nothing cached before.

    Direct reads begin and end on pages, as the engine's do.
    """
    page = mmap.PAGESIZE
    rounded = [(offset // page * page, -(-(offset + size) // page) * page) for offset, size in slices]
    longest = max(end - start for start, end in rounded)
    drop_caches(path)
    file = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        # Page-aligned, as direct reads want it. A thread takes a buffer that no other has.
        free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        for _ in range(depth):
            free.put(mmap.mmap(-1, longest))

        def read(run: tuple[int, int]) -> None:
            buffer = free.get()
            start, end = run
            with memoryview(buffer) as view:
                while start < end:
                    got = os.preadv(file, [view[: end - start]], start)
                    if got == 0:  # the file ends in the middle of a page
                        break
                    start += got
            free.put(buffer)

        with concurrent.futures.ThreadPoolExecutor(depth) as threads:
            begun = time.perf_counter()
            list(threads.map(read, rounded))
            return time.perf_counter() - begun
    finally:
        os.close(file)


# ----------------------------------------------------------------------------------------------------------------------- fio


@dataclass(frozen=True)
class FioJob:
    """Random reads of `size_bytes`, `depth` at a time, anywhere in a file; `direct` passes by the page cache.

    Direct reads start and end on disk blocks, so the size is rounded up to whole ones.
    """

    path: Path
    size_bytes: int
    depth: int
    direct: bool = True

    def bytes_per_s(self, seconds: float) -> float:
        """Read for that long and say how fast it went.

        Raises:
            MeasurementError: fio is not installed, or failed.
        """
        if shutil.which("fio") is None:
            raise MeasurementError(
                "fio is not installed, and it is the reference for read bandwidth: apt-get install fio, or your system's equivalent"
            )
        block_bytes = -(-self.size_bytes // 4096) * 4096 if self.direct else self.size_bytes
        command = [
            "fio",
            "--name=reference",
            f"--filename={self.path}",
            "--readonly",
            "--rw=randread",
            "--norandommap",
            "--randrepeat=0",
        ]
        command += [f"--bs={block_bytes}", f"--iodepth={self.depth}", f"--direct={int(self.direct)}"]
        command += ["--time_based", f"--runtime={seconds * 1000:.0f}ms", "--output-format=json"]
        # io_uring may be forbidden (containers, sysctl); libaio is the same queue of direct reads by the older call.
        for engine in ("io_uring", "libaio"):
            answer = subprocess.run(
                [*command, f"--ioengine={engine}"], capture_output=True, text=True, timeout=seconds + 60
            )
            if answer.returncode == 0:
                return float(json.loads(answer.stdout)["jobs"][0]["read"]["bw_bytes"])
        raise MeasurementError(f"fio failed: {(answer.stderr or answer.stdout).strip()[-400:]}")
