"""The share of the memory's bandwidth that the row kernels of csrc/rows.h read with, and their speed-up over ggml's dots.

    python tools/measure/kernels.py

The shape is SmallThinker-4B's: rows of 1536 Q4_0 values, 768 in an expert, of which 30% are active; 1 GB of experts, so that all
comes from memory. What is compared runs in alternation. The bandwidth with which 30% of the rows can just be read is printed too:
it is below that of reading all, and no kernel can be faster.
"""

from __future__ import annotations

import mmap
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cffi import FFI

import moestream._native

if __package__:
    from .compiler import shared_library
    from .figure import Figure, MeasurementError
else:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from measure.compiler import shared_library
    from measure.figure import Figure, MeasurementError

__all__ = ["kernel_bandwidth"]

Q4_0 = 2
ROWS, COLUMNS = 768, 1536
ROW_BYTES, ACTIVATION_BYTES = COLUMNS // 32 * 18, COLUMNS // 32 * 34
ACTIVE = 0.3
EXPERTS = 1600
FEW_EXPERTS = 100  # for many activations: of the processor's time, not the memory's
ROUNDS = 5
READ, DOT, GGML_DOT, ADD, ADD_COLUMNS = range(5)

ffi = FFI()
ffi.cdef("""
    struct pass {
        int kind, n_threads, type;
        int n_experts, n_rows;
        int64_t columns;
        size_t row_bytes;
        const uint8_t *experts;
        const int32_t *lists;
        int n_listed;
        const uint8_t *activations;
        size_t activation_bytes;
        int n_activations;
        const float *x;
        void *dot, *add, *ggml_dot;
    };
    double run_pass(const struct pass *pass);
    void ms_rows_dot(void); void ms_rows_add(void);
    const char *ms_rows_kernels(void);
    struct traits { void *from_float, *vec_dot; int vec_dot_type; int64_t nrows; };
    const struct traits *ggml_get_type_traits_cpu(int type);
""")


@dataclass(frozen=True)
class Pass:
    """What one timed pass does; the bytes it reads follow from it."""

    kind: int
    threads: int
    listed: bool = False
    activations: int = 1
    experts: int = EXPERTS

    @property
    def bytes(self) -> int:
        return self.experts * (LISTED if self.listed else ROWS) * ROW_BYTES


LISTED = round(ROWS * ACTIVE)


class Kernels:
    """The compiled passes and what they run over."""

    def __init__(self, folder: Path) -> None:
        self._passes = ffi.dlopen(str(shared_library(Path(__file__).with_suffix(".c"), folder)))
        self._core: Any = ffi.dlopen(str(moestream._native.LIBRARY))
        self.name = ffi.string(self._core.ms_rows_kernels()).decode()
        random = np.random.default_rng(0)
        self._experts = _blocks(random, EXPERTS * ROWS * COLUMNS // 32, 18)
        self._activations = _blocks(random, 32 * COLUMNS // 32, 34)
        listed = [np.sort(random.choice(ROWS, LISTED, replace=False)) for _ in range(EXPERTS)]
        self._lists = np.array(listed, np.int32)
        self._x = random.standard_normal(ROWS).astype(np.float32)

    def seconds(self, what: Pass) -> float:
        fields = {
            "kind": what.kind,
            "n_threads": what.threads,
            "type": Q4_0,
            "n_experts": what.experts,
            "n_rows": ROWS,
            "columns": COLUMNS,
            "row_bytes": ROW_BYTES,
            "experts": ffi.from_buffer("uint8_t[]", self._experts),
            "lists": ffi.from_buffer("int32_t[]", self._lists) if what.listed else ffi.NULL,
            "n_listed": LISTED,
            "activations": ffi.from_buffer("uint8_t[]", self._activations),
            "activation_bytes": ACTIVATION_BYTES,
            "n_activations": what.activations,
            "x": ffi.from_buffer("float[]", self._x),
            "dot": self._core.ms_rows_dot,
            "add": self._core.ms_rows_add,
            "ggml_dot": self._core.ggml_get_type_traits_cpu(Q4_0).vec_dot,
        }
        seconds = self._passes.run_pass(ffi.new("struct pass *", fields))
        if seconds < 0:
            raise MeasurementError(f"{threading.active_count()} threads run; no thread or no memory for another")
        return seconds

    def medians(self, passes: dict[str, Pass]) -> dict[str, float]:
        """Bytes a second of each (rows times activations), in alternation."""
        found: dict[str, list[float]] = {name: [] for name in passes}
        for _ in range(ROUNDS):
            for name, what in passes.items():
                found[name].append(what.bytes * what.activations / self.seconds(what))
        return {name: statistics.median(rates) for name, rates in found.items()}


def _blocks(random: np.random.Generator, n: int, size: int) -> np.ndarray:
    """Blocks with a small scale and any quants, in huge pages where there are any."""
    memory = mmap.mmap(-1, n * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    blocks = np.frombuffer(memory, np.uint8).reshape(n, size)
    some = random.integers(0, 256, (min(n, 1 << 16), size), dtype=np.uint8)
    some[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    for begin in range(0, n, len(some)):
        part = blocks[begin : begin + len(some)]
        part[:] = some[: len(part)]
    return blocks


def kernel_bandwidth() -> Iterator[Figure]:
    """Shares of the read bandwidth of as many threads, and speed-ups over ggml's dots of one row at a time."""
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
        kernels = Kernels(Path(folder))
        for threads in (1, 2):
            rates = kernels.medians(
                {
                    "read": Pass(READ, threads),
                    "read_30%": Pass(READ, threads, listed=True),
                    "dot_all": Pass(DOT, threads),
                    "dot_30%": Pass(DOT, threads, listed=True),
                    "add_30%": Pass(ADD, threads, listed=True),
                    "add_30%_by_columns": Pass(ADD_COLUMNS, threads, listed=True),
                    "ggml_dot_all": Pass(GGML_DOT, threads),
                    "ggml_dot_30%": Pass(GGML_DOT, threads, listed=True),
                }
            )
            yield Figure(f"read_bandwidth[{threads} threads]", rates["read"] / 1e9, "GB/s")
            yield Figure(f"read_bandwidth[30%, {threads} threads]", rates["read_30%"] / 1e9, "GB/s")
            for name in ("dot_all", "dot_30%", "add_30%", "add_30%_by_columns"):
                share = rates[name] / rates["read"]
                yield Figure(f"kernel_bandwidth[{name}, {threads} threads]", share, at_least=0.8)
                if "30%" in name:
                    reached = rates[name] / rates["read_30%"]
                    yield Figure(f"kernel_bandwidth[{name}, {threads} threads].of_just_reading_them", reached)
            for name in ("dot_all", "dot_30%"):
                yield Figure(f"kernel_over_ggml[{name}, {threads} threads]", rates[name] / rates[f"ggml_{name}"])
        for activations in (8, 32):
            rates = kernels.medians(
                {
                    name: Pass(kind, 1, activations=activations, experts=FEW_EXPERTS)
                    for name, kind in (("ours", DOT), ("ggml", GGML_DOT))
                }
            )
            yield Figure(f"kernel_over_ggml[dot_all, {activations} activations]", rates["ours"] / rates["ggml"])


if __name__ == "__main__":
    for figure in kernel_bandwidth():
        print(figure.line(), flush=True)
