"""The sidecar of docs/sidecar.md: its file, its bond to a model, what is imported into it, and its LoRA at work."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from factory import lora, make
from isolation import isolated
from logits import CONTEXT, run, stock, streamed
from moestream import (
    ExpertStreaming,
    Llama,
    ModelError,
    OptionError,
    OutputError,
    SidecarError,
    cli,
    convert,
    export,
)
from moestream._capture import _ffi as ggml_ffi
from moestream._evaluation import evaluating
from moestream.cli.generate import generate
from moestream.layout import ggml
from moestream.sidecar import (
    Base,
    BaseModel,
    Head,
    Heads,
    Lora,
    LoraPair,
    Matrix,
    Sidecar,
    base_hash,
    check_base,
    merge,
    pack,
    read_heads,
    read_lora,
    sidecar_for,
    unpack,
)
from moestream.sidecar.safetensors_file import SafetensorsFile
from moestream.sidecar.unapplied import unapplied
from sidecars import make_heads

D, EXPERTS, TOPK, WIDTH = 128, 32, 2, 64
OWNERS = (0, 2)
PLAIN = ExpertStreaming(kernels="plain")
HASH = "0123456789abcdef" * 4
ATTENTION = (r"attn_[qkv]\.weight", r"attn_output\.weight")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make(folder, experts=EXPERTS)


@pytest.fixture(scope="module")
def other(folder: Path) -> Path:
    """A fine-tune, as it were: the same shape with other weights."""
    return make(folder, experts=EXPERTS, seed=7)


def trained_heads(owners: tuple[int, ...] = OWNERS, width: int = WIDTH, d: int = D) -> dict[str, np.ndarray]:
    """Heads as they are published, by name."""
    random, tensors = np.random.default_rng(1), {}
    for owner in owners:
        for part, shape in (
            ("linear_init", (EXPERTS, d + 2 * EXPERTS)),
            ("fc1", (width, d + 2 * EXPERTS)),
            ("fc2", (EXPERTS, width)),
        ):
            tensors[f"layers.{owner}.{part}.weight"] = random.standard_normal(shape).astype(np.float32) / 8
    return tensors


@pytest.fixture
def heads_file(tmp_path: Path) -> Path:
    path = tmp_path / "heads.safetensors"
    save_file(trained_heads(), path)
    return path


def some_heads(type: int = 8, **change: Any) -> Heads:
    tensors = trained_heads()
    heads = [
        Head.of(
            owner,
            linear=tensors[f"layers.{owner}.linear_init.weight"],
            fc1=tensors[f"layers.{owner}.fc1.weight"],
            fc2=tensors[f"layers.{owner}.fc2.weight"],
            columns=D,
            type=type,
        )
        for owner in OWNERS
    ]
    return Heads(**{"width": WIDTH, "experts": EXPERTS, "columns": D, "top_k": TOPK, "heads": tuple(heads), **change})


def some_lora(name: str = "blk.0.attn_q.weight", *, rank: int = 4, inner: int = D, outer: int = D) -> Lora:
    random = np.random.default_rng(2)
    a = random.standard_normal((rank, inner)).astype(np.float32)
    b = random.standard_normal((outer, rank)).astype(np.float32)
    return Lora(8.0, {name: LoraPair(Matrix.of(a, ggml.F16), Matrix.of(b, ggml.F32))})


def some_sidecar(**change: Any) -> Sidecar:
    about = {"provenance": {"data": "a corpus", "seed": 3}, "quality": {"recall": 0.75, "text": "ä"}}
    return Sidecar(
        **{"base": Base(HASH, "tiny", "qwen3moe"), "heads": some_heads(), "lora": some_lora(), **about, **change}
    )


# The file


def test_what_was_written_is_read(tmp_path: Path) -> None:
    wrote, path = some_sidecar(), tmp_path / "m.sidecar.gguf"
    wrote.write(path)
    read = Sidecar.read(path)
    assert (read.base, read.provenance, read.quality) == (wrote.base, wrote.provenance, wrote.quality)
    assert read.tool.startswith("moestream ") and read.path == path
    assert read.heads is not None and wrote.heads is not None and read.lora is not None and wrote.lora is not None
    assert (read.heads.owners, read.heads.width, read.heads.experts) == (OWNERS, WIDTH, EXPERTS)
    assert (read.heads.columns, read.heads.top_k, read.lora.alpha, read.lora.rank) == (D, TOPK, 8.0, 4)
    found, expected = dict(read.matrices()), dict(wrote.matrices())
    assert list(found) == list(expected) and len(found) == 5 * len(OWNERS) + 2
    for name, matrix in expected.items():
        assert (found[name].type, found[name].ne) == (matrix.type, matrix.ne)
        assert np.array_equal(found[name].data, matrix.data)
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_the_one_that_is_documented(tmp_path: Path) -> None:
    path = tmp_path / "m.sidecar.gguf"
    some_sidecar().write(path)
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert keys.pop("moestream.sidecar.tool").startswith("moestream ")
    assert json.loads(keys.pop("moestream.sidecar.provenance")) == {"data": "a corpus", "seed": 3}
    assert json.loads(keys.pop("moestream.sidecar.quality")) == {"recall": 0.75, "text": "ä"}
    assert keys == {
        "general.architecture": "moestream-sidecar",
        "moestream.sidecar.version": 1,
        "moestream.sidecar.base.hash": HASH,
        "moestream.sidecar.base.name": "tiny",
        "moestream.sidecar.base.architecture": "qwen3moe",
        "moestream.sidecar.heads.owners": list(OWNERS),
        "moestream.sidecar.heads.width": WIDTH,
        "moestream.sidecar.heads.experts": EXPERTS,
        "moestream.sidecar.heads.columns": D,
        "moestream.sidecar.heads.top_k": TOPK,
        "moestream.sidecar.lora.alpha": 8.0,
        "moestream.sidecar.lora.rank": 4,
    }
    tensors = {tensor.name: (tensor.shape.tolist(), tensor.tensor_type.name) for tensor in reader.tensors}
    for owner in OWNERS:
        assert tensors.pop(f"head.{owner}.linear.h") == ([D, EXPERTS], "Q8_0")
        assert tensors.pop(f"head.{owner}.linear.onehot") == ([EXPERTS, 2 * EXPERTS], "Q8_0")
        assert tensors.pop(f"head.{owner}.fc1.h") == ([D, WIDTH], "Q8_0")
        assert tensors.pop(f"head.{owner}.fc1.onehot") == ([WIDTH, 2 * EXPERTS], "Q8_0")
        assert tensors.pop(f"head.{owner}.fc2") == ([WIDTH, EXPERTS], "Q8_0")
    assert tensors == {
        "blk.0.attn_q.weight.lora_a": ([D, 4], "F16"),
        "blk.0.attn_q.weight.lora_b": ([4, D], "F32"),
    }


def test_a_head_computes_what_was_trained() -> None:
    """z of the parts, one-hot parts gathered, is L x + W2 gelu(W1 x) of the whole x = [h, a, b]."""
    tensors, head = trained_heads(), some_heads(ggml.F32).heads[1]
    h, now, before = np.random.default_rng(5).standard_normal(D).astype(np.float32), [3, 30], [7, 3]
    x = np.concatenate([h, np.zeros(2 * EXPERTS, np.float32)])
    x[[D + i for i in now] + [D + EXPERTS + i for i in before]] = 1
    gelu = np.vectorize(lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))))
    linear, fc1, fc2 = (tensors[f"layers.2.{part}.weight"] for part in ("linear_init", "fc1", "fc2"))
    expected = linear @ x + fc2 @ gelu(fc1 @ x)

    rows = now + [EXPERTS + i for i in before]
    hidden = head.fc1_h.values() @ h + head.fc1_onehot.values()[rows].sum(0)
    z = head.linear_h.values() @ h + head.linear_onehot.values()[rows].sum(0) + head.fc2.values() @ gelu(hidden)
    np.testing.assert_allclose(z, expected, rtol=1e-4, atol=1e-5)


def test_a_token_reads_only_the_rows_of_its_experts() -> None:
    heads = some_heads(ggml.F32)
    whole = 4 * (D * EXPERTS + D * WIDTH + WIDTH * EXPERTS)
    assert heads.bytes_per_token() == len(OWNERS) * (whole + 4 * 2 * TOPK * (EXPERTS + WIDTH))
    assert heads.bytes_per_token(1) < heads.bytes_per_token() < heads.size_bytes


def test_rows_that_no_block_divides_stay_f16() -> None:
    random = np.random.default_rng(0)
    linear, fc1 = random.standard_normal((8, 128 + 16)), random.standard_normal((64, 128 + 16))
    head = Head.of(0, linear=linear, fc1=fc1, fc2=random.standard_normal((8, 64)), columns=128, type=8)
    types = {name.partition("0.")[2]: matrix.type_name for name, matrix in head.parts()}
    assert types == {"linear.h": "Q8_0", "linear.onehot": "F16", "fc1.h": "Q8_0", "fc1.onehot": "F16", "fc2": "Q8_0"}


def written(path: Path, change: Callable[[dict[str, Any], dict[str, tuple[np.ndarray, str]]], None]) -> Path:
    """A sidecar, written by the gguf package, with what `change` does to its keys and to its tensors as (values, type)."""
    sidecar = some_sidecar()
    assert sidecar.heads is not None and sidecar.lora is not None
    keys: dict[str, Any] = {
        "version": 1,
        "base.hash": HASH,
        "base.name": "tiny",
        "base.architecture": "qwen3moe",
        "tool": "tests",
        "provenance": "{}",
        "quality": "{}",
        "heads.owners": list(OWNERS),
        "heads.width": WIDTH,
        "heads.experts": EXPERTS,
        "heads.columns": D,
        "heads.top_k": TOPK,
        "lora.alpha": 8.0,
        "lora.rank": 4,
    }
    tensors = {name: (matrix.values(), matrix.type_name) for name, matrix in sidecar.matrices()}
    change(keys, tensors)
    writer = gguf.GGUFWriter(path, keys.pop("general.architecture", "moestream-sidecar"))
    for name, value in keys.items():
        key = f"moestream.sidecar.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, (values, type) in tensors.items():
        number = gguf.GGMLQuantizationType[type]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_of_another_writer_is_read(tmp_path: Path) -> None:
    read = Sidecar.read(written(tmp_path / "other.gguf", lambda keys, tensors: None))
    assert read.tool == "tests" and read.heads is not None and read.heads.owners == OWNERS


def _nan(tensors: dict[str, tuple[np.ndarray, str]], name: str, value: float) -> None:
    values, type = tensors[name]
    values = values.copy()
    values[1, 2] = value
    tensors[name] = (values, "F16" if type == "Q8_0" else type)


def _as(tensors: dict[str, tuple[np.ndarray, str]], name: str, type: str) -> None:
    tensors[name] = (tensors[name][0], type)


DAMAGE: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a later version": (
        lambda k, t: k.update(version=2),
        "version 2, this moestream reads version 1: update moestream",
    ),
    "version 0": (lambda k, t: k.update(version=0), "version 0, which never was"),
    "an adapter": (
        lambda k, t: k.update({"general.architecture": "qwen3moe"}),
        "is no sidecar but a GGUF of the archi",
    ),
    "no hash": (lambda k, t: k.pop("base.hash"), "lacks the key moestream.sidecar.base.hash"),
    "a short hash": (lambda k, t: k.update({"base.hash": "12"}), "base.hash is '12', no SHA-256"),
    "a hash that is a number": (lambda k, t: k.update({"base.hash": 12}), "base.hash is u32, which it must not be"),
    "an unknown key": (lambda k, t: k.update({"heads.bias": 1}), "has the key moestream.sidecar.heads.bias"),
    "no width": (lambda k, t: k.pop("heads.width"), "lacks the key moestream.sidecar.heads.width"),
    "no rank": (lambda k, t: k.pop("lora.rank"), "lacks the key moestream.sidecar.lora.rank"),
    "no JSON": (lambda k, t: k.update(quality="["), "quality is no JSON object"),
    "a list": (lambda k, t: k.update(provenance="[]"), "provenance is no JSON object"),
    "NaN in JSON": (lambda k, t: k.update(quality='{"a": NaN}'), "quality is no JSON object"),
    "JSON without an end": (lambda k, t: k.update(quality='{"a":' + "[" * 100_000), "quality is no JSON object"),
    "alpha infinite": (lambda k, t: k.update({"lora.alpha": math.inf}), "lora.alpha is inf, which is no positive"),
    "half a head": (lambda k, t: t.pop("head.2.fc1.onehot"), "the head of layer 2 lacks head.2.fc1.onehot"),
    "an owner without a head": (
        lambda k, t: k.update({"heads.owners": [0, 1, 2]}),
        "the head of layer 1 lacks head.1.linear.h, head.1.linear.onehot, head.1.fc1.h",
    ),
    "a head without an owner": (
        lambda k, t: k.update({"heads.owners": [0]}),
        "has head.2.linear.h, but moestream.sidecar.heads.owners does not name layer 2",
    ),
    "owners in disorder": (
        lambda k, t: k.update({"heads.owners": [2, 0]}),
        "owners are [2, 0], not layers in ascending",
    ),
    "an unknown tensor": (lambda k, t: t.update(bias=t["head.0.fc2"]), "has the tensor bias, which no sidecar has"),
    "half a LoRA": (
        lambda k, t: t.pop("blk.0.attn_q.weight.lora_b"),
        "blk.0.attn_q.weight has only one of lora_a and lora_b: blk.0.attn_q.weight.lora_b is missing",
    ),
    "a LoRA without alpha": (
        lambda k, t: [k.pop("lora.alpha"), k.pop("lora.rank")],
        "has blk.0.attn_q.weight.lora_a, but no moestream.sidecar.lora.alpha",
    ),
    "a rank without alpha": (
        lambda k, t: [k.pop("lora.alpha"), [t.pop(f"blk.0.attn_q.weight.lora_{x}") for x in "ab"]],
        "has moestream.sidecar.lora.rank, but no moestream.sidecar.lora.alpha",
    ),
    "another rank": (lambda k, t: k.update({"lora.rank": 8}), "lora.rank is 8, but the largest of its ranks is 4"),
    "a width without heads": (
        lambda k, t: [k.pop("heads.owners"), [t.pop(name) for name in list(t) if "head" in name]],
        "has moestream.sidecar.heads.width, but no moestream.sidecar.heads.owners",
    ),
    "alpha 0": (lambda k, t: k.update({"lora.alpha": 0.0}), "lora.alpha is 0.0, which is no positive number"),
    "another width": (lambda k, t: k.update({"heads.width": 32}), "head.0.fc1.h is 128 x 64, but heads of 128 columns"),
    "more used than there are": (lambda k, t: k.update({"heads.top_k": 33}), "top_k is 33, more than the 32 experts"),
    "no columns": (lambda k, t: k.update({"heads.columns": 0}), "heads.columns is 0"),
    "ranks that differ": (
        lambda k, t: t.update({"blk.0.attn_q.weight.lora_a": (np.ones((3, D), np.float32), "F16")}),
        "blk.0.attn_q.weight.lora_a is 128 x 3 and .lora_b is 4 x 128, which make no product",
    ),
    "NaN in a head": (lambda k, t: _nan(t, "head.2.fc2", math.nan), "head.2.fc2 holds values that are no numbers"),
    "infinity in a LoRA": (
        lambda k, t: _nan(t, "blk.0.attn_q.weight.lora_b", math.inf),
        "blk.0.attn_q.weight.lora_b holds values that are no numbers",
    ),
    "a type of another kind": (
        lambda k, t: _as(t, "head.0.fc2", "Q4_1"),
        "head.0.fc2 is Q4_1, not one of F32, F16, Q8_0",
    ),
    "one-hot parts of two types": (lambda k, t: _as(t, "head.0.fc1.onehot", "F16"), "they must be of one type"),
    "a quantised LoRA": (lambda k, t: _as(t, "blk.0.attn_q.weight.lora_a", "Q8_0"), "is Q8_0, not one of F32, F16"),
    "nothing": (
        lambda k, t: [[k.pop(x) for x in list(k) if "." in x and "base" not in x], t.clear()],
        "neither heads nor",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_is_refused_by_name(what: str, tmp_path: Path) -> None:
    change, message = DAMAGE[what]
    path = written(tmp_path / "damaged.gguf", change)
    with pytest.raises(SidecarError, match=re.escape(message)) as raised:
        Sidecar.read(path)
    assert str(raised.value).startswith(f"{path}: ")


@pytest.mark.parametrize("kind", ["missing", "text", "truncated", "header"])
def test_what_is_no_file_of_this_kind_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.sidecar.gguf"
    some_sidecar().write(path)
    if kind == "missing":
        path.unlink()
    elif kind == "text":
        path.write_text("no sidecar, " * 10)
    else:
        os.truncate(path, 100 if kind == "header" else path.stat().st_size - 100)
    message = {"missing": "No such file", "text": "not a GGUF", "truncated": "truncated: tensor", "header": "damaged"}
    with pytest.raises(SidecarError, match=f"cannot be read as a sidecar: .*{message[kind]}.*; get or pack it again"):
        Sidecar.read(path)


def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"nowhere/m.gguf: cannot be written: No such file"):
        some_sidecar().write(tmp_path / "nowhere" / "m.gguf")
    broken = Heads(WIDTH, EXPERTS, D, TOPK, some_heads().heads[:1] * 2)
    with pytest.raises(SidecarError, match=r"owners are \[0, 0\]"):
        some_sidecar(heads=broken).write(tmp_path / "m.gguf")
    with pytest.raises(SidecarError, match="its quality is nothing that JSON can hold: Out of range float"):
        some_sidecar(quality={"recall": math.nan}).write(tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


# The base


@pytest.mark.parametrize("arch", ["qwen3moe", "smallthinker", "qwen35moe"])
def test_the_hash_survives_what_keeps_the_weights(arch: str, folder: Path, tmp_path: Path) -> None:
    stock_file = make(folder, arch)
    expected = base_hash(stock_file)
    assert re.fullmatch("[0-9a-f]{64}", expected)
    assert base_hash(make(folder, arch, split=3)) == expected
    assert base_hash(make(folder, arch, order="shuffled", alignment=64)) == expected
    convert(stock_file, tmp_path / "laid.gguf", progress=False)
    assert base_hash(tmp_path / "laid.gguf") == expected
    export(tmp_path / "laid.gguf", tmp_path / "back.gguf", progress=False)
    assert base_hash(tmp_path / "back.gguf") == expected


def test_the_hash_survives_neuron_major_matrices(folder: Path, tmp_path: Path) -> None:
    source = make(folder, "smallthinker")
    laid, back = tmp_path / "laid.gguf", tmp_path / "back.gguf"
    convert(source, laid, neuron_major=True, allow_requantize=True, progress=False)
    export(laid, back, progress=False)
    assert base_hash(laid) == base_hash(back) == base_hash(source)


def test_the_hash_tells_models_apart(folder: Path, model: Path, other: Path) -> None:
    hashes = [
        base_hash(path)
        for path in (
            model,
            other,
            make(folder, experts=EXPERTS, type="Q8_0"),
            make(folder, experts=EXPERTS, topk=3),
            make(folder, experts=EXPERTS, expert_types={"down": "Q8_0"}),
            make(folder, experts=EXPERTS, layers=5),
            make(folder, "qwen2moe", experts=EXPERTS),
        )
    ]
    assert len(set(hashes)) == len(hashes)


def test_a_model_without_experts_has_no_hash(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "adapter.gguf"
    shutil.copy(lora(model), path)
    with pytest.raises(ModelError, match="has no routers, so it is no Mixture-of-Experts model"):
        base_hash(path)


def test_a_sidecar_of_another_model_is_refused_unless_forced(
    model: Path, other: Path, heads_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "m.sidecar.gguf"
    pack(model, path, heads=heads_file)
    assert sidecar_for(model, path).base.hash == base_hash(model)
    with pytest.raises(SidecarError) as raised:
        sidecar_for(other, path)
    for part in (str(path), str(other), base_hash(model)[:12], base_hash(other)[:12], "force=True (--force)"):
        assert part in str(raised.value)
    assert sidecar_for(other, path, force=True).heads is not None


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"experts": 16}, "heads are for 32 experts, but layer 0 of .* has 16"),
        ({"d": 256, "heads": 8}, "heads read 128 columns, but the embedding length of .* is 256"),
        ({"layers": 2}, "layer 2 owns a head, but .* has no experts in it: those are in layers 0 to 1"),
        ({"layers": 3}, "layer 3 is what the head of layer 2 predicts, but .* those are in layers 0 to 2"),
        ({"arch": "qwen2moe"}, "is for a model of the architecture qwen3moe .* is qwen2moe"),
    ],
)
def test_force_does_not_make_it_fit(
    shape: dict[str, Any], message: str, model: Path, folder: Path, heads_file: Path
) -> None:
    sidecar = Sidecar(base=BaseModel.open(model).base, heads=read_heads(heads_file, BaseModel.open(model)))
    with pytest.raises(SidecarError, match=message):
        check_base(sidecar, BaseModel.open(make(folder, **{"experts": EXPERTS, **shape})), force=True)


@pytest.mark.parametrize(
    ("name", "inner", "message"),
    [
        ("blk.9.attn_q.weight", D, "has a LoRA of blk.9.attn_q.weight, which .* has not"),
        ("blk.0.attn_q.weight", 64, "is for a matrix of 64 x 128, but that of .* is 128 x 128"),
    ],
)
def test_a_lora_must_fit(name: str, inner: int, message: str, model: Path) -> None:
    with pytest.raises(SidecarError, match=message):
        check_base(some_sidecar(heads=None, lora=some_lora(name, inner=inner)), BaseModel.open(model), force=True)


# Heads that others published


@pytest.mark.parametrize(("type", "steps"), [("F32", 0.0), ("F16", 1 / 2048), ("Q8_0", 1 / 225), ("Q4_0", 1 / 8)])
def test_published_heads_come_back_within_their_rounding(
    type: str, steps: float, model: Path, heads_file: Path, tmp_path: Path
) -> None:
    """Rounding is at most half a step, which is a share of the largest value of a block."""
    path = tmp_path / "m.sidecar.gguf"
    pack(model, path, heads=heads_file, type=type)
    unpack(path, tmp_path / "out")
    found, expected = load_file(tmp_path / "out" / "heads.safetensors"), trained_heads()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.abs(found[name] - values).max() <= steps * np.abs(values).max() * 1.001, name
        assert (found[name] == values).all() == (type == "F32")


HEADS_REFUSED: dict[str, tuple[Callable[[dict[str, np.ndarray]], Any], str]] = {
    "a missing part": (lambda t: t.pop("layers.2.fc2.weight"), "the head of layer 2 lacks layers.2.fc2.weight"),
    "a bias": (
        lambda t: t.update({"layers.2.fc2.bias": np.ones(3, np.float32)}),
        "layers.2.fc2.bias is no part of a head",
    ),
    "another model's": (
        lambda t: t.update({"layers.2.fc1.weight": np.ones((WIDTH, 99), np.float32)}),
        r"layers.2.fc1.weight is \[64, 99\], but heads of width 64 .* have \[64, 192\]",
    ),
    "NaN": (lambda t: t["layers.0.fc1.weight"].fill(math.nan), "layers.0.fc1.weight holds values that are no numbers"),
    "the last layer": (
        lambda t: t.update({name.replace("2", "3", 1): t.pop(name) for name in list(t) if "s.2." in name}),
        "layer 4 is what the head of layer 3 predicts, but .* has no experts in it",
    ),
    "nothing": (lambda t: t.clear(), "holds no heads"),
    "integers": (
        lambda t: t.update({"layers.0.fc2.weight": np.ones((EXPERTS, WIDTH), np.int32)}),
        "layers.0.fc2.weight is I32, not one of F64, F32, F16, BF16",
    ),
}


@pytest.mark.parametrize("what", HEADS_REFUSED)
def test_heads_are_taken_whole_or_refused_by_name(what: str, model: Path, tmp_path: Path) -> None:
    change, message = HEADS_REFUSED[what]
    tensors, path = trained_heads(), tmp_path / "heads.safetensors"
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(SidecarError, match=message):
        pack(model, tmp_path / "m.sidecar.gguf", heads=path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda data: data[:-10],
            r"truncated: layers\.\d\.\w+\.weight ends at byte \d+, the file at \d+; download it again",
        ),
        (lambda data: data[:100], "truncated: its header is .* bytes long, the file 100"),
        (lambda data: b"PK\3\4" * 100, "is no safetensors file"),
        (lambda data: b"", "is no safetensors file"),
        (lambda data: data[:8] + b"!" + data[9:], "its safetensors header is no JSON"),
        (lambda data: struct.pack("<Q", 15) + b'{"a":{"x":"y"}}', "its safetensors header is damaged"),
        (lambda data: data.replace(b"[64,192]", b"[64,193]"), "takes 49152 bytes, its shape 49408"),
    ],
)
def test_damaged_safetensors(damage: Callable[[bytes], bytes], message: str, model: Path, heads_file: Path) -> None:
    heads_file.write_bytes(damage(heads_file.read_bytes()))
    with pytest.raises(SidecarError, match=message):
        read_heads(heads_file, BaseModel.open(model))


def raw_safetensors(path: Path, header: Any, data: bytes = bytes(8)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape: Any = (1, 2), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[" * 200_000, "its safetensors header is no JSON: maximum recursion depth exceeded"),
        ({"a": entry((2**62, 4), (0, 0))}, "a takes 0 bytes, its shape 73786976294838206464; download it again"),
        ({"a": entry((10**30,), (0, 0))}, f"a takes 0 bytes, its shape {4 * 10**30}; download it again"),
        ({"a": entry("12")}, "its safetensors header is damaged ('1' is no length and no place)"),
        ({"a": entry((1.5, 2))}, "its safetensors header is damaged (1.5 is no length and no place)"),
        ({"a": entry((-1, -2))}, "its safetensors header is damaged (-1 is no length and no place)"),
        ({"a": entry((True, 2))}, "its safetensors header is damaged (True is no length and no place)"),
        ({"a": entry(dtype=3)}, "its safetensors header is damaged (3 is no text)"),
        ({"a": entry((2,), (8, 0))}, "a takes -8 bytes, its shape 8; download it again"),
        ({"a": entry(), "b": entry()}, "a and b are in the same bytes; download it again"),
        ({"__metadata__": {"top_k": 4}, "a": entry()}, "its safetensors header is damaged (4 is no text)"),
        ({"__metadata__": [1], "a": entry()}, "its safetensors header is damaged"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_safetensors_header_is_not_taken_on_trust(header: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(SidecarError, match=re.escape(message)):
        SafetensorsFile.open(raw_safetensors(tmp_path / "x.safetensors", header))


def test_bf16_is_read(tmp_path: Path) -> None:
    path, header = tmp_path / "bf16.safetensors", b'{"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes.fromhex("803f 20c0"))
    assert SafetensorsFile.open(path).read("w").tolist() == [1.0, -2.5]


def test_top_k_is_what_the_file_says_or_the_model(model: Path, heads_file: Path) -> None:
    base = BaseModel.open(model)
    assert read_heads(heads_file, base).top_k == TOPK
    save_file(trained_heads(), heads_file, {"top_k": "4"})
    assert read_heads(heads_file, base).top_k == 4
    assert read_heads(heads_file, base, top_k=1).top_k == 1
    for said in ("-1", "x", "9" * 5000):
        save_file(trained_heads(), heads_file, {"top_k": said})
        with pytest.raises(
            SidecarError, match="heads.safetensors: says that its top_k is '.*'; give it with --top-k K"
        ):
            read_heads(heads_file, base)
    for number in (0, -3, EXPERTS + 1):
        with pytest.raises(OptionError, match=f"^--top-k {number}: a token takes 1 to 32 experts of this model$"):
            read_heads(heads_file, base, top_k=number)
    save_file(trained_heads(), heads_file, {"top_k": "0"})
    with pytest.raises(OptionError, match="--top-k 0: a token takes 1 to 32 experts"):
        read_heads(heads_file, base)


def test_heads_without_a_hidden_layer_are_refused(model: Path, heads_file: Path) -> None:
    save_file(trained_heads(width=0), heads_file)
    with pytest.raises(SidecarError, match=r"layers.0.fc1.weight is \[0, 192\], but heads of width 1 for"):
        read_heads(heads_file, BaseModel.open(model))


# LoRA that others published

MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj", "model.layers.3.self_attn.o_proj")
TENSORS = ("blk.0.attn_q.weight", "blk.1.attn_v.weight", "blk.3.attn_output.weight")


def published(
    path: Path,
    modules: tuple[str, ...] = MODULES,
    *,
    base: Path,
    rank: int = 4,
    form: str = "{}.lora_{}.weight",
    **more: np.ndarray,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Writes a LoRA of modules of `transformers`, and returns A and B of each."""
    shapes = {name: BaseModel.open(base).tensors[name][0] for name in BaseModel.open(base).tensors}
    random, pairs, tensors = np.random.default_rng(3), {}, dict(more)
    for module, name in zip(modules, TENSORS, strict=False):
        columns, rows = shapes.get(name, (D, D))[:2]
        pairs[module] = (
            random.standard_normal((rank, columns), np.float32),
            random.standard_normal((rows, rank), np.float32),
        )
        tensors[form.format(module, "A")], tensors[form.format(module, "B")] = pairs[module]
    save_file(tensors, path)
    return pairs


