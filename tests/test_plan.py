"""`moestream plan`: shapes from headers near and far, forecasts that can be worked out by hand, and what it says."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fake_hub
import moestream
from factory import make
from fake_hub import REPO
from moestream import (
    CacheTooSmallError,
    MeasurementError,
    ModelError,
    ModelShape,
    OptionError,
    Plan,
    RoutingTrace,
    TraceError,
    cli,
    describe,
    model_shape,
    plan,
)
from moestream.layout.gguf_file import header_is_whole, open_gguf
from moestream.planner import remote
from moestream.planner.forecast import forecast
from moestream.planner.machine import Machine
from moestream.planner.routing import Routing, routing_for
from moestream.planner.shape import PRESETS, shape_of
from moestream.probing import KernelRate, Probe, ReadRate
from moestream.synthesis import transferred_trace

GIB = 1 << 30
SMALL = {"layers": 4, "experts": 16, "top_k": 2, "d_model": 256, "expert_ff": 128, "vocab": 1000, "heads": 8}
SMALL |= {"kv_heads": 2, "head_dim": 32}


def made_up_probe(**values: Any) -> Probe:
    """A machine of round numbers: weights at 1 GB/s, the disk at 100 MB/s, nothing else takes time."""
    disk = values.pop("disk", 1e8)
    low = values.pop("low", disk)
    fields: dict[str, Any] = {
        "machine": {"cpu": "a processor"},
        "disk": {},
        "path": "",
        "when": "2030-01-02T03:04:05Z",
        "seconds": 20.0,
        "reader": "pread",
        "reads": (ReadRate(1 << 20, 4, "random", True, disk, low, 0.001),),
        "burst_bytes_per_s": disk,
        "memory_bytes_per_s": 1e10,
        "threads": 2,
        "kernels": tuple(KernelRate("Q4_0", weights, "plain", 2, 1e9) for weights in ("dense", "experts")),
        "layer_overhead_s": 0.0,
        "width_s": 0.0,
        "token_overhead_s": 0.0,
        "attention_values_per_s": 1e18,
        "read_cpu_s_per_byte": 0.0,
        "memory_bytes": 4 * GIB,
        "available_bytes": 2 * GIB,
        "verdict": (),
    }
    return Probe(**fields | values)


def routing(shape: ModelShape, tokens: int = 120, seed: int = 0) -> Routing:
    """Uneven routing with some reuse, as if recorded from the model."""
    draw = np.random.default_rng(seed)
    size = (shape.moe_layers, shape.experts)
    scores = draw.normal(size=size) + draw.normal(size=(tokens, *size))
    chosen = np.argsort(-scores, axis=2)[..., : shape.top_k].astype(np.uint8)
    trace = RoutingTrace(
        model="a model",
        model_hash="",
        architecture="",
        layers=tuple(range(shape.moe_layers)),
        n_experts=shape.experts,
        tokens=np.zeros(tokens, np.int32),
        experts=chosen,
        weights=np.ones(chosen.shape, np.float16),
        starts=np.zeros(1, np.int64),
        source="",
        tool="test",
        tokens_at_once=0,
        synthetic="",
    )
    return Routing(trace, "a test", own=True)


@pytest.fixture(autouse=True)
def no_probe_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests found out about this machine is not known here, whichever run first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def small() -> ModelShape:
    return model_shape(**SMALL)


# Shapes


@pytest.mark.parametrize("arch", ["qwen3moe", "smallthinker", "deepseek2", "gpt-oss", "gemma4"])
def test_shape_of_a_file_is_what_describe_says(folder: Path, arch: str) -> None:
    path = make(folder, arch)
    shape, described = shape_of(path), describe(path)
    for name in (
        "architecture",
        "layers",
        "dense_bytes",
        "bytes_on_disk",
        "minimum_cache_bytes",
        "maximum_cache_bytes",
        "laid",
    ):
        assert getattr(shape, name) == getattr(described, name), name
    layer = described.moe_layers[0]
    assert (shape.moe_layers, shape.experts, shape.top_k) == (
        len(described.moe_layers),
        layer.experts,
        described.experts_used,
    )
    assert shape.expert_bytes == pytest.approx(layer.expert_bytes)
    assert shape.all_expert_bytes == pytest.approx(described.expert_bytes)
    assert shape.reads == len(layer.matrices) and shape.read_bytes == pytest.approx(layer.expert_bytes / shape.reads)
    assert 0 < sum(shape.dense_types.values()) + sum(shape.output_types.values()) <= shape.dense_bytes
    assert shape.routed_before_attention == (arch == "smallthinker")


def test_dense_weights_are_told_by_type_without_the_rows_that_are_not_touched(folder: Path) -> None:
    path = make(folder, "qwen3moe", "Q8_0")
    shape, tensors = shape_of(path), open_gguf(path).tensors
    sizes = {tensor.name: tensor.size_bytes for tensor in tensors}
    assert shape.output_types == {"Q8_0": sizes["output.weight"]}
    untouched = sizes["token_embd.weight"] + sizes["output.weight"]
    assert sum(shape.dense_types.values()) == sum(s for n, s in sizes.items() if "_exps" not in n) - untouched


def test_tied_embeddings_are_the_output(folder: Path) -> None:
    path = make(folder, "qwen3moe", tied=True)
    embedding = next(t for t in open_gguf(path).tensors if t.name == "token_embd.weight")
    assert sum(shape_of(path).output_types.values()) == embedding.size_bytes


def test_laid_file_is_one_read_an_expert_and_the_same_model(folder: Path, tmp_path: Path) -> None:
    stock = make(folder, "qwen3moe")
    laid = tmp_path / "laid.gguf"
    moestream.convert(stock, laid, progress=False)
    shape, of_stock = shape_of(laid), shape_of(stock)
    record = describe(laid).moe_layers[0].record_bytes
    assert (shape.laid, shape.reads, shape.read_bytes, shape.slot_bytes) == (True, 1, record, record)
    for name in (
        "dense_types",
        "output_types",
        "expert_types",
        "attention_widths",
        "kv_bytes",
        "heads",
        "vocabulary",
        "d_model",
    ):
        assert getattr(shape, name) == getattr(of_stock, name), name


def test_split_model_is_all_its_shards(folder: Path) -> None:
    whole, split = shape_of(make(folder, "qwen3moe")), shape_of(make(folder, "qwen3moe", split=3))
    for name in ("dense_types", "output_types", "expert_types", "dense_bytes"):
        assert getattr(split, name) == getattr(whole, name), name


def test_keys_and_values_are_kept_for_all_tokens(folder: Path) -> None:
    shape = shape_of(make(folder, "qwen3moe"))
    assert shape.kv_bytes == (2 * 2 * 32 * 2,) * 4, "2 heads of 32, keys and values, two bytes each"
    assert shape.kv_cache_bytes(1000) == 4 * 256 * 1000
    thinker = model_shape("smallthinker-21b")
    assert thinker.attention_values(16384) == 28 * 128 * 52 * 16384
    assert thinker.kv_cache_bytes(16384) == 2 * 4 * 128 * 2 * 52 * 16384


def test_llama_cpp_keeps_all_tokens_of_a_window(folder: Path) -> None:
    """What `kv_cache_bytes` counts on; where this is no more so, windows save memory."""
    with contextlib.closing(moestream.Llama(str(make(folder, "gpt-oss", window=128)), n_ctx=512, verbose=False)) as llm:
        assert llm.context_params.swa_full


def test_preset_is_the_published_model() -> None:
    """By the sizes that `tools/make_model --shape qwen3-30b-a3b` and `moestream inspect` give."""
    shape = model_shape("qwen3-30b-a3b")
    assert shape.expert_bytes == 3 * 884736
    assert shape.all_expert_bytes == 48 * 128 * 3 * 884736
    assert shape.dense_bytes == pytest.approx(868.65 * 2**20, rel=0.001)
    assert shape.kv_cache_bytes(4096) == 384 * 2**20
    assert model_shape("smallthinker-4b").dense_bytes == pytest.approx(237053952, rel=0.001)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_can_be_had_in_another_type(name: str) -> None:
    assert model_shape(name, type="q8_0").bytes_on_disk > 1.8 * model_shape(name).bytes_on_disk


def test_typed_in_sizes_are_a_shape_and_what_is_assumed_is_said() -> None:
    shape = model_shape(layers=48, experts=128, top_k=8, d_model=2048, expert_ff=768, dense_bytes=12345)
    assert shape.expert_bytes == 3 * 884736 and shape.dense_bytes == 12345
    assert shape.notes == ("assumed: 16 heads of 128, 2 of keys and values; a vocabulary of 151,936",)
    assert model_shape(**SMALL).notes == ()


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {},
            r"which model\? Give a GGUF file, -hf USER/REPO, one of qwen3-30b-a3b, .*--layers, --experts, .* are missing",
        ),
        ({"layers": 4, "experts": 8, "top_k": 2, "d_model": 64}, r"its sizes: --expert-ff is missing"),
        ({**SMALL, "top_k": 17}, "--top-k=17: a token cannot use more than the 16 experts"),
        ({**SMALL, "layers": 0}, "--layers=0: give a number of at least 1"),
        ({**SMALL, "layers": 10**7}, "--layers=10000000 of --experts="),
        ({**SMALL, "type": "Q3"}, "--type=Q3: no type of ggml; Q4_0, "),
        ({**SMALL, "d_model": 250}, "--d-model=250: rows of so many values cannot be Q4_0, whose blocks have 32"),
        ({**SMALL, "hf_repo": "a/b"}, "both -hf and another model or sizes are given"),
        ({"hf_file": "a.gguf"}, "--hf-file names a file in a repository: give that with -hf"),
    ],
)
def test_shape_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        model_shape(**options)


def test_name_of_nothing_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(
        ModelError, match="^qwen4: no such file, and none of the names that are known here: qwen3-30b-a3b, "
    ):
        model_shape("qwen4")


def test_sizes_do_not_go_with_a_file(model: Path) -> None:
    with pytest.raises(OptionError, match="^--top-k: .* has its own sizes; leave out one of the two"):
        model_shape(model, top_k=2)


def test_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"no model, but long enough to be read")
    with pytest.raises(ModelError, match="a.gguf.*GGUF"):
        plan(tmp_path / "a.gguf", probe=made_up_probe())


# Headers from the Hub


@pytest.fixture(scope="module")
def on_the_hub(folder: Path) -> dict[str, Path]:
    """A model whose weights are 30 times its header, and one in two shards."""
    first = make(folder, "qwen3moe", "Q8_0", split=2)
    return {
        "m-Q4_0.gguf": make(folder, "qwen3moe", experts=64, d=256, ff=256, heads=8),
        "Q8_0/m-Q8_0-00001-of-00002.gguf": first,
        "Q8_0/m-Q8_0-00002-of-00002.gguf": first.with_name(first.name.replace("-00001-", "-00002-")),
    }


@pytest.fixture
def sent() -> list[int]:
    return []


@pytest.fixture
def hub(
    on_the_hub: dict[str, Path], sent: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    with fake_hub.serving(on_the_hub, sent=sent) as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address)
        yield


def test_remote_model_is_known_by_its_header_alone(
    hub: None, on_the_hub: dict[str, Path], sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_BYTES", 1024)
    path = on_the_hub["m-Q4_0.gguf"]
    header = open_gguf(path).data_offset
    shape = model_shape(hf_repo=f"{REPO}:Q4_0")
    pieces = sent[-5:]
    assert pieces[:4] == [1024, 1024, 2048, 4096], "twice as many each time"
    assert header <= shape.fetched_bytes == sum(pieces) <= 2 * header < path.stat().st_size / 10
    assert sum(sent) < shape.fetched_bytes + 1000, "beside the list of files"
    assert re.fullmatch(rf"header of {REPO}, m-Q4_0.gguf: [\d.]+ KiB read, nothing downloaded", shape.origin)
    local = shape_of(path)
    assert dataclasses.replace(shape, origin="", fetched_bytes=0) == dataclasses.replace(local, origin="", path=None)


def test_all_shards_of_a_remote_model_are_asked(hub: None, on_the_hub: dict[str, Path]) -> None:
    shape = model_shape(hf_repo=REPO, hf_file="Q8_0/m-Q8_0-00001-of-00002.gguf")
    local = shape_of(on_the_hub["Q8_0/m-Q8_0-00001-of-00002.gguf"])
    assert shape.origin.startswith(f"2 headers of {REPO}, Q8_0/m-Q8_0-00001-of-00002.gguf: ")
    assert dataclasses.replace(shape, origin="", fetched_bytes=0) == dataclasses.replace(local, origin="", path=None)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"this is no model at all, but long enough", rf"^{REPO}/x.gguf: .*GGUF"),
        (b"", rf"^{REPO}/x.gguf: .*GGUF"),
    ],
)
def test_remote_file_that_is_no_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    monkeypatch.setattr("moestream._hub.read_range", lambda repo, file, begin, end: (content[begin:end], len(content)))
    with pytest.raises(ModelError, match=message):
        remote.remote_shape(REPO, ["x.gguf"])


def test_remote_header_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One key, an array of a billion empty strings."""
    key = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 8, 1 << 30)
    monkeypatch.setattr(remote, "_MOST_BYTES", 1 << 21)
    monkeypatch.setattr(
        "moestream._hub.read_range", lambda repo, file, begin, end: ((key + bytes(end))[begin:end], 1 << 40)
    )
    with pytest.raises(
        ModelError, match=f"^{REPO}, x.gguf: its header does not end within 2.00 MiB: no sound GGUF file$"
    ):
        remote.remote_shape(REPO, ["x.gguf"])


