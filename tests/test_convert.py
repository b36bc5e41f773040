"""Converting: the stages, what decides them, what is refused, and what is left when it is broken off."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest

import fake_hub
from command import at_terminal, moestream_command, screen
from factory import make
from laid_reader import LaidFile, stock_experts, tensor_bytes
from moestream import ConversionPlan, ModelError, OptionError, OutputError, _hub, cli, convert, export, verify
from moestream.layout import stream, writer
from moestream.layout.imatrix import read_imatrix
from moestream.layout.quantise import TYPES, number_ranges, quantise


@pytest.fixture(scope="module")
def stock(folder: Path) -> Path:
    return make(folder, "qwen3moe")


@pytest.fixture(scope="module")
def f16(folder: Path) -> Path:
    return make(folder, "qwen3moe", type="F16")


@pytest.fixture(scope="module")
def relu_f16(folder: Path) -> Path:
    return make(folder, "smallthinker", type="F16")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one record or 4 KiB, and a journal after each."""
    monkeypatch.setattr(stream, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(writer, "SYNC_BYTES", 1)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refusal(error: type[Exception], *args: Any, **options: Any) -> str:
    with pytest.raises(error) as refused:
        convert(*args, **options)
    return str(refused.value)


# Types


def test_a_quantised_model_keeps_its_types(folder: Path, tmp_path: Path) -> None:
    source = make(folder, "qwen3moe", type="Q4_K", expert_types={"down": "Q6_K"})
    result = convert(source, tmp_path / "laid.gguf", target="plain")
    assert result.plan.type is None
    assert {(part.matrix, part.type) for part in result.plan.parts} == {
        ("gate", "Q4_K"),
        ("up", "Q4_K"),
        ("down", "Q6_K"),
    }
    assert files(tmp_path) == ["laid.gguf"]


def test_a_model_in_16_bits_becomes_q4_0_by_ggmls_quantiser(f16: Path, tmp_path: Path) -> None:
    result = convert(f16, tmp_path / "laid.gguf")
    assert result.plan.type == "Q4_0"
    assert files(tmp_path) == ["laid.gguf"], "what was made on the way is gone"
    export(tmp_path / "laid.gguf", tmp_path / "back.gguf")

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    wanted = tmp_path / "wanted.gguf"
    assert llama_cpp.llama_model_quantize(os.fsencode(f16), os.fsencode(wanted), ctypes.byref(params)) == 0
    assert tensor_bytes(tmp_path / "back.gguf") == tensor_bytes(wanted)
    found = LaidFile(tmp_path / "laid.gguf")
    assert found["source.name"] == f16.name
    routers = [t for name, t in found.tensors.items() if name.endswith(("ffn_gate_inp.weight", "_norm.weight"))]
    assert routers and all(tensor.tensor_type.name == "F32" for tensor in routers)


@pytest.mark.parametrize("type, experts", [("q8_0", "Q8_0"), ("IQ4_NL", "IQ4_NL"), ("MXFP4_MOE", "MXFP4")])
def test_other_types_are_passed_on(type: str, experts: str, f16: Path, tmp_path: Path) -> None:
    convert(f16, tmp_path / "laid.gguf", type)
    kinds = {gguf.GGMLQuantizationType(number).name for number in LaidFile(tmp_path / "laid.gguf")["part.type"]}
    assert kinds <= {experts, "Q5_0"} and experts in kinds  # llama.cpp gives the first down matrices of IQ4_NL more


def test_the_type_that_experts_have_is_no_quantising(stock: Path, tmp_path: Path) -> None:
    assert convert(stock, tmp_path / "laid.gguf", "Q4_0").plan.type is None


def test_quantising_again_has_to_be_allowed(stock: Path, tmp_path: Path) -> None:
    said = refusal(OptionError, stock, tmp_path / "laid.gguf", "Q8_0")
    assert said == (
        f"{stock}: its experts are Q4_0 already, and quantising them again to Q8_0 loses quality a second time; "
        "start from an F16 or BF16 model, or accept the loss with --allow-requantize"
    )
    assert files(tmp_path) == []
    convert(stock, tmp_path / "laid.gguf", "Q8_0", allow_requantize=True)
    assert set(LaidFile(tmp_path / "laid.gguf")["part.type"]) == {8}


def test_an_unknown_type(stock: Path, tmp_path: Path) -> None:
    said = refusal(OptionError, stock, tmp_path / "laid.gguf", "Q9")
    assert said.startswith("type Q9: unknown; llama.cpp can quantise to F32, F16, Q4_0, ")
    assert "Q4_K_M" in TYPES and "MXFP4_MOE" in TYPES


def test_rows_that_are_no_whole_blocks_are_named_and_kept_wider(folder: Path, tmp_path: Path) -> None:
    source = make(folder, "qwen3moe", type="F16", ff=80)
    plan = convert(source, tmp_path / "laid.gguf", "Q4_0", target="plain", dry_run=True)
    assert "blk.{0-3}.ffn_down_exps.weight: Q4_0 rows of 80 are not divisible by 32: kept F16" in plan.notes
    result = convert(source, tmp_path / "laid.gguf", "Q4_0", target="plain")
    assert result.plan.notes == plan.notes
    assert {(part.matrix, part.type) for part in result.plan.parts} == {
        ("gate", "Q4_0"),
        ("up", "Q4_0"),
        ("down", "F16"),
    }
    assert verify(tmp_path / "laid.gguf", check_tensors=True).ok


def test_numbers_in_short() -> None:
    assert [number_ranges(n) for n in ([7], [0, 1, 2, 5], [3, 5], [1, 2])] == ["7", "{0-2,5}", "{3,5}", "{1-2}"]


# Importance


def importance(f16: Path) -> dict[str, np.ndarray]:
    """Positive numbers for every matrix, f32[experts, columns]."""
    rng = np.random.default_rng(1)
    found = {}
    for name, (shape, _, _) in tensor_bytes(f16).items():
        if len(shape) > 1:
            found[name] = rng.uniform(0.1, 100, (shape[2] if len(shape) > 2 else 1, shape[0])).astype(np.float32)
    return found


def write_imatrix(path: Path, values: dict[str, np.ndarray], count: int) -> Path:
    header = gguf.GGUFWriter(path, "imatrix")
    header.add_type("imatrix")
    for name, mean in values.items():
        header.add_tensor(name + ".in_sum2", mean * count)
        header.add_tensor(name + ".counts", np.full((len(mean), 1), count, dtype=np.float32))
    header.write_header_to_file()
    header.write_kv_data_to_file()
    header.write_tensors_to_file()
    header.close()
    return path


def write_legacy_imatrix(path: Path, values: dict[str, np.ndarray], calls: int) -> Path:
    data = struct.pack("<i", len(values))
    for name, mean in values.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, mean.size)
        data += (mean * calls).astype("<f4").tobytes()
    path.write_bytes(data + struct.pack("<ii", 5, 4) + b"text")
    return path


