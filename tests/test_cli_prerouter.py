"""A sidecar on the command line: what is asked for is what the model does, and what it costs is told."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from factory import lora, make
from moestream import ExpertStreaming, Llama, cli
from moestream.sidecar import Base, BaseModel, Sidecar, pack, read_lora
from sidecars import make_sidecar

PROMPT, TOKENS = "The library is", 12
COMMANDS = {
    "generate": ["generate", "-p", PROMPT, "-n", TOKENS, "--temp", "0", "-c", "64"],
    "trace": ["trace", "-p", PROMPT, "-n", TOKENS, "--temp", "0", "-c", "64", "-o", "run.json"],
    "eval": ["eval", "-c", "32", "--chunks", "1", "-ub", "1"],
}


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make(folder, experts=16, topk=3, seed=1)


@pytest.fixture(scope="module")
def sidecar(model: Path) -> Path:
    return make_sidecar(model, model.with_name("cli.sidecar.gguf"))


@pytest.fixture(scope="module")
def of_another(folder: Path, sidecar: Path) -> Path:
    """The same heads, made for a model of other weights."""
    other, path = make(folder, experts=16, topk=3, seed=7), sidecar.with_name("other.sidecar.gguf")
    base = BaseModel.open(other)
    Sidecar(Base(base.hash(), base.name, base.architecture), Sidecar.read(sidecar).heads).write(path)
    return path


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], name: str, model: Path, *args: object) -> tuple[int, str, str]:
    command = [*COMMANDS[name], "-m", model, "-t", "1", "--kernels", "plain", *args]
    code = cli.main(list(map(str, command)))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def written(model: Path, **options: Any) -> list[int]:
    """The tokens that Llama writes with these options."""
    streaming = ExpertStreaming(kernels="plain", **options.pop("streaming", {}))
    with contextlib.closing(
        Llama(str(model), expert_streaming=streaming, n_ctx=64, n_threads=1, verbose=False, **options)
    ) as llm:
        tokens = llm.generate(llm.tokenize(PROMPT.encode(), add_bos=True, special=True), temp=0)
        return [next(tokens) for _ in range(TOKENS)]


def test_generate_writes_what_llama_does_with_the_sidecar(
    model: Path, sidecar: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, routed = written(model), written(model, prerouter=sidecar)
    assert plain != routed, "these heads say other experts than the model's routers"
    for args, tokens, mode in (
        ((), plain, "off"),
        (("--prerouter", sidecar), routed, "route"),
        (("--prerouter", sidecar, "--prerouter-mode", "advise"), plain, "advise"),
        (("--prerouter", sidecar, "--prerouter-mode", "off"), plain, "off"),
    ):
        code, out, err = run(capsys, "generate", model, "--json", *args)
        assert code == 0, err
        told = json.loads(out)
        decode = told["experts"]["decode"]
        assert (told["tokens"], decode["prerouter"]) == (tokens, mode)
        assert (decode["head_layers"], decode["dropped"]) == (0 if mode == "off" else 3, 0)
        assert (decode["heads_s"] > 0, decode["heads_bytes"] > 0) == (mode != "off",) * 2


def test_a_sidecar_of_a_lora_alone_needs_no_mode(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = lora(model, [r"attn_output\.weight"], alpha=500.0)
    pack(model, "lora.sidecar.gguf", lora=adapter)
    code, out, err = run(capsys, "generate", model, "--json", "--prerouter", "lora.sidecar.gguf")
    assert code == 0, err
    assert json.loads(out)["tokens"] == written(model, lora_path=str(adapter)) != written(model)
    assert read_lora(adapter, BaseModel.open(model)).alpha == 500.0
    code, _, err = run(capsys, "generate", model, "--prerouter", "lora.sidecar.gguf", "--prerouter-mode", "advise")
    assert code == 1 and "prerouter='advise': lora.sidecar.gguf holds no heads; leave it out" in err


@pytest.mark.parametrize(
    ("mode", "what"), [("route", "choose the experts of"), ("advise", "say ahead what is chosen in")]
)
def test_the_summary_tells_what_heads_cost(
    mode: str, what: str, model: Path, sidecar: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--prerouter", sidecar, "--prerouter-mode", mode)
    code, _, err = run(capsys, "generate", model, *options)
    assert code == 0, err
    told = " ".join(err.split())
    assert re.search(
        rf"heads {what} 3 layers: \d+\.\d{{3}} ms and [\d.]+ KiB of weights a token; 0 experts dropped", told
    )
    code, _, err = run(capsys, "generate", model, *options, "-n", "1")
    assert code == 0 and f"heads    {what} 3 layers, but no token came by itself" in err
    assert "heads  " not in run(capsys, "generate", model)[2]


def test_the_timeline_and_eval_take_it_too(model: Path, sidecar: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "trace", model, "--json", "--prerouter", sidecar)
    assert code == 0, err
    assert json.loads(out)["experts"]["decode"]["prerouter"] == "route"

    perplexity = {}
    for name, args in {
        "plain": (),
        "routed": ("--prerouter", sidecar),
        "advised": ("--prerouter", sidecar, "--prerouter-mode", "advise"),
    }.items():
        code, out, err = run(capsys, "eval", model, *args)
        assert (code, err) == (0, "")
        perplexity[name] = re.search(r"PPL = ([\d.]+)", out)[1]
        assert ("Heads: " in out) == (name != "plain")
        assert name != "routed" or re.search(
            r"Heads: choose the experts of 3 layers: .* a token; 0 experts dropped", out
        )
    assert perplexity["plain"] == perplexity["advised"] != perplexity["routed"]


def test_eval_says_that_heads_do_nothing_to_what_is_computed_together(
    model: Path, sidecar: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "eval", model, "--prerouter", sidecar, "-ub", "32")
    assert code == 0 and "Heads: choose the experts of 3 layers, but no token came by itself" in out
    assert "here 32 are computed together, so that the model's own routers choose: --tokens-at-once 1" in err


@pytest.mark.parametrize("name", COMMANDS)
def test_a_sidecar_of_another_model_is_taken_by_force_alone(
    name: str, model: Path, of_another: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, name, model, "--prerouter", of_another)
    assert (code, out) == (1, "") and err.startswith(f"moestream: error: {of_another}: is for ")
    assert "or force=True (--force) to use it all the same" in err and err.count("\n") == 1
    assert run(capsys, name, model, "--prerouter", of_another, "--force")[0] == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prerouter-mode", "advise"], "--prerouter-mode advise: is about the heads of a sidecar; name it with --prerouter"),
        (["--force"], "--force: is about a sidecar of another model; name it with --prerouter SIDECAR"),
        (["--prerouter", "none.gguf"], "none.gguf: cannot be read as a sidecar: No such file or directory"),
        (["--prerouter", "{model}"], "is no sidecar but a GGUF of the architecture qwen3moe"),
        (["--prerouter", "{sidecar}", "--no-expert-streaming"], "--no-expert-streaming leaves no use for "),
        (["--prerouter", "{sidecar}", "--cache-aware", "0.1"], "prerouter='route' fixes the choice of experts"),
        (["--prerouter", "{sidecar}", "--prerouter-mode", "advise", "--prefetch", "off"], "prefetch='off' reads nothing ahead"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
@pytest.mark.parametrize("name", ["generate", "eval"])
def test_what_cannot_work_is_told_in_one_line(
    name: str, args: list[str], message: str, model: Path, sidecar: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, name, model, *(arg.format(model=model, sidecar=sidecar) for arg in args))
    assert (code, out) == (1, "") and message in err and err.count("\n") == 1


def test_inspect_tells_of_a_sidecar_beside_the_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "m.gguf"
    copy.write_bytes(model.read_bytes())
    line = "a sidecar lies beside it: m.sidecar.gguf; moestream sidecar inspect tells what it holds\n"
    assert cli.main(["inspect", str(copy)]) == 0 and line not in capsys.readouterr().out
    make_sidecar(copy, tmp_path / "m.sidecar.gguf")
    assert cli.main(["inspect", str(copy)]) == 0 and line in capsys.readouterr().out