@pytest.mark.parametrize(
    "form",
    [
        "{}.lora_{}",
        "{}.lora_{}.weight",
        "base_model.model.{}.lora_{}.weight",
        "base_model.model.{}.lora_{}.default.weight",
    ],
)
def test_modules_become_the_models_tensors(form: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    pairs = published(path, base=model, form=form)
    found = read_lora(path, BaseModel.open(model), alpha=32)
    assert found.alpha == 32 and set(found.pairs) == set(TENSORS)
    for (a, b), name in zip(pairs.values(), TENSORS, strict=True):
        assert np.array_equal(found.pairs[name].a.values(), a) and np.array_equal(found.pairs[name].b.values(), b)


def test_alpha_must_be_known(model: Path, tmp_path: Path) -> None:
    path, base = tmp_path / "lora.safetensors", BaseModel.open(model)
    published(path, base=model)
    with pytest.raises(OptionError, match=r"does not say with which alpha it was trained: give --alpha N"):
        read_lora(path, base)
    save_file(load_file(path), path, {"lora_alpha": "16"})
    assert read_lora(path, base).alpha == 16
    with pytest.raises(OptionError, match=r"--alpha 3: .* says that it is 16; leave --alpha out"):
        read_lora(path, base, alpha=3)
    with pytest.raises(OptionError, match=r"--alpha 3: .* says itself what its alpha is"):
        read_lora(lora(model), base, alpha=3)


def peft(folder: Path, base: Path, **config: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    folder.mkdir(exist_ok=True)
    told = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "init_lora_weights": True, **config}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return published(folder / "adapter_model.safetensors", base=base, form="base_model.model.{}.lora_{}.weight")


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({}, (2.0, 2.0, 2.0)),
        ({"use_rslora": True}, (4.0, 4.0, 4.0)),
        ({"alpha_pattern": {"q_proj": 4, r"layers\.1\.self_attn\.v_proj": 2}}, (1.0, 0.5, 2.0)),
        ({"r": 16, "rank_pattern": {".*_proj": 4}}, (2.0, 2.0, 2.0)),
    ],
)
def test_a_peft_folder_keeps_its_scales(
    config: dict[str, Any], scales: tuple[float, ...], model: Path, tmp_path: Path
) -> None:
    pairs = peft(tmp_path / "peft", model, **config)
    for path in (tmp_path / "peft", tmp_path / "peft" / "adapter_model.safetensors"):
        found = read_lora(path, BaseModel.open(model))
        for (a, b), name, scale in zip(pairs.values(), TENSORS, scales, strict=True):
            got = found.pairs[name]
            delta = found.alpha / got.rank * (got.b.values() @ got.a.values())
            np.testing.assert_allclose(delta, scale * (b @ a), rtol=1e-5, atol=1e-5)


