"""Made-up routing has the locality that it is asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moestream import OptionError, RoutingTrace, cli, routing_statistics, simulate, synthesise_trace
from moestream.synthesis import PRESETS

SMALL: dict[str, Any] = {
    "layers": 6,
    "experts": 32,
    "top_k": 4,
    "reused_last": 0.3,
    "reused_window": 0.75,
    "balance": 0.96,
}


def locality(trace: RoutingTrace) -> tuple[float, float, float]:
    statistics = routing_statistics(trace)
    balance = float(np.mean([layer.entropy for layer in statistics.layers]))
    return statistics.reused_last, statistics.reused_window, balance


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("like", PRESETS)
def test_a_preset_has_the_shape_and_the_locality_that_it_names(like: str, seed: int) -> None:
    preset = PRESETS[like]
    trace = synthesise_trace(like=like, tokens=1000, seed=seed)
    assert trace.experts.shape == (1000, preset.layers, preset.top_k) and trace.n_experts == preset.experts
    targets = (preset.reused_last, preset.reused_window, preset.balance)
    assert locality(trace) == pytest.approx(targets, abs=0.03)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_lru_finds_in_qwen3s_routing_what_others_measured(seed: int) -> None:
    """Hit rates by slots a layer (of 384 matrices) in 256 tokens of Qwen3-30B-A3B; the sources are in docs/trace.md."""
    trace = synthesise_trace(like="qwen3-30b-a3b", tokens=256, seed=seed)
    for slots, measured in ((73, 0.741), (146, 0.894), (244, 0.962)):
        (run,) = simulate(trace, cache=round(slots / 3 * 48), policy="lru").runs
        # within 256 tokens a part of all experts is wanted for the first time, which a warm cache would have
        assert run.hit_rate == pytest.approx(measured, abs=0.06), slots


@pytest.mark.parametrize(
    "targets",
    [
        {"reused_last": 0.2, "reused_window": 0.72},
        {"reused_last": 0.5, "reused_window": 0.85},
        {"reused_last": 0.5, "reused_window": 0.83, "balance": 0.9},
        {"experts": 8, "top_k": 2, "reused_last": 0.4, "reused_window": 0.9},
        {"experts": 300, "top_k": 3, "reused_last": 0.4, "reused_window": 0.67, "balance": 0.86},
    ],
    ids=str,
)
def test_targets_are_met_one_by_one(targets: dict[str, Any]) -> None:
    wanted = SMALL | targets
    trace = synthesise_trace(**wanted, tokens=1000, seed=9)
    assert locality(trace) == pytest.approx(
        [wanted[name] for name in ("reused_last", "reused_window", "balance")], abs=0.03
    )


def test_what_is_given_takes_the_place_of_the_presets() -> None:
    trace = synthesise_trace(like="smallthinker-4b", layers=3, reused_last=0.45, tokens=2000)
    assert len(trace.layers) == 3 and trace.n_experts == 32
    assert locality(trace)[0] == pytest.approx(0.45, abs=0.03)


def test_a_trace_says_that_no_model_made_it(tmp_path: Path) -> None:
    trace = synthesise_trace(like="mixtral", tokens=20, seed=4)
    trace.write(tmp_path / "a.trace")
    read = RoutingTrace.read(tmp_path / "a.trace")
    assert read.synthetic == "fitted to reuse of 33% by the next token, 90% within 8, balance 98%; seed 4"
    assert (read.model, read.model_hash, read.tokens_at_once) == ("mixtral", "", 0)
    assert synthesise_trace(**SMALL, tokens=1).model == "6 layers, 4 of 32 experts"


def test_the_seed_decides_all() -> None:
    traces = [synthesise_trace(**SMALL, tokens=200, seed=seed) for seed in (1, 1, 2)]
    assert np.array_equal(traces[0].experts, traces[1].experts) and np.array_equal(traces[0].weights, traces[1].weights)
    assert not np.array_equal(traces[0].experts, traces[2].experts)


def test_weights_fall_and_add_up_to_1() -> None:
    weights = synthesise_trace(**SMALL, tokens=100).weights.astype(float)
    assert np.allclose(weights.sum(axis=2), 1, atol=2e-3) and (np.diff(weights, axis=2) <= 0).all()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"like": "gpt"}, "like='gpt': expected one of 'mixtral', 'qwen3-30b-a3b', 'smallthinker-21b', 'smallthinker-4b'"),
        ({"top_k": None}, "top_k: give it, or the name of a preset with like"),
        ({"tokens": 0}, "tokens=0: give a number of at least 1"),
        ({"layers": 0}, "layers=0: give a number of at least 1"),
        ({"experts": 1}, "experts=1: give a number from 2 to 65536"),
        ({"top_k": 32}, "top_k=32: give a number from 1 to 31: fewer than there are experts"),
        ({"reused_last": 1.0}, "reused_last=1.0: give a share between 0 and 1"),
        ({"balance": float("nan")}, "balance=nan: give a share between 0 and 1"),
        ({"reused_last": 0.7, "reused_window": 0.5}, "no routing of 4 of 32 experts was found with reused_last=0.7, reused_window=0.5 and balance=0.96; the nearest has reused_last=0."),
        ({"reused_last": 0.05}, "no routing of 4 of 32 experts was found with reused_last=0.05"),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_cannot_be_made_is_told_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        synthesise_trace(**SMALL | changes)


# The command


def called(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = cli.main(["trace", "synthesise", *map(str, args)])
    return code, *capsys.readouterr()


def test_the_command_writes_what_the_function_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.trace"
    options = ("--like", "smallthinker-4b", "--layers", 5, "--reused-last", 0.4, "-n", 50, "-s", 3)
    code, out, err = called(capsys, *options, "-o", path)
    assert (code, err) == (0, "")
    assert re.fullmatch(rf"{re.escape(str(path))}: 50 tokens in \d+\.\d s; [\d.]+ KiB, [\d.]+ bytes a token\n", out)
    expected = synthesise_trace(like="smallthinker-4b", layers=5, reused_last=0.4, tokens=50, seed=3)
    assert np.array_equal(RoutingTrace.read(path).experts, expected.experts)


def test_a_place_that_cannot_be_written_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(capsys, "--like", "mixtral", "-n", 10**9, "-o", tmp_path / "none" / "a.trace")
    assert (code, out) == (1, "")
    assert err.startswith(f"moestream: error: --output {tmp_path}/none/a.trace: there is no folder")
