"""One model's engine: the Python face of ms_engine, and how its cache is sized."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from . import _openmp
from ._native import MESSAGE_BYTES, check, ffi, lib, text
from ._sequences import Sequences
from .errors import CacheTooSmallError, ExpertReadError, ModelError, MoestreamError, OptionError
from .memory import available_bytes, format_size
from .model import ModelDescription, describe_source
from .options import ExpertStreaming
from .sidecar import Sidecar
from .stats import ExpertStats, Predictions
from .timeline import EVENT
from .trace import RoutingTrace

__all__ = ["MARGIN", "Engine", "auto_cache_bytes"]

logger = logging.getLogger("moestream")

_PREROUTERS = {"route": 1, "advise": 2}
_KERNELS = {"auto": 0, "plain": 1, "interleaved": 2}
_COMPUTE = {"exact": 0, "fast": 1, "ggml": 2}
_PREDICTORS = {"router": 1, "lookahead": 2, "repeat": 4, "oracle": 8, "random": 16}
_DEPTHS = {-1: "router", 0: "lookahead, before attention", 1: "1 layer ahead", **{n: f"{n} layers ahead" for n in range(2, 8)}, 8: "heads"}
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
    """Streams the experts of the model at ``path``; its heads, if any are asked for, are those of ``sidecar``.

    Raises:
        ModelError: the file cannot be streamed.
        OptionError: an option is impossible for this file or machine.
    """

    def __init__(self, path: str, options: ExpertStreaming, *, experts_used: int = 0, sidecar: Sidecar | None = None) -> None:
        self._engine: Any = None
        self._recording = 0  # events that there is room for
        self._head_layers = self._head_bytes = self._heads_checksum = 0
        self.options = options
        reader = ffi.new("char[]", options.reader.encode())
        policy = ffi.new("char[]", options.policy.encode())
        native = ffi.new(
            "ms_engine_options *",
            {
                "kernels": _KERNELS[options.kernels],
                "compute": _COMPUTE[options.compute],
                "direct": 0 if options.direct == "auto" else 1 if options.direct else 2,
                "reader": reader,
                "verify": options.verify,
                "experts_used": experts_used,
                "predictors": sum(_PREDICTORS[name] for name in options.predictors),
                "automatic": options.prefetch == "auto",
                "cache_aware": options.cache_aware,
                "policy": policy,
            },
        )
        out = ffi.new("ms_engine **")
        check(lib.ms_engine_open, os.fsencode(path), native, out, error=ModelError)
        self._engine = out[0]
        self.description: ModelDescription = describe_source(lib.ms_engine_source(self._engine), Path(path))
        self.overrides_experts_used = experts_used > 0
        self._notes: list[str] = [*_openmp.notes()]
        self._decode_ns = 0
        self._verdict = 0
        self._require_editable()
        if options.replay is not None:
            self._replay(RoutingTrace.read(options.replay))
        self.predicts = options.prerouter != "off"
        if self.predicts:
            try:
                self._take_heads(sidecar)
            except MoestreamError:
                self.close()
                raise

    def _require_editable(self) -> None:
        """Refuses what changes the choice of experts, where routers are computed out of reach."""
        named = "replay=" if self.options.replay is not None else "cache_aware=" if self.options.cache_aware else None
        if named and not self.router_type():
            path = self.description.path
            self.close()
            raise OptionError(f"{path}: its routers are quantised, and what these choose cannot be changed; leave out {named}, or take a file that keeps them in F32")

    def _replay(self, trace: RoutingTrace) -> None:
        replay, model = os.fspath(self.options.replay), self.description
        counts = {layer.experts for layer in model.moe_layers}
        if counts != {trace.n_experts} or trace.top_k != model.experts_used:
            self.close()
            raise OptionError(
                f"replay={replay!r}: is of {trace.top_k} of {trace.n_experts} experts in a layer, and {model.path.name} takes {model.experts_used} "
                f"of {', '.join(map(str, sorted(counts)))}; synthesise one of its shape"
            )
        table = np.ascontiguousarray(trace.experts, np.int32)
        recall = ffi.new("float[8]", [*self.options.replay_recall, *[self.options.replay_recall[-1]] * 8][:8])
        try:
            check(lib.ms_engine_replay, self._engine, ffi.from_buffer("int32_t[]", table), len(table), table.shape[1], trace.top_k, recall, error=OptionError)
        except OptionError:
            self.close()
            raise
        self._notes.append(f"replay: the routers follow {replay} ({trace.synthetic or 'recorded from ' + trace.model}), not the model: what it writes has no meaning")

    def _take_heads(self, sidecar: Sidecar | None) -> None:
        prerouter = self.options.prerouter
        if sidecar is None or sidecar.heads is None:
            raise OptionError(f"prerouter={prerouter!r}: {self.options.sidecar} holds no heads; leave it out, or take a sidecar that does")
        heads = sidecar.heads
        native, kept = ffi.new("ms_head[]", len(heads.heads)), []
        for to, head in zip(native, heads.heads, strict=True):
            to.owner = head.owner
            for part in ("linear_h", "linear_onehot", "fc1_h", "fc1_onehot", "fc2"):
                matrix = getattr(head, part)
                setattr(to, "type_" + part.removesuffix("_h"), matrix.type)
                kept.append(ffi.from_buffer(matrix.data))
                setattr(to, part, kept[-1])
                self._heads_checksum = zlib.crc32(matrix.data, self._heads_checksum)
        try:
            shape = {"columns": heads.columns, "experts": heads.experts, "width": heads.width}
            check(lib.ms_engine_heads, self._engine, native, len(heads.heads), _PREROUTERS[prerouter], shape, error=OptionError)
        except OptionError as error:
            raise OptionError(f"prerouter={prerouter!r}: the heads of {sidecar.path} do not fit {self.description.path}: {error}") from None
        what = "choose the experts of" if prerouter == "route" else "say ahead what is chosen in"
        self._head_layers = layers = len(heads.heads)
        self._head_bytes = heads.size_bytes
        self._notes.append(f"prerouter: heads {what} {layers} layer{'s' * (layers > 1)}, from {heads.owners[0] + 1} to {heads.owners[-1] + 1}, and take {format_size(heads.size_bytes)} of memory")

    def sequences(self) -> Sequences | None:
        """For a context that decodes; None where no routing is predicted."""
        return Sequences(self._open, self._heads_checksum) if self.predicts else None

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

    def norm_type(self) -> int:
        """Address of the ggml buffer type for the norms before attention, or 0 where nothing is to be done there."""
        return int(ffi.cast("uintptr_t", lib.ms_engine_norm_type(self._open))) if self.options.predictors else 0

    def norm_pattern(self) -> str:
        """Regular expression of these norms."""
        return text(lib.ms_norm_pattern(self._open))

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
            if self._engine is not None and (verdict := lib.ms_engine_verdict(self._engine)) != self._verdict:
                self._verdict = verdict
                logger.info("%s", self._prefetch_notes(lib.ms_engine_stats(self._engine))[-1])

    def set_prefetch(self, prefetch: str) -> None:
        """As the option, from the next token on; the model must have been loaded with one other than "off"."""
        options = replace(self.options, prefetch=prefetch)
        if options.predictors and not self.options.predictors:
            raise OptionError(f"prefetch={prefetch!r}: the model was loaded without")
        lib.ms_engine_set_predictors(self._open, sum(_PREDICTORS[name] for name in options.predictors), prefetch == "auto")

    def set_read_rate(self, bytes_per_s: float | None) -> None:
        """Reads arrive no faster than a disk of that rate would bring them, one after the other; None: as they come.

        For measuring: unlike a cgroup's limit, which lets a disk that was idle make up for it, such a disk never catches up.
        """
        check(lib.ms_engine_pace, self._open, int(bytes_per_s or 0), error=OptionError)

    def _predictions(self) -> tuple[Predictions, ...]:
        found = ((name, lib.ms_engine_predictions(self._open, depth)) for depth, name in _DEPTHS.items())
        return tuple(Predictions(name, c.layers, c.recalled / c.experts, c.exact / c.layers, tuple(right / said if said else 0.0 for right, said in zip(c.absent_right, c.absent, strict=True))) for name, c in found if c.layers)

    def _prefetch_notes(self, s: Any) -> list[str]:
        """What is read ahead, once it is known; s: the ms_stats."""
        if not self.options.predictors:
            return []
        notes = []
        reads_state = ffi.new("bool *")
        known = lib.ms_engine_layers_known(self._open, reads_state)
        if known and reads_state[0] and "router" in self.options.predictors:
            notes.append("prefetch: this model chooses a layer's experts before its attention, and they are read during it")
        if s.verdict:
            times = f"a token takes {s.trial_with_ns / 1e6:.3g} ms with, {s.trial_without_ns / 1e6:.3g} ms without"
            notes.append(f"prefetch: guessing {'pays' if s.verdict > 0 else 'does not pay'} here ({times}) and is {'on' if s.verdict > 0 else 'off'}")
        return notes

    def wait_s(self) -> float:
        """``wait_s`` of the stats, at the price of a microsecond."""
        return lib.ms_engine_stats(self._open).wait_ns / 1e9

    def stats(self) -> ExpertStats:
        s = lib.ms_engine_stats(self._open)
        model = self.description
        kernels = "plain" if not s.matrices_interleaved else "mixed" if s.matrices_plain else "interleaved"
        notes = [*text(lib.ms_engine_notes(self._open)).splitlines(), *self._notes, *self._prefetch_notes(s)]
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
            other_s=max(0, self._decode_ns - s.wait_ns - s.compute_ns - s.attention_ns - s.router_ns - s.heads_ns) / 1e9,
            convert_s=s.convert_ns / 1e9,
            guessed=s.guessed,
            useful=s.useful,
            late=s.late,
            wasted=s.wasted,
            guessed_bytes=s.guessed_bytes,
            wasted_bytes=s.wasted_bytes,
            replaced=s.replaced,
            predict_s=s.predict_ns / 1e9,
            dropped=s.dropped,
            heads_s=s.heads_ns / 1e9,
            heads_bytes=s.heads_bytes,
            head_layers=self._head_layers,
            prerouter=self.options.prerouter,
            predictions=self._predictions(),
            fused_blocks=s.fused_blocks,
            ggml_blocks=s.ggml_blocks,
            zeros=tuple(share for layer in range(len(model.moe_layers)) if (share := lib.ms_engine_zeros(self._open, layer)) >= 0),
            slots_used=s.slots_used,
            slots_total=s.slots_total,
            slot_bytes=s.slot_bytes,
            cache_bytes=s.cache_bytes,
            dense_bytes=model.dense_bytes,
            expert_bytes=model.expert_bytes,
            resident_bytes=model.dense_bytes + s.expert_resident_bytes + self._head_bytes,
            bytes_on_disk=model.bytes_on_disk,
            reader=self.reader,
            direct=bool(lib.ms_engine_direct(self._open)),
            prefetch=self.options.prefetch,
            kernels=kernels,
            policy="" if self.reader == "mmap" else self.options.policy,
            notes=tuple(notes),
        )

    def settings(self) -> dict[str, Any]:
        """The options as they were chosen, and the bytes of the cache; without numbers and files that were not given."""
        stats, settings = self.stats(), {}
        for field in fields(self.options):
            value = getattr(stats, field.name, getattr(self.options, field.name))
            value = os.fspath(value) if isinstance(value, os.PathLike) else value
            if isinstance(value, (str, bool)) or value != field.default:
                settings[field.name] = value
        return {**settings, "cache": stats.cache_bytes}

    # ---------------------------------------------------------------- the timeline

    def record(self, capacity: int) -> None:
        """Starts to record the last ``capacity`` events of computing and reading.

        Raises:
            OptionError: there is no memory for them.
        """
        if not lib.ms_engine_record(self._open, capacity):
            raise OptionError(f"capacity={capacity}: no memory for {format_size(capacity * EVENT.itemsize)} of events; record fewer")
        self._recording = capacity

    def recorded(self) -> tuple[npt.NDArray[Any], int]:
        """Ends recording: the events (:data:`EVENT`), and how many there was no room for."""
        lib.ms_engine_record(self._open, 0)
        events, dropped = np.empty(self._recording, EVENT), ffi.new("uint64_t *")
        n = lib.ms_engine_recorded(self._open, ffi.from_buffer("ms_event[]", events.view(np.uint8), require_writable=True), len(events), dropped)
        return events[:n].copy(), dropped[0]
