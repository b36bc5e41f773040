"""Prediction as routing: what heads say is what the next token's layers run, and nothing else of it is ever seen."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

import moestream
import native
from factory import ARCHITECTURES, lora, make
from isolation import isolated
from logits import CONTEXT
from moestream import (
    ExpertReadError,
    ExpertStreaming,
    Llama,
    OptionError,
    RoutingTrace,
    SidecarError,
    describe,
    record_routing,
)
from moestream._capture import _ffi as tensor_ffi
from moestream._capture import _rows
from moestream._evaluation import apply_adapters, evaluating
from moestream._native import ffi, lib
from moestream.sidecar import Heads, Sidecar
from sidecars import head_logits, make_heads, make_sidecar
from synthetic import weights
from test_prerouter import trace_of

F32, I32 = 0, 26
TOKENS = [(7 * i * i + 3 * i) % 256 for i in range(100)]
PROMPT, STEPS = 20, 30

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("qwen3moe", {}),
    "sigmoid, bias and groups": ("deepseek2", {"groups": 4, "gating": "sigmoid"}),
    "softmax and groups": ("deepseek2", {"groups": 4, "gating": "softmax"}),
    "before attention, sigmoid": ("smallthinker", {"gating": "sigmoid"}),
    "before attention, softmax": ("smallthinker", {"gating": "softmax"}),
    "softmax of the chosen, bias of the router": ("gpt-oss", {}),
    "shared experts": ("qwen2moe", {"shared": 2}),
}


def model_of(name: str, folder: Path, **shape: Any) -> Path:
    architecture, properties = MODELS.get(name, (name, {}))
    return make(folder, architecture, **{"experts": 16, "topk": 3, **properties, **shape})


def sidecar_of(path: Path, name: str = "", **heads: Any) -> Path:
    made = path.with_name(f"{path.stem}{name}.sidecar.gguf")
    return made if made.exists() else make_sidecar(path, made, **heads)


@contextlib.contextmanager
def loaded(
    path: Path, prerouter: str = "route", *, cache: float = 0.3, options: Any = None, **streaming: Any
) -> Iterator[Llama]:
    """With plain kernels, and a cache between the smallest (0) and one for all (1)."""
    found = describe(path)
    size = int(found.minimum_cache_bytes + cache * (found.maximum_cache_bytes - found.minimum_cache_bytes))
    chosen = {"kernels": "plain", "reader": "pread", "cache": size, "prerouter": prerouter, **streaming}
    if prerouter != "off":
        chosen.setdefault("sidecar", sidecar_of(path))
    if chosen["reader"] == "mmap":
        del chosen["cache"]
    with contextlib.closing(
        Llama(str(path), expert_streaming=ExpertStreaming(**chosen), **{**CONTEXT, **(options or {})})
    ) as llm:
        yield llm


def evaluated(llm: Llama, tokens: Sequence[int] = TOKENS[: PROMPT + STEPS], prompt: int = PROMPT) -> np.ndarray:
    """Logits of a prompt, and of tokens one by one."""
    llm.reset()
    llm.eval(tokens[:prompt])
    for token in tokens[prompt:]:
        llm.eval([token])
    return llm.scores[: llm.n_tokens].copy()


# A head


def native_heads(heads: Heads) -> tuple[Any, Any, list[Any]]:
    """(ms_head[], ms_head_shape, what must be kept alive)."""
    made, kept = ffi.new("ms_head[]", len(heads.heads)), []
    for to, head in zip(made, heads.heads, strict=True):
        to.owner = head.owner
        for part in ("linear_h", "linear_onehot", "fc1_h", "fc1_onehot", "fc2"):
            kept.append(ffi.from_buffer(getattr(head, part).data))
            setattr(to, part, kept[-1])
            setattr(to, "type_" + part.removesuffix("_h"), getattr(head, part).type)
    return made, {"columns": heads.columns, "experts": heads.experts, "width": heads.width}, kept


def said_by(heads: Heads, state: np.ndarray, now: Sequence[int], before: Sequence[int]) -> np.ndarray:
    made, shape, kept = native_heads(heads)
    out, message = np.empty(heads.experts, np.float32), ffi.new("char[]", 1024)
    state = np.ascontiguousarray(state, np.float32)
    code = lib.ms_head_logits(
        *(made, shape, ffi.from_buffer("float[]", state), now, len(now), before, len(before)),
        *(ffi.from_buffer("float[]", out, require_writable=True), message, 1024),
    )
    assert code == 0 and kept, ffi.string(message)
    return out


@pytest.mark.parametrize(("type", "tolerance"), [("F32", 2e-5), ("F16", 4e-3), ("Q8_0", 6e-2), ("Q4_0", 6e-2)])
@pytest.mark.parametrize(
    "shape",
    [
        {"columns": 2048, "experts": 128, "width": 512},
        {"columns": 96, "experts": 20, "width": 50},
        {"columns": 33, "experts": 7, "width": 3},
    ],
)
def test_a_head_says_what_its_formula_says(shape: dict[str, int], type: str, tolerance: float) -> None:
    """What is rounded are activations, to the type that goes with the weights' (Q8_0: 8 bits): the weights are as stored."""
    heads = make_heads([0], type=type, **shape)
    rng = np.random.default_rng(3)
    for now, before in (([], []), ([1, 5, 2], []), ([6, 0], [3, 6]), ([4], [4, 0, 1, 2])):
        state = rng.normal(0, 1, shape["columns"])
        expected = head_logits(heads.heads[0], shape["columns"], state, now, before)
        assert np.abs(said_by(heads, state, now, before) - expected).max() < tolerance
        assert expected.std() > 0.5


def test_a_head_knows_no_expert_that_does_not_exist() -> None:
    heads = make_heads([0], experts=8)
    made, shape, kept = native_heads(heads)
    state, out, message = ffi.new("float[128]"), ffi.new("float[8]"), ffi.new("char[]", 1024)
    for now, before, wrong in (([8], [], 8), ([0], [1, -1], -1)):
        code = lib.ms_head_logits(made, shape, state, now, len(now), before, len(before), out, message, 1024)
        assert code < 0 and kept and ffi.string(message) == f"there is no expert {wrong} of 8".encode()


# What each token runs

_ROUTER = re.compile(rb"blk\.(\d+)\.ffn_gate_inp\.weight")
_FIRST = re.compile(rb"blk\.(\d+)\.ffn_(gate|up|gate_up)_exps\.weight")
_WEIGHTED = re.compile(rb"ffn_moe_weighted-(\d+)")


