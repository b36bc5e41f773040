"""`moestream demo`: one text, written streamed and in memory, and compared."""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

import moestream
from command import PYTHON, at_terminal, moestream_command, screen
from factory import make
from moestream import cli, memory, models
from moestream.cli import _apart, _beside
from moestream.cli import demo as command
from moestream.cli.demo import RESIDENT, STREAMED, Comparison, demo
from moestream.cli.generate import Generation, generate
from synthetic.heads import make_sidecar

PROMPT = "The library is"
HEADINGS = ("Streamed from the disk", "All in memory")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"), "smallthinker", experts=32)


@pytest.fixture(scope="module")
def written(model: Path) -> tuple[Generation, Generation]:
    """Streamed and in memory, to put words into the mouths of."""
    options = dict(model=model, prompt=PROMPT, n_predict=4, ctx_size=64, threads=1, seed=1, ignore_eos=True)
    return generate(**options), generate(**options, expert_streaming=False)


@pytest.fixture
def saying(monkeypatch: pytest.MonkeyPatch, written: tuple[Generation, Generation]) -> Any:
    """Lets the two arms give what is asked for, without running a model."""

    def say(streamed: dict[str, Any], resident: dict[str, Any]) -> None:
        def generate_apart(
            *, expert_streaming: bool = True, on_text: Any, prompt_progress: Any, **_: Any
        ) -> Generation:
            made = (
                dataclasses.replace(written[0], **streamed)
                if expert_streaming
                else dataclasses.replace(written[1], **resident)
            )
            prompt_progress(1, 1)
            on_text(made.text)
            return made

        monkeypatch.setattr(command, "generate_apart", generate_apart)

    return say


# Routed by heads


@pytest.fixture(scope="module")
def with_sidecar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make(tmp_path_factory.mktemp("routed"), "qwen3moe", experts=32)
    make_sidecar(model, model.with_suffix(command.BESIDE))
    return model


def test_heads_route_the_second_text(with_sidecar: Path) -> None:
    run = moestream_command("demo", "-m", with_sidecar, "-n", 24, "-t", 1, "--json", "--prerouter")
    assert run.returncode == 0 and run.stderr == "", run.stderr
    value = json.loads(run.stdout)
    plain, routed = (value[arm]["experts"]["decode"] for arm in ("streamed", "predicted"))
    assert value["resident"] is None and value["identical"] is False
    assert plain["heads_bytes"] == 0 and routed["heads_bytes"] > 0 and routed["useful"] > 0
    assert routed["dropped"] == 0
    same = value["first_difference"]
    assert same >= 1, "the first step is the model's own"
    assert value["streamed"]["tokens"][:same] == value["predicted"]["tokens"][:same]


def test_both_texts_and_what_heads_cost_are_shown(with_sidecar: Path) -> None:
    sidecar = with_sidecar.with_suffix(command.BESIDE)
    args = ("demo", "-m", with_sidecar, "-n", 12, "-t", 1, "--prerouter", sidecar)
    run = moestream_command(*args, COLUMNS="100")
    assert run.returncode == 0, run.stderr
    rows = run.stdout.splitlines()
    assert rows.index("Streamed, routed by the model") < rows.index("Streamed, routed by heads")
    verdict = " ".join(run.stdout.split())
    assert "so the texts part at token" in verdict and "; 0 experts that they chose were left out." in verdict
    shown = {row.split()[0]: row for row in rows[rows.index("") :] if row}
    assert re.search(r"by routers +by heads$", run.stdout, re.M)
    assert re.match(r"heads +- +\d+%  of that time", shown["heads"])


def test_a_sidecar_that_is_not_there_is_asked_for(model: Path) -> None:
    run = moestream_command("demo", "-m", model, "--prerouter")
    name = model.with_suffix(command.BESIDE).name
    wanted = f"moestream: error: --prerouter: there is no {name} beside {model}; name a sidecar: --prerouter SIDECAR\n"
    assert (run.returncode, run.stdout, run.stderr) == (1, "", wanted)
    run = moestream_command("demo", "-m", model, "--force")
    assert (
        run.stderr
        == "moestream: error: --force: is about a sidecar of another model; name it with --prerouter SIDECAR\n"
    )


