"""Routing replayed without a model: caches, policies and predictors, and the time they take on a disk."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from factory import make
from moestream import (
    CacheTooSmallError,
    OptionError,
    RoutingTrace,
    SimulatedRun,
    TraceError,
    cli,
    demo_model,
    describe,
    routing_statistics,
    simulate,
)
from moestream.simulation import POLICIES, _guesses


def trace_of(experts: Any, n_experts: int) -> RoutingTrace:
    """One text; `experts` is [tokens, layers, top_k]."""
    array = np.array(experts, np.uint8)
    n, layers, _ = array.shape
    return RoutingTrace(
        model="a model",
        model_hash="",
        architecture="",
        layers=tuple(range(layers)),
        n_experts=n_experts,
        tokens=np.zeros(n, np.int32),
        experts=array,
        weights=np.ones(array.shape, np.float16),
        starts=np.zeros(1, np.int64),
        source="",
        tool="test",
        tokens_at_once=0,
        synthetic="made by a test",
    )


def drawn(n: int = 300, layers: int = 3, experts: int = 16, top_k: int = 4, seed: int = 0) -> RoutingTrace:
    """Uneven routing with some reuse."""
    draw = np.random.default_rng(seed)
    liking, noise = draw.normal(size=(layers, experts)), draw.normal(size=(n + 3, layers, experts))
    scores = liking + sum(noise[i : n + i] for i in range(4))
    return trace_of(np.argsort(-scores, axis=2)[..., :top_k], experts)


def one(trace: RoutingTrace, **options: Any) -> SimulatedRun:
    (run,) = simulate(trace, **{"policy": "lru", **options}).runs
    return run


# Caches and policies


def belady_hits(trace: RoutingTrace, size: int) -> int:
    """By looking through all that comes, for every choice."""
    groups = [{(layer, e) for e in some} for token in trace.experts.tolist() for layer, some in enumerate(token)]
    cache: set[tuple[int, int]] = set()
    hits = 0
    for i, wanted in enumerate(groups):
        hits += len(wanted & cache)
        for key in wanted - cache:
            if len(cache) == size:
                next_use = {
                    c: next((j for j in range(i + 1, len(groups)) if c in groups[j]), math.inf) for c in cache - wanted
                }
                cache.remove(max(next_use, key=lambda c: next_use[c]))
            cache.add(key)
    return hits


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [12, 17, 30, 48])
def test_belady_gives_up_what_is_wanted_last(size: int, seed: int) -> None:
    trace = drawn(60, seed=seed)
    assert one(trace, cache=size, policy="belady").hits == belady_hits(trace, size)


def test_lru_hits_are_those_of_the_statistics_and_belady_has_most() -> None:
    trace = drawn()
    runs = simulate(trace, cache=["25%", "50%", "100%"]).runs
    assert [(run.cache_share, run.policy) for run in runs] == [(s, p) for s in (0.25, 0.5, 1.0) for p in POLICIES]
    expected = routing_statistics(trace, cached_shares=[0.25, 0.5, 1.0]).lru
    # which of two experts of one token and layer was used later, nobody else knows as the engine does
    rates = [run.hit_rate for run in runs if run.policy == "lru"]
    assert rates == pytest.approx([lru.hit_rate for lru in expected], abs=0.002)
    for i in range(0, len(runs), len(POLICIES)):
        found = {run.policy: run.hits for run in runs[i : i + len(POLICIES)]}
        assert max(found.values()) == found["belady"]
    for run in runs:
        assert run.hits + run.misses == run.wanted == trace.experts.size
        assert (run.useful, run.late, run.guessed, run.wasted) == (0, 0, 0, 0)


def test_frequency_finds_more_on_the_routing_of_the_demo_model() -> None:
    path = demo_model().with_suffix(".trace")
    rates = {run.policy: run.hit_rate for run in simulate(path, cache="20%").runs}
    assert rates["lru"] < rates["lrfu"] < rates["lfu"] < rates["belady"]


def test_a_cache_is_a_share_a_number_or_a_size() -> None:
    trace = drawn()
    sizes = [
        run.cache_experts for run in simulate(trace, cache="50%,20,3000,3KiB", policy="lru", expert_bytes=100).runs
    ]
    assert sizes == [24, 20, 48, 30], "more than there are is all"
    assert [run.cache_experts for run in simulate(trace, cache=[24, "50%"], policy="lru").runs] == [24]
    assert [run.cache_experts for run in simulate(trace, policy="lru").runs] == [14, 24, 34], (
        "the usual that hold a token"
    )
    assert one(trace_of([[[0, 1, 2, 3]]], 4)).cache_experts == 4, "or all"


# Time


def times(tokens: list[list[list[int]]], n_experts: int, cache: int, **options: Any) -> SimulatedRun:
    """Attention 1 ms a layer, 1 ms an expert, 4 ms a read."""
    trace = trace_of(tokens, n_experts)
    options = {"layer_ms": 1 + trace.top_k, "attention_ms": 1, "expert_bytes": 4000, "disk": 1_000_000, **options}
    return one(trace, cache=cache, **options)


def ms(seconds: float | None) -> float:
    assert seconds is not None
    return round(seconds * 1e3, 6)


def test_reads_on_demand_block_and_what_is_there_is_computed_meanwhile() -> None:
    run = times([[[0, 1]], [[0, 1]], [[0, 2]]], 4, cache=3)
    # 1 + 4 (0 is there) + 4 (1 is) + 1; 1 + 2; 1 + 4 (0 is computed while 2 is read) + 1
    assert ms(run.seconds) == 10 + 3 + 6
    assert ms(run.wait_s) == 4 + 3 + 3
    assert (run.misses, run.hits) == (3, 3)
    assert run.tokens_per_s == pytest.approx(3 / 0.019)
    assert run.bytes_per_token == 4000
    assert run.limit_tokens_per_s == pytest.approx(1 / 0.004), "reading 4 ms a token, computing 3"


def test_what_comes_after_the_last_layer_is_computed_once_a_token() -> None:
    tokens = [[[0, 1]], [[0, 1]], [[0, 2]]]
    run = times(tokens, 4, cache=3, rest_ms=2)
    assert ms(run.seconds) == 10 + 3 + 6 + 3 * 2 and run.compute_s == pytest.approx(0.003 + 0.002)
    assert [ms(second) for second in run.token_s] == [12, 5, 8]
    guessed = times(tokens, 4, cache=3, rest_ms=2, predictor="oracle", ahead=1)
    assert ms(guessed.wait_s) < ms(run.wait_s), "the disk goes on meanwhile"


def test_tokens_that_are_skipped_fill_the_cache_and_are_not_counted() -> None:
    tokens = [[[0, 1]], [[0, 1]], [[0, 2]]]
    run = times(tokens, 4, cache=3, skip_tokens=1)
    assert (run.tokens, run.wanted, run.hits, run.misses) == (2, 4, 3, 1)
    assert ms(run.seconds) == 3 + 6 and ms(run.wait_s) == 3 and [ms(second) for second in run.token_s] == [3, 6]
    whole, begin = one(drawn(300), cache=20), one(drawn(300), cache=20, skip_tokens=100)
    first = one(
        dataclasses.replace(drawn(300), **{n: getattr(drawn(300), n)[:100] for n in ("tokens", "experts", "weights")}),
        cache=20,
    )
    assert whole.hits - first.hits == begin.hits and whole.misses - first.misses == begin.misses
    assert begin.token_s == (), "without times nothing is known of them"


def test_a_guess_is_read_while_attention_and_experts_are_computed() -> None:
    tokens = [[[0]], [[1]], [[2]]]
    assert ms(times(tokens, 4, cache=4).seconds) == 3 * (1 + 4 + 1)
    run = times(tokens, 4, cache=4, predictor="oracle", ahead=0)
    # the read begins with the attention of its own layer: 1 of its 4 ms is hidden
    assert ms(run.seconds) == 3 * (4 + 1) and (run.late, run.guessed) == (3, 3)
    run = times(tokens, 4, cache=4, predictor="oracle", ahead=1)
    # one after another from the beginning: there at 4, 8, 12
    assert ms(run.seconds) == 12 + 1
    run = times(tokens, 4, cache=4, predictor="oracle", ahead=1, disk=4_000_000)
    assert ms(run.seconds) == 1 + 3 * 1 + 2 and (run.useful, run.misses, run.wait_s) == (3, 0, 0)


def test_a_guess_waits_for_room_that_nothing_wanted_holds() -> None:
    run = times([[[0]], [[1]], [[0]]], 2, cache=1, predictor="oracle", ahead=1)
    # only when a token is computed may its expert go: reads begin with the attention of the next
    assert ms(run.seconds) == 3 * (4 + 1) and (run.late, run.useful, run.misses) == (3, 0, 0)


def test_a_wrong_guess_costs_its_bytes_and_delays_by_one_read_at_most() -> None:
    right = times([[[0]]] * 5, 4, cache=2)
    wrong = times([[[0]]] * 5, 4, cache=2, predictor="recall=0", ahead=0)
    assert wrong.guessed == wrong.wasted > 0
    assert wrong.bytes_per_token == (wrong.misses + wrong.guessed) * 4000 / 5
    assert right.seconds is not None and wrong.seconds is not None
    assert right.seconds < wrong.seconds <= right.seconds + 5 * 0.004


def test_an_oracle_that_sees_a_token_ahead_comes_near_the_bound() -> None:
    trace = drawn(2000, layers=6, experts=32, seed=3)
    for disk in ("0.5M", "1M", "2M", "4M"):
        options: dict[str, Any] = {"cache": "40%", "disk": disk, "expert_bytes": 1000, "layer_ms": 2}
        alone, oracle = (one(trace, predictor=predictor, **options) for predictor in ("none", "oracle"))
        assert (
            oracle.tokens_per_s is not None and oracle.limit_tokens_per_s is not None and alone.tokens_per_s is not None
        )
        assert oracle.tokens_per_s >= 0.9 * oracle.limit_tokens_per_s
        assert oracle.tokens_per_s > alone.tokens_per_s
        assert oracle.wasted == 0


# Predictors


@pytest.mark.parametrize("recall", [0.0, 0.3, 0.8, 1.0])
def test_recall_is_the_share_of_right_guesses(recall: float) -> None:
    trace = drawn(2000)
    guesses = _guesses(f"recall={recall:g}", trace, np.random.default_rng(1))
    assert guesses is not None and guesses.shape == trace.experts.shape
    right = guesses == trace.experts
    assert right.mean() == pytest.approx(recall, abs=0.01)
    wanted = (guesses[..., None] == trace.experts[..., None, :]).any(axis=-1)
    assert np.array_equal(wanted, right), "a wrong one is none of those wanted"
    assert (np.diff(np.sort(guesses, axis=2), axis=2) != 0).all()


def test_there_are_no_more_wrong_guesses_than_wrong_experts() -> None:
    guesses = _guesses("recall=0", drawn(50, experts=6, top_k=4), np.random.default_rng(1))
    assert guesses is not None and ((guesses >= 0).sum(axis=2) == 2).all()


def test_repeat_is_the_token_before_and_random_is_anything() -> None:
    trace = drawn(400)
    repeat, random = (_guesses(name, trace, np.random.default_rng(1)) for name in ("repeat", "random"))
    assert repeat is not None and random is not None
    assert np.array_equal(repeat[1:], trace.experts[:-1]) and (repeat[0] == -1).all()
    assert np.bincount(random.ravel(), minlength=16).min() > 0.9 * random.size / 16
    assert one(trace, cache="30%", predictor="repeat").guessed == 0, "LRU has what the token before used"


@pytest.mark.parametrize("predictor", ["oracle", "repeat", "random", "recall=0.7"])
@pytest.mark.parametrize("policy", ["lru", "lfu", "lrfu"])
def test_every_expert_is_accounted_for(policy: str, predictor: str) -> None:
    for cache in (12, 20, 48):
        options: dict[str, Any] = {"expert_bytes": 1000, "disk": 1_000_000, "layer_ms": 2}
        run = one(drawn(), cache=cache, policy=policy, predictor=predictor, **options)
        assert run.hits + run.useful + run.late + run.misses == run.wanted
        assert 0 <= run.wasted <= run.guessed
        assert run.seconds is not None and run.wait_s is not None and run.compute_s is not None
        assert run.seconds == pytest.approx(run.compute_s * run.tokens + run.wait_s)
        assert run.seconds >= (run.misses + run.guessed - 1) * 0.001, "the disk reads one at a time"


def test_the_seed_decides_what_is_drawn() -> None:
    runs = [one(drawn(), cache=20, predictor="recall=0.5", seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


# What is refused


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"cache": "11"}, CacheTooSmallError, "cache='11': 11 experts cannot hold those of one token, 3 layers x 4; the smallest is 12, 25%"),
        ({"cache": "3%"}, CacheTooSmallError, "cache='3%': 1 experts cannot hold"),
        ({"cache": "3GiB"}, OptionError, "cache='3GiB': how many experts that is depends on their size: give expert_bytes or a model"),
        ({"cache": "1K", "expert_bytes": 2000}, CacheTooSmallError, "cache='1K': one expert alone is 1.95 KiB"),
        ({"cache": "half"}, OptionError, "cache='half': expected a share such as '20%', a number of experts, or a size"),
        ({"cache": []}, OptionError, "cache: nothing is given; name at least one"),
        ({"policy": "lru,mru"}, OptionError, "policy='mru': expected some of 'lru', 'lfu', 'lrfu', 'belady', or 'all'"),
        ({"predictor": "guess"}, OptionError, "predictor='guess': expected some of 'none', 'oracle', 'repeat', 'random', 'recall=R'"),
        ({"predictor": "recall=R"}, OptionError, "predictor='recall=R': expected some of"),
        ({"predictor": "recall=1.5"}, OptionError, "predictor='recall=1.5': give a share of right guesses, from recall=0"),
        ({"predictor": "recall=1.2.3"}, OptionError, "predictor='recall=1.2.3': give a share of right guesses"),
        ({"ahead": -1}, OptionError, "ahead=-1: give a number of layers, or 0"),
        ({"disk": "fast"}, OptionError, "disk='fast': size 'fast': expected a number and a unit"),
        ({"expert_bytes": 0}, OptionError, "expert_bytes=0: size 0: must be more than zero"),
        ({"layer_ms": 1}, OptionError, "layer_ms: how long a read takes must be known too: give expert_bytes or a model"),
        ({"layer_ms": -1, "expert_bytes": 9}, OptionError, "layer_ms=-1: give the milliseconds that one layer takes"),
        ({"layer_ms": math.inf, "expert_bytes": 9}, OptionError, "layer_ms=inf: give the milliseconds"),
        ({"attention_ms": 1}, OptionError, "attention_ms is a part of layer_ms: give that too"),
        ({"rest_ms": 1.0}, OptionError, "rest_ms comes after the layers: give layer_ms too"),
        ({"rest_ms": -1, "layer_ms": 1, "expert_bytes": 9}, OptionError, "rest_ms=-1: give the milliseconds that a token takes"),
        ({"skip_tokens": 10}, OptionError, "skip_tokens=10: the trace has 10 tokens; give 0 to 9"),
        ({"skip_tokens": -1}, OptionError, "skip_tokens=-1: the trace has 10 tokens; give 0 to 9"),
        ({"attention_ms": 2, "layer_ms": 1, "expert_bytes": 9}, OptionError, "attention_ms=2: it is a part of layer_ms=1; give 0 up to that"),
        ({"model": "none.gguf", "expert_bytes": 9}, OptionError, "expert_bytes: the model tells it; leave out one of the two"),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_cannot_be_simulated_is_told_by_name(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        simulate(drawn(10), **options)
    assert str(raised.value).startswith(message)


def test_belady_needs_no_guesses() -> None:
    runs = simulate(drawn(), cache=20, predictor="none,repeat").runs
    assert [(run.predictor, run.policy) for run in runs] == [
        *(("none", policy) for policy in POLICIES),
        *(("repeat", policy) for policy in POLICIES if policy != "belady"),
    ]
    assert simulate(drawn(), cache=20, policy="belady", predictor="repeat").runs == ()


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.trace").write_text("no")
    with pytest.raises(TraceError, match="a.trace: not a routing trace"):
        simulate(tmp_path / "a.trace")


def test_a_model_gives_the_size_of_an_expert(folder: Path) -> None:
    path = make(folder, experts=16, topk=4)
    trace = drawn(layers=4)
    result = simulate(trace, model=path)
    assert result.expert_bytes == describe(path).moe_layers[0].expert_bytes
    with pytest.raises(OptionError) as raised:
        simulate(drawn(layers=3), model=path)
    assert str(raised.value) == (
        f"model: {path.name} has 4 layers of 16 experts, the trace 3 of 16; give the model of the trace, or expert_bytes"
    )


# The command


def printed(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = cli.main(["simulate", *map(str, args)])
    return code, *capsys.readouterr()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    drawn().write(tmp_path / "a.trace")
    return tmp_path / "a.trace"


def test_it_prints_a_table(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = printed(capsys, file, "--cache", "50%,16", "--policy", "lru,lrfu")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:3] == [
        "a model",
        "  routing  300 tokens, 12 of 48 experts each",
        "  made     not recorded from a model: made by a test",
    ]
    runs = simulate(file, cache="50%,16", policy="lru,lrfu").runs
    assert [line.split() for line in lines[4:]] == [
        ["cache", "experts", "policy", "hits"],
        ["50%", "24", "lru", f"{runs[0].hit_rate:.1%}"],
        ["lrfu", f"{runs[1].hit_rate:.1%}"],
        ["33%", "16", "lru", f"{runs[2].hit_rate:.1%}"],
        ["lrfu", f"{runs[3].hit_rate:.1%}"],
    ]


def test_sizes_and_times_bring_their_columns(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--expert-bytes", "1MiB", "--disk", "500MiB", "--layer-ms", "3", "--attention-ms", "1")
    code, out, err = printed(capsys, file, *options, "--policy", "lru", "--predictor", "none,recall=0.9", "--cache", 24)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert "  experts  1.00 MiB each, 12.00 MiB a token; 500.00 MiB/s from the disk\n" in out
    assert "  compute  3.00 ms a layer, 1.00 ms of it attention: 111.1 tok/s from memory\n" in out
    assert lines[6] == [
        "cache",
        "experts",
        "policy",
        "predictor",
        "hits",
        "guessed",
        "read/token",
        "wasted",
        "tok/s",
        "bound",
    ]
    run = simulate(
        file,
        expert_bytes=2**20,
        disk="500MiB",
        layer_ms=3,
        attention_ms=1,
        policy="lru",
        predictor="recall=0.9",
        cache=24,
    ).runs[0]
    assert run.bytes_per_token is not None and run.tokens_per_s is not None and run.limit_tokens_per_s is not None
    wasted = run.wasted / (run.misses + run.guessed)
    assert lines[8] == [
        *("lru", "recall=0.9", f"{run.hit_rate:.1%}", f"{run.useful / run.wanted:.1%}"),
        *(f"{run.bytes_per_token / 2**20:.2f}", "MiB", f"{wasted:.1%}", f"{run.tokens_per_s:.2f}"),
        f"{run.tokens_per_s / run.limit_tokens_per_s:.0%}",
    ]  # fmt: skip
    assert max(map(len, out.splitlines())) <= 100


def test_a_cache_of_all_experts_on_a_text_that_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace_of([[[0]]] * 10, 2).write(tmp_path / "b.trace")
    code, out, _ = printed(capsys, tmp_path / "b.trace", "--cache", 2, "--expert-bytes", "1K", "--layer-ms", 0)
    assert code == 0 and "  compute  0.00 ms a layer, 0.00 ms of it attention\n" in out


def test_json_is_all_of_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = printed(capsys, file, "--json", "--cache", "50%")
    value = json.loads(out)
    assert (code, err) == (0, "")
    runs = simulate(file, cache="50%").runs
    assert value["runs"] == [run.as_dict() for run in runs]
    assert set(value["runs"][0]) > {field.name for field in dataclasses.fields(SimulatedRun)} - {"token_s"}
    assert value["runs"][0]["seconds"] is None and value["runs"][0]["bytes_per_token"] is None
    assert (value["n_experts"], value["top_k"], value["layers"], value["expert_bytes"]) == (16, 4, [0, 1, 2], None)


def test_an_error_is_one_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = printed(capsys, file, "--cache", "2")
    assert (code, out) == (1, "")
    assert err.startswith("moestream: error: cache='2': 2 experts cannot hold") and len(err.splitlines()) == 1


def test_its_options_are_the_parameters_of_the_function() -> None:
    parsed = vars(cli._parser().parse_args(["simulate", "a.trace"]))
    assert parsed.keys() - {"command", "parser", "verbose", "json"} == set(inspect.signature(simulate).parameters)
    for name, parameter in inspect.signature(simulate).parameters.items():
        assert name == "trace" or parsed[name] == parameter.default, name
