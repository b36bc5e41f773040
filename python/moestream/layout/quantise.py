"""Quantising a stock model by llama.cpp's own quantiser, in a process of its own: llama.cpp aborts where it should fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
from tqdm import tqdm

from ..errors import ModelError, OptionError

__all__ = ["TYPES", "Quantisation", "file_type", "quantise"]

BUFFER_BYTES = 256 << 20  # of rows that llama.cpp holds at once; its default is 8 GiB

REFUSED = 3  # the child's exit code for what it did not even try; its last line says why

_NOT_OFFERED = ("GUESSED", "NVFP4")  # llama.cpp reads such files but does not make them
TYPES = {
    name.removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_"): value
    for name, value in vars(llama_cpp).items()
    if name.startswith("LLAMA_FTYPE_") and not name.endswith(_NOT_OFFERED)
}
"""What llama.cpp can quantise to: names as llama-quantize has them, and its numbers for them."""
for _mix in ("Q3_K", "Q4_K", "Q5_K"):
    TYPES.setdefault(_mix, TYPES[_mix + "_M"])

_TENSOR = re.compile(r"\[ *(\d+)/ *(\d+)\] +(\S+) +- \[.*?\], type = +(\S+),")
_BECOMES = re.compile(r"-> +[0-9.]+ MiB \((\w+)\)")
_FALLBACK = re.compile(
    r"warning: +(\S+) +- ncols +(\d+) not divisible by +(\d+) \(required for type +(\w+)\).*falling back to +(\w+)"
)
_FAILED = re.compile(r"failed to quantize: (.*)|(?:GGML_ASSERT.*|.*GGML_ABORT.*|.*terminate called.*)")


@dataclass(frozen=True)
class Quantisation:
    """What llama.cpp made of the tensors, or would make.

    Attributes:
        types: The type of each tensor, by name.
        fallbacks: Tensors that do not have the type that was asked for, and why; one sentence each.
    """

    types: dict[str, str]
    fallbacks: tuple[str, ...]


def file_type(name: str) -> int:
    """llama.cpp's number of a type such as "Q4_0", "Q4_K_M" or "MXFP4_MOE".

    Raises:
        OptionError: It has no such type.
    """
    if (number := TYPES.get(name.upper())) is None:
        raise OptionError(f"type {name}: unknown; llama.cpp can quantise to {', '.join(TYPES)}")
    return number


def quantise(
    source: Path,
    out: Path,
    type: str,
    *,
    imatrix: Path | None = None,
    allow_requantize: bool = False,
    keep: str | None = None,
    keep_type: int = 0,
    threads: int = 0,
    dry_run: bool = False,
    progress: bool = True,
) -> Quantisation:
    """Writes a stock model of another type.

    Args:
        source: A GGUF, or the first of a split set.
        type: One of `TYPES`.
        imatrix: A file of the importance of inputs, of llama-imatrix.
        allow_requantize: Take tensors that are quantised already.
        keep: Regular expression of tensors that become `keep_type` (a ggml type) instead.
        threads: 0 is as many as there are processors.
        dry_run: Only say what would become of the tensors; `out` is not written.
        progress: Draw a bar on stderr if that is a terminal.

    Raises:
        OptionError: Unknown type, or it needs an imatrix, or a requantisation that is not allowed.
        ModelError: llama.cpp cannot quantise this model; its last words are in the message.
    """
    order = {
        "source": os.fspath(source),
        "out": os.fspath(out),
        "type": file_type(type),
        "imatrix": imatrix and os.fspath(imatrix),
        "allow_requantize": allow_requantize,
        "keep": keep,
        "keep_type": keep_type,
        "threads": threads or os.cpu_count(),
        "dry_run": dry_run,
        "max_buf_size": BUFFER_BYTES,
    }
    bar = tqdm(
        desc="quantising",
        bar_format="{desc} {percentage:3.0f}% |{bar:30}| {n_fmt}/{total_fmt} tensors, {remaining} left",
        leave=False,
        disable=dry_run or not (progress and sys.stderr.isatty()),
        file=sys.stderr,
    )
    log: list[str] = []
    with bar:
        code = _run(order, log, lambda done, total: _move(bar, done, total))
    if code != 0:
        raise _failure(source, type, code, log)
    return _told(log)


def _move(bar: tqdm, done: int, total: int) -> None:
    if bar.total != total:
        bar.reset(total=total)
    bar.update(done - 1 - bar.n)


def _run(order: dict[str, object], log: list[str], moved: Callable[[int, int], None]) -> int:
    """Runs the child to its end; its lines go to `log`. Returns its exit code."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moestream.layout._quantiser"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        try:
            process.stdin.write(json.dumps(order))
            process.stdin.close()
            for line in process.stdout:
                log.append(line.rstrip())
                if found := _TENSOR.search(line):
                    moved(int(found[1]), int(found[2]))
        except BaseException:
            process.kill()
            raise
    return process.returncode


def _told(log: Sequence[str]) -> Quantisation:
    types: dict[str, str] = {}
    alike: dict[tuple[str, ...], list[int]] = {}
    for line in log:
        if found := _TENSOR.search(line):
            becomes = _BECOMES.search(line)
            types[found[3]] = (becomes[1] if becomes else found[4]).upper()
        elif found := _FALLBACK.search(line):
            name, *why = found.groups()
            block = re.match(r"blk\.(\d+)\.", name)
            key = (name[block.end() :] if block else name, *why)
            alike.setdefault(key, []).extend([int(block[1])] if block else [])
    return Quantisation(types, tuple(_fallback(*key, blocks=blocks) for key, blocks in alike.items()))


def _fallback(name: str, columns: str, block: str, wanted: str, got: str, *, blocks: Sequence[int]) -> str:
    where = f"blk.{number_ranges(blocks)}." if blocks else ""
    return f"{where}{name}: {wanted.upper()} rows of {columns} are not divisible by {block}: kept {got.upper()}"


def number_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: [0, 1, 2, 5] is "{0-2,5}", and [7] is "7"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    text = ",".join("-".join(map(str, ends)) for ends in ranges)
    return text if len(numbers) == 1 else f"{{{text}}}"


def _failure(source: Path, type: str, code: int, log: Sequence[str]) -> ModelError | OptionError:
    if code == REFUSED:
        return ModelError(log[-1] if log else f"{source}: refused")
    said = [line for line in log if _FAILED.search(line)] or [line for line in log if line.strip()][-3:]
    reason = " / ".join(re.sub(r"^.*failed to quantize: ", "", line).strip() for line in said[-2:])
    if "requantizing from type" in reason:
        return OptionError(
            f"{source}: {reason}; it loses quality twice: quantise from F16, or accept that with --allow-requantize"
        )
    if "imatrix" in reason or "importance matrix" in reason:
        return OptionError(f"{source}: {type}: {reason}; --imatrix FILE gives one")
    how = f"was ended by signal {-code}" if code < 0 else "failed"
    return ModelError(f"{source}: llama.cpp {how} while quantising to {type}: {reason or 'it said nothing'}")