# Both texts


def test_streamed_and_resident_text_are_the_same_token_by_token(model: Path) -> None:
    run = moestream_command("demo", "-m", model, "-n", 24, "-t", 1, "--json")
    assert run.returncode == 0 and run.stderr == "", run.stderr
    value = json.loads(run.stdout)
    assert value["identical"] is True and value["first_difference"] is None
    assert value["streamed"]["tokens"] == value["resident"]["tokens"] != []
    assert value["prompt"] == command.PROMPTS["novel"]
    assert value["options"]["seed"] == command.SEED
    cached = value["streamed"]["experts"]["since_load"]
    assert cached["cache_bytes"] < 0.41 * moestream.describe(model).maximum_cache_bytes
    assert value["streamed"]["experts"]["decode"]["misses"] > 0 and value["resident"]["experts"] is None
    for arm in (value["streamed"], value["resident"]):
        assert arm["memory"]["peak_rss_bytes"] > arm["memory"]["rss_before_bytes"] > 0
        assert arm["timings"]["decode_tokens_per_s"] > 0


def test_wide_terminal_shows_them_beside_each_other(model: Path) -> None:
    code, drawn = at_terminal("demo", "-m", model, "-n", 24, "-t", 1, "-p", PROMPT, columns=120, rows=40)
    assert code == 0
    assert re.search(r"\x1b\[\d+F", drawn)  # drawn anew: while it was written
    rows = screen(drawn)
    assert max(map(len, rows)) < 120
    begin = next(number for number, row in enumerate(rows) if HEADINGS[0] in row)
    assert HEADINGS[1] in rows[begin]
    right = rows[begin].index(HEADINGS[1])
    texts = rows[begin + 3 : rows.index("", begin)]
    assert texts and all(row[:right].rstrip() == row[right:].rstrip() for row in texts)
    assert f"Prompt: {PROMPT}" in rows
    assert any(re.match(r"Identical: the same \d+ tokens", row) for row in rows)
    assert sum(row.startswith(HEADINGS[0]) for row in rows) == 1


@pytest.mark.parametrize("where", ["terminal", "pipe"])
def test_elsewhere_they_stand_one_below_the_other(model: Path, where: str) -> None:
    args = ("demo", "-m", model, "-n", 12, "-t", 1)
    if where == "terminal":
        code, drawn = at_terminal(*args, columns=80)
        rows = screen(drawn)
    else:
        run = moestream_command(*args, COLUMNS="80")
        code, rows = run.returncode, run.stdout.splitlines()
        assert "\x1b" not in run.stdout and run.stderr == ""
    assert code == 0
    assert rows.index(HEADINGS[0]) < rows.index(HEADINGS[1])
    assert max(map(len, rows)) < 80


