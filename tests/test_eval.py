"""How well a model predicts a text, and how far it is from a base: llama-perplexity's method, figures and file."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

import moestream
from command import PYTHON, at_terminal, screen
from factory import lora, make
from isolation import isolated
from logits import stock_kernels
from moestream import (
    ExpertReadError,
    ExpertStreaming,
    Llama,
    MeasurementError,
    MoestreamError,
    OptionError,
    OutputError,
    PerplexityReport,
    RoutingTrace,
    TraceError,
    cli,
    demo_model,
    evaluate,
)
from moestream import perplexity as perplexity_module
from moestream._evaluation import Evaluation
from moestream._logits_file import LogitsFile, encode
from moestream._whole_file import writing_whole
from moestream.cli import eval as eval_command
from moestream.cli.generate import generate
from moestream.models import validation_text

CONTEXT, CHUNKS = 64, 4
SCORED = CONTEXT - 1 - CONTEXT // 2  # tokens of a chunk
TEXT = "".join(f"The {n}th library is open on day {n * n}. " for n in range(8))[: CONTEXT * CHUNKS]
BEGIN = 257  # the begin token of the models of the factory, which tell a text's bytes
TOKENS = [BEGIN, *TEXT.encode()]
KERNELS = ExpertStreaming(kernels="plain")
ONE = ExpertStreaming(kernels="plain", experts_used=1)
OPTIONS: dict[str, Any] = {"n_ctx": CONTEXT, "n_ubatch": 48, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


@contextlib.contextmanager
def opened(path: Path, streaming: ExpertStreaming = KERNELS, **options: Any) -> Iterator[Llama]:
    with contextlib.closing(Llama(str(path), expert_streaming=streaming, **{**OPTIONS, **options})) as llm:
        yield llm


@contextlib.contextmanager
def stock(path: Path, *, interleaved: bool = False, **options: Any) -> Iterator[llama_cpp.Llama]:
    with stock_kernels(interleaved), contextlib.closing(llama_cpp.Llama(str(path), **{**OPTIONS, **options})) as llm:
        yield llm


def stock_logits(path: Path, **options: Any) -> np.ndarray:
    """[chunk, scored token, vocabulary], by stock."""
    found = []
    with stock(path, logits_all=True, **options) as llm:
        for chunk in range(CHUNKS):
            llm.reset()
            llm.eval([BEGIN, *TOKENS[chunk * CONTEXT + 1 : (chunk + 1) * CONTEXT]])
            found.append(llm.scores[CONTEXT // 2 : CONTEXT - 1].copy())
    return np.stack(found)


def came() -> np.ndarray:
    """[chunk, scored token]: the tokens that are predicted."""
    chunks = np.array(TOKENS[: CHUNKS * CONTEXT]).reshape(CHUNKS, CONTEXT)
    return chunks[:, CONTEXT // 2 + 1 :]


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.longdouble)
    exact -= exact.max(axis=-1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(axis=-1, keepdims=True))


def nats(log_p: np.ndarray) -> np.ndarray:
    return -np.take_along_axis(log_p, came()[..., None], axis=-1)[..., 0]


def by_hand(values: np.ndarray) -> tuple[float, float]:
    """Mean and standard error."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values) / (len(values) - 1))


def plainly_written(tokens: list[int], logits: np.ndarray) -> bytes:
    """The file of a base run, number by number. `logits` are [chunk, scored token, vocabulary]."""
    single = np.float32
    data = b"_logits_" + struct.pack("<iii", CONTEXT, logits.shape[2], len(logits))
    data += struct.pack(f"<{len(tokens)}i", *tokens)
    for row in logits.reshape(-1, logits.shape[2]):
        largest, smallest = max(row), min(row)
        lowest = max(smallest, single(largest - single(16)))
        log_sum = single(math.log(math.fsum(math.exp(single(x - largest)) for x in row)))
        scale = single(single(largest - lowest) / single(65535))
        inverse = single(single(1) / scale)
        data += struct.pack("<ff", scale, single(single(lowest - largest) - log_sum))
        codes = [round(float(single(inverse * single(x - lowest)))) if x > lowest else 0 for x in row]
        data += struct.pack(f"<{len(codes)}H", *codes) + bytes(2 * (len(codes) % 2))
    return data


@pytest.fixture(scope="module")
def text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text(TEXT + "\n")
    return path


@pytest.fixture(scope="module")
def base(model: Path, folder: Path) -> Path:
    path = folder / "base.kld"
    with opened(model) as llm:
        evaluate(llm, TEXT, context=CONTEXT, save_base=path)
    return path


@pytest.fixture(scope="module")
def routing(model: Path, folder: Path) -> Path:
    path = folder / "base.trace"
    with opened(model) as llm:
        evaluate(llm, TEXT, context=CONTEXT, save_routing=path)
    return path


# Perplexity


@pytest.mark.parametrize("at_once", [1, 7, 48, 512])
def test_perplexity_is_that_of_the_logits_of_stock(at_once: int, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity_module, "_VALUES_AT_ONCE", 3 * 320)  # a batch in several parts
    with opened(model) as llm:
        found = evaluate(llm, TEXT, context=CONTEXT, tokens_at_once=at_once)
    expected = nats(
        log_probabilities(stock_logits(model, n_batch=min(at_once, CONTEXT), n_ubatch=min(at_once, CONTEXT)))
    )
    for chunk, reported in enumerate(found.chunks, 1):
        mean, error = by_hand(expected[:chunk].ravel().astype(float))
        assert (reported.chunk, reported.tokens) == (chunk, chunk * SCORED)
        assert reported.perplexity.value == pytest.approx(math.exp(mean), rel=1e-6)
        assert reported.perplexity.error == pytest.approx(math.exp(mean) * error, rel=1e-5)
    assert (found.tokens, len(found.chunks), found.chunks_wanted) == (CHUNKS * SCORED, CHUNKS, CHUNKS)
    assert found.perplexity == found.chunks[-1].perplexity
    assert (found.divergence, found.partial, found.tokens_at_once) == (None, False, min(at_once, CONTEXT))


