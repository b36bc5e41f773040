"""Laid files: streamed bit for bit, one read an expert, checked by checksum; damaged tables are refused with what is wrong."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moestream
import native
from command import moestream_command
from factory import make
from isolation import isolated
from laid import Keys, lay_plain
from logits import stock, streamed
from moestream import ExpertStreaming
from moestream.errors import ModelError, OptionError

ARCHITECTURES = ("qwen3moe", "gpt-oss", "smallthinker", "deepseek2", "qwen3next")


def differing(path: Path, laid: Path) -> list[str]:
    """How logits out of the laid file differ from stock's on the stock file."""
    smallest = moestream.describe(laid).minimum_cache_bytes
    cases = [
        ExpertStreaming(kernels="plain", reader="uring", cache=smallest),
        ExpertStreaming(kernels="plain", reader="pread", cache="auto", verify=True),
        ExpertStreaming(kernels="plain", reader="mmap", verify=True),
        ExpertStreaming(kernels="interleaved", reader="uring", cache=smallest, direct=False),
        ExpertStreaming(kernels="interleaved", reader="pread", cache=smallest, verify=True),
    ]
    expected = {interleaved: stock(path, interleaved=interleaved) for interleaved in (False, True)}
    wrong = []
    for streaming in cases:
        logits, stats = streamed(laid, streaming)
        if not np.array_equal(logits, expected[streaming.kernels != "plain"]):
            wrong.append(f"{streaming} differs")
        ahead = 2  # a prompt asks for experts of the next layer, now and then for one that it does not need
        if stats.reader != "mmap" and not stats.misses <= stats.reads <= stats.misses + ahead:
            wrong.append(f"{streaming}: {stats.reads} reads for {stats.misses} missing experts")
    return wrong


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_laid_by_others_streams_bit_for_bit(architecture: str, tmp_path: Path) -> None:
    path = make(tmp_path, architecture)
    laid = lay_plain(path, tmp_path / "laid.gguf", gap=64, record_padding=4096)
    assert isolated(differing, path, laid) == []


def mapped(path: Path, kernels: str) -> tuple[np.ndarray, str]:
    logits, stats = streamed(path, ExpertStreaming(reader="mmap", kernels=kernels))
    return logits, stats.kernels


def test_mapped_experts_are_computed_with_rows_as_the_file_has_them(tmp_path: Path) -> None:
    path, laid = make(tmp_path), tmp_path / "laid.gguf"
    moestream.convert(path, laid, progress=False)
    if all(matrix.form == "plain" for layer in moestream.describe(laid).moe_layers for matrix in layer.matrices):
        pytest.skip("ggml interleaves no Q4_0 of this shape on this CPU")
    logits, kernels = isolated(mapped, laid, "auto")
    assert kernels == "interleaved" and np.array_equal(logits, isolated(stock_interleaved, path))
    with pytest.raises(
        OptionError, match=r"interleaved \(q4_0 .*\) in a way that is not computed with here.* --target plain"
    ):
        mapped(laid, "plain")
    with pytest.raises(
        ModelError, match=r"pages of .*, which hold plain rows; use kernels=\"plain\" or another reader"
    ):
        mapped(path, "interleaved")


def stock_interleaved(path: Path) -> np.ndarray:
    return stock(path, interleaved=True)


def test_a_file_for_another_machine_is_converted_on_arrival_and_says_so(tmp_path: Path) -> None:
    path, laid = make(tmp_path), tmp_path / "laid.gguf"
    moestream.convert(path, laid, target="arm-dotprod", progress=False)
    _, stats = streamed(laid, ExpertStreaming(reader="pread", kernels="plain"))
    assert stats.convert_s > 0
    assert any(
        "(blk.0.ffn_gate_exps.weight is stored q4_0 4x4, the kernels want plain rows)" in note
        and note.endswith(f"moestream convert {laid} NEW.gguf --target plain")
        for note in stats.notes
    )


def test_a_file_for_this_machine_needs_no_conversion(tmp_path: Path) -> None:
    laid = tmp_path / "laid.gguf"
    moestream.convert(make(tmp_path), laid, progress=False)
    _, stats = streamed(laid, ExpertStreaming(reader="pread"))
    assert stats.misses > 0 and stats.convert_s == 0
    assert not any("converted" in note for note in stats.notes)


def neuron_major_error(exact: Path, laid: Path, plain: Path) -> tuple[float, float]:
    """How far the logits of two Q4_0 files, mean over all, are from those of the F16 file they were made of."""
    smallest = moestream.describe(laid).minimum_cache_bytes
    expected = stock(exact, interleaved=False)
    found = [
        streamed(laid, ExpertStreaming(reader=reader, kernels="plain", **cache))[0]
        for reader, cache in (("pread", {}), ("mmap", {}), ("uring", {"cache": smallest}))
    ]
    assert all(np.array_equal(found[0], other) for other in found[1:])
    return float(np.abs(found[0] - expected).mean()), float(
        np.abs(streamed(plain, ExpertStreaming(kernels="plain"))[0] - expected).mean()
    )


