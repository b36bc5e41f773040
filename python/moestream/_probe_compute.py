"""How fast memory is read here, and what a token's computation is made of: products, attention, and the rest of a layer."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from ._log import without_llama_cpp_log
from ._native import check, ffi, lib
from ._threads import candidates, default_threads
from .errors import MeasurementError
from .layout import ggml
from .layout.gguf_file import open_stock
from .llama import Llama
from .model import ModelDescription, describe
from .models import demo_model
from .options import ExpertStreaming

__all__ = ["Compute", "KernelRate", "MemoryReader", "measure_compute"]

TYPES = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "Q5_K", "MXFP4", "IQ4_NL", "F32", "F16", "BF16", "Q3_K", "Q2_K", "IQ4_XS")
_KERNELS = {("dense", "plain"): 0, ("experts", "plain"): 2, ("dense", "interleaved"): 1, ("experts", "interleaved"): 1}
"""As enum ms_probe_kernels."""
_POOL_BYTES = 192 << 20
_MEMORY_PASSES = 6
_SHAPES = {"dense": (2048, 2048), "experts": (1024, 4096)}
"""Columns and rows: the columns of many models, and rows enough that threads seldom meet, for a layer's experts are computed together."""
_UNDISTURBED = 10
"""Percentile of times: other programs only ever make them longer. The least would be luck."""
_TWO_ROUNDS_S = 2.5
_MOST_PASSES = 4096
_DEMO_WIDTH, _WIDE = 256, 2048
_DEMO_ATTENTION = 4 * 64 * 256
"""Values of a layer: heads, their length, and the positions that llama.cpp computes at least."""
_PRODUCTS_A_LAYER = 7
"""Queries, keys, values, output, router, gate and up together, down: each converts its vector; norms and sums cost about as much."""


@dataclass(frozen=True)
class KernelRate:
    """How fast one token's products read weights of a type from memory.

    Attributes:
        weights: "dense", in ordinary memory, or "experts", in slots of huge pages.
        kernels: "plain", for rows as they are in the file: dense weights have ggml's, experts our own; or ggml's for
            "interleaved" rows.
    """

    type: str
    weights: str
    kernels: str
    threads: int
    bytes_per_s: float


@dataclass(frozen=True)
class Compute:
    """What computing a token is made of; see `token_compute_s` of probe.py for what each means."""

    threads: int
    memory_bytes_per_s: float
    kernels: tuple[KernelRate, ...]
    attention_values_per_s: float
    layer_overhead_s: float
    width_s: float
    token_overhead_s: float


class MemoryReader:
    """Memory that no cache holds, written once, inside the `with` block; all cores read it together, and do nothing else.

    >>> with MemoryReader(bytes=3 << 29) as memory:
    ...     print(memory.bytes_per_s())

    Args:
        bytes: How much; more than a GiB passes by any cache.
    """

    def __init__(self, *, bytes: int) -> None:
        self._bytes = bytes

    def __enter__(self) -> MemoryReader:
        out = ffi.new("ms_memory_probe **")
        check(lib.ms_memory_probe_open, self._bytes, max(candidates()), out, error=MeasurementError)
        self._probe = out[0]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lib.ms_memory_probe_close(self._probe)

    def bytes_per_s(self) -> float:
        """The best of some passes: a limit is what the memory gives when nothing disturbs."""
        return max(self.read() for _ in range(_MEMORY_PASSES))

    def read(self) -> float:
        """Reads all of it once: bytes a second."""
        return lib.ms_memory_probe_pass(self._probe)


