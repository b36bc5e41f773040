"""The figures of the computing itself: decoding and prompts against stock, prompts in little memory, zeros left out, overlap, company.

Whatever is compared runs in alternation in one run. The model is Qwen3-30B-A3B in shape with random weights (17 GB); overlap and a
competing process are measured on fewer layers of it, ReLU on a model of the shape of SmallThinker-4B. `quick` takes small ones.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import psutil

import moestream
from moestream._probe_compute import MemoryReader
from moestream.bench.disk import drop_caches
from moestream.bench.session import Arm, Feed, Session
from moestream.memory import format_size

from . import demo_model, engine, layout, quality
from .competitor import Competitor
from .disk import scratch_folder, seconds_to_read_slices
from .figure import Figure, MeasurementError, note
from .kernels import kernel_bandwidth
from .streams import random_prompt, zipf_stream
from .subject import Subject, made
from .zeros import zeros_by_layer

__all__ = ["FIGURES", "Bench", "open_bench"]

GIB = 1 << 30
MEMORY_READ_BYTES = 3 << 29  # more than any cache holds
BUSY_S = 4.0  # a model that has collapsed would take minutes for a stream
READS_AT_ONCE = 8  # which keeps the disk busy with slices of a MB


@dataclass(frozen=True)
class Effort:
    """How much of everything: `shape`, `middle` and `sparse` are what tools/make_model is asked for, `rounds` how often arms alternate."""

    shape: tuple[str, ...]
    made_bytes: int
    middle: tuple[str, ...]
    sparse: tuple[str, ...]
    sparse_bytes: int
    ways: tuple[str, ...]
    kernels_of_cold: tuple[str, ...]
    rounds: int
    prompt_tokens: int
    prompt_cache_bytes: int
    tokens: int
    pass_s: float
    kl_tokens: int
    kl_kinds: tuple[str, ...]
    kl_types: tuple[str, ...]
    architectures: tuple[str, ...]


FULL = Effort(
    shape=("--shape", "qwen3-30b-a3b"),
    made_bytes=19 * GIB,
    middle=("--shape", "qwen3-30b-a3b", "--layers", "12", "--vocab", "32000"),
    sparse=("--shape", "smallthinker-4b", "--zeros", "0.7"),
    sparse_bytes=9 * GIB,
    ways=("exact", "stock", "ggml", "fast"),
    kernels_of_cold=("plain", "interleaved"),
    rounds=3,
    prompt_tokens=512,
    prompt_cache_bytes=3 * GIB,
    tokens=48,
    pass_s=60,
    kl_tokens=2048,
    kl_kinds=demo_model.KINDS,
    kl_types=("Q4_K_M", "Q6_K"),
    architectures=(),
)
QUICK = Effort(
    shape=("--shape", "qwen3-30b-a3b", "--layers", "2", "--experts", "48", "--vocab", "4096"),
    made_bytes=1 * GIB,
    middle=("--shape", "qwen3-30b-a3b", "--layers", "2", "--experts", "48", "--vocab", "4096"),
    sparse=("--shape", "smallthinker-4b", "--layers", "2", "--experts", "12", "--vocab", "4096", "--zeros", "0.7"),
    sparse_bytes=1 * GIB,
    ways=("exact", "stock", "fast"),
    kernels_of_cold=("interleaved",),
    rounds=1,
    prompt_tokens=96,
    prompt_cache_bytes=GIB // 10,
    tokens=24,
    pass_s=1.5,
    kl_tokens=256,
    kl_kinds=demo_model.KINDS[:1],
    kl_types=("Q4_K_M",),
    architectures=("qwen3moe",),
)


@dataclass(frozen=True)
class Resident:
    """What an arm with everything in memory gave in one turn."""

    decoded: Feed
    prompt_s: float


@dataclass(frozen=True)
class ColdPrompt:
    """A prompt; the first 32 tokens decoded behind it, and 32 that come when as many have warmed the cache."""

    prompted: Feed
    first: Feed
    later: Feed


class Bench(layout.Bench):
    """What the figures share: models, and the runs that several of them look at."""

    @cached_property
    def middle(self) -> Path:
        """Fewer layers of the same widths, so that two of it fit into memory beside each other, and its pages too."""
        if self.effort.middle == self.effort.shape:
            return self.path
        return self._stack.enter_context(made(list(self.effort.middle), needed_bytes=6 * GIB, keep=False))

    @cached_property
    def sparse(self) -> tuple[Path, Path]:
        """Two files of one model, stock and neuron-major, both quantised from F16."""
        folder = self._stack.enter_context(scratch_folder(self.effort.sparse_bytes))
        stock, neuron_major, plain = (folder / f"{name}.gguf" for name in ("stock", "neuron-major", "plain"))
        shape = [*self.effort.sparse, "--type", "F16"]
        with made(shape, needed_bytes=self.effort.sparse_bytes + self.effort.sparse_bytes // 2, keep=False) as source:
            note("quantising it, as a stock file and neuron-major")
            moestream.convert(source, neuron_major, "Q4_0", neuron_major=True, progress=False)
            moestream.convert(source, plain, "Q4_0", target="plain", progress=False)
        moestream.export(plain, stock, progress=False)
        plain.unlink()
        return stock, neuron_major

    @cached_property
    def memory(self) -> MemoryReader:
        return self._stack.enter_context(MemoryReader(bytes=MEMORY_READ_BYTES))

    @cached_property
    def resident(self) -> tuple[dict[str, list[Resident]], list[float]]:
        """Every arm with everything in memory, one after the other, and the bandwidth of memory between them (bytes/s)."""
        needed_bytes = self.described.bytes_on_disk + MEMORY_READ_BYTES + 1 * GIB
        if psutil.virtual_memory().available < needed_bytes:
            raise MeasurementError(f"stock needs {format_size(needed_bytes)} of free memory to hold the whole model")
        arms = {
            f"{how}[{kernels}]": Arm(
                self.path,
                "stock" if how == "stock" else "streamed",
                repack=kernels == "interleaved",
                cache=self.described.maximum_cache_bytes,
                kernels=kernels,
                compute="exact" if how == "stock" else how,
            )
            for kernels in ("plain", "interleaved")
            for how in self.effort.ways
            if (how, kernels) != ("fast", "plain")
        }
        found: dict[str, list[Resident]] = {name: [] for name in arms}
        bandwidths = []
        for turn in range(self.effort.rounds):
            for name in _in_turn(turn, arms):
                note(f"{name}, all in memory, round {turn + 1} of {self.effort.rounds}")
                found[name].append(_resident(self, arms[name]))
                bandwidths.append(self.memory.bytes_per_s())
        return found, bandwidths

    def prompt_s(self, arm: str) -> float:
        """Seconds of a prompt with everything in memory."""
        return statistics.median(run.prompt_s for run in self.resident[0][arm])

    def tokens_per_s(self, arm: str) -> float:
        """Of decoding with everything in memory, by the median token of all rounds."""
        return 1 / statistics.median(seconds for run in self.resident[0][arm] for seconds in run.decoded.token_s)


@contextmanager
def open_bench(*, model: Path | None, quick: bool, keep: bool) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack, model, QUICK if quick else FULL, keep)


def _in_turn(turn: int, arms: Mapping[str, Arm]) -> list[str]:
    """The arms of a round in order, every other round backwards: what wears off with time then favours none of them."""
    return list(arms)[::-1] if turn % 2 else list(arms)


def _resident(bench: Bench, arm: Arm) -> Resident:
    """A prompt and a stream, each twice: the first takes experts into the cache, the second counts."""
    prompt, stream = bench.prompt(bench.effort.prompt_tokens), bench.stream(bench.effort.tokens)
    drop_caches(bench.path)
    with Session(arm) as session:
        prompt_s = _prompt_s(session, prompt)
        first = session.feed(stream, seconds=bench.effort.pass_s)
        session.settle(at_most_s=bench.effort.pass_s)
        decoded = session.feed(stream[: len(first.token_s)], seconds=bench.effort.pass_s)
        _require_no_misses(arm, decoded)
    return Resident(decoded, prompt_s)


def _prompt_s(session: Session, prompt: list[int]) -> float:
    """Seconds of a prompt whose experts are all in memory."""
    session.feed(prompt, at_once=True)
    feed = session.feed(prompt, at_once=True)
    _require_no_misses(session.arm, feed)
    return sum(feed.token_s)


def _require_no_misses(arm: Arm, feed: Feed) -> None:
    if missed := sum(feed.misses):
        raise MeasurementError(f"{missed} misses the second time, with a cache of {arm.cache} bytes for every expert")


@contextmanager
def _opened(arms: Mapping[str, Arm]) -> Iterator[dict[str, Session]]:
    """Sessions beside each other, of models that fit. One that is not fed does nothing."""
    sessions = {name: Session(arm) for name, arm in arms.items()}
    with ExitStack() as stack:
        with concurrent.futures.ThreadPoolExecutor(2) as starting:
            list(starting.map(stack.enter_context, sessions.values()))
        yield sessions


# ------------------------------------------------------------------------------------------------------- everything in memory


def decode(bench: Bench) -> Iterator[Figure]:
    """Decoding against stock with the same kernels; and against what the memory could deliver."""
    rates = {name: bench.tokens_per_s(name) for name in bench.resident[0]}
    for kernels, at_least in (("plain", 1.05), ("interleaved", 1.0)):
        exact, stock = (rates[f"{how}[{kernels}]"] for how in ("exact", "stock"))
        yield Figure(f"decode_over_stock[{kernels}]", exact / stock, at_least=at_least)
        if (ggml := rates.get(f"ggml[{kernels}]")) is not None:
            yield Figure(f"decode_over_stock[{kernels}].ggml_over_exact", ggml / exact)
        for how in bench.effort.ways:
            if (rate := rates.get(f"{how}[{kernels}]")) is not None:
                yield Figure(f"decode_over_stock[{kernels}].{how}", rate, "tok/s")
        yield from _parts(kernels, [run.decoded for run in bench.resident[0][f"exact[{kernels}]"]])
    bandwidth = statistics.median(bench.resident[1])
    touched = bench.subject.bytes_of_a_token(bench.described.experts_used)
    for name in ("exact[interleaved]", "exact[plain]", "stock[interleaved]", "stock[plain]"):
        at_least = 0.92 if name == "exact[interleaved]" else None
        yield Figure(f"machine_limit_share.{name}", touched * rates[name] / bandwidth, at_least=at_least)
    yield Figure("machine_limit_share.bandwidth", bandwidth / 1e9, "GB/s")
    yield Figure("machine_limit_share.touched", touched / 1e6, "MB/token")


def _parts(kernels: str, feeds: list[Feed]) -> Iterator[Figure]:
    """Where the time of a token goes by the engine's own account, and how much of it is accounted for."""
    tokens = sum(len(feed.token_s) for feed in feeds)
    parts = {
        part: sum(feed.experts[f"{part}_s"] for feed in feeds)
        for part in ("attention", "router", "compute", "wait", "other")
    }
    for part, seconds in parts.items():
        yield Figure(f"decode_over_stock[{kernels}].{part}", seconds / tokens * 1e3, "ms/token")
    accounted = sum(parts.values()) / sum(sum(feed.token_s) for feed in feeds)
    yield Figure(f"decode_over_stock[{kernels}].accounted", accounted, at_least=0.95)
    fused, ggml = (sum(feed.experts[f"{way}_blocks"] for feed in feeds) for way in ("fused", "ggml"))
    yield Figure(f"decode_over_stock[{kernels}].fused", fused / (fused + ggml) if fused + ggml else None, at_least=1)


