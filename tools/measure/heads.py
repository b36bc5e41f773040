"""The figures of prediction as routing: what heads cost and gain, with how many sequences it carries, and what it does to a text.

Speed is measured at the shape of Qwen3-30B-A3B. Its weights are random, and so are its heads, which compute all that trained ones
would; which experts a token takes is replayed from a routing with published locality, and what heads say is the replayed routing's
next token, since what they say is what is routed. Quality is the demo model's, with the heads and the LoRA that ship with it.

A disk is slowed down inside the reader, as in `ahead`. Where it is too slow for reading to take as long as computing, the processor
is slowed down as well (`processor`); both arms of a comparison run on the same machine. Arms without heads and with them are two
processes with a cache of the same size, fed in turns. `quick` takes a small shape and one point.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import moestream
from moestream.bench.session import Arm, Feed, Session
from synthetic.heads import make_sidecar

from . import demo_model, head_quality, prerouter
from .ahead import FASTEST, SETTLES_TOKENS, Effort, Turn, fill, routing_of, summed
from .figure import Figure, note
from .processor import SlowProcessor
from .streams import zipf_stream
from .subject import Subject, made

__all__ = ["FIGURES", "Bench", "open_bench"]

GIB = 1 << 30
CONTEXT = 512
FEW_SLOTS = 2  # tokens' worth
REACTIVE, LOOKAHEAD, HEADS = "reactive", "lookahead", "heads"
PREFETCH = {REACTIVE: "off", LOOKAHEAD: "router+lookahead", HEADS: "router"}


@dataclass(frozen=True)
class Plan:
    """How much of everything.

    Attributes:
        shape, like: For tools/make_model and for the routing.
        width: Of heads.
        worths: Slots of the cache, as tokens' worth of experts.
        ratios: Time to read over time to compute.
        shares: Of the processor, the fastest first.
        turn_s: Seconds of a turn, about.
    """

    shape: tuple[str, ...]
    like: str
    needed_bytes: int
    width: int
    effort: Effort
    experts_used: tuple[int, ...]
    worths: tuple[int, ...]
    ratios: tuple[float, ...]
    shares: tuple[float, ...]
    turn_s: float
    sequences: tuple[int, ...]
    sequence_worths: tuple[int, ...]


FULL = Plan(
    shape=("--shape", "qwen3-30b-a3b"),
    like="qwen3-30b-a3b",
    needed_bytes=37 * GIB,
    width=512,
    effort=Effort(tokens=24, rounds=3, warms=120, trace_tokens=1200),
    experts_used=(2, 4, 8),
    worths=(1, 2, 4, 8),
    ratios=(0.5, 1.0, 2.0),
    shares=(1.0, 0.5, 0.25, 0.125),
    turn_s=2.0,
    sequences=(1, 2, 4, 8),
    sequence_worths=(4, 8),
)
QUICK = replace(
    FULL,
    shape=("--shape", "qwen3-30b-a3b", "--layers", "6", "--experts", "32", "--topk", "4", "--vocab", "4096"),
    like="smallthinker-4b",
    needed_bytes=2 * GIB,
    effort=Effort(tokens=10, rounds=2, warms=24, trace_tokens=160),
    experts_used=(4,),
    worths=(2,),
    ratios=(1.0,),
    turn_s=1.0,
    sequences=(2,),
    sequence_worths=(4,),
)


@dataclass(frozen=True)
class Bench:
    """What the figures share: a laid model and a sidecar with random heads for it, made when they are first asked for."""

    plan: Plan
    prerouter: prerouter.Bench
    demo: demo_model.Bench
    teacher: Path | None
    kept: contextlib.ExitStack
    keep: bool

    @cached_property
    def model(self) -> Path:
        stock = self.kept.enter_context(
            made(list(self.plan.shape), needed_bytes=self.plan.needed_bytes, keep=self.keep)
        )
        laid = stock.with_name("laid.gguf")
        moestream.convert(stock, laid, progress=False)
        stock.unlink()
        return laid

    @cached_property
    def described(self) -> moestream.ModelDescription:
        return moestream.describe(self.model)

    @cached_property
    def sidecars(self) -> dict[str, Path]:
        """With random heads, by their type."""
        return {
            kind: make_sidecar(
                self.model, self.model.with_name(f"{kind}.sidecar.gguf"), width=self.plan.width, type=kind
            )
            for kind in ("Q8_0", "Q4_0")
        }

    @cached_property
    def folder(self) -> Path:
        return Path(self.kept.enter_context(tempfile.TemporaryDirectory(prefix="moestream-figures-")))

    @cached_property
    def stream(self) -> list[int]:
        return zipf_stream(tokens=1024, vocabulary=Subject(self.model).vocabulary)

    @property
    def layers(self) -> int:
        return len(self.described.moe_layers)

    def slots_bytes(self, experts: int) -> int:
        """Of a cache with room for so many experts."""
        slot = self.described.minimum_cache_bytes // (self.described.experts_used * self.layers)
        return experts * slot

    def routing(self, experts_used: int) -> Path:
        return routing_of(self.described, self.plan.like, experts_used, self.plan.effort, self.folder)

    def arm(self, routing: Path, **options: Any) -> Arm:
        options = {"n_ctx": CONTEXT, **options}
        return Arm(self.model, "streamed", replay=routing, prefetch="router+lookahead", **options)

    def with_heads(self, arm: Arm, kind: str = "Q8_0") -> Arm:
        return replace(arm, prefetch="router", replay_recall=None, prerouter="route", sidecar=self.sidecars[kind])


@contextlib.contextmanager
def open_bench(model: Path | None, quick: bool, keep: bool) -> Iterator[Bench]:
    """`model` is the demo model's file in F16, which tools/train_demo_model leaves: the teacher that quality is held against."""
    with (
        prerouter.open_bench(None, quick=quick, keep=keep) as guesses,
        demo_model.open_bench(None, quick=quick, keep=keep) as demo,
        contextlib.ExitStack() as kept,
    ):
        yield Bench(QUICK if quick else FULL, guesses, demo, model, kept, keep)


