"""Giving the stock file back: what convert made of a model, export undoes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import moestream
from command import moestream_command
from factory import MERGED_GATE_UP, make
from laid_reader import rewritten, tensor_bytes
from moestream import ModelError, OptionError, OutputError, convert, export
from moestream.layout.gguf_file import open_gguf
from moestream.layout.interleaving import TARGETS


@pytest.fixture(scope="module")
def stock(folder: Path) -> Path:
    return make(folder, "qwen3moe")


@pytest.fixture(scope="module")
def laid(folder: Path, stock: Path) -> Path:
    convert(stock, folder / "laid.gguf")
    return folder / "laid.gguf"


MODELS: list[dict[str, Any]] = [
    {"arch": "qwen3moe", "experts": 300, "topk": 4},
    {"arch": "qwen3moe", "type": "Q4_K", "expert_types": {"down": "Q6_K", (1, "up"): "IQ4_XS"}},
    {"arch": "gpt-oss", "order": "reversed"},
    {"arch": "olmoe", "type": "Q8_0", "alignment": 1024},
    {"arch": "deepseek2", "type": "IQ4_NL", "leading_dense": 1, "shared": 1, "order": "shuffled"},
    {"arch": "llama", "type": "BF16"},
    {"arch": MERGED_GATE_UP[0], "merged_gate_up": True},
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(map(str, model.values())).replace(" ", ""))
def test_the_stock_file_comes_back_byte_for_byte(
    model: dict[str, Any], target: str, folder: Path, tmp_path: Path
) -> None:
    source = make(folder, **model)
    convert(source, tmp_path / "laid.gguf", "BF16" if model.get("type") == "BF16" else None, target=target)
    result = export(tmp_path / "laid.gguf", tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == source.read_bytes()
    assert result.notes == ()
    assert result.size_bytes == source.stat().st_size
    assert result.tensors == len(tensor_bytes(source))


def test_a_split_model_comes_back_as_one_file(folder: Path, tmp_path: Path) -> None:
    source = make(folder, "qwen3moe", split=3)
    convert(source, tmp_path / "laid.gguf", target="x86-avx2", split_max_bytes=300_000)
    first = min(tmp_path.glob("laid-00001-of-*.gguf"))
    export(first, tmp_path / "back.gguf")
    assert tensor_bytes(tmp_path / "back.gguf") == tensor_bytes(source)
    before, after = (
        {key.name: file.pair(key) for key in file.keys} for file in map(open_gguf, (source, tmp_path / "back.gguf"))
    )
    assert after == {name: pair for name, pair in before.items() if not name.startswith("split.")}


def test_a_model_without_an_alignment_gets_none(folder: Path, stock: Path, tmp_path: Path) -> None:
    source = rewritten(stock, tmp_path / "source.gguf", {"general.alignment": None})
    convert(source, tmp_path / "laid.gguf")
    export(tmp_path / "laid.gguf", tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == source.read_bytes()


def test_neuron_major_matrices_become_f32(folder: Path, tmp_path: Path) -> None:
    source = make(folder, "smallthinker", type="F16")
    convert(source, tmp_path / "laid.gguf", "Q8_0", neuron_major=True)
    result = export(tmp_path / "laid.gguf", tmp_path / "back.gguf")
    (note,) = result.notes
    assert note == (
        "4 down matrices are stored neuron-major in Q8_0: they are written as F32, for their quantisation in the source "
        "cannot be got back"
    )
    before, after = tensor_bytes(source), tensor_bytes(tmp_path / "back.gguf")
    name = "blk.2.ffn_down_exps.weight"
    assert after[name][:2] == (before[name][0], int(gguf.GGMLQuantizationType.F32))
    wanted, got = np.frombuffer(before[name][2], np.float16), np.frombuffer(after[name][2], np.float32)
    assert 0 < np.abs(wanted - got).max() < 0.01 * np.abs(wanted).max()
    types = {matrix.name: matrix.type for matrix in moestream.describe(tmp_path / "back.gguf").moe_layers[2].matrices}
    assert types == {name: "F32", "blk.2.ffn_gate_exps.weight": "Q8_0", "blk.2.ffn_up_exps.weight": "Q8_0"}


# What is refused


def test_a_stock_file(stock: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=f"^{re.escape(str(stock))}: is a stock file already; only laid files are exported$"
    ):
        export(stock, tmp_path / "back.gguf")


def test_an_output_that_exists(laid: Path, tmp_path: Path) -> None:
    path = tmp_path / "back.gguf"
    path.write_text("mine")
    with pytest.raises(OutputError, match=r"exists already; give another name, or --force to replace it$"):
        export(laid, path)
    assert path.read_text() == "mine"
    export(laid, path, force=True)
    assert path.stat().st_size > 1000


def test_the_source_as_output(laid: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(laid)
    with pytest.raises(OptionError, match=r"is the source itself; give the output another name$"):
        export(laid, link, force=True)


def test_the_command(laid: Path, stock: Path, tmp_path: Path) -> None:
    path = tmp_path / "back.gguf"
    run = moestream_command("export", laid, path)
    assert (run.returncode, run.stderr) == (0, "")
    assert re.fullmatch(rf"{re.escape(str(path))}: [0-9.]+ [KM]iB in [0-9.]+ s, \d+ MB/s: 51 tensors\n", run.stdout)
    assert path.read_bytes() == stock.read_bytes()
    run = moestream_command("export", laid, path)
    assert run.returncode == 1
    assert run.stderr == f"moestream: error: {path}: exists already; give another name, or --force to replace it\n"
    told = json.loads(moestream_command("export", laid, path, "--force", "--json").stdout)
    assert (told["path"], told["tensors"], told["notes"]) == (str(path), 51, [])