@pytest.mark.parametrize("kernels", ["plain", "interleaved"])
@pytest.mark.parametrize("arch", ["qwen3moe", "smallthinker", "olmoe"])
def test_streamed_equals_stock_exactly(arch: str, kernels: str, folder: Path) -> None:
    path = make(folder, arch)
    smallest = moestream.describe(path).minimum_cache_bytes
    with opened(path, ExpertStreaming(kernels=kernels, cache=smallest)) as llm:
        ours = evaluate(llm, TEXT, context=CONTEXT)
    with stock(path, interleaved=kernels == "interleaved") as llm:
        theirs = evaluate(llm, TEXT, context=CONTEXT)
    assert ours.chunks == theirs.chunks
    assert ours.stats is not None and ours.stats.misses > 0
    assert (theirs.stats, theirs.routing) == (None, None)


def test_the_demo_models_streamed_and_not_give_the_same_to_the_last_bit() -> None:
    text = validation_text()[:5000]
    for name in ("smallthinker", "qwen3moe"):
        path = demo_model(name)
        with opened(path, n_ctx=256, n_ubatch=256) as ours, stock(path, n_ctx=256, n_ubatch=256) as theirs:
            found = evaluate(ours, text, context=256, chunks=2)
            assert found.chunks == evaluate(theirs, text, context=256, chunks=2).chunks
            assert 10 < found.perplexity.value < 100


def test_text_bytes_and_tokens_are_the_same_and_chunks_are_the_first(model: Path) -> None:
    with opened(model) as llm:
        whole = evaluate(llm, TEXT, context=CONTEXT)
        for same in (TEXT.encode(), TOKENS):
            assert evaluate(llm, same, context=CONTEXT).chunks == whole.chunks
        assert evaluate(llm, TEXT, context=CONTEXT, chunks=3).chunks == whole.chunks[:3]
        assert evaluate(llm, TEXT, context=CONTEXT, chunks=99).chunks == whole.chunks


def test_the_adapter_counts_and_what_was_evaluated_before_stays(model: Path) -> None:
    with opened(model) as plain, opened(model, lora_path=str(lora(model))) as adapted:
        adapted.eval(TOKENS[:9])
        assert evaluate(adapted, TEXT, context=CONTEXT).perplexity != evaluate(plain, TEXT, context=CONTEXT).perplexity
        assert adapted.n_tokens == 9


def test_progress_and_chunks_are_told(model: Path) -> None:
    told: list[tuple[int, int]] = []
    chunks: list[int] = []
    with opened(model) as llm:
        evaluate(
            llm,
            TEXT,
            context=CONTEXT,
            chunks=2,
            progress=lambda *counts: told.append(counts),
            on_chunk=lambda chunk: chunks.append(chunk.chunk),
        )
    assert told == [(0, 128), (48, 128), (64, 128), (112, 128), (128, 128)]
    assert chunks == [1, 2]


# The file of a base run


@pytest.mark.parametrize("vocab", [320, 321])
def test_the_file_is_llama_perplexitys_byte_for_byte(vocab: int, folder: Path, tmp_path: Path) -> None:
    path, file = make(folder, vocab=vocab), tmp_path / "base.kld"
    with opened(path) as llm:
        evaluate(llm, TEXT, context=CONTEXT, save_base=file)
    expected = plainly_written(TOKENS[: CONTEXT * CHUNKS], stock_logits(path, n_ubatch=48))
    assert file.read_bytes() == expected
    assert os.listdir(tmp_path) == ["base.kld"]


def test_a_row_keeps_16_nats_below_the_largest_in_65535_steps() -> None:
    row = encode(np.array([[0, 8, -8, -9, -np.inf, 7.5]], np.float32))
    scale, lowest, *codes = struct.unpack("<ff6H", row)
    log_sum = math.log(math.exp(-8) + 1 + math.exp(-16) + math.exp(-17) + math.exp(-0.5))
    assert (scale, lowest) == (np.float32(16 / 65535), pytest.approx(-16 - log_sum, rel=1e-7))
    assert codes == [32768, 65535, 0, 0, 0, round(65535 * 15.5 / 16)]
    assert struct.unpack("<ff4H", encode(np.full((1, 4), 3, np.float32))) == (0, np.float32(-math.log(4)), 0, 0, 0, 0)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    logits = np.random.default_rng(1).normal(size=(2, SCORED, 33), scale=3).astype(np.float32)
    path, tokens = tmp_path / "base.kld", list(range(33)) * 4
    path.write_bytes(plainly_written(tokens[: 2 * CONTEXT], logits))
    file = LogitsFile.read(path)
    assert (file.context, file.n_vocab, file.chunks) == (CONTEXT, 33, 2)
    assert file.tokens.tolist() == tokens[: 2 * CONTEXT]
    found = file.log_probabilities(1, 5, 7)
    assert found == pytest.approx(log_probabilities(logits[1, 5:12]).astype(float), abs=16 / 65535)


# The ladder