# What heads cost


def cost(bench: Bench) -> Iterator[Figure]:
    """Of the heads of all layers, for a token: bytes of weights that are read, and time."""
    for k in bench.plan.experts_used:
        for kind in bench.sidecars:
            arm = bench.arm(bench.routing(k), experts_used=k, cache=bench.slots_bytes(4 * k * bench.layers))
            with Session(bench.with_heads(arm, kind)) as session:
                session.feed(bench.stream[:4])
                feed = session.feed(bench.stream[: bench.plan.effort.tokens])
            tokens, found = len(feed.token_s), feed.experts
            name = f"cost[K={k} {kind}]"
            yield Figure(f"{name}.read", found["heads_bytes"] / tokens / 1e6, "MB/token")
            yield Figure(f"{name}.time", found["heads_s"] / tokens * 1e3, "ms/token")
            yield Figure(f"{name}.of_computing", found["heads_s"] / (sum(feed.token_s) - found["wait_s"]))
            yield Figure(f"{name}.dropped", found["dropped"], at_most=0)


# One sequence


@dataclass
class Pair:
    """Two processes of one model with caches of one size, without heads and with them."""

    sessions: dict[str, Session]  # by arm
    stream: list[int]
    needed_bytes: float  # a token, without reading ahead
    disk: float  # bytes per second
    _at: int = 0

    def feed(self, arm: str, n: int, *, rate: float, after_last: bool = False) -> Feed:
        tokens = [self.stream[(self._at + i) % len(self.stream)] for i in range(n)]
        self._at += n
        return self.sessions[arm].feed(
            tokens, after_last=after_last, prefetch=PREFETCH[arm], read_rate=rate, checked=False
        )

    def at(self, rate: float, *, rounds: int, tokens: int, compute_s: float) -> dict[str, Turn]:
        """Each arm in alternation, on a disk of that rate."""
        arms = list(self.sessions)
        turns: dict[str, list[Feed]] = {arm: [] for arm in arms}
        for turn in range(rounds):
            first = turn % len(arms)
            for arm in [*arms[first:], *arms[:first]]:
                self.feed(arm, SETTLES_TOKENS, rate=rate)
                turns[arm].append(self.feed(arm, tokens, rate=rate, after_last=True))
        return {arm: summed(arm, feeds, rate=rate, compute_s=compute_s) for arm, feeds in turns.items()}


