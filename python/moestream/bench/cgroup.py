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
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ..errors import MeasurementError
from .disk import BlockDevice

__all__ = ["GroupUsage", "LimitedGroup", "SystemdScope", "limited"]

_PREFIX = "moestream-bench-"

# Enter every group given before "--", then become the command: nothing of it runs, or is charged, outside.
_ENTER = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; exec "$@"'


# What limits the kernel holds a process to that runs this: "memory BYTES", and lines of io.max.
_OWN_LIMITS = 'folder=/sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup); echo memory $(cat "$folder/memory.max"); cat "$folder/io.max"; :'


@dataclass(frozen=True)
class GroupUsage:
    """What the kernel counted for the group: `peak_bytes` includes page cache, `oom_kills` processes it ended for memory."""

    peak_bytes: int
    oom_kills: int


class LimitedGroup:
    """A cgroup that exists inside the `with` block; what still runs in it at the end is killed.

    Args:
        memory_bytes: the memory limit; page cache counts, swap is not given. None for no limit: the group then only counts.
        read_bytes_per_s: reads from each of `devices` are held to this rate; None for no limit.
        devices: the disks that `read_bytes_per_s` is about.

    Attributes:
        kind: "cgroup v1" or "cgroup v2".

    Raises:
        MeasurementError: no memory controller, no right to make a group, or no read throttling; the message says which.
    """

    def __init__(
        self,
        *,
        memory_bytes: int | None,
        read_bytes_per_s: int | None = None,
        devices: Sequence[BlockDevice] = (),
    ) -> None:
        if read_bytes_per_s is not None and not devices:
            raise ValueError("a read limit needs the devices that it is about")
        self.kind = ""
        self._name = f"{_PREFIX}{os.getpid()}-{time.monotonic_ns()}"
        self._memory_bytes = memory_bytes
        self._read_rules = [(device, read_bytes_per_s) for device in devices] if read_bytes_per_s is not None else []
        self._folders: list[Path] = []

    def __enter__(self) -> LimitedGroup:
        try:
            mounts = _mounts()
            if "memory" in mounts:
                _remove_forgotten(mounts["memory"], *([mounts["blkio"]] if "blkio" in mounts else []))
                self._make_v1(mounts)
            elif "unified" in mounts and "memory" in _read(mounts["unified"] / "cgroup.controllers").split():
                _remove_forgotten(mounts["unified"])
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
        if self.kind == "cgroup v1":
            return GroupUsage(
                int(_read(folder / "memory.max_usage_in_bytes")), _counter(folder / "memory.oom_control", "oom_kill")
            )
        return usage_of_v2(folder)

    def _make_v1(self, mounts: dict[str, Path]) -> None:
        self.kind = "cgroup v1"
        memory = self._make_folder(mounts["memory"])
        if self._memory_bytes is not None:
            _write(memory / "memory.limit_in_bytes", self._memory_bytes)
            if (memory / "memory.memsw.limit_in_bytes").exists():
                _write(memory / "memory.memsw.limit_in_bytes", self._memory_bytes)
            else:  # a kernel that does not count swap: then none of it
                _write(memory / "memory.swappiness", 0)
        if self._read_rules:
            if "blkio" not in mounts:
                raise MeasurementError("a read limit needs the cgroup controller blkio, and it is not mounted here")
            folder = self._make_folder(mounts["blkio"])
            for device, rate in self._read_rules:
                _write(folder / "blkio.throttle.read_bps_device", f"{device.number} {rate}")

    def _make_v2(self, root: Path) -> None:
        self.kind = "cgroup v2"
        for controller in ["memory", "io"] if self._read_rules else ["memory"]:
            if controller not in _read(root / "cgroup.subtree_control").split():
                _write(root / "cgroup.subtree_control", f"+{controller}")
        folder = self._make_folder(root)
        if self._memory_bytes is not None:
            _write(folder / "memory.max", self._memory_bytes)
            if (folder / "memory.swap.max").exists():
                _write(folder / "memory.swap.max", 0)
        for device, rate in self._read_rules:
            _write(folder / "io.max", f"{device.number} rbps={rate}")

    def _make_folder(self, root: Path) -> Path:
        folder = root / self._name
        folder.mkdir()
        self._folders.append(folder)
        return folder

    def _remove(self) -> None:
        for folder in self._folders:
            _remove_group(folder)
        self._folders.clear()