def test_every_figure_is_that_of_its_formula(model: Path, base: Path) -> None:
    with opened(model, ONE) as llm:
        found = evaluate(llm, base=base)
    assert [found.context, found.tokens] == [CONTEXT, CHUNKS * SCORED]

    fields = np.dtype([("scale", "<f4"), ("lowest", "<f4"), ("codes", "<u2", 320)])
    rows = np.frombuffer(base.read_bytes()[20 + 4 * CONTEXT * CHUNKS :], fields).reshape(CHUNKS, SCORED)
    log_p = rows["scale"][..., None] * rows["codes"].astype(np.float32) + rows["lowest"][..., None]
    q = stock_logits(model, n_ubatch=48, kv_overrides={"qwen3moe.expert_used_count": 1})
    log_q = log_probabilities(q)
    kl = np.where(log_p > -16, np.exp(log_p.astype(np.longdouble)) * (log_p - log_q), 0).sum(axis=-1)
    kl, ours, theirs = (x.ravel().astype(float) for x in (kl, nats(log_q), nats(log_p)))
    change = np.exp(-ours) - np.exp(-theirs)
    same = (q.argmax(axis=-1) == log_p.argmax(axis=-1)).ravel().astype(float)

    n = CHUNKS * SCORED
    (mean, error), (base_mean, base_error) = by_hand(ours), by_hand(theirs)
    covariance = math.fsum((ours - mean) * (theirs - base_mean)) / n / (n - 1)
    ratio_error = math.sqrt(error**2 + base_error**2 - 2 * covariance)
    ppl, base_ppl = math.exp(mean), math.exp(base_mean)
    difference_error = math.sqrt((ppl * error) ** 2 + (base_ppl * base_error) ** 2 - 2 * ppl * base_ppl * covariance)
    square, square_error = by_hand(change**2)
    share = same.mean()
    ladder = found.divergence
    assert ladder is not None
    for name, estimate, value, deviation in (
        ("perplexity", found.perplexity, ppl, ppl * error),
        ("base", ladder.base_perplexity, base_ppl, base_ppl * base_error),
        ("log ratio", ladder.log_ratio, mean - base_mean, ratio_error),
        ("ratio", ladder.ratio, ppl / base_ppl, ppl / base_ppl * ratio_error),
        ("difference", ladder.difference, ppl - base_ppl, difference_error),
        ("kl", ladder.kl, *by_hand(kl)),
        ("change", ladder.change, *by_hand(change)),
        ("rms", ladder.change_rms, math.sqrt(square), square_error / 2 / math.sqrt(square)),
        ("same top", ladder.same_top, share, math.sqrt(share * (1 - share) / (n - 1))),
    ):
        assert (estimate.value, estimate.error) == pytest.approx((value, deviation), rel=1e-4), name
    assert ladder.correlation == pytest.approx(covariance / error / base_error, rel=1e-6)
    assert 0 < share < 1 and ladder.kl.value > 1e-4
    for values, found_percentiles in ((kl, ladder.kl_percentiles), (change, ladder.change_percentiles)):
        ordered = sorted(values)
        for percent, value in found_percentiles.items():
            at = percent / 100 * (n - 1)
            low = ordered[int(at)]
            high = ordered[min(int(at) + 1, n - 1)]
            assert value == pytest.approx(low + (at % 1) * (high - low), rel=1e-4, abs=1e-6), percent
    assert list(ladder.kl_percentiles) == [100, 99.9, 99, 95, 90, 50, 10, 5, 1, 0.1, 0]
    assert list(ladder.change_percentiles) == [100, 99.9, 99, 95, 90, 75, 50, 25, 10, 5, 1, 0.1, 0]

    second = found.chunks[1]
    first_half = slice(2 * SCORED)
    assert second.kl is not None and second.same_top is not None and second.log_ratio is not None
    assert second.kl.value == pytest.approx(kl[first_half].mean(), rel=1e-4)
    assert second.same_top.value == pytest.approx(same[first_half].mean())
    assert second.log_ratio.value == pytest.approx((ours - theirs)[first_half].mean(), rel=1e-4)


def test_a_model_does_not_diverge_from_itself_but_by_the_rounding_of_the_file(model: Path, base: Path) -> None:
    with opened(model) as llm:
        found = evaluate(llm, TEXT, base=base, context=CONTEXT).divergence
    assert found is not None
    step = np.frombuffer(base.read_bytes()[20 + 4 * CONTEXT * CHUNKS :], "<f4").reshape(-1, 162)[:, 0].max()
    # each log p is half a step off at most, and what single precision adds; so is each mean of them
    most = step / 2 * 1.01 + 4e-6
    assert 0 < step <= 16 / 65535
    assert all(abs(value) <= most for value in found.kl_percentiles.values())
    assert abs(found.kl.value) < most / 10
    assert all(abs(value) <= most for value in found.change_percentiles.values())
    assert (found.same_top.value, found.same_top.error) == (1, 0)
    assert abs(found.log_ratio.value) <= most
    assert found.correlation == pytest.approx(1, abs=1e-6)


def test_fewer_chunks_of_a_base_are_its_first(model: Path, base: Path) -> None:
    with opened(model, ONE) as llm:
        whole, some = evaluate(llm, base=base), evaluate(llm, base=base, chunks=2)
    assert some.chunks == whole.chunks[:2]


# Routing