def test_both_formats_of_importance_say_the_same(f16: Path, tmp_path: Path) -> None:
    values = importance(f16)
    new = read_imatrix(write_imatrix(tmp_path / "imatrix.gguf", values, 16))
    old = read_imatrix(write_legacy_imatrix(tmp_path / "imatrix.dat", values, 16))
    assert list(new) == list(old) == list(values)
    for name, mean in values.items():
        np.testing.assert_array_equal(new[name], mean.reshape(-1))
        np.testing.assert_array_equal(old[name], mean.reshape(-1))


def test_an_expert_that_was_never_asked_has_equal_importance(tmp_path: Path) -> None:
    path = write_imatrix(tmp_path / "imatrix.gguf", {"blk.0.ffn_up_exps.weight": np.ones((2, 4), np.float32)}, 0)
    np.testing.assert_array_equal(read_imatrix(path)["blk.0.ffn_up_exps.weight"], np.ones(8, np.float32))


def test_importance_decides_the_bytes(f16: Path, tmp_path: Path) -> None:
    imatrix = write_imatrix(tmp_path / "imatrix.gguf", importance(f16), 16)
    for name, options in {"with": {"imatrix": imatrix}, "without": {}}.items():
        quantise(f16, tmp_path / f"{name}.gguf", "Q4_0", progress=False, **options)
    ours, plain = stock_experts(tmp_path / "with.gguf"), stock_experts(tmp_path / "without.gguf")
    assert ours["blk.3.ffn_up_exps.weight"] != plain["blk.3.ffn_up_exps.weight"]
    values = importance(f16)["blk.3.ffn_up_exps.weight"][2]
    weights = np.frombuffer(stock_experts(f16)["blk.3.ffn_up_exps.weight"][2], np.float16).reshape(-1, values.size)
    errors = []
    for experts in (ours, plain):
        stored = np.frombuffer(experts["blk.3.ffn_up_exps.weight"][2], np.uint8).reshape(len(weights), -1)
        back = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.Q4_0)
        errors.append(float((values * (back - weights) ** 2).sum()))
    assert errors[0] < errors[1], "what matters is nearer with importance than without"


