"""What this machine gives a streamed model: its disk, its memory, its processor. Measured in some twenty seconds.

    found = moestream.probe("model.gguf")
    found.read_rate(2 << 20, depth=4)      bytes a second
    found.kernel_rate("Q4_0")
    print(*found.verdict, sep="\\n")

What is measured is what the engine does: its own readers with as many reads at once as a layer asks for, the kernels that
decode runs over weights that no cache holds, and the decoding of the small model that ships with the package.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _probe_compute, _probe_reads, _probe_verdict
from ._probe_compute import KernelRate
from ._probe_reads import ReadRate
from ._whole_file import writing_whole
from .errors import MeasurementError, OptionError, OutputError
from .memory import available_bytes

__all__ = [
    "KernelRate",
    "Probe",
    "ReadRate",
    "attention_values",
    "cached_probe",
    "probe",
    "remember",
    "token_compute_s",
]

FORMAT, VERSION = "moestream probe", 1
LEAST_S, MOST_S = 0.5, 3600
DEMO_WIDTH = 256
"""Of the model whose layers tell what a layer costs besides weights."""


@dataclass(frozen=True)
class Probe:
    """What was measured of a machine, and of the disk that a path is on. Rates are bytes a second.

    Attributes:
        machine, disk: As `describe_machine` and `describe_disk` of bench/machine.py give them.
        path: The file that was read, or the folder in which one was made for that.
        when: ISO 8601, UTC.
        seconds: It took.
        reader: The faster of the engine's readers on this file: "uring" or "pread".
        reads: Every kind of read measured.
        burst_bytes_per_s: 2 MiB reads, 4 at a time, in the first half second; disks have bursts, and `reads` are what comes after.
        memory_bytes_per_s: All threads together.
        threads: That compute, as decode would choose them.
        kernels: Every type of weights measured, by the kernels there are for it.
        attention_values_per_s: Of a token's attention; see the function `attention_values`.
        layer_overhead_s: Of one layer of decode, what is neither weights nor attention: threads that meet, norms, the choice
            of experts. Of a layer that is 256 values wide.
        width_s: The same, more, for each further value of the hidden state's width.
        token_overhead_s: Of a token besides its layers and its output matrix.
        read_cpu_s_per_byte: Processor time of reading, which computing does not get.
        memory_bytes, available_bytes: Of the machine, and what was left to this process.
        verdict: What follows, in sentences.
    """

    machine: Mapping[str, Any]
    disk: Mapping[str, Any]
    path: str
    when: str
    seconds: float
    reader: str
    reads: tuple[ReadRate, ...]
    burst_bytes_per_s: float
    memory_bytes_per_s: float
    threads: int
    kernels: tuple[KernelRate, ...]
    attention_values_per_s: float
    layer_overhead_s: float
    width_s: float
    token_overhead_s: float
    read_cpu_s_per_byte: float
    memory_bytes: int
    available_bytes: int
    verdict: tuple[str, ...]

    @property
    def direct(self) -> bool:
        """Does the file system serve direct reads? Then the engine reads directly."""
        return any(rate.direct for rate in self.reads)

    def read_rate(
        self, size_bytes: float, *, depth: float = 4, direct: bool | None = None, order: str = "random"
    ) -> float:
        """Bytes a second of reads of that size, `depth` asked for at once: between the sizes measured, at the nearest depth.

        Args:
            direct: None is as the engine reads: directly, where the file system serves that.

        Raises:
            MeasurementError: no such reads were measured.
        """
        direct = self.direct if direct is None else direct
        rates = [rate for rate in self.reads if (rate.direct, rate.order) == (direct, order)]
        if not rates:
            raise MeasurementError(
                f"the probe of {self.path} has no {'direct' if direct else 'buffered'} {order} reads; probe again, or ask "
                f"for {'buffered' if direct else 'direct'} ones"
            )
        nearest = min({rate.depth for rate in rates}, key=lambda measured: abs(math.log(measured / max(1.0, depth))))
        return _probe_reads.interpolated(
            [(rate.size_bytes, rate.bytes_per_s) for rate in rates if rate.depth == nearest], size_bytes
        )

    def kernel_rate(self, type: str, *, interleaved: bool = True, expert: bool = False) -> float:
        """Bytes of weights a second in products of one token.

        Args:
            type: As GGUF names it; of a type that was not measured it is the rate of the slowest that was, for all of them
                are small types with tables.
            interleaved: Rows are interleaved, where ggml does that with the type here.
            expert: The weights are of experts, which are in huge pages, and whose plain rows have kernels of our own.
        """
        weights = "experts" if expert else "dense"
        rates = {(rate.type, rate.kernels): rate.bytes_per_s for rate in self.kernels if rate.weights == weights}
        wanted = ("interleaved", "plain") if interleaved else ("plain",)
        found = (rates[type.upper(), kernels] for kernels in wanted if (type.upper(), kernels) in rates)
        return next(found, min(rates.values()))

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"format": FORMAT, "version": VERSION, **json.loads(json.dumps(dataclasses.asdict(self)))}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, name: str = "this") -> Probe:
        """The probe that `as_dict` gave.

        Raises:
            MeasurementError: it is none, or of a later version; `name` says what.
        """
        if not isinstance(values, Mapping) or values.get("format") != FORMAT:
            raise MeasurementError(f"{name}: is no probe of a machine; make one with: moestream probe -o FILE")
        if values.get("version") != VERSION:
            raise MeasurementError(
                f"{name}: is a probe of version {values.get('version')}, and this moestream reads {VERSION}; make it again with: "
                "moestream probe -o FILE"
            )
        try:
            given = {field.name: values[field.name] for field in dataclasses.fields(cls)}
            given["reads"] = tuple(ReadRate(**rate) for rate in given["reads"])
            given["kernels"] = tuple(KernelRate(**rate) for rate in given["kernels"])
            given["verdict"] = tuple(given["verdict"])
            if not given["reads"] or not given["kernels"]:
                raise KeyError("no reads, or no kernels")
        except (KeyError, TypeError) as exc:
            raise MeasurementError(
                f"{name}: is a damaged probe ({exc}); make it again with: moestream probe -o FILE"
            ) from exc
        return cls(**given)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Probe:
        """The probe in a file.

        Raises:
            MeasurementError: there is no such file, or it is no probe.
        """
        try:
            values = json.loads(Path(path).read_text())
        except OSError as exc:
            raise MeasurementError(
                f"{path}: cannot be read ({exc.strerror}); make a probe with: moestream probe -o FILE"
            ) from exc
        except ValueError:
            values = None
        return cls.from_dict(values, name=str(path))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a file as JSON.

        Raises:
            OutputError: it cannot be written.
        """
        with writing_whole(path, OutputError) as file:
            file.write((json.dumps(self.as_dict(), indent=2) + "\n").encode())


