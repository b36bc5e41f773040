"""`moestream bench --compare`: a difference is called one if it is, and no more often than it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from bench_records import DISK, GIB, MACHINE, killed, record
from moestream import OptionError
from moestream.bench.compare import Comparison, compare, comparison_lines, pair_records


def one(a: dict[str, Any], b: dict[str, Any], **options: Any) -> Comparison:
    (found,) = compare([a], [b], **{"resamples": 1000, **options})
    return found


# Statistics, on made-up times


def correlated(rng: np.random.Generator, n: int, r: float) -> npt.NDArray[np.float64]:
    """An autoregression of mean 0 and variance 1, of which neighbours have correlation r."""
    noise = rng.normal(0, np.sqrt(1 - r * r), n + 100)
    for i in range(1, len(noise)):
        noise[i] += r * noise[i - 1]
    return noise[100:]


def times(rng: np.random.Generator, mean_ns: float, *, rounds: int, r: float, of_rounds: float) -> list[list[float]]:
    """256 tokens a round that vary by a fifth, in rounds that differ by `of_rounds` as a whole."""
    return [
        (mean_ns * np.exp(rng.normal(0, of_rounds) + 0.2 * correlated(rng, 256, r))).tolist() for _ in range(rounds)
    ]


def called(ratio: float, trials: int, **shape: Any) -> float:
    """The share of trials in which a difference is called one, where B is `ratio` times as fast."""
    base = record(tokens=2)
    hits = 0
    for trial in range(trials):
        rng = np.random.default_rng([trial, 7])
        a, b = ({**base, "token_ns": times(rng, 1e8 / speed, **shape)} for speed in (1.0, ratio))
        hits += one(a, b, resamples=400, seed=trial).real
    return hits / trials


# In 200 trials a probability of 5% gives more than 10% less than once in 500 times.
@pytest.mark.parametrize("r", [0.0, 0.5, 0.8])
@pytest.mark.parametrize(("rounds", "of_rounds"), [(1, 0.0), (3, 0.0), (3, 0.1), (5, 0.02), (5, 0.1)])
def test_no_difference_is_seldom_called_one(rounds: int, of_rounds: float, r: float) -> None:
    bound = 0.13 if rounds == 1 else 0.1  # one round has few blocks to learn from where neighbours are very alike
    assert called(1.0, 200, rounds=rounds, r=r, of_rounds=of_rounds) <= bound


@pytest.mark.parametrize(("rounds", "r", "of_rounds"), [(3, 0.0, 0.0), (3, 0.5, 0.0), (5, 0.5, 0.02), (1, 0.0, 0.0)])
def test_ten_percent_are_found(rounds: int, r: float, of_rounds: float) -> None:
    assert called(1.1, 40, rounds=rounds, r=r, of_rounds=of_rounds) >= 0.9


def test_rounds_that_differ_hide_what_tokens_alone_would_show() -> None:
    """A thousand tokens a round are no thousand measurements if the round as a whole was slow."""
    assert called(1.1, 60, rounds=3, r=0.0, of_rounds=0.15) <= 0.2


def test_the_interval_holds_the_true_ratio_as_often_as_it_says() -> None:
    held = 0
    for trial in range(150):
        rng = np.random.default_rng([trial, 8])
        a, b = (
            {**record(tokens=2), "token_ns": times(rng, ns, rounds=4, r=0.5, of_rounds=0.05)} for ns in (1.25e8, 1e8)
        )
        found = one(a, b, resamples=400, level=0.8)
        held += found.low <= 1.25 <= found.high  # type: ignore[operator]
    assert 0.7 <= held / 150 <= 0.9


def test_chance_does_not_grow_with_the_number_of_comparisons() -> None:
    """Ten comparisons of nothing, of which hardly a run may call any a difference."""
    wrong = 0
    for trial in range(40):
        rng = np.random.default_rng([trial, 9])
        a, b = (
            [
                {**record(f"arm{n}", tokens=2), "token_ns": times(rng, 1e8, rounds=3, r=0.3, of_rounds=0)}
                for n in range(10)
            ]
            for _ in range(2)
        )
        wrong += any(c.real for c in compare(a, b, resamples=2000, seed=trial))
    assert wrong <= 6


def test_holm_multiplies_the_smallest_p_by_all_and_the_last_by_one() -> None:
    a = [record(f"arm{n}", tokens=64, seed=1) for n in range(3)]
    b = [record(f"arm{n}", tokens=64, seed=2, speed=5 * (1 + n / 100)) for n in range(3)]
    found = sorted(compare(a, b), key=lambda c: c.p or 0)
    assert [round(c.p_adjusted or 0, 9) for c in found] == [
        round(max(min(1, (found[i].p or 0) * (3 - i)) for i in range(rank + 1)), 9) for rank in range(3)
    ]


def test_the_same_seed_gives_the_same_result() -> None:
    a, b = record(seed=1), record(seed=2)
    assert one(a, b) == one(a, b)
    assert one(a, b, seed=1) != one(a, b)


def test_prompts_are_compared_by_their_rounds() -> None:
    prompt = {"n_prompt": 512, "n_gen": 0, "token_ns": []}
    a = record(**prompt, samples_ts=[512, 512 / 1.01, 512 / 0.99])
    b = record(**prompt, samples_ts=[1024, 512 / 0.51, 512 / 0.49])
    found = one(a, b)
    assert found.real and found.a_ts == pytest.approx(512) and found.b_ts == pytest.approx(1024)
    alone = one({**a, "samples_ts": [512]}, b)
    assert (alone.ratio, alone.low, alone.p, alone.real) == (pytest.approx(2), None, None, False)
    assert alone.sentence == "cannot be told from one value each: measure more rounds or tokens"


# What it says


def test_a_prompt_counts_in_a_test_of_both() -> None:
    """The tokens written took as long in both; the prompt ten times as long in one."""

    def both(prompt_s: float, seed: int) -> dict[str, Any]:
        made = record(tokens=128, speed=64, n_prompt=512, n_gen=128, seed=seed)
        samples_ns = [ns + round(prompt_s * 1e9) for ns in made["samples_ns"]]
        return made | {"samples_ns": samples_ns, "samples_ts": [640e9 / ns for ns in samples_ns]}

    (found,) = compare([both(10, 1)], [both(1, 2)])
    assert found.ratio == pytest.approx(4, rel=0.05)
    assert found.real


def test_a_difference_is_told_with_its_interval() -> None:
    faster = one(record(speed=5), record(speed=6, seed=1))
    assert faster.real and faster.ratio == pytest.approx(1.2, rel=0.05)
    assert faster.sentence.startswith("B is ") and "% faster (95%: " in faster.sentence and "% to " in faster.sentence
    assert faster.low < faster.ratio < faster.high  # type: ignore[operator]
    slower = one(record(speed=6), record(speed=5, seed=1), level=0.9)
    assert "% slower (90%: " in slower.sentence


def test_no_difference_is_told_with_what_could_have_been_shown() -> None:
    found = one(record(seed=1), record(seed=2))
    assert not found.real
    assert found.sentence.startswith("no difference shown: B/A between 0.9")
    assert "; more rounds or tokens would be needed to show less than " in found.sentence


def test_one_round_is_told() -> None:
    assert one(record(rounds=1), record(rounds=3)).sentence.endswith(
        "; of one round only, which cannot show how rounds differ"
    )
    assert "one round" not in one(record(), record()).sentence


def test_a_killed_arm_is_a_result_without_a_ratio() -> None:
    found = one(killed(), record("stock-none", speed=5, memory=8 * GIB))
    assert (found.a_ts, found.ratio, found.p, found.real) == (None, None, None, False)
    assert found.sentence.startswith("A has no speed (killed: out of memory); B ran at 5.0")
    # What it did before it was killed does not count.
    assert one(record(outcome="oom-killed"), record()).a_ts is None
    assert one(record(outcome="too slow"), record()).a_ts is not None


# What belongs together


def test_records_of_the_same_arm_and_test_are_paired() -> None:
    a = [record("x"), record("x", depth=512), record("y"), record("x", memory=8 * GIB)]
    pairs = pair_records(a, [a[3], a[2], a[1], a[0]])
    assert all(first is second for first, second in pairs.pairs) and len(pairs.pairs) == 4
    assert pairs.only_a == pairs.only_b == []
    partly = pair_records(a[:3], [record("x"), record("z")])
    assert [(p["arm"], q["arm"]) for p, q in partly.pairs] == [("x", "x")]
    assert [r["n_depth"] for r in partly.only_a] == [512, 0] and [r["arm"] for r in partly.only_b] == ["z"]


def test_two_arms_are_compared_where_each_side_has_one() -> None:
    (found,) = compare([record("stream-reactive")], [record("stream-prefetch")], resamples=1000)
    assert found.what == "stream-prefetch tg256, 4 GiB of memory (B) against stream-reactive tg256, 4 GiB of memory (A)"
    assert found.real and found.warnings == ()


def test_other_conditions_are_compared_with_a_warning_that_says_what_differs() -> None:
    other = record(
        memory=8 * GIB,
        disk_bps_limit=500_000_000,
        workload="random tokens",
        n_threads=1,
        model_hash="ffff",
        cpu_info="other CPU",
        machine={**MACHINE, "cores_usable": 8, "versions": {"moestream": "0.2.0"}},
        disk={**DISK, "device": "sda"},
    )
    assert one(record(), other).warnings == (
        "the model differs: 0123456789abcdef in A, ffff in B",
        "the memory limit differs: 4 GiB in A, 8 GiB in B",
        "the limit of the disk differs: none in A, 500 MB/s in B",
        "the workload differs: text: demo corpus in A, random tokens in B",
        "the threads differ: 2 in A, 1 in B",
        "the CPU differs: AMD EPYC 9R14 in A, other CPU in B",
        "the usable cores differ: 2 in A, 8 in B",
        "the disk differs: nvme0n1 in A, sda in B",
    )
    # A newer version on the same machine is what one compares.
    newer = {**MACHINE, "versions": {"moestream": "0.2.0"}, "commit": "abc"}
    assert one(record(), record(machine=newer, build_commit="other")).warnings == ()


def test_nothing_in_common_is_refused_with_what_there_is() -> None:
    with pytest.raises(OptionError) as caught:
        compare([record("x"), record("y")], [record("z", depth=512)])
    assert str(caught.value) == (
        "no record of A is of the same arm and test as one of B: A has x tg256; y tg256; B has z tg256 @ d512"
    )


def test_numbers_without_sense_are_refused() -> None:
    with pytest.raises(OptionError, match="resamples=10: at least 100 are needed"):
        compare([record()], [record()], resamples=10)
    with pytest.raises(OptionError, match="level=95: expected a number from 0.5 to less than 1"):
        compare([record()], [record()], level=95)


def test_lines_for_people_leave_nothing_out() -> None:
    a = [record("x", speed=5), record("y"), killed("k"), record("only in a")]
    b = [record("x", speed=7, n_threads=4), record("y", seed=3), record("k")]
    text = "\n".join(comparison_lines(compare(a, b, resamples=1000), pair_records(a, b)))
    lines = text.splitlines()
    assert lines[0].startswith("x tg256, 4 GiB of memory: 7.") and lines[0].endswith(" tokens a second")
    assert lines[1].startswith("  B is ")
    assert lines[2] == "  warning: the threads differ: 2 in A, 4 in B"
    assert "k tg256, 4 GiB of memory: 5." in text and " against none tokens a second" in text
    assert "allows for 2 comparisons at once (Holm)" in text
    assert lines[-1] == "only in A: only in a tg256, 4 GiB of memory"
