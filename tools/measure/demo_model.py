"""The figures of the demo models: what they predict, how evenly their experts are used, that llama.cpp computes what PyTorch does.

`--model` is the folder of tools/train_demo_model, which has the forms that do not ship. `quick` needs it not: it measures the files
that ship, on less text, and leaves out what only the others can show.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import llama_cpp
import numpy as np

import moestream
from demo_model import agreement, baselines, facts, stream
from demo_model.config import KINDS, MOST_BYTES, ModelConfig

from .figure import Figure, MeasurementError, note

__all__ = ["FIGURES", "Bench", "open_bench"]

MODELS = Path(moestream.__file__).parent / "models"
CONTEXT = ModelConfig(KINDS[0]).context


@dataclass(frozen=True)
class Bench:
    """What is measured: shipped files, and the folder of the training, None if only the shipped ones are wanted."""

    work: Path | None
    quick: bool
    windows: int
    trace_tokens: int
    agreement_tokens: int

    def shipped(self, kind: str) -> Path:
        if not (path := MODELS / f"demo-{kind}.gguf").is_file():
            raise MeasurementError(f"{path} is not there: tools/train_demo_model --ship makes it")
        return path

    def made(self, name: str) -> Path:
        if self.work is None or not (path := self.work / name).exists():
            raise MeasurementError(
                f"needs {name} of tools/train_demo_model: name its folder with --model, or run it first"
            )
        return path

    @cached_property
    def validation(self) -> tuple[np.ndarray, np.ndarray]:
        """The validation text that ships, as tokens, each document closed by the end token; and where each begins, and the end."""
        file = MODELS / "validation.jsonl.gz"
        if not file.is_file():
            raise MeasurementError(f"{file} is not there: tools/train_demo_model --ship makes it")
        texts = [json.loads(line)["text"] for line in gzip.decompress(file.read_bytes()).splitlines()]
        with contextlib.closing(llama_cpp.Llama(str(self.shipped(KINDS[0])), vocab_only=True, verbose=False)) as llm:
            documents = [np.array([*llm.tokenize(text.encode(), add_bos=False), llm.token_eos()]) for text in texts]
        return np.concatenate(documents), np.cumsum([0, *map(len, documents)])

    def some_windows(self, count: int) -> np.ndarray:
        """[count, CONTEXT + 1] tokens, evenly over the validation text."""
        return facts.spread(stream.windows(self.validation[0], CONTEXT), count)

    @cached_property
    def counting(self) -> dict[str, float]:
        """Nats a token of the validation text by counting."""
        train, validation = (np.load(self.made(f"{name}.npy"), mmap_mode="r") for name in ("train", "validation"))
        return baselines.measure(train, validation)


@contextlib.contextmanager
def open_bench(model: Path | None, quick: bool, keep: bool) -> Iterator[Bench]:
    if quick:
        yield Bench(None, True, windows=6, trace_tokens=3000, agreement_tokens=256)
    else:
        yield Bench(model, False, windows=96, trace_tokens=24_000, agreement_tokens=2048)


def perplexity(bench: Bench) -> Iterator[Figure]:
    """Of the shipped files, against counting, and against F16."""
    windows = bench.some_windows(bench.windows)
    for kind in KINDS:
        note(f"perplexity of {kind}")
        quantised = agreement.perplexity(bench.shipped(kind), windows)
        yield Figure(f"perplexity[{kind}]", quantised)
        if not bench.quick:
            exact = agreement.perplexity(bench.made(f"{kind}-F16.gguf"), windows)
            yield Figure(f"perplexity_f16[{kind}]", exact)
            yield Figure(f"q4_0_over_f16[{kind}]", quantised / exact, at_most=1.05)
            yield Figure(f"perplexity_over_bigram[{kind}]", quantised / math.exp(bench.counting["bigram"]), below=0.5)


def neuron_major(bench: Bench) -> Iterator[Figure]:
    """What storing the down matrices transposed costs: quantised along the output, of the same weights."""
    if bench.quick:
        return
    windows = bench.some_windows(bench.windows)
    with tempfile.TemporaryDirectory(dir=bench.work) as folder:
        found = {}
        for name, transposed in (("plain", False), ("neuron_major", True)):
            note(f"perplexity of smallthinker, {name}")
            file = Path(folder) / f"{name}.gguf"
            moestream.convert(
                bench.made("smallthinker-F16.gguf"),
                file,
                "Q4_0",
                neuron_major=transposed,
                target="plain",
                progress=False,
            )
            options = {"n_ctx": CONTEXT, "n_batch": CONTEXT, "n_ubatch": CONTEXT, "logits_all": True, "verbose": False}
            with contextlib.closing(moestream.Llama(str(file), expert_streaming=True, **options)) as llm:
                found[name] = agreement.perplexity(llm, windows)
    for name, perplexity in found.items():
        yield Figure(f"perplexity_{name}[smallthinker]", perplexity)
    yield Figure("neuron_major_over_plain[smallthinker]", found["neuron_major"] / found["plain"], at_most=1.01)


def counting(bench: Bench) -> Iterator[Figure]:
    if not bench.quick:
        for name, nats in bench.counting.items():
            yield Figure(f"perplexity_{name}", math.exp(nats))


def routing(bench: Bench) -> Iterator[Figure]:
    """How even, and how local, by a trace recorded now."""
    documents = facts.some_documents(*bench.validation, bench.trace_tokens)
    for kind in KINDS:
        note(f"routing of {kind}")
        found = moestream.routing_statistics(facts.trace(bench.shipped(kind), documents, "validation text"))
        least = min(min(layer.load) for layer in found.layers)
        yield Figure(f"least_used_expert[{kind}]", least, unit="share", at_least=None if bench.quick else 0.2)
        yield Figure(f"reused_from_last_token[{kind}]", found.reused_last)
        for point in found.lru:
            if point.share in (0.2, 0.5):
                yield Figure(f"lru_hits[{kind}, {point.share:.0%}]", point.hit_rate)


def size(bench: Bench) -> Iterator[Figure]:
    for kind in KINDS:
        yield Figure(f"bytes[{kind}]", bench.shipped(kind).stat().st_size, unit="B", at_most=MOST_BYTES)


def against_pytorch(bench: Bench) -> Iterator[Figure]:
    """Logits of stock llama.cpp, and the zeros that ReLU makes, on the weights as trained."""
    if bench.quick:
        return
    try:
        from demo_model import trained
    except ModuleNotFoundError as error:
        raise MeasurementError(f"needs {error.name}: pip install '.[train]', and run this with that python") from error

    windows = bench.some_windows(max(1, bench.agreement_tokens // CONTEXT))
    for kind in KINDS:
        model = trained.load(bench.made(f"{kind}.checkpoint"))
        note(f"logits of {kind}")
        files = {type: bench.made(f"{kind}-{type}.gguf") for type in ("F32", "F16")}
        for type, found in trained.agreements(model, files, windows[:, :-1]).items():
            if type == "F32":
                yield Figure(f"logits_apart_f32[{kind}]", found.max_difference, below=0.01)
            else:
                yield Figure(f"logits_apart_f16_same_experts[{kind}]", found.max_difference_alike, below=0.01)
                yield Figure(f"positions_of_same_experts[{kind}]", found.alike / found.positions)
                yield Figure(f"logits_apart_f16[{kind}]", found.max_difference)
            yield Figure(f"same_top1_{type.lower()}[{kind}]", found.top1_agreement, at_least=0.99)
        if kind == "smallthinker":
            zeros = trained.zeros_by_layer(model, windows)
            for layer, share in enumerate(zeros):
                yield Figure(f"zeros[layer {layer}]", share)
            yield Figure("zeros", float(np.mean(zeros)), at_least=0.6)


FIGURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "size": size,
    "perplexity": perplexity,
    "neuron_major": neuron_major,
    "counting": counting,
    "routing": routing,
    "against_pytorch": against_pytorch,
}