def speed(bench: Bench) -> Iterator[Figure]:
    """Tokens a second without reading ahead, with a lookahead and with heads: by experts a token, slots, and the disk's speed."""
    plan = bench.plan
    with SlowProcessor() as slow:
        for k in plan.experts_used:
            routing = bench.routing(k)
            computing = _compute_s(bench, slow, routing, k)
            for share, seconds in computing.items():
                yield Figure(f"speed[K={k} processor={share:g}].from_memory", 1 / seconds, "tok/s")
            for worth in plan.worths:
                with _pair(bench, routing, k, worth) as pair:
                    for ratio in plan.ratios:
                        yield from _point(pair, slow, computing, plan, f"K={k} slots={worth}x", ratio, worth)


def _compute_s(bench: Bench, slow: SlowProcessor, routing: Path, k: int) -> dict[float, float]:
    """Seconds of a token with every expert in memory and without heads, by the share of the processor."""
    found = {}
    with Session(bench.arm(routing, experts_used=k)) as session:
        fill(session, bench.stream, bench.plan.effort)
        for share in bench.plan.shares:
            slow.share(share)
            session.feed(bench.stream[:4], prefetch="off")
            feed = session.feed(bench.stream[: bench.plan.effort.tokens], prefetch="off")
            found[share] = statistics.median(feed.token_s)
        slow.share(1)
    return found


@contextlib.contextmanager
def _pair(bench: Bench, routing: Path, k: int, worth: int) -> Iterator[Pair]:
    slots = worth * k * bench.layers
    recall = bench.prerouter.recall["qwen3moe"]
    arm = bench.arm(routing, experts_used=k, cache=bench.slots_bytes(slots), replay_recall=recall)
    with Session(arm) as without, Session(bench.with_heads(arm)) as with_heads:
        pair = Pair({REACTIVE: without, LOOKAHEAD: without, HEADS: with_heads}, bench.stream, 0, 0)
        for name in (REACTIVE, HEADS):
            pair.feed(name, bench.plan.effort.warms, rate=0)
            pair.sessions[name].settle()
        feed = pair.feed(REACTIVE, 2 * bench.plan.effort.tokens, rate=0)
        pair.needed_bytes = feed.experts["misses"] * feed.experts["slot_bytes"] / len(feed.token_s)
        pair.disk = feed.experts["bytes_read"] / feed.experts["read_s"]
        note(
            f"K={k}, {slots} slots of {slots * feed.experts['slot_bytes'] / GIB:.2f} GiB: "
            f"{pair.needed_bytes / 1e6:.0f} MB a token are not there, and the disk gives {pair.disk / 1e9:.2f} GB/s"
        )
        yield pair


def _point(
    pair: Pair, slow: SlowProcessor, computing: dict[float, float], plan: Plan, where: str, ratio: float, worth: int
) -> Iterator[Figure]:
    rates = {share: pair.needed_bytes / (ratio * seconds) for share, seconds in computing.items()}
    reachable = [share for share in plan.shares if rates[share] <= FASTEST * pair.disk]
    name = f"speed[{where} read={ratio:g}x]"
    if not reachable:
        note(f"{name}: needs {min(rates.values()) / 1e9:.1f} GB/s, and the disk gives {pair.disk / 1e9:.1f}")
        return
    share = reachable[0]
    slow.share(share)
    compute_s = computing[share]
    tokens = max(6, min(plan.effort.tokens, int(plan.turn_s / (compute_s * (1 + ratio)))))
    turns = pair.at(rates[share], rounds=plan.effort.rounds, tokens=tokens, compute_s=compute_s)
    slow.share(1)
    yield Figure(f"{name}.processor", share)
    for arm, turn in turns.items():
        yield Figure(f"{name}.{arm}", turn.tokens_per_s, "tok/s")
        yield Figure(f"{name}.{arm}.wait", turn.wait_s * 1e3, "ms/token")
        yield Figure(f"{name}.{arm}.share", turn.share, at_least=0.90 if arm == HEADS else None)
        yield Figure(f"{name}.{arm}.hit_rate", turn.hit_rate)
    reactive = turns[REACTIVE].tokens_per_s
    # It reads while it computes, too. Heads can give more only by missing less: what the next token takes is not given away.
    yield Figure(f"{name}.limit_over_reactive", 1 / turns[REACTIVE].share)
    yield Figure(f"{name}.lookahead_over_reactive", turns[LOOKAHEAD].tokens_per_s / reactive)
    bound = 1.8 if ratio == 1 and worth <= FEW_SLOTS else None
    yield Figure(f"{name}.heads_over_reactive", turns[HEADS].tokens_per_s / reactive, at_least=bound)