def test_what_is_left_out_and_what_weighed_is_told_against_a_base(model: Path, routing: Path, tmp_path: Path) -> None:
    with opened(model) as llm:
        same = evaluate(llm, TEXT, context=CONTEXT, routing_base=routing).routing
    assert same is not None and same.against_base is not None
    assert (same.experts_used, same.experts_of_model, same.left_out, same.replaced) == (2, 2, 0, 0)
    assert same.choices == CHUNKS * CONTEXT * 4 * 2
    difference = same.against_base
    assert difference.tokens == CHUNKS * CONTEXT
    assert (difference.choices_changed, difference.experts_missing, difference.weight_missing) == (0, 0, 0)

    with opened(model, ONE) as llm:
        path = tmp_path / "one.trace"
        fewer = evaluate(llm, TEXT, context=CONTEXT, chunks=3, routing_base=routing, save_routing=path).routing
    assert fewer is not None and fewer.against_base is not None
    assert (fewer.experts_used, fewer.experts_of_model, fewer.left_out) == (1, 2, 0.5)
    wanted, taken = RoutingTrace.read(routing), RoutingTrace.read(path)
    assert taken.starts.tolist() == [0, CONTEXT, 2 * CONTEXT]
    missing = weight = 0.0
    for token, layer in np.ndindex(3 * CONTEXT, 4):
        took = set(taken.experts[token, layer].tolist())
        for expert, weighed in zip(wanted.experts[token, layer].tolist(), wanted.weights[token, layer], strict=True):
            missing += expert not in took
            weight += float(weighed) if expert not in took else 0.0
    difference = fewer.against_base
    assert difference.choices_changed == 1
    assert difference.experts_missing == missing / (3 * CONTEXT * 4 * 2)
    assert difference.weight_missing == pytest.approx(
        weight / wanted.weights[: 3 * CONTEXT].astype(float).sum(), rel=1e-6
    )
    assert 0 < difference.weight_missing < difference.experts_missing


def test_a_routing_of_the_same_text_is_recorded_with_the_begin_token_of_each_chunk(routing: Path) -> None:
    trace = RoutingTrace.read(routing)
    expected = np.array(TOKENS[: CONTEXT * CHUNKS])
    expected[::CONTEXT] = BEGIN
    assert trace.tokens.tolist() == expected.tolist()
    assert trace.starts.tolist() == [0, 64, 128, 192]
    assert trace.source == "moestream eval"


def test_cached_experts_in_place_of_others_are_counted(folder: Path, tmp_path: Path) -> None:
    path = make(folder, experts=32)
    routing, base = tmp_path / "base.trace", tmp_path / "base.kld"
    cache = moestream.describe(path).minimum_cache_bytes * 3
    aware = ExpertStreaming(kernels="plain", prefetch="off", cache=cache, cache_aware=0.9)
    with opened(path) as llm:
        evaluate(llm, TEXT, context=CONTEXT, tokens_at_once=1, save_base=base, save_routing=routing)
    with opened(path, aware) as llm:
        found = evaluate(llm, TEXT, base=base, tokens_at_once=1, routing_base=routing)
        prompts = evaluate(llm, TEXT, base=base, tokens_at_once=9)
    assert found.routing is not None and found.routing.against_base is not None and found.divergence is not None
    assert 0.1 < found.routing.replaced_share == found.routing.replaced / (CHUNKS * CONTEXT * 4 * 2) < 1
    assert found.routing.cache_aware == 0.9
    assert found.routing.against_base.experts_missing > 0.1
    assert found.divergence.kl.value > 1e-4
    assert found.notes == ()
    assert prompts.routing is not None
    assert prompts.routing.replaced < found.routing.replaced / 50  # the last token of each chunk, alone
    assert prompts.notes == (
        "cache-aware routing acts on up to 8 tokens at once, and here 9 are computed together, so that hardly any of "
        "it shows: --tokens-at-once 1 computes as decoding does",
    )


def test_cache_aware_and_reading_ahead_is_said_to_depend_on_time(model: Path) -> None:
    told: list[str] = []
    with opened(model, ExpertStreaming(cache_aware=0.2)) as llm:
        found = evaluate(llm, TEXT, context=CONTEXT, chunks=1, tokens_at_once=8, on_note=told.append)
    assert (
        list(found.notes)
        == told
        == [
            "with cache-aware routing and reading ahead, figures depend on time and differ from run to run; "
            "--prefetch off makes them repeatable"
        ]
    )


def test_predictions_are_told_by_how_far_ahead_they_were_made(folder: Path) -> None:
    path = make(folder, "smallthinker", experts=32)
    streaming = ExpertStreaming(
        kernels="plain", prefetch="router+lookahead", cache=moestream.describe(path).minimum_cache_bytes
    )
    with opened(path, streaming) as llm:
        found = evaluate(llm, TEXT, context=CONTEXT, tokens_at_once=1).routing
    assert found is not None
    recall = {guess.name: guess.recall for guess in found.predictions}
    assert recall["router"] == 1
    assert 0 < recall["1 layer ahead"] < 1
    assert all(guess.layers > 0 for guess in found.predictions)


# What is refused


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (
            "a" * 100,
            {},
            "the text is too short: it has 101 of the at least 1024 tokens that a context of 512 needs: take a longer one, "
            "or a smaller context (-c 50)",
        ),
        (
            "",
            {"context": 64},
            "the text is too short: it has 1 of the at least 128 tokens that a context of 64 needs: take a longer one",
        ),
        (TEXT, {"context": 2}, "context=2: at least 3 tokens are needed, of which one is predicted"),
        (TEXT, {"context": 64, "chunks": 0}, "chunks=0: at least one is needed"),
        (TEXT, {"context": 64, "tokens_at_once": 0}, "tokens_at_once=0: at least one token is needed"),
        ([1, 320] * 64, {"context": 64}, "token 320 does not exist: this model has 320"),
        (None, {}, "there is no text to evaluate: give one, or a base run, which holds its tokens"),
        (
            TEXT,
            {"base": "a", "save_base": "b"},
            "b: a base is either compared with or written: give one of base and save_base",
        ),
    ],
)
def test_nothing_to_evaluate(text: Any, options: dict[str, Any], said: str, model: Path) -> None:
    with opened(model) as llm, pytest.raises(OptionError) as caught:
        evaluate(llm, text, **options)
    assert str(caught.value) == said