class Watched:
    """Of each layer and evaluation what routes it, what it runs, on what, and with which weights; tokens are rows."""

    def __init__(self) -> None:
        self.logits: dict[int, npt.NDArray[Any]] = {}
        self.states: dict[int, npt.NDArray[Any]] = {}
        self.chosen: dict[int, npt.NDArray[Any]] = {}
        self.weights: dict[int, npt.NDArray[Any]] = {}

    def look(self, address: int, ask: bool, _: object) -> bool:
        node = tensor_ffi.cast("struct ggml_tensor *", address)
        source = tensor_ffi.string(node.src[0].name) if node.src[0] else b""
        router, first = _ROUTER.fullmatch(source), _FIRST.fullmatch(source) if node.src[2] else None
        weighted = _WEIGHTED.fullmatch(tensor_ffi.string(node.name))
        if ask:
            return bool(router or first or weighted)
        if router:
            self.logits[int(router[1])] = _rows(node, F32, 0)
        elif first:
            assert node.src[1].ne[1] == 1
            self.states[int(first[1])] = _state(node.src[1])
            self.chosen[int(first[1])] = _rows(node.src[2], I32, 0)
        elif weighted:
            self.weights[int(weighted[1])] = _rows(node.src[1], F32, 1)
        return True


def _state(tensor: Any) -> npt.NDArray[np.float32]:
    """[tokens, columns] of {columns, 1, tokens}."""
    columns, n = tensor.ne[0], tensor.ne[2]
    data = tensor_ffi.buffer(tensor.data, (n - 1) * tensor.nb[2] + 4 * columns)
    return np.ndarray((n, columns), np.float32, data, strides=(tensor.nb[2], 4)).copy()


class Rule:
    """How a layer of a model chooses by logits, and weights what it chose, as llama.cpp has it."""

    def __init__(self, path: Path, layer: int) -> None:
        reader = gguf.GGUFReader(path)
        architecture = reader.fields["general.architecture"].contents()
        tensors = {t.name: t.data for t in reader.tensors}
        keys = {k.removeprefix(architecture + "."): f.contents() for k, f in reader.fields.items()}
        self.name = architecture
        self.bias = tensors.get(f"blk.{layer}.ffn_gate_inp.bias", 0)
        self.selection = tensors.get(f"blk.{layer}.exp_probs_b.bias", 0)
        default = {"smallthinker": 1}.get(architecture, 1)
        self.sigmoid = keys.get("expert_gating_func", default) == 2
        self.groups, self.groups_used = keys.get("expert_group_count", 1), keys.get("expert_group_used_count", 1)

    def shares(self, logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        logits = logits.astype(np.float64) + self.bias
        if self.sigmoid:
            return 1 / (1 + np.exp(-logits))
        exponentials = np.exp(logits - logits.max())
        return exponentials / exponentials.sum()

    def chosen(self, logits: npt.NDArray[Any], k: int) -> set[int]:
        scores = self.shares(logits) + self.selection
        if self.groups > 1:
            grouped = scores.reshape(self.groups, -1)
            worth = np.sort(grouped, axis=1)[:, -2:].sum(axis=1)
            grouped[np.argsort(-worth)[self.groups_used :]] = -np.inf
        return set(np.argsort(-scores, kind="stable")[:k].tolist())

    def relative_weights(self, logits: npt.NDArray[Any], chosen: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """So that they add up to 1, which not all models do."""
        weights = self.shares(logits)[chosen]
        return weights / weights.sum()


def follow(path: Path, sidecar: Path, kept: dict[str, Any], tolerance: float) -> dict[str, Any]:
    """Decodes token by token and compares each with what the formula says of the token before: what is wrong, and how much was seen."""
    heads = Sidecar.read(sidecar).heads
    assert heads is not None
    owners = {head.owner + 1: head for head in heads.heads}
    wrong: list[str] = []
    replaced = steps = 0
    with loaded(path, sidecar=sidecar, **kept) as llm:
        layers = [layer.layer for layer in llm._engine.description.moe_layers]
        rules = {layer: Rule(path, layer) for layer in layers}
        k = llm._engine.description.experts_used
        watched = Watched()
        before: dict[int, list[int]] = {}
        said: dict[int, npt.NDArray[Any]] = {}
        with evaluating(llm, context=64, tokens_at_once=8, on_node=watched.look) as evaluation:
            evaluation.decode(TOKENS[:5], 0)
            for position in range(5, 5 + STEPS):
                evaluation.decode([TOKENS[position]], position)
                first = position == 5
                for layer in layers:
                    (chosen,), (weights,) = watched.chosen[layer], watched.weights[layer]
                    where = f"position {position}, layer {layer}"
                    if layer in owners and not first:
                        replaced += 1
                        (found,) = watched.logits[layer]
                        if np.abs(found - said[layer]).max() > tolerance:
                            wrong.append(f"{where}: logits differ by {np.abs(found - said[layer]).max()}")
                        if set(chosen.tolist()) != rules[layer].chosen(found, k):
                            wrong.append(f"{where}: runs {chosen}, of {rules[layer].chosen(found, k)}")
                        share = weights / weights.sum()
                        if np.abs(share - rules[layer].relative_weights(found, chosen)).max() > 1e-4:
                            wrong.append(f"{where}: weights {share}")
                for layer, head in owners.items():
                    now, then = watched.chosen[layer - 1][0].tolist(), before.get(layer, [])
                    (state,) = watched.states[layer - 1]
                    said[layer] = head_logits(head, heads.columns, state, now, then)
                    before[layer] = now
                steps += 1
        stats = llm.expert_stats()
    return {"wrong": wrong, "replaced": replaced, "expected": (steps - 1) * len(owners), "dropped": stats.dropped}


@pytest.mark.parametrize("model", MODELS)
def test_each_token_runs_what_heads_said_of_the_one_before(model: str, folder: Path) -> None:
    path = model_of(model, folder)
    found = isolated(follow, path, sidecar_of(path, "-f32", type="F32"), {}, 1e-4)
    assert found["wrong"] == [] and found["dropped"] == 0
    assert found["replaced"] == found["expected"] > 50


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0", "F16"])
def test_so_it_does_with_heads_of_fewer_bits(type: str, folder: Path) -> None:
    path = model_of("softmax", folder, experts=32)
    found = isolated(follow, path, sidecar_of(path, "-" + type, type=type), {}, 0.1)
    assert found["wrong"] == [] and found["replaced"] == found["expected"] > 50


def test_so_it_does_with_another_number_of_experts_a_token(folder: Path) -> None:
    path = model_of("softmax", folder)
    for used in (1, 5):
        found = isolated(follow, path, sidecar_of(path, "-f32", type="F32"), {"experts_used": used, "cache": 0.6}, 1e-4)
        assert found["wrong"] == [] and found["replaced"] == found["expected"]


def test_layers_without_a_head_keep_their_router(folder: Path) -> None:
    path = model_of("softmax", folder, layers=6)
    found = isolated(follow, path, sidecar_of(path, "-f32-some", owners=[1, 3], type="F32"), {}, 1e-4)
    assert found["wrong"] == [] and found["replaced"] == found["expected"] == 2 * (STEPS - 1)


def routed_and_dropped(path: Path) -> tuple[bool, bool, int, str]:
    """Of a run: is the first step as without heads, are later ones not, experts dropped; or what it fails with."""
    try:
        with loaded(path, "off") as llm:
            plain = evaluated(llm)
        with loaded(path) as llm:
            routed, stats = evaluated(llm), llm.expert_stats()
    except (ExpertReadError, OptionError, SidecarError) as error:
        return False, False, 0, str(error)
    same = np.all(routed == plain, axis=1)
    return bool(same[: PROMPT + 1].all()), bool(same[PROMPT + 1 :].mean() < 0.2), stats.dropped, ""


NO_NEIGHBOURS = {"llama4", "nemotron_h_moe"}
"""Of these each layer with experts is followed by one without."""
NOT_ROUTED = {
    "kimi-k3": "the heads read a state of 128 values, and that of layer 1 of this model has 64",
}
"""Its experts read a projection of the state."""


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in NO_NEIGHBOURS])
def test_every_architecture_is_routed_or_refused(architecture: str, folder: Path) -> None:
    """The prompt and the first step behind it are the router's, to the bit; nothing that heads chose is left out."""
    path = make(folder, architecture, experts=16, topk=3)
    first, later, dropped, failure = isolated(routed_and_dropped, path)
    if architecture in NOT_ROUTED:
        assert NOT_ROUTED[architecture] in failure
    else:
        assert (first, later, dropped, failure) == (True, True, 0, "")


