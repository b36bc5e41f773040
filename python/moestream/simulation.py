"""Routing replayed without a model: what caches, policies and predictions would give on a disk.

The replay itself is csrc/simulate.c, which runs the very policies that the engine runs.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from ._native import check, ffi, lib
from .errors import CacheTooSmallError, OptionError
from .memory import format_size, parse_size
from .model import ModelDescription, describe
from .options import Policy
from .trace import RoutingTrace

__all__ = ["POLICIES", "PREDICTORS", "SimulatedRun", "SimulationResult", "simulate"]

POLICIES = (*get_args(Policy), "belady")
PREDICTORS = ("none", "oracle", "repeat", "random", "recall=R")
USUAL_SHARES = (0.1, 0.2, 0.3, 0.5, 0.7)
_ATTENTION = 1 / 3  # of a layer's time
_BLOCK = 1 << 22  # random numbers at once


@dataclass(frozen=True)
class SimulatedRun:
    """What one cache, policy and predictor made of a trace.

    Attributes:
        cache_experts: How many the cache holds.
        cache_share: Of all.
        policy, predictor: As asked for.
        tokens: Of the trace, without those skipped.
        wanted: Experts, one count a token and layer.
        hits: Of these, found in memory, and not because of a guess.
        useful: Found in memory because of a guess.
        late: On their way because of a guess.
        misses: Read on demand.
        guessed: Experts read for a guess, whatever came of it.
        expert_bytes: Of one; None if it is not known, and then nothing in bytes or seconds is.
        disk: Bytes per second.
        compute_s: Of one token; None if it is not known, and then nothing in seconds is.
        seconds: What the tokens took.
        wait_s: Of that, computation blocked on experts.
        token_s: What each of them took; empty if times are not known.
    """

    cache_experts: int
    cache_share: float
    policy: str
    predictor: str
    tokens: int
    wanted: int
    hits: int
    useful: int
    late: int
    misses: int
    guessed: int
    expert_bytes: int | None
    disk: int
    compute_s: float | None
    seconds: float | None
    wait_s: float | None
    token_s: tuple[float, ...] = field(default=(), repr=False)

    @property
    def hit_rate(self) -> float:
        """Share of experts that are in memory when they are wanted, however they came there."""
        return (self.hits + self.useful) / self.wanted

    @property
    def wasted(self) -> int:
        """Experts that were read for a guess and never wanted."""
        return self.guessed - self.useful - self.late

    @property
    def bytes_per_token(self) -> float | None:
        """Read from the disk, wasted guesses included."""
        return (self.misses + self.guessed) / self.tokens * self.expert_bytes if self.expert_bytes else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None

    @property
    def limit_tokens_per_s(self) -> float | None:
        """If reading these bytes and computing hid each other completely; infinite where both take no time."""
        if self.compute_s is None or self.bytes_per_token is None:
            return None
        longest = max(self.bytes_per_token / self.disk, self.compute_s)
        return 1 / longest if longest else math.inf

    def as_dict(self) -> dict[str, Any]:
        """Everything but the single tokens, ready for JSON: what is not known is None."""
        derived = ("hit_rate", "wasted", "bytes_per_token", "tokens_per_s", "limit_tokens_per_s")
        values = vars(self) | {name: getattr(self, name) for name in derived}
        return {name: value for name, value in values.items() if name != "token_s"}


@dataclass(frozen=True)
class SimulationResult:
    """What :func:`simulate` finds.

    Attributes:
        trace: What was replayed.
        expert_bytes: Of one expert, or None.
        disk: Bytes per second.
        layer_ms: Computation of a layer, or None.
        attention_ms: Of that, before its experts are wanted.
        rest_ms: Computation after the last layer.
        skip_tokens: Of the trace, tokens at its beginning that are not counted.
        runs: One a cache, predictor and policy, in this order; Belady's only without prediction.
    """

    trace: RoutingTrace
    expert_bytes: int | None
    disk: int
    layer_ms: float | None
    attention_ms: float | None
    rest_ms: float
    skip_tokens: int
    runs: tuple[SimulatedRun, ...]


def simulate(
    trace: RoutingTrace | str | os.PathLike[str],
    *,
    cache: Sequence[int | str] | int | str | None = None,
    policy: Sequence[str] | str = "all",
    predictor: Sequence[str] | str = "none",
    ahead: int | None = None,
    model: str | os.PathLike[str] | None = None,
    expert_bytes: int | str | None = None,
    disk: int | str = "1GiB",
    layer_ms: float | None = None,
    attention_ms: float | None = None,
    rest_ms: float = 0.0,
    skip_tokens: int = 0,
    seed: int = 0,
) -> SimulationResult:
    """Replays the routing of a trace, token by token, through caches that are empty at first.

    The experts of a token in one layer are asked for together and do not evict each other. Of each layer, attention is
    computed, then the experts, each as soon as it is there; reads on demand block it. The disk reads one expert at a
    time. While it is idle it reads what a predictor guesses, in order: a guess evicts what the policy gives up first, but
    no expert that is guessed to be wanted. A wrong one costs its bytes and the room.

    >>> result = simulate("text.trace", cache=["20%", "50%"], policy="lru,lrfu")
    >>> [f"{run.policy} {run.cache_share:.0%}: {run.hit_rate:.1%}" for run in result.runs]
    ['lru 20%: 23.7%', 'lrfu 20%: 30.2%', 'lru 50%: 61.5%', 'lrfu 50%: 64.2%']

    Args:
        trace: The routing, or the file that holds it.
        cache: Sizes: "20%" of all experts, a number of experts, or a size such as "3GiB"; several in a sequence or
            between commas. By default the usual shares that can hold a token's experts.
        policy: Some of POLICIES, or "all". "belady" gives up what is wanted last, which nobody can know: the yardstick.
        predictor: Some of PREDICTORS. "oracle" is right; "repeat" guesses the experts of the token before; "random" any;
            "recall=0.8" each right expert with that probability, and in place of the others wrong ones, as a lookahead
            of that accuracy does.
        ahead: Layers between the attention before which a guess is made and that of the layer it is for. By default a
            whole token's for "oracle", 1 for "recall", and for "repeat" and "random" all that a token before is known for.
        model: A GGUF file of the trace's shape, to take `expert_bytes` from.
        expert_bytes: Size of one expert.
        disk: Bytes per second.
        layer_ms: Time to compute one layer when all its experts are in memory.
        attention_ms: Of that, before the experts are wanted; by default a third.
        rest_ms: Time to compute what comes after the last layer.
        skip_tokens: Tokens at the beginning that only fill the cache: nothing of them is counted.
        seed: Of what "random" and "recall" draw.

    Raises:
        TraceError: The file is no sound routing trace.
        ModelError: The model cannot be read.
        CacheTooSmallError: A cache that cannot hold the experts of one token.
        OptionError: Another option that is none, or does not go with the others.
    """
    trace = trace if isinstance(trace, RoutingTrace) else RoutingTrace.read(trace)
    if expert_bytes is not None:
        expert_bytes = _size("expert_bytes", expert_bytes)
    if model is not None:
        if expert_bytes is not None:
            raise OptionError("expert_bytes: the model tells it; leave out one of the two")
        expert_bytes = _expert_bytes(describe(model), trace)
    _check_times(layer_ms, attention_ms, rest_ms, expert_bytes, ahead)
    if not 0 <= skip_tokens < len(trace.tokens):
        raise OptionError(
            f"skip_tokens={skip_tokens}: the trace has {len(trace.tokens)} tokens; give 0 to {len(trace.tokens) - 1}"
        )
    if layer_ms is not None and attention_ms is None:
        attention_ms = layer_ms * _ATTENTION
    disk = _size("disk", disk)
    sizes = _cache_sizes(cache, trace, expert_bytes)
    policies = _policies(policy)
    predictors = _listed("predictor", predictor)
    for name in predictors:
        _recall(name)

    machine = _Machine(expert_bytes, disk, layer_ms, attention_ms, rest_ms)
    runs = []
    for size in sizes:
        for name in predictors:
            guesses = _guesses(name, trace, np.random.default_rng(seed))
            for chosen in policies:
                if chosen != "belady" or guesses is None:
                    out, token_ns = _replayed(
                        trace, chosen, size, guesses, _ahead(name, ahead, trace), machine, skip_tokens
                    )
                    runs.append(_run(trace, chosen, name, size, machine, out, token_ns))
    return SimulationResult(trace, expert_bytes, disk, layer_ms, attention_ms, rest_ms, skip_tokens, tuple(runs))


@dataclass(frozen=True)
class _Machine:
    """As a SimulationResult has it."""

    expert_bytes: int | None
    disk: int
    layer_ms: float | None
    attention_ms: float | None
    rest_ms: float

    def times(self, top_k: int) -> dict[str, int]:
        """For ms_simulate. Without times a guess is always there in time: what counts is what it evicts."""
        if self.layer_ms is None or self.attention_ms is None or self.expert_bytes is None:
            return {"read_ns": 0, "attention_ns": 1, "expert_ns": 0, "rest_ns": 0}
        return {
            "read_ns": round(self.expert_bytes / self.disk * 1e9),
            "attention_ns": round(self.attention_ms * 1e6),
            "expert_ns": round((self.layer_ms - self.attention_ms) * 1e6 / top_k),
            "rest_ns": round(self.rest_ms * 1e6),
        }


def _replayed(
    trace: RoutingTrace,
    policy: str,
    size: int,
    guesses: npt.NDArray[np.int32] | None,
    ahead: int,
    machine: _Machine,
    skipped: int,
) -> tuple[Any, npt.NDArray[np.int64]]:
    """The ms_simulation of one replay, and nanoseconds a token."""
    experts = np.ascontiguousarray(trace.experts, dtype=np.int32)
    token_ns = np.zeros(len(experts) - skipped, np.int64)
    name = ffi.new("char[]", policy.encode())
    options = {
        "n_tokens": experts.shape[0],
        "n_layers": experts.shape[1],
        "n_experts": trace.n_experts,
        "top_k": trace.top_k,
        "experts": ffi.from_buffer("int32_t[]", experts),
        "policy": name,
        "n_slots": size,
        "guesses": ffi.NULL if guesses is None else ffi.from_buffer("int32_t[]", guesses),
        "n_guessed": 0 if guesses is None else guesses.shape[2],
        "ahead": ahead,
        "n_skipped": skipped,
        "token_ns": ffi.from_buffer("int64_t[]", token_ns),
        **machine.times(trace.top_k),
    }
    out = ffi.new("ms_simulation *")
    check(lib.ms_simulate, ffi.new("ms_simulation_options *", options), out, error=OptionError)
    return out, token_ns


def _run(
    trace: RoutingTrace,
    policy: str,
    predictor: str,
    size: int,
    machine: _Machine,
    out: Any,
    token_ns: npt.NDArray[np.int64],
) -> SimulatedRun:
    layers, timed = len(trace.layers), machine.layer_ms is not None
    return SimulatedRun(
        cache_experts=size,
        cache_share=size / (layers * trace.n_experts),
        policy=policy,
        predictor=predictor,
        tokens=len(token_ns),
        wanted=len(token_ns) * layers * trace.top_k,
        hits=out.hits,
        useful=out.useful,
        late=out.late,
        misses=out.misses,
        guessed=out.guessed,
        expert_bytes=machine.expert_bytes,
        disk=machine.disk,
        compute_s=None if machine.layer_ms is None else (layers * machine.layer_ms + machine.rest_ms) / 1e3,
        seconds=out.total_ns / 1e9 if timed else None,
        wait_s=out.wait_ns / 1e9 if timed else None,
        token_s=tuple((token_ns / 1e9).tolist()) if timed else (),
    )


# Options


def _listed(option: str, value: Sequence[int | str] | int | str) -> list[str]:
    """The items of an option: a sequence, or one string with commas."""
    items = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else list(value)
    if not items:
        raise OptionError(f"{option}: nothing is given; name at least one")
    return list(dict.fromkeys(str(item).strip() for item in items))


def _size(option: str, value: int | str) -> int:
    try:
        return parse_size(value)
    except OptionError as error:
        raise OptionError(f"{option}={value!r}: {error}") from None


def _check_times(
    layer_ms: float | None,
    attention_ms: float | None,
    rest_ms: float,
    expert_bytes: int | None,
    ahead: int | None,
) -> None:
    if ahead is not None and ahead < 0:
        raise OptionError(f"ahead={ahead}: give a number of layers, or 0 for the layer whose attention comes next")
    if layer_ms is None:
        if attention_ms is not None:
            raise OptionError("attention_ms is a part of layer_ms: give that too")
        if rest_ms:
            raise OptionError("rest_ms comes after the layers: give layer_ms too")
        return
    if expert_bytes is None:
        raise OptionError("layer_ms: how long a read takes must be known too: give expert_bytes or a model")
    if not 0 <= layer_ms < math.inf:
        raise OptionError(f"layer_ms={layer_ms}: give the milliseconds that one layer takes")
    if not 0 <= rest_ms < math.inf:
        raise OptionError(f"rest_ms={rest_ms}: give the milliseconds that a token takes after its last layer")
    if attention_ms is not None and not 0 <= attention_ms <= layer_ms:
        raise OptionError(f"attention_ms={attention_ms}: it is a part of layer_ms={layer_ms}; give 0 up to that")


def _policies(policy: Sequence[str] | str) -> list[str]:
    named = _listed("policy", policy)
    if named == ["all"]:
        return list(POLICIES)
    if unknown := [name for name in named if name not in POLICIES]:
        raise OptionError(f"policy={unknown[0]!r}: expected some of {', '.join(map(repr, POLICIES))}, or 'all'")
    return named


def _recall(predictor: str) -> float | None:
    """The recall that a predictor's name gives, if it is that one."""
    if match := re.fullmatch(r"recall=([0-9.]+)", predictor):
        try:
            recall = float(match[1])
        except ValueError:
            recall = -1.0
        if 0 <= recall <= 1:
            return recall
        raise OptionError(f"predictor={predictor!r}: give a share of right guesses, from recall=0 to recall=1")
    if predictor not in PREDICTORS[:-1]:
        raise OptionError(f"predictor={predictor!r}: expected some of {', '.join(map(repr, PREDICTORS))}")
    return None


