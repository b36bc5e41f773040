"""What it costs in quality to take fewer experts, or those that are in memory, on the demo models' validation text.

Perplexity, and the divergence from the model as it is (moestream/_quality.py), token by token as decoding computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import moestream
from moestream import ExpertStats, ExpertStreaming
from moestream._quality import QualityReport, compare_quality

from . import demo_model
from .figure import Figure, note

__all__ = ["Comparison", "compared", "of_cache_aware", "of_fewer_experts"]

MODELS = {"A": "smallthinker", "B": "qwen3moe"}
EXPERTS_USED = (1, 2, 3)
MARGINS = (0.1, 0.2, 0.3, 0.5)
CACHED_SHARE = 0.3
TEXTS, QUICK_TEXTS = (8, 256), (2, 150)  # how many, of how many tokens


@dataclass(frozen=True)
class Comparison:
    """A model in two ways on the same texts, with what that asked of the experts of each."""

    report: QualityReport
    reference: ExpertStats
    variant: ExpertStats


def compared(
    path: Path, reference: ExpertStreaming, variant: ExpertStreaming, texts: np.ndarray, *, tokens_at_once: int = 1
) -> Comparison:
    """Compares two ways to stream a model, on texts [text, token] of one token more than are evaluated."""
    context = texts.shape[1] - 1
    options = {"n_ctx": context, "n_batch": context, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    with contextlib.ExitStack() as stack:
        llms = [
            stack.enter_context(contextlib.closing(moestream.Llama(str(path), expert_streaming=streaming, **options)))
            for streaming in (reference, variant)
        ]
        before = [llm.expert_stats() for llm in llms]
        report = compare_quality(*llms, texts, tokens_at_once=tokens_at_once)
        during = [llm.expert_stats().since(earlier) for llm, earlier in zip(llms, before, strict=True)]
    return Comparison(report, *during)


def of_fewer_experts(demo: demo_model.Bench) -> Iterator[Figure]:
    """Fewer experts a token than the model was trained with, for prompt and decode alike."""
    texts = _texts(demo)
    for letter, kind in MODELS.items():
        path = demo.shipped(kind)
        note(f"fewer experts of {letter}, {kind}")
        for number in EXPERTS_USED[:1] if demo.quick else EXPERTS_USED:
            found = compared(path, ExpertStreaming(), ExpertStreaming(experts_used=number), texts).report
            yield from _quality(f"fewer_experts[{letter} K={number}]", found)
        own = moestream.describe(path).experts_used
        yield Figure(f"fewer_experts[{letter} K={own}, its own].perplexity", found.reference_perplexity)


def of_cache_aware(demo: demo_model.Bench) -> Iterator[Figure]:
    """Experts in memory in place of slightly better ones that are not, with a cache of CACHED_SHARE of all.

    Without reading ahead: what is in memory would depend on the time that it takes, and so would the choice.
    """
    texts = _texts(demo)
    for letter, kind in MODELS.items():
        path = demo.shipped(kind)
        cache = int(moestream.describe(path).maximum_cache_bytes * CACHED_SHARE)
        for margin in MARGINS[:1] if demo.quick else MARGINS:
            note(f"cache-aware routing of {letter}, {kind}, within {margin:g} of the score")
            plain = ExpertStreaming(cache=cache, prefetch="off")
            found = compared(path, plain, replace(plain, cache_aware=margin), texts)
            name = f"cache_aware[{letter} {margin:g} cache={CACHED_SHARE:.0%}]"
            yield from _quality(name, found.report)
            yield Figure(f"{name}.misses", _misses(found.variant), "/token")
            yield Figure(f"{name}.misses_without", _misses(found.reference), "/token")


def _texts(demo: demo_model.Bench) -> np.ndarray:
    """[text, token] from all over the validation text."""
    count, tokens = QUICK_TEXTS if demo.quick else TEXTS
    return demo.some_windows(count)[:, : tokens + 1]


def _quality(name: str, found: QualityReport) -> Iterator[Figure]:
    yield Figure(f"{name}.perplexity", found.perplexity)
    yield Figure(f"{name}.perplexity_over_own", found.perplexity / found.reference_perplexity)
    yield Figure(f"{name}.kl", found.kl, "nats")
    yield Figure(f"{name}.kl_median", found.kl_median, "nats")
    yield Figure(f"{name}.kl_99", found.kl_99, "nats")
    yield Figure(f"{name}.same_top1", found.same_top1)


def _misses(stats: ExpertStats) -> float:
    return stats.misses / stats.tokens
