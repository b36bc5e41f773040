"""Reading ahead in whole models: it changes no bit, knows what can be known, and ends well whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

import moestream
import native
from factory import ARCHITECTURES, make
from isolation import isolated
from logits import CONTEXT, stock_kernels
from moestream import ExpertReadError, ExpertStats, ExpertStreaming, Llama, OptionError, describe, record_routing
from moestream._capture import _ffi as tensor_ffi
from moestream._capture import _layer_of_product, _rows
from moestream._evaluation import evaluating
from moestream._native import ffi as moestream_ffi
from moestream._native import lib as moestream_lib
from synthetic import weights

libc = ctypes.CDLL(None)
libc.free.argtypes = [ctypes.c_void_p]

TOKENS = [(7 * i * i + 3 * i) % 256 for i in range(80)]
PROMPT, SMALL, DECODED = 20, 3, 24
PREFETCH = ("auto", "off", "router", "lookahead", "router+lookahead", "repeat")
POLICIES = ("lru", "lfu", "lrfu")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3moe": ("qwen3moe", {}),
    "smallthinker, sigmoid": ("smallthinker", {"gating": "sigmoid"}),
    "smallthinker, softmax": ("smallthinker", {"gating": "softmax"}),
    "groups and bias": ("deepseek2", {"groups": 4, "gating": "sigmoid", "topk": 3}),
    "gpt-oss": ("gpt-oss", {}),
    "shared experts": ("qwen2moe", {"shared": 2}),
    "a size of slots for each layer": ("qwen3moe", {"expert_types": {(1, "down"): "Q8_0", (2, "up"): "Q5_1"}}),
}


@contextlib.contextmanager
def loaded(path: Path, *, cache: float = 0, **streaming: Any) -> Iterator[Llama]:
    """With plain kernels and a cache between the smallest (0) and one for all (1)."""
    found = describe(path)
    size = int(found.minimum_cache_bytes + cache * (found.maximum_cache_bytes - found.minimum_cache_bytes))
    options = {"kernels": "plain", "reader": "pread", "cache": size, **streaming}
    if options["reader"] == "mmap":
        del options["cache"]
    with contextlib.closing(Llama(str(path), expert_streaming=ExpertStreaming(**options), **CONTEXT)) as llm:
        yield llm


def evaluated(llm: llama_cpp.Llama, times: int = 1) -> np.ndarray:
    """Logits of a prompt, small batches, and tokens one by one, the last time that this was done."""
    for _ in range(times):
        llm.reset()
        llm.eval(TOKENS[:PROMPT])
        for _ in range(3):
            llm.eval(TOKENS[llm.n_tokens : llm.n_tokens + SMALL])
        for _ in range(DECODED):
            llm.eval([TOKENS[llm.n_tokens]])
    return llm.scores[: llm.n_tokens].copy()


def stock(path: Path) -> np.ndarray:
    with stock_kernels(False), contextlib.closing(llama_cpp.Llama(str(path), **CONTEXT)) as llm:
        return evaluated(llm)


# Bits


def compare(path: Path) -> list[str]:
    expected, wrong = stock(path), []
    for prefetch, policy, cache in itertools.product(PREFETCH, POLICIES, (0, 0.5)):
        with loaded(path, cache=cache, prefetch=prefetch, policy=policy) as llm:
            logits, stats = evaluated(llm), llm.expert_stats()
        name = f"prefetch={prefetch} policy={policy} cache={cache}"
        if not np.array_equal(logits, expected):
            wrong.append(f"{name}: rows {np.unique(np.nonzero(logits != expected)[0]).tolist()} differ")
        if stats.useful + stats.late + stats.wasted > stats.guessed or stats.wasted_bytes > stats.guessed_bytes:
            wrong.append(f"{name}: {stats}")
        if prefetch == "off" and (stats.predictions or stats.predict_s):
            wrong.append(f"{name}: {stats.predictions}")
        if prefetch in ("lookahead", "router+lookahead", "repeat") and not stats.predictions:
            wrong.append(f"{name}: nothing was predicted")
    return wrong


@pytest.mark.parametrize("model", MODELS)
def test_logits_have_the_same_bits_whatever_is_read_ahead_and_given_up(model: str, folder: Path) -> None:
    architecture, properties = MODELS[model]
    assert isolated(compare, make(folder, architecture, **properties)) == []


def compare_computed_node_by_node(path: Path) -> list[str]:
    expected = stock(path)
    wrong = []
    for prefetch in PREFETCH:
        with loaded(path, prefetch=prefetch, compute="ggml") as llm:
            if not np.array_equal(evaluated(llm), expected):
                wrong.append(prefetch)
    return wrong


@pytest.mark.parametrize("model", ["smallthinker, softmax", "groups and bias"])
def test_so_have_those_computed_node_by_node(model: str, folder: Path) -> None:
    architecture, properties = MODELS[model]
    assert isolated(compare_computed_node_by_node, make(folder, architecture, **properties)) == []


# What is known


@pytest.mark.parametrize("gating", ["sigmoid", "softmax"])
@pytest.mark.parametrize("type", ["Q4_0", "F16"])
def test_what_smallthinkers_router_names_is_what_is_chosen(gating: str, type: str, folder: Path) -> None:
    path = make(folder, "smallthinker", type, gating=gating, experts=32, topk=4)
    with loaded(path, cache=0.3, prefetch="router") as llm:
        evaluated(llm)
        stats = llm.expert_stats()
        assert [p.name for p in stats.predictions] == ["router"]
        (predicted,) = stats.predictions
        assert (predicted.recall, predicted.exact) == (1.0, 1.0)
        assert predicted.layers == 4 * (DECODED + 3 + 1), (
            "all layers, in decode and small batches, and what the prompt left for its last"
        )
        assert stats.wasted == 0 and stats.useful + stats.late == stats.guessed > 50
        assert (
            "prefetch: this model chooses a layer's experts before its attention, and they are read during it"
            in stats.notes
        )


def test_what_is_known_are_misses_that_prefetch_did_not_make_more_of(folder: Path) -> None:
    path = make(folder, "smallthinker", experts=32, topk=4)
    found = {}
    for prefetch in ("off", "router"):
        with loaded(path, cache=0.3, prefetch=prefetch, policy="lru") as llm:
            evaluated(llm)
            found[prefetch] = llm.expert_stats()
    assert found["router"].hits + found["router"].misses == found["off"].hits + found["off"].misses
    assert found["router"].misses == pytest.approx(found["off"].misses, rel=0.05)


# Which routers are understood

NOT_UNDERSTOOD = {
    "gemma4": "its router scales what it has normalised before it weights it",
    "phimoe": "its norms are followed by a bias",
    "qwen4exp": "its router reads a gated mix of several streams, not normalised",
}
BEFORE_ATTENTION = {"smallthinker"}


class Asked:
    """Where a layer chooses: what its router, as read off the graph, chooses for the state that the choice was made from."""

    def __init__(self, top_k: int) -> None:
        self.routers = native.lib.ms_routers_new(64)
        self.choices: list[tuple[set[int], set[int]]] = []
        self._scratch = native.ffi.new("struct ms_router_scratch *")
        self._copy = native.ffi.new("float **")
        self._top_k = top_k
        self._seen: set[int] = set()

    def look(self, address: int, ask: bool, _: object) -> bool:
        node = tensor_ffi.cast("struct ggml_tensor *", address)
        layer = _layer_of_product(node)
        if layer is None or layer in self._seen:
            return not ask
        if not ask:
            self._seen.add(layer)
            ids = native.ffi.cast("struct ggml_tensor *", int(tensor_ffi.cast("uintptr_t", node.src[2])))
            native.lib.ms_routers_learn(self.routers, layer, ids, native.ffi.NULL)
            state = native.lib.ms_router_state(ids, self._copy)
            if state != native.ffi.NULL:
                self._choose(layer, state, _rows(node.src[2], 26, 0)[0])
        return True

    def _choose(self, layer: int, state: Any, chosen: np.ndarray) -> None:
        found = native.ffi.new("int32_t[]", self._top_k)
        n = native.lib.ms_routers_choose(self.routers, layer, state, True, self._top_k, found, self._scratch)
        self.choices.append((set(found[0:n]), set(chosen.tolist())))

    def next_token(self) -> None:
        self._seen.clear()

    def close(self) -> None:
        native.lib.ms_router_scratch_free(self._scratch)
        native.lib.ms_routers_free(self.routers)
        libc.free(int(native.ffi.cast("uintptr_t", self._copy[0])))


def asked_at_the_layer_itself(path: Path) -> tuple[int, bool, int, int, int]:
    """Layers understood and whether all choose before attention; choices of layers and tokens, of these the same set, experts that differ."""
    reads_state = moestream_ffi.new("bool *")
    with loaded(path, prefetch="lookahead", cache=1) as llm:
        asked = Asked(llm._engine.description.experts_used)
        with evaluating(llm, context=64, tokens_at_once=1, on_node=asked.look) as evaluation:
            for position, token in enumerate(TOKENS[:40]):
                evaluation.decode([token], position)
                asked.next_token()
        asked.close()
        known = moestream_lib.ms_engine_layers_known(llm._engine._open, reads_state)
    same = sum(found == chosen for found, chosen in asked.choices)
    differ = sum(len(chosen - found) for found, chosen in asked.choices)
    return known, reads_state[0], len(asked.choices), same, differ


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_routers_are_understood_and_choose_for_their_layers_state_what_the_layer_chose(
    architecture: str, folder: Path
) -> None:
    path = make(folder, architecture, experts=16, topk=3)
    layers = 0 if architecture in NOT_UNDERSTOOD else len(describe(path).moe_layers)
    known, reads_state, n, same, differ = isolated(asked_at_the_layer_itself, path)
    assert (known, reads_state) == (layers, architecture in BEFORE_ATTENTION)
    assert n == (0 if reads_state else 40 * layers)
    assert same >= 0.93 * n and differ <= 0.03 * 3 * n, "near ties apart: its weights are of 8 bits"


@pytest.mark.parametrize(("gating", "groups"), [("softmax", 4), ("sigmoid", 4), ("sigmoid", 1)])
def test_so_does_one_with_groups_and_bias(gating: str, groups: int, folder: Path) -> None:
    path = make(folder, "deepseek2", experts=16, topk=3, groups=groups, gating=gating)
    _, _, n, same, _ = isolated(asked_at_the_layer_itself, path)
    assert n == 120 and same >= 0.93 * n


# Several at once


def in_threads(works: list[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(works)

    def run(i: int) -> None:
        try:
            results[i] = works[i]()
        except BaseException as error:
            results[i] = repr(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def two_models(first: Path, second: Path) -> list[bool]:
    expected = [stock(first), stock(second)]
    with loaded(first, prefetch="router+lookahead") as a, loaded(second, prefetch="router+lookahead") as b:
        found = in_threads([lambda: evaluated(a, 3), lambda: evaluated(b, 3)])
    return [np.array_equal(x, y) for x, y in zip(found, expected, strict=True)]


def test_two_models_read_ahead_at_once(folder: Path) -> None:
    assert isolated(two_models, make(folder, "smallthinker"), make(folder, "qwen3moe")) == [True, True]


def two_contexts(path: Path, prefetch: str) -> list[str]:
    """Two contexts of one model, each in a thread, with one cache that is the smallest."""
    wrong = []
    with loaded(path, prefetch=prefetch) as llm, contextlib.ExitStack() as stack:
        evaluations = [stack.enter_context(evaluating(llm, context=64, tokens_at_once=8)) for _ in range(2)]

        def decoded(evaluation: Any, shift: int) -> np.ndarray:
            rows, at = [], 0
            for n in [5, *[1] * 40]:
                evaluation.decode(TOKENS[at + shift : at + shift + n], at)
                rows.append(evaluation.logits().copy())
                at += n
            return np.concatenate(rows)

        expected = [decoded(evaluation, shift) for shift, evaluation in enumerate(evaluations)]
        for _ in range(4):
            found = in_threads([lambda e=e, s=s: decoded(e, s) for s, e in enumerate(evaluations)])
            wrong += [str(f)[:200] for f, x in zip(found, expected, strict=True) if not np.array_equal(f, x)]
    return wrong


@pytest.mark.parametrize("prefetch", ["router+lookahead", "repeat"])
@pytest.mark.parametrize("model", ["smallthinker, sigmoid", "a size of slots for each layer"])
def test_two_contexts_of_one_model_read_ahead_at_once(model: str, prefetch: str, folder: Path) -> None:
    architecture, properties = MODELS[model]
    assert isolated(two_contexts, make(folder, architecture, **properties), prefetch) == []


# Ends


def closed_in_the_middle(path: Path, trace: Path, reader: str, rate: float | None) -> int:
    """Experts asked for ahead, for the next token, when the model was closed."""
    on_their_way = 0
    for n in range(12):
        with loaded(path, reader=reader, prefetch="oracle", replay=trace, cache=0.5) as llm:
            llm._engine.set_read_rate(rate)
            for token in TOKENS[: 2 + n]:
                llm.eval([token])
            s = llm.expert_stats()
            on_their_way += s.guessed - s.useful - s.late - s.wasted
    return on_their_way


@pytest.mark.parametrize("rate", [None, 12e6], ids=["", "from a slow disk"])
@pytest.mark.parametrize("reader", ["uring", "pread"])
def test_a_model_can_be_closed_while_experts_are_read_ahead(
    reader: str, rate: float | None, folder: Path, tmp_path: Path
) -> None:
    path = make(folder, "qwen3moe", experts=32, topk=4)
    trace_of(path).write(tmp_path / "a.trace")
    assert isolated(closed_in_the_middle, path, tmp_path / "a.trace", reader, rate, timeout_s=60) > 0


@pytest.mark.parametrize("reader", ["uring", "pread"])
@pytest.mark.parametrize("prefetch", ["router+lookahead", "repeat"])
def test_a_file_truncated_while_experts_are_read_ahead_fails_demands_alone_and_works_again(
    prefetch: str, reader: str, tmp_path: Path
) -> None:
    path = make(tmp_path, "smallthinker", experts=32, topk=4)
    content = path.read_bytes()
    with native.opened(path) as source:
        begin = source.files[0].data_offset
    with loaded(path, reader=reader, prefetch=prefetch, cache=0.3) as llm:
        expected = evaluated(llm)
        llm.reset()
        llm.eval(TOKENS[:PROMPT])
        os.truncate(path, begin)
        for token in TOKENS[PROMPT : PROMPT + 3]:
            with pytest.raises(ExpertReadError, match="is gone: the file was truncated while it was in use"):
                llm.eval([token])
        path.write_bytes(content)
        assert np.array_equal(evaluated(llm), expected)
        s = llm.expert_stats()
        assert s.slots_used <= s.slots_total and s.useful + s.late + s.wasted <= s.guessed


# The trial


@pytest.mark.parametrize("compute", ["exact", "ggml"])
def test_auto_says_once_whether_guessing_pays(compute: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make(folder, "qwen3moe", experts=32, topk=4)
    with loaded(path, prefetch="auto", compute=compute) as llm:
        llm._engine.set_read_rate(20e6)  # so that tokens wait
        caplog.set_level("INFO", logger="moestream")
        for _ in range(2):
            llm.reset()
            for token in TOKENS[:60]:
                llm.eval([token])
        notes = [note for note in llm.expert_stats().notes if note.startswith("prefetch: guessing")]
    assert len(notes) == 1
    assert "a token takes" in notes[0] and "ms with" in notes[0] and "ms without" in notes[0]
    assert [record.getMessage() for record in caplog.records if "guessing" in record.getMessage()] == notes


def test_auto_guesses_nothing_where_all_is_in_memory(folder: Path) -> None:
    with loaded(make(folder, "qwen3moe"), prefetch="auto", cache=1) as llm:
        evaluated(llm, 4)
        stats = llm.expert_stats()
        assert not stats.predictions and not [note for note in stats.notes if "guessing" in note]


# Replay


def trace_of(path: Path, tokens: int = 30, seed: int = 0, **changes: Any) -> moestream.RoutingTrace:
    found = describe(path)
    rng = np.random.default_rng(seed)
    layers, n, k = [layer.layer for layer in found.moe_layers], found.moe_layers[0].experts, found.experts_used
    experts = np.array([[rng.permutation(n)[:k] for _ in layers] for _ in range(tokens)], np.uint8)
    fields: dict[str, Any] = {
        **{"model": "Some model", "model_hash": "", "architecture": "any", "source": "", "tool": ""},
        **{"layers": tuple(layers), "n_experts": n, "experts": experts, "tokens": np.zeros(tokens, np.int32)},
        **{"weights": np.zeros(experts.shape, np.float16), "starts": np.array([0]), "tokens_at_once": 0},
        "synthetic": "invented for a test",
    }
    return moestream.RoutingTrace(**{**fields, **changes})


@pytest.mark.parametrize("prefetch", ["off", "router+lookahead", "oracle", "random"])
@pytest.mark.parametrize("model", ["qwen3moe", "smallthinker, softmax", "groups and bias", "gpt-oss", "gemma4"])
def test_a_replayed_routing_is_what_is_computed(model: str, prefetch: str, folder: Path, tmp_path: Path) -> None:
    architecture, properties = MODELS.get(model, (model, {}))
    path = make(folder, architecture, **properties)
    trace = trace_of(path)
    trace.write(tmp_path / "a.trace")
    with loaded(path, prefetch=prefetch, replay=tmp_path / "a.trace", replay_recall=(0.9, 0.8, 0.7, 0.6)) as llm:
        recorded = record_routing(llm, [TOKENS[:40]], tokens_at_once=1)
        notes = llm.expert_stats().notes
    expected = np.concatenate([trace.experts, trace.experts[:10]])
    assert np.array_equal(np.sort(recorded.experts, axis=2), np.sort(expected, axis=2))
    (note,) = [note for note in notes if note.startswith("replay:")]
    assert (
        note
        == f"replay: the routers follow {tmp_path / 'a.trace'} (invented for a test), not the model: what it writes has no meaning"
    )


def test_an_oracle_is_right(folder: Path, tmp_path: Path) -> None:
    path = make(folder, "qwen3moe", experts=32, topk=4)
    trace_of(path).write(tmp_path / "a.trace")
    with loaded(path, prefetch="oracle", replay=tmp_path / "a.trace", cache=0.5) as llm:
        llm.eval(TOKENS[:1])
        before = llm.expert_stats()
        for token in TOKENS[:29]:
            llm.eval([token])
        s = llm.expert_stats().since(before)
    assert s.useful + s.late == s.misses > 0 and s.wasted == 0, "after the first token nothing is read on demand"


def test_a_recorded_trace_says_of_which_model_it_is(folder: Path, tmp_path: Path) -> None:
    path = make(folder, "qwen3moe")
    trace_of(path, synthetic="").write(tmp_path / "a.trace")
    with loaded(path, replay=tmp_path / "a.trace") as llm:
        assert any("(recorded from Some model)" in note for note in llm.expert_stats().notes)


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (
            {"experts": 16},
            "replay={trace!r}: is of 2 of 16 experts in a layer, and {name} takes 2 of 8; synthesise one of its shape",
        ),
        (
            {"topk": 3},
            "replay={trace!r}: is of 3 of 8 experts in a layer, and {name} takes 2 of 8; synthesise one of its shape",
        ),
        (
            {"layers": 3},
            "a routing of 3 layers cannot be replayed by a model with experts in 4; synthesise one of its shape",
        ),
    ],
)
def test_a_trace_of_another_shape_is_refused(of: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    path, trace = make(folder, "qwen3moe"), str(tmp_path / "a.trace")
    trace_of(make(folder, "qwen3moe", **of)).write(trace)
    with pytest.raises(OptionError) as raised, loaded(path, replay=trace):
        pass
    assert str(raised.value) == message.format(trace=trace, name=path.name)


# Cache-aware routing


@pytest.mark.parametrize("model", ["qwen3moe", "smallthinker, sigmoid", "groups and bias", "gpt-oss", "gemma4"])
def test_preferring_what_is_in_memory_saves_misses_and_says_so(model: str, folder: Path) -> None:
    architecture, properties = MODELS.get(model, (model, {}))
    path = make(folder, architecture, **{**properties, "experts": 32})
    found: dict[float, ExpertStats] = {}
    for margin in (0.0, 0.3):
        with loaded(path, cache=0.3, cache_aware=margin, prefetch="off") as llm:
            evaluated(llm)
            found[margin] = llm.expert_stats()
    assert found[0.0].replaced == 0 < found[0.3].replaced
    assert found[0.3].misses < found[0.0].misses


def test_a_margin_of_almost_nothing_changes_next_to_nothing_in_any_router(folder: Path) -> None:
    """gemma4's is not understood as a whole; that it chooses by shares of a softmax is."""
    path = make(folder, "gemma4", experts=32, topk=4)
    with loaded(path, cache=0.3, cache_aware=0.002, prefetch="off") as llm:
        evaluated(llm, 2)
        stats = llm.expert_stats()
        assert stats.replaced < 0.01 * 2 * 4 * 4 * (DECODED + 3 * SMALL)


