"""How much worse a variant of a model is: the figures are those of their formulas, on the same tokens for both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

import moestream
from factory import lora, make
from isolation import isolated
from logits import DECODED, PROMPT, stock_kernels
from moestream import ExpertStreaming, Llama, OptionError, _quality
from moestream._quality import compare_quality, divergences, log_softmax

TEXTS = [PROMPT, [*DECODED, *PROMPT[:9]]]
KERNELS = ExpertStreaming(kernels="plain")
ONE = ExpertStreaming(kernels="plain", experts_used=1)
CONTEXT: dict[str, Any] = {"n_ctx": 32, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("models"), "qwen3moe")


@contextlib.contextmanager
def opened(path: Path, streaming: ExpertStreaming = KERNELS, **options: Any) -> Iterator[Llama]:
    with contextlib.closing(Llama(str(path), expert_streaming=streaming, **{**CONTEXT, **options})) as llm:
        yield llm


def logits(path: Path, texts: list[list[int]], **options: Any) -> np.ndarray:
    """[token, vocabulary] of all texts, by stock, whole texts at once; without each text's last."""
    options = {**CONTEXT, "logits_all": True, **options}
    with stock_kernels(interleaved=False), contextlib.closing(llama_cpp.Llama(str(path), **options)) as llm:
        found = []
        for text in texts:
            llm.reset()
            llm.eval(text[:-1])
            found.append(llm.scores[: llm.n_tokens].copy())
    return np.concatenate(found)


# The formulas


def test_probabilities_add_up_to_one_however_large_the_logits() -> None:
    log_p = log_softmax(np.array([[3e4, 3e4 - 1, -3e4], [-1e30, 0, 0], [-np.inf, 5, 5]], np.float32))
    assert log_p.dtype == np.float64
    assert np.exp(log_p).sum(axis=1) == pytest.approx([1, 1, 1], abs=1e-15)
    assert log_p[0, 0] - log_p[0, 1] == 1
    assert log_p[2].tolist() == [-np.inf, -np.log(2), -np.log(2)]


def test_the_divergence_is_that_of_kullback_and_leibler() -> None:
    p, q = (log_softmax(np.log([row])) for row in ([0.5, 0.25, 0.25], [0.25, 0.25, 0.5]))
    assert divergences(p, q) == pytest.approx([0.5 * np.log(2) - 0.25 * np.log(2)], rel=1e-14)
    assert divergences(p, p) == [0]


def test_what_the_reference_excludes_adds_nothing_and_what_the_variant_alone_excludes_is_infinite() -> None:
    both, one = log_softmax(np.array([[1.0, 1, -np.inf]])), log_softmax(np.array([[1.0, -np.inf, -np.inf]]))
    assert divergences(one, both) == pytest.approx([np.log(2)])
    assert divergences(both, one) == [np.inf]
    assert divergences(both, both) == [0]


def test_a_difference_in_the_last_bits_is_seen() -> None:
    logits = np.random.default_rng(1).normal(size=(1, 150_000)).astype(np.float32)
    other = logits.copy()
    other[0, 0] += 1e-3
    p = np.exp(log_softmax(logits))[0, 0]
    # of a logit that changes by d: p d^2 / 2 (1 - p), to the first order
    expected = p * (1 - p) * (np.float64(other[0, 0]) - logits[0, 0]) ** 2 / 2
    assert divergences(log_softmax(logits), log_softmax(other)) == pytest.approx([expected], rel=1e-2)


# The report


@pytest.mark.parametrize("at_once", [1, 7, 64])
def test_the_report_is_that_of_the_logits_of_stock(at_once: int, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_quality, "_VALUES_AT_ONCE", 3 * 320)  # the batch in several parts
    with opened(model) as reference, opened(model, ONE) as variant:
        found = compare_quality(reference, variant, TEXTS, tokens_at_once=at_once)

    options = {} if at_once > 1 else {"n_batch": 1, "n_ubatch": 1}
    own = logits(model, TEXTS, **options)
    fewer = logits(model, TEXTS, kv_overrides={"qwen3moe.expert_used_count": 1}, **options)
    follow = [token for text in TEXTS for token in text[1:]]
    p, q = (
        np.log(np.exp(x - x.max(1, keepdims=True))) for x in (own.astype(np.longdouble), fewer.astype(np.longdouble))
    )
    p, q = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (p, q))
    kl = (np.exp(p) * (p - q)).sum(1).astype(float)
    each = np.arange(len(follow))
    assert found.tokens == len(follow)
    assert found.reference_perplexity == pytest.approx(float(np.exp(-p[each, follow].mean())), rel=1e-5)
    assert found.perplexity == pytest.approx(float(np.exp(-q[each, follow].mean())), rel=1e-5)
    values = [kl.mean(), np.median(kl), np.quantile(kl, 0.99), kl.max()]
    assert [found.kl, found.kl_median, found.kl_99, found.kl_largest] == pytest.approx(values, rel=1e-4)
    assert min(values) > 0
    assert found.same_top1 == (own.argmax(1) == fewer.argmax(1)).mean()
    assert found.changed == 1


