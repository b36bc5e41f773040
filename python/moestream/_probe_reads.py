"""How fast a disk gives what the engine asks of it."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ._native import check, ffi, lib, text
from .errors import MeasurementError
from .memory import format_size

__all__ = ["ReadRate", "Reads", "interpolated", "measure_reads", "require_whole", "scratch_file"]

KIB, MIB = 1 << 10, 1 << 20
LEAST_BYTES = 64 * MIB
"""Of a file: reads of the largest size go to a few different places at least."""
SCRATCH_BYTES = 2 << 30
_SLICE_S = 0.025
_MOST_SLICES, _MOST_LATENCIES = 4096, 16384
_MOST_AT_ONCE = 64 * MIB  # of a batch of reads, which is what there is memory for
_FINE = {
    ("random", True): [(k * KIB, d) for k in (64, 256, 512, 1024, 2048, 4096, 8192) for d in (1, 2, 4, 8)],
    ("sequential", True): [(k * KIB, d) for k in (256, 2048, 8192) for d in (1, 4)],
    ("random", False): [(k * KIB, d) for k in (256, 2048) for d in (1, 4)],
    ("sequential", False): [(k * KIB, 1) for k in (256, 2048)],
}
_COARSE = {
    ("random", True): [(k * KIB, d) for k in (64, 512, 2048, 8192) for d in (1, 4)],
    ("sequential", True): [(2048 * KIB, 1)],
    ("random", False): [(k * KIB, 4) for k in (256, 2048)],
    ("sequential", False): [(2048 * KIB, 1)],
}
FINE_S = 6.0
"""Seconds of reading from which on there is time for the fine grid."""
USUAL_BYTES, USUAL_DEPTH = 2 * MIB, 4
"""An expert of many models, and as many as a layer may miss: what is said of a disk in one number."""


@dataclass(frozen=True)
class ReadRate:
    """How fast reads of one kind are.

    Attributes:
        depth: So many are asked for at once and all are waited for, as the experts of a layer are.
        order: "random" or "sequential".
        direct: Past the page cache (O_DIRECT). Buffered reads find nothing in it either.
        bytes_per_s: Median of slices of time.
        bytes_per_s_low: Their 10th percentile.
        latency_s: Median of the time from asked to arrived.
    """

    size_bytes: int
    depth: int
    order: str
    direct: bool
    bytes_per_s: float
    bytes_per_s_low: float
    latency_s: float


@dataclass(frozen=True)
class Reads:
    """All that was measured of a file's disk.

    Attributes:
        reader: The faster of the engine's readers here: "uring" or "pread".
        why_buffered: Why there are no direct reads; empty where there are.
        burst_bytes_per_s: Of the first half second of reading without a pause, the usual reads.
        steady_bytes_per_s: Of the last half of that time.
        cached_share: Of the file, what stays in the page cache because another process has it mapped; buffered reads
            are flattered by so much.
    """

    rates: tuple[ReadRate, ...]
    reader: str
    why_buffered: str
    burst_bytes_per_s: float
    steady_bytes_per_s: float
    cpu_s_per_byte: float
    cached_share: float


@dataclass
class _Point:
    slices: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    bytes: int = 0
    ns: int = 0
    cpu_ns: int = 0


class _Disk:
    """A file that is read for measuring; see ms_read_probe in moestream.h."""

    def __init__(self, path: Path) -> None:
        out = ffi.new("ms_read_probe **")
        check(lib.ms_read_probe_open, os.fsencode(path), out, error=MeasurementError)
        self._probe = out[0]
        self.why_buffered = text(lib.ms_read_probe_why_buffered(self._probe))
        self.has_uring = not text(lib.ms_read_probe_why_no_uring(self._probe))
        self.uring = self.has_uring
        self._slices, self._latencies = np.empty(_MOST_SLICES), np.empty(_MOST_LATENCIES)

    def close(self) -> None:
        lib.ms_read_probe_close(self._probe)

    def run(self, point: _Point, size_bytes: int, depth: int, order: str, direct: bool, seconds: float) -> None:
        """Reads for that long and adds what is found to the point."""
        options: dict[str, Any] = {"size_bytes": size_bytes, "depth": depth, "random": order == "random"}
        options |= {
            "direct": direct,
            "uring": self.uring,
            "for_ns": int(seconds * 1e9),
            "slice_ns": int(_SLICE_S * 1e9),
        }
        result = ffi.new("ms_read_probe_result *")
        check(
            lib.ms_read_probe_run,
            self._probe,
            ffi.new("ms_read_probe_options *", options),
            *(ffi.from_buffer("double[]", self._slices), _MOST_SLICES),
            *(ffi.from_buffer("double[]", self._latencies), _MOST_LATENCIES),
            result,
            error=MeasurementError,
        )
        point.slices += self._slices[: result.n_slices].tolist()
        point.latencies += self._latencies[: result.n_latencies].tolist()
        point.bytes += result.bytes
        point.ns += result.ns
        point.cpu_ns += result.cpu_ns


def read_rate(path: Path, size_bytes: int, *, depth: int, seconds: float) -> tuple[float, bool]:
    """Bytes per second of random reads of that size, and whether they passed by the page cache, as the engine's do where they can.

    Raises:
        MeasurementError: The file cannot be read.
    """
    disk = _Disk(path)
    try:
        direct, point = not disk.why_buffered, _Point()
        whole_pages = -(-size_bytes // 4096) * 4096
        disk.run(point, min(whole_pages, _MOST_AT_ONCE // depth // 4096 * 4096), depth, "random", direct, seconds)
    finally:
        disk.close()
    return point.bytes / point.ns * 1e9, direct


def measure_reads(path: Path, until: float, progress: Callable[[float], None]) -> Reads:
    """Measures the disk of a file until `time.perf_counter()` says so; `progress` is told the share done.

    Raises:
        MeasurementError: it cannot be read.
    """
    began = time.perf_counter()
    left = max(0.2, until - began)
    cached_share = _cached_share(path)
    disk = _Disk(path)
    try:
        direct = not disk.why_buffered
        grid = {
            kind: points for kind, points in (_FINE if left >= FINE_S else _COARSE).items() if direct or not kind[1]
        }
        if not direct:  # the engine's reads are buffered too: they get the grid of direct ones
            grid = {
                (order, False): points for (order, was), points in (_FINE if left >= FINE_S else _COARSE).items() if was
            }
        _pick_reader(disk, direct, left * 0.02)
        progress(0.05)
        sustained = _sustained(disk, direct, left * 0.22)
        progress(0.25)
        points = _measure_grid(disk, grid, until, lambda s: progress(0.25 + 0.75 * s))
    finally:
        disk.close()
    usual = points.setdefault((USUAL_BYTES, USUAL_DEPTH, "random", direct), _Point())
    half = sustained.slices[len(sustained.slices) // 2 :]
    usual.slices += half
    usual.latencies += sustained.latencies[len(sustained.latencies) // 2 :]
    first = sustained.slices[: max(1, min(len(half), round(0.5 / _SLICE_S)))]
    return Reads(
        tuple(
            _rate(*key, point)
            for key, point in sorted(points.items(), key=lambda item: (not item[0][3], item[0][2], item[0]))
        ),
        "uring" if disk.uring else "pread",
        disk.why_buffered,
        burst_bytes_per_s=statistics.median(first),
        steady_bytes_per_s=statistics.median(half),
        cpu_s_per_byte=sustained.cpu_ns / 1e9 / sustained.bytes,
        cached_share=cached_share,
    )


def _pick_reader(disk: _Disk, direct: bool, seconds: float) -> None:
    """Takes the reader that the engine would take; see csrc/pick_reader.c."""
    if not disk.has_uring:
        return
    best = {True: 0.0, False: 0.0}
    for disk.uring in (True, False, True, False):
        trial = _Point()
        disk.run(trial, MIB, 24, "random", direct, seconds / 4)
        best[disk.uring] = max(best[disk.uring], trial.bytes / trial.ns)
    disk.uring = best[True] >= 0.95 * best[False]


def _sustained(disk: _Disk, direct: bool, seconds: float) -> _Point:
    """The usual reads without a pause, which end the bursts that many disks begin with."""
    point, end = _Point(), time.perf_counter() + seconds
    while not point.bytes or time.perf_counter() < end:
        disk.run(point, USUAL_BYTES, USUAL_DEPTH, "random", direct, 0.1)
    return point


def _measure_grid(
    disk: _Disk, grid: dict[tuple[str, bool], list[tuple[int, int]]], until: float, progress: Callable[[float], None]
) -> dict[tuple[int, int, str, bool], _Point]:
    """All points, several times over, so that what changes with time changes all alike; the first time whatever it takes."""
    keys = [(size, depth, order, direct) for (order, direct), points in grid.items() for size, depth in points]
    rounds = max(1, min(4, int((until - time.perf_counter()) / len(keys) / (2 * _SLICE_S))))
    points = {key: _Point() for key in keys}
    for turn in range(rounds):
        for number, key in enumerate(keys):
            done = turn * len(keys) + number
            now = time.perf_counter()
            if now >= until and turn > 0:
                return points
            disk.run(points[key], *key, max(0.0, (until - now) / (rounds * len(keys) - done)))
            progress((done + 1) / (rounds * len(keys)))
    return points


def _rate(size_bytes: int, depth: int, order: str, direct: bool, point: _Point) -> ReadRate:
    return ReadRate(
        size_bytes=size_bytes,
        depth=depth,
        order=order,
        direct=direct,
        bytes_per_s=statistics.median(point.slices),
        bytes_per_s_low=float(np.percentile(point.slices, 10)),
        latency_s=statistics.median(point.latencies),
    )


# --------------------------------------------------------------------------------------------------------------- files


def require_whole(path: Path) -> None:
    """Refuses a file that is too small or has holes.

    Raises:
        MeasurementError: it is; or it cannot be opened.
    """
    size_bytes = path.stat().st_size
    if size_bytes < LEAST_BYTES:
        raise MeasurementError(
            f"{path}: {format_size(size_bytes)} are too few to read here and there in; name a file of at least "
            f"{format_size(LEAST_BYTES)}, better of 1 GiB, or a folder"
        )
    try:
        file = open(path, "rb")
    except OSError as exc:
        raise MeasurementError(f"{path}: cannot be read ({exc.strerror}); name a file that can") from exc
    holes, at = 0, 0
    with file:
        while at < size_bytes:
            hole = os.lseek(file.fileno(), at, os.SEEK_HOLE)  # the end, where the file system does not tell
            at = size_bytes
            if hole < size_bytes:
                try:
                    at = os.lseek(file.fileno(), hole, os.SEEK_DATA)
                except OSError as exc:
                    if exc.errno != errno.ENXIO:  # the last of the file is a hole
                        raise
                holes += at - hole
    if holes > size_bytes // 20:
        raise MeasurementError(
            f"{path}: {format_size(holes)} of its {format_size(size_bytes)} are holes, which no disk reads; name another "
            "file, or a copy made with cp --sparse=never"
        )


def _cached_share(path: Path) -> float:
    """Of places here and there, how many are in the page cache after it was told to drop them."""
    if not hasattr(os, "RWF_NOWAIT"):
        return 0.0
    places, found, page = 64, 0, bytearray(1)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # looking must not read ahead
        for i in range(places):
            with contextlib.suppress(OSError):  # not there, or a file system that does not say
                found += os.preadv(fd, [page], os.fstat(fd).st_size * i // places, os.RWF_NOWAIT)
    finally:
        os.close(fd)
    return found / places


@contextlib.contextmanager
def scratch_file(folder: Path, seconds: float, progress: Callable[[float], None]) -> Iterator[Path]:
    """A file in `folder` that nothing can compress, gone after the block: 2 GiB, a tenth of the free room, or what is
    written in that many seconds.

    Raises:
        MeasurementError: there is no room, or the folder cannot be written to.
    """
    size_bytes = min(SCRATCH_BYTES, shutil.disk_usage(folder).free // 10)
    if size_bytes < LEAST_BYTES:
        raise MeasurementError(
            f"{folder}: a file of {format_size(LEAST_BYTES)} is written there to be read, but of at most a tenth of what is "
            f"free, {format_size(10 * size_bytes)}; free some, or name a model's file"
        )
    try:
        fd = _nameless(folder)
    except OSError as exc:
        raise MeasurementError(
            f"{folder}: no file can be written there to be read ({exc.strerror}); name a folder that can be written to, or a "
            "model's file"
        ) from exc
    try:
        try:
            _write(fd, size_bytes, seconds, progress)
        except OSError as exc:
            raise MeasurementError(
                f"{folder}: the file to be read cannot be written ({exc.strerror}); free some room, or name a model's file"
            ) from exc
        yield Path(f"/dev/fd/{fd}")
    finally:
        os.close(fd)


def _nameless(folder: Path) -> int:
    """A file without a name, which is gone when it is closed, whatever ends this process."""
    fd, name = tempfile.mkstemp(prefix="moestream-probe-", dir=folder)
    os.unlink(name)
    return fd


def _write(fd: int, size_bytes: int, seconds: float, progress: Callable[[float], None]) -> None:
    """Random bytes, the same from other beginnings each time, so that no two blocks are alike."""
    chunk = 16 * MIB
    noise = memoryview(np.random.default_rng().bytes(2 * chunk))
    began, written = time.perf_counter(), 0
    while written < size_bytes and (written < LEAST_BYTES or time.perf_counter() - began < seconds):
        begin = written // chunk * 4099 % chunk
        piece = noise[begin : begin + min(chunk, size_bytes - written)]
        while piece:
            n = os.write(fd, piece)
            piece, written = piece[n:], written + n
        os.fdatasync(fd) if hasattr(os, "fdatasync") else os.fsync(fd)
        progress(max(written / size_bytes, min(1.0, (time.perf_counter() - began) / seconds)))


def interpolated(points: list[tuple[int, float]], size_bytes: float) -> float:
    """Between the sizes measured, by their logarithms; outside, the nearest."""
    points = sorted(points)
    sizes = [math.log(size) for size, _ in points]
    return float(np.interp(math.log(max(1.0, size_bytes)), sizes, [rate for _, rate in points]))