# What it does not depend on

ARMS: dict[str, dict[str, Any]] = {
    "the smallest cache": {"cache": 0.0},
    "all in memory": {"cache": 1.0},
    "nothing read ahead": {"prefetch": "off"},
    "lookahead": {"prefetch": "lookahead", "cache": 0.1},
    "repeat": {"prefetch": "repeat", "cache": 0.1},
    "router": {"prefetch": "router", "cache": 0.1},
    "node by node": {"compute": "ggml"},
    "mmap": {"reader": "mmap"},
    "uring": {"reader": "uring", "policy": "lru"},
    "two threads": {"options": {"n_threads": 2, "n_threads_batch": 2}, "cache": 0.1},
}


def arms(path: Path) -> list[str]:
    wrong = []
    with loaded(path) as llm:
        expected = evaluated(llm)
    for name, arm in ARMS.items():
        with loaded(path, **arm) as llm:
            found, stats = evaluated(llm), llm.expert_stats()
        if not np.array_equal(found, expected):
            wrong.append(f"{name}: rows {np.unique(np.nonzero(found != expected)[0]).tolist()} differ")
        if stats.dropped:
            wrong.append(f"{name}: {stats.dropped} dropped")
    return wrong


@pytest.mark.parametrize("model", ["softmax", "sigmoid, bias and groups", "before attention, softmax"])
def test_what_is_routed_does_not_depend_on_cache_reads_or_threads(model: str, folder: Path) -> None:
    assert isolated(arms, model_of(model, folder)) == []


def advised(path: Path) -> list[str]:
    wrong = []
    with loaded(path, "off") as llm:
        expected = evaluated(llm)
    for arm in ({"cache": 0.0}, {"cache": 0.5}, {"prefetch": "lookahead"}, {"compute": "ggml"}, {"prefetch": "router"}):
        with loaded(path, "advise", **arm) as llm:
            found, stats = evaluated(llm), llm.expert_stats()
        said = [p for p in stats.predictions if p.name == "heads"]
        if not np.array_equal(found, expected):
            wrong.append(f"{arm}: the bits differ")
        if stats.dropped or not said or said[0].layers < STEPS or not 0 < said[0].recall < 1:
            wrong.append(f"{arm}: {stats}")
    with loaded(path, "off", sidecar=sidecar_of(path)) as llm:
        if not np.array_equal(evaluated(llm), expected) or llm.expert_stats().heads_bytes:
            wrong.append("off")
    return wrong


@pytest.mark.parametrize("model", ["softmax", "sigmoid, bias and groups", "before attention, softmax"])
def test_heads_that_advise_change_no_bit(model: str, folder: Path) -> None:
    assert isolated(advised, model_of(model, folder)) == []


def reads(path: Path) -> tuple[int, int]:
    """Of a decode: experts read when they were wanted, and those of layers without a head that were."""
    with loaded(path, cache=0.4, policy="lru") as llm:
        llm.eval(TOKENS[:PROMPT])
        for token in TOKENS[PROMPT : PROMPT + 2]:
            llm.eval([token])
        before = llm.expert_stats()
        for token in TOKENS[PROMPT + 2 : PROMPT + STEPS]:
            llm.eval([token])
        s = llm.expert_stats().since(before)
    assert s.wasted == 0 and s.useful + s.late > 50 and s.heads_s > 0
    return s.misses - s.useful - s.late, (STEPS - 2) * 3


def test_what_heads_chose_is_read_before_it_is_wanted(folder: Path) -> None:
    """All but the first layer have heads: no more is read on demand than that one can miss."""
    on_demand, first_layer = isolated(reads, model_of("softmax", folder, experts=32))
    assert on_demand <= first_layer


def test_the_weights_that_heads_read_are_counted(folder: Path) -> None:
    path = model_of("softmax", folder)
    heads = Sidecar.read(sidecar_of(path)).heads
    assert heads is not None
    with loaded(path) as llm:
        llm.eval(TOKENS[:PROMPT])
        assert llm.expert_stats().heads_bytes == 0
        llm.eval(TOKENS[:1])  # the first step knows of no experts before it
        before = llm.expert_stats()
        assert 0 < before.heads_bytes < heads.bytes_per_token(3)
        for token in TOKENS[1:4]:
            llm.eval([token])
        assert llm.expert_stats().since(before).heads_bytes == 3 * heads.bytes_per_token(3)
        (note,) = [note for note in before.notes if note.startswith("prerouter:")]
    assert note == "prerouter: heads choose the experts of 3 layers, from 1 to 3, and take 50.06 KiB of memory"
    assert before.resident_bytes == before.dense_bytes + before.slots_used * before.slot_bytes + heads.size_bytes


