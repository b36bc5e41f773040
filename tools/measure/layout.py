"""The figures of the laid file: how long re-laying takes, what it needs, what it gains and where.

What is compared is measured in alternation in one run. The model is Qwen3-30B-A3B in shape with random weights (17 GB); the reads of
a cold cache are measured on smaller models of three expert sizes. `quick` takes small ones for all.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import moestream
from moestream.bench.cgroup import LimitedGroup
from moestream.bench.disk import block_device_of, drop_caches
from moestream.bench.session import Arm, Feed, Session

from . import engine
from .disk import scratch_folder
from .figure import Figure, MeasurementError, note
from .promises import outcomes
from .streams import random_prompt
from .subject import Subject, made

__all__ = ["FIGURES", "Bench", "open_bench"]

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class ColdModel:
    """A model whose experts are of one size, for reads of a cold cache."""

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class Effort:
    shape: tuple[str, ...]
    made_bytes: int
    rounds: int
    tokens: int
    pass_s: float
    cold: tuple[ColdModel, ...]
    cold_limits: tuple[float | None, ...]  # GB/s
    cold_rounds: int
    cold_s: float
    architectures: tuple[str, ...]


def _cold(name: str, d: int, ff: int, layers: int, experts: int) -> ColdModel:
    sizes = {"layers": layers, "d": d, "ff": ff, "experts": experts, "topk": 8, "heads": 8, "kv": 2, "vocab": 4096}
    return ColdModel(name, tuple(itertools.chain(*((f"--{key}", str(value)) for key, value in sizes.items()))))


FULL = Effort(
    shape=("--shape", "qwen3-30b-a3b"),
    made_bytes=19 * GIB,
    rounds=3,
    tokens=48,
    pass_s=60,
    cold=(_cold("0.1MB", 512, 128, 16, 128), _cold("0.5MB", 1024, 320, 12, 128), _cold("2.6MB", 2048, 768, 6, 96)),
    cold_limits=(0.25, 0.5, 1.0, None),
    cold_rounds=2,
    cold_s=4,
    architectures=(),
)
QUICK = Effort(
    shape=("--shape", "qwen3-30b-a3b", "--layers", "3", "--experts", "48", "--vocab", "8192"),
    made_bytes=1 * GIB,
    rounds=1,
    tokens=24,
    pass_s=1.5,
    cold=(_cold("0.1MB", 512, 128, 4, 64),),
    cold_limits=(0.25, None),
    cold_rounds=1,
    cold_s=1,
    architectures=("qwen3moe",),
)


class Bench(engine.Bench):
    """What the figures share: the stock model and the files laid of it, each made when it is first asked for."""

    @cached_property
    def folder(self) -> Path:
        """For copies of the model: two at a time."""
        return self._stack.enter_context(scratch_folder(2 * self.path.stat().st_size + GIB))

    @cached_property
    def interleaved(self) -> Path:
        return self._laid("native")

    @cached_property
    def plain(self) -> Path:
        return self._laid("plain")

    def _laid(self, target: str) -> Path:
        note(f"laying for {target}")
        out = self.folder / f"{target}.gguf"
        moestream.convert(self.path, out, target=target, force=True, progress=False)
        return out


@contextmanager
def open_bench(*, model: Path | None, quick: bool, keep: bool) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack, model, QUICK if quick else FULL, keep)


# ------------------------------------------------------------------------------------------------------------------- re-laying


def relay_over_cp(bench: Bench) -> Iterator[Figure]:
    """Speed of re-laying against that of `cp`, both from a cold source and until the copy is on the disk; and the memory it took."""
    ours, theirs, peaks = [], [], []
    script = (
        "import sys, moestream, moestream.memory as m\n"
        "moestream.convert(sys.argv[1], sys.argv[2], force=True, progress=False)\n"
        "print(m.peak_rss_bytes())"
    )
    copy, laid = bench.folder / "copy.gguf", bench.folder / "native.gguf"
    for turn in range(bench.effort.rounds):
        note(f"cp and re-laying, round {turn + 1} of {bench.effort.rounds}")
        for who in ("cp", "lay") if turn % 2 == 0 else ("lay", "cp"):
            drop_caches(bench.path)
            copy.unlink(missing_ok=True)
            laid.unlink(missing_ok=True)
            start = time.perf_counter()
            if who == "cp":
                subprocess.run(["cp", bench.path, copy], check=True)
                _sync(copy)
                theirs.append(time.perf_counter() - start)
            else:
                answer = subprocess.run(
                    [sys.executable, "-c", script, bench.path, laid], capture_output=True, text=True
                )
                ours.append(time.perf_counter() - start)
                if answer.returncode:
                    raise MeasurementError(f"re-laying failed: {answer.stderr[-600:]}")
                peaks.append(int(answer.stdout))
        copy.unlink(missing_ok=True)
    yield Figure("relay_over_cp", statistics.median(theirs) / statistics.median(ours), at_least=0.6)
    yield Figure("relay_over_cp.relay", statistics.median(ours), "s")
    yield Figure("relay_over_cp.cp", statistics.median(theirs), "s")
    yield Figure("relay_peak_rss", max(peaks) / MIB, "MiB", below=1024)
    laid.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


# --------------------------------------------------------------------------------------------------- interleaved against plain


def interleaved_over_plain(bench: Bench) -> Iterator[Figure]:
    """Decoding with all experts cached, from a file laid interleaved and from one laid plain, each with its own kernels."""
    arms = {
        "interleaved": Arm(bench.interleaved, "streamed", cache=_whole(bench.interleaved), kernels="interleaved"),
        "plain": Arm(bench.plain, "streamed", cache=_whole(bench.plain), kernels="plain"),
    }
    rates: dict[str, list[float]] = {name: [] for name in arms}
    stream = bench.stream(bench.effort.tokens)
    for turn in range(bench.effort.rounds):
        for name in arms if turn % 2 == 0 else reversed(arms):
            note(f"{name}, all experts cached, round {turn + 1} of {bench.effort.rounds}")
            with Session(arms[name]) as session:
                session.feed(bench.prompt(128), at_once=True)
                first = session.feed(stream, seconds=bench.effort.pass_s)
                rates[name].append(session.feed(stream[: len(first.token_s)]).tokens_per_s)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    yield Figure("interleaved_over_plain", medians["interleaved"] / medians["plain"], at_least=1.25)
    for name, rate in medians.items():
        yield Figure(f"interleaved_over_plain.{name}", rate, "tok/s")


def arrival(bench: Bench) -> Iterator[Figure]:
    """A miss: reads, CPU time on what arrived, and the time of a first prompt, with interleaved kernels out of three kinds of file."""
    files = {"stock": bench.path, "plain": bench.plain, "interleaved": bench.interleaved}
    found: dict[str, list[tuple[float, Feed]]] = {name: [] for name in files}
    prompt = bench.prompt(64)
    for turn in range(bench.effort.rounds):
        for name in files if turn % 2 == 0 else reversed(files):
            drop_caches(files[name])
            arm = Arm(files[name], "streamed", cache=_whole(files[name]), kernels="interleaved")
            start = time.perf_counter()
            with Session(arm) as session:
                feed = session.feed(prompt, at_once=True)
                found[name].append((time.perf_counter() - start, feed))
    for name, runs in found.items():
        misses = sum(feed.experts["misses"] for _, feed in runs)
        reads = sum(feed.experts["reads"] for _, feed in runs) / misses
        yield Figure(f"reads_per_missed_expert[{name}]", reads, at_most=None if name == "stock" else 1)
        converting = sum(feed.experts["convert_s"] for _, feed in runs) / misses
        yield Figure(
            f"cpu_per_missed_expert[{name}]", converting * 1e6, "us", at_most=0 if name == "interleaved" else None
        )
        yield Figure(f"first_token[{name}]", statistics.median(seconds for seconds, _ in runs), "s")


def _whole(path: Path) -> int:
    return moestream.describe(path).maximum_cache_bytes


# ------------------------------------------------------------------------------------------------------------------ cold cache


def cold_over_stock(bench: Bench) -> Iterator[Figure]:
    """Decoding with the smallest cache, so that nearly every expert is read: laid against stock, by expert size and speed of the disk."""
    for model in bench.effort.cold:
        with made(list(model.shape), needed_bytes=3 * GIB, keep=False) as stock:
            laid = stock.with_name("laid.gguf")
            moestream.convert(stock, laid, progress=False)
            vocabulary = Subject(stock).vocabulary
            for limit in bench.effort.cold_limits:
                speed = f"{limit}GB/s" if limit else "unthrottled"
                note(f"experts of {model.name}, {speed}")
                rates: dict[Path, list[float]] = {stock: [], laid: []}
                for turn in range(bench.effort.cold_rounds):
                    for path in (stock, laid) if turn % 2 == 0 else (laid, stock):
                        rates[path].append(_cold_rate(path, limit, vocabulary, turn, bench.effort.cold_s))
                ours, theirs = statistics.median(rates[laid]), statistics.median(rates[stock])
                yield Figure(f"cold_over_stock[{model.name}, {speed}]", ours / theirs)
                yield Figure(f"cold_over_stock[{model.name}, {speed}].laid", ours, "tok/s")
                yield Figure(f"cold_over_stock[{model.name}, {speed}].stock", theirs, "tok/s")


def _cold_rate(path: Path, limit: float | None, vocabulary: int, seed: int, seconds: float) -> float:
    """Tokens a second of random tokens, of which each asks for other experts."""
    stream = random_prompt(tokens=4000, vocabulary=vocabulary, seed=seed)
    arm = Arm(path, "streamed", cache=moestream.describe(path).minimum_cache_bytes, n_batch=32)
    drop_caches(path)
    device = block_device_of(path)
    rate = None if limit is None else int(limit * 1e9)
    with (
        LimitedGroup(memory_bytes=4 * GIB, read_bytes_per_s=rate, devices=[device]) as group,
        Session(arm, group=group) as session,
    ):
        feed = session.feed(stream, seconds=seconds)
    return len(feed.token_s) / sum(feed.token_s)


# --------------------------------------------------------------------------------------------------------------- what is exact


def export_identity(bench: Bench) -> Iterator[Figure]:
    """Tests in which `export` of `convert` gives back the source's tensors, byte for byte."""
    ran = outcomes("tests/test_export.py", wanted=" or ".join(bench.effort.architectures) or None)
    yield Figure("export_identity.tests", sum(test.passed for test in ran), f"/{len(ran)}", at_least=len(ran))


def families(bench: Bench) -> Iterator[Figure]:
    """Logits of converted Hugging Face folders, a tiny one of each family, against transformers' own."""
    if bench.effort.architectures:
        return
    try:
        from . import families as tiny
    except ModuleNotFoundError as error:
        raise MeasurementError(
            f"needs {error.name}: pip install '.[hf,train]', and run this with that python"
        ) from error
    with tiny.open_bench(model=None, quick=False, keep=False) as folders:
        for measure in tiny.FIGURES.values():
            yield from measure(folders)


FIGURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    function.__name__: function
    for function in (
        relay_over_cp,
        interleaved_over_plain,
        arrival,
        cold_over_stock,
        engine.bit_identity,
        export_identity,
        families,
    )
}
