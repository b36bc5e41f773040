"""Fewer experts a token, or more: what is computed is what llama.cpp computes, and what cannot be computed is refused."""

from __future__ import annotations

import contextlib
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command import moestream_command
from factory import make
from isolation import isolated
from logits import CONTEXT, run, stock, streamed
from moestream import CacheTooSmallError, ExpertStreaming, Llama, ModelError, OptionError, RoutingTrace, describe

TOPK, LAYERS = 3, 4
KEY = "qwen3moe.expert_used_count"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("models"), "qwen3moe", topk=TOPK)


def smallest(path: Path, number: int) -> int:
    return describe(path).minimum_cache_bytes // TOPK * number


def load(path: Path, number: int | None, **options: Any) -> None:
    Llama(str(path), expert_streaming=ExpertStreaming(experts_used=number), **CONTEXT, **options).close()


def refusal(path: Path, number: int | None, **options: Any) -> str:
    with pytest.raises(OptionError) as caught:
        load(path, number, **options)
    return str(caught.value)


# What is computed


def compare(path: Path, numbers: tuple[int, ...]) -> list[str]:
    """The settings whose logits differ from stock's with the same number of experts, or equal those with the file's."""
    key = f"{describe(path).architecture}.expert_used_count"
    wrong = []
    for interleaved in (False, True):
        kernels = "interleaved" if interleaved else "plain"
        own = stock(path, interleaved=interleaved)
        for number in numbers:
            expected = stock(path, interleaved=interleaved, kv_overrides={key: number})
            streaming = ExpertStreaming(experts_used=number, kernels=kernels, cache=smallest(path, number))
            found, stats = streamed(path, streaming)
            if not np.array_equal(found, expected) or np.array_equal(found, own) or stats.ggml_blocks:
                wrong.append(str(streaming))
    return wrong


@pytest.mark.parametrize(
    "architecture",
    "qwen2moe qwen3moe qwen3next llama deepseek2 smallthinker gpt-oss granitemoe glm4moe bailingmoe2 lfm2moe".split(),
)
def test_logits_equal_those_of_stock_with_as_many_experts(architecture: str, tmp_path: Path) -> None:
    assert isolated(compare, make(tmp_path, architecture, topk=TOPK), (1, 2, 5)) == []


def test_up_to_all_experts_of_the_groups_that_a_token_may_use_are_taken(tmp_path: Path) -> None:
    path = make(tmp_path, "deepseek2", topk=TOPK, groups=4, gating="sigmoid")
    assert isolated(compare, path, (1, 2, 4)) == []


def test_a_token_asks_for_as_many_in_every_layer(model: Path) -> None:
    streaming = ExpertStreaming(experts_used=2)
    with contextlib.closing(Llama(str(model), expert_streaming=streaming, **CONTEXT)) as llm:
        run(llm)
        before = llm.expert_stats()
        llm.eval([3])
        during = llm.expert_stats().since(before)
    assert during.hits + during.misses == LAYERS * 2


def test_fewer_experts_need_a_smaller_cache(model: Path) -> None:
    options = ExpertStreaming(experts_used=1, cache=smallest(model, 1) - 1)
    with pytest.raises(
        CacheTooSmallError, match=rf"is {smallest(model, 1)} bytes \(.*: {LAYERS} layers x 1 experts\)$"
    ):
        Llama(str(model), expert_streaming=options, **CONTEXT)


# What is told


def notes(path: Path, number: int | None, **options: Any) -> list[str]:
    streaming = ExpertStreaming(experts_used=number)
    with contextlib.closing(Llama(str(path), expert_streaming=streaming, **CONTEXT, **options)) as llm:
        return [note for note in llm.expert_stats().notes if "what the model says" in note]


def test_another_number_than_the_files_is_told(model: Path) -> None:
    said = "a token takes 2 of the experts in a layer in place of the file's 3, which changes what the model says"
    assert notes(model, 2) == notes(model, None, kv_overrides={KEY: 2}) == [said]
    assert notes(model, None) == notes(model, TOPK) == notes(model, None, kv_overrides={KEY: TOPK}) == []


def test_the_description_says_how_many_could_be_taken(model: Path, tmp_path: Path) -> None:
    grouped = describe(make(tmp_path, "deepseek2", groups=4, gating="sigmoid"))
    assert (describe(model).experts_choosable, grouped.experts_choosable) == (8, 4)
    assert not describe(model).experts_used_by_layer


# Beside kv_overrides


def test_the_same_number_may_be_given_twice(model: Path) -> None:
    load(model, 2, kv_overrides={KEY: 2})


@pytest.mark.parametrize("own", [2, TOPK])
def test_two_numbers_contradict_each_other(own: int, model: Path) -> None:
    said = f"experts_used={own} contradicts kv_overrides={{'{KEY}': 1}}: leave out one of them"
    assert refusal(model, own, kv_overrides={KEY: 1}) == said