PEFT_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "LOHA"}, "is an adapter of the kind LOHA; only LORA"),
    "DoRA": ({"use_dora": True}, "use_dora=True changes what a LoRA does"),
    "biases": ({"bias": "all"}, "bias='all': trained biases cannot be applied"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] changes what a LoRA does"),
    "PiSSA": (
        {"init_lora_weights": "pissa_niter_4"},
        "init_lora_weights='pissa_niter_4' changed the weights of the base",
    ),
    "alpha 0": ({"lora_alpha": 0}, "adapter_config.json: its alpha is 0, and a LoRA is taken with one above 0 only"),
    "alpha NaN": ({"lora_alpha": "nan"}, "adapter_config.json: its alpha is nan"),
    "an alpha below 0": ({"alpha_pattern": {"q_proj": -1}}, "adapter_config.json: its alpha is -1"),
    "no pattern": ({"rank_pattern": {"(": 4}}, r"rank_pattern or alpha_pattern is missing or malformed: missing \)"),
    "no rank": ({"r": None}, "r, lora_alpha, rank_pattern or alpha_pattern is missing or malformed"),
    "a rank that is none": (
        {"r": 3},
        "LoRA of model.layers.0.self_attn.q_proj has rank 4, but adapter_config.json says 3",
    ),
}