class SystemdScope:
    """The same through systemd, which lets a user limit processes of his own: a transient scope a command.

    It is made when the first command with `prefix` starts, and goes when that ends. Its counters are read from its cgroup, so
    `usage` is to be asked while the command runs; what was known last counts afterwards.

    Args: as LimitedGroup has them.

    Raises:
        MeasurementError: there is no systemd-run, or it may not set these limits; the message has its words.
    """

    kind = "systemd-run"

    def __init__(
        self,
        *,
        memory_bytes: int | None,
        read_bytes_per_s: int | None = None,
        devices: Sequence[BlockDevice] = (),
    ) -> None:
        self._unit = f"{_PREFIX}{os.getpid()}-{time.monotonic_ns()}.scope"
        self._whose = "--system" if os.geteuid() == 0 else "--user"
        self._memory_bytes = memory_bytes
        self._read_rules = [(device, read_bytes_per_s) for device in devices] if read_bytes_per_s is not None else []
        self._properties = [] if memory_bytes is None else [f"MemoryMax={memory_bytes}", "MemorySwapMax=0"]
        self._properties += [f"IOReadBandwidthMax=/dev/{device.name} {rate}" for device, rate in self._read_rules]
        self._last = GroupUsage(0, 0)

    def __enter__(self) -> SystemdScope:
        if shutil.which("systemd-run") is None:
            raise MeasurementError("systemd-run is not installed")
        command = [*self._command(f"trial-{self._unit}"), "/bin/sh", "-c", _OWN_LIMITS]
        tried = subprocess.run(command, capture_output=True, text=True)
        if tried.returncode != 0:
            raise MeasurementError(
                f"systemd-run cannot set these limits: {' '.join(tried.stderr.split()) or tried.returncode}"
            )
        self._require_limits(tried.stdout)
        return self

    def _require_limits(self, has: str) -> None:
        """systemd says nothing where it was not given the controller that a limit needs, and leaves the limit out."""
        memory = next(
            (int(line.split()[1]) for line in has.splitlines() if re.fullmatch("memory [0-9]+", line)), math.inf
        )
        if self._memory_bytes is not None and memory > self._memory_bytes:
            raise MeasurementError(
                "systemd-run does not set a memory limit here, for it was not given the memory controller of cgroup v2 "
                "(Delegate=memory of user@.service)"
            )
        # Of a logical volume systemd limits the disk beneath, whose number is another.
        if any(f" rbps={rate} " not in has for _, rate in self._read_rules):
            raise MeasurementError(
                "systemd-run does not set a read limit here, for it was not given the io controller of cgroup v2 "
                "(Delegate=io of user@.service)"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run(["systemctl", self._whose, "kill", "--signal=KILL", self._unit], capture_output=True)

    @property
    def prefix(self) -> list[str]:
        """What to put before a command's words so that it runs in the scope."""
        return self._command(self._unit)

    def usage(self) -> GroupUsage:
        """Peak and kills so far, as far as the kernel told while the command ran."""
        asked = ["systemctl", self._whose, "show", "--property=ControlGroup,Result", self._unit]
        answer = subprocess.run(asked, capture_output=True, text=True).stdout
        values = dict(line.split("=", 1) for line in answer.splitlines() if "=" in line)
        folder = Path("/sys/fs/cgroup") / values.get("ControlGroup", "").lstrip("/")
        if values.get("ControlGroup") and folder.is_dir():
            self._last = usage_of_v2(folder)
        elif values.get("Result") == "oom-kill":
            self._last = GroupUsage(self._last.peak_bytes, max(1, self._last.oom_kills))
        return self._last

    def _command(self, unit: str) -> list[str]:
        properties = [word for entry in self._properties for word in ("--property", entry)]
        return ["systemd-run", self._whose, "--scope", "--quiet", f"--unit={unit}", *properties, "--"]


def limited(
    *, memory_bytes: int | None, read_bytes_per_s: int | None = None, devices: Sequence[BlockDevice] = ()
) -> LimitedGroup | SystemdScope:
    """A group with these limits, made in whichever way this user may: a cgroup of our own, else systemd's.

    It is not entered yet.

    Raises:
        MeasurementError: neither can be done; the message has both reasons.
    """
    options = {"memory_bytes": memory_bytes, "read_bytes_per_s": read_bytes_per_s, "devices": devices}
    try:
        with LimitedGroup(**options):
            return LimitedGroup(**options)
    except MeasurementError as direct:
        try:
            with SystemdScope(**options):
                return SystemdScope(**options)
        except MeasurementError as systemd:
            raise MeasurementError(f"{direct}; and {systemd}") from direct


def usage_of_v2(folder: Path) -> GroupUsage:
    """Peak and kills of a v2 group.

    Raises:
        MeasurementError: this kernel does not keep the peak.
    """
    if not (folder / "memory.peak").exists():
        raise MeasurementError(
            "this kernel has no memory.peak, so a cgroup's peak cannot be read; Linux 5.19 and later have it"
        )
    return GroupUsage(int(_read(folder / "memory.peak")), _counter(folder / "memory.events", "oom_kill"))


def _remove_forgotten(*roots: Path) -> None:
    """Groups of processes of ours that were killed before they could remove them."""
    for root in roots:
        for folder in root.glob(f"{_PREFIX}*"):
            owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
            if owner.isdigit() and not Path("/proc", owner).exists():
                _remove_group(folder)


def _remove_group(folder: Path) -> None:
    # A group can be removed only once its last process is gone from it, which takes a moment after the kill.
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            for process in _read(folder / "cgroup.procs").split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.05)


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