def replayed(path: Path, trace: Path) -> tuple[int, bool]:
    """Of a routing that is replayed: experts read on demand, and whether it is what is run."""
    recorded = RoutingTrace.read(trace)
    with loaded(path, replay=trace, prefetch="router", cache=0.4) as llm:
        llm.eval(TOKENS[:1])
        llm.eval(TOKENS[1:2])
        before = llm.expert_stats()
        for token in TOKENS[2:28]:
            llm.eval([token])
        s = llm.expert_stats().since(before)
        assert s.dropped == 0 and s.heads_s > 0
    with loaded(path, replay=trace, prefetch="router") as llm:
        found = record_routing(llm, [TOKENS[:30]], tokens_at_once=1)
    return s.misses - s.useful - s.late, np.array_equal(
        np.sort(found.experts, axis=2), np.sort(recorded.experts, axis=2)
    )


def test_for_measuring_a_replayed_routing_stands_for_what_heads_say(folder: Path, tmp_path: Path) -> None:
    path = model_of("softmax", folder, experts=32)
    trace_of(path).write(tmp_path / "a.trace")
    on_demand, same = isolated(replayed, path, tmp_path / "a.trace")
    assert same and on_demand <= 26 * 3, "the first layer has no head"


def replayed_together(path: Path, trace: Path, *, steps: int) -> int:
    """Experts read on demand by three sequences of which each takes every third row of a routing."""
    with loaded(path, replay=trace, prefetch="router", cache=0.5) as llm, context_of(llm, 3, unified=True) as decode:
        for position in range(steps + 2):
            if position == 2:
                before = llm.expert_stats()
            decode([(sequence, position, TOKENS[position], True) for sequence in range(3)])
        s = llm.expert_stats().since(before)
        return s.misses - s.useful - s.late


def test_of_several_sequences_it_stands_for_what_heads_say_of_each(folder: Path, tmp_path: Path) -> None:
    path, steps = model_of("softmax", folder, experts=64), 20
    trace_of(path, tokens=90).write(tmp_path / "a.trace")
    assert isolated(replayed_together, path, tmp_path / "a.trace", steps=steps) <= steps * 9, "the first layer's alone"


# What heads said belongs to a sequence, and to nothing that has come after


def steps(llm: Llama, tokens: Sequence[int]) -> np.ndarray:
    """Logits of tokens evaluated one by one."""
    rows = []
    for token in tokens:
        llm.eval([token])
        rows.append(llm.scores[llm.n_tokens - 1].copy())
    return np.array(rows)


def forgotten(path: Path, tokens: Sequence[int], at: int) -> np.ndarray:
    """Logits of the steps from `at` on, where a step there is the first after what was said was forgotten."""
    with loaded(path) as llm:
        llm.eval(tokens[:PROMPT])
        steps(llm, tokens[PROMPT:at])
        llm._ctx.sequences.forget()
        return steps(llm, tokens[at:])


def followed(path: Path) -> list[str]:
    """What is wrong of sequences that are cut, restored, or begun anew."""
    wrong: list[str] = []
    a, b = TOKENS[:40], TOKENS[40:80]
    end = 30

    def compare(what: str, found: np.ndarray, expected: np.ndarray) -> None:
        if not np.array_equal(found, expected):
            wrong.append(f"{what}: steps {np.unique(np.nonzero(found != expected)[0]).tolist()} differ")

    cut = forgotten(path, a[:end], 25)
    with loaded(path) as llm:
        llm.eval(a[:PROMPT])
        straight = steps(llm, a[PROMPT:end])
        if np.array_equal(straight[5:], cut):
            wrong.append("forgetting changes nothing: these comparisons say nothing")
        if not np.array_equal(straight[0], forgotten(path, a[: PROMPT + 1], PROMPT)[0]):
            wrong.append("the first step")

        llm.reset()
        llm.eval(a[:PROMPT])
        compare("reset", steps(llm, a[PROMPT:end]), straight)

        llm.n_tokens = 25  # what a shorter common prefix does; the next eval removes the rest
        compare("cut back", steps(llm, a[25:end]), cut)

        llm.reset()
        llm.eval(a[:PROMPT])
        steps(llm, a[PROMPT:25])
        state = llm.save_state()
        steps(llm, a[25:28])
        llm.load_state(state)
        on = straight[25 - PROMPT :]
        compare("restored", steps(llm, a[25:end]), on)

        llm.reset()
        llm.eval(b[:PROMPT])
        steps(llm, b[PROMPT:25])
        llm.load_state(state)
        compare("restored at the position where another text was", steps(llm, a[25:end]), on)

        with loaded(path) as other:
            other.load_state(pickle.loads(pickle.dumps(state)))
            compare("restored in another process's model", steps(other, a[25:end]), on)
            del state.said_by_heads  # as of a model without heads
            other.load_state(state)
            compare("restored without what heads said", steps(other, a[25:end]), cut)
            other.reset()
            other.eval(a[:25])
            state = other.save_state()
            other.load_state(state)
            other.eval(a[25:26])
            if state.said_by_heads is not None:
                wrong.append("heads said something of a prompt")

        llm.reset()
        llm.eval(a[:PROMPT])
        steps(llm, a[PROMPT:25])
        llm.eval(b[:3])  # several tokens at once: as in a prompt
        more = steps(llm, b[3:8])
        if not llm.expert_stats().dropped == 0:
            wrong.append("dropped")
        with loaded(path) as other:
            other.eval(a[:PROMPT])
            steps(other, a[PROMPT:25])
            other.eval(b[:3])
            other._ctx.sequences.forget()
            compare("several tokens", more, steps(other, b[3:8]))

        other_text = np.concatenate([[-1], b[:10]])[1:].tolist()
        llm.reset()
        llm.eval(a[:PROMPT])
        rows = []
        for token in a[PROMPT:end]:
            rows.append(steps(llm, [token])[0])
            with evaluating(llm, context=32, tokens_at_once=1) as evaluation:
                for position, each in enumerate(other_text):
                    evaluation.decode([each], position)
        compare("other contexts in between", np.array(rows), straight)
    return wrong


def restored_from(
    path: Path, saved: bytes | None, tokens: Sequence[int], sidecar: Path | None = None
) -> tuple[np.ndarray, bytes | None]:
    """The step after a text, where `saved` is what heads are said to have said of it; and what they did say."""
    with loaded(path, sidecar=sidecar or sidecar_of(path)) as llm:
        llm.eval(tokens[:PROMPT])
        steps(llm, tokens[PROMPT:-1])
        said = llm._ctx.sequences.saved(0)
        llm._ctx.sequences.restore(0, saved)
        return steps(llm, tokens[-1:])[0], said


