"""What this machine is, and what else happened on it while something was measured.

>>> machine, disk = describe_machine(), describe_disk("model.gguf")
>>> with Watch() as watch:
...     measure()
>>> watch.busy
('other processes used 0.62 of 2 cores while it was measured (the most: firefox, pid 4312)',)

What a system does not tell is None or empty, never an error: a container without sensors, a kernel without cpufreq,
macOS. Everything that is read stands below ``root``, so that a tree of files can be any machine.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import llama_cpp
import psutil
from cffi import FFI

from .. import _native
from .._threads import usable_cores
from ..errors import MeasurementError
from .disk import block_device_of, mount_point

__all__ = ["Disk", "Machine", "Watch", "describe_disk", "describe_machine"]

ROOT = Path("/")

FLAGS = (
    *("ssse3", "avx", "avx2", "avx_vnni", "f16c", "fma", "bmi2"),
    *("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512_vnni", "avx512_bf16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "sme"),
)
"""The instructions that ggml or our kernels have code for, as Linux calls them; `asimd` is NEON."""

HYPERVISORS = ("QEMU", "KVM", "VMware", "innotek", "Xen", "Bochs", "Parallels", "Amazon EC2", "Virtual Machine")
"""What the firmware of virtual machines calls its maker or product."""

CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal", "cpu-thermal", "x86_pkg_temp")


@dataclass(frozen=True)
class Machine:
    """A machine, as far as it bears on speed.

    Attributes:
        cores_usable: Logical cores that this process may use.
        flags: Those of :data:`FLAGS` that it has.
        frequency_mhz: (now, at most) of the fastest core.
        virtual: The hypervisor, "unnamed" if it hides its name; None if there is none to be seen.
        versions: Of moestream, llama-cpp-python, llama.cpp, ggml and numpy; ``ggml-commit`` as its build wrote it.
        commit: Git commit of what moestream was installed from, with "-dirty" if the folder has changes; None if it
            came from no checkout.
    """

    cpu: str
    architecture: str
    cores_physical: int | None
    cores_logical: int | None
    cores_usable: int
    flags: tuple[str, ...]
    governor: str | None
    frequency_mhz: tuple[float, float] | None
    memory_bytes: int
    swap_bytes: int
    kernel: str
    system: str
    virtual: str | None
    python: str
    versions: dict[str, str]
    commit: str | None

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return _json_ready(dataclasses.asdict(self))


@dataclass(frozen=True)
class Disk:
    """The whole disk that holds a file, and the file system on it.

    Attributes:
        device: "nvme0n1", "" if the file is on no block device.
        model: As the disk calls itself; of a logical volume, those beneath it. "" if it does not say.
        mount: Where the file system is mounted; the user's home is "~".
        size_bytes: Of the file system.
        read_ahead_kib: What the kernel reads ahead for mapped files.
    """

    device: str
    model: str
    file_system: str
    mount: str
    size_bytes: int
    rotational: bool | None
    read_ahead_kib: int | None
    scheduler: str | None

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return _json_ready(dataclasses.asdict(self))


def _json_ready(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def _text(path: Path) -> str:
    """What a file of the kernel says; "" if it is not there or not for us."""
    try:
        return path.read_text(errors="replace").strip("\0\n ")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else None


def _numbers(paths: Iterable[Path]) -> list[int]:
    return [number for path in paths if (number := _number(path)) is not None]


# ---------------------------------------------------------------------------------------------------------- the machine


def describe_machine(*, root: Path = ROOT) -> Machine:
    """What this machine is. Takes some 10 ms, for git is asked too."""
    cpuinfo = _cpuinfo(root)
    return Machine(
        cpu=_cpu_name(cpuinfo, root),
        architecture=platform.machine(),
        cores_physical=psutil.cpu_count(logical=False),
        cores_logical=psutil.cpu_count(),
        cores_usable=usable_cores(),
        flags=tuple(flag for flag in FLAGS if flag in _cpu_flags(cpuinfo)),
        governor=_governor(root),
        frequency_mhz=_frequency_mhz(root),
        memory_bytes=psutil.virtual_memory().total,
        swap_bytes=psutil.swap_memory().total,
        kernel=f"{platform.system()} {platform.release()}",
        system=_system(root),
        virtual=_hypervisor(cpuinfo, root),
        python=platform.python_version(),
        versions=_versions(),
        commit=_commit(importlib.metadata.distribution("moestream").read_text("direct_url.json")),
    )


def _cpuinfo(root: Path) -> list[tuple[str, str]]:
    lines = (line.partition(":") for line in _text(root / "proc/cpuinfo").splitlines())
    return [(name.strip(), value.strip()) for name, _, value in lines]


def _cpu_name(cpuinfo: list[tuple[str, str]], root: Path) -> str:
    for name, value in cpuinfo:
        if name == "model name":
            return value
    # ARM tells numbers, for each core; those of one machine may differ.
    makers = [value for name, value in cpuinfo if name == "CPU implementer"]
    parts = [value for name, value in cpuinfo if name == "CPU part"]
    cores = ", ".join(
        f"implementer {maker} part {part}" for maker, part in dict.fromkeys(zip(makers, parts, strict=False))
    )
    board = _text(root / "proc/device-tree/model")
    if board and cores:
        return f"{board} ({cores})"
    return board or cores or platform.processor() or platform.machine()


def _cpu_flags(cpuinfo: list[tuple[str, str]]) -> frozenset[str]:
    return frozenset(flag for name, value in cpuinfo if name in ("flags", "Features") for flag in value.split())


def _frequency_folders(root: Path) -> list[Path]:
    return sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq"))


def _governor(root: Path) -> str | None:
    governors = {_text(folder / "scaling_governor") for folder in _frequency_folders(root)} - {""}
    return ", ".join(sorted(governors)) or None


def _frequency_mhz(root: Path) -> tuple[float, float] | None:
    folders = _frequency_folders(root)
    now = _numbers(folder / "scaling_cur_freq" for folder in folders)
    most = _numbers(folder / "cpuinfo_max_freq" for folder in folders)
    return (max(now) / 1000, max(most) / 1000) if now and most else None


def _system(root: Path) -> str:
    if match := re.search(r'^PRETTY_NAME="?([^"\n]*)', _text(root / "etc/os-release"), re.MULTILINE):
        return match[1]
    mac = platform.mac_ver()[0]
    return f"macOS {mac}" if mac else platform.system()


def _hypervisor(cpuinfo: list[tuple[str, str]], root: Path) -> str | None:
    firmware = f"{_text(root / 'sys/class/dmi/id/sys_vendor')} {_text(root / 'sys/class/dmi/id/product_name')}".strip()
    told = _text(root / "sys/hypervisor/type") or _text(root / "proc/device-tree/hypervisor/compatible")
    if told:
        return told
    if "hypervisor" in _cpu_flags(cpuinfo):
        return firmware or "unnamed"
    # ARM has no such flag. Amazon's machines without a hypervisor carry its name too, but are called "metal".
    named = any(name in firmware for name in HYPERVISORS) and not firmware.endswith("metal")
    return firmware if named else None


def _versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("moestream", "llama-cpp-python", "numpy")}
    ffi = FFI()
    ffi.cdef("const char * ggml_version(void); const char * ggml_commit(void);")
    ggml = ffi.dlopen(str(_native.LIBRARY))  # which is linked against ggml
    return {
        **packages,
        "llama.cpp": llama_cpp.llama_version().decode(),
        "ggml": ffi.string(ggml.ggml_version()).decode(),
        "ggml-commit": ffi.string(ggml.ggml_commit()).decode(),
    }


def _commit(direct_url: str | None) -> str | None:
    """The commit of what pip noted as the origin of an installed package (direct_url.json, PEP 610)."""
    origin = json.loads(direct_url or "{}")
    if "vcs_info" in origin:
        return origin["vcs_info"].get("commit_id")
    url = urllib.parse.urlparse(origin.get("url", ""))
    folder = Path(urllib.request.url2pathname(url.path))
    # Only of a checkout of ours, not of one in which our sources happen to lie.
    if url.scheme != "file" or not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=10, env={**environment, "GIT_OPTIONAL_LOCKS": "0"}
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None


# ------------------------------------------------------------------------------------------------------------- the disk


@dataclass(frozen=True)
class _Mount:
    point: str
    file_system: str


def describe_disk(path: str | os.PathLike[str], *, root: Path = ROOT) -> Disk:
    """The disk that holds a file or folder; for a partition, the disk that it is part of.

    Raises:
        OSError: there is no such file, or it cannot be looked at.
    """
    path = Path(path).resolve(strict=True)
    mount = _mount_of(path, root)
    space = os.statvfs(path)
    try:
        device = block_device_of(path).name
    except (MeasurementError, OSError):  # in memory, on a network, laid over others; or no Linux
        device = ""
    queue = root / "sys/block" / device / "queue"
    rotational = _number(queue / "rotational") if device else None
    return Disk(
        device=device,
        model=_disk_model(root / "sys/block" / device) if device else "",
        file_system=mount.file_system,
        mount=_without_home(mount.point),
        size_bytes=space.f_blocks * space.f_frsize,
        rotational=None if rotational is None else bool(rotational),
        read_ahead_kib=_number(queue / "read_ahead_kb") if device else None,
        scheduler=_scheduler(queue) if device else None,
    )


def _mount_of(path: Path, root: Path) -> _Mount:
    mounts = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, source = line.partition(" - ")
        mounts.append(_Mount(mount_point(mount.split()[4]), source.split()[0]))
    if not mounts:
        mounts = [_Mount(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]
    holding = [mount for mount in mounts if path.is_relative_to(mount.point)]
    # Of two on one folder the later hides the earlier.
    return max(reversed(holding), key=lambda mount: len(Path(mount.point).parts), default=_Mount("", ""))


def _without_home(mount: str) -> str:
    """The mount point without the user's home and name, for records are shown to others."""
    home = Path.home().resolve()
    if home == Path("/"):
        return mount
    if Path(mount).is_relative_to(home):
        return str(Path("~", Path(mount).relative_to(home)))
    return str(Path(*("~" if part == home.name else part for part in Path(mount).parts)))


