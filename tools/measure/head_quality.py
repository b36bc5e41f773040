"""How good routing by heads is with the sidecar that ships: what heads predict, what routing by them costs, what the LoRA wins back.

All is measured on the files that ship, through the engine, without PyTorch; nothing is taken from the sidecar's own record. Texts
are decoded token by token from their first token on, since prompts go by the gates. `quick` takes less of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

import moestream
from moestream import ExpertStreaming
from moestream._evaluation import evaluating
from moestream._quality import QualityReport, compare_quality
from moestream.sidecar import Sidecar, merge, sidecar_for
from moestream.train import Capture, HeadArrays, capture
from moestream.train._gguf import GgufWeights
from moestream.train.accuracy import overlap, predicted
from moestream.train.head_arrays import packed, unpacked

from . import demo_model
from .figure import Figure, MeasurementError, note

__all__ = ["Bench", "figures", "merging", "open_bench", "perplexity", "recall"]

KIND = "qwen3moe"
TEXTS, QUICK_TEXTS = (32, 256), (3, 120)  # how many, of how many tokens
MERGED_TOKENS, QUICK_MERGED_TOKENS = 512, 128
FEWER = 2  # experts a token


@dataclass(frozen=True)
class Bench:
    """What is measured. The reference of all divergences is `teacher`, a GGUF of the weights before quantising, or the model by its gates."""

    demo: demo_model.Bench
    folder: Path
    teacher: Path | None

    @property
    def quick(self) -> bool:
        return self.demo.quick

    @property
    def model(self) -> Path:
        return self.demo.shipped(KIND)

    @cached_property
    def sidecar(self) -> Sidecar:
        """The one that ships: heads and a LoRA that were trained together.

        Raises:
            MeasurementError: It is not there, or lacks something.
        """
        found = self._shipped(".sidecar.gguf")
        if found.lora is None:
            raise MeasurementError(f"{found.path} lacks a LoRA: tools/train_demo_heads --ship makes one that has it")
        return found

    @cached_property
    def predicting(self) -> Sidecar:
        """The heads as they were before, trained to predict alone. Errors as of `sidecar`."""
        return self._shipped(".heads.gguf")

    def _shipped(self, ending: str) -> Sidecar:
        path = self.model.with_suffix(ending)
        if not path.is_file():
            raise MeasurementError(f"{path} is not there: tools/train_demo_heads --ship makes it")
        found = sidecar_for(self.model, path)
        if found.heads is None:
            raise MeasurementError(f"{path} lacks heads: tools/train_demo_heads --ship makes one that has them")
        return found

    @cached_property
    def texts(self) -> np.ndarray:
        """[text, token] from all over the validation text, one token more than is decoded."""
        count, tokens = QUICK_TEXTS if self.quick else TEXTS
        return self.demo.some_windows(count)[:, : tokens + 1]

    @cached_property
    def ways(self) -> dict[str, Path | None]:
        """Ways to route, each with its sidecar; None: by the gates."""
        heads, weights = self.predicting.heads, GgufWeights(self.model)
        assert heads is not None
        begun = [HeadArrays.untrained(owner, weights.router(owner + 1), heads.width, 1) for owner in heads.owners]
        untrained = self.folder / "untrained.sidecar.gguf"
        dataclasses.replace(self.predicting, heads=packed(begun, top_k=heads.top_k)).write(untrained)
        return {"gates": None, "untrained": untrained, "heads": self.predicting.path, "heads+lora": self.sidecar.path}

    def opened(self, path: Path, streaming: ExpertStreaming) -> contextlib.closing[moestream.Llama]:
        context = self.texts.shape[1] - 1
        options = {"n_ctx": context, "n_batch": context, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
        return contextlib.closing(moestream.Llama(str(path), expert_streaming=streaming, **options))


@contextlib.contextmanager
def open_bench(*, quick: bool, teacher: Path | None = None) -> Iterator[Bench]:
    with (
        tempfile.TemporaryDirectory() as folder,
        demo_model.open_bench(None, quick=quick, keep=False) as demo,
    ):
        yield Bench(demo, Path(folder), teacher)


def figures(quick: bool, *, teacher: Path | None = None) -> Iterator[Figure]:
    """All of them. `teacher`: the model's GGUF in F16, see :class:`Bench`."""
    with open_bench(quick=quick, teacher=teacher) as bench:
        for of_one_kind in (recall, perplexity, merging):
            yield from of_one_kind(bench)


