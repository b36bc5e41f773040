"""Files below the page cache: their disk, cold reads, what the disk gives at best, a loop device with a readahead of our choice."""

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

from .figure import MeasurementError

__all__ = [
    "SECTOR_BYTES",
    "BlockDevice",
    "FioJob",
    "block_device_of",
    "drop_caches",
    "loop_device",
    "scratch_folder",
    "seconds_to_read_cold",
    "seconds_to_read_slices",
]

SECTOR_BYTES = 512


@dataclass(frozen=True)
class BlockDevice:
    """A whole disk, as sysfs knows it: `vda`, `254:0`."""

    name: str
    number: str

    @property
    def read_ahead_kib(self) -> int:
        return int(Path("/sys/block", self.name, "queue/read_ahead_kb").read_text())


def block_device_of(path: Path) -> BlockDevice:
    """The disk that holds a file; for a partition, the disk that it is part of (throttles and readahead belong to disks).

    Raises:
        MeasurementError: the file is on no block device, as on tmpfs or a network share.
    """
    number = os.stat(path).st_dev
    if os.major(number) == 0:
        # Overlay and btrfs report a device of their own; the mount names the one beneath.
        source = _mount_source(path)
        if not source.startswith("/dev/"):
            raise MeasurementError(f"{path} is not on a block device (mounted from {source}); put it on a disk")
        number = os.stat(source).st_rdev
    folder = Path("/sys/dev/block", f"{os.major(number)}:{os.minor(number)}").resolve()
    if (folder / "partition").exists():
        folder = folder.parent
    return BlockDevice(folder.name, (folder / "dev").read_text().strip())


def _mount_source(path: Path) -> str:
    inside = path.resolve()
    best: tuple[int, str] = (0, "nothing")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, rest = line.partition(" - ")
        point = Path(mount.split()[4])
        if inside.is_relative_to(point) and len(point.parts) >= best[0]:
            best = (len(point.parts), rest.split()[1])
    return best[1]


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


def drop_caches(path: Path) -> None:
    """Make sure that nothing of the file is in the page cache. As root the whole cache goes, also that of loop devices.

    Raises:
        MeasurementError: some of the file stayed, because another process holds it mapped.
    """
    with open(path, "rb") as file:
        # Dirty pages cannot be dropped.
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    if shutil.which("fincore"):
        answer = subprocess.run(
            ["fincore", "--bytes", "--noheadings", "--output", "RES", path], capture_output=True, text=True, check=True
        )
        left_bytes = int(answer.stdout)
        if left_bytes > path.stat().st_size // 100:
            raise MeasurementError(
                f"{left_bytes / 1e6:.0f} MB of {path} stay in the page cache: another process holds them mapped"
            )


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


# --------------------------------------------------------------------------------------------------------------- loop device


@contextmanager
def loop_device(path: Path, *, read_ahead_kib: int) -> Iterator[Path]:
    """The file as a read-only block device of its own, with direct I/O beneath and the readahead given.

    A file mapped through it faults with that readahead, whatever the disk below is set to; direct I/O keeps the data from being
    cached twice.

    Raises:
        MeasurementError: not root, no loop devices here, or a file that is no whole number of sectors.
    """
    if path.stat().st_size % SECTOR_BYTES:
        raise MeasurementError(
            f"{path} is not a multiple of {SECTOR_BYTES} bytes, so a loop device would cut its end off; "
            f"`truncate -s %{SECTOR_BYTES} {path}` adds the zeros, which readers of GGUF ignore"
        )
    try:
        command = ["losetup", "--find", "--show", "--read-only", "--direct-io=on", path]
        device = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    except FileNotFoundError as error:
        raise MeasurementError("losetup is not installed; it is part of util-linux") from error
    except subprocess.CalledProcessError as error:
        raise MeasurementError(
            f"cannot make a loop device: {error.stderr.strip()}; it takes root and /dev/loop-control"
        ) from error
    try:
        queue = Path("/sys/block", device.name)
        if (queue / "loop/dio").read_text().strip() != "1":
            raise MeasurementError(f"{device} took no direct I/O: the file system of {path} does not support it")
        (queue / "queue/read_ahead_kb").write_text(f"{read_ahead_kib}\n")
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)