def prompt(bench: Bench) -> Iterator[Figure]:
    """Prompts against stock with the same kernels, and the fast mode against stock's best."""
    seconds = {name: bench.prompt_s(name) for name in bench.resident[0]}
    for kernels in ("plain", "interleaved"):
        exact, stock = (seconds[f"{how}[{kernels}]"] for how in ("exact", "stock"))
        yield Figure(f"prompt_over_stock[{kernels}]", stock / exact, at_least=1)
    best = min(seconds[f"stock[{kernels}]"] for kernels in ("plain", "interleaved"))
    yield Figure("prompt_over_stock[fast]", best / seconds["fast[interleaved]"], at_least=1.3)
    for name, taken in seconds.items():
        yield Figure(f"prompt_over_stock.{name}", bench.effort.prompt_tokens / taken, "tok/s")


# ---------------------------------------------------------------------------------------------------- prompts in little memory


def cold_prompt(bench: Bench) -> Iterator[Figure]:
    """A prompt with a small cache and a cold disk: what it read, how long it took, and what it left in the cache.

    It cannot be faster than reading alone (the same slices in the same order, by threads that do nothing else) or than computing
    alone (with every expert in memory), whichever takes longer.
    """
    for kernels in bench.effort.kernels_of_cold:
        yield from _cold_prompt_of(bench, kernels, bench.path if kernels == "plain" else bench.interleaved)