def test_importance_that_is_none(f16: Path, stock: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "laid.gguf", tmp_path / "notes.txt"
    text.write_text("these are notes and no matrix")
    said = refusal(OptionError, stock, out, imatrix=text)
    assert said == "--imatrix: nothing is quantised, so it would not be used; leave it out, or name a TYPE"
    said = refusal(ModelError, f16, out, imatrix=text)
    assert f"{text}: is no importance matrix of llama-imatrix, or a damaged one" in said
    assert refusal(ModelError, f16, out, imatrix=tmp_path / "no.dat").endswith(
        "check the path of the importance matrix"
    )
    said = refusal(OptionError, make(f16.parent, "qwen3moe", type="F16", d=256, ff=256, heads=8), out, "IQ2_XXS")
    assert "imatrix" in said and said.endswith("; --imatrix FILE gives one")
    assert files(tmp_path) == ["notes.txt"]


# Neuron-major


@pytest.mark.parametrize("type", ["Q4_0", "Q8_0", "F16"])
def test_neuron_major_is_the_transposed_matrix_quantised_along_the_other_side(
    type: str, relu_f16: Path, tmp_path: Path
) -> None:
    convert(relu_f16, tmp_path / "laid.gguf", type, neuron_major=True)
    found = LaidFile(tmp_path / "laid.gguf")
    stored, (_, number, columns, rows, _, size, form) = found.stored(2, 3, "blk.2.ffn_down_exps.weight")
    kind = gguf.GGMLQuantizationType[type]
    assert (form, number) == (-1, kind)
    weights = np.frombuffer(stock_experts(relu_f16)["blk.2.ffn_down_exps.weight"][3], np.float16).reshape(rows, columns)
    wanted = gguf.quants.quantize(np.ascontiguousarray(weights.T.astype(np.float32)), kind)
    back, best = (
        gguf.quants.dequantize(np.asarray(data).view(np.uint8).reshape(columns, -1), kind) for data in (stored, wanted)
    )
    assert size == wanted.nbytes
    np.testing.assert_allclose(back, best, atol=np.abs(weights).max() / 1000)
    assert verify(tmp_path / "laid.gguf", check_tensors=True).ok


def test_neuron_major_rows_that_are_no_whole_blocks(folder: Path, tmp_path: Path) -> None:
    source = make(folder, "smallthinker", type="F16", d=80, heads=4)
    result = convert(source, tmp_path / "laid.gguf", "Q8_0", neuron_major=True, target="plain")
    assert "blk.{0-3}.ffn_up_exps.weight: Q8_0 rows of 80 are not divisible by 32: kept F16" in result.plan.notes
    kinds = {part.matrix: (part.type, part.form) for part in result.plan.parts}
    assert kinds["down"] == ("F16", "neuron-major")


def test_neuron_major_is_for_relu(f16: Path, tmp_path: Path) -> None:
    said = refusal(OptionError, f16, tmp_path / "laid.gguf", neuron_major=True)
    assert said == (
        "--neuron-major: qwen3moe has no ReLU, so its activations are not zero and no row could be left out; "
        "it is for smallthinker"
    )


def test_neuron_major_from_a_quantised_matrix_has_to_be_allowed(folder: Path, tmp_path: Path) -> None:
    source = make(folder, "smallthinker", type="Q4_0")
    said = refusal(OptionError, source, tmp_path / "laid.gguf", neuron_major=True)
    assert said == (
        "--neuron-major: blk.0.ffn_down_exps.weight is Q4_0 already, and quantising it again along the other side adds "
        "error to what it has lost; start from an F16 or BF16 model, or accept that with --allow-requantize"
    )
    convert(source, tmp_path / "laid.gguf", neuron_major=True, allow_requantize=True)
    assert LaidFile(tmp_path / "laid.gguf").layers[0][2][6] == -1


# Laid for another machine


def test_a_laid_file_is_laid_for_another_target(stock: Path, tmp_path: Path) -> None:
    convert(stock, tmp_path / "a.gguf", target="x86-avx2")
    convert(tmp_path / "a.gguf", tmp_path / "b.gguf", target="arm-dotprod")
    convert(stock, tmp_path / "wanted.gguf", target="arm-dotprod")
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "wanted.gguf").read_bytes()
    said = refusal(ModelError, tmp_path / "b.gguf", tmp_path / "c.gguf", target="arm-dotprod")
    assert said == (
        f"{tmp_path / 'b.gguf'}: is laid for arm-dotprod already; name another --target, or give the stock file back with: "
        "moestream export"
    )
    said = refusal(OptionError, tmp_path / "b.gguf", tmp_path / "c.gguf", "Q8_0")
    assert said.endswith(
        "is a laid file, which is not quantised to Q8_0; give its stock file back first, with: moestream export"
    )