def test_the_number_of_another_architecture_is_none(model: Path) -> None:
    assert notes(model, None, kv_overrides={"olmoe.expert_used_count": 1}) == []


def test_other_overrides_stay(model: Path) -> None:
    name = "general.name"
    options = ExpertStreaming(experts_used=1)
    with contextlib.closing(Llama(str(model), expert_streaming=options, kv_overrides={name: "x"}, **CONTEXT)) as llm:
        assert llm.kv_overrides == {name: "x", KEY: 1}


def test_a_pickled_model_takes_as_many(model: Path) -> None:
    with contextlib.closing(Llama(str(model), expert_streaming=ExpertStreaming(experts_used=1), **CONTEXT)) as llm:
        logits = run(llm)
        with contextlib.closing(pickle.loads(pickle.dumps(llm))) as copy:
            assert np.array_equal(run(copy), logits)
            assert copy.expert_stats().notes[0].startswith("a token takes 1 of the experts in a layer")


# What is refused


@pytest.mark.parametrize("number", [0, -1, 1.5, "2", True])
def test_no_number_of_experts(number: Any) -> None:
    with pytest.raises(OptionError) as caught:
        ExpertStreaming(experts_used=number)
    assert str(caught.value) == f"experts_used={number!r}: expected a number of at least 1, or None for the model's own"


def test_more_than_a_layer_has(model: Path) -> None:
    said = f"a token of {model} can take 1 to 8 experts; the file says 3"
    assert refusal(model, 9) == f"experts_used=9: {said}"
    for number in (0, 9):
        assert refusal(model, None, kv_overrides={KEY: number}) == f"kv_overrides={{'{KEY}': {number}}}: {said}"


@pytest.mark.parametrize(
    ("architecture", "properties"), [("deepseek2", {"groups": 4, "gating": "sigmoid"}), ("grovemoe", {})]
)
def test_more_than_the_groups_have(architecture: str, properties: dict[str, Any], tmp_path: Path) -> None:
    path = make(tmp_path, architecture, topk=TOPK, **properties)
    said = f"experts_used=5: a token of {path} can take 1 to 4 experts of the 8 in a layer, which are in groups; the file says 3"
    assert refusal(path, 5) == said


def test_a_number_for_each_layer(tmp_path: Path) -> None:
    path = with_a_number_for_each_layer(make(tmp_path, "qwen3moe", topk=TOPK, layers=6), [3, 2, 3, 1, 2, 3])
    assert isolated(streams, path)
    assert describe(path).experts_used_by_layer
    said = f"{path} says for each layer how many experts a token takes, which llama.cpp does not replace by one number; leave it out"
    for number in (1, 3):
        assert refusal(path, number) == f"experts_used={number}: {said}"
    assert refusal(path, None, kv_overrides={KEY: 1}) == f"kv_overrides={{'{KEY}': 1}}: {said}"


def with_a_number_for_each_layer(path: Path, numbers: list[int]) -> Path:
    key, content = KEY.encode(), path.read_bytes()
    one = key + struct.pack("<II", 4, TOPK)
    several = key + struct.pack(f"<IIQ{len(numbers)}I", 9, 4, len(numbers), *numbers)
    assert content.count(one) == 1 and (len(several) - len(one)) % 32 == 0  # so that what follows stays aligned
    path.write_bytes(content.replace(one, several))
    return path


def streams(path: Path) -> bool:
    streaming = ExpertStreaming(kernels="plain")
    return np.array_equal(streamed(path, streaming)[0], stock(path, interleaved=False))


def test_a_file_that_fits_its_own_number_alone(tmp_path: Path) -> None:
    path = make(tmp_path, "qwen3moe", topk=2, ff=96, dense_ff=192)
    content = path.read_bytes()
    path.write_bytes(content.replace(b".expert_feed_forward_length", b".expert_feed_forward_lengxx"))
    load(path, None)
    with pytest.raises(
        ModelError,
        match=r": llama.cpp cannot load it: .*; its file fits its own number of experts a token alone: leave experts_used out$",
    ):
        load(path, 1)


# The command line


def test_generate_and_trace_take_as_many(model: Path, tmp_path: Path) -> None:
    run = moestream_command("generate", "-m", model, "-p", "A text", "-n", 2, "-c", 64, "--experts-used", 1)
    assert "a token takes 1 of the experts in a layer in place of the file's 3" in " ".join(run.stderr.split())
    text, trace = tmp_path / "text.txt", tmp_path / "one.trace"
    text.write_text("A text")
    moestream_command("trace", "record", "-m", model, "-f", text, "-o", trace, "-c", 64, "--experts-used", 2)
    assert RoutingTrace.read(trace).top_k == 2


def test_a_number_too_large_is_told_in_one_line(model: Path) -> None:
    run = moestream_command("generate", "-m", model, "-p", "A text", "--experts-used", 9)
    assert run.returncode == 1
    assert (
        run.stderr == f"moestream: error: experts_used=9: a token of {model} can take 1 to 8 experts; the file says 3\n"
    )
