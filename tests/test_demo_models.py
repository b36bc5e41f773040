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
from demo_model import card
from isolation import isolated
from logits import stock, streamed
from moestream import ExpertStreaming
from moestream._capture import fingerprint
from moestream._quality import compare_quality
from moestream.sidecar import sidecar_for

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


# The sidecar


def beside_qwen3moe(ending: str = ".sidecar.gguf") -> Path:
    return beside("qwen3moe", ending)


def test_its_sidecars_are_for_this_very_file_and_say_what_they_are_made_of_and_worth() -> None:
    model = moestream.demo_model("qwen3moe")
    sidecar, heads = (sidecar_for(model, beside_qwen3moe(ending)) for ending in (".sidecar.gguf", ".heads.gguf"))
    assert beside_qwen3moe().stat().st_size + beside_qwen3moe(".heads.gguf").stat().st_size < 5e6
    assert sidecar.lora is not None and {matrix.type_name for _, matrix in sidecar.lora.matrices()} == {"F16"}
    for one in (sidecar, heads):
        assert one.heads is not None and one.heads.top_k == 4
        assert {part.type_name for head in one.heads.heads for _, part in head.parts()} == {"Q8_0"}
        assert one.provenance["heads"]["licences"]["austen"] == "public domain"
        assert {row["layer"] for row in one.quality["heads"]["owners"]} == set(one.heads.owners)
    assert {"sft", "distill"} <= {*sidecar.provenance}
    record = sidecar.quality["record"]
    assert {row["experts_used"] for row in record["routing"]} == {4, 2} and [*record["predictions"]] == ["4", "2"]
    readme = beside_qwen3moe().with_name("README.md").read_text()
    assert card.with_sidecar(readme, sidecar) == readme  # the card tells what the record says


def perplexities() -> list[float]:
    """On a little validation text: by the gates, by heads that predict, and by heads and the LoRA that were trained on."""
    path = moestream.demo_model("qwen3moe")
    lines = gzip.decompress(path.with_name("validation.jsonl.gz").read_bytes()).splitlines()
    found = []
    for file in (beside_qwen3moe(".heads.gguf"), beside_qwen3moe()):
        routed = ExpertStreaming(sidecar=file, prerouter="route", prefetch="off")
        options = {"n_ctx": 128, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
        with (
            contextlib.closing(moestream.Llama(str(path), expert_streaming=True, **options)) as plain,
            contextlib.closing(moestream.Llama(str(path), expert_streaming=routed, **options)) as llm,
        ):
            texts = [json.loads(line)["text"][:2000] for line in lines[:: len(lines) // 6]][:6]
            report = compare_quality(plain, llm, [llm.tokenize(text.encode(), add_bos=False)[:97] for text in texts])
        found += [report.reference_perplexity, report.perplexity]
    return [found[0], found[1], found[3]]


def test_its_lora_wins_back_a_good_part_of_what_routing_by_its_heads_costs() -> None:
    gates, heads, recovered = isolated(perplexities)
    assert gates < recovered < heads
    assert heads - recovered > 0.35 * (heads - gates)