def _ahead(predictor: str, ahead: int | None, trace: RoutingTrace) -> int:
    layers = len(trace.layers)
    if predictor == "repeat":  # the token before has passed a layer, and not yet the next
        return layers - 1 if ahead is None else min(ahead, layers - 1)
    if ahead is not None:
        return ahead
    return {"oracle": layers, "random": layers - 1}.get(predictor, 1)


def _expert_bytes(description: ModelDescription, trace: RoutingTrace) -> int:
    moe_layers, shape = description.moe_layers, (len(trace.layers), trace.n_experts)
    if (found := (len(moe_layers), moe_layers[0].experts)) != shape:
        raise OptionError(
            f"model: {description.path.name} has {found[0]} layers of {found[1]} experts, the trace {shape[0]} of {shape[1]}; "
            "give the model of the trace, or expert_bytes"
        )
    sizes = {layer.record_bytes or layer.expert_bytes for layer in moe_layers}
    if len(sizes) > 1:
        raise OptionError(
            f"model: experts of {description.path.name} are from {min(sizes)} to {max(sizes)} bytes, and the simulated cache has "
            "slots of one size; give expert_bytes"
        )
    return sizes.pop()


def _cache_sizes(
    cache: Sequence[int | str] | int | str | None, trace: RoutingTrace, expert_bytes: int | None
) -> list[int]:
    """In experts."""
    total, token = len(trace.layers) * trace.n_experts, len(trace.layers) * trace.top_k
    if cache is None:
        shares = [round(share * total) for share in USUAL_SHARES]
        return [size for size in shares if size >= token] or [total]
    sizes = []
    for item in _listed("cache", cache):
        size = min(total, _cache_size(item, total, expert_bytes))
        if size < token:
            raise CacheTooSmallError(
                f"cache={item!r}: {size} experts cannot hold those of one token, {len(trace.layers)} layers x {trace.top_k}; the "
                f"smallest is {token}, {math.ceil(1000 * token / total) / 10:g}%"
            )
        sizes.append(size)
    return list(dict.fromkeys(sizes))


