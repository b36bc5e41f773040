"""What heads are trained on: captured from any model, kept in a folder; and a head's forward. None of it needs PyTorch."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

from command import moestream_command
from factory import make
from moestream import ExpertStreaming, Llama, ModelError, OptionError, OutputError, TrainingError, cli, record_routing
from moestream.train import Capture, HeadArrays, capture, capture_bytes
from moestream.train.dataset import CaptureHeader, CaptureWriter
from moestream.train.head_arrays import gelu, multi_hot, packed, unpacked

LONG = [(7 * i * i + 3 * i) % 250 + 3 for i in range(40)]
SHORT = [(5 * i * i + i) % 250 + 3 for i in range(11)]


def load(path: Path, **streaming: Any) -> Any:
    options = ExpertStreaming(**{"kernels": "plain", "reader": "pread", **streaming})
    return contextlib.closing(
        Llama(str(path), expert_streaming=options, n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False)
    )


def captured(path: Path, out: Path, **options: Any) -> Capture:
    with load(path) as llm:
        return capture(llm, [LONG, SHORT], out, **options)


def dense(path: Path, name: str) -> np.ndarray:
    tensor = next(one for one in gguf.GGUFReader(path).tensors if one.name == name)
    return gguf.dequantize(tensor.data, tensor.tensor_type)


# Capturing


@pytest.mark.parametrize(
    ("arch", "shape", "gating"),
    [
        ("qwen3moe", {}, "softmax"),
        ("qwen35moe", {"merged_gate_up": True}, "softmax"),
        ("deepseek2", {"gating": "sigmoid", "groups": 4}, "sigmoid"),
        ("smallthinker", {"gating": "sigmoid"}, "sigmoid"),
        ("gpt-oss", {}, "softmax"),
        ("qwen2moe", {"shared": 2}, "softmax"),
    ],
)
def test_states_and_routers_are_captured_from_the_graph_of_any_architecture(
    arch: str, shape: dict[str, Any], gating: str, folder: Path, tmp_path: Path
) -> None:
    path = make(folder, arch, experts=16, topk=3, **shape)
    with load(path) as llm:
        data = capture(llm, [LONG, SHORT], tmp_path / "data", tokens_at_once=16)
        trace = record_routing(llm, [LONG, SHORT], tokens_at_once=16)
    head = data.header
    assert (head.gating, head.n_experts, head.top_k, head.tokens, head.d) == (gating, 16, 3, 51, 128)
    assert (
        head.owners == [layer for layer in trace.layers if layer + 1 in trace.layers]
        and head.model_hash == trace.model_hash
    )
    assert data.tokens.tolist() == LONG + SHORT and data.starts.tolist() == [0, 40]
    for layer in {*head.owners, *head.consumers}:
        assert np.array_equal(data.experts(layer), trace.experts[:, trace.layers.index(layer)]), layer
    reads_the_same = arch != "smallthinker"  # whose routers read the state before attention
    for layer in set(head.owners) & set(head.consumers):
        product = data.hidden(layer).astype(np.float32) @ dense(path, f"blk.{layer}.ffn_gate_inp.weight").T
        assert (np.abs(product - data.gate(layer)).max() < 0.02) == reads_the_same, layer
        assert data.gate(layer).astype(np.float32).std() > 0.1


def test_a_prompt_is_captured_as_decoding_is_but_for_rounding(model: Path, tmp_path: Path) -> None:
    one, many = (captured(model, tmp_path / str(n), tokens_at_once=n) for n in (1, 32))
    for owner in one.header.owners:
        assert np.abs(one.hidden(owner).astype(np.float32) - many.hidden(owner)).max() < 0.02
        assert np.abs(one.gate(owner + 1).astype(np.float32) - many.gate(owner + 1)).max() < 0.02
        assert (np.sort(one.experts(owner)) == np.sort(many.experts(owner))).mean() > 0.98


def test_only_the_owners_asked_for_are_captured_and_the_size_is_told_before(model: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    steps: list[int] = []
    data = captured(
        model,
        tmp_path / "data",
        owners=[2],
        on_size=lambda *size: told.append(size),
        progress=lambda done, total: steps.append(done),
    )
    assert sorted(file.name for file in (tmp_path / "data").iterdir()) == [
        *("experts.2.npy", "experts.3.npy", "gate.3.npy", "header.json", "hidden.2.npy", "starts.npy", "tokens.npy")
    ]
    assert told == [(51, data.header.size_bytes)] and steps[0] == 0 and steps[-1] == 51
    assert (
        data.header.size_bytes
        == capture_bytes(51, owners=1, d=128, n_experts=8, top_k=2)
        == 51 * (4 + 256 + 16 + 2 * 2)
    )
    with pytest.raises(
        TrainingError, match=r"holds no hidden of layer 1, but heads of layers \[2\]; capture it with that owner"
    ):
        data.hidden(1)


def test_pairs_and_firsts_end_where_texts_do(model: Path, tmp_path: Path) -> None:
    data = captured(model, tmp_path / "data", owners=[1])
    assert data.pairs().tolist() == [*range(39), *range(40, 50)]
    assert data.pairs([1]).tolist() == list(range(40, 50))
    assert np.flatnonzero(data.firsts()).tolist() == [0, 40]


def test_what_progress_raises_ends_a_capture_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done >= 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        captured(model, tmp_path / "data", tokens_at_once=16, progress=stop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"owners": [3]}, "layer 3 cannot own a head: it and the next must have experts; layers that can: 0 to 2"),
        ({"owners": []}, "owners is empty: name at least one layer, or leave it out for all"),
        ({"tokens_at_once": 0}, "tokens_at_once=0: at least one token is needed"),
    ],
)
def test_owners_that_cannot_be_are_refused(options: dict[str, Any], message: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        captured(model, tmp_path / "data", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_streamed_is_refused(model: Path, tmp_path: Path) -> None:
    llm = Llama(str(model), n_ctx=32, verbose=False)
    with (
        contextlib.closing(llm),
        pytest.raises(OptionError, match="only streamed models are captured: load this one with expert_streaming=True"),
    ):
        capture(llm, [SHORT], tmp_path / "data")


def test_texts_without_a_token_are_refused(model: Path, tmp_path: Path) -> None:
    with (
        load(model) as llm,
        pytest.raises(OptionError, match="there is no text to capture: give at least one that is not empty"),
    ):
        capture(llm, [b"", []], tmp_path / "data")


def test_a_model_with_experts_in_one_layer_has_no_head(folder: Path, tmp_path: Path) -> None:
    path = make(folder, "deepseek2", layers=2, leading_dense=1)
    with (
        load(path) as llm,
        pytest.raises(
            OptionError, match="no two neighbouring layers of this model have experts: there is no head to train"
        ),
    ):
        capture(llm, [SHORT], tmp_path / "data")


def test_a_router_that_heads_are_not_trained_for_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError,
        match="its states cannot be captured: the router of layer 1 uses softplus, which heads are not trained",
    ):
        captured(make(folder, "deepseek4", gating="sqrtsoftplus"), tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_or_does_not_fit_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(OutputError, match="data: exists already; name another folder, or remove it"):
        captured(model, tmp_path / "data")
    with pytest.raises(OutputError, match="data: cannot be written: No such file or directory"):
        captured(model, tmp_path / "none" / "data")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(
        OutputError, match=r"other: needs [\d.]+ KiB, and 1000 bytes are free; give fewer owners or less text"
    ):
        captured(model, tmp_path / "other")
    assert [file.name for file in tmp_path.iterdir()] == ["data"]


def test_states_that_float16_cannot_hold_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("moestream.train.capture")
    rows = module._rows
    monkeypatch.setattr(
        module, "_rows", lambda tensor, kind, *axes: rows(tensor, kind, *axes) * (1 if kind == module._I32 else 10**6)
    )
    with pytest.raises(
        ModelError, match="its states cannot be captured: the input of experts of layer 0 is not finite in float16"
    ):
        captured(model, tmp_path / "data")


# The folder


@pytest.fixture(scope="module")
def sound(folder: Path, model: Path) -> Path:
    out = folder / "sound"
    captured(model, out)
    return out


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(data: Path) -> None:
        header = json.loads((data / "header.json").read_text())
        change(header)
        (data / "header.json").write_text(json.dumps(header))

    return edit


def truncated(name: str) -> Callable[[Path], None]:
    return lambda data: (data / name).write_bytes((data / name).read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda data: (data / "header.json").unlink(),
            r"data: no training data \(header.json: No such file or directory\); `moestream train capture` makes it",
        ),
        (lambda data: (data / "header.json").write_text("{"), "header.json: damaged"),
        (
            edited(lambda header: header.update(format="x")),
            "header.json: not the header of training data; `moestream train capture` makes it",
        ),
        (
            edited(lambda header: header.update(version=2)),
            "header.json: version 2, and this moestream reads version 1: capture the data again",
        ),
        (edited(lambda header: header.pop("gating")), "header.json: 'gating' is missing; capture the data again"),
        (edited(lambda header: header.update(more=1)), "header.json: 'more' is unknown; capture the data again"),
        (edited(lambda header: header.update(d="x")), "header.json: 'd' is 'x'; capture the data again"),
        (
            edited(lambda header: header.update(d=64)),
            r"hidden.0.npy: is float16 \(51, 128\), not float16 \(51, 64\) as the header says; capture the data again",
        ),
        (
            edited(lambda header: header.update(owners=["0"])),
            r"header.json: 'owners' is \['0'\]; capture the data again",
        ),
        (edited(lambda header: header.update(tokens=-1)), "header.json: 'tokens' is -1; capture the data again"),
        (
            lambda data: np.save(data / "experts.1.npy", np.full((51, 2), 8, np.uint8)),
            "experts.1.npy: names expert 8 of 8; capture it again",
        ),
        (truncated("gate.2.npy"), "gate.2.npy: missing, truncated or damaged .*; capture the data again"),
        (
            lambda data: (data / "experts.1.npy").unlink(),
            "experts.1.npy: missing, truncated or damaged .*; capture the data again",
        ),
        (
            lambda data: np.save(data / "starts.npy", np.array([0, 60])),
            "starts.npy: the starts of its texts do not ascend from 0 to its last token; capture it again",
        ),
    ],
)
def test_a_damaged_folder_is_refused_by_what_is_wrong(
    spoil: Callable[[Path], Any], message: str, sound: Path, tmp_path: Path
) -> None:
    shutil.copytree(sound, tmp_path / "data")
    assert Capture(tmp_path / "data").header.tokens == 51
    spoil(tmp_path / "data")
    with pytest.raises(TrainingError, match=message):
        Capture(tmp_path / "data")


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    header = CaptureHeader("m", "", "a", [0], 300, 2, 4, "softmax", 3, 1, "", "")
    rows = {name: np.ones((1, *shape[1:]), kind) for name, (kind, shape) in header.arrays().items()}
    assert rows["experts.0"].dtype == np.uint16
    with (
        pytest.raises(RuntimeError, match="2 of 3 tokens were written"),
        CaptureWriter(tmp_path / "data", header, np.zeros(3, np.int32), np.zeros(1, np.int64)) as writer,
    ):
        writer.append(rows)
        writer.append(rows)
    assert not (tmp_path / "data").exists()


def test_what_a_capture_takes_is_allotted_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, begin: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    header = CaptureHeader("m", "", "a", [0], 300, 2, 4, "softmax", 3000, 1, "", "")
    writer = CaptureWriter(tmp_path / "data", header, np.zeros(3000, np.int32), np.zeros(1, np.int64))
    arrays = [file for file in (tmp_path / "data.part").iterdir() if "." in file.stem]
    assert len(arrays) == 4 and all(file.stat().st_blocks * 512 >= file.stat().st_size for file in arrays)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutputError, match="data: cannot be written: No space left on device"):
        CaptureWriter(tmp_path / "data", header, np.zeros(3000, np.int32), np.zeros(1, np.int64))
    assert writer.path == tmp_path / "data" and not list(tmp_path.iterdir())


# A head


def random_head(d: int = 40, n_experts: int = 12, width: int = 24, owner: int = 3) -> HeadArrays:
    draw = np.random.default_rng(1)
    columns = d + 2 * n_experts
    return HeadArrays(
        owner,
        *(
            draw.normal(scale=0.2, size=shape).astype(np.float32)
            for shape in ((n_experts, columns), (width, columns), (n_experts, width))
        ),
    )


def test_a_head_is_its_formula() -> None:
    head, draw = random_head(), np.random.default_rng(2)
    h = draw.normal(size=(6, 40)).astype(np.float32)
    now, before = (np.stack([draw.permutation(12)[:3] for _ in range(6)]) for _ in range(2))
    first = np.array([True, False, False, True, False, False])
    z = head.forward(h, now, before, first)
    for i in range(6):
        x = np.zeros(40 + 24)
        x[:40] = h[i]
        x[40 + now[i]] = 1
        if not first[i]:
            x[52 + before[i]] = 1
        inner = head.fc1.astype(float) @ x
        inner = np.array([y * 0.5 * math.erfc(-y / math.sqrt(2)) for y in inner])
        assert np.abs(head.linear @ x + head.fc2 @ inner - z[i]).max() < 1e-5
    assert (
        abs(gelu(np.array([-1.0, 0.0, 1.0], np.float32)) - [-0.158655, 0, 0.841345]).max() < 1e-6
    )  # not the tanh one: -0.158808


def test_an_untrained_head_is_the_router() -> None:
    router = np.random.default_rng(0).normal(size=(12, 40)).astype(np.float32)
    head, again, other = (HeadArrays.untrained(owner, router, 24, 7) for owner in (3, 3, 4))
    h, chosen = np.random.default_rng(1).normal(size=(5, 40)).astype(np.float32), np.tile(np.arange(3), (5, 1))
    assert np.allclose(head.forward(h, chosen, chosen, np.zeros(5, bool)), h @ router.T, atol=1e-5)
    assert np.array_equal(head.fc1, again.fc1) and not np.array_equal(head.fc1, other.fc1) and head.fc1.std() > 0.05


@pytest.mark.parametrize(("kind", "nearness"), [("F32", 0), ("F16", 2e-3), ("Q8_0", 0.05), ("Q4_0", 1.0)])
def test_a_sidecar_gives_back_the_head_that_it_stores(kind: str, nearness: float) -> None:
    head = random_head(d=64)
    heads = packed([head, random_head(d=64, owner=1)], top_k=3, kind=kind)
    assert (heads.owners, heads.columns, heads.experts, heads.width, heads.top_k) == ((1, 3), 64, 12, 24, 3)
    stored, draw = unpacked(heads)[3], np.random.default_rng(2)
    h, chosen = draw.normal(size=(50, 64)).astype(np.float32), np.tile(np.arange(3), (50, 1))
    difference = np.abs(
        stored.forward(h, chosen, chosen, np.zeros(50, bool)) - head.forward(h, chosen, chosen, np.zeros(50, bool))
    ).max()
    assert difference <= nearness and (difference > nearness / 20 or not nearness)
    assert np.array_equal(stored.linear, head.stored(kind).linear)


def test_heads_that_do_not_fit_or_are_no_numbers_are_refused() -> None:
    head = random_head()
    with pytest.raises(
        TrainingError,
        match=r"the head of layer 3: fc1 is \(24, 63\), not \(24, 64\) as its other matrices want; train it again",
    ):
        HeadArrays(3, head.linear, head.fc1[:, :-1], head.fc2)
    spoilt = head.fc2.copy()
    spoilt[0, 0] = np.nan
    with pytest.raises(
        TrainingError,
        match="the head of layer 3: fc2 holds numbers that are not finite; train it again, with a lower learning rate",
    ):
        HeadArrays(3, head.linear, head.fc1, spoilt)
    with pytest.raises(OptionError, match="type 'Q5_0': heads are stored as one of F32, F16, Q8_0, Q4_0"):
        packed([head], top_k=3, kind="Q5_0")


def test_one_hots_of_nothing_are_zeros() -> None:
    hot = multi_hot(np.array([[0, 2], [1, 3]]), np.array([False, True]), 4)
    assert hot.tolist() == [[1, 0, 1, 0], [0, 0, 0, 0]]


# The command


def test_the_command_captures_texts_and_token_ids(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"some text of twenty-eight by")
    np.save(tmp_path / "b.npy", np.array(SHORT))
    out = tmp_path / "data"
    run = moestream_command(
        "train",
        "capture",
        "-m",
        model,
        "-f",
        tmp_path / "a.txt",
        "-f",
        tmp_path / "b.npy",
        "-o",
        out,
        "--owners",
        "0,2-2",
        "-t",
        1,
    )
    assert run.returncode == 0, run.stderr
    data = Capture(out)
    assert data.header.owners == [0, 2] and data.header.source == "a.txt, b.npy" and data.tokens[-11:].tolist() == SHORT
    assert re.search(r"moestream: \d+ tokens will take [\d.]+ KiB", run.stderr)
    assert f"{data.header.tokens} tokens of 2 texts" in run.stdout and "owners 0 to 2, 2 in all" in run.stdout


def test_a_capture_that_was_killed_is_no_obstacle_to_the_next(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.part").mkdir()
    (tmp_path / "data.part" / "hidden.0.npy").write_bytes(b"of a run that was killed")
    np.save(tmp_path / "a.npy", np.array(SHORT))
    command = ["train", "capture", "-m", model, "-f", tmp_path / "a.npy", "-o", tmp_path / "data", "-t", 1]
    assert cli.main(list(map(str, command))) == 0, capsys.readouterr().err
    assert Capture(tmp_path / "data").header.tokens == 11 and not (tmp_path / "data.part").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-f", "none.txt"], "cannot read the text none.txt: No such file or directory"),
        (["-f", "empty.txt"], "the text empty.txt is empty: leave it out"),
        (["-f", "table.npy"], "table.npy: is float64 (2, 2), no row of token ids"),
        (["-f", "wrong.npy"], "wrong.npy: no NumPy file of token ids: "),
        (["-f", "several.npy"], "several.npy: holds several arrays, not one of token ids"),
        (["-f", "lying.npy"], "lying.npy: no NumPy file of token ids: "),
        *[
            (["-f", "a.txt", "--owners", owners], f"--owners {owners}: give layers like 6-38 or 2,4,6-9")
            for owners in ("1-x", "", "2-1", "1,", "0-99999999999", "\u00b2")
        ],
        (["-f", "a.txt", "-o", "none/data"], "--output none/data: there is no folder none; make it first"),
        (["-f", "a.txt", "--ctx-size", "0"], "--ctx-size 0: give a number of at least 1"),
        (["-f", "a.txt", "-o", "there"], "--output there: exists already; name another folder, or remove it"),
    ],
)
def test_wrong_options_of_the_command_are_told_in_one_line(
    options: list[str], message: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "there").mkdir()
    np.save(tmp_path / "table.npy", np.eye(2))
    (tmp_path / "wrong.npy").write_bytes(b"x" * 100)
    with open(tmp_path / "several.npy", "wb") as file:
        np.savez(file, a=np.arange(3), b=np.arange(3))
    with open(tmp_path / "lying.npy", "wb") as file:
        header = {"descr": "<i8", "fortran_order": False, "shape": (10**12,)}
        np.lib.format.write_array_header_1_0(file, header)
    run = moestream_command("train", "capture", "-m", model, *(["-o", "data"] if "-o" not in options else []), *options)
    assert run.returncode == 1 and run.stderr.startswith(f"moestream: error: {message}") and run.stderr.count("\n") == 1
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("phase", ["heads", "sft", "distill"])
def test_phases_say_what_to_install_where_pytorch_is_missing(
    phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    given = ["-d", "x"] if phase == "heads" else ["--hf", "x", "--sidecar", "x", "-f", "x"]
    assert cli.main(["train", phase, *given, "-o", str(tmp_path / "out.gguf")]) == 1
    assert re.fullmatch(
        r"moestream: error: training needs torch, (transformers, )?matplotlib: pip install 'moestream\[train\]'\n",
        capsys.readouterr().err,
    )
