"""The figures of the streaming engine: loading, memory, speed with every expert cached, speed in little memory, reading, exactness.

Each is a ratio of two things measured minutes apart at most, in alternation, or a difference from what was counted. The model is
Qwen3-30B-A3B in shape with random weights (17 GB), so that anyone can make it; `quick` takes a small one of the same matrices,
where every figure is measured the same way and means less.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import gguf
import psutil

import moestream
from moestream.bench.cgroup import LimitedGroup
from moestream.bench.disk import block_device_of, drop_caches, loop_device
from moestream.bench.session import Arm, Feed, Session
from moestream.memory import format_size

from .disk import FioJob, seconds_to_read_cold
from .figure import Figure, MeasurementError, note
from .promises import outcomes
from .streams import random_prompt, zipf_stream
from .subject import Subject, made

__all__ = ["FIGURES", "Bench", "open_bench"]

T = TypeVar("T")

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Effort:
    """How much of everything. `shape` is what tools/make_model is asked for, `rounds` how often arms alternate."""

    shape: tuple[str, ...]
    made_bytes: int
    rounds: int
    prompt_tokens: int
    tokens: int
    pass_s: float
    capped_tokens: int
    capped_s: float
    read_rounds: int
    read_block_s: float
    architectures: tuple[str, ...]


FULL = Effort(
    shape=("--shape", "qwen3-30b-a3b"),
    made_bytes=19 * GIB,
    rounds=3,
    prompt_tokens=512,
    tokens=48,
    pass_s=60,
    capped_tokens=96,
    capped_s=150,
    read_rounds=6,
    read_block_s=6,
    architectures=(),
)
# Fewer layers and experts of the same matrices, and enough of a dense part that loading is more than its fixed costs.
QUICK = Effort(
    shape=("--shape", "qwen3-30b-a3b", "--layers", "4", "--experts", "64"),
    made_bytes=2 * GIB,
    rounds=1,
    prompt_tokens=128,
    tokens=24,
    pass_s=1.5,
    capped_tokens=48,
    capped_s=3,
    read_rounds=3,
    read_block_s=0.5,
    architectures=("qwen3moe",),
)


class Bench:
    """What the figures share: the model, made when the first of them asks for it, and how much effort to spend."""

    def __init__(self, stack: ExitStack, model: Path | None, effort: Effort, keep: bool) -> None:
        self._stack = stack
        self._model = model
        self._keep = keep
        self.effort = effort

    @cached_property
    def path(self) -> Path:
        if self._model is not None:
            return self._model.resolve()
        return self._stack.enter_context(
            made(list(self.effort.shape), needed_bytes=self.effort.made_bytes, keep=self._keep)
        )

    @cached_property
    def subject(self) -> Subject:
        return Subject(self.path)

    @cached_property
    def described(self) -> moestream.ModelDescription:
        return moestream.describe(self.path)

    def stream(self, tokens: int, seed: int = 1) -> list[int]:
        return zipf_stream(tokens=tokens, vocabulary=self.subject.vocabulary, seed=seed)

    def prompt(self, tokens: int) -> list[int]:
        return random_prompt(tokens=tokens, vocabulary=self.subject.vocabulary)

    def cache_of(self, share: float) -> int:
        """A cache for that share of the experts, or the smallest that the engine accepts if this is more."""
        return max(int(self.described.expert_bytes * share), self.described.minimum_cache_bytes)


@contextmanager
def open_bench(*, model: Path | None, quick: bool, keep: bool) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack, model, QUICK if quick else FULL, keep)


def _in_turn(turn: int, arms: list[T]) -> list[T]:
    """The arms of a round in order, every other round backwards: what wears off with time then favours none of them."""
    return arms[::-1] if turn % 2 else arms


# ------------------------------------------------------------------------------------------------------------------- loading


def load_over_dense_read(bench: Bench) -> Iterator[Figure]:
    """Seconds to a model that can decode, against the seconds to read its dense bytes from the same cold file by plain preads."""
    if bench.described.dense_bytes != bench.subject.dense_bytes:
        note(
            f"describe() counts {bench.described.dense_bytes} dense bytes, the gguf package {bench.subject.dense_bytes}"
        )
    for kernels in ("plain", "interleaved"):
        reads, loads = [], []
        for _ in range(bench.effort.rounds):
            reads.append(seconds_to_read_cold(bench.path, bench.subject.dense_ranges))
            drop_caches(bench.path)
            with Session(Arm(bench.path, "streamed", cache=bench.cache_of(0.23), kernels=kernels)) as session:
                loads.append(session.load_s)
        read_s, load_s = statistics.median(reads), statistics.median(loads)
        yield Figure(f"load_over_dense_read[{kernels}]", load_s / read_s, below=3.0)
        yield Figure(f"load_over_dense_read[{kernels}].load", load_s, "s")
        yield Figure(f"load_over_dense_read[{kernels}].read", read_s, "s")


# -------------------------------------------------------------------------------------------------------------------- memory


def peak_rss_over_budget(bench: Bench) -> Iterator[Figure]:
    """Peak RSS beyond dense part, cache and KV, at three cache sizes: with the cache full, after a prompt and some decoding."""
    n_ctx = 4096
    smallest, all_experts = bench.described.minimum_cache_bytes, bench.described.expert_bytes
    sizes = [size for size in (1 * GIB, 3 * GIB, 8 * GIB) if smallest <= size < all_experts]
    if len(sizes) < 3:
        sizes = [bench.cache_of(share) for share in (0.2, 0.4, 0.8)]
    for size in sizes:
        with Session(Arm(bench.path, "streamed", cache=size, n_ctx=n_ctx)) as session:
            session.feed(bench.prompt(bench.effort.prompt_tokens), at_once=True)
            feed = session.feed(bench.stream(bench.effort.tokens))
        used, total = feed.experts["slots_used"], feed.experts["slots_total"]
        if used < 0.99 * total:
            raise MeasurementError(
                f"a cache of {format_size(size)} stayed unfilled, {used} of {total} slots: its memory was not all touched"
            )
        budget_bytes = bench.subject.dense_bytes + size + bench.subject.kv_bytes(n_ctx)
        name = f"peak_rss_over_budget[{format_size(size).replace('.00', '').replace(' ', '')}]"
        yield Figure(name, (feed.peak_rss_bytes - budget_bytes) / MIB, "MiB", at_most=200)
        yield Figure(f"{name}.peak_rss", feed.peak_rss_bytes / MIB, "MiB")


# ------------------------------------------------------------------------------------------------------- every expert cached


def resident_over_stock(bench: Bench) -> Iterator[Figure]:
    """Decoding speed with every expert in the cache, against stock with the whole model in memory and the same kernels.

    Two such models seldom fit into memory together, so each takes its turn in a child of its own (A B B A). A prompt takes nearly
    all experts into the cache, a first pass over the stream the rest; the second pass counts. If it still missed one, there would
    be no figure.
    """
    needed_bytes = bench.described.bytes_on_disk + 1 * GIB
    if psutil.virtual_memory().available < needed_bytes:
        raise MeasurementError(f"stock needs {format_size(needed_bytes)} of free memory to hold the whole model")
    for kernels, at_least in (("plain", 0.95), ("interleaved", 0.85)):
        streamed_arm = Arm(bench.path, "streamed", cache=bench.described.maximum_cache_bytes, kernels=kernels)
        stock_arm = Arm(bench.path, "stock", repack=kernels == "interleaved")
        streamed, stock = [], []
        for turn in range(bench.effort.rounds):
            note(f"{kernels}, all experts cached, round {turn + 1} of {bench.effort.rounds}")
            for arm, feeds in _in_turn(turn, [(streamed_arm, streamed), (stock_arm, stock)]):
                feeds.append(_second_pass(bench, arm))
        rates = {who: _median_rate(feeds) for who, feeds in (("streamed", streamed), ("stock", stock))}
        same = [
            a == b
            for ours, theirs in zip(streamed, stock, strict=True)
            for a, b in zip(ours[1].logits_crc, theirs[1].logits_crc, strict=False)
        ]
        yield Figure(f"resident_over_stock[{kernels}]", rates["streamed"] / rates["stock"], at_least=at_least)
        yield Figure(f"resident_over_stock[{kernels}].same_logits", statistics.mean(same), at_least=1)
        for who, feeds in (("streamed", streamed), ("stock", stock)):
            yield Figure(f"resident_over_stock[{kernels}].{who}", rates[who], "tok/s")
            yield Figure(
                f"resident_over_stock[{kernels}].{who}_load", statistics.median(load_s for load_s, _ in feeds), "s"
            )


def _second_pass(bench: Bench, arm: Arm) -> tuple[float, Feed]:
    stream = bench.stream(bench.effort.tokens)
    drop_caches(bench.path)
    with Session(arm) as session:
        session.feed(bench.prompt(128), at_once=True)
        # On a machine that is busy with other things there may be time for a part of the stream only.
        first = session.feed(stream, seconds=bench.effort.pass_s)
        feed = session.feed(stream[: len(first.token_s)], seconds=bench.effort.pass_s)
        if sum(feed.misses):
            raise MeasurementError(
                f"{sum(feed.misses)} misses on a stream decoded before, with a cache of {arm.cache} bytes for every expert"
            )
        return session.load_s, feed


def _median_rate(loads_and_feeds: list[tuple[float, Feed]]) -> float:
    """Tokens per second by the median token of all rounds."""
    return 1 / statistics.median(seconds for _, feed in loads_and_feeds for seconds in feed.token_s)


# ------------------------------------------------------------------------------------------------------------- little memory


def capped_over_stock_mmap(bench: Bench) -> Iterator[Figure]:
    """Decoding speed in a memory cgroup much smaller than the model, against stock mmap at its best.

    Stock reads what it faults on with the readahead of the disk, and that decides its speed. So it is measured twice: on the disk
    as it is set, and through a loop device with the usual 128 KiB. Each arm has the same time limit, and two are compared on the
    second half of the tokens that both got through.
    """
    cache_bytes, limit_bytes = _capped_sizes(bench)
    stream = bench.stream(bench.effort.capped_tokens)
    rounds: dict[str, list[Feed]] = {"streamed": [], "stock_disk": [], "stock_loop": []}
    peaks: list[int] = []
    note(f"{format_size(limit_bytes)} of memory, a cache of {format_size(cache_bytes)}; {_read_ahead(bench.path)}")
    with loop_device(bench.path, read_ahead_kib=128) as loop:
        # Tokens come one by one, so that buffers for large batches would only take memory from all three.
        arms = {
            "streamed": Arm(bench.path, "streamed", cache=cache_bytes, n_batch=32),
            "stock_disk": Arm(bench.path, "stock", mmap=True, n_batch=32),
            "stock_loop": Arm(loop, "stock", mmap=True, n_batch=32),
        }
        for turn in range(bench.effort.rounds):
            for name, arm in _in_turn(turn, list(arms.items())):
                note(f"{name} in {format_size(limit_bytes)}, round {turn + 1} of {bench.effort.rounds}")
                drop_caches(bench.path)
                with LimitedGroup(memory_bytes=limit_bytes) as group, Session(arm, group=group) as session:
                    rounds[name].append(session.feed(stream, seconds=bench.effort.capped_s))
                    usage = group.usage()
                    if usage.oom_kills:
                        raise MeasurementError(f"{usage.oom_kills} processes of the {name} arm were killed for memory")
                    if name == "streamed":
                        peaks.append(usage.peak_bytes)
    ratios = {
        name: statistics.median(map(_speed_ratio, rounds["streamed"], rounds[name]))
        for name in ("stock_disk", "stock_loop")
    }
    yield Figure("capped_over_stock_mmap", min(ratios.values()), at_least=3)
    for name, feeds in rounds.items():
        rates = [feed.tokens_per_s_between(len(feed.token_s) // 2, len(feed.token_s)) for feed in feeds]
        yield Figure(f"capped_over_stock_mmap.{name}", statistics.median(rates), "tok/s")
    yield Figure("capped_over_stock_mmap.streamed_peak", max(peaks) / MIB, "MiB", at_most=limit_bytes / MIB)


def _speed_ratio(ours: Feed, theirs: Feed) -> float:
    """How many times faster the first was on the second half of the tokens that both got through."""
    end = min(len(ours.token_s), len(theirs.token_s))
    return ours.tokens_per_s_between(end // 2, end) / theirs.tokens_per_s_between(end // 2, end)


def _capped_sizes(bench: Bench) -> tuple[int, int]:
    """Cache and memory limit: 3.5 GiB in 6000 MiB, or what corresponds for a model that this would hold too much of."""
    if bench.described.bytes_on_disk > 12 * GIB:
        return 3584 * MIB, 6000 * MIB
    cache_bytes = bench.cache_of(0.23)
    return cache_bytes, bench.subject.dense_bytes + cache_bytes + bench.subject.kv_bytes(512) + 160 * MIB


def _read_ahead(path: Path) -> str:
    disk = block_device_of(path)
    return f"the readahead of {disk.name} is {disk.read_ahead_kib} KiB"


# ------------------------------------------------------------------------------------------------------------------- reading


def read_bandwidth_over_fio(bench: Bench) -> Iterator[Figure]:
    """Bytes of experts a second while a read is in flight, against fio's random reads of the same size and depth on the same file.

    The depth is the mean number of slices that a layer with misses waits for. A token whose experts are missing misses in all its
    layers, so the misses of a token are spread evenly over them.
    """
    slices = [matrix.slice_bytes for layer in bench.described.moe_layers for matrix in layer.matrices]
    slices_per_layer = len(slices) / len(bench.described.moe_layers)
    layers = len(bench.described.moe_layers)
    block_s = bench.effort.read_block_s
    feeds, references, depths = [], [], []
    with Session(Arm(bench.path, "streamed", cache=int(bench.described.minimum_cache_bytes * 1.05))) as session:

        def stream_block(seed: int) -> None:
            drop_caches(bench.path)
            feeds.append(session.feed(bench.stream(400, seed=seed), seconds=block_s))

        def fio_block(_: int) -> None:
            misses = [misses for misses in feeds[-1].misses if misses]
            if not misses:
                raise MeasurementError("no expert was missing, so nothing was read")
            depths.append(max(1, round(statistics.mean(misses) * slices_per_layer / layers)))
            drop_caches(bench.path)
            job = FioJob(bench.path, round(statistics.mean(slices)), depths[-1], direct=feeds[-1].experts["direct"])
            references.append(job.bytes_per_s(block_s))

        # One of each is not counted: it fills the cache, tells fio the depth, and uses up what bursts the disk allows at first.
        stream_block(0)
        fio_block(0)
        for turn in range(bench.effort.read_rounds):
            for block in _in_turn(turn, [stream_block, fio_block]):
                block(turn + 1)
    experts = [feed.experts for feed in feeds[1:]]
    ours = [counted["bytes_read"] / counted["read_s"] for counted in experts]
    by_wait = [counted["bytes_read"] / counted["wait_s"] for counted in experts]
    theirs = references[1:]
    yield Figure(
        "read_bandwidth_over_fio", statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), at_least=0.85
    )
    yield Figure("read_bandwidth_over_fio.streamed", statistics.median(ours) / 1e6, "MB/s")
    yield Figure("read_bandwidth_over_fio.streamed_per_wait", statistics.median(by_wait) / 1e6, "MB/s")
    yield Figure("read_bandwidth_over_fio.fio", statistics.median(theirs) / 1e6, "MB/s")
    yield Figure("read_bandwidth_over_fio.slice", statistics.mean(slices) / 1024, "KiB")
    yield Figure("read_bandwidth_over_fio.depth", statistics.median(depths))


# ----------------------------------------------------------------------------------------------------------------- exactness


def bit_identity(bench: Bench) -> Iterator[Figure]:
    """Architectures whose streamed logits equal stock's to the last bit, by the test that says so.

    An architecture counts when each of its tests passes. One whose tests are all skipped (llama.cpp cannot build it from random
    weights) is named on standard error with the test's reason, and is in neither number.
    """
    ran = outcomes("tests/test_bit_identity.py", wanted=" or ".join(bench.effort.architectures) or None)
    architectures: dict[str, bool] = {}
    for test in ran:
        if (architecture := _architecture_of(test.name)) is not None:
            architectures[architecture] = architectures.get(architecture, True) and test.passed
    if not architectures:
        raise MeasurementError("tests/test_bit_identity.py tried no architecture")
    yield Figure("bit_identity", sum(architectures.values()), f"/{len(architectures)}", at_least=len(architectures))
    yield Figure("bit_identity.tests", sum(test.passed for test in ran), f"/{len(ran)}", at_least=len(ran))


def _architecture_of(test_name: str) -> str | None:
    """The architecture in a test's parameters: the longest of llama.cpp's names that stands there as a word of its own."""
    parameters = test_name.partition("[")[2].rstrip("]")
    names = [name for name in gguf.MODEL_ARCH_NAMES.values() if re.search(rf"(^|-){re.escape(name)}(-|$)", parameters)]
    return max(names, key=len, default=None)


FIGURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    function.__name__: function
    for function in (
        load_over_dense_read,
        peak_rss_over_budget,
        resident_over_stock,
        capped_over_stock_mmap,
        read_bandwidth_over_fio,
        bit_identity,
    )
}
