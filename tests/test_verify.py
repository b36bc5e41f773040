"""Reading all and checking all: the damaged expert is named, and all of them are counted."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from command import moestream_command
from factory import make
from laid_reader import LaidFile, crc32c, rewritten
from moestream import ModelError, convert, verify
from moestream.layout.gguf_file import U32, open_gguf, pair


@pytest.fixture(scope="module")
def stock(folder: Path) -> Path:
    return make(folder, "qwen3moe", experts=5)


@pytest.fixture(scope="module", params=["plain", "x86-avx2"])
def laid(folder: Path, stock: Path, request: pytest.FixtureRequest) -> Path:
    path = folder / f"laid-{request.param}.gguf"
    convert(stock, path, target=request.param)
    return path


def changed(path: Path, out: Path, offsets: list[int], value: bytes = b"") -> Path:
    """A copy with a bit flipped, or bytes written, at each offset."""
    data = bytearray(path.read_bytes())
    for offset in offsets:
        data[offset : offset + len(value)] = value
        if not value:
            data[offset] ^= 1
    out.write_bytes(data)
    return out


def record(path: Path, block: int, expert: int) -> int:
    """Where a record begins."""
    tensor = LaidFile(path).tensors[f"moestream.blk.{block}.experts"]
    return tensor.data_offset + expert * int(tensor.shape[0])


def test_a_sound_laid_file(laid: Path) -> None:
    report = verify(laid, check_tensors=True)
    assert report.ok and report.laid and report.first is None
    assert (report.experts, report.tensors) == (20, 39)
    assert report.size_bytes == laid.stat().st_size


def test_a_sound_stock_file(stock: Path, folder: Path) -> None:
    report = verify(stock)
    assert report.ok and not report.laid
    assert (report.experts, report.tensors) == (20, 39)
    assert verify(make(folder, "qwen3moe", split=3)).ok


def test_the_first_bad_expert_is_named_and_all_are_counted(laid: Path, tmp_path: Path) -> None:
    offsets = [record(laid, 2, 1) + 100, record(laid, 2, 4), record(laid, 1, 3) + 20735]
    path = changed(laid, tmp_path / "bad.gguf", offsets)
    report = verify(path)
    assert not report.ok
    assert (report.bad_experts, report.bad_tensors) == (3, 0)
    assert report.first is not None
    assert (report.first.layer, report.first.expert, report.first.file) == (1, 3, path)
    assert report.first.offset == record(laid, 1, 3)
    assert str(report.first) == (
        f"layer 1, expert 3 (moestream.blk.1.experts): its checksum is another, at byte {record(laid, 1, 3)} of {path}"
    )


def test_padding_is_under_the_checksum(laid: Path, tmp_path: Path) -> None:
    report = verify(changed(laid, tmp_path / "bad.gguf", [record(laid, 0, 1) - 1]))
    assert report.first is not None
    assert (report.first.layer, report.first.expert) == (0, 0)


def test_padding_that_is_not_zero(laid: Path, tmp_path: Path) -> None:
    """With a checksum that says that it shall be so."""
    path = changed(laid, tmp_path / "padded.gguf", [record(laid, 0, 1) - 1])
    found = LaidFile(path)
    checksums = [crc32c(found.records(0)[0].tobytes()), *found["checksums"][1:]]
    rewritten(path, tmp_path / "bad.gguf", {"moestream.checksums": pair("moestream.checksums", U32, checksums)})
    report = verify(tmp_path / "bad.gguf")
    assert report.bad_experts == 1
    assert report.first is not None and "bytes between its parts are not zero" in str(report.first)


def test_values_that_are_no_numbers_in_a_stock_file(
    stock: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = open_gguf(stock)
    down = next(tensor for tensor in file.tensors if tensor.name == "blk.1.ffn_down_exps.weight")
    norm = next(tensor for tensor in file.tensors if tensor.name == "blk.2.attn_norm.weight")
    path = changed(stock, tmp_path / "nan.gguf", [down.offset + 3 * down.size_bytes // 5], struct.pack("<e", np.nan))
    report = verify(path)
    assert (report.bad_experts, report.bad_tensors) == (1, 0)
    assert str(report.first) == (
        f"layer 1, expert 3 (blk.1.ffn_down_exps.weight): holds values that are no numbers, at byte "
        f"{down.offset + 3 * down.size_bytes // 5} of {path}"
    )
    report = verify(changed(path, tmp_path / "nan2.gguf", [norm.offset + 4], struct.pack("<f", np.inf)))
    assert (report.bad_experts, report.bad_tensors) == (1, 1)
    assert str(report.first).startswith("blk.2.attn_norm.weight: holds values that are no numbers")
    assert capfd.readouterr().err == "", "ggml prints its own lines beside ours"


def test_values_in_records_are_looked_at_if_asked_for(stock: Path, tmp_path: Path) -> None:
    down = next(tensor for tensor in open_gguf(stock).tensors if tensor.name == "blk.1.ffn_down_exps.weight")
    source = changed(stock, tmp_path / "nan.gguf", [down.offset + down.size_bytes // 5], struct.pack("<e", np.nan))
    for target in ("plain", "x86-avx2"):
        convert(source, tmp_path / f"{target}.gguf", target=target)
        assert verify(tmp_path / f"{target}.gguf").ok, "the checksums are those of what was written"
        report = verify(tmp_path / f"{target}.gguf", check_tensors=True)
        assert report.bad_experts == 1
        assert report.first is not None
        assert (report.first.layer, report.first.expert, report.first.tensor) == (1, 1, "blk.1.ffn_down_exps.weight")


def test_a_truncated_file(laid: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(laid.read_bytes()[:-4096])
    with pytest.raises(ModelError, match="truncated: tensor moestream.blk.3.experts"):
        verify(path)


def test_the_command(laid: Path, tmp_path: Path) -> None:
    run = moestream_command("verify", laid)
    assert (run.returncode, run.stderr) == (0, "")
    first, second = run.stdout.splitlines()
    assert re.fullmatch(rf"{re.escape(str(laid))}: a laid file, [0-9.]+ [KM]iB in [0-9.]+ s, \d+ MB/s", first)
    assert second == "All is well: 20 experts, 39 other tensors."

    bad = changed(laid, tmp_path / "bad.gguf", [record(laid, 0, 2)])
    run = moestream_command("verify", bad)
    assert run.returncode == 1
    assert "DAMAGED: 1 of 20 experts, 0 of 39 other tensors. The first: layer 0, expert 2 (" in run.stdout
    assert run.stdout.endswith("Download or convert the model again.\n")

    run = moestream_command("verify", bad, "--json")
    assert run.returncode == 1
    report = json.loads(run.stdout)
    assert report["ok"] is False and report["bad_experts"] == 1 and report["first"]["expert"] == 2
