"""What a probe found, in sentences with numbers and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ._probe_reads import MIB, USUAL_BYTES, USUAL_DEPTH, Reads
from .memory import format_size

if TYPE_CHECKING:
    from .probing import Probe

__all__ = ["rate", "sentences"]

_MISSED_BYTES = 100e6
_TOKEN_BYTES = 1.75e9  # Qwen3-30B-A3B in Q4_0
_USUAL_READ_AHEAD_KIB = 128
_IN_MEMORY = ("tmpfs", "ramfs")
_COMMON_TYPES = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "IQ4_NL")


def sentences(probe: Probe, reads: Reads, file_bytes: int | None, busy: Sequence[str]) -> Iterator[str]:
    """All that is to be said; `file_bytes` is the size of a file that was named."""
    yield from _of_the_disk(probe, reads)
    if probe.disk["file_system"] in _IN_MEMORY:
        yield f"{probe.path} is in memory ({probe.disk['file_system']}), not on a disk: probe where the models are."
    elif reads.cached_share > 0.02:
        yield (
            f"{reads.cached_share:.0%} of {probe.path} stays in memory because another process has it mapped: buffered "
            "reads look faster than the disk is. Close that process and probe again."
        )
    if file_bytes is not None and file_bytes < 1 << 30:
        yield (
            f"{probe.path} has only {format_size(file_bytes)}, which were read again and again: memory inside of the disk "
            "may flatter it. A file of 1 GiB or more tells better."
        )
    yield from _of_computing(probe)
    for sentence in busy:
        yield f"Disturbed: {sentence}"


def rate(bytes_per_s: float) -> str:
    """2.1 GB/s, 210 MB/s."""
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"


def _of_the_disk(probe: Probe, reads: Reads) -> Iterator[str]:
    usual = probe.read_rate(USUAL_BYTES, depth=USUAL_DEPTH)
    name = f"The disk ({probe.disk['device'] or probe.disk['file_system']})"
    yield (
        f"{name} gives {rate(usual)} in reads of {USUAL_BYTES // MIB} MiB, {USUAL_DEPTH} at a time: a token that misses "
        f"{_MISSED_BYTES / 1e6:.0f} MB of experts waits {_MISSED_BYTES / usual * 1e3:.0f} ms."
    )
    if reads.burst_bytes_per_s > 1.25 * reads.steady_bytes_per_s:
        yield (
            f"It has bursts: {rate(reads.burst_bytes_per_s)} at first, then {rate(reads.steady_bytes_per_s)}. "
            "Short measurements flatter it."
        )
    kind = (USUAL_BYTES, USUAL_DEPTH, "random", probe.direct)
    lows = [r.bytes_per_s_low for r in probe.reads if (r.size_bytes, r.depth, r.order, r.direct) == kind]
    if lows and lows[0] < 0.6 * usual:
        yield f"It is uneven: in a tenth of the time it gives {rate(lows[0])} or less."
    small = probe.read_rate(256 << 10, depth=USUAL_DEPTH)
    if small < 0.7 * usual:
        yield (
            f"Reads of 256 KiB get {rate(small)} only: small experts are read faster from a laid file (moestream convert), "
            "one read an expert."
        )
    if reads.why_buffered:
        yield f"Reads go through the page cache, for {reads.why_buffered}."
    else:
        buffered = probe.read_rate(USUAL_BYTES, depth=USUAL_DEPTH, direct=False)
        if usual > 1.15 * buffered:
            yield f"Buffered reads are {usual / buffered:.1f} times slower than direct ones ({rate(buffered)})."
        else:
            yield f"Buffered reads are no slower than direct ones ({rate(buffered)})."
    read_ahead_kib = probe.disk.get("read_ahead_kib")
    if read_ahead_kib is not None and read_ahead_kib > 4 * _USUAL_READ_AHEAD_KIB:
        yield (
            f"Its read-ahead is {read_ahead_kib} KiB: stock llama.cpp with mmap suffers from it, "
            f"{_USUAL_READ_AHEAD_KIB} is usual."
        )


def _of_computing(probe: Probe) -> Iterator[str]:
    memory = probe.memory_bytes_per_s
    threads = f"{probe.threads} threads" if probe.threads > 1 else "1 thread"
    yield (
        f"Memory gives {rate(memory)}: a token that needs {_TOKEN_BYTES / 1e9} GB of weights (Qwen3-30B-A3B in Q4_0) takes at "
        f"least {_TOKEN_BYTES / memory * 1e3:.0f} ms; with the kernels there are for it, on {threads}, "
        f"{_TOKEN_BYTES / probe.kernel_rate('Q4_0', expert=True) * 1e3:.0f} ms."
    )
    rates = {type: probe.kernel_rate(type, expert=True) for type in _COMMON_TYPES}
    slow = [type for type in _COMMON_TYPES if rates[type] < 0.5 * memory]
    if slow:
        named = ", ".join(f"{type} {rate(rates[type])}" for type in slow)
        yield f"Computing is slower than memory for {named}: there more cores help, and faster memory does not."
    yield (
        f"{format_size(probe.available_bytes)} of {format_size(probe.memory_bytes)} of memory are free for a model, its "
        "cache of experts and its context."
    )