def test_an_unknown_target(stock: Path, tmp_path: Path) -> None:
    said = refusal(OptionError, stock, tmp_path / "laid.gguf", target="vax")
    assert said.startswith("--target vax: unknown; known are native, plain, x86-avx2, ")


# From Hugging Face


@pytest.fixture
def hugging_face(f16: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A converter that gives `f16` for any folder, and the folders it was asked for."""
    asked = []

    def to_gguf(folder: Path, out: Path, *, progress: bool = True, pre_tokenizer: str | None = None) -> None:
        asked.append(folder)
        shutil.copy(f16, out)

    module = SimpleNamespace(to_gguf=to_gguf)
    monkeypatch.setitem(sys.modules, "moestream.layout.huggingface", module)
    return asked


@pytest.mark.usefixtures("small_pieces")
def test_a_folder_goes_through_a_stock_file(
    hugging_face: list[Path], f16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tmp_path / "OLMoE", tmp_path / "laid.gguf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    broken_off(folder, out, monkeypatch)
    stages = ("hf.part", "hf.part.json", "part", "part.json", "stock.part", "stock.part.json")
    assert files(tmp_path) == ["OLMoE", *(f"laid.gguf.{stage}" for stage in stages)]
    convert(folder, out, resume=True)
    assert hugging_face == [folder], "what was made is not made again"
    assert files(tmp_path) == ["OLMoE", "laid.gguf"]
    assert LaidFile(out)["source.name"] == "OLMoE"
    convert(f16, tmp_path / "wanted.gguf")
    assert LaidFile(out)["checksums"] == LaidFile(tmp_path / "wanted.gguf")["checksums"]


@pytest.mark.usefixtures("hugging_face")
def test_a_folder_has_no_plan(tmp_path: Path) -> None:
    (tmp_path / "OLMoE").mkdir()
    said = refusal(OptionError, tmp_path / "OLMoE", tmp_path / "laid.gguf", dry_run=True)
    assert said == (
        f"{tmp_path / 'OLMoE'}: --dry-run plans from the header of a GGUF, which a Hugging Face folder has not; "
        "convert it without, or give a GGUF"
    )


def test_a_gguf_of_the_hub(stock: Path, tmp_path: Path) -> None:
    with fake_hub.serving({"model-Q4_0.gguf": stock}) as address:
        run = moestream_command(
            "convert",
            "-hf",
            f"{fake_hub.REPO}:Q4_0",
            tmp_path / "laid.gguf",
            HF_ENDPOINT=address,
            HF_HOME=str(tmp_path),
        )
    assert (run.returncode, run.stderr) == (0, "")
    assert LaidFile(tmp_path / "laid.gguf")["source.name"] == "model-Q4_0.gguf"


def test_a_repository_without_gguf_is_converted_from_its_safetensors(
    hugging_face: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, downloaded = tmp_path / "snapshot", []
    folder.mkdir()
    listed = ["README.md", "config.json", "model.safetensors", "tokenizer.json", "onnx/model.json", "pytorch_model.bin"]

    def download(repo: str, names: list[str]) -> list[Path]:
        downloaded.extend(names)
        return [folder / name for name in names]

    monkeypatch.setattr(_hub, "list_files", lambda repo: listed)
    monkeypatch.setattr(_hub, "download", download)
    assert cli.main(["convert", "-hf", "user/repo", str(tmp_path / "laid.gguf"), "Q8_0"]) == 0
    assert downloaded == ["config.json", "model.safetensors", "tokenizer.json"]
    assert hugging_face == [folder]
    assert set(LaidFile(tmp_path / "laid.gguf")["part.type"]) == {8}

    listed[:] = ["README.md"]
    assert cli.main(["convert", "-hf", "user/repo", str(tmp_path / "other.gguf")]) == 1
    assert "-hf user/repo: has neither GGUF nor safetensors files" in capsys.readouterr().err
    assert cli.main(["convert", "model.gguf", "laid.gguf", "-hff", "x.gguf"]) == 1
    assert "--hf-file names a file in a repository: give that with -hf USER/REPO" in capsys.readouterr().err


# The plan


def test_a_dry_run_writes_nothing_and_says_what_would_be(f16: Path, tmp_path: Path) -> None:
    plan = convert(f16, tmp_path / "laid.gguf", "Q4_0", target="x86-avx2", dry_run=True)
    assert isinstance(plan, ConversionPlan)
    assert files(tmp_path) == []
    result = convert(f16, tmp_path / "laid.gguf", "Q4_0", target="x86-avx2")
    assert result.size_bytes == plan.final_bytes == (tmp_path / "laid.gguf").stat().st_size
    assert [part.bits_per_weight for part in plan.parts] == [4.5] * 3
    assert {part.form for part in plan.parts} == {"q4_0 8x8"}
    assert plan.record_bytes == plan.padding_bytes + sum(part.bytes for part in plan.parts)
    quantise(f16, tmp_path / "stock.gguf", "Q4_0", progress=False)
    data = sum(len(data) for _, _, data in tensor_bytes(tmp_path / "stock.gguf").values())
    assert plan.temporary_bytes == data


def test_the_command_prints_the_plan(f16: Path, tmp_path: Path) -> None:
    run = moestream_command("convert", f16, tmp_path / "laid.gguf", "--dry-run", "--target", "arm-i8mm")
    assert (run.returncode, run.stderr) == (0, "")
    assert f"{f16} (qwen3moe), quantised to Q4_0, laid for arm-i8mm" in run.stdout
    assert re.search(r"^  gate +Q4_0 +q4_0 4x8 +216\.00 KiB +4\.50  bits per weight$", run.stdout, re.MULTILINE)
    assert "note: output.weight: Q6_K rows of 128 are not divisible by 256: kept Q8_0\n" in run.stdout
    assert re.search(r"^on the way +\d+\.\d+ KiB  beside it, deleted at the end$", run.stdout, re.MULTILINE)
    assert files(tmp_path) == []


def test_the_command(stock: Path, tmp_path: Path) -> None:
    out = tmp_path / "laid.gguf"
    run = moestream_command("convert", stock, out, "--target", "plain")
    assert (run.returncode, run.stderr) == (0, "")
    assert re.fullmatch(rf"{re.escape(str(out))}: 1\.05 MiB in [0-9.]+ s, \d+ MB/s: 32 records for plain\n", run.stdout)
    run = moestream_command("convert", stock, out, "--force", "--target", "plain", "--json")
    told = json.loads(run.stdout)
    assert (told["paths"], told["records"], told["plan"]["target"]) == ([str(out)], 32, "plain")
    assert told["plan"]["parts"][0]["type"] == "Q4_0"
    run = moestream_command("convert", stock)
    assert run.returncode == 1
    assert run.stderr == "moestream: error: expected SOURCE OUT.gguf [TYPE], or -hf USER/REPO OUT.gguf [TYPE]\n"


def test_a_terminal_shows_a_bar(stock: Path, tmp_path: Path) -> None:
    code, drawn = at_terminal("convert", stock, tmp_path / "laid.gguf", columns=100)
    assert code == 0, drawn
    assert re.search(r"laying +0% \| +\| 0\.00B/9\d\dkB .*left", drawn)
    assert screen(drawn)[0].startswith(str(tmp_path / "laid.gguf"))


# What is there already, and what is not


def test_an_output_that_exists(stock: Path, tmp_path: Path) -> None:
    out = tmp_path / "laid.gguf"
    out.write_text("mine")
    assert refusal(OutputError, stock, out) == f"{out}: exists already; give another name, or --force to replace it"
    assert out.read_text() == "mine"
    convert(stock, out, force=True)
    assert verify(out).ok


def test_shards_that_exist(stock: Path, tmp_path: Path) -> None:
    convert(stock, tmp_path / "laid.gguf", split_max_bytes=300_000)
    before = files(tmp_path)
    said = refusal(OutputError, stock, tmp_path / "laid.gguf", split_max_bytes=300_000)
    assert re.search(r"laid-00001-of-0000\d\.gguf: exists already", said)
    assert files(tmp_path) == before


def test_the_source_as_output(stock: Path, tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    shutil.copy(stock, source)
    said = refusal(OptionError, source, tmp_path / "." / "model.gguf", force=True)
    assert said == f"{source}: is the source itself; give the output another name"
    assert source.read_bytes() == stock.read_bytes()


def test_a_folder_that_is_missing(stock: Path, tmp_path: Path) -> None:
    said = refusal(OutputError, stock, tmp_path / "no" / "laid.gguf")
    assert said == f"{tmp_path / 'no' / 'laid.gguf'}: there is no folder {tmp_path / 'no'}; make it first"


def test_force_and_resume_together(stock: Path, tmp_path: Path) -> None:
    said = refusal(OptionError, stock, tmp_path / "laid.gguf", force=True, resume=True)
    assert said == "--force starts anew and --resume continues: give one of them"


@pytest.mark.parametrize("broken", [{"truncate": 1}, {"big_endian": True}])
def test_a_broken_source_leaves_nothing(broken: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    refusal(ModelError, make(folder, "qwen3moe", **broken), tmp_path / "laid.gguf")
    assert files(tmp_path) == []


def test_values_that_are_no_numbers_if_asked_for(stock: Path, tmp_path: Path) -> None:
    source = tmp_path / "nan.gguf"
    data = bytearray(stock.read_bytes())
    tensor = next(t for t in gguf.GGUFReader(stock).tensors if t.name == "blk.1.ffn_up_exps.weight")
    at = tensor.data_offset + 5 * int(tensor.n_bytes) // 8
    data[at : at + 2] = struct.pack("<e", np.inf)
    source.write_bytes(data)
    said = refusal(ModelError, source, tmp_path / "laid.gguf", check_tensors=True)
    assert said == f"{source}: blk.1.ffn_up_exps.weight, expert 5 at byte {at} holds values that are no numbers"
    assert not (tmp_path / "laid.gguf").exists()


def test_too_little_room_is_seen_before_anything_is_written(
    stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1, used=0, free=100_000))
    said = refusal(OutputError, stock, tmp_path / "laid.gguf")
    assert re.search(
        r"laid\.gguf: 1\.05 MiB are needed, and .* has 97\.66 KiB free; make room, or name a file on another", said
    )
    assert not [name for name in files(tmp_path) if name.endswith((".gguf", ".part"))]


# What is broken off


def wanted(stock: Path, tmp_path: Path) -> bytes:
    path = tmp_path / "wanted" / "laid.gguf"
    path.parent.mkdir()
    convert(stock, path, target="x86-avx2")
    return path.read_bytes()


def failing_writes(monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException) -> None:
    """Lets so many writes through and then raises."""
    count = 0
    pwrite = os.pwrite

    def write(fd: int, data: Any, offset: int) -> int:
        nonlocal count
        count += 1
        if count > after:
            raise error
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", write)


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by an offset a read."""
    reads: list[int] = []
    read = stream.Inputs.read

    def counted(self: stream.Inputs, file: int, offset: int, buffers: Any) -> None:
        reads.append(offset)
        read(self, file, offset, buffers)

    monkeypatch.setattr(stream.Inputs, "read", counted)
    return reads


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("after", [0, 1, 50, 75, 90])
def test_a_full_disk_keeps_what_there_is_and_resume_gives_the_same_file(
    after: int, stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = wanted(stock, tmp_path), tmp_path / "laid.gguf"
    with monkeypatch.context() as patch:
        failing_writes(patch, after, OSError(errno.ENOSPC, "No space left on device"))
        said = refusal(OutputError, stock, out, target="x86-avx2")
    assert re.fullmatch(
        rf"{re.escape(str(out))}\.part: No space left on device: [0-9.]+ [KM]iB are still to be written, "
        r"[0-9.]+ GiB are free; make room and continue with --resume",
        said,
    )
    assert files(tmp_path) == ["laid.gguf.part", "laid.gguf.part.json", "wanted"]

    said = refusal(OutputError, stock, out, target="x86-avx2")
    assert (
        said
        == f"{out}.part: is there from a conversion that was broken off; --resume continues it, --force starts anew"
    )

    reads = counted_reads(monkeypatch)
    convert(stock, out, target="x86-avx2", resume=True)
    assert out.read_bytes() == whole
    assert files(tmp_path) == ["laid.gguf", "wanted"]
    again = len(reads)
    convert(stock, tmp_path / "wanted" / "other.gguf", target="x86-avx2")
    assert again <= (len(reads) - again) - after, "what is there is not read again"


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("split", [None, 300_000])
def test_interrupted_and_resumed(
    split: int | None, stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    convert(stock, tmp_path / "a" / "laid.gguf", split_max_bytes=split)
    out = tmp_path / "laid.gguf"
    for after in (20, 60):
        with monkeypatch.context() as patch:
            failing_writes(patch, after, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                convert(stock, out, split_max_bytes=split, resume=after > 20)
        assert not [name for name in files(tmp_path) if name.endswith(".gguf")]
    convert(stock, out, split_max_bytes=split, resume=True)
    names = files(tmp_path / "a")
    assert files(tmp_path) == sorted(["a", *names])
    for name in names:
        assert (tmp_path / name).read_bytes() == (tmp_path / "a" / name).read_bytes()


KILLED = """
import os, signal, sys
from moestream import convert
from moestream.layout import stream, writer
stream.CHUNK_BYTES, writer.SYNC_BYTES = 4096, 1
pwrite, count = os.pwrite, 0
def write(fd, data, offset):
    global count
    count += 1
    if count > int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return pwrite(fd, data, offset)
os.pwrite = write
convert(sys.argv[1], sys.argv[2], target="x86-avx2")
"""


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("after", [30, 80])
def test_killed_and_resumed(after: int, stock: Path, tmp_path: Path) -> None:
    whole, out = wanted(stock, tmp_path), tmp_path / "laid.gguf"
    run = subprocess.run([sys.executable, "-c", KILLED, stock, out, str(after)], capture_output=True, timeout=120)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert files(tmp_path) == ["laid.gguf.part", "laid.gguf.part.json", "wanted"]
    convert(stock, out, target="x86-avx2", resume=True)
    assert out.read_bytes() == whole
    assert files(tmp_path) == ["laid.gguf", "wanted"]


def broken_off(stock: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    with monkeypatch.context() as patch:
        failing_writes(patch, 60, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            convert(stock, out, **options)


@pytest.mark.usefixtures("small_pieces")
def test_another_conversion_is_not_continued(stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "laid.gguf"
    broken_off(stock, out, monkeypatch, target="x86-avx2")
    said = refusal(OptionError, stock, out, target="plain", resume=True)
    assert said == (
        f"{out}.part.json: is of another conversion: the source, an option or the version of moestream differs; "
        "give the same as then, or --force to start anew"
    )
    (tmp_path / "laid.gguf.part.json").write_text("{")
    said = refusal(OutputError, stock, out, target="x86-avx2", resume=True)
    assert re.search(r"laid\.gguf\.part\.json: cannot be read: .*; --force starts anew", said)
    convert(stock, out, target="plain", force=True)
    assert verify(out).ok and files(tmp_path) == ["laid.gguf"]


def test_resume_without_anything_to_continue_begins(stock: Path, tmp_path: Path) -> None:
    convert(stock, tmp_path / "laid.gguf", resume=True)
    assert verify(tmp_path / "laid.gguf").ok


@pytest.mark.usefixtures("small_pieces")
def test_what_was_quantised_is_not_quantised_again(f16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "laid.gguf"
    broken_off(f16, out, monkeypatch)
    assert files(tmp_path) == [
        "laid.gguf.part", "laid.gguf.part.json", "laid.gguf.stock.part", "laid.gguf.stock.part.json"
    ]  # fmt: skip
    before = (tmp_path / "laid.gguf.stock.part").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        failing_writes(patch, 5, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            convert(f16, out, resume=True)
    assert (tmp_path / "laid.gguf.stock.part").stat().st_mtime_ns == before
    convert(f16, out, resume=True)
    assert files(tmp_path) == ["laid.gguf"]
    assert verify(out).ok


@pytest.mark.parametrize("change", ["grows", "is touched", "has another header"])
def test_a_source_that_changes_underneath(
    change: str, stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "model.gguf", tmp_path / "laid.gguf"
    shutil.copy(stock, source)
    finish: Callable[..., Any] = writer._Syncs.finish

    def changed(self: Any) -> None:
        finish(self)
        status = source.stat()
        with open(source, "rb+") as file:
            file.seek(0, os.SEEK_END if change == "grows" else os.SEEK_SET)
            if change == "has another header":
                file.seek(30)
            file.write(b"G")
        if change != "is touched":
            os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
        else:
            os.utime(source)

    monkeypatch.setattr(writer._Syncs, "finish", changed)
    said = refusal(ModelError, source, out)
    assert said == f"{source}: was changed while it was read; run the command again when it rests"
    assert files(tmp_path) == ["model.gguf"]


def test_a_source_that_becomes_shorter(stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = tmp_path / "model.gguf", tmp_path / "laid.gguf"
    shutil.copy(stock, source)
    write = writer._Journal.write

    def shortened(self: Any, *args: Any, **options: Any) -> None:
        os.truncate(source, source.stat().st_size // 2)
        write(self, *args, **options)

    monkeypatch.setattr(writer._Journal, "write", shortened)
    said = refusal(ModelError, source, out)
    assert re.fullmatch(rf"{re.escape(str(source))}: ends at byte \d+; it was longer when it was opened", said)
    assert not out.exists()


def test_two_at_a_time(stock: Path, tmp_path: Path) -> None:
    out = tmp_path / "laid.gguf"
    with open(tmp_path / "laid.gguf.part", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        said = refusal(OutputError, stock, out, resume=True)
    assert said == f"{out}.part: another process is writing it; wait for that one"


def test_llama_cpps_words_are_in_the_error(f16: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        quantise(tmp_path / "no.gguf", tmp_path / "out.gguf", "Q4_0", progress=False)
    assert re.search(r"no\.gguf: llama\.cpp failed while quantising to Q4_0: .*no\.gguf", str(refused.value))