def _disk_model(block: Path) -> str:
    own = _text(block / "device/model") or _text(block / "device/name")
    if own:
        return own
    beneath = [link.resolve() for link in sorted(block.glob("slaves/*"))]
    whole = [folder.parent if (folder / "partition").exists() else folder for folder in beneath]
    return " + ".join(model for folder in dict.fromkeys(whole) if (model := _disk_model(folder)))


def _scheduler(queue: Path) -> str | None:
    text = _text(queue / "scheduler")
    chosen = re.search(r"\[(.*?)\]", text)
    return chosen[1] if chosen else text or None


# ------------------------------------------------------------------------------------------------ while it was measured

SAMPLE_S = 1.0
"""Some counters of energy go round within minutes, and a core's frequency says nothing once the work is over."""

OTHER_SHARE = 0.03
"""Of all cores. All threads of an operation wait for the slowest, so that on two cores 0.06 of one costs up to 6%; an
idle desktop takes less."""

OTHER_LEAST_S = 0.1
"""The kernel counts in ticks of a hundredth second, and the use of cores and that of processes by different means."""

BLAMED_SHARE = 0.25
"""Of what all others used; naming one that used less would blame the wrong one. (A container does not show all.)"""

LOAD_SHARE = 0.5
"""Running threads a core during the minute before: caches are another's, and the processor is warm."""