def _cache_size(item: str, total: int, expert_bytes: int | None) -> int:
    if match := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", item):
        return round(float(match[1]) / 100 * total)
    if item.isdigit():
        return int(item)
    try:
        size = parse_size(item)
    except OptionError:
        raise OptionError(
            f"cache={item!r}: expected a share such as '20%', a number of experts, or a size such as '3GiB'"
        ) from None
    if expert_bytes is None:
        raise OptionError(
            f"cache={item!r}: how many experts that is depends on their size: give expert_bytes or a model"
        )
    if size < expert_bytes:
        raise CacheTooSmallError(f"cache={item!r}: one expert alone is {format_size(expert_bytes)}")
    return size // expert_bytes


# Predictors


def _guesses(predictor: str, trace: RoutingTrace, draw: np.random.Generator) -> npt.NDArray[np.int32] | None:
    """What is guessed for each token and layer, the surest first, -1 where nothing is: int32 [tokens, layers, guesses]."""
    experts = trace.experts.astype(np.int32)
    recall = _recall(predictor)
    if predictor == "none":
        return None
    if predictor == "oracle":
        return experts
    if predictor == "repeat":
        return np.concatenate([np.full_like(experts[:1], -1), experts[:-1]])
    per_token = experts.shape[1] * trace.n_experts
    parts = np.array_split(experts, max(1, math.ceil(len(experts) * per_token / _BLOCK)))
    return np.concatenate(list(_drawn(parts, recall, trace.n_experts, draw)))


def _drawn(
    parts: Sequence[npt.NDArray[np.int32]], recall: float | None, n_experts: int, draw: np.random.Generator
) -> Iterator[npt.NDArray[np.int32]]:
    """Random guesses; with a recall, right ones with that probability and wrong ones else, as far as there are any."""
    for experts in parts:
        top_k = experts.shape[2]
        rank = draw.random((*experts.shape[:2], n_experts), dtype=np.float32)
        if recall is None:
            yield np.argpartition(rank, top_k - 1)[..., :top_k].astype(np.int32)
            continue
        np.put_along_axis(rank, experts.astype(np.int64), 2.0, axis=2)
        wrong = np.argpartition(rank, top_k - 1)[..., :top_k]
        wrong = np.where(np.take_along_axis(rank, wrong, axis=2) < 2, wrong, -1)
        yield np.where(draw.random(experts.shape) < recall, experts, wrong).astype(np.int32)
