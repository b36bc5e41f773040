"""Will this model run well on this machine? Shape, routing, machine and memory put together."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .. import memory as memory_of_machine
from .._engine import MARGIN, auto_cache_bytes
from ..errors import CacheTooSmallError, MeasurementError, OptionError
from ..memory import format_size, parse_size
from ..probing import Probe, cached_probe
from .forecast import Forecast, forecast
from .machine import Machine, assumed_probe
from .maths import bubble_s, expert_read_s, footprint_bytes, hidden_experts, wait_s
from .routing import Routing, routing_for
from .shape import ModelShape, shape_of
from .verdict import rate, verdict

__all__ = ["ContextForecast", "MemoryNeed", "Plan", "plan"]

CONTEXT = 4096
DEPTH = 512  # tokens of context at which speed is told
CONTEXTS = (512, 4096, 16384)
SHARES = tuple(share / 10 for share in range(1, 11))
SLOW_TOKENS_PER_S = 2.0  # under it fewer experts are worth a thought
_ENOUGH = 0.98  # of the speed of all the memory: a cache that gives it is large enough
_FAST_DISK = 5 * 10**9
_WORTH_TELLING = 1.1


@dataclass(frozen=True)
class MemoryNeed:
    """Memory, in bytes: what there is, and what a model takes apart from its cache."""

    available_bytes: int
    dense_bytes: int
    kv_bytes: int
    buffer_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """All but the cache."""
        return footprint_bytes(self.dense_bytes, 0, kv_bytes=self.kv_bytes, buffer_bytes=self.buffer_bytes)

    def resident_bytes(self, cache_bytes: int) -> int:
        return self.fixed_bytes + cache_bytes

    def wanted_bytes(self, cache_bytes: int) -> int:
        """That must be available for `cache="auto"` to give so much."""
        return self.fixed_bytes + math.ceil(cache_bytes / (1 - MARGIN))

    def largest_cache_bytes(self, most: int) -> int:
        """What `cache="auto"` takes."""
        return auto_cache_bytes(available=self.available_bytes, untouched=self.fixed_bytes, maximum=most)


@dataclass(frozen=True)
class ContextForecast:
    """A context's length, and what it does to a token.

    Attributes:
        context: Tokens before.
        kv_bytes: Of its keys and values.
        attention_s: Of a layer: Y.
        hidden: Experts that could be read meanwhile: floor(Y B / X). They are, where a router knows before attention.
        bubble_s: What a layer then still waits for the experts that the cache lacks.
        wait_s: The same if none was in the cache: max(0, k - n) X / B.
        tokens_per_s: With the cache of the verdict.
    """

    context: int
    kv_bytes: int
    attention_s: float
    hidden: int
    bubble_s: float
    wait_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Plan:
    """What :func:`plan` finds. Sizes are in bytes, times in seconds.

    Attributes:
        shape: Of the model.
        context: Tokens that there is room for.
        depth: Of these, before those whose speed is told.
        memory: What there is, and what it takes.
        routing: Where the routing is from.
        machine: Where the machine's numbers are from.
        disk: Bytes per second from the disk, with reads of the engine's kind.
        caches: Forecasts by share of the experts, None where a cache cannot hold one token's; only that asked for, if one is.
        chosen: The forecast of the cache asked for, or recommended; None if the model does not run.
        missing_bytes: Of memory, for the smallest cache; 0 if it runs.
        contexts: What a longer context does.
        fewer_experts: The forecast with fewer experts a token, where the model does not run otherwise or is slow.
        faster_disk: Bytes per second of a faster disk, and the tokens per second that it would give; None if it would not.
        notes: What was assumed.
    """

    shape: ModelShape
    context: int
    depth: int
    memory: MemoryNeed
    routing: str
    machine: str
    disk: float
    caches: tuple[tuple[float, Forecast | None], ...]
    chosen: Forecast | None
    missing_bytes: int
    contexts: tuple[ContextForecast, ...]
    fewer_experts: Forecast | None
    faster_disk: tuple[float, float] | None
    notes: tuple[str, ...]

    @property
    def limit(self) -> str | None:
        """ "disk", "processor" or "both"; None if the model does not run."""
        if self.chosen is None:
            return None
        waiting = self.chosen.wait_s * self.chosen.on_demand_tokens_per_s
        return "disk" if waiting > 0.5 else "both" if waiting > 0.2 else "processor"

    @property
    def verdict(self) -> tuple[str, ...]:
        """In sentences."""
        return tuple(verdict(self))

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "model": self.shape.as_dict(),
            "context": self.context,
            "depth": self.depth,
            "memory": asdict(self.memory) | {"fixed_bytes": self.memory.fixed_bytes},
            "routing": self.routing,
            "machine": self.machine,
            "disk": self.disk,
            "caches": [
                {"share": share, "forecast": self._forecast(found) if found else None} for share, found in self.caches
            ],
            "chosen": self._forecast(self.chosen) if self.chosen else None,
            "missing_bytes": self.missing_bytes,
            "limit": self.limit,
            "contexts": [asdict(context) for context in self.contexts],
            "fewer_experts": self._forecast(self.fewer_experts) if self.fewer_experts else None,
            "faster_disk": dict(zip(("disk", "tokens_per_s"), self.faster_disk, strict=True))
            if self.faster_disk
            else None,
            "notes": list(self.notes),
            "verdict": list(self.verdict),
        }

    def _forecast(self, found: Forecast) -> dict[str, Any]:
        resident = self.memory.resident_bytes(found.cache_bytes)
        return found.as_dict() | {"resident_bytes": resident, "fits": self.fits(found)}

    def fits(self, found: Forecast) -> bool:
        """Is there the memory for it?"""
        return found.cache_bytes <= self.memory.largest_cache_bytes(found.cache_bytes)


def plan(
    model: ModelShape | str | os.PathLike[str],
    *,
    memory: int | str | None = None,
    disk: int | str | None = None,
    memory_bandwidth: int | str | None = None,
    probe: Probe | str | os.PathLike[str] | None = None,
    trace: str | os.PathLike[str] | None = None,
    cache: int | str | None = None,
    context: int = CONTEXT,
    depth: int = DEPTH,
) -> Plan:
    """Tells from headers and numbers how a model would run; nothing is loaded.

    Args:
        model: A GGUF file, or a shape (`model_shape`).
        memory: That may be taken; by default what is available now, or was where `probe` was made.
        disk: The most bytes per second that the disk gives; by default what the probe measured.
        memory_bandwidth: Bytes per second, for a machine without a probe; then `disk` must be given too.
        probe: What `moestream.probe` measured, or its file. By default the latest one of the model's disk, or of the current
            folder's if the model is not here.
        trace: A routing of this model; by default one with published locality is made up.
        cache: Only this one: bytes, a size, or a share of the experts such as "30%".
        context: Tokens that there must be room for.
        depth: Of these, before those whose speed is told.

    Raises:
        ModelError: The file is no sound model with experts.
        TraceError: The trace is not sound.
        CacheTooSmallError: A cache that cannot hold one token's experts.
        MeasurementError: Nothing is known about the machine: there is no probe.
        OptionError: Another option that is none, or does not go with the others.
    """
    shape = model if isinstance(model, ModelShape) else shape_of(model)
    if context < 1:
        raise OptionError(f"--context={context}: give a number of tokens of at least 1")
    if depth < 1:
        raise OptionError(f"--depth={depth}: give a number of tokens of at least 1")
    depth = min(depth, context)
    machine, about, available = _machine(shape.path, probe, disk, memory_bandwidth)
    need = MemoryNeed(
        available_bytes=available if memory is None else _size("--memory", memory),
        dense_bytes=shape.dense_bytes,
        kv_bytes=shape.kv_cache_bytes(context),
        buffer_bytes=shape.buffer_bytes(context),
    )
    planner = _Planner(shape, machine, routing_for(shape, trace), need, depth)
    return planner.plan(context, about, cache)


def _size(option: str, value: int | str) -> int:
    try:
        return parse_size(value)
    except OptionError as error:
        raise OptionError(f"{option}={value}: {error}") from None


def _machine(
    path: str | None,
    probe: Probe | str | os.PathLike[str] | None,
    disk: int | str | None,
    memory_bandwidth: int | str | None,
) -> tuple[Machine, str, int]:
    """The machine, where its numbers are from, and its available memory."""
    capped = None if disk is None else _size("--disk", disk)
    if memory_bandwidth is not None:
        if probe is not None:
            raise OptionError("--memory-bandwidth is for a machine without a probe; leave out one of the two")
        if capped is None:
            raise OptionError("--memory-bandwidth: the disk must be known too; give its bytes per second with --disk")
        bandwidth = _size("--memory-bandwidth", memory_bandwidth)
        assumed = assumed_probe(disk=capped, memory_bandwidth=bandwidth)
        about = f"not measured: {rate(capped)} from the disk, {rate(bandwidth)} from memory"
        return Machine(assumed, capped, assumed=True), about, memory_of_machine.available_bytes()
    if probe is None:
        found = cached_probe(path or ".")
        if found is None:
            raise MeasurementError(
                "how fast this machine is has not been measured; run `moestream probe` first (20 seconds), give one with "
                "--probe FILE, or two numbers with --disk and --memory-bandwidth"
            )
        return Machine(found, capped), _about(found, capped), memory_of_machine.available_bytes()
    found = probe if isinstance(probe, Probe) else Probe.read(probe)
    return Machine(found, capped), _about(found, capped), found.available_bytes


def _about(probe: Probe, capped: int | None) -> str:
    name = probe.machine.get("cpu") or "a machine"
    day = f", {probe.when[:10]}" if probe.when else ""
    return f"measured on {name}{day}" + (f"; a disk of at most {rate(capped)}" if capped else "")


@dataclass(frozen=True)
class _Planner:
    """What a plan is made from; forecasts are at `depth` tokens of context."""

    shape: ModelShape
    machine: Machine
    routing: Routing
    memory: MemoryNeed
    depth: int

    def plan(self, context: int, about: str, cache: int | str | None) -> Plan:
        shape = self.shape
        if cache is not None:
            chosen: Forecast | None = self.at(self._asked(cache))
            caches: tuple[tuple[float, Forecast | None], ...] = ((chosen.cache_share, chosen),)
        else:
            caches = tuple(self._curve())
            chosen = self._recommended([found for _, found in caches if found])
        missing = max(0, self.memory.wanted_bytes(shape.minimum_cache_bytes) - self.memory.available_bytes)
        return Plan(
            shape=shape,
            context=context,
            depth=self.depth,
            memory=self.memory,
            routing=self.routing.source,
            machine=about,
            disk=chosen.disk if chosen else self.machine.disk_rate(shape, shape.top_k).usual,
            caches=caches,
            chosen=chosen,
            missing_bytes=missing,
            contexts=tuple(self._contexts(chosen)),
            fewer_experts=self._fewer(chosen),
            faster_disk=self._faster(chosen) if chosen else None,
            notes=shape.notes + tuple(self._notes()),
        )

    def at(self, cache_experts: int, *, machine: Machine | None = None, depth: int | None = None) -> Forecast:
        """The forecast of one cache."""
        return forecast(self.shape, machine or self.machine, self.routing, cache_experts, depth=depth or self.depth)

    @property
    def all_experts(self) -> int:
        return self.shape.moe_layers * self.shape.experts

    @property
    def of_a_token(self) -> int:
        return self.shape.moe_layers * self.routing.trace.top_k

    def _asked(self, cache: int | str) -> int:
        """In experts."""
        if isinstance(cache, str) and cache.endswith("%"):
            try:
                experts = round(float(cache[:-1]) / 100 * self.all_experts)
            except (ValueError, OverflowError):
                raise OptionError(f"--cache={cache}: expected a size such as 3GiB, or a share such as 30%") from None
        else:
            experts = int(_size("--cache", cache) / self.shape.slot_bytes)
        if experts < self.of_a_token:
            raise CacheTooSmallError(
                f"--cache={cache}: cannot hold the {self.of_a_token} experts of one token; the smallest is "
                f"{format_size(self.shape.minimum_cache_bytes)}"
            )
        return min(experts, self.all_experts)

    def _curve(self) -> Iterator[tuple[float, Forecast | None]]:
        for share in SHARES:
            experts = round(share * self.all_experts)
            yield share, self.at(experts) if experts >= self.of_a_token else None

    def _largest(self) -> int | None:
        """What `cache="auto"` holds, in experts; None if that is less than one token's."""
        size = self.memory.largest_cache_bytes(self.shape.maximum_cache_bytes)
        experts = self.all_experts if size >= self.shape.maximum_cache_bytes else int(size / self.shape.slot_bytes)
        return experts if experts >= self.of_a_token else None

    def _recommended(self, curve: list[Forecast]) -> Forecast | None:
        """The smallest cache that is nearly as fast as all the memory there is."""
        largest = self._largest()
        if largest is None:
            return None
        best = self.at(largest)
        enough = [
            found
            for found in curve
            if found.cache_experts <= largest and found.tokens_per_s >= _ENOUGH * best.tokens_per_s
        ]
        return enough[0] if enough else best

    def _contexts(self, chosen: Forecast | None) -> Iterator[ContextForecast]:
        shape, used = self.shape, self.routing.trace.top_k
        lacking = used * (1 - chosen.hit_rate) if chosen else float(used)
        disk = self.machine.disk_rate(shape, used).usual
        for context in CONTEXTS:
            attention_s = self.machine.costs(shape, depth=context, top_k=used).attention_s
            hidden = hidden_experts(attention_s, disk, shape.slot_bytes)
            yield ContextForecast(
                context=context,
                kv_bytes=shape.kv_cache_bytes(context),
                attention_s=attention_s,
                hidden=hidden,
                bubble_s=bubble_s(lacking * expert_read_s(shape.slot_bytes, disk), attention_s),
                wait_s=wait_s(used, hidden, shape.slot_bytes, disk),
                tokens_per_s=self.at(chosen.cache_experts, depth=context).tokens_per_s if chosen else 0.0,
            )

    def _fewer(self, chosen: Forecast | None) -> Forecast | None:
        """The most experts a token with which it runs, and not slowly."""
        if chosen is not None and chosen.tokens_per_s >= SLOW_TOKENS_PER_S:
            return None
        for used in range(self.shape.top_k - 1, 0, -1):
            fewer = dataclasses.replace(
                self,
                shape=dataclasses.replace(
                    self.shape,
                    top_k=used,
                    minimum_cache_bytes=math.ceil(self.shape.minimum_cache_bytes * used / self.shape.top_k),
                ),
                routing=self.routing.with_experts(used),
            )
            largest = fewer._largest()
            if largest is not None and (found := fewer.at(largest)).tokens_per_s >= SLOW_TOKENS_PER_S:
                return found
        return None

    def _faster(self, chosen: Forecast) -> tuple[float, float] | None:
        disk = max(_FAST_DISK, 2 * chosen.disk)
        machine = dataclasses.replace(self.machine, disk=None, probe=_with_disk(self.machine.probe, disk))
        found = self.at(chosen.cache_experts, machine=machine)
        return (disk, found.tokens_per_s) if found.tokens_per_s > _WORTH_TELLING * chosen.tokens_per_s else None

    def _notes(self) -> Iterator[str]:
        if self.machine.assumed:
            yield "kernels are assumed to read weights at 60% of the memory bandwidth; `moestream probe` measures them"
        if not self.routing.own:
            yield "the routing is not this model's: misses may be a fifth more or fewer; --trace takes a recorded one"
        if not self.shape.laid and self.shape.reads > 1:
            yield f"stock layout: an expert is {self.shape.reads} reads; a laid file (`moestream convert`) makes it one"


def _with_disk(probe: Probe, disk: float) -> Probe:
    """The same machine with a disk that gives so much, whatever the reads."""
    reads = tuple(dataclasses.replace(rate, bytes_per_s=disk, bytes_per_s_low=disk) for rate in probe.reads)
    return dataclasses.replace(probe, reads=reads)