@pytest.mark.parametrize("what", PEFT_REFUSED)
def test_what_peft_does_besides_is_refused_by_name(what: str, model: Path, tmp_path: Path) -> None:
    config, message = PEFT_REFUSED[what]
    peft(tmp_path / "peft", model, **config)
    with pytest.raises(SidecarError, match=message):
        read_lora(tmp_path / "peft", BaseModel.open(model))


def test_a_peft_folder_that_is_incomplete(model: Path, tmp_path: Path) -> None:
    base, folder = BaseModel.open(model), tmp_path / "peft"
    folder.mkdir()
    with pytest.raises(SidecarError, match="adapter_config.json: cannot be read: No such file.*a PEFT folder has one"):
        read_lora(folder, base)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(SidecarError, match="is no JSON object"):
        read_lora(folder, base)
    (folder / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(SidecarError, match="is no JSON object: maximum recursion depth"):
        read_lora(folder, base)
    peft(folder, model)
    with pytest.raises(OptionError, match="--alpha 3: .*adapter_config.json says what it is"):
        read_lora(folder, base, alpha=3)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(SidecarError, match="holds adapter_model.bin, which may run code"):
        read_lora(folder, base)


ODD = np.ones((4, 4), np.float32)
LORA_REFUSED: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "a norm": ({"model.norm.weight": ODD}, "model.norm.weight is no lora_A or lora_B, and cannot be applied: merge it"),
    "DoRA": ({"x.lora_magnitude_vector": ODD}, "x.lora_magnitude_vector is no lora_A .* it is of DoRA"),
    "an embedding": (
        {"model.embed_tokens.lora_embedding_A": ODD},
        "LoRA of embeddings is taken from adapter GGUFs only",
    ),
    "two of one": (
        {"model.layers.0.self_attn.q_proj.lora_A.default.weight": np.ones((4, D), np.float32)},
        "q_proj.lora_A.default.weight and model.* are both lora_A of model.layers.0.self_attn.q_proj|"
        "q_proj.lora_A.weight and model.* are both lora_A of model.layers.0.self_attn.q_proj",
    ),
    "half a pair": ({"model.layers.1.self_attn.q_proj.lora_B": ODD}, "model.layers.1.self_attn.q_proj has no lora_A"),
    "no product": (
        {"m.lora_A": np.ones((3, 4), np.float32), "m.lora_B": ODD},
        r"m.lora_A is \[3, 4\] and m.lora_B \[4, 4\]",
    ),
    "an unknown module": (
        {"m.lora_A": ODD, "m.lora_B": ODD},
        "m: models of the architecture qwen3moe have no tensor of that",
    ),
    "an expert": (
        {f"model.layers.0.mlp.experts.5.up_proj.lora_{half}": ODD for half in "AB"},
        "model.layers.0.mlp.experts.5.up_proj: LoRA of streamed experts is taken from adapter GGUFs only",
    ),
    "NaN": (
        {f"model.layers.1.self_attn.k_proj.lora_{half}": ODD * np.nan for half in "AB"},
        "k_proj.lora_A holds values that",
    ),
    "a wrong shape": (
        {f"model.layers.1.self_attn.k_proj.lora_{half}": ODD for half in "AB"},
        "LoRA of blk.1.attn_k.weight is for a matrix of 4 x 4, but that of .* is 128 x 64",
    ),
}


