"""Measure what this machine gives a streamed model: disk, memory, kernels.

Takes 20 seconds, and reads the file given as the engine would, or one that is
made in the folder given and is gone again.
The result is kept for `moestream plan`, one for each disk.

  moestream probe MODEL.gguf
  moestream probe /mnt/ssd --json
"""

from __future__ import annotations

import argparse
from typing import Any

from .._probe_verdict import rate
from ..memory import format_size
from ..probing import Probe, remember
from ..probing import probe as measure
from ._output import Progress, print_columns, print_json, require_writable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `probe`."""
    parser.add_argument(
        "path",
        nargs="?",
        metavar="PATH",
        help="a file to read, of 1 GiB or more, or a folder on the disk (this folder)",
    )
    parser.add_argument("--seconds", type=float, default=20, metavar="S", help="time to take (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the JSON to a file too")


def run(*, json: bool, output: str | None, **options: Any) -> int:
    """Runs `probe` for the command line and returns the exit code."""
    if output is not None:
        require_writable(output)
    progress = Progress(lambda: False)
    try:
        found = measure(**options, progress=lambda what, share: progress.show(what, share, 1.0))
    finally:
        progress.close()
    if output is not None:
        found.write(output)
    if json:
        print_json(found.as_dict())
    else:
        _print(found)
    kept = remember(found)  # last: where it cannot be written, what was measured has been told
    if not json:
        print(f"\nKept in {kept}" + (f" and {output}" if output else ""))
    return 0


def _print(found: Probe) -> None:
    print(f"{found.path}: {_named(found.disk)}")
    print(f"{found.machine['cpu']}, {found.threads} of {found.machine['cores_usable']} cores compute\n")
    kinds = sorted({(rate.order, rate.direct) for rate in found.reads}, key=lambda kind: (not kind[1], kind[0]))
    for order, direct in kinds:
        _print_reads(found, order, direct)
    _print_kernels(found)
    for sentence in found.verdict:
        print(f"- {sentence}")


def _named(disk: Any) -> str:
    device = " ".join(filter(None, (disk["device"], disk["model"]))) or "no disk"
    return f"{device}, {disk['file_system']} mounted at {disk['mount']}"


def _print_reads(found: Probe, order: str, direct: bool) -> None:
    rates = {(r.size_bytes, r.depth): r for r in found.reads if (r.order, r.direct) == (order, direct)}
    depths = sorted({depth for _, depth in rates})
    print(f"{order} reads, {'direct' if direct else 'buffered'}, so many at once ({found.reader}):")
    rows = [["", *map(str, depths), "one alone takes"]]
    for size in sorted({size for size, _ in rates}):
        cells = [rate(rates[size, depth].bytes_per_s) if (size, depth) in rates else "" for depth in depths]
        alone = rates.get((size, 1))
        rows.append([format_size(size), *cells, f"{alone.latency_s * 1e3:.2f} ms" if alone else ""])
    print_columns(rows, right=range(len(depths) + 2), indent=2)
    print()


def _print_kernels(found: Probe) -> None:
    print(f"weights in a token's products, plain or interleaved rows (memory gives {rate(found.memory_bytes_per_s)}):")
    columns = [(weights, kernels) for weights in ("dense", "experts") for kernels in ("plain", "interleaved")]
    rates = {(r.type, r.weights, r.kernels): r.bytes_per_s for r in found.kernels}
    rows = [["", "dense", "interleaved", "experts", "interleaved"]]
    for type in dict.fromkeys(r.type for r in found.kernels):
        found_rates = (rates.get((type, weights, kernels)) for weights, kernels in columns)
        rows.append([type, *(rate(found_rate) if found_rate else "" for found_rate in found_rates)])
    print_columns(rows, right=(1, 2, 3, 4), indent=2)
    print(
        f"  besides, {found.layer_overhead_s * 1e6:.0f} us a layer and {found.token_overhead_s * 1e6:.0f} us a token; "
        f"attention {found.attention_values_per_s / 1e9:.1f} G values/s\n"
    )