def test_server_that_gives_whole_files_only_is_told(
    on_the_hub: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hub.serving(on_the_hub, parts=False) as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        with pytest.raises(
            ModelError, match=f"^{REPO}, m-Q4_0.gguf: the server does not give parts of files; download"
        ):
            remote.remote_shape(REPO, ["m-Q4_0.gguf"])


def test_beginning_of_a_file_knows_whether_the_header_is_whole(model: Path) -> None:
    data = model.read_bytes()
    end = open_gguf(model).data_offset
    assert [header_is_whole(data[:size]) for size in (0, 3, 24, end // 2)] == [False] * 4
    assert header_is_whole(data[:end])
    assert header_is_whole(b"no model")


# Routing


def test_given_routing_is_the_model_s_own(small: ModelShape, tmp_path: Path) -> None:
    routing(small).trace.write(tmp_path / "a.trace")
    found = routing_for(small, tmp_path / "a.trace")
    assert found.own and found.source == "a.trace: 120 tokens of a model"
    assert np.array_equal(found.trace.experts, routing(small).trace.experts)


def test_long_routing_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: ModelShape) -> None:
    monkeypatch.setattr(sys.modules["moestream.planner.routing"], "_MOST_ACCESSES", 8 * 50)
    routing(small).trace.write(tmp_path / "a.trace")
    assert len(routing_for(small, tmp_path / "a.trace").trace.tokens) == 50


def test_routing_of_another_shape_is_refused(small: ModelShape, tmp_path: Path) -> None:
    routing(model_shape(**{**SMALL, "layers": 3})).trace.write(tmp_path / "a.trace")
    with pytest.raises(
        OptionError, match="a.trace: is of 3 layers with 2 of 16 experts, and a shape typed in has 4 with 2 of 16; give"
    ):
        routing_for(small, tmp_path / "a.trace")
    with pytest.raises(TraceError, match="cannot be read"):
        plan(small, probe=made_up_probe(), trace=tmp_path / "none.trace")


@pytest.mark.parametrize(
    "name, like",
    [("smallthinker-4b", "smallthinker-4b"), ("qwen3-30b-a3b", "qwen3-30b-a3b"), ("mixtral-8x7b", "mixtral")],
)
def test_made_up_routing_is_that_published_of_the_nearest_model(name: str, like: str) -> None:
    preset = moestream.synthesis.PRESETS[like]
    found = routing_for(dataclasses.replace(model_shape(name), layers=2, moe_layers=2))
    assert not found.own and found.source.startswith(f"made up like {like}: ")
    assert moestream.routing_statistics(found.trace).reused_last == pytest.approx(preset.reused_last, abs=0.03)
    assert found.trace.experts.shape[1:] == (2, preset.top_k) and found.trace.n_experts == preset.experts


def test_locality_of_another_shape_is_that_of_its_scores() -> None:
    """OLMoE, 8 of 64: a token shares 37% of its experts with the one before (docs/trace.md)."""
    found = routing_for(model_shape(**{**SMALL, "experts": 64, "top_k": 8}))
    assert found.source.startswith("made up like smallthinker-21b: ")
    assert moestream.routing_statistics(found.trace).reused_last == pytest.approx(0.37, abs=0.02)


def test_preset_s_own_shape_has_the_preset_s_own_routing() -> None:
    shape = {"layers": 32, "experts": 32, "top_k": 4}
    found = transferred_trace(like="smallthinker-4b", **shape, tokens=50, seed=3)
    fitted = moestream.synthesise_trace(like="smallthinker-4b", tokens=50, seed=3)
    assert np.array_equal(found.experts, fitted.experts)
    assert found.synthetic == "scores fitted to smallthinker-4b; seed 3"


@pytest.mark.parametrize("experts, top_k", [(2, 1), (8, 1), (8, 7), (16, 4), (64, 16), (128, 1), (512, 22)])
def test_every_shape_has_a_made_up_routing(experts: int, top_k: int) -> None:
    found = routing_for(model_shape(**{**SMALL, "experts": experts, "top_k": top_k, "layers": 2}))
    assert found.trace.experts.shape[1:] == (2, top_k) and found.trace.n_experts == experts


def test_model_that_uses_all_its_experts_has_nothing_to_plan() -> None:
    with pytest.raises(OptionError, match="^a shape typed in uses all 16 experts of a layer for every token"):
        routing_for(model_shape(**{**SMALL, "top_k": 16}))


# Forecasts, worked out by hand


def test_with_all_in_memory_a_token_takes_what_computing_takes(small: ModelShape) -> None:
    found = forecast(small, Machine(made_up_probe()), routing(small), 64, depth=1)
    weights = 4 * 2 * small.expert_bytes + sum(small.dense_types.values()) + sum(small.output_types.values())
    assert (found.hit_rate, found.read_bytes, found.wait_s, found.ahead) == (1.0, 0.0, 0.0, (1.0, 1.0))
    assert found.compute_s == pytest.approx(1e-9 * weights)
    assert found.tokens_per_s == found.on_demand_tokens_per_s == pytest.approx(1e9 / weights, rel=1e-3)
    assert found.low == pytest.approx(found.tokens_per_s / 1.1, rel=1e-3), "computing may take a tenth more"
    assert found.high == pytest.approx(found.tokens_per_s * 1.1, rel=1e-3)


def test_on_a_slow_disk_a_token_takes_what_reading_takes(small: ModelShape) -> None:
    found = forecast(small, Machine(made_up_probe(disk=1e6)), routing(small), 16, depth=1)
    assert found.read_bytes == pytest.approx((1 - found.hit_rate) * 8 * small.slot_bytes)
    assert found.read_s == pytest.approx(found.read_bytes / 1e6)
    assert found.on_demand_tokens_per_s == pytest.approx(1 / found.read_s, rel=0.01)
    assert found.wait_s == pytest.approx(found.read_s, rel=0.01)


def test_hit_rate_is_that_of_a_warm_cache(small: ModelShape) -> None:
    own = routing(small)
    found = forecast(small, Machine(made_up_probe()), own, 32, depth=1)
    twice = moestream.simulate(own.twice(), cache=32, policy="lrfu").runs[0]
    once = moestream.simulate(own.trace, cache=32, policy="lrfu").runs[0]
    assert found.hit_rate == pytest.approx((twice.hits - once.hits) / once.wanted)
    assert found.hit_rate > once.hit_rate


def test_speed_rises_with_cache_and_disk(small: ModelShape) -> None:
    own = routing(small)

    def speeds(disk: float) -> list[float]:
        return [
            forecast(small, Machine(made_up_probe(disk=disk)), own, n, depth=1).tokens_per_s
            for n in (8, 16, 32, 48, 64)
        ]

    slow, fast = speeds(1e7), speeds(1e8)
    for row in (slow, fast):
        assert row == sorted(row) and row[0] < row[-1]
    assert all(a < b for a, b in zip(slow[:-1], fast[:-1], strict=True))
    assert slow[-1] == pytest.approx(fast[-1])


def test_disk_that_is_asked_for_is_the_most_there_is(small: ModelShape) -> None:
    own, probe = routing(small), made_up_probe(disk=1e8, low=5e7)
    assert forecast(small, Machine(probe, disk=10**7), own, 16, depth=1).disk == 1e7
    assert forecast(small, Machine(probe, disk=10**9), own, 16, depth=1).disk == 1e8
    steady = forecast(small, Machine(made_up_probe(disk=1e8)), own, 16, depth=1)
    falls = forecast(small, Machine(probe), own, 16, depth=1)
    assert falls.tokens_per_s == steady.tokens_per_s and falls.low < steady.low and falls.high == steady.high


def test_disk_gives_more_the_more_is_asked_of_it_at_once(small: ModelShape) -> None:
    """Between the depths measured, in their logarithm; a stock file asks for three reads an expert."""
    reads = tuple(ReadRate(1 << 20, depth, "random", True, rate, rate, 0.001) for depth, rate in ((1, 1e8), (16, 5e8)))
    machine = Machine(made_up_probe(reads=(*reads, ReadRate(1 << 20, 1, "sequential", True, 9e9, 9e9, 0.001))))
    one_read = dataclasses.replace(small, reads=1)
    assert [machine.disk_rate(one_read, n).usual for n in (0.5, 1, 4, 16, 99)] == pytest.approx(
        [1e8, 1e8, 3e8, 5e8, 5e8]
    )
    assert machine.disk_rate(small, 4 / 3).usual == pytest.approx(3e8)


def test_reading_costs_the_processor_too(small: ModelShape) -> None:
    own = routing(small)
    free = forecast(small, Machine(made_up_probe()), own, 16, depth=1)
    paid = forecast(small, Machine(made_up_probe(read_cpu_s_per_byte=1e-9)), own, 16, depth=1)
    assert paid.compute_s - free.compute_s == pytest.approx(1e-9 * free.read_bytes)


def test_rows_of_a_stock_file_are_interleaved_when_they_arrive(small: ModelShape) -> None:
    rates = made_up_probe().kernels
    machine = Machine(made_up_probe(kernels=(*rates, dataclasses.replace(rates[1], kernels="interleaved"))))

    def computing(shape: ModelShape, machine: Machine, read_bytes: float) -> float:
        return machine.costs(shape, depth=1, top_k=2, read_bytes=read_bytes).token_s

    def price(shape: ModelShape, machine: Machine) -> float:
        return computing(shape, machine, 1e9) - computing(shape, machine, 0)

    assert price(small, machine) == pytest.approx(0.1)
    assert price(dataclasses.replace(small, laid=True), machine) == pytest.approx(0)
    assert price(small, Machine(made_up_probe())) == pytest.approx(0), "there are no such kernels"


def test_costs_of_a_token_are_split_where_its_experts_are_wanted(small: ModelShape) -> None:
    probe = made_up_probe(layer_overhead_s=1e-3, token_overhead_s=5e-3, attention_values_per_s=1e6)
    costs = Machine(probe).costs(small, depth=100, top_k=2)
    dense, output = sum(small.dense_types.values()), sum(small.output_types.values())
    assert costs.experts_s == pytest.approx(2e-9 * small.expert_bytes)
    assert costs.attention_s == pytest.approx(dense / 4 * 1e-9 + 1e-3 + 8 * 32 * 100 / 1e6)
    assert costs.rest_s == pytest.approx(1e-9 * output + 5e-3)
    assert costs.token_s == pytest.approx(4 * costs.layer_s + costs.rest_s)


def test_known_experts_hide_behind_attention(small: ModelShape) -> None:
    """Attention takes longer than all reads of a layer: nothing is waited for where the router is asked before it."""
    probe = made_up_probe(layer_overhead_s=10.0)
    own, knows = routing(small), dataclasses.replace(small, routed_before_attention=True)
    guessed, known = (forecast(shape, Machine(probe), own, 16, depth=1) for shape in (small, knows))
    assert known.ahead[0] == known.ahead[1] > 1
    assert known.tokens_per_s == pytest.approx(1 / known.compute_s, rel=1e-3)
    assert guessed.on_demand_tokens_per_s == known.on_demand_tokens_per_s


def test_gain_of_guesses_is_a_range_and_half_of_it_is_counted(small: ModelShape) -> None:
    found = forecast(small, Machine(made_up_probe(disk=1e9)), routing(small), 16, depth=1)
    assert found.ahead[0] == 1.0 < found.ahead[1] < 2
    assert found.tokens_per_s == pytest.approx(found.on_demand_tokens_per_s * found.ahead[1] ** 0.5)
    assert (
        found.low < found.on_demand_tokens_per_s * 1.01
        and found.high > found.on_demand_tokens_per_s * found.ahead[1] * 0.99
    )


# Plans


def planned(shape: ModelShape, **options: Any) -> Plan:
    return plan(shape, **{"probe": made_up_probe(), "context": 64, **options})


def test_memory_is_dense_part_context_buffers_and_cache(small: ModelShape) -> None:
    found = planned(small)
    need = found.memory
    assert need.available_bytes == 2 * GIB, "that of the machine of the probe"
    assert need.kv_bytes == small.kv_cache_bytes(64) and need.dense_bytes == small.dense_bytes
    assert need.fixed_bytes == need.dense_bytes + need.kv_bytes + need.buffer_bytes
    assert need.resident_bytes(1000) == need.fixed_bytes + 1000
    assert planned(small, memory="1GiB").memory.available_bytes == GIB


def test_compute_buffers_are_about_what_llama_cpp_says() -> None:
    """Of `CPU compute buffer size` in its log, in MiB."""
    shape = dataclasses.replace(model_shape("qwen3-30b-a3b"), vocabulary=32000)
    said = {512: 87.0, 4096: 294.0, 16384: 1086.0}
    assert {c: shape.buffer_bytes(c) / 2**20 for c in said} == pytest.approx(said, rel=0.03)
    assert model_shape("smallthinker-4b").buffer_bytes(4096) / 2**20 == pytest.approx(317.8, rel=0.03)


def test_curve_goes_from_10_to_100_percent_and_skips_what_cannot_hold_a_token(small: ModelShape) -> None:
    caches = dict(planned(small).caches)
    assert list(caches) == [share / 10 for share in range(1, 11)]
    assert caches[0.1] is None, "6 of 64, and a token takes 8"
    assert [round(found.cache_share, 1) for found in caches.values() if found] == list(caches)[1:]


def test_recommended_cache_is_the_smallest_that_is_nearly_as_fast_as_all_memory(small: ModelShape) -> None:
    quick = planned(small, probe=made_up_probe(disk=1e12))
    assert quick.chosen is quick.caches[1][1], "with such a disk a token's experts are enough"
    slow = planned(small)
    assert slow.chosen is not None and slow.chosen.cache_share == 1
    fixed = slow.memory.fixed_bytes
    tight = planned(small, memory=fixed + int(small.maximum_cache_bytes * 0.5))
    assert tight.chosen is not None and tight.chosen.cache_share == pytest.approx(0.45, abs=0.02), "a tenth is left"
    assert tight.fits(tight.chosen) and not tight.fits(tight.caches[9][1])


def test_model_without_room_for_a_token_s_experts_does_not_run_and_what_is_missing_is_said(small: ModelShape) -> None:
    fixed = planned(small).memory.fixed_bytes
    found = planned(small, memory=fixed)
    assert found.chosen is None and found.limit is None
    assert found.missing_bytes == pytest.approx(small.minimum_cache_bytes / 0.9, abs=1)
    assert re.match(
        r"Does not run: with the smallest cache it wants [\d.]+ MiB of memory, and [\d.]+ KiB of that is missing\.",
        found.verdict[0],
    )
    enough = planned(small, memory=fixed + found.missing_bytes)
    assert enough.chosen is not None and enough.missing_bytes == 0


def test_fewer_experts_are_named_where_it_does_not_run_otherwise_with_what_they_cost(small: ModelShape) -> None:
    fixed = planned(small).memory.fixed_bytes
    found = planned(small, memory=fixed + int(small.minimum_cache_bytes * 0.7))
    assert found.chosen is None and found.fewer_experts is not None
    assert found.fewer_experts.experts_used == 1 and found.fewer_experts.cache_experts >= 4
    assert found.verdict[1].startswith("With --experts-used 1 instead of 2 it runs: ")
    assert found.verdict[1].endswith("lose quality, steeply where there are few.")


def test_fewer_experts_are_named_where_it_is_slow_and_only_there(small: ModelShape) -> None:
    """With one expert of two a token reads less than half, since more of them are in memory."""
    assert planned(small).fewer_experts is None
    quick = planned(small, cache="30%", probe=made_up_probe(disk=1e6)).chosen
    assert quick is not None
    disk = 1e6 * 1.6 / quick.tokens_per_s  # at which it gives 1.6 tok/s
    slow = planned(
        small, cache="30%", memory=small.maximum_cache_bytes // 3 + quick_fixed(small), probe=made_up_probe(disk=disk)
    )
    assert slow.chosen is not None and slow.chosen.tokens_per_s == pytest.approx(1.6, rel=0.05)
    assert slow.fewer_experts is not None and slow.fewer_experts.experts_used == 1
    assert slow.fewer_experts.tokens_per_s >= 2
    assert slow.verdict[-1].startswith("With --experts-used 1 instead of 2 it is faster: ")


def quick_fixed(shape: ModelShape) -> int:
    return planned(shape, cache="30%").memory.fixed_bytes


def test_cache_that_is_asked_for_is_the_only_one(small: ModelShape) -> None:
    found = planned(small, cache="50%")
    assert len(found.caches) == 1 and found.caches[0][1] is found.chosen
    assert found.chosen is not None and found.chosen.cache_experts == 32
    assert planned(small, cache=int(20.5 * small.slot_bytes)).chosen.cache_experts == 20  # type: ignore[union-attr]
    tight = planned(small, cache="100%", memory=found.memory.fixed_bytes + small.minimum_cache_bytes * 2)
    assert re.match(r"This cache does not fit: [\d.]+ MiB of memory is missing\.", tight.verdict[1])


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"cache": "5%"}, CacheTooSmallError, "--cache=5%: cannot hold the 8 experts of one token; the smallest is "),
        ({"cache": "1KiB"}, CacheTooSmallError, "--cache=1KiB: cannot hold the 8 experts of one token"),
        ({"cache": "x%"}, OptionError, "--cache=x%: expected a size such as 3GiB, or a share such as 30%"),
        ({"cache": "much"}, OptionError, "--cache=much: size 'much': expected"),
        ({"memory": "lots"}, OptionError, "--memory=lots: size 'lots': expected"),
        ({"disk": "-1"}, OptionError, "--disk=-1: size '-1': expected"),
        ({"context": 0}, OptionError, "--context=0: give a number of tokens of at least 1"),
        (
            {"memory_bandwidth": "30G"},
            OptionError,
            "--memory-bandwidth is for a machine without a probe; leave out one",
        ),
        (
            {"memory_bandwidth": "30G", "probe": None},
            OptionError,
            "--memory-bandwidth: the disk must be known too; give",
        ),
        ({"memory_bandwidth": "x", "disk": "1G", "probe": None}, OptionError, "--memory-bandwidth=x: size 'x'"),
        (
            {"probe": None},
            MeasurementError,
            "has not been measured; run `moestream probe` first .*--disk and --memory-bandwidth",
        ),
    ],
)
def test_option_that_is_none_is_refused(
    small: ModelShape, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        planned(small, **options)


def test_probe_is_taken_from_a_file_or_from_the_cache(
    small: ModelShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up_probe().write(tmp_path / "probe.json")
    assert planned(small, probe=tmp_path / "probe.json").machine == "measured on a processor, 2030-01-02"
    monkeypatch.setattr(sys.modules["moestream.planner.planning"], "cached_probe", lambda path: made_up_probe())
    cached = planned(small, probe=None, disk="10M")
    assert cached.machine == "measured on a processor, 2030-01-02; a disk of at most 0.01 GB/s"
    assert cached.memory.available_bytes == pytest.approx(moestream.memory.available_bytes(), rel=0.3), "as it is now"


def test_probe_of_the_model_s_disk_is_asked_for(
    model: Path, small: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def cached(path: str) -> Probe:
        asked.append(path)
        return made_up_probe()

    monkeypatch.setattr(sys.modules["moestream.planner.planning"], "cached_probe", cached)
    planned(shape_of(model), probe=None)
    planned(small, probe=None)
    assert asked == [str(model), "."]


def test_machine_of_two_numbers_is_called_an_assumption(small: ModelShape) -> None:
    found = planned(small, probe=None, disk="1G", memory_bandwidth="30G")
    assert found.machine == "not measured: 1 GB/s from the disk, 30 GB/s from memory"
    assert any(note.startswith("kernels are assumed to read weights at 60%") for note in found.notes)
    measured = planned(small, cache="100%").chosen
    assumed = planned(small, cache="100%", probe=None, disk="1G", memory_bandwidth="30G").chosen
    assert measured is not None and assumed is not None
    assert assumed.high / assumed.low > measured.high / measured.low


def test_what_a_longer_context_does() -> None:
    """Experts of 1.99 MB at 5 GB/s: 0.4 ms each, and attention as long as is made up here."""
    shape = dataclasses.replace(
        model_shape("smallthinker-4b"),
        layers=2,
        moe_layers=2,
        kv_bytes=(1024,) * 2,
        attention_widths=(1536,) * 2,
    )
    values = 1536 * 4096
    attention = 5 * shape.slot_bytes / 5e9
    probe = made_up_probe(disk=5e9, attention_values_per_s=values / attention, available_bytes=8 * GIB)
    shape = dataclasses.replace(shape, dense_types={})
    found = plan(shape, probe=probe, trace=None, cache="100%")
    assert [row.context for row in found.contexts] == [512, 4096, 16384]
    assert [row.hidden for row in found.contexts] == [0, 5, 20]
    first = found.contexts[0]
    assert first.attention_s == pytest.approx(attention / 8)
    assert first.wait_s == pytest.approx(4 * shape.slot_bytes / 5e9), "none is hidden, and a token takes 4"
    assert [row.bubble_s for row in found.contexts] == [0, 0, 0], "all is in memory"
    assert [row.wait_s for row in found.contexts[1:]] == [0, 0]
    speeds = [row.tokens_per_s for row in found.contexts]
    assert speeds == sorted(speeds, reverse=True)


def test_faster_disk_is_named_where_it_helps(small: ModelShape) -> None:
    slow = planned(small, cache="30%", probe=made_up_probe(disk=1e7))
    assert slow.limit == "disk" and slow.faster_disk is not None
    assert slow.faster_disk[0] == 5e9 and slow.faster_disk[1] > 2 * slow.chosen.tokens_per_s  # type: ignore[union-attr]
    assert re.match(
        r"Runs at \d+-\d+ tok/s with a [\d.]+ MiB cache \(30% of the experts\); the disk is the limit; a 5 GB/s SSD would make it \d+\.$",
        slow.verdict[0],
    )
    assert planned(small, cache="100%").faster_disk is None
    assert re.match(
        r"Runs at \d+-\d+ tok/s with every expert in memory \([\d.]+ MiB\); the processor is the limit\.$",
        planned(small, cache="100%").verdict[0],
    )


# The command


def printed(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = cli.main(["plan", *map(str, args)])
    return code, *capsys.readouterr()


@pytest.fixture
def probe_file(tmp_path: Path) -> Path:
    made_up_probe().write(tmp_path / "probe.json")
    return tmp_path / "probe.json"


def test_it_prints_sizes_a_curve_contexts_and_a_verdict(
    model: Path, probe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = printed(capsys, model, "--probe", probe_file)
    assert (code, err) == (0, "")
    for line in (
        rf"  from +header of {model.name}",
        r"  model +4 layers; 2 of 8 experts of [\d.]+ KiB used",
        r"  on disk +[\d.]+ KiB: [\d.]+ KiB of experts, [\d.]+ KiB dense",
        r"  in memory +[\d.]+ KiB dense \+ [\d.]+ MiB for 4,096 tokens \+ [\d.]+ MiB buffers \+ cache",
        r"  available +2.00 GiB; the smallest cache is [\d.]+ KiB",
        r"  machine +measured on a processor, 2030-01-02",
        r"  disk +0.1 GB/s with this model's reads",
        r"  computing +[\d.]+ ms a token, after 512 others",
        r"  routing +made up like mixtral: .*",
        r"cache +size +resident +found +read/token +reading +waiting +tok/s +low-high",
        r" 10% +- .* too small",
        r"100% +.* 100.0% +0 bytes .* recommended",
        r"context +KV cache +attention/layer +hidden +bubble/layer +nothing cached +tok/s",
        r" 4,096 +.* of 2 .*",
        r"Runs at .* the processor is the limit.*",
        r"note: the routing is not this model's: .*",
        r"note: stock layout: an expert is 3 reads; .*",
    ):
        assert re.search(f"^ *{line.strip()}", out, re.MULTILINE), line
    assert max(map(len, out.splitlines())) <= 100


def test_json_is_all_of_it(small: ModelShape, probe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    code, out, err = printed(capsys, *sizes, "--probe", probe_file, "--json", "--context", 64)
    value = json.loads(out)
    assert (code, err) == (0, "")
    assert value == json.loads(json.dumps(planned(small).as_dict()))
    assert list(value) == [
        "model", "context", "depth", "memory", "routing", "machine", "disk", "caches", "chosen", "missing_bytes", "limit", "contexts",
        "fewer_experts", "faster_disk", "notes", "verdict",
    ]  # fmt: skip
    assert set(value["chosen"]) == {
        "cache_experts", "cache_bytes", "cache_share", "experts_used", "hit_rate", "read_bytes", "disk", "read_s", "compute_s",
        "wait_s", "on_demand_tokens_per_s", "ahead", "tokens_per_s", "low", "high", "resident_bytes", "fits",
    }  # fmt: skip
    assert value["caches"][0] == {"share": 0.1, "forecast": None}


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = printed(capsys, "qwen3-30b-a3b")
    assert (code, out) == (1, "")
    assert err.startswith("moestream: error: how fast this machine is has not been measured; run `moestream probe`")
    assert len(err.splitlines()) == 1


def test_its_options_are_the_parameters_of_the_functions() -> None:
    parsed = vars(cli._parser().parse_args(["plan"]))
    parameters = {**inspect.signature(model_shape).parameters, **inspect.signature(plan).parameters}
    assert parsed.keys() - {"command", "parser", "verbose", "json"} == set(parameters)
    for name, parameter in parameters.items():
        assert name == "model" or parsed[name] == parameter.default, name
