"""The figures of measuring and of forecasting: do `moestream bench` and `moestream plan` tell the truth on this machine?

Forecasts are held against measurements at the same cache and disk, with the same routing: shapes with random weights follow a
routing made up with published locality, which the planner is given too. The disk is slowed down inside the reader, for a limit of
a cgroup lets a disk that was idle make up for it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

import moestream
from moestream.bench import benchmark
from moestream.bench.cgroup import limited
from moestream.errors import MeasurementError
from moestream.planner import plan
from moestream.probing import Probe, probe
from moestream.synthesis import transferred_trace

from .figure import Figure, note
from .subject import made

__all__ = ["FIGURES", "Bench", "open_bench"]

ARMS = {"stream-reactive": "off", "stream-prefetch": "auto"}  # and what plan calls them
GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Shape:
    """A model to forecast: what tools/make_model is asked for, the preset of its routing, shares of experts cached, and disks."""

    name: str
    make: tuple[str, ...]
    like: str
    made_bytes: int
    shares: tuple[float, ...]
    disks: tuple[float, ...]  # bytes a second


@dataclass(frozen=True)
class Effort:
    shapes: tuple[Shape, ...]
    fills: int  # tokens of the prompt that fills the cache
    tokens: int
    arms: tuple[str, ...]
    trace_tokens: int
    small: tuple[str, ...]  # of the model on which measuring itself is measured
    small_bytes: int
    rounds: int
    small_tokens: int
    probe_s: float


QWEN3 = ("--shape", "qwen3-30b-a3b", "--layers", "10", "--vocab", "32000")
FULL = Effort(
    shapes=(
        Shape("qwen3-30b-a3b, 10 layers", QWEN3, "qwen3-30b-a3b", 8 * GIB, (0.2, 0.5), (0.4e9, 1.2e9)),
        Shape(
            "smallthinker-4b", ("--shape", "smallthinker-4b"), "smallthinker-4b", 5 * GIB, (0.25, 0.5), (0.4e9, 1.2e9)
        ),
        Shape(
            "smallthinker-21b",
            ("--shape", "smallthinker-21b"),
            "smallthinker-21b",
            26 * GIB,
            (0.25, 0.6),
            (0.4e9, 1.2e9),
        ),
    ),
    fills=512,
    tokens=128,
    arms=("stream-reactive", "stream-prefetch"),
    trace_tokens=1024,
    small=QWEN3,
    small_bytes=8 * GIB,
    rounds=3,
    small_tokens=192,
    probe_s=20,
)
TINY = ("--shape", "qwen3-30b-a3b", "--layers", "3", "--experts", "32", "--vocab", "32000")
QUICK = Effort(
    shapes=(Shape("qwen3-30b-a3b, 3 layers", TINY, "qwen3-30b-a3b", 2 * GIB, (0.4,), (0.5e9,)),),
    fills=128,
    tokens=48,
    arms=("stream-reactive",),
    trace_tokens=256,
    small=TINY,
    small_bytes=GIB,
    rounds=1,
    small_tokens=48,
    probe_s=4,
)


class Bench:
    """What the figures share: the small model, and how much effort to spend."""

    def __init__(self, stack: ExitStack, model: Path | None, effort: Effort, keep: bool) -> None:
        self._stack = stack
        self._model = model
        self.effort = effort
        self.keep = keep

    @cached_property
    def small(self) -> Path:
        if self._model is not None:
            return self._model.resolve()
        return self._stack.enter_context(
            made([*self.effort.small, "--tokenizer", "bytes"], needed_bytes=self.effort.small_bytes, keep=self.keep)
        )

    def memory(self, share: float) -> int:
        """A limit that leaves room for that share of the experts beside all else."""
        described = moestream.describe(self.small)
        cache = max(described.minimum_cache_bytes, int(described.expert_bytes * share))
        return described.dense_bytes + cache + 320 * MIB


@contextmanager
def open_bench(*, model: Path | None, quick: bool, keep: bool) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack, model, QUICK if quick else FULL, keep)


# ------------------------------------------------------------------------------------------------------------------ measuring


def repeated(bench: Bench) -> Iterator[Figure]:
    """The whole benchmark twice, the arms in the other order the second time: ratios of arms, what it costs, who warms whom."""
    effort, arms = bench.effort, ["stock-mmap-tuned", "stream-reactive", "stream-prefetch"]
    runs = []
    for order in (arms, arms[::-1]):
        note(f"bench: {', '.join(order)}, {effort.rounds} rounds")
        runs.append(
            benchmark(
                model=bench.small,
                arms=order,
                memory=bench.memory(0.3),
                n_prompt=0,
                n_gen=effort.small_tokens,
                batch_size=32,
                ubatch_size=32,
                repetitions=effort.rounds,
                warmup=effort.small_tokens // 2,
            )
        )
    by_arm = [{record["arm"]: record for record in run} for run in runs]
    for record in (record for run in runs for record in run):
        if record["outcome"] != "ok":
            raise MeasurementError(f"{record['arm']}: {record['outcome_message']}")
    for arm in arms[1:]:
        ratios = [_speed(run[arm]) / _speed(run[arms[0]]) for run in by_arm]
        yield Figure(f"repeated[{arm} over stock]", ratios[1] / ratios[0], at_least=0.95, at_most=1.05)
        yield Figure(f"repeated[{arm} over stock].first", ratios[0], "x")
    yield Figure("overhead", max(record["bench_overhead"] for run in runs for record in run), below=0.01)
    for arm in arms:
        first, later = _by_position([run[arm] for run in by_arm])
        if first and later:
            name = f"order[{arm}, first over later]"
            yield Figure(name, statistics.median(first) / statistics.median(later), at_least=0.95, at_most=1.05)


def _speed(record: dict) -> float:
    return statistics.median(record["samples_ts"])


def _by_position(records: list[dict]) -> tuple[list[float], list[float]]:
    """Speeds of the turns in which the arm was the first of its round, and of the others."""
    first, later = [], []
    for record in records:
        for position, speed in zip(record["round_order"], record["samples_ts"], strict=True):
            (later if position else first).append(speed)
    return first, later


_BY_HAND = """
import json, sys, time
import llama_cpp
path, memory, n, warms, n_ctx, text = json.loads(sys.argv[1])
llm = llama_cpp.Llama(path, use_mmap=False, n_ctx=n_ctx, n_batch=32, n_ubatch=32, n_threads=2, n_threads_batch=2, verbose=False)
tokens = llm.tokenize(text.encode())
def feed(some):
    took = []
    for token in some:
        start = time.perf_counter()
        llm.eval([token])
        took.append(time.perf_counter() - start)
    return took
