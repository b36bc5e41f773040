"""Does it pay here? A stream of token times, made up, and what the trial makes of it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from native import ffi, lib

WATCH, TRIAL, HOLD = 16, 60, 256
MS = 1_000_000


class Stream:
    """Tokens of 10 ms without guessing and `factor` times that with, of which `wait` is waiting."""

    def __init__(self, factor: float, *, wait: float = 0.5, noise: float = 0.0, seed: int = 0) -> None:
        self.trial: Any = ffi.new("struct ms_trial *")
        lib.ms_trial_begin(self.trial)
        self.factor, self.wait = factor, wait
        self.ons: list[bool] = []
        self.phases: list[int] = []
        self.spent_ns = 0
        self._noise, self._rng = noise, random.Random(seed)

    def run(self, tokens: int) -> None:
        for _ in range(tokens):
            self.ons.append(bool(self.trial.on))
            self.phases.append(self.trial.phase)
            duration = 10 * MS * (self.factor if self.trial.on else 1) * (1 + self._noise * self._rng.random())
            lib.ms_trial_observe(self.trial, round(duration), round(duration * self.wait))
            self.spent_ns += round(duration)

    def lengths(self, phase: int) -> list[int]:
        """Tokens of each uninterrupted stay in a phase that is over."""
        stays, before = [0], None
        for now in self.phases:
            if now == phase:
                stays[-1 if before == phase else len(stays) :] = [stays[-1] + 1 if before == phase else 1]
            before = now
        return stays[1 : -1 if before == phase else None]


def until_decided(stream: Stream) -> int:
    """Tokens until the first trial is over."""
    while not stream.trial.n_trials:
        stream.run(1)
        assert len(stream.ons) < 200
    return len(stream.ons)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_where_it_pays_it_is_turned_on(noise: float) -> None:
    stream = Stream(0.8, noise=noise)
    assert until_decided(stream) == WATCH + TRIAL
    stream.run(HOLD)
    assert all(stream.ons[-HOLD:]) and stream.trial.verdict
    assert stream.trial.medians[1] < stream.trial.medians[0]


@pytest.mark.parametrize(("factor", "noise"), [(1.0, 0.0), (1.05, 0.3)])
def test_where_it_does_not_it_stays_off(factor: float, noise: float) -> None:
    stream = Stream(factor, noise=noise)
    until_decided(stream)
    stream.run(HOLD)
    assert not any(stream.ons[-HOLD:]) and not stream.trial.verdict


def test_as_many_tokens_are_computed_either_way_in_turn() -> None:
    stream = Stream(0.9)
    until_decided(stream)
    tried = stream.ons[WATCH:]
    assert tried == ([False] * 5 + [True] * 10 + [False] * 5) * 3


@pytest.mark.parametrize("wait", [0.0, 0.02])
def test_where_there_is_nothing_to_win_nothing_is_tried(wait: float) -> None:
    stream = Stream(0.5, wait=wait)
    stream.run(2000)
    assert not any(stream.ons) and stream.trial.n_trials == 0


def test_what_is_hopeless_is_left_early() -> None:
    stream = Stream(1.5)
    assert until_decided(stream) == WATCH + 20
    assert sum(stream.ons) == 10


@pytest.mark.parametrize("factor", [0.8, 1.3])
def test_it_holds_for_longer_each_time_that_the_verdict_is_the_same(factor: float) -> None:
    stream = Stream(factor)
    stream.run(34_000)
    assert stream.lengths(lib.MS_TRIAL_HOLDS) == [256, 512, 1024, 2048, 4096, 8192, 8192, 8192]
    assert set(stream.lengths(lib.MS_TRIAL_WATCHES)) == {WATCH}


def test_another_verdict_holds_for_the_shortest_time_again() -> None:
    stream = Stream(0.8)
    stream.run(2 * (WATCH + TRIAL) + 256 + 300)
    stream.factor = 1.3
    stream.run(5000)
    assert stream.lengths(lib.MS_TRIAL_HOLDS)[:4] == [256, 512, 256, 512]


@pytest.mark.parametrize(("factor", "noise"), [(1.1, 0.0), (1.1, 0.2), (1.5, 0.0)])
def test_trials_that_come_to_nothing_cost_less_than_a_fiftieth(factor: float, noise: float) -> None:
    stream, without = Stream(factor, noise=noise), Stream(1.0, noise=noise, wait=0)
    stream.run(2000)
    without.run(2000)
    assert stream.trial.n_trials >= 2
    assert stream.spent_ns / without.spent_ns < 1.02


def test_few_slow_tokens_decide_nothing() -> None:
    """The first of each block is not counted, and of the others the median."""
    stream = Stream(0.9)
    stream.run(WATCH)
    for i in range(TRIAL):
        slow = 10 if i % 5 == 0 or (stream.trial.on and i % 5 == 1) else 1
        lib.ms_trial_observe(stream.trial, slow * (9 if stream.trial.on else 10) * MS, 5 * MS)
    assert stream.trial.n_trials == 1 and stream.trial.verdict