def test_the_shortest_text_and_context(model: Path) -> None:
    with opened(model) as llm:
        assert evaluate(llm, "a" * 127, context=64).tokens == 2 * SCORED
        found = evaluate(llm, "abcde", context=3, chunks=1)
        assert (found.tokens, found.perplexity.error) == (1, 0)


def test_a_base_of_another_text(model: Path, base: Path) -> None:
    with opened(model) as llm:
        for other in ("x" + TEXT, TEXT[:200], TEXT[:-2]):
            with pytest.raises(OptionError) as caught:
                evaluate(llm, other, base=base)
            assert str(caught.value) == (
                f"{base}: was made with another text: give the same, or none, which takes the base's tokens"
            )
        assert evaluate(llm, TEXT + "and more", base=base).tokens == CHUNKS * SCORED


def test_a_base_of_another_context(model: Path, base: Path) -> None:
    with opened(model) as llm, pytest.raises(OptionError) as caught:
        evaluate(llm, TEXT, base=base, context=32)
    assert str(caught.value) == f"{base}: was made with a context of 64 tokens, not 32: give -c 64, or leave it out"


def test_a_base_of_another_vocabulary(folder: Path, base: Path) -> None:
    with opened(make(folder, vocab=352)) as llm, pytest.raises(OptionError) as caught:
        evaluate(llm, TEXT, base=base)
    assert str(caught.value) == (
        f"{base}: is of a model with 320 tokens, and this one has 352: compare models of the same vocabulary"
    )


ANEW = "write it anew: moestream eval --kl-divergence-base FILE, without --kl-divergence"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: b"", f"is no file of a base run's logits: {ANEW}"),
        (lambda data: b"GGUF" + data[4:], f"is no file of a base run's logits: {ANEW}"),
        (lambda data: data[:15], f"is truncated: {ANEW}"),
        (lambda data: data[:-1], f"is truncated: it has 81395 bytes, and 81396 by its head: {ANEW}"),
        (lambda data: data + b"x", f"is damaged: it has 81397 bytes, and 81396 by its head: {ANEW}"),
        (
            lambda data: data[:8] + bytes(4) + data[12:],
            f"is damaged: a context of 0, 320 tokens in the vocabulary, 4 chunks: {ANEW}",
        ),
        (
            lambda data: data[:20] + struct.pack("<i", 320) + data[24:],
            f"is damaged: it has tokens that are not in its vocabulary: {ANEW}",
        ),
    ],
)
def test_a_damaged_base(damage: Callable[[bytes], bytes], said: str, base: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.kld"
    path.write_bytes(damage(base.read_bytes()))
    with pytest.raises(OptionError) as caught:
        LogitsFile.read(path)
    assert str(caught.value) == f"{path}: {said}"


def test_no_such_base(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "none", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(OptionError) as caught:
            LogitsFile.read(path)
        assert str(caught.value) == f"{path}: cannot be read: {said}"


def test_a_base_that_becomes_shorter_meanwhile(model: Path, base: Path, tmp_path: Path) -> None:
    path = tmp_path / "base.kld"
    path.write_bytes(base.read_bytes())
    with opened(model) as llm, pytest.raises(OptionError) as caught:
        evaluate(llm, base=path, on_chunk=lambda chunk: os.truncate(path, 30_000))
    assert str(caught.value) == f"{path}: became shorter while it was read: {ANEW}"


def test_a_base_is_not_written_over(model: Path, base: Path) -> None:
    before = base.read_bytes()
    with opened(model) as llm, pytest.raises(OutputError) as caught:
        evaluate(llm, TEXT, context=CONTEXT, save_base=base)
    assert str(caught.value) == (
        f"{base}: exists: add --kl-divergence to compare with it, or name another file to write"
    )
    assert base.read_bytes() == before


def test_the_size_of_a_base_is_told_and_refused_where_there_is_no_room(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, told = tmp_path / "base.kld", []
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=81395))
    with opened(model) as llm, pytest.raises(OutputError) as caught:
        evaluate(llm, TEXT, context=CONTEXT, save_base=path, on_note=told.append)
    assert told == [f"{path} takes 79.49 KiB: 124 predictions of 320 tokens"]
    assert str(caught.value) == (
        f"{path}: 79.49 KiB are needed for 4 chunks of 64 tokens, and the disk has 79.49 KiB free: take fewer (--chunks), or "
        "another disk"
    )
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=81396))
    with opened(model) as llm:
        evaluate(llm, TEXT, context=CONTEXT, save_base=path)
    assert path.stat().st_size == 81396


def test_an_error_of_reading_experts_is_not_taken_for_one_of_writing(tmp_path: Path) -> None:
    with pytest.raises(ExpertReadError, match="experts are gone"), writing_whole(tmp_path / "x", OutputError):
        raise ExpertReadError("experts are gone")
    assert os.listdir(tmp_path) == []


def test_a_trained_length_that_is_exceeded_is_told(model: Path) -> None:
    with opened(model) as llm:
        found = evaluate(llm, TEXT * 60, context=5000, chunks=1)
    assert found.notes == ("the model was trained with 4096 tokens, and a chunk has 5000",)