def test_a_neuron_major_file_is_as_near_to_its_source_as_a_plain_one(tmp_path: Path) -> None:
    exact = make(tmp_path, "smallthinker", type="F16")
    laid, plain = tmp_path / "neuron.gguf", tmp_path / "plain.gguf"
    moestream.convert(exact, laid, "Q4_0", neuron_major=True, target="plain", progress=False)
    moestream.convert(exact, plain, "Q4_0", target="plain", progress=False)
    assert {matrix.form for matrix in moestream.describe(laid).moe_layers[0].matrices} >= {"neuron-major"}
    neuron_major, row_major = isolated(neuron_major_error, exact, laid, plain)
    assert neuron_major < 1.25 * row_major


def test_a_stock_file_takes_a_read_for_each_matrix(tmp_path: Path) -> None:
    _, stats = streamed(make(tmp_path), ExpertStreaming(reader="pread"))
    assert stats.reads == 3 * stats.misses > 0


def test_a_laid_file_is_described_like_its_source(tmp_path: Path) -> None:
    path = make(tmp_path, "qwen3moe", expert_types={"down": "Q8_0"})
    source, laid = moestream.describe(path), moestream.describe(lay_plain(path, tmp_path / "laid.gguf"))
    assert laid.laid and not source.laid
    assert (laid.architecture, laid.layers, laid.dense_bytes, laid.expert_bytes) == (
        source.architecture,
        source.layers,
        source.dense_bytes,
        source.expert_bytes,
    )
    for ours, theirs in zip(laid.moe_layers, source.moe_layers, strict=True):
        assert (ours.experts, ours.matrices, ours.expert_bytes) == (
            theirs.experts,
            theirs.matrices,
            theirs.expert_bytes,
        )
        assert ours.record_bytes % 4096 == 0 and ours.record_bytes - ours.expert_bytes < 4096 + 3 * 64
        assert theirs.record_bytes is None


def test_stock_llama_cpp_refuses_a_laid_file_by_its_name(tmp_path: Path) -> None:
    laid = lay_plain(make(tmp_path), tmp_path / "laid.gguf")
    assert "unknown model architecture: 'moestream'" in isolated(log_of_loading, laid)