def recall(bench: Bench) -> Iterator[Figure]:
    """Of the experts that a layer takes, those that were predicted, by what predicts; layers are those that own the heads."""
    note("what heads predict")
    streaming = ExpertStreaming(prefetch="off")
    with bench.opened(bench.model, streaming) as llm:
        data = capture(llm, [text[:-1].tolist() for text in bench.texts], bench.folder / "data", tokens_at_once=1)
    found = _overlaps(bench, data)
    ranges = {f"layer {owner}": [owner] for owner in found} | {"all": list(found)}
    for name, owners in ranges.items():
        for predictor in found[owners[0]]:
            of_these = np.mean([found[owner][predictor] for owner in owners], axis=0)
            yield Figure(f"recall[{name} {predictor}]", of_these[0])
            yield Figure(f"exact[{name} {predictor}]", of_these[1])
    mean = {
        predictor: float(np.mean([found[owner][predictor][0] for owner in found])) for predictor in found[owners[0]]
    }
    yield Figure("recall_over_repeat[all]", mean["head"] / mean["repeat"], at_least=1.0)
    said = _said_by_engine(bench)
    yield Figure("recall[all head, by the engine]", said)
    # Of choices that are as good as equal either may be taken.
    yield Figure("recall[all head].apart", abs(said - mean["head"]), at_most=0.002)


def _overlaps(bench: Bench, data: Capture) -> dict[int, dict[str, tuple[float, float]]]:
    """Recall and exact-set rate by owner and predictor."""
    weights, t = GgufWeights(bench.model), data.pairs()
    assert bench.predicting.heads is not None and bench.sidecar.heads is not None
    found: dict[int, dict[str, tuple[float, float]]] = {}
    for owner, head in unpacked(bench.predicting.heads).items():
        took = data.experts(owner + 1)[t + 1]
        experts = predicted(data, head, weights, t)
        if (routing := unpacked(bench.sidecar.heads).get(owner)) is not None:
            experts["head with LoRA"] = predicted(data, routing, weights, t)["head"]
        found[owner] = {name: overlap(these, took) for name, these in experts.items()}
    return found


def _said_by_engine(bench: Bench) -> float:
    """Recall of heads that advise, as the engine counts it."""
    # Lookaheads beside, because prefetch="auto" would try whether guessing pays and say nothing meanwhile.
    advised = ExpertStreaming(sidecar=bench.ways["heads"], prerouter="advise", prefetch="router+lookahead")
    with bench.opened(bench.model, advised) as llm:
        context = bench.texts.shape[1] - 1
        with evaluating(llm, context=context, tokens_at_once=1) as evaluation:
            for text in bench.texts:
                for position, token in enumerate(text[:-1]):
                    evaluation.decode([int(token)], position)
        for prediction in llm.expert_stats().predictions:
            if prediction.name == "heads":
                return prediction.recall
    raise MeasurementError("the engine tells nothing of what its heads predicted")


def perplexity(bench: Bench) -> Iterator[Figure]:
    """Of the texts, and how far from the reference, by what routes; with as many experts as the model has, and with fewer."""
    own = moestream.describe(bench.model).experts_used
    for used in (own,) if bench.quick else (own, FEWER):
        found = {way: _against_reference(bench, way, used) for way in bench.ways}
        name = f"K={used}"
        if used == own:
            yield Figure(
                f"perplexity[{'teacher' if bench.teacher else 'reference'}]", found["heads"].reference_perplexity
            )
        for way, report in found.items():
            yield Figure(f"perplexity[{name} {way}]", report.perplexity)
            yield Figure(f"kl[{name} {way}]", report.kl, "nats")
            yield Figure(f"same_top1[{name} {way}]", report.same_top1)
        least, heads = found["heads"].reference_perplexity, found["heads"].perplexity
        won = (heads - found["heads+lora"].perplexity) / (heads - least)
        yield Figure(f"recovered[{name}]", won, at_least=0.5 if used == own and not bench.quick else None)
        yield Figure(f"recovered_kl[{name}]", 1 - found["heads+lora"].kl / found["heads"].kl)


def _against_reference(bench: Bench, way: str, used: int) -> QualityReport:
    note(f"quality of routing, {way}, {used} experts a token")
    sidecar = bench.ways[way]
    streaming = ExpertStreaming(
        sidecar=sidecar, prerouter="off" if sidecar is None else "route", prefetch="off", experts_used=used
    )
    with (
        bench.opened(bench.teacher or bench.model, ExpertStreaming(prefetch="off")) as reference,
        bench.opened(bench.model, streaming) as variant,
    ):
        return compare_quality(reference, variant, bench.texts)


def merging(bench: Bench) -> Iterator[Figure]:
    """How much of what the LoRA does to the logits is left when it is merged into the quantised weights."""
    note("the LoRA merged")
    tokens = QUICK_MERGED_TOKENS if bench.quick else MERGED_TOKENS
    path = bench.sidecar.path
    assert path is not None
    found = merge(
        bench.model,
        path,
        bench.folder / "merged.gguf",
        text=moestream.models.validation_text(),
        tokens=tokens,
        threads=1,
    )
    yield Figure("merged.survives", found.survives)
    yield Figure("merged.size", found.size)
    yield Figure("merged.same_top1", found.top_token)
