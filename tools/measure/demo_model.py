"""The figures of the demo models: what they predict, how evenly their experts are used, that llama.cpp computes what PyTorch does.

`--model` is the folder of tools/train_demo_model, which has the forms that do not ship. `quick` needs it not: it measures the files
that ship, on less text, and leaves out what only the others can show.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

import moestream

from .figure import Figure, MeasurementError, note

__all__ = ["FIGURES", "Bench", "open_bench"]

MODELS = Path(moestream.__file__).parent / "models"
KINDS = ("smallthinker", "qwen3moe")
CONTEXT = 512
MOST_BYTES = 12_000_000


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
    def documents(self) -> list[np.ndarray]:
        """The validation text that ships, as tokens, each document with the token that begins it."""
        file = MODELS / "validation.jsonl.gz"
        if not file.is_file():
            raise MeasurementError(f"{file} is not there: tools/train_demo_model --ship makes it")
        texts = [json.loads(line)["text"] for line in gzip.decompress(file.read_bytes()).splitlines()]
        with contextlib.closing(moestream.Llama(str(self.shipped(KINDS[0])), vocab_only=True, verbose=False)) as llm:
            return [np.array(llm.tokenize(text.encode(), add_bos=True)) for text in texts]

    def some_windows(self, count: int) -> np.ndarray:
        """[count, CONTEXT + 1] tokens, evenly over the validation text."""
        stream = np.concatenate(self.documents)
        starts = np.linspace(0, len(stream) - CONTEXT - 1, count).astype(int)
        return np.stack([stream[start : start + CONTEXT + 1] for start in starts])


@contextlib.contextmanager
def open_bench(model: Path | None, quick: bool, keep: bool) -> Iterator[Bench]:
    if model is not None and not model.is_dir():
        raise MeasurementError(f"--model {model}: not a folder of tools/train_demo_model")
    if quick:
        yield Bench(None, True, windows=6, trace_tokens=3000, agreement_tokens=256)
    else:
        yield Bench(model, False, windows=96, trace_tokens=24_000, agreement_tokens=2048)


def perplexity(bench: Bench) -> Iterator[Figure]:
    """Of the shipped files, against counting, and against F16."""
    from demo_model import agreement

    windows = bench.some_windows(bench.windows)
    for kind in KINDS:
        note(f"perplexity of {kind}")
        quantised = agreement.perplexity(bench.shipped(kind), windows)
        yield Figure(f"perplexity[{kind}]", quantised)
        if not bench.quick:
            exact = agreement.perplexity(bench.made(f"{kind}-F16.gguf"), windows)
            yield Figure(f"perplexity_f16[{kind}]", exact)
            yield Figure(f"q4_0_over_f16[{kind}]", quantised / exact, at_most=1.05)
            bigram = _by_counting(bench)["bigram"]
            yield Figure(f"perplexity_over_bigram[{kind}]", quantised / math.exp(bigram), below=0.5)


def _by_counting(bench: Bench) -> dict[str, float]:
    """Nats a token by counting, on all of the validation text."""
    from demo_model import baselines

    train, validation = (np.load(bench.made(f"{name}.npy"), mmap_mode="r") for name in ("train", "validation"))
    return baselines.measure(train, validation, int(train.max()) + 1)


def counting(bench: Bench) -> Iterator[Figure]:
    if bench.quick:
        return
    for name, nats in _by_counting(bench).items():
        yield Figure(f"perplexity_{name}", math.exp(nats))


def routing(bench: Bench) -> Iterator[Figure]:
    """How even, and how local, by a trace recorded now."""
    lengths = itertools.accumulate(map(len, bench.documents[::3]))
    documents = [d for d, sum_ in zip(bench.documents[::3], lengths, strict=True) if sum_ <= bench.trace_tokens]
    for kind in KINDS:
        note(f"routing of {kind}")
        with contextlib.closing(
            moestream.Llama(str(bench.shipped(kind)), expert_streaming=True, n_ctx=CONTEXT, verbose=False)
        ) as llm:
            found = moestream.routing_statistics(moestream.record_routing(llm, [d.tolist() for d in documents]))
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
        import torch

        from demo_model import checkpoint, export, facts
        from demo_model.model import DemoModel, ModelConfig
    except ModuleNotFoundError as error:
        raise MeasurementError(f"needs {error.name}: pip install '.[train]', and run this with that python") from error

    windows = bench.some_windows(max(1, bench.agreement_tokens // CONTEXT))
    for kind in KINDS:
        state = checkpoint.load(bench.made(f"{kind}.checkpoint"))
        model = DemoModel(ModelConfig(**state["plan"]["model"]))
        model.load_state_dict(state["model"])
        rounded = export.f16_values(model.config, {name: tensor.numpy() for name, tensor in model.export().items()})
        model.load_export({name: torch.from_numpy(array) for name, array in rounded.items()})
        note(f"logits of {kind}")
        files = {type: bench.made(f"{kind}-{type}.gguf") for type in ("F32", "F16")}
        for type, found in facts.agreements(model, files, windows[:, :-1]).items():
            if type == "F32":
                yield Figure(f"logits_apart_f32[{kind}]", found.max_difference, below=0.01)
            else:
                yield Figure(f"logits_apart_f16_same_experts[{kind}]", found.max_difference_alike, below=0.01)
                yield Figure(f"positions_of_same_experts[{kind}]", found.alike / found.positions)
                yield Figure(f"logits_apart_f16[{kind}]", found.max_difference)
            yield Figure(f"same_top1_{type.lower()}[{kind}]", found.top1_agreement, at_least=0.99)
        if kind == "smallthinker":
            for layer, share in enumerate(facts.zeros_by_layer(model, windows)):
                yield Figure(f"zeros[layer {layer}]", share)
            yield Figure("zeros", float(np.mean(facts.zeros_by_layer(model, windows))), at_least=0.6)


FIGURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "size": size,
    "perplexity": perplexity,
    "counting": counting,
    "routing": routing,
    "against_pytorch": against_pytorch,
}