def test_a_routing_of_other_tokens_or_another_cut(model: Path, routing: Path, folder: Path) -> None:
    again = "record the base with the same text, -c and --chunks: moestream eval --save-routing"
    with opened(model) as llm:
        for text, context in (("x" + TEXT, CONTEXT), (TEXT, 32), (TEXT * 2, CONTEXT)):
            with pytest.raises(OptionError) as caught:
                evaluate(llm, text, context=context, routing_base=routing)
            assert str(caught.value) == f"{routing}: is the routing of other tokens: {again}"
        tokens = [BEGIN] * CONTEXT * 2
        elsewhere = folder / "elsewhere.trace"
        moestream.record_routing(llm, [tokens]).write(elsewhere)
        with pytest.raises(OptionError) as caught:
            evaluate(llm, tokens, context=32, chunks=2, routing_base=elsewhere)
        assert (
            str(caught.value) == f"{elsewhere}: is the routing of texts cut elsewhere: record the base with the same -c"
        )
        with pytest.raises(TraceError, match="not a routing trace"):
            evaluate(llm, TEXT, context=CONTEXT, routing_base=__file__)
    with opened(make(folder, layers=3)) as llm, pytest.raises(OptionError) as caught:
        evaluate(llm, TEXT, context=CONTEXT, routing_base=routing)
    assert str(caught.value) == (
        f"{routing}: is the routing of a model with experts in layers [0, 1, 2, 3], and this one's are [0, 1, 2]"
    )


def test_only_streamed_models_have_their_routing_compared(model: Path, routing: Path) -> None:
    with stock(model) as llm, pytest.raises(OptionError) as caught:
        evaluate(llm, TEXT, context=CONTEXT, routing_base=routing)
    assert str(caught.value) == "only streamed models are traced: load this one with expert_streaming=True"


