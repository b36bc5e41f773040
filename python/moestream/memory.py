"""How much memory there is, how much we use, and sizes as people write them."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import psutil

from .errors import OptionError

__all__ = ["available_bytes", "format_size", "parse_size", "peak_rss_bytes", "private_bytes", "rss_bytes"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" with a number near 2**63


def parse_size(text: str | int) -> int:
    """Bytes of a size such as ``3GiB``, ``512M`` (decimal) or ``1000000``.

    Raises:
        OptionError: not a size, or not a positive one.
    """
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise OptionError(f"size {text!r}: expected bytes as a number or a size such as '3GiB'")
    if isinstance(text, int):
        size = text
    else:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?I?)B?", text, re.IGNORECASE)
        if not match or match[2].upper() not in _UNITS:
            raise OptionError(f"size {text!r}: expected a number and a unit without blanks, such as '3GiB', '512MiB' or '2G'")
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size <= 0:
        raise OptionError(f"size {text!r}: must be more than zero bytes")
    return size


def format_size(size_bytes: float) -> str:
    """A size in the largest binary unit that leaves a number above one: ``3.00 GiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} bytes" if unit == "bytes" else f"{size_bytes:.2f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.2f} TiB"


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit


def _read_statistics(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, _, value in (line.partition(" ") for line in lines) if value.isdigit()}


def _cgroup_headrooms(proc: Path, mounts: Path) -> list[int]:
    """Bytes left under each memory limit that holds for this process, of any cgroup version.

    What is left is the limit minus what is not clean page cache: the kernel
    gives that back before it refuses memory. Limits of ancestors hold too.
    """
    headrooms = []
    try:
        memberships = (proc / "cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots, limit_file, usage_file = [mounts, mounts / "unified"], "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            roots, limit_file, usage_file = [mounts / "memory"], "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        for root in roots:
            for folder in (root / path.lstrip("/"), *(root / path.lstrip("/")).parents):
                limit, usage = _read_number(folder / limit_file), _read_number(folder / usage_file)
                if limit is not None and usage is not None and limit < _UNLIMITED:
                    statistics = _read_statistics(folder / "memory.stat")
                    cache = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
                    cache += statistics.get("total_active_file", statistics.get("active_file", 0))
                    dirty = statistics.get("total_dirty", statistics.get("file_dirty", statistics.get("dirty", 0)))
                    headrooms.append(max(0, limit - usage + max(0, cache - dirty)))
                if folder == root:
                    break
    return headrooms


def available_bytes(*, proc: Path = Path("/proc/self"), mounts: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory this process can still take without swapping or being killed.

    The least of the machine's available memory (Linux: MemAvailable, which
    counts clean page cache as free) and of what every cgroup limit (v1 and v2)
    above this process leaves.
    """
    return min([psutil.virtual_memory().available, *_cgroup_headrooms(proc, mounts)])


def rss_bytes() -> int:
    """Resident memory of this process."""
    return psutil.Process().memory_info().rss


def peak_rss_bytes() -> int:
    """The largest resident memory this process has had."""
    if peak := _own_status().get("VmHWM"):
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on Linux it would begin with that of our parent
    return peak if sys.platform == "darwin" else peak * 1024


def private_bytes() -> tuple[int, int]:
    """Private writable memory of this process: (allocated, of that resident).

    Their difference is what was asked for but not touched yet. (0, 0) where
    the system does not tell.
    """
    status = _own_status()
    return (status["VmData"], status["RssAnon"]) if {"VmData", "RssAnon"} <= status.keys() else (0, 0)


def _own_status() -> dict[str, int]:
    """What the kernel tells of this process's memory, in bytes, by its names; nothing where there is no /proc."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return {}
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s*([0-9]+) kB$", text, re.MULTILINE)}