# Several sequences


def sequences(bench: Bench) -> Iterator[Figure]:
    """Decoded together, each at its own place of a routing: experts that a step takes, and tokens a second of all of them."""
    plan, k = bench.plan, bench.described.experts_used
    trace = moestream.RoutingTrace.read(bench.routing(k))
    for worth in plan.sequence_worths:
        for n in plan.sequences:
            routing = bench.folder / f"{n}.trace"
            _interleaved(trace, n).write(routing)
            yield from _together(bench, routing, n, worth)


def _interleaved(trace: moestream.RoutingTrace, n: int) -> moestream.RoutingTrace:
    """The first token of each of n parts of a routing, then the second of each, and so on."""
    each = len(trace.experts) // n
    order = [part * each + token for token in range(each) for part in range(n)]
    arrays = ("tokens", "experts", "weights")
    return replace(trace, **{name: getattr(trace, name)[order] for name in arrays}, starts=trace.starts[:1])


def _together(bench: Bench, routing: Path, n: int, worth: int) -> Iterator[Figure]:
    plan, k = bench.plan, bench.described.experts_used
    arm = bench.arm(routing, cache=bench.slots_bytes(worth * k * bench.layers), sequences=n, n_ctx=n * CONTEXT)
    feeds: dict[str, list[Feed]] = {REACTIVE: [], HEADS: []}
    steps = bench.stream[: plan.effort.tokens * n]
    with Session(arm) as without, Session(bench.with_heads(arm)) as with_heads:
        sessions = {REACTIVE: without, HEADS: with_heads}
        for name, session in sessions.items():
            session.feed((bench.stream * n)[: plan.effort.warms * n // 2], prefetch=PREFETCH[name], checked=False)
            session.settle()
        for _ in range(plan.effort.rounds):
            for name, session in sessions.items():
                session.feed(bench.stream[: SETTLES_TOKENS * n], prefetch=PREFETCH[name], checked=False)
                feeds[name].append(session.feed(steps, prefetch=PREFETCH[name], checked=False))
    where = f"sequences[{n} slots={worth}x]"
    used = [(feed.experts["hits"] + feed.experts["misses"]) / len(feed.token_s) for feed in feeds[REACTIVE]]
    slot = feeds[REACTIVE][0].experts["slot_bytes"]
    yield Figure(f"{where}.experts_of_a_layer", statistics.median(used) / bench.layers)
    yield Figure(f"{where}.working_set", statistics.median(used) * slot / 1e6, "MB/step")
    speeds = {}
    for name, turns in feeds.items():
        speeds[name] = statistics.median(n * len(feed.token_s) / sum(feed.token_s) for feed in turns)
        yield Figure(f"{where}.{name}", speeds[name], "tok/s")
        waits = [feed.experts["wait_s"] / len(feed.token_s) for feed in turns]
        yield Figure(f"{where}.{name}.wait", statistics.median(waits) * 1e3, "ms/step")
        yield Figure(
            f"{where}.{name}.missed",
            statistics.median(feed.experts["misses"] * slot / len(feed.token_s) for feed in turns) / 1e6,
            "MB/step",
        )
    yield Figure(f"{where}.heads_over_reactive", speeds[HEADS] / speeds[REACTIVE])


def quality(bench: Bench) -> Iterator[Figure]:
    """Of the demo model with the heads and the LoRA that ship with it."""
    yield from head_quality.figures(bench.demo.quick, teacher=bench.teacher)


FIGURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    function.__name__: function for function in (cost, speed, sequences, quality)
}
