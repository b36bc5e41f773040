"""Disks beneath files: which one holds a file, the page cache emptied of it, a loop device with a readahead of our choice."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import MeasurementError

__all__ = ["SECTOR_BYTES", "BlockDevice", "block_device_of", "drop_caches", "loop_device", "mount_point"]

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
        MeasurementError: the file is on no block device, as on tmpfs or a network share, or on one that is not to be seen here.
    """
    try:
        return _block_device_of(path)
    except OSError as error:
        raise MeasurementError(f"the disk that holds {path} is not to be seen here: {error}") from error


def _block_device_of(path: Path) -> BlockDevice:
    number = os.stat(path).st_dev
    if os.major(number) == 0:
        # Overlay and btrfs report a device of their own; the mount names the one beneath.
        _, source = _mount_of(path)
        if not source.startswith("/dev/"):
            raise MeasurementError(f"{path} is not on a block device (mounted from {source}); put it on a disk")
        number = os.stat(source).st_rdev
    folder = Path("/sys/dev/block", f"{os.major(number)}:{os.minor(number)}").resolve()
    if (folder / "partition").exists():
        folder = folder.parent
    return BlockDevice(folder.name, (folder / "dev").read_text().strip())


def _mount_of(path: Path) -> tuple[str, str]:
    """Kind and source of the file system that holds it."""
    inside = path.resolve()
    deepest, found = 0, ("", "nothing")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, rest = line.partition(" - ")
        point = Path(mount_point(mount.split()[4]))
        if inside.is_relative_to(point) and len(point.parts) >= deepest:
            kind, source, *_ = rest.split()
            deepest, found = len(point.parts), (kind, source)
    return found


def mount_point(written: str) -> str:
    """As mountinfo writes it, which has blanks as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), written)


def drop_caches(path: Path) -> None:
    """Make sure that nothing of the file is in the page cache. As root the whole cache goes, also that of loop devices.

    Raises:
        MeasurementError: some of the file stayed, because another process holds it mapped, or because it is in memory only.
    """
    with open(path, "rb") as file:
        # Dirty pages cannot be dropped.
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # root of a container may not; then the file's own pages are gone
            Path("/proc/sys/vm/drop_caches").write_text("3\n")
    if shutil.which("fincore"):
        answer = subprocess.run(
            ["fincore", "--bytes", "--noheadings", "--output", "RES", path], capture_output=True, text=True, check=True
        )
        left_bytes = int(answer.stdout)
        if left_bytes > path.stat().st_size // 100:
            in_memory = _mount_of(path)[0] in ("tmpfs", "ramfs")
            why = "its file system is memory; put it on a disk" if in_memory else "another process holds them mapped"
            raise MeasurementError(f"{left_bytes / 1e6:.0f} MB of {path} stay in the page cache: {why}")


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