_POSITIONS_AT_ONCE = 256
"""llama.cpp computes attention for whole runs of so many positions, those that are empty too."""


def attention_values(*, layers: int, heads: int, head: int, positions: int) -> int:
    """What a token's attention goes over: in each layer query heads x length of a head x positions, rounded up as
    llama.cpp does. Layers with a sliding window have no more positions than that; add them up apart.
    """
    return layers * heads * head * max(1, -(-positions // _POSITIONS_AT_ONCE)) * _POSITIONS_AT_ONCE


def token_compute_s(
    probe: Probe,
    *,
    dense_bytes: Mapping[str, float],
    expert_bytes: Mapping[str, float],
    layers: int,
    width: int,
    attention_values: float = 0.0,
    interleaved: bool = True,
) -> float:
    """Seconds that one token of decode computes when everything is in memory.

    Args:
        dense_bytes, expert_bytes: Of the weights that a token takes, by type. The embedding matrix counts only if it is the
            output matrix too; of experts, those of a token.
        width: Of the hidden state.
        attention_values: Of the function of that name.
        interleaved: Rows are interleaved where ggml does that here.
    """
    weights_s = sum(
        size / probe.kernel_rate(type, interleaved=interleaved, expert=expert)
        for expert, part in ((False, dense_bytes), (True, expert_bytes))
        for type, size in part.items()
    )
    layer_s = probe.layer_overhead_s + max(0, width - DEMO_WIDTH) * probe.width_s
    return weights_s + layers * layer_s + attention_values / probe.attention_values_per_s + probe.token_overhead_s


# ----------------------------------------------------------------------------------------------------------- measuring


def probe(
    path: str | os.PathLike[str] | None = None,
    *,
    seconds: float = 20,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> Probe:
    """Measures this machine, and the disk of a path.

    Args:
        path: A file to read, such as a model of a GiB or more; or a folder, where one is made to be read and deleted again.
            None is the current folder.
        seconds: To take; with fewer than 12 fewer kinds of reads are measured. Disks that read less than 50 MB a second
            take longer.
        progress: Called with what is done, and the share of it.

    Raises:
        OptionError: there is no such path, or no time.
        MeasurementError: the file is too small or has holes; the folder has no room or cannot be written to.
    """
    began = time.perf_counter()
    path = Path(path) if path is not None else Path.cwd()
    if not seconds >= LEAST_S:
        raise OptionError(f"seconds={seconds!r}: nothing can be measured in less than {LEAST_S}")
    if seconds > MOST_S:
        raise OptionError(f"seconds={seconds!r}: more than {MOST_S} tell no more")
    if not path.is_file() and not path.is_dir():
        raise OptionError(f"{path}: there is no such file or folder; name a model's file, or a folder on the disk")
    from .bench.machine import (  # not before it is asked for: it brings all of bench
        Watch,
        describe_disk,
        describe_machine,
    )

    machine, disk, available = describe_machine().as_dict(), describe_disk(path).as_dict(), available_bytes()
    with Watch() as watch:
        if path.is_file():
            compute, reads = _measured(path, began, seconds, progress)
        else:
            with _probe_reads.scratch_file(path, seconds * 0.15, lambda s: progress("writing", s)) as file:
                compute, reads = _measured(file, began, seconds, progress)
    without_verdict = Probe(
        machine=machine,
        disk=disk,
        path=str(path),
        when=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        seconds=time.perf_counter() - began,
        reader=reads.reader,
        reads=reads.rates,
        burst_bytes_per_s=reads.burst_bytes_per_s,
        memory_bytes_per_s=compute.memory_bytes_per_s,
        threads=compute.threads,
        kernels=compute.kernels,
        attention_values_per_s=compute.attention_values_per_s,
        layer_overhead_s=compute.layer_overhead_s,
        width_s=compute.width_s,
        token_overhead_s=compute.token_overhead_s,
        read_cpu_s_per_byte=reads.cpu_s_per_byte,
        memory_bytes=machine["memory_bytes"],
        available_bytes=available,
        verdict=(),
    )
    size_bytes = path.stat().st_size if path.is_file() else None
    return dataclasses.replace(
        without_verdict, verdict=tuple(_probe_verdict.sentences(without_verdict, reads, size_bytes, watch.busy))
    )


def _measured(
    file: Path, began: float, seconds: float, progress: Callable[[str, float], None]
) -> tuple[_probe_compute.Compute, _probe_reads.Reads]:
    # Computing first: meanwhile the disk gets over what was written, and reading fills the time that is left.
    _probe_reads.require_whole(file)
    compute = _probe_compute.measure_compute(seconds * 0.4, lambda s: progress("computing", s))
    reads = _probe_reads.measure_reads(file, began + seconds, lambda s: progress("reading", s))
    return compute, reads


# ---------------------------------------------------------------------------------------------------------- remembered


def remember(probe: Probe) -> Path:
    """Keeps it for `cached_probe`, and says where.

    Raises:
        OutputError: it cannot be written.
    """
    file = _cache_file(probe.disk)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise OutputError(f"{file.parent}: cannot be made: {exc.strerror}") from exc
    probe.write(file)
    return file


def cached_probe(path: str | os.PathLike[str]) -> Probe | None:
    """The last probe of the disk that `path` is on, if this still is that disk and that machine."""
    from .bench.machine import describe_disk, describe_machine

    disk = describe_disk(path).as_dict()
    try:
        found = Probe.read(_cache_file(disk))
    except MeasurementError:
        return None
    same_disk = all(found.disk[key] == disk[key] for key in ("device", "model", "mount", "size_bytes"))
    return found if same_disk and found.machine["cpu"] == describe_machine().cpu else None


def _cache_file(disk: Mapping[str, Any]) -> Path:
    name = disk["device"] or re.sub(r"\W+", "-", f"{disk['file_system']} {disk['mount']}").strip("-")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "moestream" / "probes" / f"{name.replace('/', '-')}.json"