@pytest.mark.parametrize("option", ["replay", "cache_aware"])
def test_routers_that_are_quantised_are_left_alone(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp may have interleaved their rows, and computes them out of our reach."""
    monkeypatch.setattr(weights, "_NOT_QUANTISED", re.compile("norm"))
    path = make(tmp_path, "qwen3moe", "Q8_0")
    with loaded(path, prefetch="lookahead") as llm:
        evaluated(llm)
        assert not llm.expert_stats().predictions
    trace_of(path).write(tmp_path / "a.trace")
    with (
        pytest.raises(OptionError) as raised,
        loaded(path, **{option: {"replay": tmp_path / "a.trace", "cache_aware": 0.1}[option]}),
    ):
        pass
    assert str(raised.value) == (
        f"{path}: its routers are quantised, and what these choose cannot be changed; leave out {option}=, or take a file that keeps them in F32"
    )


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prefetch": "psychic"},
            "prefetch='psychic': expected one of 'auto', 'off', 'router', 'lookahead', 'router+lookahead', 'repeat', 'oracle', 'random'",
        ),
        ({"policy": "fifo"}, "policy='fifo': expected one of 'lru', 'lfu', 'lrfu'"),
        *(
            ({"cache_aware": wrong}, f"cache_aware={wrong!r}: expected a share of a score, from 0 (off) to below 1")
            for wrong in (1, -0.1, float("nan"), "0.1", None)
        ),
        *(
            (
                {"prefetch": name},
                f"prefetch={name!r} is for measuring with a recorded routing; give replay= as well, or use 'auto'",
            )
            for name in ("oracle", "random")
        ),
        (
            {"replay": "a.trace", "cache_aware": 0.1},
            "replay= fixes the choice of experts, so cache_aware= would have no effect; leave one of them out",
        ),
        *(
            ({"replay_recall": wrong}, f"replay_recall={wrong!r}: expected one to eight shares, each from 0 to 1")
            for wrong in ((), (0.5, 0.5, 0.5, 1.5), (-0.1, 0, 0, 0))
        ),
        *(
            (
                {"reader": "mmap", "prefetch": name},
                f"reader='mmap' leaves caching to the kernel, which is not told who comes next; leave out prefetch={name!r} or use another reader",
            )
            for name in ("router", "lookahead", "router+lookahead", "repeat")
        ),
        (
            {"reader": "mmap", "cache_aware": 0.1},
            "reader='mmap' does not know what is in memory, so cache_aware= would have no effect; leave it out or use another reader",
        ),
        (
            {"reader": "mmap", "policy": "lru"},
            "reader='mmap' leaves caching to the kernel, so policy= would have no effect; leave it out or use another reader",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as raised:
        ExpertStreaming(**options)
    assert str(raised.value) == message


def test_what_the_kernel_reads_cannot_be_slowed_down(folder: Path) -> None:
    with loaded(make(folder, "qwen3moe"), reader="mmap") as llm:
        with pytest.raises(OptionError) as raised:
            llm._engine.set_read_rate(1e6)
        assert (
            str(raised.value)
            == 'reads of reader="mmap" are the kernel\'s and cannot be slowed down; use another reader'
        )
        assert llm.expert_stats().predictions == ()


def test_prefetch_can_be_changed_between_tokens_if_the_model_was_loaded_with_it(folder: Path) -> None:
    path = make(folder, "smallthinker", experts=32, topk=4)
    expected = stock(path)
    with loaded(path, prefetch="router", cache=0.3) as llm:
        llm._engine.set_prefetch("off")
        assert np.array_equal(evaluated(llm), expected) and not llm.expert_stats().predictions
        llm._engine.set_prefetch("router")
        assert np.array_equal(evaluated(llm), expected) and llm.expert_stats().predictions
    with loaded(path, prefetch="off") as llm, pytest.raises(OptionError) as raised:
        llm._engine.set_prefetch("router")
    assert str(raised.value) == "prefetch='router': the model was loaded without"
