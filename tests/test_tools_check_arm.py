"""tools/check_arm: that it can fail, what it asks for; and, where that is there, what it finds."""

from __future__ import annotations

import faulthandler
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moestream.layout.interleaving import Interleaving, native_target

CHECK_ARM = Path(__file__).resolve().parent.parent / "tools" / "check_arm"
LLAMA_CPP = os.environ.get("MOESTREAM_LLAMA_CPP")
ARM_BUILD = os.environ.get("MOESTREAM_ARM_BUILD")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    loader = importlib.machinery.SourceFileLoader("tools_check_arm", str(CHECK_ARM))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("tools_check_arm", loader))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    loader.exec_module(module)
    return module


def lacking() -> str | None:
    """Why the comparison cannot be made here."""
    for name in ("aarch64-linux-gnu-gcc", "aarch64-linux-gnu-g++", "qemu-aarch64", "make"):
        if not shutil.which(name):
            return f"{name} is not installed"
    if native_target().startswith("arm"):
        return "on ARM our own descriptions of it are not used"
    return None if LLAMA_CPP else "MOESTREAM_LLAMA_CPP is not set to llama.cpp's sources, which take minutes to compile"


@pytest.mark.skipif(lacking() is not None, reason=str(lacking()))
@pytest.mark.parametrize("target", ["arm-dotprod", "arm-i8mm"])
def test_our_tables_are_those_of_ggml_on_arm(target: str) -> None:
    faulthandler.cancel_dump_traceback_later()  # compiling may take longer than a test
    command = [sys.executable, str(CHECK_ARM), "--target", target, "--llama-cpp", str(LLAMA_CPP)]
    done = subprocess.run(
        [*command, *(["--build", ARM_BUILD] if ARM_BUILD else [])], capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stderr
    for name in ("Q4_0", "Q8_0", "IQ4_NL", "MXFP4"):
        for rows, verdict in ((32, "our table is the same"), (12, "our table is the same"), (6, "plain, as we say")):
            (line,) = (line for line in done.stdout.splitlines() if f" {name}, 96 x {rows}:" in line)
            assert line.endswith(verdict)
    assert f"  {target}: row kernels neon-dotprod: q4_0, q8_0, on 10 matrices\n" in done.stdout


def found(table: Interleaving, **changed: Any) -> dict[str, Any]:
    """What tests/arm/tables prints of a table."""
    printed = {"name": table.name, "rows": table.rows, "gives_back": True}
    return printed | {"bits": table.bits.tolist(), "inverted": table.inverted.tolist()} | changed


def test_a_difference_is_told(tool: Any) -> None:
    bits = np.arange(576)
    ours = Interleaving.from_table("ours", 2, 4, bits, np.zeros(576, int))
    assert tool.compared("Q4_0", found(ours), ours) == ("ours, our table is the same", True)
    for changed in ({"bits": bits[::-1].tolist()}, {"inverted": [1] * 576}, {"rows": 8}):
        assert tool.compared("Q4_0", found(ours, **changed), ours) == ("ours, but ours, ours, differs", False)
    assert tool.compared("Q4_0", found(ours, gives_back=False), ours) == (
        "ours does not give back the plain bytes",
        False,
    )
    assert tool.compared("Q4_0", None, ours) == ("plain, but we say ours", False)
    assert tool.compared("Q4_0", None, None) == ("plain, as we say", True)
    left_plain = "ours, which we do not describe: it stays plain"
    assert tool.compared("Q4_0", found(ours), None) == (left_plain, False)
    assert tool.compared("Q6_K", found(ours), None) == (left_plain, True)


def test_a_wrong_checksum_is_told(tool: Any) -> None:
    told = {"target": "arm-i8mm", "way": "tables", "crc32c": 1, "portable": 1, "known": 0xE3069283}
    differences = tool.differences_of_checksum("arm-i8mm", told)
    assert [difference.partition(" is ")[0] for difference in differences] == ["way", "crc32c", "portable"]


def test_a_different_kernel_is_told(tool: Any) -> None:
    names = [line.partition(":")[0] for line in tool.KERNELS]
    good = [
        {"set": name, "kernels": line, "matrices": 10, "different_dots": 0, "different_sums": 0}
        for name, line in zip(names, tool.KERNELS, strict=True)
    ]
    assert tool.differences_of_kernels("arm-i8mm", good) == []
    for changed, said in (
        ({"different_dots": 3}, "3 dots of neon-dotprod have not the bits of ggml's vec_dot"),
        ({"different_sums": 2}, "2 sums of neon-dotprod have not the bits of the portable ones"),
        ({"kernels": "neon-dotprod: ggml's dots"}, "the row kernels are [\"neon-dotprod: ggml's dots\", "),
    ):
        (told,) = tool.differences_of_kernels("arm-i8mm", [good[0] | changed, *good[1:]])
        assert told.startswith(said)


def failed(tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["check_arm", *arguments])
    assert tool.main() == 1
    return capsys.readouterr().err


def test_it_says_which_programs_it_lacks(tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(tool.shutil, "which", lambda name: None if name == "qemu-aarch64" else name)
    message = failed(tool, monkeypatch, capsys, "--llama-cpp", ".")
    assert message.startswith("check_arm: qemu-aarch64 not found; Debian: apt install ")


def test_it_says_which_folder_it_wants(tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(tool.shutil, "which", lambda name: name)
    message = failed(tool, monkeypatch, capsys, "--llama-cpp", str(tmp_path))
    assert message == (
        f"check_arm: --llama-cpp {tmp_path}: no ggml/CMakeLists.txt in it; "
        "give the folder vendor/llama.cpp of llama-cpp-python's sources\n"
    )
