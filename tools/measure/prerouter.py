"""The figures of the prerouter: what reading ahead hides, how good predictions are, and what options that change results cost.

Shapes with random weights follow a routing made up with published locality; what a lookahead finds in them is made up at the
accuracy measured on the demo models, whose weights are real. `quick` takes small shapes, one disk and few tokens.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import get_args

import moestream
from moestream import RoutingTrace, simulate
from moestream.bench.session import Arm, Session
from moestream.options import Policy, Prefetch

from . import ahead, demo_model, quality
from .ahead import Effort, Turn
from .figure import Figure, MeasurementError, note
from .streams import random_prompt
from .subject import Subject, made

__all__ = ["FIGURES", "Bench", "open_bench"]

GIB = 1 << 30
RATIOS = (0.3, 0.5, 1.0, 2.0, 3.0)
ARMS = ("off", "router", "router+lookahead", "oracle")
HALF_SHARE = 0.5
SHARES = ("10%", "20%", "30%", "50%", "70%")


@dataclass(frozen=True)
class Size:
    """One of the shapes that are measured: `shape` for tools/make_model, `made_bytes` with its laid copy."""

    name: str
    shape: tuple[str, ...]
    like: str
    made_bytes: int
    cache: float
    least_ram_share: float | None = None


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    effort: Effort
    sizes: tuple[Size, ...]
    ratios: tuple[float, ...]
    qwen: tuple[str, ...]
    qwen_like: str
    qwen_bytes: int
    experts_used: tuple[int, ...]
    middle: tuple[str, ...]
    contexts: tuple[int, ...]
    accuracy_tokens: int
    rounds_of_cost: int


FULL = Plan(
    effort=Effort(tokens=40, rounds=3, warms=200, trace_tokens=1200),
    sizes=(
        Size("smallthinker_4b@1GiB", ("--shape", "smallthinker-4b"), "smallthinker-4b", 5 * GIB, GIB, 0.45),
        Size("smallthinker_21b@8GiB", ("--shape", "smallthinker-21b"), "smallthinker-21b", 26 * GIB, 8 * GIB, 0.80),
    ),
    ratios=RATIOS,
    qwen=("--shape", "qwen3-30b-a3b"),
    qwen_like="qwen3-30b-a3b",
    qwen_bytes=37 * GIB,
    experts_used=(2, 4, 8),
    middle=("--shape", "qwen3-30b-a3b", "--layers", "10", "--vocab", "32000"),
    contexts=(128, 1024, 4096, 16384),
    accuracy_tokens=2000,
    rounds_of_cost=7,
)
QUICK = Plan(
    effort=Effort(tokens=16, rounds=3, warms=40, trace_tokens=120),
    sizes=(
        Size(
            "smallthinker_4b",
            ("--shape", "smallthinker-4b", "--layers", "6", "--vocab", "4096"),
            "smallthinker-4b",
            GIB,
            HALF_SHARE,
        ),
    ),
    ratios=(2.0,),
    qwen=("--shape", "qwen3-30b-a3b", "--layers", "2", "--experts", "32", "--topk", "4", "--vocab", "4096"),
    qwen_like="smallthinker-4b",
    qwen_bytes=GIB,
    experts_used=(2,),
    middle=("--shape", "qwen3-30b-a3b", "--layers", "2", "--experts", "48", "--vocab", "4096"),
    contexts=(128,),
    accuracy_tokens=120,
    rounds_of_cost=2,
)


@dataclass(frozen=True)
class Bench:
    """What the figures share."""

    plan: Plan
    demo: demo_model.Bench
    keep: bool

    @cached_property
    def recall(self) -> dict[str, tuple[float, ...]]:
        """By demo model: how many of the true experts a lookahead finds, just before attention and 1, 2, 3 layers before."""
        return {kind: _recall(self, kind) for kind in quality.MODELS.values()}


@contextlib.contextmanager
def open_bench(model: Path | None, quick: bool, keep: bool) -> Iterator[Bench]:
    if model is not None:
        raise MeasurementError("the prerouter is measured on several shapes, each made for it: leave out --model")
    with demo_model.open_bench(None, quick=quick, keep=keep) as demo:
        yield Bench(QUICK if quick else FULL, demo, keep)


# What never changes


def same_bits(bench: Bench) -> Iterator[Figure]:
    """Configurations whose logits differ from those without reading ahead."""
    for letter, kind in quality.MODELS.items():
        path = bench.demo.shipped(kind)
        tokens = [int(id) for id in bench.demo.some_windows(1)[0][: 120 if bench.demo.quick else 500]]
        cache = int(moestream.describe(path).maximum_cache_bytes * 0.4)
        found = {}
        ways = ("off", "router+lookahead") if bench.demo.quick else get_args(Prefetch)[:6]
        for prefetch, policy in product(ways, get_args(Policy)[:1] if bench.demo.quick else get_args(Policy)):
            with Session(Arm(path, "streamed", cache=cache, prefetch=prefetch, policy=policy, threads=1)) as session:
                found[prefetch, policy] = session.feed(tokens).logits_crc
        differing = sum(crc != found["off", "lru"] for crc in found.values())
        yield Figure(f"same_bits[{letter}].configurations", len(found))
        yield Figure(f"same_bits[{letter}].differ", differing, at_most=0)


def cost(bench: Bench) -> Iterator[Figure]:
    """Of hooks while nothing is read ahead, and of a timeline: a token of a model that is all in memory, over one without."""
    plan = bench.plan
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(made(list(plan.middle), needed_bytes=5 * GIB, keep=bench.keep))
        stream = random_prompt(tokens=plan.effort.tokens, vocabulary=Subject(path).vocabulary)
        sessions = {arm: stack.enter_context(Session(Arm(path, "streamed", prefetch=arm))) for arm in ("off", "router")}
        for session in sessions.values():
            for seed in range(2 if bench.demo.quick else 4):
                prompt = random_prompt(tokens=500, vocabulary=Subject(path).vocabulary, seed=seed)
                session.feed(prompt, at_once=True)
            session.feed(stream)
            session.settle()
        ways = {"without": ("off", False), "hooks": ("router", False), "timeline": ("router", True)}
        ratios: dict[str, list[float]] = {"hooks": [], "timeline": []}
        for _ in range(plan.rounds_of_cost):
            taken = {}
            for way, (arm, recorded) in ways.items():
                feed = sessions[arm].feed(stream, prefetch=arm, recorded=recorded)
                taken[way] = statistics.median(feed.token_s)
            ratios["hooks"].append(taken["hooks"] / taken["without"])
            ratios["timeline"].append(taken["timeline"] / taken["hooks"])
    yield Figure("cost.hooks", statistics.median(ratios["hooks"]), at_most=1.01)
    small = bench.demo.quick  # a token of a millisecond, of which events are more
    yield Figure("cost.timeline", statistics.median(ratios["timeline"]), at_most=None if small else 1.01)


# Real routing


def accuracy(bench: Bench) -> Iterator[Figure]:
    """Of predictions on the demo models: experts found among as many predicted, and layers whose set was right."""
    for letter, kind in quality.MODELS.items():
        for prefetch in ("router+lookahead",) if bench.demo.quick else ("router+lookahead", "repeat"):
            stats = _predicted(bench, kind, prefetch)
            for found in stats["predictions"][: 1 if prefetch == "repeat" else None]:
                name = f"accuracy[{letter} {'repeat' if prefetch == 'repeat' else found['name']}]"
                exact = found["name"] == "router"
                yield Figure(f"{name}.recall", found["recall"], at_least=1.0 if exact else None)
                yield Figure(f"{name}.exact_sets", found["exact"], at_least=1.0 if exact else None)
                if not exact and prefetch != "repeat":
                    yield Figure(f"{name}.first_absent", found["absent"][0])
                    yield Figure(
                        f"{name}.last_absent",
                        found["absent"][moestream.describe(bench.demo.shipped(kind)).experts_used - 1],
                    )


def _predicted(bench: Bench, kind: str, prefetch: str) -> dict:
    """The statistics of a text decoded with half of the experts in memory, from a disk so slow that all depths are tried."""
    path = bench.demo.shipped(kind)
    cache = int(moestream.describe(path).maximum_cache_bytes * HALF_SHARE)
    window = [int(id) for id in bench.demo.some_windows(1)[0][:-1]]
    with Session(Arm(path, "streamed", cache=cache, prefetch=prefetch, threads=1)) as session:
        for first in range(0, bench.plan.accuracy_tokens, len(window)):
            rate = 40e6 if first else 0
            part = window[: bench.plan.accuracy_tokens - first]
            feed = session.feed(part[: len(part) // 2], prefetch=prefetch, read_rate=rate)
            feed = session.feed(part[len(part) // 2 :], after_last=True, prefetch=prefetch, read_rate=40e6)
    return feed.experts


def _recall(bench: Bench, kind: str) -> tuple[float, ...]:
    found = {entry["name"]: entry["recall"] for entry in _predicted(bench, kind, "router+lookahead")["predictions"]}
    ahead = [found[name] for n in range(1, 8) if (name := f"{n} layer{'s' if n > 1 else ''} ahead") in found]
    return (ahead[0], *ahead)


def hit_rates(bench: Bench) -> Iterator[Figure]:
    """Of the policies, on the routing recorded from the demo models."""
    for letter, kind in quality.MODELS.items():
        trace = RoutingTrace.read(bench.demo.shipped(kind).with_suffix(".trace"))
        for share in SHARES:
            with contextlib.suppress(moestream.CacheTooSmallError):
                rates = {run.policy: run.hit_rate for run in simulate(trace, cache=share, policy="all").runs}
                for policy, rate in rates.items():
                    chosen = policy == moestream.ExpertStreaming().policy
                    yield Figure(
                        f"hit_rates[{letter} {share}].{policy}", rate, at_least=rates["lru"] - 0.005 if chosen else None
                    )


# Reading ahead


def limit(bench: Bench) -> Iterator[Figure]:
    """Speed over the limit that reading and computing set, by the ratio of the two."""
    for size in bench.plan.sizes:
        with ahead.prepared(
            size.shape,
            like=size.like,
            cache=size.cache,
            recall=bench.recall["smallthinker"],
            effort=bench.plan.effort,
            needed_bytes=size.made_bytes,
            keep=bench.keep,
        ) as subject:
            yield Figure(f"limit[{size.name}].from_memory", 1 / subject.compute_s, "tok/s")
            yield Figure(f"limit[{size.name}].needed", subject.needed_bytes / 1e6, "MB/token")
            for ratio in bench.plan.ratios:
                try:
                    turns = subject.at(ARMS, ratio=ratio)
                except MeasurementError as error:
                    note(f"{size.name}: {error}")
                    continue
                yield from _limit_figures(f"limit[{size.name} read={ratio:g}x]", turns, at_par=ratio == 1.0)
            turns = subject.at(ARMS[:3] if bench.demo.quick else (*ARMS[:3], "auto"))
            name = f"limit[{size.name} disk as it is, {subject.disk / 1e9:.1f} GB/s]"
            yield from _turn_figures(name, turns)
            best = max(turns.values(), key=lambda turn: turn.tokens_per_s)
            bound = size.least_ram_share
            yield Figure(f"{name}.read_over_compute", best.read_s / subject.compute_s)
            yield Figure(f"{name}.best_of_memory_speed", subject.compute_s / best.token_s, at_least=bound)
            yield Figure(f"{name}.limit_of_memory_speed", subject.compute_s / best.limit_s)


def _limit_figures(name: str, turns: dict[str, Turn], *, at_par: bool) -> Iterator[Figure]:
    yield from _turn_figures(name, turns)
    yield Figure(f"{name}.oracle_share", turns["oracle"].share, at_least=0.90)
    best = max((turns[arm] for arm in ARMS if arm != "oracle"), key=lambda turn: turn.tokens_per_s)
    yield Figure(f"{name}.best_share", best.share, at_least=0.75)
    gain = best.tokens_per_s / turns["off"].tokens_per_s
    yield Figure(f"{name}.best_over_reactive", gain, at_least=1.5 if at_par else None)
    yield Figure(f"{name}.oracle_over_reactive", turns["oracle"].tokens_per_s / turns["off"].tokens_per_s)


def _turn_figures(name: str, turns: dict[str, Turn]) -> Iterator[Figure]:
    for arm, turn in turns.items():
        yield Figure(f"{name}.{arm}", turn.tokens_per_s, "tok/s")
        yield Figure(f"{name}.{arm}.share", turn.share)
        yield Figure(f"{name}.{arm}.wait", turn.wait_s * 1e3, "ms")


def experts_used(bench: Bench) -> Iterator[Figure]:
    """The shape of Qwen3-30B-A3B with K of 128 experts: few slots, and four times as many, where guessing should turn itself off."""
    plan = bench.plan
    with contextlib.ExitStack() as stack:
        stock = stack.enter_context(made(list(plan.qwen), needed_bytes=plan.qwen_bytes, keep=bench.keep))
        path = stock.with_name("laid.gguf")
        moestream.convert(stock, path, progress=False)
        stock.unlink()
        described = moestream.describe(path)
        slot = described.minimum_cache_bytes // (described.experts_used * len(described.moe_layers))
        for k in plan.experts_used:
            slots = int(1.5 * k * len(described.moe_layers))
            for times in (4,) if bench.demo.quick else (1, 4):
                with ahead.prepared(
                    (),
                    like=plan.qwen_like,
                    cache=slots * times * slot,
                    recall=bench.recall["qwen3moe"],
                    effort=plan.effort,
                    model=path,
                    experts_used=k,
                ) as subject:
                    turns = subject.at(("off", "lookahead", "auto"))
                name = f"experts_used[K={k} {slots * times} slots]"
                yield from _turn_figures(name, turns)
                yield Figure(f"{name}.hit_rate", turns["off"].hit_rate)
                yield Figure(
                    f"{name}.lookahead_over_reactive", turns["lookahead"].tokens_per_s / turns["off"].tokens_per_s
                )
                yield Figure(
                    f"{name}.auto_over_reactive", turns["auto"].tokens_per_s / turns["off"].tokens_per_s, at_least=0.98
                )


def context_length(bench: Bench) -> Iterator[Figure]:
    """Attention of a layer, and how much of the time to read one expert it is, by the context before the token."""
    plan = bench.plan
    shape = ("--shape", "smallthinker-4b", "--layers", "6", "--vocab", "4096")
    with made(list(shape), needed_bytes=2 * GIB, keep=bench.keep) as path:
        described = moestream.describe(path)
        cache = int(described.maximum_cache_bytes * HALF_SHARE)
        stream = random_prompt(tokens=max(plan.contexts) + 200, vocabulary=4096)
        arm = Arm(path, "streamed", cache=cache, prefetch="router", n_ctx=max(plan.contexts) + 512)
        with Session(arm) as session:
            for context in plan.contexts:
                session.feed(stream[:context], at_once=True)
                waits = {}
                for prefetch in ("off", "router", "router", "off"):
                    feed = session.feed(
                        stream[context : context + 24], after_last=True, prefetch=prefetch, read_rate=1.6e9
                    )
                    waits.setdefault(prefetch, []).append(feed.experts["wait_s"] / len(feed.token_s))
                attention = feed.experts["attention_s"] / len(feed.token_s) / len(described.moe_layers)
                read = feed.experts["slot_bytes"] / 1.6e9
                yield Figure(f"context_length[{context}].attention", attention * 1e3, "ms")
                yield Figure(f"context_length[{context}].attention_over_a_read", attention / read)
                hidden = 1 - statistics.mean(waits["router"]) / statistics.mean(waits["off"])
                yield Figure(f"context_length[{context}].wait_hidden_by_router", hidden)


def fewer_experts(bench: Bench) -> Iterator[Figure]:
    yield from quality.of_fewer_experts(bench.demo)


def cache_aware(bench: Bench) -> Iterator[Figure]:
    yield from quality.of_cache_aware(bench.demo)


FIGURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    function.__name__: function
    for function in (
        same_bits,
        cost,
        accuracy,
        hit_rates,
        limit,
        experts_used,
        context_length,
        fewer_experts,
        cache_aware,
    )
}
