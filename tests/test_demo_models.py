"""The models that ship: there, small, readable, streamed bit for bit, with a trace of their own routing."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

import moestream
from command import moestream_command
from isolation import isolated
from logits import stock, streamed
from moestream import ExpertStreaming
from moestream._capture import fingerprint

KINDS = ("smallthinker", "qwen3moe")


def beside(kind: str, ending: str) -> Path:
    return moestream.demo_model(kind).with_suffix(ending)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_small_and_says_what_it_is(kind: str) -> None:
    model = moestream.describe(moestream.demo_model(kind))
    assert model.bytes_on_disk <= 12e6
    assert (model.architecture, model.layers, len(model.moe_layers)) == (kind, 8, 8)
    assert {layer.experts for layer in model.moe_layers} == {32} and model.experts_used == 4
    assert set(model.types) == {"Q4_0"}


def differing(path: Path) -> list[bool]:
    smallest = moestream.describe(path).minimum_cache_bytes
    return [
        not np.array_equal(
            stock(path, interleaved=kernels == "interleaved"),
            streamed(path, ExpertStreaming(kernels=kernels, cache=smallest))[0],
        )
        for kernels in ("plain", "interleaved")
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_it_streams_bit_for_bit(kind: str) -> None:
    assert isolated(differing, moestream.demo_model(kind)) == [False, False]


def validation_perplexity(path: Path) -> float:
    """Of the first 256 tokens of five validation documents."""
    lines = gzip.decompress(path.with_name("validation.jsonl.gz").read_bytes()).splitlines()
    texts = [json.loads(line)["text"] for line in lines[:: len(lines) // 5]][:5]
    nats = []
    with contextlib.closing(
        moestream.Llama(str(path), expert_streaming=True, n_ctx=256, logits_all=True, verbose=False)
    ) as llm:
        for text in texts:
            tokens = llm.tokenize(text.encode(), add_bos=False)[:256]
            llm.reset()
            llm.eval(tokens)
            scores = llm.scores[: len(tokens) - 1].astype(np.float64)
            top = scores.max(axis=1)
            nats += list(
                top + np.log(np.exp(scores - top[:, None]).sum(axis=1)) - scores[np.arange(len(scores)), tokens[1:]]
            )
    return float(np.exp(np.mean(nats)))


@pytest.mark.parametrize("kind", KINDS)
def test_it_knows_english_better_than_counting_pairs_of_tokens_would(kind: str) -> None:
    assert isolated(validation_perplexity, moestream.demo_model(kind)) < 85  # half of what bigram counts have


@pytest.mark.parametrize("kind", KINDS)
def test_its_trace_is_of_this_very_file_and_leaves_no_expert_idle(kind: str) -> None:
    trace = moestream.RoutingTrace.read(beside(kind, ".trace"))
    assert trace.architecture == kind and trace.experts.shape[1:] == (8, 4)
    assert trace.model_hash == fingerprint([moestream.demo_model(kind)])
    found = moestream.routing_statistics(trace)
    assert min(min(layer.load) for layer in found.layers) >= 0.2


def test_commands_take_it_where_no_model_is_named() -> None:
    answer = moestream_command("generate", "-p", "The library is", "-n", "8", "--json")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["model"] == str(moestream.demo_model())