@pytest.mark.parametrize("what", LORA_REFUSED)
def test_a_lora_is_applied_whole_or_refused_by_name(what: str, model: Path, tmp_path: Path) -> None:
    more, message = LORA_REFUSED[what]
    path = tmp_path / "lora.safetensors"
    published(path, base=model, **more)
    with pytest.raises(SidecarError, match=message):
        read_lora(path, BaseModel.open(model), alpha=1)


def test_rows_of_unknown_order_are_refused(folder: Path, tmp_path: Path) -> None:
    model, path = make(folder, "dbrx"), tmp_path / "lora.safetensors"
    published(path, base=model)
    with pytest.raises(
        SidecarError, match="order llama.cpp keeps the rows of dbrx models is not known here: convert the adapter"
    ):
        read_lora(path, BaseModel.open(model), alpha=1)


def test_llama_rotates_neighbours(folder: Path, tmp_path: Path) -> None:
    """Of each head of n rows, row i and row i + n/2 become rows 2 i and 2 i + 1, in Q and K and nowhere else."""
    model, path = make(folder, "llama"), tmp_path / "lora.safetensors"
    base, random, tensors = BaseModel.open(model), np.random.default_rng(4), {}
    heads = {"q": 4, "k": 2, "v": 0}
    for name in heads:
        columns, rows = base.tensors[f"blk.1.attn_{name}.weight"][0]
        tensors[f"model.layers.1.self_attn.{name}_proj.lora_A"] = random.standard_normal((4, columns), np.float32)
        tensors[f"model.layers.1.self_attn.{name}_proj.lora_B"] = random.standard_normal((rows, 4), np.float32)
    save_file(tensors, path)
    found = read_lora(path, base, alpha=1)
    for name, n in heads.items():
        b, got = (
            tensors[f"model.layers.1.self_attn.{name}_proj.lora_B"],
            found.pairs[f"blk.1.attn_{name}.weight"].b.values(),
        )
        expected = b.copy()
        length = len(b) // n if n else 0
        for head in range(n):
            for i in range(length // 2):
                expected[head * length + 2 * i] = b[head * length + i]
                expected[head * length + 2 * i + 1] = b[head * length + length // 2 + i]
        assert np.array_equal(got, expected)
        assert np.array_equal(got, b) == (n == 0)


def test_qwen35_lays_value_heads_in_tiles(folder: Path, tmp_path: Path) -> None:
    """Value head j of key head i is at i r + j of r to a key head in `transformers`, and at j (key heads) + i here."""
    model, path = make(folder, "qwen35moe"), tmp_path / "lora.safetensors"
    base, random, tensors = BaseModel.open(model), np.random.default_rng(4), {}
    modules = {
        "in_proj_qkv": "attn_qkv",
        "in_proj_z": "attn_gate",
        "in_proj_a": "ssm_alpha",
        "in_proj_b": "ssm_beta",
        "out_proj": "ssm_out",
    }
    for module, name in modules.items():
        columns, rows = base.tensors[f"blk.0.{name}.weight"][0]
        tensors[f"model.language_model.layers.0.linear_attn.{module}.lora_A"] = random.standard_normal(
            (4, columns), np.float32
        )
        tensors[f"model.language_model.layers.0.linear_attn.{module}.lora_B"] = random.standard_normal(
            (rows, 4), np.float32
        )
    save_file(tensors, path)
    found = read_lora(path, base, alpha=1)
    keys, heads, length = 2, 4, 32  # of the factory's shape: key heads, value heads, length of both
    order = [i * (heads // keys) + j for j in range(heads // keys) for i in range(keys)]
    rows = [head * length + i for head in order for i in range(length)]
    for module, name in modules.items():
        a, b = (tensors[f"model.language_model.layers.0.linear_attn.{module}.lora_{half}"] for half in "AB")
        got = found.pairs[f"blk.0.{name}.weight"]
        if module == "out_proj":
            a = a[:, rows]
        elif module == "in_proj_qkv":
            b = np.concatenate([b[: 2 * keys * length], b[2 * keys * length :][rows]])
        else:
            b = b[rows] if module == "in_proj_z" else b[order]
        assert np.array_equal(got.a.values(), a) and np.array_equal(got.b.values(), b), module


def test_qwen3next_takes_qkvz_apart(folder: Path, tmp_path: Path) -> None:
    model, path = make(folder, "qwen3next"), tmp_path / "lora.safetensors"
    base, random = BaseModel.open(model), np.random.default_rng(4)
    keys, length, values = 2, 32, 64  # key heads, length of a key, values of a key head
    a, b = (
        random.standard_normal((4, D), np.float32),
        random.standard_normal((keys * 2 * (length + values), 4), np.float32),
    )
    module = "model.layers.0.linear_attn.in_proj_qkvz"
    save_file({f"{module}.lora_A": a, f"{module}.lora_B": b}, path)
    found = read_lora(path, base, alpha=1)
    each = [b[k * 2 * (length + values) :][: 2 * (length + values)] for k in range(keys)]
    bounds = [0, length, 2 * length, 2 * length + values, 2 * (length + values)]
    q, k, v, z = (np.concatenate([head[bounds[n] : bounds[n + 1]] for head in each]) for n in range(4))
    assert np.array_equal(found.pairs["blk.0.attn_qkv.weight"].b.values(), np.concatenate([q, k, v]))
    assert np.array_equal(found.pairs["blk.0.attn_gate.weight"].b.values(), z)
    assert np.array_equal(found.pairs["blk.0.attn_gate.weight"].a.values(), a)
    save_file({f"{module}.lora_A": a, f"{module}.lora_B": b[1:]}, path)
    with pytest.raises(SidecarError, match="in_proj_qkvz: B has 383 rows, but the module of this model has 384"):
        read_lora(path, base, alpha=1)


# Adapters of llama.cpp


def test_an_adapter_comes_back_as_it_was(model: Path, tmp_path: Path) -> None:
    adapter, path = lora(model), tmp_path / "m.sidecar.gguf"
    pack(model, path, lora=adapter)
    assert unpack(path, tmp_path / "out") == [tmp_path / "out" / "adapter.gguf", tmp_path / "out" / "provenance.json"]
    one, back = gguf.GGUFReader(adapter), gguf.GGUFReader(tmp_path / "out" / "adapter.gguf")
    assert {t.name: t.data.tobytes() for t in back.tensors} == {t.name: t.data.tobytes() for t in one.tensors}
    for key in ("general.architecture", "general.type", "adapter.type", "adapter.lora.alpha"):
        assert back.fields[key].contents() == one.fields[key].contents()


def adapter_file(path: Path, tensors: dict[str, tuple[np.ndarray, str]], **keys: str | float | list[int]) -> Path:
    writer = gguf.GGUFWriter(path, str(keys.pop("architecture", "qwen3moe")))
    for key, value in {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 2.0, **keys}.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_float32(key, value)
    for name, (values, type) in tensors.items():
        number = gguf.GGMLQuantizationType[type]
        writer.add_tensor(name, gguf.quants.quantize(values, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _pair(name: str, rank: int = 4, type: str = "F32") -> dict[str, tuple[np.ndarray, str]]:
    return {
        f"{name}.lora_a": (np.ones((rank, D), np.float32), type),
        f"{name}.lora_b": (np.ones((D, rank), np.float32), "F32"),
    }


def test_an_adapter_without_alpha_counts_once(model: Path, tmp_path: Path) -> None:
    tensors = {**_pair("blk.0.attn_q.weight", 4), **_pair("blk.1.attn_q.weight", 8, "Q8_0")}
    path = adapter_file(tmp_path / "a.gguf", tensors, **{"adapter.lora.alpha": 0.0})
    found = read_lora(path, BaseModel.open(model))
    for name in ("blk.0.attn_q.weight", "blk.1.attn_q.weight"):
        pair = found.pairs[name]
        delta = found.alpha / pair.rank * (pair.b.values() @ pair.a.values())
        np.testing.assert_allclose(delta, np.full((D, D), pair.rank), rtol=1e-4)


@pytest.mark.parametrize(
    ("tensors", "keys", "message"),
    [
        (_pair("blk.0.attn_q.weight"), {"general.type": "model"}, "is no LoRA adapter: its general.type is 'model'"),
        (
            _pair("blk.0.attn_q.weight"),
            {"architecture": "llama"},
            "is for a model of the architecture llama, but .* is qwen3moe",
        ),
        (
            _pair("blk.0.attn_q.weight"),
            {"adapter.alora.invocation_tokens": [1]},
            "is switched on by tokens of the prompt",
        ),
        (
            {**_pair("blk.0.attn_q.weight"), "blk.0.attn_norm.weight": (np.ones(D, np.float32), "F32")},
            {},
            "blk.0.attn_norm.weight is no lora_a or lora_b, and llama.cpp would ignore it",
        ),
        ({}, {}, "has no lora_a and lora_b"),
        (dict([*_pair("blk.0.attn_q.weight").items()][:1]), {}, "blk.0.attn_q.weight.lora_b is missing"),
    ],
)
def test_an_adapter_is_taken_whole_or_refused(
    tensors: dict[str, Any], keys: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    path = adapter_file(tmp_path / "a.gguf", tensors, **keys)
    with pytest.raises(SidecarError, match=message):
        read_lora(path, BaseModel.open(model))


# The LoRA at work


def packed(model: Path, adapter: Path, tmp_path: Path) -> Path:
    path = tmp_path / "m.sidecar.gguf"
    pack(model, path, lora=adapter)
    return path


def test_a_sidecars_lora_is_the_adapter_bit_for_bit(model: Path, tmp_path: Path) -> None:
    adapter = lora(model)
    expected, _ = streamed(model, PLAIN, lora_path=str(adapter))
    found, _ = streamed(model, PLAIN, prerouter=packed(model, adapter, tmp_path))
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, streamed(model, PLAIN)[0])


def test_where_memory_is_no_file_a_temporary_one_does(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packed(model, lora(model), tmp_path)
    expected, _ = streamed(model, PLAIN, prerouter=path)
    monkeypatch.delattr(os, "memfd_create")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert np.array_equal(streamed(model, PLAIN, prerouter=path)[0], expected)
    assert list(temporary.iterdir()) == []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(SidecarError, match=r"no room for a LoRA of \d+ bytes: No such file or directory; free some"):
        Llama(str(model), expert_streaming=True, prerouter=path, **CONTEXT)


def test_a_laid_model_takes_the_sidecar_of_its_source(model: Path, tmp_path: Path) -> None:
    path = packed(model, lora(model), tmp_path)
    laid = tmp_path / "laid.gguf"
    convert(model, laid, target="plain", progress=False)
    assert np.array_equal(streamed(laid, PLAIN, prerouter=path)[0], streamed(model, PLAIN, prerouter=path)[0])


def merged_by_numpy(model: Path, adapters: list[tuple[Path, float]], out: Path) -> Path:
    shutil.copy(model, out)
    reader = gguf.GGUFReader(out, "r+")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for path, scale in adapters:
        adapter = gguf.GGUFReader(path)
        alpha = adapter.fields["adapter.lora.alpha"].contents()
        halves = {tensor.name: tensor.data for tensor in adapter.tensors}
        for name in [name.removesuffix(".lora_a") for name in halves if name.endswith(".lora_a")]:
            a, b = halves[f"{name}.lora_a"], halves[f"{name}.lora_b"]
            tensors[name].data[:] += scale * alpha / a.shape[-2] * (b @ a)
    reader.data.flush()
    return out


def test_several_adapters_with_scales_are_their_sum(folder: Path, tmp_path: Path) -> None:
    model = make(folder, type="F32")
    first, second = lora(model, ATTENTION, alpha=2.0, seed=1), lora(model, seed=2)
    third = lora(model, ATTENTION, seed=3)
    merged = merged_by_numpy(model, [(first, 0.7), (second, -0.3), (third, 1.0)], tmp_path / "merged.gguf")
    expected = stock(merged, interleaved=False)
    options = {"prerouter": packed(model, third, tmp_path), "lora_scale": -0.3}
    found, _ = streamed(model, PLAIN, lora_path=[(str(first), 0.7), second], **options)
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()
    assert np.abs(found - stock(model, interleaved=False)).max() > 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("scale", [math.nan, -math.inf, 1e39])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_scale_that_is_no_number_is_refused(streaming: bool, scale: float, model: Path) -> None:
    adapter = lora(model, ATTENTION)
    for given in ({"lora_path": str(adapter), "lora_scale": scale}, {"lora_path": [(adapter, scale)]}):
        with pytest.raises(OptionError, match=re.escape(f" is {scale}, which is no number to multiply with")):
            Llama(str(model), expert_streaming=streaming, verbose=False, **given)


def test_what_is_no_adapter_is_not_told_of_as_one(model: Path) -> None:
    with pytest.raises(ModelError, match="llama.cpp cannot load it as a LoRA adapter for .*'adapter'"):
        Llama(str(model), expert_streaming=PLAIN, lora_path=str(model), verbose=False)


def test_a_lora_of_a_router_and_heads_that_route_exclude_each_other(model: Path, heads_file: Path) -> None:
    router = lora(model, (r"ffn_gate_inp\.weight",))
    pack(model, "heads.gguf", heads=heads_file)
    pack(model, "both.gguf", heads=heads_file, lora=router)
    for options in ({"prerouter": "heads.gguf", "lora_path": str(router)}, {"prerouter": "both.gguf"}):
        with pytest.raises(
            ModelError, match="has a LoRA of the router blk.0.ffn_gate_inp.weight, which heads take the place of"
        ):
            Llama(str(model), expert_streaming=PLAIN, verbose=False, **options)
    advised = ExpertStreaming(kernels="plain", sidecar="both.gguf", prerouter="advise")
    Llama(str(model), expert_streaming=advised, n_ctx=32, verbose=False).close()


def test_several_adapters_work_without_streaming(model: Path) -> None:
    first, second = lora(model, ATTENTION, seed=1), lora(model, ATTENTION, seed=2)
    adapters = [(first, 0.5), (second, 0.25)]
    with contextlib.closing(Llama(str(model), lora_path=adapters, **CONTEXT)) as llm:
        together = run(llm)
    assert not np.array_equal(together, stock(model, interleaved=True, lora_path=str(first), lora_scale=0.5))
    assert np.array_equal(together, streamed(model, ExpertStreaming(kernels="interleaved"), lora_path=adapters)[0])


def test_the_command_takes_several_adapters(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = str(lora(model, ATTENTION, seed=1)), str(lora(model, ATTENTION, seed=2))
    texts = []
    for adapters in ((), ("--lora", first), ("--lora", first, "--lora-scaled", f"{second}:0.5")):
        options = ("-m", str(model), "-p", "The library", "-n", "8", "--temp", "0", "-t", "1", "--ignore-eos", "--json")
        assert cli.main(["generate", *options, *adapters]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    found = generate(
        model=model,
        prompt="The library",
        n_predict=8,
        temp=0.0,
        threads=1,
        ignore_eos=True,
        lora=[first, (second, 0.5)],
    )
    assert len(set(texts)) == 3 and found.text == texts[2]


@pytest.mark.parametrize("given", ["adapter.gguf", ":0.5", "adapter.gguf:nan", "adapter.gguf:half"])
def test_a_scale_that_is_none(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", "--lora-scaled", given])
    assert f"{given!r}: give the file and its scale, such as adapter.gguf:0.5" in capsys.readouterr().err


def test_a_context_of_its_own_applies_all_adapters(model: Path, tmp_path: Path) -> None:
    adapter, second = lora(model, ATTENTION), lora(model, ATTENTION, seed=2)
    options = {"expert_streaming": PLAIN, "prerouter": packed(model, adapter, tmp_path), "lora_path": [(second, 0.5)]}
    with contextlib.closing(Llama(str(model), **options, **CONTEXT)) as llm:
        llm.eval([3, 17, 41])
        with evaluating(llm, context=8, tokens_at_once=3) as evaluation:
            evaluation.decode([3, 17, 41], 0)
            assert np.array_equal(evaluation.logits(), llm.scores[:3])


def test_pickling_keeps_adapters_and_sidecar(model: Path, tmp_path: Path) -> None:
    path = packed(model, lora(model, ATTENTION), tmp_path)
    options = {"expert_streaming": PLAIN, "prerouter": path, "lora_path": [(str(lora(model, seed=2)), 0.5)]}
    with contextlib.closing(Llama(str(model), **options, **CONTEXT)) as llm:
        expected, state = run(llm), pickle.dumps(llm)
    with contextlib.closing(pickle.loads(state)) as copy:
        assert np.array_equal(run(copy), expected)


def test_a_sidecar_of_another_model_is_not_loaded(model: Path, other: Path, tmp_path: Path) -> None:
    path = packed(other, lora(other), tmp_path)
    with pytest.raises(SidecarError, match="other weights or another quantisation"):
        Llama(str(model), expert_streaming=True, prerouter=path, **CONTEXT)
    assert streamed(model, PLAIN, prerouter=path, force=True)[0].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prerouter": "m.sidecar.gguf"}, "prerouter= routes a streamed model; it needs expert_streaming"),
        ({"lora_path": [("a", "b")]}, r"expected a path, or a list of paths and of \(path, scale\)"),
        ({"lora_path": [("a", math.nan)]}, "lora_path: the scale of a is nan, which is no number to multiply with"),
        ({"lora_path": 5}, "lora_path=5: expected a path, or a list of paths"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str, model: Path) -> None:
    with pytest.raises(OptionError, match=message):
        Llama(str(model), **options, **CONTEXT)


def test_the_adapter_that_fails_is_named(model: Path, tmp_path: Path) -> None:
    isolated(_second_fails, model, str(lora(model)), str(tmp_path / "none.gguf"))


def _second_fails(model: Path, first: str, second: str) -> None:
    for streaming in (PLAIN, False):
        with pytest.raises(ModelError, match=f"^{re.escape(second)}: llama.cpp cannot load it as a LoRA adapter for"):
            Llama(str(model), expert_streaming=streaming, lora_path=[first, second], **CONTEXT)


# What llama.cpp loads and does not apply


@pytest.mark.parametrize("arch", ["qwen3moe", "deepseek2", "qwen35moe", "kimi-linear", "minimax-m3", "smallthinker"])
def test_it_is_known_which_lora_llama_cpp_applies(arch: str, folder: Path) -> None:
    isolated(_applied, folder, arch)


def _applied(folder: Path, arch: str) -> None:
    """With a LoRA of every matrix: what is not applied in a layer, known or seen, by name but for the layer."""
    model = make(folder, arch)
    adapter = lora(model, [r"^(?!token_embd).*\.weight$"], alpha=0.01)
    names = {
        tensor.name.removesuffix(".lora_a") for tensor in gguf.GGUFReader(adapter).tensors if tensor.name.endswith("a")
    }
    seen = set()

    @llama_cpp.ggml_backend_sched_eval_callback
    def watch(address: int, asks: bool, _: Any) -> bool:
        for source in ggml_ffi.cast("struct ggml_tensor *", address).src:
            if source and (name := ggml_ffi.string(source.name).decode()).endswith(".lora_a"):
                seen.add(name.removesuffix(".lora_a"))
        return False

    with contextlib.closing(llama_cpp.Llama(str(model), lora_path=str(adapter), **CONTEXT)) as llm:
        with evaluating(llm, context=8, tokens_at_once=1, on_node=watch) as evaluation:
            evaluation.decode([3], 0)

    def kinds(names: set[str]) -> list[str]:
        return sorted({re.sub(r"blk\.\d+", "blk.N", name) for name in names})

    assert kinds(set(unapplied(arch, names))) == kinds(names - seen)


def test_a_lora_that_would_be_ignored_is_refused(folder: Path, tmp_path: Path) -> None:
    model = make(folder, "deepseek2")
    adapter = lora(model, [r"attn_q_a\.weight"])
    with pytest.raises(
        SidecarError, match="LoRA of blk.0.attn_q_a.weight, which llama.cpp does not apply in models of the arch"
    ):
        pack(model, tmp_path / "m.sidecar.gguf", lora=adapter)
    with pytest.raises(
        ModelError, match="LoRA of blk.0.attn_q_a.weight, which llama.cpp would not apply in this model"
    ):
        Llama(str(model), expert_streaming=True, lora_path=str(adapter), **CONTEXT)


# Merging


def test_merging_tells_what_is_left(folder: Path, tmp_path: Path) -> None:
    """Of a LoRA below the steps of Q4_0 much is lost, of F32 weights nothing; Q4_0 keeps its types and its other tensors."""
    survives = {}
    for type in ("F32", "Q4_0"):
        model, out = make(folder, type=type), tmp_path / f"{type}.gguf"
        done = merge(
            model, lora(model, ATTENTION, alpha=0.02), out, text="The library is open." * 4, tokens=40, threads=1
        )
        survives[type] = done.survives
        assert done.path == out and done.tokens == 40 and len(done.tensors) == 16
        one, merged = gguf.GGUFReader(model), gguf.GGUFReader(out)
        before = {t.name: (t.tensor_type, t.shape.tolist(), t.data.tobytes()) for t in one.tensors}
        after = {t.name: (t.tensor_type, t.shape.tolist(), t.data.tobytes()) for t in merged.tensors}
        assert [*after] == [*before] and {n: v[:2] for n, v in after.items()} == {n: v[:2] for n, v in before.items()}
        assert {name for name in before if before[name][2] != after[name][2]} <= set(done.tensors)
        assert merged.fields["moestream_merged.survives"].contents() == pytest.approx(done.survives, rel=1e-6)
        assert merged.fields["moestream_merged.lora_tensors"].contents() == list(done.tensors)
    assert survives["F32"] == pytest.approx(1, abs=0.01)
    assert survives["Q4_0"] < 0.8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["F32.gguf", "Q4_0.gguf"]


def test_a_merged_f32_model_is_the_numpy_one(folder: Path, tmp_path: Path) -> None:
    model = make(folder, type="F32", split=2)
    adapter, out = lora(model), tmp_path / "merged.gguf"
    merge(model, packed(model, adapter, tmp_path), out, text="The library", scale=0.5, threads=1)
    whole = make(folder, type="F32")
    expected = gguf.GGUFReader(merged_by_numpy(whole, [(adapter, 0.5)], tmp_path / "numpy.gguf"))
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(out).tensors}
    for tensor in expected.tensors:
        np.testing.assert_allclose(found[tensor.name], tensor.data, rtol=1e-5, atol=1e-5)


def test_embeddings_have_a_and_b_in_each_others_place(folder: Path, tmp_path: Path) -> None:
    """What we merge is what llama.cpp applies: nothing is lost of F32 weights."""
    model, random = make(folder, type="F32"), np.random.default_rng(6)
    rows = BaseModel.open(model).tensors["token_embd.weight"][0][1]
    tensors = {
        "token_embd.weight.lora_a": (random.standard_normal((rows, 4), np.float32), "F32"),
        "token_embd.weight.lora_b": (random.standard_normal((D, 4), np.float32), "F32"),
    }
    sidecar = packed(model, adapter_file(tmp_path / "a.gguf", tensors), tmp_path)
    done = merge(model, sidecar, tmp_path / "merged.gguf", text="The library", threads=1)
    assert done.survives == pytest.approx(1, abs=1e-3) and done.size == pytest.approx(1, abs=1e-3)


def test_what_cannot_be_merged(model: Path, heads_file: Path, tmp_path: Path) -> None:
    adapter, out = lora(model, ATTENTION), tmp_path / "merged.gguf"
    with pytest.raises(OptionError, match="--tokens 0: at least one is needed"):
        merge(model, adapter, out, text="a", tokens=0)
    pack(model, tmp_path / "heads.gguf", heads=heads_file)
    with pytest.raises(SidecarError, match="holds heads but no LoRA: there is nothing to merge"):
        merge(model, tmp_path / "heads.gguf", out, text="a")
    convert(model, tmp_path / "laid.gguf", progress=False)
    with pytest.raises(OptionError, match="is a laid file; merge into the stock file: moestream export"):
        merge(tmp_path / "laid.gguf", adapter, out, text="a")
    out.touch()
    with pytest.raises(OutputError, match="exists already; give another name, or --force"):
        merge(model, adapter, out, text="a")


# The command


def sidecar_command(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = cli.main(["sidecar", *map(str, args)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_pack_inspect_unpack(
    model: Path, other: Path, heads_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, quality = tmp_path / "m.sidecar.gguf", tmp_path / "quality.json"
    quality.write_text('{"recall": 0.9}')
    arguments = ("--heads", heads_file, "--lora", lora(model, ATTENTION), "--quality", quality)
    code, out, err = sidecar_command(capsys, "pack", "-m", model, *arguments, "-o", path)
    assert (code, err) == (0, "") and re.match(r".*: 2 heads and a LoRA of 16 matrices for .*, [\d.]+ KiB\n$", out)

    code, out, err = sidecar_command(capsys, "inspect", path, "-m", model)
    assert (code, err) == (0, "")
    for line in (
        f"base        {base_hash(model)[:16]} (start of its hash)",
        f"fits        yes: {model}",
        "heads       2, of layers 0, 2; each predicts the next layer's experts",
        "width 64 over 128 columns and 32 experts, trained with 2 used",
        "LoRA        rank 4, alpha 1; 16 matrices",
        "attn_output in layers 0-3",
        "quality     recall: 0.9",
    ):
        assert line in out
    assert re.search(r"Q8_0, [\d.]+ KiB; a token reads [\d.]+ KiB", out)

    code, out, err = sidecar_command(capsys, "inspect", path, "-m", other, "--json")
    told = json.loads(out)
    assert code == 1 and not told["fits"]["fits"] and "other weights" in told["fits"]["reason"]
    assert told["heads"]["owners"] == [0, 2] and told["lora"]["rank"] == 4 and told["quality"] == {"recall": 0.9}
    assert told["provenance"]["heads"]["file"] == "heads.safetensors"

    folder = tmp_path / "out"
    assert sidecar_command(capsys, "unpack", path, "-o", folder)[0] == 0
    names = ["adapter.gguf", "heads.safetensors", "provenance.json", "quality.json"]
    assert sorted(file.name for file in folder.iterdir()) == names
    code, _, err = sidecar_command(capsys, "unpack", path, "-o", folder)
    assert code == 1 and "heads.safetensors: exists already" in err
    again = tmp_path / "again.sidecar.gguf"
    arguments = ("--heads", folder / "heads.safetensors", "--lora", folder / "adapter.gguf")
    assert sidecar_command(capsys, "pack", "-m", model, *arguments, "-o", again)[0] == 0
    one, two = (dict(Sidecar.read(file).matrices()) for file in (path, again))
    assert all(np.array_equal(matrix.data, two[name].data) for name, matrix in one.items())


def test_what_a_sidecar_says_commands_no_terminal_and_fills_none(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = dataclasses.replace(BaseModel.open(model).base, name="a \x1b[31mred one")
    quality = {"\x1b]0;title": "short", "long": list(range(1000))}
    Sidecar(base, make_heads([0], top_k=2), quality=quality).write(tmp_path / "a.sidecar.gguf")
    code, out, _ = sidecar_command(capsys, "inspect", tmp_path / "a.sidecar.gguf")
    assert code == 0 and "\x1b" not in out and "sidecar for a \ufffd[31mred one (" in out
    assert "quality  \ufffd]0;title: short\n" in out
    assert out.splitlines()[-1].endswith(" ... (all of it: --json)") and len(out.splitlines()[-1]) < 220
    told = json.loads(sidecar_command(capsys, "inspect", tmp_path / "a.sidecar.gguf", "--json")[1])
    assert told["quality"] == quality


@pytest.mark.parametrize("part", ["inspect", "merge", "pack", "unpack"])
def test_help_fits_a_narrow_terminal(
    part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main(["sidecar", part, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_merge_prints_its_figure(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("-m", model, "--lora", lora(model, ATTENTION), "-o", tmp_path / "merged.gguf", "-n", 16, "-t", 1)
    code, out, err = sidecar_command(capsys, "merge", *arguments)
    assert code == 0, err
    assert re.search(
        r"of what the LoRA changes in the logits of 16 tokens \d+% survives; the merged model changes them", out
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "a sidecar needs something to hold: give --heads FILE, --lora FILE, or both"),
        (
            ("--lora", "none.gguf", "--top-k", 3),
            "--top-k 3 is what heads were trained with: give them with --heads FILE",
        ),
        (("--heads", "none", "--alpha", 3), "--alpha 3 is of a LoRA: give it with --lora FILE"),
        (
            ("--heads", "none.safetensors"),
            "none.safetensors: cannot be read: No such file or directory; check the path",
        ),
        (("--lora", "none.gguf"), "none.gguf: cannot be read as a LoRA adapter: No such file"),
        (("--lora", "none.gguf", "--quality", "none.json"), "--quality none.json: cannot be read: No such file"),
    ],
)
def test_pack_that_cannot_work(
    arguments: tuple[Any, ...], message: str, model: Path, tmp_path: Path, capsys: Any
) -> None:
    code, out, err = sidecar_command(capsys, "pack", "-m", model, *arguments, "-o", tmp_path / "m.sidecar.gguf")
    assert (code, out) == (1, "") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("alpha", ["0", "-1", "nan", "inf", "1e300", "1e-50"])
def test_an_alpha_that_is_none(alpha: str, model: Path, tmp_path: Path, capsys: Any) -> None:
    published(tmp_path / "lora.safetensors", base=model)
    code, _, err = sidecar_command(
        capsys, "pack", "-m", model, "--lora", "lora.safetensors", "--alpha", alpha, "-o", "m.gguf"
    )
    assert code == 1 and err == f"moestream: error: --alpha {float(alpha):g}: give a number above 0\n"
    published(tmp_path / "lora.safetensors", base=model)
    save_file(load_file("lora.safetensors"), "lora.safetensors", {"lora_alpha": alpha})
    code, _, err = sidecar_command(capsys, "pack", "-m", model, "--lora", "lora.safetensors", "-o", "m.gguf")
    assert code == 1 and f"lora.safetensors: its alpha is {float(alpha):g}, and a LoRA is taken with one above 0" in err


def test_nothing_is_written_over_what_it_is_made_of(model: Path, heads_file: Path, tmp_path: Path, capsys: Any) -> None:
    adapter = Path(shutil.copy(lora(model, ATTENTION), tmp_path / "adapter.gguf"))
    folder = tmp_path / "peft"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    published(folder / "adapter_model.safetensors", base=model)
    for arguments, out in (
        (("pack", "--heads", heads_file), heads_file),
        (("pack", "--lora", adapter), adapter),
        (("pack", "--lora", folder), folder / "adapter_model.safetensors"),
        (("pack", "--lora", folder), folder / "adapter_config.json"),
        (("merge", "--lora", adapter), adapter),
    ):
        before = out.read_bytes()
        code, _, err = sidecar_command(capsys, *arguments, "-m", model, "-o", out, "--force")
        assert code == 1 and f"{out}: is the source itself; give the output another name" in err
        assert out.read_bytes() == before


def test_a_pipe_is_not_replaced_by_a_file(model: Path, heads_file: Path, tmp_path: Path, capsys: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    code, _, err = sidecar_command(
        capsys, "pack", "-m", model, "--heads", heads_file, "-o", tmp_path / "pipe", "--force"
    )
    assert code == 1 and "pipe: is a device or a pipe; name the file to write" in err
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-t", "-1"), "--threads -1: at least one thread is needed"),
        (("-t", "0"), "--threads 0: at least one thread is needed"),
        (("--scale", "0"), "--scale 0: give a number other than 0"),
        (("--scale", "nan"), "--scale nan: give a number other than 0"),
        (("--scale", "1e30", "-t", "1", "-n", "4"), "are no numbers: give a smaller scale"),
    ],
)
def test_merge_that_cannot_work(
    arguments: tuple[str, ...], message: str, model: Path, tmp_path: Path, capsys: Any
) -> None:
    code, out, err = sidecar_command(
        capsys, "merge", "-m", model, "--lora", lora(model, ATTENTION), "-o", "merged.gguf", *arguments
    )
    assert (code, out) == (1, "") and message in err and list(tmp_path.iterdir()) == []


def test_halves_of_characters_are_kept_escaped(model: Path, heads_file: Path, capsys: Any) -> None:
    pack(model, "m.gguf", heads=heads_file, provenance={"a": "\ud800"})
    assert Sidecar.read("m.gguf").provenance["a"] == "\ud800"
    assert sidecar_command(capsys, "unpack", "m.gguf", "-o", "out")[0] == 0
    assert json.loads(Path("out/provenance.json").read_text())["a"] == "\ud800"


def test_a_sidecar_is_not_written_over_its_model(model: Path, heads_file: Path, capsys: Any) -> None:
    code, _, err = sidecar_command(capsys, "pack", "-m", model, "--heads", heads_file, "-o", model, "--force")
    assert code == 1 and "is the source itself" in err


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
