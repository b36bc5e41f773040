"""Routing traces: the file, recording through the engine, statistics, and `moestream trace`."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import pty
import random
import re
import signal
import struct
import subprocess
import sys
import termios
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from factory import lora, make
from moestream import (
    ExpertReadError,
    ExpertStreaming,
    Llama,
    ModelError,
    OptionError,
    RoutingTrace,
    TraceError,
    _capture,
    cli,
    describe,
    record_routing,
    routing_statistics,
    simulate,
)

PYTHON = [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "-m", "moestream"]
_DRAW = random.Random(1)
LONG = [_DRAW.randrange(3, 300) for _ in range(50)]
SHORT = [_DRAW.randrange(3, 300) for _ in range(20)]


def synthetic(
    n: int = 60, layers: int = 3, experts: int = 16, top_k: int = 4, starts: tuple[int, ...] = (0, 7), seed: int = 0
) -> RoutingTrace:
    """Uneven random routing; later tokens like some experts better than earlier ones do."""
    draw = np.random.default_rng(seed)
    liking = draw.normal(size=(layers, experts)) + np.linspace(0, 1, n)[:, None, None] * draw.normal(
        size=(layers, experts)
    )
    chosen = np.argsort(-(liking + draw.gumbel(size=(n, layers, experts))), axis=2)[:, :, :top_k]
    return RoutingTrace(
        model="a model",
        model_hash="",
        architecture="none",
        layers=tuple(range(1, layers + 1)),
        n_experts=experts,
        tokens=draw.integers(0, 1000, n).astype(np.int32),
        experts=chosen.astype(np.uint8 if experts <= 256 else np.uint16),
        weights=draw.random((n, layers, top_k)).astype(np.float16),
        starts=np.array(starts, np.int64),
        source="nowhere, ünïcode",
        tool="test 1",
        tokens_at_once=0,
        synthetic="random",
    )


def assert_same(one: RoutingTrace, other: RoutingTrace) -> None:
    for field in dataclasses.fields(RoutingTrace):
        a, b = getattr(one, field.name), getattr(other, field.name)
        assert (a.dtype == b.dtype and np.array_equal(a, b)) if isinstance(a, np.ndarray) else a == b, field.name


# The file


@pytest.mark.parametrize("experts", [16, 256, 257])
def test_what_is_written_is_read(experts: int, tmp_path: Path) -> None:
    trace = synthetic(experts=experts)
    trace.write(tmp_path / "a.trace")
    read = RoutingTrace.read(tmp_path / "a.trace")
    assert_same(read, trace)
    assert read.top_k == 4
    assert list(read.texts()) == [slice(0, 7), slice(7, 60)]
    assert os.listdir(tmp_path) == ["a.trace"]


def test_equal_traces_are_equal_files_that_numpy_reads(tmp_path: Path) -> None:
    for name in "ab":
        synthetic().write(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with np.load(tmp_path / "a") as members:
        header = json.loads(members["header"].tobytes())
    assert (header["format"], header["version"], header["synthetic"]) == ("moestream routing trace", 1, "random")


def test_100_000_tokens_of_8_layers_with_4_of_32_experts_are_under_8_megabytes(tmp_path: Path) -> None:
    synthetic(2000, layers=8, experts=32).write(tmp_path / "a.trace")
    assert (tmp_path / "a.trace").stat().st_size < 2000 * 80


def rewritten(path: Path, **changes: Any) -> None:
    """Writes a sound trace with some members or keys of the header changed; None leaves one out."""
    trace = synthetic()
    buffer = io.BytesIO()
    trace.write(path)
    with np.load(path) as members:
        arrays = dict(members)
    header = json.loads(arrays["header"].tobytes())
    for name, value in changes.items():
        target = header if name in header or name.startswith("key_") else arrays
        if value is None:
            del target[name]
        else:
            target[name] = value
    if "header" not in changes:
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(buffer, **arrays)
    path.write_bytes(buffer.getvalue())


def changed(name: str, where: Any, value: Any) -> Any:
    array = np.array(getattr(synthetic(), name))
    array[where] = value
    return array


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"version": 2}, "a routing trace of version 2, and this moestream reads version 1"),
        ({"format": "something"}, "not a routing trace: its header does not say so"),
        ({"header": None}, "not a routing trace: it has no header"),
        ({"weights": None}, "not a routing trace: it has no weights"),
        ({"header": np.frombuffer(b"{not json", np.uint8)}, "a truncated or damaged routing trace"),
        ({"extra": np.zeros(3)}, "has a member that no routing trace has, 'extra'"),
        ({"key_more": 1}, "its header has an unknown 'key_more'"),
        ({"synthetic": None}, "its header lacks 'synthetic'"),
        ({"n_experts": "16"}, "'n_experts' in its header is '16'"),
        ({"n_experts": True}, "'n_experts' in its header is True"),
        ({"n_experts": 0}, "it says 0 experts"),
        ({"n_experts": 15}, r"expert 15 of token \d+ in layer \d does not exist: there are 15"),
        ({"layers": [1, "2", 3]}, "'layers' in its header is"),
        ({"layers": [1, 3, 2]}, r"its layers \[1, 3, 2\] do not ascend"),
        ({"layers": [1, 2]}, r"experts are of shape \(60, 3, 4\), with 60 tokens, 2 layers"),
        ({"layers": []}, "it holds no layers"),
        ({"tokens": np.zeros(59, np.int32)}, r"experts are of shape \(60, 3, 4\), with 59 tokens"),
        ({"tokens": np.zeros(60, np.int64)}, "tokens are int64 in 1 dimensions, not int32"),
        ({"tokens": changed("tokens", 3, -1)}, "token -1 does not exist"),
        ({"experts": np.zeros((60, 12), np.uint8)}, "experts are uint8 in 2 dimensions"),
        ({"experts": synthetic().experts.astype(np.uint16)}, "experts are uint16 in 3 dimensions, not uint8"),
        ({"experts": changed("experts", (5, 1), 7)}, "token 5 has an expert twice in layer 2"),
        ({"weights": np.zeros((60, 3, 3), np.float16)}, r"weights are of shape \(60, 3, 3\)"),
        ({"weights": changed("weights", (9, 2, 0), np.nan)}, "a weight of token 9 in layer 3 is not finite"),
        ({"starts": np.array([0, 60])}, "the starts of its texts do not ascend from 0 to the last of 60 tokens"),
        ({"starts": np.array([1, 7])}, "the starts of its texts do not ascend"),
        ({"starts": np.array([0, 7, 7])}, "the starts of its texts do not ascend"),
        ({"starts": np.array([], np.int64)}, "the starts of its texts do not ascend"),
        ({"weights": np.array([object()])}, "a truncated or damaged routing trace"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_file_that_breaks_the_format_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.trace"
    rewritten(path, **changes)
    with pytest.raises(TraceError, match=message) as raised:
        RoutingTrace.read(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "record" in str(raised.value)  # the remedy


def test_a_rewritten_file_is_otherwise_sound(tmp_path: Path) -> None:
    rewritten(tmp_path / "a.trace")
    assert_same(RoutingTrace.read(tmp_path / "a.trace"), synthetic())


def test_a_truncated_or_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.trace"
    synthetic().write(path)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[whole.index(b"experts.npy") + 80] ^= 0xFF
    for data in (*(whole[:n] for n in (4, 100, len(whole) // 2, len(whole) - 1)), bytes(damaged)):
        path.write_bytes(data)
        with pytest.raises(TraceError, match="bad.trace: a truncated or damaged routing trace; record it again"):
            RoutingTrace.read(path)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    for name, data in (("empty", b""), ("text", b"Once upon a time"), ("model", b"GGUF\x03")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(TraceError, match=f"{name}: not a routing trace; `moestream trace record` makes one"):
            RoutingTrace.read(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(TraceError, match="not a routing trace: it has no header"):
        RoutingTrace.read(tmp_path / "zip")
    with pytest.raises(TraceError, match="none.trace: cannot be read: No such file or directory"):
        RoutingTrace.read(tmp_path / "none.trace")


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(TraceError, match="folder: cannot be written: Is a directory"):
        synthetic().write(tmp_path / "folder")
    (tmp_path / "old.trace").write_bytes(b"old")

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        synthetic().write(tmp_path / "old.trace")
    assert sorted(os.listdir(tmp_path)) == ["folder", "old.trace"]
    assert (tmp_path / "old.trace").read_bytes() == b"old"


# Recording


@contextlib.contextmanager
def loaded(path: Path, cache: int | None = None, *, policy: str = "lru", **options: Any) -> Iterator[Llama]:
    """Plain kernels and the smallest cache, or a given one; nothing guessed, so that hits are those of the policy alone."""
    cache = cache or describe(path).minimum_cache_bytes
    streaming = ExpertStreaming(kernels="plain", reader="pread", cache=cache, policy=policy, prefetch="off")
    options = {"n_ctx": 128, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **options}
    with contextlib.closing(Llama(str(path), expert_streaming=streaming, **options)) as llm:
        yield llm


PROPERTIES: dict[str, dict[str, Any]] = {
    "qwen3moe": {},
    "smallthinker": {"experts": 300, "topk": 5, "ff": 32},
    "afmoe": {},  # sigmoid, normalised and scaled, a dense layer first, a shared expert
    "deepseek2": {"merged_gate_up": True},  # weights as the softmax gives them
    "llama4": {},  # weights before the experts, experts in every other layer
    "grovemoe": {},  # a second set of experts in each layer
    "gpt-oss": {},  # softmax of the chosen, biases
}
LAYERS = {"afmoe": (1, 2, 3), "deepseek2": (1, 2, 3), "llama4": (1, 3)}


@pytest.mark.parametrize("arch", PROPERTIES)
def test_a_trace_is_what_the_engine_used_whatever_the_batch_and_the_cache(arch: str, folder: Path) -> None:
    path = make(folder, arch, **PROPERTIES[arch])
    with loaded(path) as llm:
        decoded = record_routing(llm, [LONG, SHORT], tokens_at_once=1)
        stats = llm.expert_stats()
        # one by one, each choice is one lookup, and the replay of the trace finds what the engine found
        assert stats.hits + stats.misses == decoded.experts.size
        share = stats.slots_total / (len(decoded.layers) * decoded.n_experts)
        assert routing_statistics(decoded, cached_shares=[share]).lru[0].hit_rate == stats.hits / decoded.experts.size
        assert stats.hits > 0

        together = [record_routing(llm, [LONG, SHORT], tokens_at_once=16)]
    with loaded(path, cache=describe(path).maximum_cache_bytes, n_ubatch=7) as llm:
        together.append(record_routing(llm, [LONG, SHORT]))
        # together, each expert of a layer is looked up once per batch, and read once
        stats = llm.expert_stats()
        batches = [
            decoded.experts[i : min(i + 7, end)] for first, end in ((0, 50), (50, 70)) for i in range(first, end, 7)
        ]
        lookups = sum(len(np.unique(batch[:, i])) for batch in batches for i in range(len(decoded.layers)))
        assert (stats.hits + stats.misses, stats.misses) == (lookups, routing_statistics(decoded).used)
    assert [trace.tokens_at_once for trace in (decoded, *together)] == [1, 16, 7]
    for trace in together:
        assert np.array_equal(trace.experts, decoded.experts)
        assert np.allclose(trace.weights, decoded.weights, rtol=2e-3, atol=1e-5)

    assert decoded.layers == LAYERS.get(arch, (0, 1, 2, 3))
    assert (decoded.n_experts, decoded.top_k) == (PROPERTIES[arch].get("experts", 8), PROPERTIES[arch].get("topk", 2))
    assert decoded.tokens.tolist() == LONG + SHORT and decoded.starts.tolist() == [0, 50]
    assert all(len(np.unique(decoded.experts[:, i])) > 4 for i in range(len(decoded.layers)))
    if arch not in ("deepseek2", "llama4"):
        total = 1.5 if arch == "afmoe" else 1.0
        assert np.allclose(decoded.weights.astype(float).sum(axis=2), total, atol=2e-3)
        assert decoded.weights.std() > 0.02 or arch == "smallthinker"  # whose sharp sigmoids all say 1 here


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("policy", ["lru", "lfu", "lrfu"])
def test_the_simulator_finds_what_the_engine_finds_by_every_policy(policy: str, share: float, folder: Path) -> None:
    path = make(folder, experts=32, topk=4)
    with loaded(path, round(describe(path).maximum_cache_bytes * share), policy=policy, logits_all=True) as llm:
        trace = record_routing(llm, [LONG * 2, SHORT * 3], tokens_at_once=1)
        stats = llm.expert_stats()
        llm.eval(LONG)
        bits = llm.scores[: llm.n_tokens].tobytes()
    assert stats.policy == policy
    simulated = simulate(trace, cache=stats.slots_total, policy=["lru", "lfu", "lrfu"]).runs
    assert {run.policy: run.hits for run in simulated}[policy] == stats.hits
    assert len({run.hits for run in simulated}) == 3, "the policies differ here"
    with loaded(path, describe(path).maximum_cache_bytes, logits_all=True) as llm:
        llm.eval(LONG)
        assert llm.scores[: llm.n_tokens].tobytes() == bits


@pytest.mark.parametrize("gating", ["sigmoid", "softmax"])
def test_smallthinkers_first_router_is_that_of_the_embedding(gating: str, folder: Path) -> None:
    path = make(folder, "smallthinker", experts=32, topk=4, gating=gating)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    embedding = gguf.quants.dequantize(tensors["token_embd.weight"].data, tensors["token_embd.weight"].tensor_type)
    logits = embedding[LONG] @ tensors["blk.0.ffn_gate_inp.weight"].data.T
    scores = (
        1 / (1 + np.exp(-logits)) if gating == "sigmoid" else np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    )
    chosen = np.argsort(-logits, axis=1)[:, :4]
    weights = np.take_along_axis(scores, chosen, 1)
    weights /= weights.sum(axis=1, keepdims=True)
    with loaded(path) as llm:
        trace = record_routing(llm, [LONG])
    assert np.array_equal(trace.experts[:, 0], chosen)
    assert np.allclose(trace.weights[:, 0], weights, atol=1e-3)
    assert not np.array_equal(trace.experts[:, 1], chosen)
    assert weights.std() > (0.1 if gating == "softmax" else 0)


def test_texts_are_independent_of_each_other_and_of_what_the_model_evaluated(model: Path) -> None:
    with loaded(model, n_ubatch=4, logits_all=True) as llm:
        llm.eval(LONG)
        assert record_routing(llm, [LONG], tokens_at_once=50).tokens_at_once == 50
        trace = record_routing(llm, [LONG, SHORT, LONG])
        assert np.array_equal(trace.experts[:50], trace.experts[70:])
        assert np.array_equal(trace.weights[:50], trace.weights[70:])
        llm.eval(SHORT)
        after = llm.scores[: llm.n_tokens].copy()
        llm.reset()
        llm.eval(LONG)
        llm.eval(SHORT)
        assert np.array_equal(after, llm.scores[: llm.n_tokens])


def test_a_long_text_is_cut_and_each_piece_begins_as_texts_begin(model: Path) -> None:
    with loaded(model) as llm:
        trace = record_routing(llm, ["The library is open.", b"Yes."], context=8, source="two texts")
        begin = llm.token_bos()
        assert [trace.tokens[text][0] for text in trace.texts()] == [begin] * 4
        assert [text.stop - text.start for text in trace.texts()] == [8, 8, 7, 5]
        assert llm.detokenize(trace.tokens[trace.tokens != begin].tolist()) == b"The library is open.Yes."
        pieces = record_routing(llm, [LONG], context=20)
        assert pieces.starts.tolist() == [0, 20, 40] and pieces.tokens.tolist() == LONG
        assert record_routing(llm, [LONG * 6]).starts.tolist() == [0, llm.n_ctx()]
    assert trace.source == "two texts" and trace.synthetic == "" and trace.tool.startswith("moestream ")


def test_the_model_is_told_by_name_and_hash_of_all_its_shards(folder: Path) -> None:
    path = make(folder, split=2)
    shards = [file.path for file in describe(path).files]
    assert len(shards) == 2
    parts = (
        b"".join((len(data).to_bytes(8, "little"), data, data)) for data in (shard.read_bytes() for shard in shards)
    )
    with loaded(path) as llm:
        trace = record_routing(llm, [SHORT])
    assert (trace.model, trace.architecture) == (describe(path).name, "qwen3moe")
    assert trace.model_hash == hashlib.sha256(b"".join(parts)).hexdigest()


def test_an_adapter_is_applied(model: Path) -> None:
    with loaded(model) as llm:
        without = record_routing(llm, [LONG])
    adapter = lora(model)
    with loaded(model, lora_path=str(adapter)) as llm:
        adapted = record_routing(llm, [LONG])
        assert llm.expert_stats().tokens == len(LONG)
    assert not np.array_equal(without.experts, adapted.experts)
    with loaded(model, lora_path=str(adapter), lora_scale=1e-6) as llm:
        assert np.allclose(record_routing(llm, [LONG]).weights, without.weights, atol=2e-3)


def test_what_cannot_be_recorded_is_refused(model: Path) -> None:
    with contextlib.closing(Llama(str(model), n_ctx=64, n_threads=1, verbose=False)) as llm:
        with pytest.raises(
            OptionError, match="^only streamed models are traced: load this one with expert_streaming=True"
        ):
            record_routing(llm, [LONG])
    with loaded(model) as llm:
        for texts, options, message in (
            ([], {}, "there is no text to record"),
            (["", []], {}, "there is no text to record"),
            ([[5, llm.n_vocab()]], {}, f"token {llm.n_vocab()} does not exist: this model has {llm.n_vocab()}"),
            ([[-1]], {}, "token -1 does not exist"),
            ([LONG], {"context": 0}, "context=0: at least one token is needed"),
            ([LONG], {"tokens_at_once": 0}, "tokens_at_once=0: at least one token is needed"),
            (
                ["a"],
                {"context": 1},
                "context=1: this model begins texts with a token of its own: at least 2 are needed",
            ),
        ):
            with pytest.raises(OptionError, match=message):
                record_routing(llm, texts, **options)


def test_a_model_without_experts_is_refused(folder: Path, tmp_path: Path) -> None:
    run = trace_command(
        "record", "-m", make(folder, leading_dense=4, arch="bailingmoe2"), "-f", __file__, "-o", tmp_path / "a"
    )
    assert run.returncode == 1
    assert "experts" in run.stderr and len(run.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_progress_counts_tokens_and_may_end_the_recording(model: Path) -> None:
    told: list[tuple[int, int]] = []
    with loaded(model) as llm:
        record_routing(llm, [LONG, SHORT], tokens_at_once=32, progress=lambda *now: told.append(now))
        assert told == [(0, 70), (32, 70), (50, 70), (70, 70)]

        def stop(done: int, total: int) -> None:
            if done:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            record_routing(llm, [LONG], tokens_at_once=8, progress=stop)
        assert len(record_routing(llm, [SHORT]).tokens) == 20


def test_an_expert_that_cannot_be_read_ends_the_recording_only(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    whole = make(folder, experts=32).read_bytes()
    path.write_bytes(whole)
    with loaded(path) as llm:
        os.truncate(path, len(whole) // 2)
        with pytest.raises(ExpertReadError, match="model.gguf"):
            record_routing(llm, [LONG])
        path.write_bytes(whole)
        assert len(record_routing(llm, [LONG]).tokens) == 50


def test_a_graph_that_does_not_tell_its_routing_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded(model) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(_capture, "_WEIGHTED", re.compile(rb"ffn_moe_weighted-([012])"))
            with pytest.raises(ModelError, match=r"its routing .* in layers \[0, 1, 2, 3\], weighted in \[0, 1, 2\]"):
                record_routing(llm, [SHORT])
        rows = _capture._rows
        monkeypatch.setattr(_capture, "_rows", lambda *args: rows(*args)[:-1])
        with pytest.raises(ModelError, match=r"the choice of layer 0 is of shape \(19, 2\), not \(20, 2\)"):
            record_routing(llm, [SHORT])


# Statistics


def brute_lru(trace: RoutingTrace, size: int) -> float:
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = 0
    for token in trace.experts.tolist():
        for layer, experts in enumerate(token):
            wanted = [(layer, expert) for expert in experts]
            present = [key for key in wanted if key in cache]
            hits += len(present)
            for key in wanted:
                cache[key] = None
                cache.move_to_end(key)
            while len(cache) > size:  # never of those just asked for: they were moved to the end
                cache.popitem(last=False)
    return hits / trace.experts.size


def brute_reuse(trace: RoutingTrace, layer: int, window: int) -> tuple[float, float]:
    """Reuse as it is, and by chance."""
    counts = Counter(trace.experts[:, layer].ravel().tolist())
    taken = {expert: count / len(trace.tokens) for expert, count in counts.items()}
    found, chance = [], []
    for text in trace.texts():
        rows = trace.experts[text, layer].tolist()
        for i in range(1, len(rows)):
            before = {expert for row in rows[max(0, i - window) : i] for expert in row}
            found.append(sum(expert in before for expert in rows[i]) / trace.top_k)
            depth = min(i, window)
            chance.append(sum(p * (1 - (1 - p) ** depth) for p in taken.values()) / trace.top_k)
    return float(np.mean(found)), float(np.mean(chance))


@pytest.mark.parametrize(
    "trace",
    [
        synthetic(),
        synthetic(n=200, layers=2, experts=7, top_k=1, starts=(0, 1, 2, 5, 100, 199), seed=1),
        synthetic(n=150, layers=5, experts=300, top_k=8, starts=(0,), seed=2),
        synthetic(n=40, layers=1, experts=4, top_k=4, seed=3),
    ],
    ids=["16/4", "7/1", "300/8", "4/4"],
)
def test_statistics_equal_those_counted_one_by_one(trace: RoutingTrace) -> None:
    total = len(trace.layers) * trace.n_experts
    sizes = range(trace.top_k, total + 1, max(1, total // 40))
    statistics = routing_statistics(trace, cached_shares=[size / total for size in sizes])
    assert [lru.experts for lru in statistics.lru] == list(sizes)
    assert [lru.hit_rate for lru in statistics.lru] == pytest.approx([brute_lru(trace, size) for size in sizes])
    assert [lru.holds_a_token for lru in statistics.lru] == [size >= len(trace.layers) * trace.top_k for size in sizes]
    for i, layer in enumerate(statistics.layers):
        assert layer.layer == trace.layers[i]
        counts = [Counter(trace.experts[:, i].ravel().tolist())[expert] for expert in range(trace.n_experts)]
        fair = len(trace.tokens) * trace.top_k / trace.n_experts
        assert layer.load == pytest.approx([count / fair for count in counts])
        assert layer.starved == sum(count < 0.2 * fair for count in counts)
        shares = [count / sum(counts) for count in counts if count]
        assert layer.entropy == pytest.approx(-sum(p * np.log(p) for p in shares) / np.log(trace.n_experts))
        assert (layer.reused_last, layer.chance_last) == pytest.approx(brute_reuse(trace, i, 1))
        assert (layer.reused_window, layer.chance_window) == pytest.approx(brute_reuse(trace, i, 8))
    assert statistics.reused_last == pytest.approx(np.mean([layer.reused_last for layer in statistics.layers]))
    assert statistics.used == len(
        {(i, expert) for row in trace.experts.tolist() for i, some in enumerate(row) for expert in some}
    )
    assert (statistics.tokens, statistics.texts, statistics.experts) == (len(trace.tokens), len(trace.starts), total)


def test_a_cache_of_all_experts_misses_each_once() -> None:
    statistics = routing_statistics(synthetic(n=400))
    assert statistics.lru[-1].share == 1
    assert statistics.lru[-1].hit_rate == pytest.approx(1 - statistics.used / (400 * 3 * 4))
    assert [lru.hit_rate for lru in statistics.lru] == sorted(lru.hit_rate for lru in statistics.lru)


def test_texts_of_one_token_have_no_reuse() -> None:
    statistics = routing_statistics(synthetic(n=3, starts=(0, 1, 2)))
    assert np.isnan([statistics.reused_last, statistics.reused_window, statistics.chance_window]).all()
    value = statistics.as_dict()
    assert value["reused_last"] is None and value["layers"][0]["reused_window"] is None
    json.dumps(value, allow_nan=False)


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(OptionError, match="is no share of the experts"):
        routing_statistics(synthetic(), cached_shares=[0.5, share])


# The command


def trace_command(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PYTHON, "trace", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        **options,
    )


def called(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = cli.main(["trace", *map(str, args)])
    return code, *capsys.readouterr()


def test_record_writes_what_the_python_interface_records(model: Path, tmp_path: Path) -> None:
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    texts[0].write_bytes(b"The library is open. \xff \n")
    texts[1].write_text("Yes.")
    run = trace_command(
        *("record", "-m", model, "-f", texts[0], "-f", texts[1], "-o", tmp_path / "out.trace", "-t", 1),
        *("--kernels", "plain", "--reader", "pread", "-ub", 4),
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert run.stdout.startswith(f"{tmp_path / 'out.trace'}: 32 tokens of 2 texts in ")
    trace = RoutingTrace.read(tmp_path / "out.trace")
    assert (trace.source, trace.tokens_at_once) == ("a.txt, b.txt", 4)
    with loaded(model) as llm:
        expected = record_routing(llm, [path.read_bytes() for path in texts])
    assert np.array_equal(trace.tokens, expected.tokens) and np.array_equal(trace.experts, expected.experts)
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.txt", "out.trace"]


def test_show_prints_tables_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.trace"
    trace = synthetic()
    trace.write(path)
    code, out, err = called(capsys, "show", path)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    statistics = routing_statistics(trace)
    assert out.splitlines()[0] == "a model (none)"
    assert "  experts  16 in each of layers 1-3, 4 used for a token\n" in out
    assert "  text     60 tokens in 2 texts, from nowhere, ünïcode\n" in out
    assert "  made     by test 1, not recorded from a model: random\n" in out
    layer = statistics.layers[1]
    figures = [f"{layer.entropy:.1%}", f"{layer.reused_last:.1%}", f"{layer.reused_window:.1%}"]
    assert ["2", f"{min(layer.load):.2f}", f"{max(layer.load):.2f}", str(layer.starved), *figures] in lines
    assert ["mean", f"{statistics.reused_last:.1%}", f"{statistics.reused_window:.1%}"] in lines
    assert ["chance", f"{statistics.chance_last:.1%}", f"{statistics.chance_window:.1%}"] in lines
    assert ["50%", "24", f"{statistics.lru[5].hit_rate:.1%}"] in lines
    assert ["5%", "2", "-", *"cannot hold the experts of one token".split()] in lines
    assert max(map(len, out.splitlines())) <= 80

    code, out, err = called(capsys, "show", path, "--json")
    value = json.loads(out)
    assert (code, err) == (0, "")
    assert value["statistics"] == json.loads(json.dumps(statistics.as_dict()))
    assert (value["n_experts"], value["top_k"], value["synthetic"]) == (16, 4, "random")
    assert value["size_bytes"] == path.stat().st_size


def test_alone_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(capsys)
    assert (code, err) == (0, "")
    assert out.startswith("usage: moestream trace") and "record" in out and "show" in out


@pytest.mark.parametrize("command", ["record", "show", "synthesise"])
def test_help_fits_a_narrow_terminal(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        called(capsys, command, "--help")
    assert ended.value.code == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize(
    "args, message",
    [
        (["replay"], "moestream trace: error: argument COMMAND: invalid choice: 'replay'"),
        (["show"], "moestream trace show: error: the following arguments are required: FILE"),
        (["show", "a", "--layers"], "moestream trace show: error: unrecognized arguments: --layers"),
        (["record", "-f", "a"], "moestream trace record: error: the following arguments are required: -o/--output"),
        (["record", "-f", "a", "-o", "b", "--exp", "3GiB"], "error: unrecognized arguments: --exp 3GiB"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_refused(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        called(capsys, *args)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and len(err.splitlines()) == 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"-f": "none.txt"}, "cannot read the text none.txt: No such file or directory"),
        ({"-f": "/dev/null"}, "the text /dev/null is empty: leave it out"),
        ({"-o": "none/a.trace"}, "--output none/a.trace: there is no folder none; make it first"),
        ({"-o": "/"}, "--output /: is a folder; name a file in it"),
        ({"-ub": "0"}, "--ubatch-size 0: give a number of at least 1"),
        ({"-m": "none.gguf"}, "none.gguf: "),
    ],
    ids=lambda value: " ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_what_record_cannot_do_is_told_in_a_line(
    options: dict[str, str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"-m": str(model), "-f": __file__, "-o": str(tmp_path / "a.trace"), **options}
    code, out, err = called(capsys, "record", *(item for option in options.items() for item in option))
    assert (code, out) == (1, "")
    assert err.startswith(f"moestream: error: {message}") and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_ctrl_c_writes_nothing_and_says_so(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text("The library is open. " * 20_000)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # one without a size shows no bars
    args = ["trace", "record", "-m", str(model), "-f", str(text), "-o", "a.trace", "-t", "1", "-ub", "8"]
    with subprocess.Popen(
        [*PYTHON, *args], stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL, cwd=tmp_path
    ) as process:
        os.close(theirs)
        shown = _read_until(ours, lambda shown: b"recording" in shown)
        process.send_signal(signal.SIGINT)
        shown += _read_until(ours, lambda shown: False)
        assert process.wait(20) == 130
    os.close(ours)
    assert b"moestream: interrupted: a.trace was not written" in shown
    assert b"Traceback" not in shown
    assert os.listdir(tmp_path) == ["long.txt"]


def _read_until(fd: int, enough: Callable[[bytes], bool]) -> bytes:
    """What a terminal shows until there is enough of it, or its other side is closed."""
    shown = b""
    with contextlib.suppress(OSError):  # how a pseudo-terminal tells its end
        while not enough(shown) and (data := os.read(fd, 4096)):
            shown += data
    return shown
