"""The `moestream` command, run as a user runs it: in a process of its own, its output and exit code read."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import fake_hub
import moestream
from command import PYTHON, at_terminal, moestream_command
from factory import make
from moestream import cli
from moestream.cli import generate as generate_command
from moestream.cli.inspect import advise, layer_ranges

GIB = 2**30
PROMPT_TOKENS = 1 + len("The library is")  # the tokenizer of `make` is one of bytes, with a token to begin with


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"), arch="qwen3moe", type="Q4_0", tokenizer="bytes")


def generate(model: Path, *args: object) -> subprocess.CompletedProcess[str]:
    return moestream_command("generate", "-m", model, "-p", "The library is", "-c", 256, "-t", 1, *args)


def generated(model: Path, *args: object) -> dict:
    run = generate(model, "--json", *args)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return json.loads(run.stdout)


# The command itself


def test_version_names_everything_that_matters() -> None:
    run = moestream_command("--version")
    assert run.returncode == 0
    versions = dict(line.split() for line in run.stdout.splitlines())
    assert versions == {name: importlib.metadata.version(name) for name in ("moestream", "llama-cpp-python", "gguf")}


def test_alone_it_prints_its_help() -> None:
    run = moestream_command()
    assert run.returncode == 0
    assert run.stdout.startswith("usage: moestream")
    assert "demo" in run.stdout and "generate" in run.stdout and "inspect" in run.stdout


@pytest.mark.parametrize("command", cli._COMMANDS)
def test_help_fits_a_narrow_terminal(command: str) -> None:
    run = moestream_command(command, "--help", COLUMNS="80")
    assert run.returncode == 0
    assert max(map(len, run.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    "args, message",
    [
        (["gen"], "invalid choice: 'gen'"),
        (["generate", "-p", "x", "--unknown"], "moestream generate: error: unrecognized arguments: --unknown"),
        (["generate", "-p", "x", "--expert", "3GiB"], "unrecognized arguments: --expert 3GiB"),
        (["generate"], "one of the arguments -p/--prompt -f/--file is required"),
        (["generate", "-p", "x", "-f", "y"], "-f/--file: not allowed with argument -p/--prompt"),
        (["generate", "-p", "x", "-n", "many"], "argument -n/--n-predict/--predict: invalid int value: 'many'"),
        (["generate", "-p", "x", "-fa", "perhaps"], "-fa/--flash-attn: 'perhaps' is neither on nor off"),
        (["generate", "-p", "x", "--kernels", "fast"], "argument --kernels: invalid choice: 'fast'"),
        (["generate", "-p", "x", "--policy", "belady"], "argument --policy: invalid choice: 'belady'"),
        (["generate", "-p", "x", "-ctk", "q3_k"], "argument -ctk/--cache-type-k: invalid choice: 'q3_k'"),
        (["inspect", "a", "b"], "moestream inspect: error: unrecognized arguments: b"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_refused_with_exit_code_2(args: list[str], message: str) -> None:
    run = moestream_command(*args)
    assert run.returncode == 2
    assert run.stdout == ""
    assert message in run.stderr
    assert len(run.stderr.splitlines()) == 2  # the error, and where the help is


@pytest.mark.parametrize("command", ["demo", "generate", "inspect"])
def test_options_are_the_parameters_of_the_public_function(command: str) -> None:
    module = cli._COMMANDS[command]
    args = [command, "-p", "x"] if command == "generate" else [command]
    options = vars(cli._parser().parse_args(args))
    for name in ("command", "parser", "verbose", "json", "layers"):
        options.pop(name, None)
    parameters = inspect.signature(getattr(module, command)).parameters
    callbacks = {"on_ready", "on_text", "load_progress", "prompt_progress", "should_stop", "watch"}
    assert set(options) == set(parameters) - callbacks
    for name in set(options) - {"prompt"}:
        assert options[name] == parameters[name].default, name


# generate


def test_text_goes_to_stdout_and_the_summary_to_stderr(model: Path) -> None:
    run = generate(model, "-n", 8, "--temp", 0, "--ignore-eos")
    assert run.returncode == 0
    assert run.stdout.endswith("\n") and "tok/s" not in run.stdout
    prompt, decode = re.findall(r"^(prompt|decode) .*", run.stderr, re.MULTILINE)[:2]
    assert (prompt, decode) == ("prompt", "decode")
    for line in ("prompt", "decode"):
        assert re.search(rf"^{line} +\d+ +[\d.]+ m?s +[\d.]+ tok/s +[\d.]+% +[\d.]+ MiB +[\d.]+ m?s$", run.stderr, re.M)
    assert re.search(r"^memory +[\d.]+ [KMG]iB peak RSS, [\d.]+ [KMG]iB on disk$", run.stderr, re.M)
    assert re.search(r"^reading +(uring|pread|mmap), ", run.stderr, re.M)
    assert re.search(r"^compute +(plain|interleaved|mixed) kernels, 1 thread$", run.stderr, re.M)
    parts = re.search(r"^token +attention (\d+)%, router (\d+)%, experts (\d+)%, waiting (\d+)%, other (\d+)%$", run.stderr, re.M)
    assert parts and 98 <= sum(map(int, parts.groups())) <= 102
    assert max(map(len, run.stderr.splitlines())) <= 100


def test_json_is_all_that_is_on_stdout(model: Path) -> None:
    result = generated(model, "-n", 5, "--ignore-eos", "-s", 7)
    assert result["finish_reason"] == "length"
    assert len(result["tokens"]) == 5
    assert result["timings"]["prompt_tokens"] == PROMPT_TOKENS
    assert result["timings"]["decode_tokens"] == 4
    assert result["timings"]["decode_tokens_per_s"] > 0
    assert result["memory"]["peak_rss_bytes"] > 0
    assert result["memory"]["bytes_on_disk"] == model.stat().st_size
    assert result["options"]["seed"] == 7
    assert result["versions"]["llama-cpp-python"] == importlib.metadata.version("llama-cpp-python")
    prompt, decode, since_load = (result["experts"][phase] for phase in ("prompt", "decode", "since_load"))
    assert decode["hits"] + decode["misses"] > 0
    assert prompt["bytes_read"] + decode["bytes_read"] == since_load["bytes_read"] > 0


def test_tokens_are_those_of_the_python_interface(model: Path) -> None:
    result = generated(model, "-n", 12, "--temp", 0.9, "-s", 0, "--repeat-penalty", 1.2, "--expert-cache", "1GiB")
    streaming = moestream.ExpertStreaming(cache="1GiB")
    llm = moestream.Llama(str(model), expert_streaming=streaming, n_ctx=256, n_threads=1, verbose=False)
    with contextlib.closing(llm):
        llm.set_seed(0)
        draws = llm.generate(llm.tokenize(b"The library is", special=True), temp=0.9, repeat_penalty=1.2)
        assert list(itertools.islice(draws, len(result["tokens"]))) == result["tokens"]


def test_streamed_text_equals_that_of_the_resident_model(model: Path) -> None:
    args = ("-n", 12, "--temp", 0, "--ignore-eos")
    streamed = generated(model, *args, "--kernels", "interleaved")
    resident = generated(model, *args, "--no-expert-streaming")
    assert streamed["tokens"] == resident["tokens"]
    assert resident["experts"] is None


def test_the_seed_that_was_drawn_draws_the_same_text_again(model: Path) -> None:
    first = generated(model, "-n", 12, "--ignore-eos")
    again = generated(model, "-n", 12, "--ignore-eos", "-s", first["options"]["seed"])
    assert again["tokens"] == first["tokens"]


def test_whole_prompt_is_evaluated_in_pieces_of_a_ubatch(model: Path) -> None:
    seen: list[tuple[int, int]] = []
    generate_command.generate(
        model=model,
        prompt="The library is",
        n_predict=0,
        ctx_size=64,
        threads=1,
        ubatch_size=4,
        prompt_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(done, PROMPT_TOKENS) for done in (0, 4, 8, 12, 15)]


def test_no_token_is_written_for_n_0(model: Path) -> None:
    result = generated(model, "-n", 0)
    assert result["text"] == "" and result["tokens"] == []
    assert result["timings"]["first_token_s"] is None and result["timings"]["decode_tokens_per_s"] is None
    run = generate(model, "-n", 0)
    assert run.returncode == 0 and run.stdout == ""


def test_without_a_limit_the_text_ends_with_the_context(model: Path) -> None:
    result = generated(model, "-n", -1, "-c", 64, "--ignore-eos")
    assert result["finish_reason"] == "context"
    assert result["timings"]["prompt_tokens"] + len(result["tokens"]) == 64


def test_prompt_file_loses_one_newline_at_its_end(model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Straße\n\n", encoding="utf-8")
    run = moestream_command("generate", "-m", model, "-f", tmp_path / "prompt.txt", "-n", 0, "-t", 1, "--json")
    assert json.loads(run.stdout)["timings"]["prompt_tokens"] == 1 + len("Straße\n".encode())


def test_quantised_kv_cache_runs_with_flash_attention(model: Path) -> None:
    assert generated(model, "-n", 4, "--ignore-eos", "-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0")["tokens"]


def test_log_lines_are_for_those_who_ask(model: Path) -> None:
    ours, llama_cpp, debug = "moestream: INFO: ", "moestream.llama_cpp: INFO: ", "moestream.llama_cpp: DEBUG: "
    for options, shown in (
        ([], ()),
        (["-v"], (ours,)),
        (["-vv"], (ours, llama_cpp)),
        (["-vvv"], (ours, llama_cpp, debug)),
    ):
        log = generate(model, "-n", 1, *options).stderr
        assert [kind for kind in (ours, llama_cpp, debug) if f"\n{kind}" in f"\n{log}"] == list(shown), options


@pytest.fixture(scope="module")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("dense"), "ernie4_5-moe", leading_dense=4)  # all of its layers


def test_model_without_experts_runs_unstreamed(dense_model: Path) -> None:
    refused = generate(dense_model, "-n", 4)
    assert refused.returncode == 1 and "--no-expert-streaming" in refused.stderr
    result = generated(dense_model, "-n", 4, "--ignore-eos", "--no-expert-streaming")
    assert len(result["tokens"]) == 4
    assert result["memory"]["bytes_on_disk"] == dense_model.stat().st_size
    assert result["experts"] is None


def test_split_model_runs_unstreamed(tmp_path: Path) -> None:
    first = make(tmp_path, split=2)
    result = generated(first, "-n", 1, "--no-expert-streaming")
    assert result["memory"]["bytes_on_disk"] == sum(shard.stat().st_size for shard in tmp_path.glob("*.gguf"))


@pytest.mark.parametrize("kind", ["missing", "directory", "not a GGUF"])
def test_bad_file_is_told_in_one_line_when_unstreamed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "bad.gguf"
    if kind == "directory":
        path.mkdir()
    elif kind == "not a GGUF":
        path.write_bytes(b"%PDF-1.7\n" * 1000)
    run = generate(path, "--no-expert-streaming")
    assert run.returncode == 1
    assert run.stderr.startswith("moestream: error: ") and "bad.gguf" in run.stderr
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "text, meant",
    [
        (rb"a\nb\tc\rd", b"a\nb\tc\rd"),
        (rb"\"quoted\" \'so\'", b"\"quoted\" 'so'"),
        (rb"C:\\new", rb"C:\new"),
        (rb"\x41\xc3\xa9", "Aé".encode()),
        (rb"\q \xg1 \x4", rb"\q \xg1 \x4"),
        (b"\\", b"\\"),
    ],
)
def test_escapes_in_a_prompt_are_llama_cpps(text: bytes, meant: bytes) -> None:
    assert generate_command.unescape(text) == meant


def test_escapes_are_processed_unless_told_not_to(model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(r"a\nb")
    for prompt in (["-p", r"a\nb"], ["-f", tmp_path / "prompt.txt"]):
        for options, length in ([], 3), (["-e"], 3), (["--no-escape"], 4):
            run = moestream_command("generate", "-m", model, *prompt, "-n", 0, "-t", 1, "--json", *options)
            assert json.loads(run.stdout)["timings"]["prompt_tokens"] == 1 + length


@pytest.mark.parametrize(
    "args, message",
    [
        (["-n", "-3"], "--n-predict -3: give a number of tokens, or -1 for no limit"),
        (["-c", "-1"], "--ctx-size -1: give a number of tokens, or 0 for what the model was trained with"),
        (["-c", "4"], "the prompt has 15 tokens, the context holds 4: raise -c to 143"),
        (["-t", "0"], "--threads 0: at least one thread is needed"),
        (["-tb", "0"], "--threads-batch 0: at least one thread is needed"),
        (["-ub", "0"], "--ubatch-size 0: at least one token is needed"),
        (["-b", "8", "-ub", "16"], "--ubatch-size 16 is more than --batch-size 8: raise -b or lower -ub"),
        (["--temp", "-1"], "--temp -1.0: the temperature is 0 or more"),
        (["--temp", "nan"], "--temp nan: the temperature is 0 or more"),
        (["--repeat-penalty", "0"], "--repeat-penalty 0.0: the penalty is more than 0, and 1 is none"),
        (["--repeat-last-n", "-1"], "--repeat-last-n -1: give a number of tokens, or 0 for no penalty"),
        (["-s", "4294967295"], "--seed 4294967295: give a number from 0 to 4294967294, or -1 for a random one"),
        (["-ctv", "q8_0"], "--cache-type-v q8_0 needs flash attention: add -fa on"),
        (["--lora", "nowhere.gguf"], "--lora: there is no file nowhere.gguf"),
        (["--lora-scaled", "nowhere.gguf:0.5"], "--lora: there is no file nowhere.gguf"),
        (["--no-expert-streaming", "--kernels", "plain"], "--no-expert-streaming leaves no use for --expert-cache"),
        (["-hf", "user/repo"], "both a model file and -hf are given: name the model once"),
        (["-hff", "file.gguf"], "--hf-file names a file in a repository: give that with -hf USER/REPO"),
        (["--expert-cache", "3GB "], "3GB "),
        (["--expert-cache", "-1"], "-1"),
        (["--expert-cache", "1KiB"], "KiB"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_impossible_option_is_told_in_one_line(model: Path, args: list[str], message: str) -> None:
    run = generate(model, *args)
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.startswith("moestream: error: ") and message in run.stderr
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", [("generate", "-p", "x", "-m"), ("inspect",)], ids=lambda command: command[0])
@pytest.mark.parametrize("kind", ["missing", "directory", "not a GGUF", "truncated"])
def test_bad_model_file_is_told_in_one_line(model: Path, tmp_path: Path, command: tuple[str, ...], kind: str) -> None:
    path = tmp_path / "bad.gguf"
    if kind == "directory":
        path.mkdir()
    elif kind == "not a GGUF":
        path.write_bytes(b"%PDF-1.7\n" * 1000)
    elif kind == "truncated":
        path.write_bytes(model.read_bytes()[:-1])
    run = moestream_command(*command, path)
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.startswith("moestream: error: ") and "bad.gguf" in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_bad_prompt_file_is_told(model: Path, tmp_path: Path) -> None:
    run = moestream_command("generate", "-m", model, "-f", tmp_path / "none.txt")
    assert run.returncode == 1
    assert (
        run.stderr == f"moestream: error: cannot read the prompt file {tmp_path}/none.txt: No such file or directory\n"
    )
    (tmp_path / "latin1.txt").write_bytes(b"Stra\xdfe")
    run = moestream_command("generate", "-m", model, "-f", tmp_path / "latin1.txt")
    assert run.stderr == f"moestream: error: the prompt file {tmp_path}/latin1.txt is not UTF-8 text (byte 4)\n"


def test_traceback_is_shown_only_when_verbose(tmp_path: Path) -> None:
    missing = tmp_path / "none.gguf"
    assert "Traceback" not in moestream_command("inspect", missing).stderr
    assert "Traceback" in moestream_command("inspect", missing, "-v").stderr


def test_a_read_error_in_the_middle_keeps_the_text_so_far(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "vanishing.gguf"
    path.write_bytes(model.read_bytes())
    written = []

    class Truncating:
        """A stdout that takes half the model file away as the third piece of text arrives."""

        def write(self, text: str) -> None:
            written.append(text)
            if len(written) == 3:
                os.truncate(path, path.stat().st_size // 2)

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stdout", Truncating())
    smallest = str(moestream.describe(path).minimum_cache_bytes)
    args = ["generate", "-m", str(path), "-p", "The library is", "-n", "64", "-c", "256", "-t", "1", "--ignore-eos"]
    code = cli.main([*args, "--expert-cache", smallest, "--reader", "pread", "--no-direct"])
    error = capfd.readouterr().err
    assert code == 1
    assert len(written) >= 3
    assert error.startswith("moestream: error: ") and "vanishing.gguf" in error
    assert len(error.splitlines()) == 1, error


def test_ctrl_c_ends_the_text_and_sums_up(model: Path) -> None:
    args = ["generate", "-m", str(model), "-p", "x", "-c", "4096", "-n", "-1", "-t", "1", "--ignore-eos"]
    with subprocess.Popen([*PYTHON, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.search(r"^end +interrupted$", stderr, re.M)
    assert "Traceback" not in stderr


def test_loading_can_be_broken_off(model: Path) -> None:
    def stop(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_command.generate(model=model, prompt="x", load_progress=stop)


def test_a_reader_that_leaves_early_is_no_error(model: Path) -> None:
    args = ["generate", "-m", str(model), "-p", "x", "-c", "4096", "-n", "-1", "-t", "1", "--ignore-eos"]
    with subprocess.Popen([*PYTHON, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == ""


def test_progress_is_drawn_on_a_terminal_only(model: Path) -> None:
    args = ["generate", "-m", model, "-p", "x" * 64, "-ub", "8", "-n", "1", "-t", "1"]
    code, drawn = at_terminal(*args, stdout=subprocess.DEVNULL)
    assert code == 0
    assert "loading " in drawn and "prompt " in drawn and "/65 tokens" in drawn
    assert "100% |" not in generate(model, "-n", 1).stderr


def test_generate_hands_over_text_as_it_is_made(model: Path) -> None:
    pieces: list[str] = []
    result = generate_command.generate(
        model=model, prompt="x", n_predict=6, ctx_size=64, threads=1, temp=0, ignore_eos=True, on_text=pieces.append
    )
    assert len(pieces) > 1
    assert "".join(pieces) == result.text


# inspect


def test_inspect_shows_what_the_file_holds(model: Path) -> None:
    run = moestream_command("inspect", model)
    assert run.returncode == 0 and run.stderr == ""
    description = moestream.describe(model)
    assert f"({description.architecture})" in run.stdout or run.stdout.startswith(description.architecture)
    assert model.name in run.stdout
    assert f"{description.moe_layers[0].experts} in each, {description.experts_used} used for a token" in run.stdout
    assert re.search(r"ffn_down_exps +Q4_0 +\d+ x \d+ +[\d.]+ [KM]iB", run.stdout)
    assert re.search(r"^recommended cache +[\d.]+ [KMG]iB  100% of the experts$", run.stdout, re.M)
    assert "All experts fit" in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 100


def test_inspect_layers_gives_each_its_line(model: Path) -> None:
    run = moestream_command("inspect", model, "--layers")
    layers = [layer.layer for layer in moestream.describe(model).moe_layers]
    assert [int(number) for number in re.findall(r"^ *(\d+) +\d+ .*iB$", run.stdout, re.M)] == layers


def test_inspect_json_is_the_description(model: Path) -> None:
    value = json.loads(moestream_command("inspect", model, "--json").stdout)
    description = moestream.describe(model)
    assert value["dense_bytes"] == description.dense_bytes
    assert len(value["moe_layers"]) == len(description.moe_layers)
    assert value["cache"]["recommended_bytes"] == description.maximum_cache_bytes
    assert value["types"] == {"Q4_0": description.expert_bytes}
    assert value["cache"]["minimum_bytes"] == description.minimum_cache_bytes
    assert value["cache"]["fits"] is True


@pytest.mark.parametrize(
    "available_gib, recommended_gib, fits",
    [(32, 16, True), (11.5, 9, True), (2.5, 0.9, False), (1, 0, False)],
)
def test_advice_leaves_room_for_dense_part_context_and_margin(
    available_gib: float, recommended_gib: float, fits: bool
) -> None:
    description = SimpleNamespace(dense_bytes=GIB, maximum_cache_bytes=16 * GIB, minimum_cache_bytes=GIB)
    advice = advise(description, int(available_gib * GIB))
    assert advice.recommended_bytes == pytest.approx(recommended_gib * GIB, abs=1)
    assert advice.fits is fits


@pytest.mark.parametrize(
    "available_mib, verdict",
    [
        (4096, "All experts fit: each is read from the disk once."),
        (512.7, "of the experts fit: the others are read when a token wants them."),
        (512, "Too large for this machine now: with the smallest cache it wants 512."),
    ],
)
def test_verdict_is_told_in_words(
    model: Path,
    available_mib: float,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(moestream.memory, "available_bytes", lambda: int(available_mib * 2**20))
    assert cli.main(["inspect", str(model)]) == 0
    assert verdict in capsys.readouterr().out


def test_layer_numbers_are_summed_up_as_ranges() -> None:
    assert layer_ranges([0, 1, 2, 5, 6, 9]) == "0-2, 5-6, 9"
    assert layer_ranges([3]) == "3"


# Models from the Hub


@pytest.fixture
def hub(model: Path) -> Iterator[str]:
    """The address of a hub that has the model, as m-Q4_0.gguf of user/repo."""
    with fake_hub.serving({"m-Q4_0.gguf": model}) as address:
        yield address


def test_model_comes_from_the_hub_once_and_then_from_the_cache(hub: str, tmp_path: Path) -> None:
    args = ("generate", "-hf", "user/repo", "-p", "x", "-n", 2, "-c", 64, "-t", 1, "--json")
    online = moestream_command(*args, HF_ENDPOINT=hub, HF_HOME=str(tmp_path))
    assert online.returncode == 0, online.stderr
    assert json.loads(online.stdout)["model"].endswith("m-Q4_0.gguf")
    offline = moestream_command(*args, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path))
    assert offline.returncode == 0, offline.stderr


@pytest.mark.parametrize(
    "repo, message",
    [
        ("user/repo:Q2_K", "user/repo has no GGUF file of type Q2_K; it has m-Q4_0.gguf"),
        ("user/none", "the Hugging Face Hub has no user/none, or only after 'hf auth login'"),
        ("user/gated", "user/gated is gated: accept its terms at the Hub, then run 'hf auth login'"),
        ("no such name", "-hf no such name: a repository is named USER/REPO, with :QUANT if wanted"),
    ],
)
def test_what_the_hub_does_not_give_is_told_in_one_line(hub: str, tmp_path: Path, repo: str, message: str) -> None:
    run = moestream_command("inspect", "-hf", repo, HF_ENDPOINT=hub, HF_HOME=str(tmp_path))
    assert run.returncode == 1
    assert run.stderr == f"moestream: error: {message}\n"


def test_without_a_network_and_a_cache_it_says_so(tmp_path: Path) -> None:
    run = moestream_command("inspect", "-hf", "user/repo", HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path))
    assert run.returncode == 1
    assert (
        run.stderr == "moestream: error: cannot reach the Hugging Face Hub, and user/repo was not downloaded before\n"
    )


def test_a_whole_model_that_would_take_all_memory_is_not_loaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_command.memory, "available_bytes", lambda: 1000)
    with pytest.raises(
        moestream.OptionError, match=r"^--no-expert-streaming: .* of memory and 1000 bytes are available, .*; leave it out$"
    ):
        generate_command.generate(model=model, prompt="a", expert_streaming=False)