def test_what_each_took_is_told(saying: Any, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saying({}, {})
    assert cli.main(["demo", "-m", str(model)]) == 0
    out = capsys.readouterr().out
    for label in ("speed", "memory", "peak RSS"):
        assert re.search(rf"^{label} +[\d.]+ \S+ +[\d.]+ \S+  \w", out, re.M), label
    for label in ("waiting", "cache", "hit rate", "per token"):
        assert re.search(rf"^{label} +[\d.]+( \wiB|%)  +[a-z]", out, re.M), label
    assert "of which" in out and "32 in each" in out
    assert "with a cache for 40% of the experts" in out


def test_memory_is_measured_where_nothing_else_ran(model: Path) -> None:
    ballast = bytearray(200 << 20)
    ballast[::4096] = b"x" * len(ballast[::4096])
    made = _apart.generate_apart(
        model=model, prompt=PROMPT, n_predict=1, ctx_size=64, threads=1, should_stop=lambda: False
    )
    assert made.peak_rss_bytes < memory.rss_bytes() - 100 * 2**20


# What they may say


@pytest.mark.parametrize(
    "streamed, resident, verdict, code",
    [
        ({"tokens": (5, 6, 7)}, {"tokens": (5, 6, 7)}, "Identical: the same 3 tokens, streamed and in memory.", 0),
        (
            {"tokens": (5, 6, 7)},
            {"tokens": (5, 8, 7)},
            "DIFFERENT from token 2 on: streamed it is token id 6, in memory token id 8.",
            1,
        ),
        (
            {"tokens": (5, 6), "finish_reason": "stop"},
            {"tokens": (5, 6, 7)},
            "DIFFERENT from token 3 on: streamed it is the end of the text, in memory token id 7.",
            1,
        ),
    ],
)
def test_the_verdict_is_that_of_the_tokens(
    saying: Any,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    streamed: dict[str, Any],
    resident: dict[str, Any],
    verdict: str,
    code: int,
) -> None:
    saying(streamed, resident)
    assert cli.main(["demo", "-m", str(model)]) == code
    assert verdict in capsys.readouterr().out.replace("\n", " ")
    assert cli.main(["demo", "-m", str(model), "--json"]) == code
    assert json.loads(capsys.readouterr().out)["identical"] is (code == 0)


def test_text_that_was_cut_off_is_no_difference(written: tuple[Generation, Generation]) -> None:
    cut = dataclasses.replace(written[1], tokens=written[0].tokens[:2], finish_reason="interrupted")
    comparison = Comparison(None, written[0], cut)
    assert comparison.first_difference is None and comparison.identical is None
    assert command._verdict(comparison) == "Interrupted: the 2 tokens that both wrote are the same."
    cut = dataclasses.replace(cut, tokens=(written[0].tokens[0], -1))
    assert Comparison(None, written[0], cut).first_difference == 1


def test_model_larger_than_memory_is_not_loaded_whole(
    saying: Any, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saying({}, {})
    monkeypatch.setattr(memory, "available_bytes", lambda: model.stat().st_size)
    assert cli.main(["demo", "-m", str(model)]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"^Not compared: the whole model is [\d.]+ \wiB, and [\d.]+ \wiB of memory is available\.$", out, re.M
    )
    assert HEADINGS[0] in out and HEADINGS[1] not in out


# The length of a text


def test_text_ends_with_the_context_the_model_was_trained_with(tmp_path: Path) -> None:
    short = make(tmp_path, "smallthinker", context=24)
    run = moestream_command("demo", "-m", short, "-p", PROMPT, "-n", 500, "-t", 1, "--seed", 3)
    assert run.returncode == 0, run.stderr
    assert "End of the text: the context is full: the model was trained with 24 tokens." in run.stdout
    run = moestream_command("demo", "-m", short, "-p", "x" * 24, "-t", 1)
    assert run.returncode == 1 and run.stdout == ""
    assert run.stderr == "moestream: error: the prompt has 25 tokens, the model was trained with 24: shorten it\n"


# What goes wrong


@pytest.mark.parametrize(
    "args, code, message",
    [
        (["--stream"], 2, "moestream demo: error: unrecognized arguments: --stream"),
        (["-p", "x", "--kind", "novel"], 2, "argument --kind: not allowed with argument -p/--prompt"),
        (["--kind", "song"], 2, "argument --kind: invalid choice: 'song'"),
        (["-n", "0"], 1, "--n-predict 0: there would be nothing to compare; give a number of tokens"),
        (["--expert-cache", "much"], 1, "size 'much': expected a number and a unit"),
        (["--expert-cache", "1KiB"], 1, "1.00 KiB cannot hold the experts of one token"),
        (["--temp", "-1"], 1, "--temp -1.0: the temperature is 0 or more"),
        (["-hf", "user/repo"], 1, "both a model file and -hf are given: name the model once"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_told_before_anything_is_shown(
    model: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, message: str
) -> None:
    try:
        assert cli.main(["demo", "-m", str(model), *args]) == code
    except SystemExit as exc:
        assert exc.code == code
    out, err = capsys.readouterr()
    assert out == "" and message in err
    assert len(err.splitlines()) == code


def test_missing_shipped_model_is_told_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "_FOLDER", tmp_path)
    for args in (["demo"], ["generate", "-p", "x"], ["inspect"]):
        assert cli.main(args) == 1
        assert capsys.readouterr().err == (
            "moestream: error: this copy of moestream came without demo-smallthinker.gguf: "
            "name a model with -m FILE or -hf USER/REPO\n"
        )


def test_shipped_models_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(models, "_FOLDER", tmp_path)
    for name in ("smallthinker", "qwen3moe"):
        (tmp_path / f"demo-{name}.gguf").symlink_to(model)
        assert moestream.demo_model(name) == tmp_path / f"demo-{name}.gguf"
    assert moestream.demo_model() == moestream.demo_model("smallthinker")
    with pytest.raises(
        moestream.OptionError, match=r"no model 'llama' is shipped: there are 'smallthinker' and 'qwen3moe'"
    ):
        moestream.demo_model("llama")


def test_ctrl_c_while_streaming_sums_up(model: Path) -> None:
    args = ["demo", "-m", str(model), "-c", "4096", "-n", "-1", "-t", "1"]
    with subprocess.Popen([*PYTHON, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and stderr == ""
    assert "Not compared: interrupted before the model in memory wrote the same." in stdout
    assert "End of the text: interrupted." in stdout


def test_ctrl_c_in_the_second_text_compares_what_there_is(model: Path) -> None:
    pieces: dict[str, list[str]] = {STREAMED: [], RESIDENT: []}
    comparison = demo(
        model=model,
        n_predict=200,
        threads=1,
        on_text=lambda arm, piece: pieces[arm].append(piece),
        should_stop=lambda: len(pieces[RESIDENT]) > 2,
    )
    assert comparison.streamed.text == "".join(pieces[STREAMED])
    assert comparison.streamed.text.startswith("".join(pieces[RESIDENT]))
    assert comparison.resident.finish_reason == "interrupted" and comparison.identical is None


def test_process_that_is_killed_is_told(model: Path) -> None:
    def kill(piece: str) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(
        moestream.MoestreamError, match=r"ended without a result \(SIGKILL; the system may be out of memory\)"
    ):
        _apart.generate_apart(
            model=model, prompt=PROMPT, n_predict=-1, ctx_size=4096, threads=1, on_text=kill, should_stop=lambda: False
        )


def test_no_process_is_left_when_the_command_is_killed(model: Path) -> None:
    args = ["demo", "-m", str(model), "-c", "4096", "-n", "-1", "-t", "1"]
    with subprocess.Popen([*PYTHON, *args], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline()
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert children
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


# The page


def test_words_stay_whole_and_indents_stay() -> None:
    assert _beside.wrap(" To be, or not to be\n    that is", 10) == ["To be, or", "not to be", "    that", "is"]
    assert _beside.wrap("abcdefgh ij", 3) == ["abc", "def", "gh", "ij"]
    assert _beside.wrap("", 10) == [""]


def test_wide_and_combining_characters_take_their_cells() -> None:
    assert _beside.cells("図書館") == 6 and _beside.cells("e\u0301") == 1
    assert _beside.wrap("図書館図書館", 6) == ["図書館", "図書館"]


def test_text_cannot_command_the_terminal() -> None:
    assert _beside.wrap("a\x1b[2Jb\r\x07", 20) == ["a\ufffd[2Jb\ufffd\ufffd"]


def test_columns_are_as_long_as_the_longer_text() -> None:
    rows = _beside.beside([["one"], ["two"]], ["a b c", "a"], 10)
    assert rows == ["one    two", "---    ---", "a b    a", "c"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [80, 120])
def test_page_longer_than_the_terminal_is_whole_in_the_end(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(_beside.shutil, "get_terminal_size", lambda: (columns, 10))
    monkeypatch.setattr(_beside, "_REDRAW_S", 0)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    page = _beside.Page(terminal, (HEADINGS[:1], HEADINGS[1:]))
    words = [f"word{number} " for number in range(120)]
    for which in (0, 1):
        for word in words:
            page.write(which, word)
    page.close()
    page.write(1, "too late")
    page.close()
    drawn = terminal.getvalue().replace("\n", "\r\n")  # as the line discipline does
    assert max(int(up) for up in re.findall(r"\x1b\[(\d+)F", drawn)) < 10  # never above what is in sight
    rows = screen(drawn)
    found = re.findall(r"word\d+", "\n".join(rows))
    assert sorted(found) == sorted(2 * [word.strip() for word in words])
    assert "too late" not in drawn


def test_page_of_an_interrupted_start_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    _beside.Page(terminal, (HEADINGS[:1], HEADINGS[1:])).close()
    assert terminal.getvalue() == ""