def test_what_other_heads_said_is_not_taken(folder: Path) -> None:
    path, larger = model_of("softmax", folder), model_of("softmax", folder, experts=32)
    first, said = isolated(restored_from, path, None, TOKENS[:30])
    begin = 12 + 20  # behind checksum, position and five numbers, the first logit
    assert not np.array_equal(isolated(restored_from, path, said, TOKENS[:30])[0], first)
    of_larger = said[:12] + isolated(restored_from, larger, None, TOKENS[:30])[1][12:]
    of_others = isolated(restored_from, path, None, TOKENS[:30], sidecar_of(path, "other", seed=7))[1]
    assert len(of_others) == len(said)
    nan = said[:begin] + np.float32(np.nan).tobytes() + said[begin + 4 :]
    for wrong in (of_larger, of_others, said[:-4], b"", said[:12] + b"\xff" * (len(said) - 12), nan):
        assert np.array_equal(isolated(restored_from, path, wrong, TOKENS[:30])[0], first)


@pytest.mark.parametrize("model", ["softmax", "before attention, softmax"])
def test_what_was_said_follows_the_context(model: str, folder: Path) -> None:
    assert isolated(followed, model_of(model, folder)) == []


def generated_again(path: Path) -> tuple[list[int], list[int], bool]:
    """Tokens generated for a prompt twice in one model, the second time with the prompt kept, and whether their logits are the same."""
    with loaded(path) as llm:
        found = []
        for _ in range(2):
            generated = list(itertools.islice(llm.generate(TOKENS[:PROMPT], temp=0), 12))
            found.append((generated, llm.scores[PROMPT - 1 : llm.n_tokens].copy()))
        (first, logits), (second, again) = found
        return first, second, bool(np.allclose(logits, again, atol=1e-4))


def test_a_prompt_that_is_kept_begins_a_request_like_one_that_is_not(folder: Path) -> None:
    first, second, same = isolated(generated_again, model_of("softmax", folder))
    assert first == second and same


def generated_after_one(path: Path) -> list[bool]:
    """Which logits of a generation are the same where the model has just evaluated its prompt, and was asked for no more than a token."""
    with loaded(path) as llm:
        list(itertools.islice(llm.generate(TOKENS[:PROMPT], temp=0), 12))
        expected = llm.scores[PROMPT : llm.n_tokens].copy()
        llm.reset()
        next(llm.generate(TOKENS[:PROMPT], temp=0))
        assert llm.n_tokens == PROMPT
        list(itertools.islice(llm.generate(TOKENS[:PROMPT], temp=0), 12))
        return np.all(llm.scores[PROMPT : llm.n_tokens] == expected, axis=1).tolist()


def test_a_prompt_of_which_nothing_is_left_to_evaluate_begins_a_request_too(folder: Path) -> None:
    assert isolated(generated_after_one, model_of("softmax", folder)) == [True] * 11


def without_positions(path: Path) -> bool:
    """After a token whose position only llama.cpp knows, and another text from the beginning: are its steps as those of a new model?"""
    with loaded(path) as llm:
        llm.eval(TOKENS[:PROMPT])
        steps(llm, TOKENS[PROMPT:25])
        token = (llama_cpp.llama_token * 1)(TOKENS[25])
        batch = SimpleNamespace(batch=llama_cpp.llama_batch_get_one(token, 1), n_tokens=lambda: 1)
        llm._ctx.decode(batch)
        assert llm._ctx.kv_cache_seq_rm(0, 0, -1)
        llm.n_tokens = 0
        found = steps(llm, TOKENS[40:45])
    with loaded(path) as llm:
        return np.array_equal(found, steps(llm, TOKENS[40:45]))


def test_a_token_of_no_known_position_is_as_of_a_prompt(folder: Path) -> None:
    assert isolated(without_positions, model_of("softmax", folder))


@contextlib.contextmanager
def context_of(
    llm: Llama, sequences: int, *, unified: bool, on_node: Any = None
) -> Iterator[Callable[..., np.ndarray]]:
    """A context of the model for several sequences: decode([(sequence, position, token, asked for), ...]) -> logits of those asked for."""
    callback = llama_cpp.ggml_backend_sched_eval_callback(on_node or 0)
    params = type(llm.context_params).from_buffer_copy(llm.context_params)
    params.n_ctx, params.n_seq_max, params.kv_unified = 64 * sequences, sequences, unified
    params.n_batch = params.n_ubatch = 32
    params.cb_eval, params.cb_eval_user_data = callback, None
    ctx = llama_cpp.llama_init_from_model(llm.model, params)
    batch = llama_cpp.llama_batch_init(32, 0, 1)
    kept = llm._engine.sequences()

    def decode(rows: Sequence[tuple[int, int, int, bool]]) -> np.ndarray:
        batch.n_tokens = len(rows)
        for i, (sequence, position, token, asked) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, asked
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        with llm._engine.failures(), kept.announced(batch) if kept is not None else contextlib.nullcontext():
            if code := llama_cpp.llama_decode(ctx, batch):
                raise RuntimeError(f"llama_decode {code}")
        found = [
            np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(ctx, i), (llm.n_vocab(),)).copy()
            for i, row in enumerate(rows)
            if row[3]
        ]
        return np.array(found)

    try:
        yield decode
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(ctx)


def texts(n: int) -> list[list[int]]:
    return [[(t * (3 + 2 * s) + 5 * s) % 256 for t in range(30)] for s in range(n)]


def alone(llm: Llama, text: Sequence[int], prompt: int) -> np.ndarray:
    """Logits of a text: of its prompt's last token, and step by step."""
    with context_of(llm, 1, unified=True) as decode:
        rows = [decode([(0, i, token, i == prompt - 1) for i, token in enumerate(text[:prompt])])]
        rows += [decode([(0, i, text[i], True)]) for i in range(prompt, len(text))]
        return np.concatenate(rows)


def together(
    decode: Callable[..., np.ndarray], wanted: Sequence[Sequence[int]], prompt: int, turns: Iterable[Sequence[int]]
) -> list[np.ndarray]:
    """Logits of texts, by row, of which each turn says which go on: with the first turn all of their prompt, then step by step."""
    at, found = [0] * len(wanted), [[] for _ in wanted]
    for turn in turns:
        rows: list[tuple[int, int, int, bool]] = []
        for s in turn:
            new = 0 if at[s] == len(wanted[s]) else prompt if at[s] == 0 else 1
            rows += [(s, i, wanted[s][i], i == at[s] + new - 1) for i in range(at[s], at[s] + new)]
            at[s] += new
        logits = iter(decode(rows)) if rows else iter(())
        for s in dict.fromkeys(row[0] for row in rows):
            found[s].append(next(logits))
    return [np.array(rows) for rows in found]