def _cold_prompt_of(bench: Bench, kernels: str, path: Path) -> Iterator[Figure]:
    model = moestream.describe(path)
    cache = max(bench.effort.prompt_cache_bytes, model.minimum_cache_bytes)
    small = Arm(path, "streamed", cache=cache, kernels=kernels, n_ctx=1024)
    slices = _slices_used(small, bench.prompt(bench.effort.prompt_tokens))
    colds: list[ColdPrompt] = []
    reads: list[float] = []
    computes: list[float] = []
    ways = [
        lambda: colds.append(_cold_prompt(bench, small)),
        lambda: reads.append(seconds_to_read_slices(path, slices, depth=READS_AT_ONCE, direct=True)),
        lambda: computes.append(_prompt_alone_s(bench, replace(small, cache=model.maximum_cache_bytes))),
    ]
    for turn in range(bench.effort.rounds):
        note(f"a cold prompt, {kernels}, round {turn + 1} of {bench.effort.rounds}")
        for measure in ways[::-1] if turn % 2 else ways:
            measure()
    name = f"cold_prompt[{kernels}]"
    taken_s = statistics.median(sum(cold.prompted.token_s) for cold in colds)
    read_s, compute_s = statistics.median(reads), statistics.median(computes)
    read_bytes = statistics.median(cold.prompted.experts["bytes_read"] for cold in colds)
    yield Figure(f"{name}.read_over_used", read_bytes / sum(size for _, size in slices), at_most=1.02)
    yield Figure(f"{name}.time_over_limit", taken_s / max(read_s, compute_s), at_most=1.15)
    for what, seconds in (("time", taken_s), ("read_alone", read_s), ("compute_alone", compute_s)):
        yield Figure(f"{name}.{what}", seconds, "s")
    yield Figure(f"{name}.hits_after", statistics.median(_hit_rate(cold.first) for cold in colds))
    yield Figure(f"{name}.hits_steady", statistics.median(_hit_rate(cold.later) for cold in colds))


