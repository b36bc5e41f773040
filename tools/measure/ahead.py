"""Reading ahead on one model: how near a token comes to the limit that reading and computing set, on disks of several speeds.

    with prepared(("--shape", "smallthinker-4b"), like="smallthinker-4b", cache=1 << 30, recall=(...), effort=effort) as subject:
        for turn in subject.at(ratio=1.0, arms=("off", "router")): print(turn.tokens_per_s, turn.share)

The weights are random, so their routers follow a routing made up with published locality (docs/trace.md), and what a lookahead
finds is made up at the accuracy measured on the demo models. The disk is slowed down inside the reader (`Engine.set_read_rate`):
a limit of a cgroup lets a disk that was idle make up for it, up to what a tenth of a second may read, which is more than a token
needs; no disk does that, and it flatters whoever leaves the disk idle.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import moestream
from moestream.bench.session import Arm, Feed, Session

from .figure import MeasurementError, note
from .streams import random_prompt, zipf_stream
from .subject import Subject, made

__all__ = ["FASTEST", "SETTLES_TOKENS", "Effort", "Prepared", "Turn", "fill", "prepared", "routing_of", "summed"]

SETTLES_TOKENS = 3  # after a change of arm or disk
PROMPT_TOKENS = 512
TRIAL_TOKENS = 120
CONTEXT = 512
FASTEST = 0.95  # of the disk's own bandwidth: the most that it can be slowed down to


@dataclass(frozen=True)
class Effort:
    """tokens: of a turn. rounds: turns of each arm. warms: tokens that fill the cache before. trace_tokens: of the routing."""

    tokens: int
    rounds: int
    warms: int
    trace_tokens: int


@dataclass(frozen=True)
class Turn:
    """What an arm gave on a disk: medians over its turns, per token.

    Attributes:
        limit_s: The longer of computing and reading what was needed and not in memory.
        share: Of the limit's speed, the limit being that of each turn: some miss more than others.
        read_s: The latter, on this disk.
        wait_s: Computation blocked.
    """

    arm: str
    token_s: float
    limit_s: float
    share: float
    read_s: float
    wait_s: float
    needed_bytes: float
    wasted_bytes: float
    attention_s: float
    hit_rate: float

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.token_s


@dataclass
class Prepared:
    """A model under way: its speed with every expert in memory, what it reads at the cache asked for, and its process."""

    path: Path
    session: Session
    effort: Effort
    compute_s: float  # of a token with all experts in memory
    layers: int
    needed_bytes: float  # a token, without reading ahead
    disk: float  # bytes per second
    stream: list[int]
    _at: int = 0

    def rate_for(self, ratio: float) -> float:
        """Bytes per second at which reading takes `ratio` times computing.

        Raises:
            MeasurementError: the disk is slower than that.
        """
        rate = self.needed_bytes / (ratio * self.compute_s)
        if rate > FASTEST * self.disk:
            raise MeasurementError(
                f"reading at {ratio:g} x computing needs {rate / 1e9:.2f} GB/s, and the disk gives {self.disk / 1e9:.2f}"
            )
        return rate

    def at(self, arms: Sequence[str], *, ratio: float | None = None) -> dict[str, Turn]:
        """Each arm (a value of `prefetch`) in alternation, on a disk of that ratio; None: the disk as it is."""
        rate = 0.0 if ratio is None else self.rate_for(ratio)
        turns: dict[str, list[Feed]] = {arm: [] for arm in arms}
        if "auto" in arms:
            self._feed(TRIAL_TOKENS, "auto", rate)  # it tries first, which is a small part of a longer text
        for turn in range(self.effort.rounds):
            first = turn % len(arms)
            for arm in [*arms[first:], *arms[:first]]:
                self._feed(SETTLES_TOKENS, arm, rate)
                turns[arm].append(self._feed(self.effort.tokens, arm, rate, after_last=True))
        return {
            arm: summed(arm, feeds, rate=rate or self.disk, compute_s=self.compute_s) for arm, feeds in turns.items()
        }

    def _feed(self, n: int, arm: str, rate: float, *, after_last: bool = False) -> Feed:
        """From an empty context, so that attention takes what it took when the limit was measured."""
        tokens = [self.stream[(self._at + i) % len(self.stream)] for i in range(n)]
        self._at += n
        return self.session.feed(tokens, after_last=after_last, prefetch=arm, read_rate=rate)


def summed(arm: str, feeds: Sequence[Feed], *, rate: float, compute_s: float) -> Turn:
    """Of turns on a disk of `rate` bytes a second, where computing a token alone takes `compute_s`."""

    def per_token(name: str) -> float:
        return statistics.median(feed.experts[name] / len(feed.token_s) for feed in feeds)

    slot = feeds[0].experts["slot_bytes"]
    found = sum(feed.experts["hits"] for feed in feeds)
    missed = sum(feed.experts["misses"] for feed in feeds)
    seconds = [sum(feed.token_s) / len(feed.token_s) for feed in feeds]
    needed = [feed.experts["misses"] / len(feed.token_s) * slot for feed in feeds]
    limits = [max(compute_s, bytes / rate) for bytes in needed]
    return Turn(
        arm=arm,
        token_s=statistics.median(seconds),
        limit_s=statistics.median(limits),
        share=statistics.median(limit / taken for limit, taken in zip(limits, seconds, strict=True)),
        read_s=statistics.median(needed) / rate,
        wait_s=per_token("wait_s"),
        needed_bytes=statistics.median(needed),
        wasted_bytes=per_token("wasted_bytes"),
        attention_s=per_token("attention_s"),
        hit_rate=found / (found + missed),
    )


@contextmanager
def prepared(
    shape: Sequence[str],
    *,
    like: str,
    cache: int | float,
    recall: tuple[float, ...],
    effort: Effort,
    model: Path | None = None,
    needed_bytes: int = 0,
    experts_used: int | None = None,
    keep: bool = False,
) -> Iterator[Prepared]:
    """A model of that shape, laid for this machine, with a cache in bytes, or as a share of all experts if below 1."""
    with ExitStack() as stack:
        path = model
        if path is None:
            stock = stack.enter_context(made(list(shape), needed_bytes=needed_bytes, keep=keep))
            path = stock.with_name("laid.gguf")
            moestream.convert(stock, path, progress=False)
            stock.unlink()
        described = moestream.describe(path)
        top_k = experts_used or described.experts_used
        trace = routing_of(described, like, top_k, effort, stack.enter_context(_folder()))
        arm = Arm(path, "streamed", replay=trace, experts_used=experts_used, n_ctx=CONTEXT, prefetch="router")
        stream = zipf_stream(tokens=1024, vocabulary=Subject(path).vocabulary)
        compute_s = _compute_s(arm, stream, effort)
        if cache < 1:
            cache = described.maximum_cache_bytes * cache
        limited = Arm(**{**vars(arm), "cache": int(cache), "prefetch": "router+lookahead", "replay_recall": recall})
        session = stack.enter_context(Session(limited))
        subject = Prepared(path, session, effort, compute_s, len(described.moe_layers), 0, 0, stream)
        subject._feed(8, "off", 0)
        subject._feed(effort.warms, "off", 0)
        session.settle()
        feed = subject._feed(2 * effort.tokens, "off", 0)
        subject.needed_bytes = feed.experts["misses"] * feed.experts["slot_bytes"] / len(feed.token_s)
        subject.disk = feed.experts["bytes_read"] / feed.experts["read_s"]
        note(
            f"{path.name}: {1 / compute_s:.1f} tok/s from memory; {subject.needed_bytes / 1e6:.1f} MB a token are not "
            f"in a cache of {cache / 2**30:.2f} GiB, and the disk gives {subject.disk / 1e9:.2f} GB/s"
        )
        yield subject


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="moestream-figures-") as folder:
        yield Path(folder)


def routing_of(described: moestream.ModelDescription, like: str, top_k: int, effort: Effort, folder: Path) -> Path:
    """For the layers and experts of the model. Of fewer experts than the model's own the first of them are taken, as it would."""
    layers, experts = len(described.moe_layers), described.moe_layers[0].experts
    trace = moestream.synthesise_trace(like=like, tokens=effort.trace_tokens, layers=layers, experts=experts, seed=1)
    first = {name: np.ascontiguousarray(getattr(trace, name)[:, :, :top_k]) for name in ("experts", "weights")}
    replace(trace, **first).write(folder / "routing.trace")
    return folder / "routing.trace"


def _compute_s(arm: Arm, stream: list[int], effort: Effort) -> float:
    """Seconds of a token with every expert in memory, by the median."""
    with Session(arm) as session:
        fill(session, stream, effort)
        feeds = [session.feed(stream[: effort.tokens], prefetch="off") for _ in range(effort.rounds + 1)]
    return statistics.median(second for feed in feeds for second in feed.token_s)


def fill(session: Session, stream: list[int], effort: Effort) -> None:
    """Of a cache for all experts: until every one that the routing which is replayed asks for is there."""
    for seed in range(3):
        session.feed(random_prompt(tokens=PROMPT_TOKENS, vocabulary=max(stream) + 1, seed=seed), at_once=True)
    for _ in range(6):
        feed = session.feed(stream[: effort.trace_tokens // 4], prefetch="off")
        if not sum(feed.misses[-effort.tokens :]):
            break
    session.settle()