feed(tokens[:1])
llm.reset()
feed(tokens[1 : 1 + warms])
llm.reset()
print(json.dumps(feed(tokens[1 + warms : 1 + warms + n])))
"""


def by_hand(bench: Bench) -> Iterator[Figure]:
    """The record of stock-resident against llama-cpp-python in a script of a dozen lines: same file, limits, text, alternating."""
    effort, n = bench.effort, bench.effort.small_tokens
    memory = moestream.describe(bench.small).bytes_on_disk * 2 + GIB
    text = " ".join(f"The {number}th book of the library is open." for number in range(n))
    scratch = bench.small.with_name("text.txt")
    scratch.write_text(text)
    ours, theirs = [], []
    for turn in range(effort.rounds + 1):
        for who in ("ours", "theirs") if turn % 2 else ("theirs", "ours"):
            note(f"stock-resident, {who}, round {turn + 1} of {effort.rounds + 1}")
            if who == "ours":
                (record,) = benchmark(
                    model=bench.small,
                    arms="stock-resident",
                    memory=memory,
                    n_prompt=0,
                    n_gen=n,
                    threads=2,
                    batch_size=32,
                    ubatch_size=32,
                    repetitions=1,
                    warmup=n // 2,
                    file=scratch,
                )
                ours += [ns / 1e9 for ns in record["token_ns"][0]]
            else:
                asked = json.dumps([str(bench.small), memory, n, n // 2, -(-max(n, n // 2 + 1) // 256) * 256, text])
                with limited(memory_bytes=memory) as group:
                    command = [*group.prefix, sys.executable, "-c", _BY_HAND, asked]
                    answer = subprocess.run(command, capture_output=True, text=True, check=True)
                theirs += json.loads(answer.stdout)
    rates = [1 / statistics.median(times) for times in (ours, theirs)]
    yield Figure("by_hand", rates[0] / rates[1], at_least=0.98, at_most=1.02)
    yield Figure("by_hand.bench", rates[0], "tok/s")
    yield Figure("by_hand.hand", rates[1], "tok/s")


# ---------------------------------------------------------------------------------------------------------------- forecasting


def forecast(bench: Bench) -> Iterator[Figure]:
    """What plan says against what bench measures, for shapes x caches x disks, reading on demand and reading ahead."""
    effort = bench.effort
    errors: list[float] = []
    for shape in effort.shapes:
        with ExitStack() as stack:
            stock = stack.enter_context(made(list(shape.make), needed_bytes=shape.made_bytes, keep=bench.keep))
            path = stock.with_name("laid.gguf")
            moestream.convert(stock, path, progress=False)
            stock.unlink()
            note(f"{shape.name}: probing for {effort.probe_s:.0f} s")
            measured_machine = probe(path, seconds=effort.probe_s)
            trace = _routing(path, shape.like, effort.trace_tokens)
            for point in _points(path, shape):
                measured = _measured(path, point, trace, effort)
                for arm, prefetch in ARMS.items():
                    if arm in measured:
                        depth = effort.fills + effort.tokens // 2
                        told = _forecast(path, measured_machine, trace, point, prefetch, depth)
                        errors.append(abs(told / measured[arm] - 1))
                        name = f"forecast[{shape.name}, {point[0] / GIB:.2f} GiB, {point[1] / 1e9:g} GB/s, {arm}]"
                        yield Figure(f"{name}.measured", measured[arm], "tok/s")
                        yield Figure(f"{name}.forecast", told, "tok/s")
    if not errors:
        raise MeasurementError("no point could be measured")
    yield Figure("forecast.points", len(errors))
    yield Figure("forecast.median_error", statistics.median(errors), at_most=0.12)
    yield Figure("forecast.worst_error", max(errors), at_most=0.30)


def _points(path: Path, shape: Shape) -> Iterator[tuple[int, float]]:
    """(cache, bytes a second of the disk)."""
    described = moestream.describe(path)
    for share in shape.shares:
        cache = max(described.minimum_cache_bytes, int(described.maximum_cache_bytes * share))
        for disk in shape.disks:
            yield cache, disk


def _routing(path: Path, like: str, tokens: int) -> Path:
    described = moestream.describe(path)
    layer = described.moe_layers[0]
    trace = transferred_trace(
        like=like,
        layers=len(described.moe_layers),
        experts=layer.experts,
        top_k=described.experts_used,
        tokens=tokens,
        seed=1,
    )
    file = path.with_name("routing.trace")
    trace.write(file)
    return file


def _measured(path: Path, point: tuple[int, float], trace: Path, effort: Effort) -> dict[str, float]:
    """Tokens a second by arm."""
    cache, disk = point
    note(f"{path.name}: a cache of {cache / GIB:.2f} GiB, {disk / 1e9:g} GB/s")
    records = benchmark(
        model=path,
        arms=[f"{name}:cache={cache}:disk={int(disk)}:replay={trace}" for name in ARMS if name in effort.arms],
        n_prompt=0,
        n_gen=effort.tokens,
        n_depth=effort.fills,  # a prompt asks for nearly all experts, so that the cache is full of those most used
        repetitions=1,
        warmup=8,
        random=True,
        test_seconds=90,
    )
    return {
        record["arm"].partition(":")[0]: 1 / float(np.mean(record["token_ns"]) / 1e9)
        for record in records
        if record["outcome"] in ("ok", "too slow")
    }


def _forecast(path: Path, machine: Probe, trace: Path, point: tuple[int, float], prefetch: str, depth: int) -> float:
    cache, disk = point
    chosen = plan(path, probe=machine, trace=trace, cache=cache, disk=int(disk), depth=depth).chosen
    if chosen is None:
        raise MeasurementError(f"plan says that {path.name} does not run with a cache of {cache} bytes")
    return chosen.on_demand_tokens_per_s if prefetch == "off" else chosen.tokens_per_s


FIGURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    function.__name__: function for function in (repeated, by_hand, forecast)
}