def _prompt_alone_s(bench: Bench, arm: Arm) -> float:
    with Session(arm) as session:
        return _prompt_s(session, bench.prompt(bench.effort.prompt_tokens))


def _cold_prompt(bench: Bench, arm: Arm) -> ColdPrompt:
    drop_caches(arm.model)
    stream = bench.stream(96, seed=2)
    with Session(arm) as session:
        prompted = session.feed(bench.prompt(bench.effort.prompt_tokens), at_once=True)
        first, _, later = (session.feed(stream[at : at + 32], after_last=True) for at in (0, 32, 64))
    return ColdPrompt(prompted, first, later)


def _slices_used(arm: Arm, tokens: list[int]) -> list[tuple[int, int]]:
    """What a prompt has to read: each expert that a token takes, once a layer, by a trace recorded apart.

    Of the last layer llama.cpp computes only the token whose logits are asked for.
    """
    options = moestream.ExpertStreaming(cache=arm.cache, kernels=arm.kernels)
    llm = moestream.Llama(str(arm.model), expert_streaming=options, n_ctx=len(tokens), verbose=False)
    with contextlib.closing(llm):
        trace = moestream.record_routing(llm, [tokens], tokens_at_once=len(tokens))
    subject = Subject(arm.model)
    last = moestream.describe(arm.model).layers - 1
    slices = []
    for index, layer in enumerate(trace.layers):
        taken = trace.experts[-1:, index] if layer == last else trace.experts[:, index]
        slices += [run for expert in np.unique(taken) for run in subject.expert_ranges(layer, int(expert))]
    return slices


def _hit_rate(feed: Feed) -> float:
    return feed.experts["hits"] / (feed.experts["hits"] + feed.experts["misses"])


# ---------------------------------------------------------------------------------------------------------- zeros are left out