class Weights:
    """Memory with weights in it, and threads that multiply them, inside the `with` block.

    Args:
        kind: Of `KernelRate.weights`.
        bytes: Of the memory; more than caches hold.
    """

    def __init__(self, kind: str, threads: int, *, bytes: int = _POOL_BYTES) -> None:
        self._kind, self._threads, self._bytes = kind, threads, bytes
        self._seconds = np.empty(_MOST_PASSES)

    def __enter__(self) -> Weights:
        out = ffi.new("ms_kernel_probe **")
        huge = self._kind == "experts"
        check(lib.ms_kernel_probe_open, self._bytes, huge, self._threads, out, error=MeasurementError)
        self._probe = out[0]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lib.ms_kernel_probe_close(self._probe)

    def bytes_per_s(self, type: str, kernels: str, seconds: float) -> float | None:
        """Of matrices as large as many models have; None where there are no such kernels."""
        columns, rows = _SHAPES[self._kind]
        matrix_bytes = rows * _row_bytes(type, columns)
        each = self._product_s(type, kernels, seconds, columns, rows, self._bytes // matrix_bytes)
        return None if each is None else matrix_bytes / each

    def small_product_s(self, columns: int, seconds: float) -> float:
        """Seconds of a product that is hardly more than its vector."""
        each = self._product_s("Q4_0", "plain", seconds, columns, 16, 256)
        assert each is not None
        return each

    def _product_s(self, type: str, kernels: str, seconds: float, columns: int, rows: int, n: int) -> float | None:
        options: dict[str, Any] = {"type": ggml.type_named(type), "kernels": _KERNELS[self._kind, kernels]}
        options |= {"columns": columns, "rows": rows, "n": n, "for_ns": int(seconds * 1e9)}
        options["scattered"] = self._kind == "experts"
        passes_s = self._run(lib.ms_kernel_probe_products, ffi.new("ms_kernel_probe_options *", options))
        return None if passes_s is None else passes_s / n

    def attention_values_per_s(self, seconds: float) -> float:
        """Of one token in layers with each a context of its own: heads x length of a head x positions, a second."""
        layers, heads, kv_heads, head, positions = 16, 32, 4, 128, 1024
        shape = (layers, heads, kv_heads, head, positions, int(seconds * 1e9))
        each = self._run(lib.ms_kernel_probe_attention, *shape)
        assert each is not None
        return layers * heads * head * positions / each

    def _run(self, function: Callable[..., int], *args: Any) -> float | None:
        """The undisturbed time of a pass; None where there are no such kernels."""
        passes = 0

        def call(message: Any, size: int) -> int:
            nonlocal passes
            passes = function(
                self._probe, *args, ffi.from_buffer("double[]", self._seconds), _MOST_PASSES, message, size
            )
            return 0 if passes == -errno.ENOTSUP else passes

        check(call, error=MeasurementError)
        return float(np.percentile(self._seconds[:passes], _UNDISTURBED)) if passes > 0 else None


def measure_compute(seconds: float, progress: Callable[[float], None]) -> Compute:
    """Measures for about so many seconds; `progress` is told the share done.

    Raises:
        MeasurementError: there is no memory for it.
        OptionError: this copy of the package came without the demo model that is decoded.
    """
    with MemoryReader(bytes=_POOL_BYTES) as memory:
        memory_bytes_per_s = memory.bytes_per_s()
    progress(0.05)
    threads = _fastest_threads(seconds * 0.06)
    with without_llama_cpp_log():  # which has a line for each matrix that is interleaved
        kernels = _kernel_rates(threads, seconds * 0.6, lambda s: progress(0.1 + 0.7 * s))
    attention = [_attention_and_width(threads, seconds * 0.03)]
    progress(0.85)
    layer_s, token_s = _overheads(kernels, threads, seconds * 0.1)
    attention.append(_attention_and_width(threads, seconds * 0.03))  # once more: the other was disturbed
    values_per_s, width_s = max(value for value, _ in attention), min(width for _, width in attention)
    layer_s = max(0.0, layer_s - _DEMO_ATTENTION / values_per_s)
    progress(1.0)
    return Compute(
        threads=threads,
        memory_bytes_per_s=max(memory_bytes_per_s, *(rate.bytes_per_s for rate in kernels)),
        kernels=tuple(kernels),
        attention_values_per_s=values_per_s,
        layer_overhead_s=layer_s,
        width_s=width_s,
        token_overhead_s=token_s,
    )


def _attention_and_width(threads: int, seconds: float) -> tuple[float, float]:
    """Values a second of attention, and what a layer takes longer for each value that it is wider."""
    with Weights("dense", threads) as weights:
        values_per_s = weights.attention_values_per_s(seconds * 0.6)
        narrow_s, wide_s = (weights.small_product_s(columns, seconds * 0.2) for columns in (_DEMO_WIDTH, _WIDE))
    return values_per_s, max(0.0, _PRODUCTS_A_LAYER * (wide_s - narrow_s) / (_WIDE - _DEMO_WIDTH))


def _kernel_rates(threads: int, seconds: float, progress: Callable[[float], None]) -> list[KernelRate]:
    """Of every type by every kernel there is; where there is time in two rounds, of which the better counts: the other was disturbed."""
    rounds = 2 if seconds >= _TWO_ROUNDS_S else 1
    steps = [(kind, type, kernels) for kind, kernels in _KERNELS for type in TYPES]
    found: dict[tuple[str, str, str], float] = {}
    done = 0
    for kind in ("dense", "experts") * rounds:
        with Weights(kind, threads, bytes=_POOL_BYTES if rounds > 1 else _POOL_BYTES // 2) as weights:
            for of, type, kernels in steps:
                if of == kind:
                    rate = weights.bytes_per_s(type, kernels, seconds / len(steps) / rounds)
                    if rate is not None:
                        found[type, kind, kernels] = max(rate, found.get((type, kind, kernels), 0.0))
                    done += 1
                    progress(done / len(steps) / rounds)
    return [KernelRate(type, kind, kernels, threads, rate) for (type, kind, kernels), rate in found.items()]


def _row_bytes(type: str, columns: int) -> int:
    number = ggml.type_named(type)
    assert number is not None
    return ggml.row_bytes(number, columns)


def _fastest_threads(seconds: float) -> int:
    """The physical cores, or all logical ones if they are faster; decode takes fewer only while others want the cores."""
    numbers = [threads for threads in candidates() if threads >= default_threads()]
    if len(numbers) == 1:
        return numbers[0]
    found = {}
    for threads in numbers:
        with Weights("experts", threads) as weights:
            found[threads] = weights.bytes_per_s("Q4_0", "plain", seconds / len(numbers)) or 0.0
    return max(found, key=found.__getitem__)


_SHORT_TEXT = 32
"""Tokens."""
_EVICTING_BYTES = 64 << 20


def _overheads(rates: Sequence[KernelRate], threads: int, seconds: float) -> tuple[float, float]:
    """What decode needs that is no weights, in seconds: of a layer, and of a token besides its layers.

    The shipped model is so small that little else is left of it; a layer of it is 256 values wide.
    """
    path = demo_model("qwen3moe")
    model = describe(path)
    per_byte = {
        (rate.type, rate.weights): 1 / rate.bytes_per_s
        for kernels in ("plain", "interleaved")  # which decode has, where there is that
        for rate in rates
        if rate.kernels == kernels
    }
    in_layers_s, elsewhere_s = 0.0, 0.0
    for tensor in open_stock(path).tensors:
        kind = "experts" if "_exps" in tensor.name else "dense"
        weights_s = tensor.size_bytes * per_byte[ggml.type_name(tensor.type), kind]
        if tensor.name.startswith("blk."):
            in_layers_s += weights_s * (model.experts_used / model.moe_layers[0].experts if kind == "experts" else 1)
        elif tensor.name == "token_embd.weight":  # which is the output matrix too
            elsewhere_s += weights_s
    tokens = np.array(list(_decoded(model, threads, seconds)))
    layers_s, rest_s = np.percentile(tokens, _UNDISTURBED, axis=0)
    return max(0.0, float(layers_s) - in_layers_s) / model.layers, max(0.0, float(rest_s) - elsewhere_s)


def _decoded(model: ModelDescription, threads: int, seconds: float) -> Iterator[tuple[float, float]]:
    """Decodes short texts, every expert in memory: seconds a token (in layers, besides them).

    Between two tokens other memory is read, so that no cache holds weights, state and code: those of a large model would not
    be there either, for it reads all of its own between.
    """
    layers, streaming = model.layers, ExpertStreaming(cache=model.maximum_cache_bytes, prefetch="off")
    llm = Llama(str(model.path), expert_streaming=streaming, n_ctx=512, n_threads=threads, verbose=False)
    with contextlib.closing(llm), MemoryReader(bytes=_EVICTING_BYTES) as others:
        llm.eval(list(range(256, 512)))  # which reads all experts, or nearly
        end, tokens = time.perf_counter() + seconds, 0
        while tokens < _SHORT_TEXT or time.perf_counter() < end:
            if tokens % _SHORT_TEXT == 0:
                llm.reset()
                llm.eval([1])
            others.read()
            before = llm.expert_stats()
            llm.eval([300 + tokens % 4096])
            done = llm.expert_stats().since(before)
            # without predictors the attention of the first layer is not told from what comes before it
            first_s = done.attention_s / (layers - 1)
            yield done.compute_s + done.attention_s + first_s + done.router_s, done.other_s - first_s
            tokens += 1