def several(path: Path, turns: list[list[int]], unified: bool, options: dict[str, Any]) -> list[str]:
    """What is wrong of sequences that are decoded together, against each alone."""
    wrong: list[str] = []
    with loaded(path, **options) as llm:
        wanted, prompt = texts(4), 6
        expected = [alone(llm, text, prompt) for text in wanted]
        with context_of(llm, len(wanted), unified=unified) as decode:
            found = together(decode, wanted, prompt, turns)
        for s, rows in enumerate(found):
            same = np.all(rows == expected[s], axis=1)  # attention over other sequences' cells may round differently
            if rows.shape != expected[s].shape or same.mean() < 0.9 or np.abs(rows - expected[s]).max() > 0.02:
                wrong.append(f"sequence {s}: {rows.shape}, rows {np.flatnonzero(~same).tolist()} differ")
        if llm.expert_stats().dropped:
            wrong.append("dropped")
    return wrong


COME_AND_GO = [[s for s in range(4) if turn >= 3 * s and (turn + s) % 5] for turn in range(60)]
"""Each sequence begins while others go on, and is left out of some turns."""
IN_STEP = [[0], [1], [2], [3], *[[0, 1, 2, 3]] * 24]


@pytest.mark.parametrize(
    ("turns", "unified"),
    [(COME_AND_GO, True), (IN_STEP, True), (IN_STEP, False)],
    ids=["one cache, come and go", "one cache", "a cache each"],
)
@pytest.mark.parametrize("model", ["softmax", "sigmoid, bias and groups", "before attention, softmax"])
def test_sequences_that_are_decoded_together_run_what_they_run_alone(
    model: str, turns: list[list[int]], unified: bool, folder: Path
) -> None:
    assert isolated(several, model_of(model, folder), turns, unified, {"cache": 0.5}) == []


def test_so_they_do_node_by_node(folder: Path) -> None:
    assert isolated(several, model_of("softmax", folder), COME_AND_GO, True, {"compute": "ggml"}) == []


def divided(path: Path) -> list[bool]:
    """Of two sequences whose rows llama.cpp computes one by one, as it does with a cache each where one is left out between them:
    are all of their tokens those of a model without heads?"""
    found = []
    for prerouter in ("route", "off"):
        with loaded(path, prerouter) as llm, context_of(llm, 4, unified=False) as decode:
            found.append(together(decode, texts(3), 6, [[0], [2], *[[0, 2]] * 24]))
    return [np.array_equal(found[0][s], found[1][s]) and len(found[0][s]) == 25 for s in (0, 2)]


def test_where_llama_cpp_divides_a_batch_its_routers_choose(folder: Path) -> None:
    assert isolated(divided, model_of("softmax", folder)) == [True, True]


def interrupted(path: Path) -> list[str]:
    """A read that fails in the middle of a step: what was said of the steps around it is gone."""
    wrong = []
    content = path.read_bytes()
    with native.opened(path) as source:
        begin = source.files[0].data_offset
    with loaded(path, cache=0.0) as llm:
        llm.eval(TOKENS[:PROMPT])
        steps(llm, TOKENS[PROMPT:25])
        os.truncate(path, begin)
        for _ in range(2):
            try:
                llm.eval([TOKENS[25]])
                wrong.append("the step did not fail")
            except ExpertReadError as error:
                if "is gone: the file was truncated while it was in use" not in str(error):
                    wrong.append(str(error))
        path.write_bytes(content)
        found, dropped = steps(llm, TOKENS[25:30]), llm.expert_stats().dropped
    if not np.array_equal(found, forgotten(path, TOKENS[:30], 25)):
        wrong.append("the steps afterwards")
    return [*wrong, *["dropped"] * bool(dropped)]


def test_a_step_that_failed_is_followed_by_a_first_one(tmp_path: Path) -> None:
    assert isolated(interrupted, model_of("softmax", tmp_path, experts=32)) == []


def past_our_hands(path: Path) -> bool:
    """A batch that llama.cpp gets past us, and then steps: are these as behind a prompt?"""
    with loaded(path) as llm:
        llm.eval(TOKENS[:PROMPT])
        steps(llm, TOKENS[PROMPT:25])
        batch = llm._batch
        batch.set_batch([TOKENS[25]], 25, True)
        assert llama_cpp.llama_decode(llm.ctx, batch.batch) == 0
        llm.input_ids[25] = TOKENS[25]
        llm.n_tokens = 26
        found = steps(llm, TOKENS[26:30])
    with loaded(path) as llm:
        llm.eval(TOKENS[:PROMPT])
        steps(llm, TOKENS[PROMPT:25])
        llm._ctx.sequences.forget()
        llm._ctx.sequences.prompt = True
        batch = llm._batch
        batch.set_batch([TOKENS[25]], 25, True)
        llm._ctx.decode(batch)
        llm.n_tokens = 26
        return np.array_equal(found, steps(llm, TOKENS[26:30]))


def test_a_batch_of_which_nothing_is_known_is_as_of_a_prompt(folder: Path) -> None:
    assert isolated(past_our_hands, model_of("softmax", folder))


# What is counted as dropped