def sparse(bench: Bench) -> Iterator[Figure]:
    """Decoding a model whose activation is mostly zero, neuron-major, against stock."""
    stock, neuron_major = bench.sparse
    vocabulary = Subject(stock).vocabulary
    zeros = statistics.mean(zeros_by_layer(stock, random_prompt(tokens=64, vocabulary=vocabulary)))
    if not 0.65 <= zeros <= 0.75:
        raise MeasurementError(f"{zeros:.0%} of the gates of {stock} are zeros, and the figure is about 70%")
    arms = {
        "exact": Arm(neuron_major, "streamed", cache=moestream.describe(neuron_major).maximum_cache_bytes),
        "stock_repack": Arm(stock, "stock", repack=True),
        "stock": Arm(stock, "stock"),
    }
    stream = zipf_stream(tokens=bench.effort.tokens, vocabulary=vocabulary)
    feeds: dict[str, list[Feed]] = {name: [] for name in arms}
    with _opened(arms) as sessions:
        for session in sessions.values():
            session.feed(stream)
            session.settle(at_most_s=bench.effort.pass_s)
        for turn in range(2 * bench.effort.rounds + 1):
            for name in _in_turn(turn, arms):
                feeds[name].append(sessions[name].feed(stream))
    for feed in feeds["exact"]:
        _require_no_misses(arms["exact"], feed)
    rates = {name: statistics.median(feed.tokens_per_s for feed in runs) for name, runs in feeds.items()}
    yield Figure("sparse_over_stock[repack]", rates["exact"] / rates["stock_repack"], at_least=1.15)
    yield Figure("sparse_over_stock[plain]", rates["exact"] / rates["stock"], at_least=1.6)
    for name, rate in rates.items():
        yield Figure(f"sparse_over_stock.{name}", rate, "tok/s")
    yield Figure("sparse_over_stock.zeros", zeros)
    if counted := feeds["exact"][-1].experts["zeros"]:
        yield Figure("sparse_over_stock.zeros_counted", statistics.mean(counted))


# ----------------------------------------------------------------------------------------------------------------- ready first


def ready_first(bench: Bench) -> Iterator[Figure]:
    """Waiting per token when about half of the experts are in memory, against waiting for all and then computing.

    Of a slow disk little can be hidden, since computing is short against reading; `hidden_at_most` is how much of the waiting, if
    all but the expert that comes last were computed meanwhile. The bound is for the fast one, whose pages are in memory.
    """
    path = bench.middle
    share, stream = _share_for_half(bench, path)
    cache = max(int(moestream.describe(path).expert_bytes * share), moestream.describe(path).minimum_cache_bytes)
    _warm(path)
    for disk, direct, at_most in (("disk", True, None), ("page_cache", False, 0.75)):
        arms = {how: Arm(path, "streamed", cache=cache, direct=direct, compute=how) for how in ("exact", "ggml")}
        feeds: dict[str, list[Feed]] = {how: [] for how in arms}
        with _opened(arms) as sessions:
            for session in sessions.values():
                session.feed(stream)
                session.settle(at_most_s=bench.effort.pass_s)
            for turn in range(bench.effort.rounds + 1):
                for how in _in_turn(turn, arms):
                    feeds[how].append(sessions[how].feed(stream))
        ratios = [_wait(ours) / _wait(theirs) for ours, theirs in zip(*feeds.values(), strict=True)]
        name = f"ready_first[{disk}]"
        yield Figure(f"{name}.wait_over_ggml", statistics.median(ratios), at_most=at_most)
        for how, runs in feeds.items():
            yield Figure(f"{name}.{how}.wait", statistics.median(map(_wait, runs)) * 1e3, "ms/token")
            rate = statistics.median(len(feed.token_s) / sum(feed.token_s) for feed in runs)
            yield Figure(f"{name}.{how}", rate, "tok/s")
        yield Figure(f"{name}.hits", statistics.median(map(_hit_rate, feeds["exact"])))
        top_k = moestream.describe(path).experts_used
        hidden = [(1 - 1 / top_k) * feed.experts["compute_s"] / feed.experts["wait_s"] for feed in feeds["ggml"]]
        yield Figure(f"{name}.hidden_at_most", min(1.0, statistics.median(hidden)))


def _wait(feed: Feed) -> float:
    """Seconds a token."""
    if not sum(feed.misses):
        raise MeasurementError("no expert was missing, so nothing was waited for")
    return feed.experts["wait_s"] / len(feed.token_s)


def _share_for_half(bench: Bench, path: Path) -> tuple[float, list[int]]:
    """A stream, and the share of the experts of which a cache that evicts the least recently used would have half of them."""
    stream = zipf_stream(tokens=2 * bench.effort.tokens, vocabulary=Subject(path).vocabulary, seed=3)
    options = moestream.ExpertStreaming(cache=moestream.describe(path).maximum_cache_bytes)
    with contextlib.closing(
        moestream.Llama(str(path), expert_streaming=options, n_ctx=len(stream), verbose=False)
    ) as llm:
        trace = moestream.record_routing(llm, [stream])
    shares = [percent / 100 for percent in range(4, 100, 4)]
    points = moestream.routing_statistics(trace, cached_shares=shares).lru
    return min(points, key=lambda point: abs(point.hit_rate - 0.5)).share, stream


