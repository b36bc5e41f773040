"""tools/demo: which commands it runs for which options. Nothing is set up or run here."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).resolve().parent.parent / "tools" / "demo"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The commands that `tools/demo` runs, without their folder, for its arguments."""
    loader = importlib.machinery.SourceFileLoader("tools_demo", str(DEMO))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("tools_demo", loader))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    loader.exec_module(module)
    commands: list[list[str]] = []
    monkeypatch.setattr(module, "prepare", lambda: commands.append(["prepare"]))
    monkeypatch.setattr(module, "run", lambda command, **_: commands.append([Path(command[0]).name, *command[1:]]))
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(*arguments: str) -> list[list[Any]]:
        monkeypatch.setattr(sys, "argv", [str(DEMO), *arguments])
        module.main()
        return commands

    return run


def test_alone_it_compares_on_the_shipped_model_and_ends_with_what_is_next(
    ran: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran() == [["prepare"], ["moestream", "demo"]]
    last = capsys.readouterr().out.splitlines()[-5:]
    assert last[0].startswith("Next, ") and last[1].endswith("tools/demo --large")
    assert last[3].endswith("-m MODEL.gguf -p 'The library is'") and "-hf USER/REPO" in last[4]


def test_other_options_are_those_of_moestream_demo(ran: Any) -> None:
    assert ran("-p", "In the beginning", "--seed", "7")[1:] == [
        ["moestream", "demo", "-p", "In the beginning", "--seed", "7"]
    ]


def test_large_makes_a_model_and_removes_it(ran: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, make, inspect, generate = ran("--large", "-n", "8")
    assert Path(make[1]).name == "make_model" and inspect[:2] == ["moestream", "inspect"]
    assert generate[:2] == ["moestream", "generate"] and generate[-4:] == ["-p", "The library is", "-n", "8"]
    assert generate[3] == inspect[2] == make[2] and tmp_path in generate[3].parents
    assert not generate[3].parent.exists()
    assert "tools/demo --large --expert-cache 500MiB\n" in capsys.readouterr().out


def test_kept_model_is_named_with_how_to_remove_it(ran: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ran("--large", "--keep")[-1][3].parent
    assert folder.is_dir()
    assert f"To remove it: rm -r {folder}" in capsys.readouterr().out


@pytest.mark.parametrize("named", [["-m", "x.gguf"], ["-hf", "user/repo:Q4_0"]])
def test_own_model_is_inspected_and_streamed(ran: Any, named: list[str]) -> None:
    inspect, generate = ran(*named, "-p", "x")[1:]
    assert inspect == ["moestream", "inspect", *(named[1:] if named[0] == "-m" else named)]
    assert generate == ["moestream", "generate", *named, "-p", "x"]


@pytest.mark.parametrize(
    "arguments, message",
    [(["--keep"], "--keep is for the model that --large makes"), (["--large", "-m", "x"], "give one of them")],
)
def test_options_that_exclude_each_other_are_told_before_anything_is_set_up(
    ran: Any, arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        ran(*arguments)