def loaded_whole(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        moestream.Llama(str(path), verbose=False)
    return str(caught.value)


def test_loading_it_whole_is_refused_with_what_to_do(tmp_path: Path) -> None:
    laid = lay_plain(make(tmp_path), tmp_path / "laid.gguf")
    assert isolated(loaded_whole, laid) == (
        f"{laid}: is a laid file, which only streaming can load; give expert_streaming=True, or make a stock file of it: "
        f"moestream export {laid} STOCK.gguf"
    )


def test_the_demo_streams_it_and_says_why_there_is_nothing_to_compare(tmp_path: Path) -> None:
    laid = lay_plain(make(tmp_path), tmp_path / "laid.gguf")
    answer = moestream_command("demo", "-m", laid, "-p", "x", "-n", "4")
    assert answer.returncode == 0, answer.stderr
    said = " ".join(answer.stdout.split())
    assert "Not compared: a laid file can only be streamed; moestream export makes a stock one of it." in said


def log_of_loading(path: Path) -> str:
    import ctypes

    import llama_cpp

    lines: list[str] = []
    callback = llama_cpp.llama_log_callback(lambda level, text, data: lines.append(text.decode()))
    llama_cpp.llama_log_set(callback, ctypes.c_void_p())
    with pytest.raises(ValueError):
        llama_cpp.Llama(str(path), verbose=True)
    return "".join(lines)


@pytest.mark.parametrize("reader", ["pread", "uring", "mmap"])
def test_a_changed_byte_is_found_on_arrival_when_asked(reader: str, tmp_path: Path) -> None:
    laid = lay_plain(make(tmp_path), tmp_path / "laid.gguf")
    with native.opened(laid) as source:
        layer = source.layers[0]
        offset, n = layer.record_offset, layer.record_bytes
    content = bytearray(laid.read_bytes())
    for expert in range(moestream.describe(laid).moe_layers[0].experts):
        content[offset + expert * n + n // 3] ^= 1
    laid.write_bytes(content)
    message = isolated(failure_of, laid, reader)
    assert message.startswith(f"{laid}: expert ")
    assert " of moestream.blk.0.experts at offset " in message
    assert (
        "does not have the checksum it was written with; the file is damaged, convert or download it again" in message
    )


def failure_of(path: Path, reader: str) -> str:
    with pytest.raises(moestream.ExpertReadError) as caught:
        streamed(path, ExpertStreaming(reader=reader, verify=True))
    return str(caught.value)


def set_entry(key: str, index: int, value: Any) -> Callable[[Keys], None]:
    def change(keys: Keys) -> None:
        values, kind, entry = keys[f"moestream.{key}"]
        values[index] = value
        keys[f"moestream.{key}"] = (values, kind, entry)

    return change


def replaced(key: str, value: Any) -> Callable[[Keys], None]:
    def change(keys: Keys) -> None:
        keys[f"moestream.{key}"] = (value, *keys[f"moestream.{key}"][1:])

    return change


def removed(key: str) -> Callable[[Keys], None]:
    return lambda keys: keys.pop(f"moestream.{key}") and None


def added(keys: Keys) -> None:
    keys["moestream.part.colour"] = keys["moestream.part.form"]


def unsigned_forms(keys: Keys) -> None:
    keys["moestream.part.form"] = (
        keys["moestream.part.form"][0],
        keys["moestream.part.form"][1],
        keys["moestream.part.type"][2],
    )


DAMAGE: dict[str, tuple[Callable[[Keys], None], str]] = {
    "another version": (
        replaced("version", 2),
        "a laid file of version 2, this moestream reads version 1; update moestream, or convert the model again",
    ),
    "no checksums": (removed("checksums"), "key moestream.checksums is missing"),
    "an unknown key": (added, "key moestream.part.colour is not known"),
    "forms of another type": (unsigned_forms, "key moestream.part.form is an array of u32, expected i32"),
    "too few types": (replaced("part.type", [2]), r"key moestream.part.type has 1 entries, expected 6"),
    "a foreign tensor": (
        set_entry("part.tensor", 0, "blk.0.attn_q.weight"),
        "part blk.0.attn_q.weight is no expert tensor of block 0",
    ),
    "a tensor twice": (
        set_entry("part.tensor", 1, "blk.0.ffn_gate_exps.weight"),
        "part blk.0.ffn_gate_exps.weight is there twice",
    ),
    "an unknown form": (set_entry("part.form", 1, 1), "has form 1, which is not defined"),
    "a neuron-major gate": (set_entry("part.form", 0, -1), "is neuron-major, which is for ffn_down_exps"),
    "a wrong size": (set_entry("part.bytes", 0, 64), "has 64 bytes; type 2 with "),
    "an absurd shape": (set_entry("part.rows", 0, 2**63), "has .* bytes; type 2 with .* has 0"),
    "an unknown type": (set_entry("part.type", 0, 4_000_000_000), "type -294967296 with .* has 0"),
    "an unaligned part": (
        set_entry("part.offset", 1, 100),
        "begins at 100 of its record, expected a multiple of 64 from ",
    ),
    "parts that overlap": (
        set_entry("part.offset", 1, 0),
        "begins at 0 of its record, expected a multiple of 64 from ",
    ),
    "a part behind the end": (set_entry("part.offset", 2, 64 * 10**6), "part blk.0.ffn_.* ends at .* of a record of "),
    "layers in disorder": (replaced("layer.block", [0, 0]), "moestream.layer.block is not ascending at entry 1"),
    "a layer too few": (
        lambda keys: [replaced("layer.block", [0])(keys), replaced("layer.parts", [3])(keys)] and None,
        "3 parts belong to no layer",
    ),
    "too many parts": (replaced("layer.parts", [4, 2]), "block 0 has 4 parts"),
    "a checksum too few": (
        lambda keys: replaced("checksums", keys["moestream.checksums"][0][1:])(keys),
        "has .* records and .* checksums",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_tables_are_refused_with_what_is_wrong(damage: str, tmp_path: Path) -> None:
    change, message = DAMAGE[damage]
    laid = lay_plain(make(tmp_path, "qwen3moe", layers=2), tmp_path / "laid.gguf", change=change)
    with pytest.raises(ModelError, match=message) as caught:
        moestream.describe(laid)
    assert str(caught.value).startswith(f"{laid}: ")


def test_a_truncated_laid_file_names_the_records(tmp_path: Path) -> None:
    laid = lay_plain(make(tmp_path), tmp_path / "laid.gguf")
    laid.write_bytes(laid.read_bytes()[:-4096])
    with pytest.raises(ModelError, match=r"truncated: tensor moestream\.blk\.\d+\.experts is at bytes"):
        moestream.describe(laid)


def test_a_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    laid = lay_plain(make(tmp_path), tmp_path / "laid.gguf")
    with (
        contextlib.closing(native.PythonReader(fails=lambda offset: -errno.EIO)) as reader,
        native.opened(laid) as source,
    ):
        with native.store(source, reader, native.lib.ms_slots_minimum_bytes(source, native.ffi.NULL)) as store:
            code, message = native.failure(store.acquire, 0, [3])
        record_bytes = source.layers[0].record_bytes
        offset = source.layers[0].record_offset + 3 * record_bytes
    assert code == -errno.EIO
    assert (
        message
        == f"{laid}: reading expert 3 of moestream.blk.0.experts at offset {offset} ({record_bytes} bytes): Input/output error"
    )