STEAL_SHARE = 0.02
"""Of all cores. Quiet virtual machines lose some tenths of a percent."""

STALL_SHARE = 0.05
"""Of the time, in which something waited for memory; what a machine does now and then is far below."""

SHORT_SHARE = 0.1
"""Of memory. If more is available, what waited did so under a limit of its own, and that may be what is measured."""

SWAPPED_LEAST_BYTES = 1 << 20
"""Single pages come and go at any time."""

SLOW_CLOCK = 0.6
"""Of the highest frequency. All cores together run slower than one alone, on laptops at two thirds."""

CLOCKED_CORES = 0.5
"""Cores in use by what is measured. With fewer it mostly waits, and the clock goes down rightly."""

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Watch:
    """What happened on the machine inside the ``with`` block. A thread looks once a second.

    Args:
        pids: Processes that do the work, beside this one. Descendants belong to it, also those that have ended. One
            that is not a descendant of this process must live until the end of the block, or its work counts as that
            of others.

    Attributes:
        energy_j: Energy of all processor packages (RAPL), including what other processes used. None if the system does
            not tell, or only root.
        temperature_c: Of the processor at the end, the hottest of its sensors. None if there are none.
        busy: What may have disturbed the measurement, in sentences. Empty if nothing did, and where the system does not
            tell, as outside of Linux.
    """

    def __init__(self, pids: Iterable[int] = (), *, root: Path = ROOT) -> None:
        self.energy_j: float | None = None
        self.temperature_c: float | None = None
        self.busy: tuple[str, ...] = ()
        self._pids = frozenset({os.getpid(), *pids})
        self._root = root
        self._over = threading.Event()

    def __enter__(self) -> Watch:
        self._samples = _Samples(self._root)
        self._before = _State.of(self._root)
        self._thread = threading.Thread(target=self._look, name="moestream-watch", daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._samples.take()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._samples.take()
        after = _State.of(self._root)
        self.energy_j = self._samples.energy_j
        self.temperature_c = _temperature_c(self._root)
        if self._before and after and sum(after.ticks) > sum(self._before.ticks):
            span = _Span(self._before, after, self._samples, self._pids)
            self.busy = tuple(_disturbances(span, self._root))


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    name: str
    started: int
    ticks: int
    """Of itself and of its children that have ended and were waited for."""
    of_kernel: bool

    @property
    def key(self) -> tuple[int, int]:
        """Numbers of processes are used again."""
        return self.pid, self.started


Processes = dict[tuple[int, int], _Process]
Members = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class _State:
    """What the kernel has counted until now."""

    ticks: tuple[int, ...]
    """Of all cores: user, nice, system, idle, iowait, irq, softirq, steal."""
    cores: int
    processes: Processes
    load: float
    swapped_pages: int
    stalled_us: int | None
    throttled: dict[Path, int]

    @staticmethod
    def of(root: Path) -> _State | None:
        """None where there is no such kernel."""
        stat = _text(root / "proc/stat")
        line = re.search(r"^cpu ([ 0-9]+)$", stat, re.MULTILINE)
        if line is None:
            return None
        stall = re.search(r"^some .*total=([0-9]+)", _text(root / "proc/pressure/memory"), re.MULTILINE)
        counters = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/*_throttle_count")
        swapped = re.findall(r"^pswp(?:in|out) ([0-9]+)$", _text(root / "proc/vmstat"), re.MULTILINE)
        return _State(
            ticks=tuple(int(ticks) for ticks in line[1].split()[:8]),
            cores=len(re.findall(r"^cpu[0-9]+ ", stat, re.MULTILINE)),
            processes=_processes(root),
            load=float((_text(root / "proc/loadavg") or "0").split()[0]),
            swapped_pages=sum(map(int, swapped)),
            stalled_us=int(stall[1]) if stall else None,
            throttled={path: count for path in counters if (count := _number(path)) is not None},
        )


def _processes(root: Path) -> Processes:
    found = {}
    for path in (root / "proc").glob("[0-9]*/stat"):
        if match := re.fullmatch(r"([0-9]+) \((.*)\) (.*)", _text(path), re.DOTALL):  # "" if it ended meanwhile
            rest = match[3].split()
            process = _Process(
                pid=int(match[1]),
                parent=int(rest[1]),
                name=match[2],
                started=int(rest[19]),
                ticks=sum(map(int, rest[11:15])),
                of_kernel=bool(int(rest[6]) & _KERNEL_THREAD),
            )
            found[process.key] = process
    return found


class _Samples:
    """What is looked at again and again, because the end does not tell it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        # Whole packages. The other domains are parts of one, or the machine around them ("psys").
        domains = sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
        self._packages = [folder for folder in domains if _text(folder / "name").startswith("package")]
        self._energy_uj = self._read_energy()
        self.energy_j: float | None = None if None in self._energy_uj or not self._packages else 0.0
        self.clocks_mhz: list[tuple[float, float]] = []
        self.least_available = 1.0
        """Share of memory."""
        self.take()

    def take(self) -> None:
        self._add_energy()
        if clock := _frequency_mhz(self._root):
            self.clocks_mhz.append(clock)
        memory = dict(re.findall(r"^(\w+): +([0-9]+) kB$", _text(self._root / "proc/meminfo"), re.MULTILINE))
        if {"MemTotal", "MemAvailable"} <= memory.keys():
            self.least_available = min(self.least_available, int(memory["MemAvailable"]) / int(memory["MemTotal"]))

    def _read_energy(self) -> list[int | None]:
        return [_number(folder / "energy_uj") for folder in self._packages]

    def _add_energy(self) -> None:
        before, self._energy_uj = self._energy_uj, self._read_energy()
        for folder, then, now in zip(self._packages, before, self._energy_uj, strict=True):
            if now is not None and then is not None and now < then:  # the counter went round
                most = _number(folder / "max_energy_range_uj")
                now = None if most is None else now + most
            if now is None or then is None or self.energy_j is None:
                self.energy_j = None
                return
            self.energy_j += (now - then) / 1e6


def _temperature_c(root: Path) -> float | None:
    """The hottest sensor of the processor; of anything, if none is said to be its."""
    chips = [path.parent for path in (root / "sys/class/hwmon").glob("*/name") if _text(path) in CPU_SENSORS]
    zones = [path.parent for path in (root / "sys/class/thermal").glob("thermal_zone*/type")]
    zones_of_cpu = [zone for zone in zones if _text(zone / "type") in CPU_SENSORS]
    readings = _numbers(path for chip in chips for path in chip.glob("temp*_input"))
    readings += _numbers(zone / "temp" for zone in (zones_of_cpu if zones_of_cpu or readings else zones))
    believable = [reading / 1000 for reading in readings if 0 < reading < 150_000]
    return max(believable, default=None)


# --------------------------------------------------------------------------------------------------- what is said of it


@dataclass(frozen=True)
class _Span:
    """Two states with what lies between."""

    before: _State
    after: _State
    samples: _Samples
    pids: frozenset[int]

    @property
    def cores(self) -> int:
        return self.after.cores

    @functools.cached_property
    def ticks(self) -> tuple[int, ...]:
        return tuple(now - then for then, now in zip(self.before.ticks, self.after.ticks, strict=True))

    @functools.cached_property
    def all_ticks(self) -> int:
        """Of all cores, idle or not."""
        return sum(self.ticks)

    @functools.cached_property
    def ours_before(self) -> Members:
        return _family(self.before.processes, self.pids)

    @functools.cached_property
    def ours_after(self) -> Members:
        """Also those that were descendants before and have lost their parent."""
        return _family(self.after.processes, self.pids, self.ours_before)

    @functools.cached_property
    def our_ticks(self) -> int:
        before, after = self.before.processes, self.after.processes
        parents = {pid for pid, _ in self.ours_before}
        # Of one that ended, the time is in its parent's account; if that is none of ours, it is in none that we know.
        counted = {key for key in self.ours_before if key in after or before[key].parent in parents}
        return max(0, _ticks(after, self.ours_after) - _ticks(before, counted))

    @functools.cached_property
    def kernel_ticks(self) -> int:
        before, after = self.before.processes, self.after.processes
        threads = {key for key, process in after.items() if process.of_kernel}
        return _ticks(after, threads) - _ticks(before, threads & before.keys())

    def used_cores(self, ticks: int) -> float:
        return ticks * self.cores / self.all_ticks


def _disturbances(span: _Span, root: Path) -> Iterator[str]:
    yield from _of_others(span)
    yield from _of_the_clock(span, root)
    yield from _of_memory(span)


def _of_others(span: _Span) -> Iterator[str]:
    # What we ran ourselves in the last minute cannot have made more of the load than the time it took.
    our_load = _ticks(span.before.processes, span.ours_before) * _TICK_S / 60
    if span.before.load - our_load > LOAD_SHARE * span.cores:
        yield f"the machine was busy before it began (load {span.before.load:.2f} on {span.cores} cores)"

    # User, nice and system. Interrupts and the kernel's own threads are left out: they mostly serve our own reads.
    others = sum(span.ticks[:3]) - span.our_ticks - span.kernel_ticks
    if others > OTHER_SHARE * span.all_ticks and others * _TICK_S > OTHER_LEAST_S:
        most = _most_active(span, at_least=BLAMED_SHARE * others)
        who = f" (the most: {most.name}, pid {most.pid})" if most else ""
        used = f"{span.used_cores(others):.2f} of {span.cores} cores"
        yield f"other processes used {used} while it was measured{who}"

    if (stolen := span.ticks[7] / span.all_ticks) > STEAL_SHARE:
        yield f"the hypervisor took {stolen:.0%} of the processor time"


def _of_the_clock(span: _Span, root: Path) -> Iterator[str]:
    before = span.before.throttled
    throttled = max((count - before.get(path, count) for path, count in span.after.throttled.items()), default=0)
    if throttled > 0:
        yield f"the CPU was throttled for heat ({throttled} times)"
    if span.samples.clocks_mhz and span.used_cores(span.our_ticks) >= CLOCKED_CORES:
        now, most = (statistics.median(clocks) for clocks in zip(*span.samples.clocks_mhz, strict=True))
        if now < SLOW_CLOCK * most:
            governor = _governor(root) or "unknown"
            yield f"the CPU ran at {now / 1000:.2f} GHz of its {most / 1000:.2f} (governor: {governor})"


def _of_memory(span: _Span) -> Iterator[str]:
    swapped_bytes = (span.after.swapped_pages - span.before.swapped_pages) * os.sysconf("SC_PAGE_SIZE")
    if swapped_bytes >= SWAPPED_LEAST_BYTES:
        yield f"the machine was swapping ({swapped_bytes / 2**20:.0f} MiB)"
    available = span.samples.least_available
    if span.before.stalled_us is not None and span.after.stalled_us is not None and available < SHORT_SHARE:
        stalled_s = (span.after.stalled_us - span.before.stalled_us) / 1e6
        if (stalled := stalled_s / (span.all_ticks * _TICK_S / span.cores)) > STALL_SHARE:
            waited = f"programs waited for it {stalled:.0%} of the time"
            yield f"memory was short: only {available:.0%} was available, and {waited}"


def _family(processes: Processes, pids: frozenset[int], members: Members = frozenset()) -> Members:
    """The processes with these numbers, those that were members before, and the descendants of all of them."""
    children: dict[int, list[_Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    found: set[tuple[int, int]] = set()
    new = [process for process in processes.values() if process.pid in pids or process.key in members]
    while new:
        process = new.pop()
        found.add(process.key)
        new += [child for child in children.get(process.pid, ()) if child.key not in found]
    return frozenset(found)


def _ticks(processes: Processes, members: Iterable[tuple[int, int]]) -> int:
    return sum(processes[key].ticks for key in members)


def _most_active(span: _Span, *, at_least: float) -> _Process | None:
    """The process, none of ours, that used most of the processor, together with those of its children that ended."""
    before, after = span.before.processes, span.after.processes
    used = {key: process.ticks for key, process in after.items()}
    keys = {process.pid: key for key, process in after.items()}
    for key, process in before.items():
        # What one that ended had used before stands in its parent's account now.
        holder = key if key in after else keys.get(process.parent)
        if holder is not None:
            used[holder] -= process.ticks
    others = [process for key, process in after.items() if key not in span.ours_after and not process.of_kernel]
    most = max(others, key=lambda process: used[process.key], default=None)
    return most if most and used[most.key] >= at_least else None
