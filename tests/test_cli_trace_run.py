"""`moestream trace` without a command: a text is written, and what happened when goes to files."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path

import numpy as np
import pytest

from command import moestream_command
from moestream import cli
from moestream.cli.generate import generate


def called(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = cli.main(["trace", *map(str, args)])
    return code, *capsys.readouterr()


def test_a_text_is_written_and_its_timeline_with_it(model: Path, tmp_path: Path) -> None:
    outputs = [tmp_path / name for name in ("run.html", "run.json", "run.npz")]
    run = moestream_command(
        *("trace", "-m", model, "-p", "The library", "-n", 4, "--ignore-eos", "-s", 1, "-t", 1),
        *(word for path in outputs for word in ("-o", path)),
    )
    assert (run.returncode, run.stderr) == (0, "")
    lines = [line.split() for line in run.stdout.splitlines()]
    assert lines[0] == "layer attention prefetch bubble experts waits hidden demand useful late wasted".split()
    n_layers = next(i for i, line in enumerate(lines) if line[:1] == ["mean"]) - 1
    assert [line[0] for line in lines[1 : 1 + n_layers]] == [str(i) for i in range(n_layers)]
    for path, line in zip(outputs, run.stdout.splitlines()[-3:], strict=True):
        assert line.startswith(f"{path}: ") and " events, " in line
    assert sorted(os.listdir(tmp_path)) == ["run.html", "run.json", "run.npz"]
    assert json.loads(outputs[1].read_text())["displayTimeUnit"] == "ms"
    with np.load(outputs[2]) as archive:
        header = json.loads(archive["header"].tobytes().decode())
        # the prompt, and each token but the last, which is not evaluated any more
        computed = archive["events"][archive["events"]["kind"] != 4]
    assert len(np.unique(computed["batch"])) == 4
    assert len(header["tokens"]) == sum(
        int(computed["tokens"][computed["batch"] == batch].max()) for batch in np.unique(computed["batch"])
    )
    assert "The library" in "".join(header["tokens"])
    assert header["layers"] == list(range(n_layers)) and header["dropped"] == 0


def test_json_is_all_that_is_on_stdout(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    code, out, err = called(capsys, "-m", model, "-p", "The library", "-n", 3, "--ignore-eos", "--json", "-o", path)
    value = json.loads(out)
    assert (code, err) == (0, "")
    assert value["output"] == [str(path)] and value["timings"]["decode_tokens"] == 2
    told = value["timeline"]
    assert (told["phase"], told["tokens"], told["evaluations"], told["dropped"]) == ("decode", 2, 2, 0)
    assert told["tokens_per_s"] > 0 and told["total"]["attention_s"] > 0
    assert [layer["windows"] for layer in told["layers"]] == [2] * len(told["layers"])


def test_a_prompt_alone_is_summed_up_as_one(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(capsys, "-m", model, "-p", "The library", "-n", 0, "-o", tmp_path / "run.npz")
    assert code == 0
    assert "\nprompt " in out and "tok/s" in out


def test_without_a_model_it_is_the_packaged_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = called(capsys, "-p", "The library is", "-n", 2, "-t", 1, "-o", tmp_path / "run.html")
    assert code == 0
    assert "SmallThinker" in (tmp_path / "run.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "options, message",
    [
        (["-o", "run.txt"], "run.txt: a timeline is written as .html (a page), .json (for Perfetto) or .npz (arrays)"),
        (["-o", "none/run.html"], "--output none/run.html: there is no folder none; make it first"),
        (["-o", "run.html", "-m", "none.gguf"], "none.gguf: "),
        (["-o", "run.html", "-n", "-2"], "--n-predict -2: give a number of tokens, or -1 for no limit"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_told_in_a_line_before_the_work(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = called(capsys, "-p", "The library", *options)
    assert (code, out) == (1, "")
    assert err.startswith(f"moestream: error: {message}") and len(err.splitlines()) == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "args, message",
    [
        (["-p", "x"], "moestream trace: error: the following arguments are required: -o/--output"),
        (["-o", "x.html"], "moestream trace: error: one of the arguments -p/--prompt -f/--file is required"),
        (["-p", "x", "-o", "x.html", "show"], "moestream trace: error: unrecognized arguments: show"),
        (["-p", "x", "-o", "x.html", "--no-mmap"], "moestream trace: error: unrecognized arguments: --no-mmap"),
        (["show", "a", "-p", "x"], "moestream trace show: error: unrecognized arguments: -p x"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_its_options_and_those_of_its_commands_do_not_mix(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        called(capsys, *args)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and len(err.splitlines()) == 2


def test_help_shows_the_options_and_the_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        called(capsys, "--help")
    out, _ = capsys.readouterr()
    assert ended.value.code == 0
    assert out.startswith("usage: moestream trace [-h]") and "       moestream trace COMMAND ...\n" in out
    for shown in (
        "\ncommands:\n",
        "record which experts a model takes",
        "show what a routing trace holds",
        "--prompt TEXT",
    ):
        assert shown in out
    assert max(map(len, out.splitlines())) <= 80
    assert called(capsys) == (0, out, ""), "alone it prints the same"


def test_its_options_are_those_of_generate() -> None:
    options = vars(cli._parser().parse_args(["trace", "-p", "x", "-o", "x.html"]))
    for name in ("command", "parser", "verbose", "json", "output"):
        options.pop(name)
    parameters = inspect.signature(generate).parameters
    callbacks = {"on_text", "load_progress", "prompt_progress", "should_stop", "watch"}
    assert set(options) == set(parameters) - callbacks - {"expert_streaming", "mmap"}
    assert options.pop("n_predict") == 30
    for name in set(options) - {"prompt"}:
        assert options[name] == parameters[name].default, name
