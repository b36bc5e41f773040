"""From text to the files that ship: the order of the work, and where each result is kept.

work/downloads/              packages as fetched
work/corpus/                 documents, and the manifest of sources and licences
work/tokenizer.json
work/{train,validation}.npy  tokens
work/MODEL.checkpoint        training, to go on from
work/MODEL/                  Hugging Face folder: weights in F16, configuration, tokenizer
work/MODEL-{F32,F16,Q4_0}.gguf
work/MODEL.trace             routing on validation text
work/MODEL-facts.json        what the card says
work/loss.png
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import moestream
from moestream.errors import SidecarError
from moestream.sidecar import sidecar_for

from . import baselines, card, corpus, export, facts, stream, tokenizer, trained, training
from .config import MOST_BYTES, ModelConfig
from .files import completed
from .training import History, Plan

NAMES = {"smallthinker": "moestream demo SmallThinker", "qwen3moe": "moestream demo Qwen3-MoE"}
DESCRIPTION = (
    "A small model with real weights to try expert streaming on; it writes English of the kinds it was trained on."
)


class ReleaseError(Exception):
    """A step cannot be done; the message says which and why."""


@dataclass(frozen=True)
class Data:
    """Text as tokens."""

    train: (
        np.ndarray
    )  # [n], uint16: documents in their order, repeated by the weight of their source, each closed by the end token
    validation: np.ndarray  # [n], uint16: each document once
    starts: np.ndarray  # [documents + 1], int64: where each validation document begins, and the end
    baselines: dict[str, float]  # nats a token on the validation text


def plan(kind: str, steps: int, seed: int, threads: int) -> Plan:
    return Plan(ModelConfig(kind), steps=steps, seed=seed, threads=threads)


def prepare_data(work: Path) -> Data:
    """Fetches, cleans and encodes what is not there yet.

    Raises:
        CorpusError: A package is missing or not what it was.
        ReleaseError: No room, or the folder cannot be written.
    """
    with _disk_errors(work):
        manifest = corpus.build(work / "corpus", work / "downloads")
        vocabulary = work / "tokenizer.json"
        if not vocabulary.exists():
            tokenizer.train(work / "corpus", vocabulary)
        tokens = work / "train.npy"
        if not tokens.exists():
            weights = {source["name"]: source["weight"] for source in manifest.sources}
            _encode(work, "validation", {})
            _encode(work, "train", weights)
        data = np.load(tokens, mmap_mode="r"), np.load(work / "validation.npy")
        kept = work / "baselines.json"
        if not kept.exists():
            _write(kept, json.dumps(baselines.measure(*data)).encode())
        return Data(*data, np.load(work / "validation-starts.npy"), json.loads(kept.read_text()))


def train_and_export(plan: Plan, data: Data, work: Path) -> None:
    """Trains a model to its end, going on from its checkpoint, and writes every form of it anew."""
    kind = plan.model.kind
    windows = stream.windows(data.validation, plan.model.context)
    with _disk_errors(work):
        model, history = training.train(
            plan,
            data.train,
            facts.spread(windows, training.VALIDATION_WINDOWS),
            work / f"{kind}.checkpoint",
            on_report=lambda history: _draw(work, kind, history, data),
        )
        _write(work / f"{kind}-history.json", json.dumps(vars(history)).encode())
        state = {name: tensor.numpy() for name, tensor in model.export().items()}
        folder = work / kind
        if folder.exists():
            shutil.rmtree(folder)
        export.to_hugging_face(plan.model, state, work / "tokenizer.json", folder)
        for type in ("F32", "F16"):
            export.to_gguf(
                plan.model,
                state,
                work / "tokenizer.json",
                work / f"{kind}-{type}.gguf",
                name=NAMES[kind],
                description=DESCRIPTION,
                license="other",
                type=type,
            )
        export.quantize(work / f"{kind}-F16.gguf", work / f"{kind}-Q4_0.gguf", threads=plan.threads)


def measure(plan: Plan, data: Data, work: Path) -> dict[str, Any]:
    """All that the card says about a model, from its files in `work`."""
    kind = plan.model.kind
    history = json.loads((work / f"{kind}-history.json").read_text())
    files = {type: work / f"{kind}-{type}.gguf" for type in ("F32", "F16", "Q4_0")}
    model = trained.load(work / f"{kind}.checkpoint")
    windows = stream.windows(data.validation, plan.model.context)
    some = facts.spread(windows, facts.PERPLEXITY_WINDOWS)
    few = facts.spread(windows, facts.AGREEMENT_TOKENS // plan.model.context)
    say(f"{kind}: perplexity")
    perplexity = facts.perplexities({type: files[type] for type in ("F16", "Q4_0")}, some)
    say(f"{kind}: logits against PyTorch")
    agreement = trained.agreements(model, {type: files[type] for type in ("F32", "F16")}, few[:, :-1])
    say(f"{kind}: routing trace and samples")
    documents = facts.some_documents(data.validation, data.starts, facts.TRACE_TOKENS)
    trace = facts.trace(files["Q4_0"], documents, f"{len(documents)} documents of the demo models' validation text")
    trace.write(work / f"{kind}.trace")
    return {
        "config": dataclasses.asdict(plan.model),
        "parameters": plan.model.parameters,
        "active_parameters": plan.model.active_parameters,
        "tokens": plan.tokens,
        "seconds": history["seconds"],
        "perplexity": perplexity,
        "agreement": {type: dataclasses.asdict(found) for type, found in agreement.items()},
        "zeros": trained.zeros_by_layer(model, some[:8]),
        "routing": moestream.routing_statistics(trace).as_dict(),
        "samples": facts.samples(files["Q4_0"]),
    }


def ship(plans: Sequence[Plan], data: Data, work: Path, package: Path) -> None:
    """Measures the models and puts what ships into the package: models, traces, validation text, card and picture.

    Raises:
        ReleaseError: A model is not trained yet, or a file is larger than the package may have.
    """
    manifest = json.loads((work / "corpus" / "manifest.json").read_text())
    found = {}
    for plan in plans:
        kind = plan.model.kind
        if not (work / f"{kind}-Q4_0.gguf").exists():
            raise ReleaseError(f"{work}: has no {kind} yet, and all models ship together: run without --model first")
        if (size := (work / f"{kind}-Q4_0.gguf").stat().st_size) > MOST_BYTES:
            raise ReleaseError(f"{kind}-Q4_0.gguf has {size} bytes, and {MOST_BYTES} may ship: make the model smaller")
        found[kind] = measure(plan, data, work)
        _write(work / f"{kind}-facts.json", json.dumps(found[kind], indent=1).encode())
    with _disk_errors(package):
        for kind in found:
            _copy(work / f"{kind}-Q4_0.gguf", package / f"demo-{kind}.gguf")
            _copy(work / f"{kind}.trace", package / f"demo-{kind}.trace")
        _copy(work / "loss.png", package / "loss.png")
        validation = (work / "corpus" / "validation.jsonl").read_bytes()
        _write(package / "validation.jsonl.gz", gzip.compress(validation, mtime=0))
        page = card.render(manifest, data.baselines, found)
        sidecar = package / "demo-qwen3moe.sidecar.gguf"
        try:
            page = card.with_sidecar(page, sidecar_for(package / "demo-qwen3moe.gguf", sidecar))
        except SidecarError as error:  # the models are others than before
            say(f"{error}; without it until tools/train_demo_heads --ship has made another")
            sidecar.unlink(missing_ok=True)
        _write(package / "README.md", page.encode())


def _encode(work: Path, name: str, weights: dict[str, int]) -> None:
    encoder = tokenizer.load(work / "tokenizer.json")
    with open(work / "corpus" / f"{name}.jsonl", encoding="utf-8") as file:
        documents = [json.loads(line) for line in file]
    encoded = tokenizer.encode_documents(encoder, [document["text"] for document in documents])
    # A document's id begins with the name of its source.
    repeats = [weights.get(document["id"].partition("/")[0], 1) for document in documents]
    pieces = [piece for piece, times in zip(encoded, repeats, strict=True) for _ in range(times)]
    _save(work / f"{name}-starts.npy", np.cumsum([0, *map(len, pieces)]))
    _save(work / f"{name}.npy", np.concatenate(pieces))


def _draw(work: Path, kind: str, history: History, data: Data) -> None:
    """The picture of all models' losses so far."""
    histories = {}
    for file in sorted(work.glob("*-history.json")):
        kept = json.loads(file.read_text())
        histories[file.name.removesuffix("-history.json")] = History(kept["train"], kept["validation"], kept["seconds"])
    training.draw_losses({**histories, kind: history}, data.baselines, work / "loss.png")


def _save(path: Path, array: np.ndarray) -> None:
    with completed(path) as part, open(part, "wb") as file:
        np.save(file, array)


def _copy(source: Path, target: Path) -> None:
    with completed(target) as part:
        shutil.copyfile(source, part)


def _write(path: Path, content: bytes) -> None:
    with completed(path) as part:
        part.write_bytes(content)


@contextlib.contextmanager
def _disk_errors(work: Path) -> Iterator[None]:
    try:
        work.mkdir(parents=True, exist_ok=True)
        yield
    except (corpus.CorpusError, ReleaseError):
        raise
    except OSError as error:
        raise ReleaseError(
            f"{error.filename or work}: {error.strerror or error}; what was finished is kept in {work}, and the same command goes on"
        ) from error


def say(line: str) -> None:
    print(f"train_demo_model: {line}", file=sys.stderr, flush=True)
