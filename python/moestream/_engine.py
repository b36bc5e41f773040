"""One model's engine: the Python face of ms_engine, and how its cache is sized."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from . import _openmp
from ._native import MESSAGE_BYTES, check, ffi, lib, text
from .errors import CacheTooSmallError, ExpertReadError, ModelError, MoestreamError, OptionError
from .memory import available_bytes, format_size
from .model import ModelDescription, describe_source
from .options import ExpertStreaming
from .stats import ExpertStats

__all__ = ["MARGIN", "Engine", "auto_cache_bytes"]

_KERNELS = {"auto": 0, "plain": 1, "interleaved": 2}
_COMPUTE = {"exact": 0, "fast": 1, "ggml": 2}
MARGIN = 0.10  # of the memory left, never taken


def auto_cache_bytes(*, available: int, untouched: int, maximum: int) -> int:
    """The cache that ``"auto"`` takes.

    Args:
        available: Memory still to be had.
        untouched: Of that, what is promised already (compute buffers that have
            not been written yet).
        maximum: What all experts need.
    """
    return max(0, min(maximum, int((available - untouched) * (1 - MARGIN))))


class Engine:
    """Streams the experts of the model at ``path``.

    Raises:
        ModelError: the file cannot be streamed.
        OptionError: an option is impossible for this file or machine.
    """

    def __init__(self, path: str, options: ExpertStreaming, *, experts_used: int = 0) -> None:
        self._engine: Any = None
        self.options = options
        reader = ffi.new("char[]", options.reader.encode())
        native = ffi.new(
            "ms_engine_options *",
            {
                "kernels": _KERNELS[options.kernels],
                "compute": _COMPUTE[options.compute],
                "direct": 0 if options.direct == "auto" else 1 if options.direct else 2,
                "reader": reader,
                "verify": options.verify,
                "experts_used": experts_used,
            },
        )
        out = ffi.new("ms_engine **")
        check(lib.ms_engine_open, os.fsencode(path), native, out, error=ModelError)
        self._engine = out[0]
        self.description: ModelDescription = describe_source(lib.ms_engine_source(self._engine), Path(path))
        self._notes: list[str] = [*_openmp.notes()]
        self._decode_ns = 0

    @property
    def _open(self) -> Any:
        if self._engine is None:
            raise MoestreamError("the model is closed")
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            lib.ms_engine_close(self._engine)
            self._engine = None

    # ---------------------------------------------------------------- loading

    @property
    def reader(self) -> str:
        return text(lib.ms_engine_reader(self._open))

    @property
    def interleaves(self) -> bool:
        """Whether dense weights may be repacked by llama.cpp: the whole model follows ``kernels``."""
        return self.options.kernels != "plain" and (self.reader != "mmap" or self.stats().kernels != "plain")

    def buffer_type(self) -> int:
        """Address of the ggml buffer type for expert tensors."""
        return int(ffi.cast("uintptr_t", lib.ms_engine_buffer_type(self._open)))

    def router_type(self) -> int:
        """Address of the ggml buffer type for routers, or 0 where llama.cpp is to choose."""
        return int(ffi.cast("uintptr_t", lib.ms_engine_router_type(self._open)))

    def load_begin(self) -> tuple[Any, int]:
        """Opens the virtual GGUF: (handle for load_end, address of its FILE)."""
        stream = lib.ms_engine_load_begin(self._open)
        if not stream:
            raise MemoryError("out of memory for the model's stream")
        return stream, int(ffi.cast("uintptr_t", stream))

    def load_end(self, stream: Any) -> None:
        check(lib.ms_engine_load_end, self._open, stream, error=ModelError)

    # ---------------------------------------------------------------- the cache

    def require_memory(self) -> None:
        """Refuses, before anything is loaded, what cannot fit.

        Raises:
            CacheTooSmallError: an explicit cache under one token's experts.
            OptionError: dense weights and cache exceed the memory available.
        """
        model, available = self.description, available_bytes()
        minimum, maximum = lib.ms_engine_minimum_bytes(self._open), lib.ms_engine_maximum_bytes(self._open)
        cache = self.options.cache_bytes
        if self.reader == "mmap":
            minimum = cache = 0
        elif cache is not None:
            self._require_minimum(cache, minimum)
            if cache > (total := psutil.virtual_memory().total):
                raise OptionError(f"cache={self.options.cache!r}: {format_size(cache)} is more than this machine's {format_size(total)} of memory; use cache='auto'")
            cache = min(cache, maximum)
        if cache and model.dense_bytes + cache > available:
            raise OptionError(
                f"cache={self.options.cache!r}: {format_size(cache)} of experts and {format_size(model.dense_bytes)} of dense weights do not fit in the "
                f"{format_size(available)} of memory available; use a smaller cache, or cache='auto'"
            )
        if model.dense_bytes + minimum > available:
            raise OptionError(
                f"{model.path}: needs at least {format_size(model.dense_bytes + minimum)} of memory ({format_size(model.dense_bytes)} of dense weights, "
                f"{format_size(minimum)} of experts), but {format_size(available)} is available; free some, or take a smaller model"
            )

    def _require_minimum(self, cache: int, minimum: int) -> None:
        if cache < minimum:
            model = self.description
            raise CacheTooSmallError(
                f"cache={self.options.cache!r}: {format_size(cache)} cannot hold the experts of one token; the smallest cache for {model.path.name} is "
                f"{minimum} bytes ({format_size(minimum)}: {len(model.moe_layers)} layers x {model.experts_used} experts)"
            )

    def start(self, *, untouched: int) -> None:
        """Gives the experts their memory. ``untouched``: see :func:`auto_cache_bytes`."""
        if self.reader == "mmap":
            check(lib.ms_engine_start, self._open, 0, error=OptionError)
            return
        minimum, maximum = lib.ms_engine_minimum_bytes(self._open), lib.ms_engine_maximum_bytes(self._open)
        available = available_bytes()
        cache = self.options.cache_bytes
        if cache is None:
            cache = auto_cache_bytes(available=available, untouched=untouched, maximum=maximum)
            if cache < minimum:
                raise CacheTooSmallError(
                    f"cache='auto': {format_size(available)} of memory is available, {format_size(untouched)} of it promised to KV cache and compute buffers; "
                    f"the rest less a tenth is under the {format_size(minimum)} that one token's experts need; lower n_ctx or n_ubatch, or free some memory"
                )
            self._notes.append(f"cache: {format_size(cache)} of {format_size(maximum)}, from {format_size(available)} of memory available")
        else:
            self._require_minimum(cache, minimum)
            cache = min(cache, maximum)
            if cache > available - untouched:
                raise OptionError(
                    f"cache={self.options.cache!r}: more than the {format_size(max(0, available - untouched))} of memory left beside dense weights, KV cache and "
                    "compute buffers; use a smaller cache, or cache='auto'"
                )
        check(lib.ms_engine_start, self._open, cache, error=OptionError)

    # ---------------------------------------------------------------- afterwards

    def require_open(self) -> None:
        """Raises MoestreamError if the engine is closed."""
        _ = self._open

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Turns a computation that failed in the engine into its ExpertReadError."""
        lib.ms_engine_take_error(self._open, ffi.NULL, 0)  # of a computation whose caller did not ask
        try:
            yield
        except RuntimeError:
            message = ffi.new("char[]", MESSAGE_BYTES)
            if lib.ms_engine_take_error(self._open, message, MESSAGE_BYTES):
                raise ExpertReadError(text(message)) from None
            raise

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """What happens within is counted as time for tokens, and fails as :meth:`failures` says."""
        began = time.perf_counter_ns()
        try:
            with self.failures():
                yield
        finally:
            self._decode_ns += time.perf_counter_ns() - began

    def wait_s(self) -> float:
        """``wait_s`` of the stats, at the price of a microsecond."""
        return lib.ms_engine_stats(self._open).wait_ns / 1e9

    def stats(self) -> ExpertStats:
        s = lib.ms_engine_stats(self._open)
        model = self.description
        kernels = "plain" if not s.matrices_interleaved else "mixed" if s.matrices_plain else "interleaved"
        notes = text(lib.ms_engine_notes(self._open)).splitlines() + self._notes
        return ExpertStats(
            tokens=s.tokens,
            hits=s.hits,
            misses=s.misses,
            reads=s.reads,
            bytes_read=s.bytes_read,
            read_s=s.read_ns / 1e9,
            wait_s=s.wait_ns / 1e9,
            compute_s=s.compute_ns / 1e9,
            attention_s=s.attention_ns / 1e9,
            router_s=s.router_ns / 1e9,
            other_s=max(0, self._decode_ns - s.wait_ns - s.compute_ns - s.attention_ns - s.router_ns) / 1e9,
            convert_s=s.convert_ns / 1e9,
            fused_blocks=s.fused_blocks,
            ggml_blocks=s.ggml_blocks,
            zeros=tuple(share for layer in range(len(model.moe_layers)) if (share := lib.ms_engine_zeros(self._open, layer)) >= 0),
            slots_used=s.slots_used,
            slots_total=s.slots_total,
            slot_bytes=s.slot_bytes,
            cache_bytes=s.cache_bytes,
            dense_bytes=model.dense_bytes,
            expert_bytes=model.expert_bytes,
            resident_bytes=model.dense_bytes + s.expert_resident_bytes,
            bytes_on_disk=model.bytes_on_disk,
            reader=self.reader,
            direct=bool(lib.ms_engine_direct(self._open)),
            kernels=kernels,
            notes=tuple(notes),
        )
