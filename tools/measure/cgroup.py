"""A command under a memory limit and a read-bandwidth limit, by cgroup v1 or v2.

    with LimitedGroup(memory_bytes=6000 << 20) as group:
        subprocess.run([*group.prefix, "python", "decode.py"])
        print(group.usage())

The group is made directly below the root of its hierarchy: in v2 a group that holds processes may not hand controllers to
children, and the group we run in holds us. The kernel charges page cache to the group whose process first touched it, so drop
the caches before a limited run or the file's pages stay free of charge (`disk.drop_caches`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from .disk import BlockDevice
from .figure import MeasurementError

__all__ = ["GroupUsage", "LimitedGroup"]

# Enter every group given before "--", then become the command: nothing of it runs, or is charged, outside.
_ENTER = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@"'


@dataclass(frozen=True)
class GroupUsage:
    """What the kernel counted for the group: `peak_bytes` includes page cache, `oom_kills` processes it ended for memory."""

    peak_bytes: int
    oom_kills: int


class LimitedGroup:
    """A cgroup that exists inside the `with` block; what still runs in it at the end is killed.

    Args:
        memory_bytes: the memory limit; page cache counts, swap is not given.
        read_bytes_per_s: reads from `device` are held to this rate; None for no limit.
        device: the disk that `read_bytes_per_s` is about.

    Raises:
        MeasurementError: no memory controller, no right to make a group, or no read throttling; the message says which.
    """

    def __init__(
        self, *, memory_bytes: int, read_bytes_per_s: int | None = None, device: BlockDevice | None = None
    ) -> None:
        if read_bytes_per_s is not None and device is None:
            raise ValueError("a read limit needs the device that it is about")
        self._name = f"moestream-figures-{os.getpid()}-{time.monotonic_ns()}"
        self._memory_bytes = memory_bytes
        self._read_rule = None if read_bytes_per_s is None else (device, read_bytes_per_s)
        self._folders: list[Path] = []
        self._version = 0

    def __enter__(self) -> LimitedGroup:
        try:
            mounts = _mounts()
            if "memory" in mounts:
                self._make_v1(mounts)
            elif "unified" in mounts and "memory" in _read(mounts["unified"] / "cgroup.controllers").split():
                self._make_v2(mounts["unified"])
            else:
                raise MeasurementError(
                    "a memory limit needs a cgroup memory controller (v1 or v2), and none is mounted here"
                )
        except OSError as error:
            self._remove()
            raise MeasurementError(
                f"cannot make a memory-limited cgroup: {error}; it takes root and a writable /sys/fs/cgroup"
            ) from error
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    @property
    def prefix(self) -> list[str]:
        """What to put before a command's words so that it runs in the group."""
        return ["/bin/sh", "-c", _ENTER, "enter", *(str(folder / "cgroup.procs") for folder in self._folders), "--"]

    def usage(self) -> GroupUsage:
        """Peak and kills so far.

        Raises:
            MeasurementError: this kernel does not keep a v2 group's peak (it does from 5.19 on).
        """
        folder = self._folders[0]
        if self._version == 1:
            return GroupUsage(
                int(_read(folder / "memory.max_usage_in_bytes")), _counter(folder / "memory.oom_control", "oom_kill")
            )
        if not (folder / "memory.peak").exists():
            raise MeasurementError(
                "this kernel has no memory.peak, so a cgroup's peak cannot be read; Linux 5.19 and later have it"
            )
        return GroupUsage(int(_read(folder / "memory.peak")), _counter(folder / "memory.events", "oom_kill"))

    def _make_v1(self, mounts: dict[str, Path]) -> None:
        self._version = 1
        memory = self._make_folder(mounts["memory"])
        _write(memory / "memory.limit_in_bytes", self._memory_bytes)
        if (memory / "memory.memsw.limit_in_bytes").exists():
            _write(memory / "memory.memsw.limit_in_bytes", self._memory_bytes)
        if self._read_rule is not None:
            device, rate = self._read_rule
            if "blkio" not in mounts:
                raise MeasurementError("a read limit needs the cgroup controller blkio, and it is not mounted here")
            _write(self._make_folder(mounts["blkio"]) / "blkio.throttle.read_bps_device", f"{device.number} {rate}")

    def _make_v2(self, root: Path) -> None:
        self._version = 2
        for controller in ["memory"] if self._read_rule is None else ["memory", "io"]:
            if controller not in _read(root / "cgroup.subtree_control").split():
                _write(root / "cgroup.subtree_control", f"+{controller}")
        folder = self._make_folder(root)
        _write(folder / "memory.max", self._memory_bytes)
        if (folder / "memory.swap.max").exists():
            _write(folder / "memory.swap.max", 0)
        if self._read_rule is not None:
            device, rate = self._read_rule
            _write(folder / "io.max", f"{device.number} rbps={rate}")

    def _make_folder(self, root: Path) -> Path:
        folder = root / self._name
        folder.mkdir()
        self._folders.append(folder)
        return folder

    def _remove(self) -> None:
        for folder in self._folders:
            # A group can be removed only once its last process is gone from it, which takes a moment after the kill.
            for _ in range(100):
                for process in _read(folder / "cgroup.procs").split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(process), signal.SIGKILL)
                try:
                    folder.rmdir()
                    break
                except OSError:
                    time.sleep(0.05)
        self._folders.clear()


def _mounts() -> dict[str, Path]:
    """Where each v1 controller is mounted, and the v2 hierarchy under "unified"."""
    found: dict[str, Path] = {}
    for line in _read(Path("/proc/self/mountinfo")).splitlines():
        mount, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        point = Path(mount.split()[4])
        if kind == "cgroup2":
            found.setdefault("unified", point)
        elif kind == "cgroup":
            for controller in options.split(","):
                found.setdefault(controller, point)
    return found


def _counter(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in _read(path).splitlines() if line.split()[0] == name), 0)


def _read(path: Path) -> str:
    return path.read_text()


def _write(path: Path, value: object) -> None:
    path.write_text(f"{value}\n")