def test_the_same_model_does_not_diverge_from_itself_nor_from_stock(model: Path) -> None:
    with stock_kernels(interleaved=False), contextlib.closing(llama_cpp.Llama(str(model), **CONTEXT)) as theirs:
        with opened(model) as ours:
            for reference in (ours, theirs):
                found = compare_quality(reference, ours, TEXTS, tokens_at_once=16)
                assert (found.kl_largest, found.same_top1, found.changed) == (0, 1, 0)
                assert found.perplexity == found.reference_perplexity > 1


def test_a_long_text_is_cut_and_only_its_first_token_is_not_predicted(model: Path) -> None:
    pieces = [PROMPT[:8], PROMPT[7:15], PROMPT[14:22], PROMPT[21:]]
    with opened(model) as reference, opened(model, ONE) as variant:
        cut = compare_quality(reference, variant, [PROMPT], context=7)
        assert cut == compare_quality(reference, variant, pieces)
        assert cut.tokens == len(PROMPT) - 1
        assert cut != compare_quality(reference, variant, [PROMPT])


def test_what_was_evaluated_before_stays_and_the_adapter_counts(model: Path) -> None:
    adapter = str(lora(model))
    with opened(model) as plain, opened(model, lora_path=adapter) as adapted:
        adapted.eval(PROMPT)
        found = compare_quality(plain, adapted, TEXTS)
        assert found.kl > 0
        assert adapted.n_tokens == len(PROMPT)
        assert adapted.input_ids[: len(PROMPT)].tolist() == PROMPT


def test_it_decodes_token_by_token_with_the_cache_as_it_is(model: Path) -> None:
    smallest = moestream.describe(model).minimum_cache_bytes
    with opened(model) as reference, opened(model, ExpertStreaming(kernels="plain", cache=smallest)) as variant:
        before = variant.expert_stats()
        found = compare_quality(reference, variant, TEXTS)
        during = variant.expert_stats().since(before)
    assert found.changed == 0
    assert during.tokens == found.tokens
    assert during.hits + during.misses == found.tokens * 4 * 2
    assert during.hits and during.misses


def test_progress_counts_the_tokens(model: Path) -> None:
    told: list[tuple[int, int]] = []
    with opened(model) as llm:
        compare_quality(llm, llm, [PROMPT], tokens_at_once=10, progress=lambda *counts: told.append(counts))
    assert told == [(0, 22), (10, 22), (20, 22), (22, 22)]


# What is refused


@pytest.mark.parametrize(
    ("texts", "options", "said"),
    [
        ([], {}, "there is no token to predict: give at least one text of two tokens"),
        ([[3], []], {}, "there is no token to predict: give at least one text of two tokens"),
        ([[3, 320]], {}, "token 320 does not exist: this model has 320"),
        ([PROMPT], {"context": 0}, "context=0: at least one token is needed"),
        ([PROMPT], {"tokens_at_once": 0}, "tokens_at_once=0: at least one token is needed"),
    ],
)
def test_nothing_to_compare(texts: list[list[int]], options: dict[str, int], said: str, model: Path) -> None:
    with opened(model) as llm, pytest.raises(OptionError) as caught:
        compare_quality(llm, llm, texts, **options)
    assert str(caught.value) == said


def test_models_of_two_vocabularies(model: Path, tmp_path: Path) -> None:
    with (
        opened(model) as one,
        opened(make(tmp_path, "olmoe", vocab=352)) as other,
        pytest.raises(OptionError) as caught,
    ):
        compare_quality(one, other, TEXTS)
    assert str(caught.value) == "the models have 320 and 352 tokens: compare a model with one of the same vocabulary"


def test_a_closed_model(model: Path) -> None:
    assert isolated(_closed, model) == "the model is closed"


def _closed(path: Path) -> str:
    with opened(path) as other:
        llm = Llama(str(path), expert_streaming=True, **CONTEXT)
        llm.close()
        with pytest.raises(moestream.MoestreamError) as caught:
            compare_quality(llm, other, TEXTS)
    return str(caught.value)