class Asked:
    """Where a layer chooses: how many experts ought to be in its choice and are not; and in one from which one was left out."""

    def __init__(self) -> None:
        self.routers = native.lib.ms_routers_new(64)
        self.missing: list[int] = []
        self.one_left_out: list[int] = []
        self._logits: dict[int, np.ndarray] = {}

    def look(self, address: int, ask: bool, _: object) -> bool:
        node = tensor_ffi.cast("struct ggml_tensor *", address)
        source = tensor_ffi.string(node.src[0].name) if node.src[0] else b""
        router, first = _ROUTER.fullmatch(source), _FIRST.fullmatch(source) if node.src[2] else None
        if ask or not (router or first):
            return bool(router or first) or not ask
        if router:
            self._logits[int(router[1])] = _rows(node, F32, 0)[0]
        elif first and int(first[1]) in self._logits:
            layer = int(first[1])
            ids = native.ffi.cast("struct ggml_tensor *", int(tensor_ffi.cast("uintptr_t", node.src[2])))
            native.lib.ms_routers_learn(self.routers, layer, ids, native.ffi.NULL)
            assert native.lib.ms_routers_rule_is_known(self.routers, layer)
            logits, chosen = self._logits.pop(layer), _rows(node.src[2], I32, 0)[0].tolist()
            self.missing.append(self._asked(layer, logits, chosen))
            near = [e for e in range(len(logits)) if e not in chosen and e // 4 == chosen[-1] // 4]
            if near:
                self.one_left_out.append(self._asked(layer, logits, [*chosen[:-1], near[-1]]))
        return True

    def _asked(self, layer: int, logits: np.ndarray, chosen: list[int]) -> int:
        given = native.ffi.new("float[]", logits.tolist())
        return native.lib.ms_routers_missing(
            self.routers, layer, given, native.ffi.new("int32_t[]", chosen), len(chosen)
        )


def missed(path: Path) -> tuple[list[int], list[int]]:
    with loaded(path, "off") as llm:
        asked = Asked()
        with evaluating(llm, context=32, tokens_at_once=1, on_node=asked.look) as evaluation:
            for position, token in enumerate(TOKENS[:20]):
                evaluation.decode([token], position)
        native.lib.ms_routers_free(asked.routers)
    return asked.missing, asked.one_left_out


@pytest.mark.parametrize("model", MODELS)
def test_an_expert_that_should_have_been_chosen_and_was_not_is_counted(model: str, folder: Path) -> None:
    missing, one_left_out = isolated(missed, model_of(model, folder))
    assert len(missing) > 50 and not any(missing)
    assert len(one_left_out) > 30 and all(n == 1 for n in one_left_out)


_CHOICE = re.compile(rb"ffn_moe_topk-(\d+)")


class Tampering:
    """Takes the last expert out of what a layer has chosen, and puts one in its place that it did not choose."""

    def __init__(self, layer: int, experts: int) -> None:
        self._layer, self._experts = layer, experts
        self.steps = 0

    def look(self, address: int, ask: bool, _: object) -> bool:
        node = tensor_ffi.cast("struct ggml_tensor *", address)
        found = _CHOICE.fullmatch(tensor_ffi.string(node.name))
        if ask or not found or int(found[1]) != self._layer:
            return not ask or found is not None
        chosen = tensor_ffi.cast("int32_t *", node.data)
        taken = [chosen[i] for i in range(node.ne[0])]
        chosen[node.ne[0] - 1] = next(e for e in range(self._experts) if e not in taken)
        self.steps += 1
        return True


def tampered(path: Path, options: dict[str, Any]) -> tuple[int, int]:
    """Steps behind the first in which a layer was kept from running an expert that a head chose, and how many experts are counted as dropped."""
    with loaded(path, **options) as llm:
        tampering = Tampering(2, 16)
        with evaluating(llm, context=32, tokens_at_once=1, on_node=tampering.look) as evaluation:
            for position, token in enumerate(TOKENS[:12]):
                evaluation.decode([token], position)
        return tampering.steps - 1, llm.expert_stats().dropped


@pytest.mark.parametrize("compute", ["exact", "ggml"])
def test_what_is_kept_from_running_is_in_the_stats(compute: str, folder: Path) -> None:
    steps, dropped = isolated(tampered, model_of("softmax", folder), {"compute": compute})
    assert steps == dropped == 11


def with_huge_weights(path: Path) -> Path:
    """A sidecar whose heads are numbers, and give none: they are too large."""
    read = Sidecar.read(sidecar_of(path, "-f32", type="F32"))
    assert read.heads is not None
    for head in read.heads.heads:
        values = head.linear_h.data.view(np.float32)
        values[...] = np.where(values < 0, -3e38, 3e38)
    made = path.with_name(f"{path.stem}-huge.sidecar.gguf")
    read.write(made)
    return made


def of_no_number(path: Path, compute: str) -> list[str]:
    """What the first step fails with; and what is wrong where such heads only advise."""
    sidecar = with_huge_weights(path)
    with loaded(path, sidecar=sidecar, compute=compute) as llm:
        llm.eval(TOKENS[:PROMPT])
        try:
            llm.eval([TOKENS[PROMPT]])
            message = ""
        except ExpertReadError as error:
            message = str(error)
    with loaded(path, "off", compute=compute) as llm:
        expected = evaluated(llm)
    with loaded(path, "advise", sidecar=sidecar, compute=compute) as llm:
        return [message, *["advise changes bits"] * (not np.array_equal(evaluated(llm), expected))]


@pytest.mark.parametrize("compute", ["exact", "ggml"])
def test_heads_that_say_what_is_no_number_choose_nothing(compute: str, folder: Path) -> None:
    message = (
        "block 0: what its head says of the next layer is no number (NaN or infinite); "
        'train the heads anew, or load the model with prerouter="off"'
    )
    assert isolated(of_no_number, model_of("softmax", folder), compute) == [message]


# Refusals


def refused(path: Path, prerouter: str = "route", **streaming: Any) -> str:
    with pytest.raises((OptionError, SidecarError)) as caught, loaded(path, prerouter, **streaming):
        pass
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prerouter": "guess"}, "prerouter='guess': expected one of 'off', 'route', 'advise'"),
        ({"prerouter": "route"}, "prerouter='route' is what heads are for, and there are none; give sidecar= as well"),
        (
            {"prerouter": "route", "sidecar": "a", "cache_aware": 0.1},
            "prerouter='route' fixes the choice of experts a token before, so cache_aware= would replace what was read for it; leave one of them out",
        ),
        (
            {"prerouter": "advise", "sidecar": "a", "replay": "b"},
            "replay= fixes the choice of experts, of which heads that advise know nothing; leave out prerouter=, or measure with prerouter='route'",
        ),
        (
            {"prerouter": "advise", "sidecar": "a", "reader": "mmap"},
            "reader='mmap' reads nothing ahead, so prerouter='advise' would have no effect; leave one of them out",
        ),
        (
            {"prerouter": "advise", "sidecar": "a", "prefetch": "off"},
            "prefetch='off' reads nothing ahead, so prerouter='advise' would have no effect; leave one of them out",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        ExpertStreaming(**options)


def test_the_shorthand_is_the_options(folder: Path) -> None:
    path = model_of("softmax", folder)
    sidecar = sidecar_of(path)
    options = ExpertStreaming(kernels="plain", reader="pread", cache="1MB")
    with contextlib.closing(Llama(str(path), expert_streaming=options, prerouter=sidecar, **CONTEXT)) as llm:
        found = evaluated(llm)
        assert llm._engine.options.prerouter == "route" and llm.__getstate__()["prerouter"] == sidecar
    with loaded(path) as llm:
        assert np.array_equal(found, evaluated(llm))
    other = ExpertStreaming(sidecar="b.gguf")
    with pytest.raises(
        OptionError, match="contradicts expert_streaming, whose sidecar is 'b.gguf': leave out one of them"
    ):
        Llama(str(path), expert_streaming=other, prerouter=sidecar, **CONTEXT)
    advises = ExpertStreaming(sidecar=sidecar, prerouter="advise")
    with pytest.raises(OptionError, match="routes, and expert_streaming has prerouter='advise': leave out one of them"):
        Llama(str(path), expert_streaming=advises, prerouter=sidecar, **CONTEXT)
    with pytest.raises(OptionError, match="prerouter= routes a streamed model; it needs expert_streaming"):
        Llama(str(path), prerouter=sidecar, **CONTEXT)


def test_drafts_are_not_routed(folder: Path) -> None:
    """What is drafted is evaluated as a prompt is, by the routers: how much of a text that is would be up to the drafts."""
    path = model_of("softmax", folder)
    options = {"draft_model": LlamaPromptLookupDecoding(), "logits_all": True}
    message = "draft_model= has several tokens evaluated at once, .* leave it out, or take prerouter='advise'"
    with pytest.raises(OptionError, match=message), loaded(path, options=options):
        pass
    with loaded(path, "advise", options=options) as llm:
        llm.eval(TOKENS[:PROMPT])


def opened_with(path: Path, heads: Heads) -> tuple[int, str]:
    """ms_engine_heads of a model, as C is called: what checks nothing before it."""
    options = ffi.new(
        "ms_engine_options *",
        {"reader": (reader := ffi.new("char[]", b"pread")), "policy": (policy := ffi.new("char[]", b"lru"))},
    )
    out, message = ffi.new("ms_engine **"), ffi.new("char[]", 1024)
    assert lib.ms_engine_open(os.fsencode(path), options, out, message, 1024) == 0 and reader and policy
    made, shape, kept = native_heads(heads)
    try:
        code = lib.ms_engine_heads(out[0], made, len(heads.heads), 1, shape, message, 1024)
        return code, ffi.string(message).decode() if code else ""
    finally:
        lib.ms_engine_close(out[0])
        del kept


@pytest.mark.parametrize(
    ("owners", "changes", "message"),
    [
        ([3], {}, "a head is owned by layer 3, the last, which no layer follows that it could predict"),
        ([9], {}, "a head is owned by layer 9, and the model has layers 0 to 3"),
        ([-1], {}, "a head is owned by layer -1, and the model has layers 0 to 3"),
        ([0, 0], {}, "the head of layer 0 does not come after that of a layer before"),
        ([1, 0], {}, "the head of layer 0 does not come after that of a layer before"),
        ([0], {"experts": 8}, "the heads are for 8 experts in a layer, and layer 0 of this model has 16"),
        ([0], {"columns": 96}, "the heads read a state of 96 values, and that of layer 0 of this model has 128"),
        ([], {}, "there are no heads, or they are of no size"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    owners: list[int], changes: dict[str, int], message: str, folder: Path
) -> None:
    heads = make_heads([max(owner, 0) for owner in owners], **changes)
    renamed = [dataclasses.replace(head, owner=owner) for head, owner in zip(heads.heads, owners, strict=True)]
    heads = dataclasses.replace(heads, heads=tuple(renamed))
    code, found = opened_with(model_of("softmax", folder), heads)
    assert code < 0 and found == message


def test_heads_of_layers_without_experts_are_refused(folder: Path) -> None:
    path = model_of("sigmoid, bias and groups", folder)
    assert opened_with(path, make_heads([0]))[1] == "a head is owned by layer 0, which has no experts in this model"
    path = model_of("llama4", folder)
    assert (
        opened_with(path, make_heads([1]))[1]
        == "the head of layer 1 predicts layer 2, which has no experts in this model"
    )


@pytest.mark.parametrize("part", ["linear_h", "linear_onehot", "fc1_h", "fc1_onehot", "fc2"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_heads_that_are_no_numbers_are_refused(part: str, value: float, folder: Path) -> None:
    for type in ("F32", "F16", "Q8_0"):
        heads = make_heads([0, 1], experts=32, type=type)
        path = model_of("softmax", folder, experts=32)
        assert opened_with(path, heads) == (0, "")
        data = getattr(heads.heads[1], part).data
        data[: 4 if type == "F32" else 2] = np.array([value], np.float32 if type == "F32" else np.float16).view(
            np.uint8
        )
        name = part.replace("_", ".")
        assert (
            opened_with(path, heads)[1]
            == f"head.1.{name} holds values that are no numbers (NaN or infinite); train it anew"
        )


def test_a_sidecar_without_heads_routes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_of("softmax", folder)
    read = Sidecar.read(sidecar_of(path))
    without = Sidecar(read.base, None, read.lora, path=read.path)
    monkeypatch.setattr(moestream.llama, "sidecar_for", lambda *_, **__: without)
    assert (
        refused(path)
        == f"prerouter='route': {sidecar_of(path)} holds no heads; leave it out, or take a sidecar that does"
    )


def test_a_head_of_a_layer_that_is_not_loaded_is_refused(folder: Path) -> None:
    path = model_of("glm4moe", folder)
    message = "the head of layer 2 predicts layer 3, and llama.cpp does not load both; leave that head out"
    with (
        pytest.raises(OptionError, match=f"^{message}$"),
        loaded(path, options={"kv_overrides": {"glm4moe.nextn_predict_layers": 1}}),
    ):
        pass


def failed_step(path: Path, adapter: Path | None = None, **options: Any) -> str:
    """The error of a step; `adapter` is applied to the model behind `Llama`'s back, which would refuse it."""
    with loaded(path, options=options) as llm:
        if adapter is not None:
            llm._load_adapter(str(adapter), 1.0, adapter)
            apply_adapters(llm, llm.ctx)
        llm.eval(TOKENS[:PROMPT])
        try:
            steps(llm, TOKENS[:2])
        except ExpertReadError as error:
            return str(error)
    return ""


def test_a_router_that_is_more_than_its_weights_is_not_replaced_by_heads(folder: Path) -> None:
    """What a LoRA of it adds to the logits would be added to what heads say."""
    path = model_of("softmax", folder)
    adapter = lora(path, [r"ffn_gate_inp\.weight"])
    message = 'block 1: this model does not choose in a way that heads could replace; load it with prerouter="advise" or "off"'
    assert isolated(failed_step, path, adapter) == message


def with_experts_everywhere(path: Path, out: Path) -> Path:
    """A llama4 model whose dense layers are copies of those with experts behind them."""
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(out, "llama4")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            value = 1 if field.name == "llama4.interleave_moe_layer_step" else field.contents()
            writer.add_key_value(field.name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        found = re.match(r"blk\.(\d+)\.", tensor.name)
        if found and int(found[1]) % 2 == 0:
            continue
        names = [tensor.name, tensor.name.replace(found[0], f"blk.{int(found[1]) - 1}.")] if found else [tensor.name]
        for name in names:
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_experts_that_read_a_weighted_state_have_no_heads(folder: Path, tmp_path: Path) -> None:
    path = with_experts_everywhere(model_of("llama4", folder), tmp_path / "a.gguf")
    message = (
        "block 0: its experts do not read the state that heads read (3 inputs for each of 1 tokens of 1); "
        'load this model without heads: prerouter="off"'
    )
    assert isolated(failed_step, path) == message


def test_quantised_routers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp may have interleaved their rows, and computes them out of our reach."""
    monkeypatch.setattr(weights, "_NOT_QUANTISED", re.compile("norm"))
    path = make(tmp_path, "qwen3moe", "Q8_0")
    assert refused(path, sidecar=sidecar_of(path)).endswith(
        "its routers are quantised, so that heads can neither choose in their place nor know how they choose"
    )