def test_a_probability_that_is_no_number(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Evaluation.logits

    def damaged(self: Evaluation) -> np.ndarray:
        logits = original(self).copy()
        logits[:, 5] = np.nan
        return logits

    monkeypatch.setattr(Evaluation, "logits", damaged)
    with opened(model) as llm, pytest.raises(MeasurementError) as caught:
        evaluate(llm, TEXT, context=CONTEXT, save_base=tmp_path / "base.kld")
    assert str(caught.value) == "chunk 1: a probability is no number: are weights damaged (moestream verify)?"
    assert os.listdir(tmp_path) == []


def test_a_base_that_holds_no_numbers(model: Path, base: Path, tmp_path: Path) -> None:
    path, data = tmp_path / "base.kld", bytearray(base.read_bytes())
    data[-648:-644] = struct.pack("<f", math.nan)  # the scale of the last row
    path.write_bytes(data)
    with opened(model) as llm, pytest.raises(MeasurementError) as caught:
        evaluate(llm, base=path)
    assert str(caught.value) == (
        f"chunk 4: a probability is no number: are weights damaged (moestream verify), or is {path}?"
    )


def test_a_closed_model(model: Path) -> None:
    assert isolated(_closed, model) == "the model is closed"


def _closed(path: Path) -> str:
    llm = Llama(str(path), expert_streaming=True, **OPTIONS)
    llm.close()
    with pytest.raises(MoestreamError) as caught:
        evaluate(llm, TEXT, context=CONTEXT)
    return str(caught.value)


# Stopping


def test_what_is_stopped_tells_whole_chunks_and_writes_no_file(model: Path, routing: Path, tmp_path: Path) -> None:
    asked = iter([False] * 5 + [True])  # two batches a chunk
    with opened(model) as llm:
        found = evaluate(
            llm,
            TEXT,
            context=CONTEXT,
            save_base=tmp_path / "base.kld",
            save_routing=tmp_path / "x.trace",
            routing_base=routing,
            should_stop=lambda: next(asked),
        )
        whole = evaluate(llm, TEXT, context=CONTEXT)
    assert found.partial and not whole.partial
    assert (found.chunks, found.chunks_wanted) == (whole.chunks[:2], CHUNKS)
    assert found.routing is not None and found.routing.against_base is not None
    assert (found.routing.against_base.tokens, found.routing.against_base.experts_missing) == (2 * CONTEXT, 0)
    assert os.listdir(tmp_path) == []


def test_before_the_first_chunk_there_is_nothing_to_tell(model: Path, tmp_path: Path) -> None:
    with opened(model) as llm, pytest.raises(MeasurementError) as caught:
        evaluate(llm, TEXT, context=CONTEXT, save_base=tmp_path / "base.kld", should_stop=lambda: True)
    assert str(caught.value) == "stopped before the first chunk was done: there is nothing to report"
    assert os.listdir(tmp_path) == []


# The command


def called(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = cli.main(["eval", *map(str, args)])
    return code, *capsys.readouterr()


def test_a_base_is_written_and_a_model_compared_with_it(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, trace = tmp_path / "base.kld", tmp_path / "base.trace"
    of_model = ("-m", model, "-c", CONTEXT, "-t", 1, "--kernels", "plain")
    code, out, err = called(
        capsys, *of_model, "-f", text, "--kl-divergence-base", base, "--save-routing", trace, "--prefetch", "off"
    )
    assert (code, err) == (0, f"moestream: {base} takes 79.49 KiB: 124 predictions of 320 tokens\n")
    values, empty, estimate, _, about, memory = out.splitlines()
    with opened(model) as llm:
        report = evaluate(llm, TEXT, context=CONTEXT, tokens_at_once=CONTEXT)
    assert values == "".join(f"[{chunk.chunk}]{chunk.perplexity.value:.4f}," for chunk in report.chunks)
    assert estimate == f"Final estimate: PPL = {report.perplexity.value:.4f} +/- {report.perplexity.error:.5f}"
    assert re.fullmatch(rf"Text: {text}, 4 chunks of 64 tokens, 64 at once, [\d.]+ tok/s", about)
    assert re.fullmatch(r"Memory: .* peak RSS, .* on disk; expert cache .*, hit rate \d+\.\d%, .* read a token", memory)

    code, out, err = called(
        capsys,
        *of_model,
        "--kl-divergence-base",
        base,
        "--kl-divergence",
        "--experts-used",
        1,
        "--routing-base",
        trace,
        "--prefetch",
        "off",
    )
    assert (code, err) == (0, "")
    lines = out.splitlines()
    number = r" *-?\d+\.\d+"
    pair = rf"{number} ± {number}"
    assert re.fullmatch(r"chunk +PPL +ln\(PPL\(Q\)/PPL\(base\)\) +KL Divergence +Δp RMS +Same top p", lines[0])
    for chunk, line in enumerate(lines[1:5], 1):
        assert re.fullmatch(rf"   {chunk}    {pair}    {pair}    {pair}    {pair} %    {pair} %", line)
    named = [
        "====== Perplexity statistics ======",
        *(
            f"{name}: {pair}"
            for name in (
                r"Mean PPL\(Q\)                   ",
                r"Mean PPL\(base\)                ",
            )
        ),
        rf"Cor\(ln\(PPL\(Q\)\), ln\(PPL\(base\)\)\): {number}%",
        rf"Mean ln\(PPL\(Q\)/PPL\(base\)\)     : {pair}",
        rf"Mean PPL\(Q\)/PPL\(base\)         : {pair}",
        rf"Mean PPL\(Q\)-PPL\(base\)         : {pair}",
        "",
        "====== KL divergence statistics ======",
        f"Mean    KLD: {pair}",
        *(
            f"{name} KLD: {number}"
            for name in (
                "Maximum",
                "99.9%  ",
                "99.0%  ",
                "95.0%  ",
                "90.0%  ",
                "Median ",
                "10.0%  ",
                " 5.0%  ",
                " 1.0%  ",
                " 0.1%  ",
                "Minimum",
            )
        ),
        "",
        "====== Token probability statistics ======",
        f"Mean    Δp: {pair} %",
        *(
            f"{name} Δp: {number}%"
            for name in (
                "Maximum",
                "99.9%  ",
                "99.0%  ",
                "95.0%  ",
                "90.0%  ",
                "75.0%  ",
                "Median ",
                "25.0%  ",
                "10.0%  ",
                " 5.0%  ",
                " 1.0%  ",
                " 0.1%  ",
                "Minimum",
            )
        ),
        f"RMS Δp    : {pair} %",
        f"Same top p: {pair} %",
        "",
        "====== Routing statistics ======",
        "Experts used in a layer    : 1 of the model's 2",
        r"Layers' choices unlike base: 100\.00%",
        rf"Base's experts not taken   : {number}%, {number}% by weight",
        "",
        f"Text: that of {base}, 4 chunks of 64 tokens, 64 at once, .*",
        "Memory: .*",
    ]
    assert len(lines[6:]) == len(named)
    for pattern, line in zip(named, lines[6:], strict=True):
        assert re.fullmatch(pattern, line), (pattern, line)


def test_fewer_than_100_tokens_are_no_statistics(model: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(capsys, "-m", model, "--kl-divergence-base", base, "--kl-divergence", "--chunks", 3, "-t", 1)
    assert code == 0
    assert "\n93 tokens are too few for statistics: they need 100\n" in out and "=====" not in out


def test_predictions_and_replacements_are_lines(folder: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(folder, experts=32)
    cache = moestream.describe(path).minimum_cache_bytes
    code, out, err = called(
        capsys,
        *("-m", path, "-f", text, "-c", CONTEXT, "-t", 1, "--tokens-at-once", 1, "--expert-cache", cache),
        *("--prefetch", "lookahead", "--cache-aware", 0.5, "--kernels", "plain"),
    )
    assert code == 0
    assert err.startswith("moestream: with cache-aware routing and reading ahead, figures depend on time")
    assert re.search(r"^Replaced by cached experts *: +\d+\.\d\d% of 2048 choices$", out, re.M)
    assert re.search(r"^Predicted: 1 layer ahead *: +\d+\.\d\d% of those chosen; all of a layer \d+\.\d\d%$", out, re.M)


def test_json_is_all_that_is_on_stdout_and_holds_everything(
    model: Path, base: Path, text: Path, routing: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = called(
        capsys,
        *("-m", model, "-f", text, "--kl-divergence-base", base, "--kl-divergence", "--experts-used", 1, "--json"),
        *("--routing-base", routing, "--kernels", "plain", "-t", 1),
    )
    value = json.loads(out)
    assert (code, err) == (0, "")
    with opened(model, ONE, n_ubatch=CONTEXT) as llm:
        report = evaluate(llm, base=base, routing_base=routing)
    assert value["perplexity"] == {"value": report.perplexity.value, "error": report.perplexity.error}
    assert report.divergence is not None
    assert value["divergence"]["kl"]["value"] == report.divergence.kl.value
    assert value["divergence"]["kl_percentiles"]["99.9"] == report.divergence.kl_percentiles[99.9]
    assert [chunk["chunk"] for chunk in value["chunks"]] == [1, 2, 3, 4]
    assert value["routing"]["left_out"] == 0.5 and value["routing"]["against_base"]["choices_changed"] == 1
    assert (value["partial"], value["text"], value["options"]["experts_used"]) == (False, str(text), 1)
    assert value["stats"]["hit_rate"] >= 0 and value["memory"]["peak_rss_bytes"] > 0
    assert value["versions"]["moestream"] == moestream.__version__


def test_all_of_a_report_goes_into_json(model: Path) -> None:
    with stock(model) as theirs, opened(model) as ours:
        for llm in (theirs, ours):
            report = evaluate(llm, TEXT, context=CONTEXT)
            assert set(PerplexityReport.__dataclass_fields__) < set(report.as_dict())
            json.dumps(report.as_dict(), allow_nan=False)


def test_without_a_model_and_a_text_it_is_what_ships(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(capsys, "--chunks", 1, "-c", 128, "-t", 1)
    assert (code, err) == (0, "")
    assert "Text: the validation text shipped with the package, 1 chunk of 128 tokens" in out


def test_without_streaming_it_is_the_same(model: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_model = ("-m", model, "-f", text, "-c", CONTEXT, "-t", 1)
    streamed = called(capsys, *of_model)[1].splitlines()
    code, out, _ = called(capsys, *of_model, "--no-expert-streaming")
    assert code == 0
    assert out.splitlines()[:3] == streamed[:3]
    assert out.endswith("on disk; experts not streamed\n")


def test_a_terminal_shows_a_bar_and_then_the_figures(model: Path, text: Path) -> None:
    code, drawn = at_terminal("eval", "-m", model, "-f", text, "-c", CONTEXT, "-ub", 1, "-t", 1, columns=130)
    rows = screen(drawn)
    assert code == 0
    assert "evaluating" in drawn and "256 tokens" in drawn
    assert rows[0].startswith("[1]") and rows[0].count(",") == 4
    assert rows[2].startswith("Final estimate: PPL = ")
    assert not any("evaluating" in row for row in rows)


def test_ctrl_c_tells_what_was_done(model: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(TEXT * 400)
    args = [
        "-m",
        model,
        "-f",
        tmp_path / "long.txt",
        "-c",
        16,
        "-ub",
        1,
        "-t",
        1,
        "--kl-divergence-base",
        tmp_path / "base.kld",
    ]
    command = [*PYTHON, "eval", *map(str, args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.read(8).startswith("[1]")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "\nFinal estimate: PPL = " in out and re.search(r" chunks? of 16 tokens", out)
    assert re.search(
        rf"^moestream: interrupted: these are the figures of \d+ of 6400 chunks; {tmp_path}/base\.kld was not written$",
        err,
        re.M,
    )
    assert "Traceback" not in err
    assert os.listdir(tmp_path) == ["long.txt"]


def test_ctrl_c_before_the_first_chunk(
    model: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original, presses = Evaluation.decode, []

    def pressed(self: Evaluation, *args: Any) -> None:
        original(self, *args)
        presses.append(True)

    monkeypatch.setattr(Evaluation, "decode", pressed)
    monkeypatch.setattr(eval_command.Interrupt, "requested", lambda self: bool(presses))
    code, out, err = called(capsys, "-m", model, "-f", text, "-c", CONTEXT, "-ub", 16, "-t", 1)
    assert (code, out, presses) == (130, "", [True])
    assert err == "moestream: interrupted before the first chunk was done: nothing is reported\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-f", "none.txt"], "cannot read the text none.txt: No such file or directory"),
        (
            ["--kl-divergence"],
            "--kl-divergence compares with a base run: name its file with --kl-divergence-base FILE",
        ),
        (["--kl-divergence", "--kl-divergence-base", "none"], "none: cannot be read: No such file or directory"),
        (["--kl-divergence-base", "none/x"], "none/x: there is no folder none; make it first"),
        (["--save-routing", "none/x"], "--save-routing none/x: there is no folder none; make it first"),
        (["--chunks", "0"], "--chunks 0: give a number of at least 1, or -1 for all"),
        (["-c", "2"], "--ctx-size 2: at least 3 tokens are needed, of which one is predicted"),
        (["-t", "0"], "--threads 0: give a number of at least 1"),
        (["-b", "0"], "--batch-size 0: give a number of at least 1"),
        (["-ub", "0"], "--ubatch-size 0: give a number of at least 1"),
        (["--lora", "none"], "--lora: there is no file none"),
        (["-ctv", "q8_0"], "--cache-type-v q8_0 needs flash attention: add -fa on"),
        (["-m", "none.gguf"], "none.gguf: "),
        (
            ["--no-expert-streaming", "--cache-aware", "0.1"],
            "--no-expert-streaming leaves no use for --expert-cache, --kernels, --compute, --reader, --direct, --verify, "
            "--policy, --prefetch, --cache-aware, --experts-used, --prerouter, --routing-base and --save-routing",
        ),
        (["--no-expert-streaming", "--save-routing", "x"], "--no-expert-streaming leaves no use for "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_told_in_a_line_before_the_work(
    args: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = called(capsys, *args)
    assert (code, out) == (1, "")
    assert err.startswith(f"moestream: error: {message}") and len(err.splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_its_options_are_those_of_its_function_and_have_the_defaults_of_generate() -> None:
    options = vars(cli._parser().parse_args(["eval"]))
    for name in ("command", "parser", "verbose", "json"):
        options.pop(name)
    parameters = inspect.signature(eval_command.evaluate).parameters
    callbacks = {"load_progress", "on_note", "on_chunk", "progress", "should_stop"}
    assert set(options) == set(parameters) - callbacks
    shared = inspect.signature(generate).parameters
    for name, value in options.items():
        assert parameters[name].default == value
        if name in shared and name != "ctx_size":
            assert shared[name].default == value