def _warm(path: Path) -> None:
    """All pages of the file into memory."""
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(4 << 20)
        while file.readinto(buffer):
            pass


# --------------------------------------------------------------------------------------------------------------- a busy machine


def competing(bench: Bench) -> Iterator[Figure]:
    """What decoding loses to one process that keeps a core busy, against what stock loses."""
    path = bench.middle
    cache = moestream.describe(path).maximum_cache_bytes
    stream = zipf_stream(tokens=bench.effort.tokens, vocabulary=Subject(path).vocabulary)
    for threads in (2, 1):
        arms = {
            "ours": Arm(path, "streamed", cache=cache, kernels="interleaved", threads=threads),
            "stock": Arm(path, "stock", repack=True, threads=threads),
        }
        rates: dict[tuple[str, str], list[float]] = {(who, how): [] for who in arms for how in ("alone", "busy")}
        with _opened(arms) as sessions:
            for who, session in sessions.items():
                session.feed(stream)
                session.settle(at_most_s=bench.effort.pass_s)
                told = ", ".join(f"{name}={value}" for name, value in session.openmp.items()) or "nothing set"
                note(f"{who}, {threads} threads; OpenMP: {told}")
            for turn in range(bench.effort.rounds):
                for how in ("alone", "busy"):
                    with Competitor() if how == "busy" else contextlib.nullcontext():
                        for who in _in_turn(turn, arms):
                            feed = sessions[who].feed(stream, seconds=min(bench.effort.pass_s, BUSY_S))
                            rates[who, how].append(len(feed.token_s) / sum(feed.token_s))
        kept = {who: statistics.median(rates[who, "busy"]) / statistics.median(rates[who, "alone"]) for who in arms}
        name = f"competing[{threads} threads]" if threads > 1 else "competing[1 thread]"
        yield Figure(f"{name}.kept_over_stock", kept["ours"] / kept["stock"], at_least=1)
        for who, session in sessions.items():
            yield Figure(f"{name}.{who}.kept", kept[who])
            for how in ("alone", "busy"):
                yield Figure(f"{name}.{who}.{how}", statistics.median(rates[who, how]), "tok/s")
            spins = session.openmp.get("GOMP_SPINCOUNT", "")
            if spins.isdigit():
                yield Figure(f"{name}.{who}.GOMP_SPINCOUNT", int(spins))


# ------------------------------------------------------------------------------------------------------------------ the fast mode


def fast_kl(bench: Bench) -> Iterator[Figure]:
    """Kullback-Leibler divergence of compute="fast" from "exact" on the demo models' validation text, in nats a token."""
    with demo_model.open_bench(None, quick=True, keep=False) as demo, tempfile.TemporaryDirectory() as folder:
        windows = demo.some_windows(math.ceil(bench.effort.kl_tokens / demo_model.CONTEXT))
        for kind in bench.effort.kl_kinds:
            shipped = demo.shipped(kind)
            files = {"Q4_0": shipped}
            for type in bench.effort.kl_types:
                files[type] = Path(folder, f"{kind}-{type}.gguf")
                moestream.convert(shipped, files[type], type, allow_requantize=True, target="plain", progress=False)
            for type, path in files.items():
                note(f"fast against exact, {kind} in {type}")
                arms = (moestream.ExpertStreaming(compute=compute) for compute in ("exact", "fast"))
                found = quality.compared(path, *arms, windows, tokens_at_once=demo_model.CONTEXT).report
                yield Figure(f"fast_kl[{kind}, {type}]", found.kl, "nats")
                yield Figure(f"fast_kl[{kind}, {type}].largest", found.kl_largest, "nats")
                yield Figure(f"fast_kl[{kind}, {type}].tokens", found.tokens)
                yield Figure(f"fast_kl[{kind}, {type}].changed", found.changed)


def kernels(bench: Bench) -> Iterator[Figure]:
    """The row kernels alone, against the memory's bandwidth. They need a gigabyte and a minute, so not with --quick."""
    if bench.effort.rounds > 1:
        yield from kernel_bandwidth()


FIGURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    function.__name__: function
    for function in (decode, prompt, cold_prompt, sparse, kernels, ready_first, competing, fast_kl, engine.bit_identity)
}
