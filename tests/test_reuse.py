"""How probable the use of an expert is that was not used for some tokens, counted while a model runs."""

from __future__ import annotations

import random

import pytest

from native import ffi, lib

AGES = 16
ENOUGH = 64


def test_while_little_is_known_everything_may_be_used() -> None:
    reuse = ffi.new("struct ms_reuse *")
    for _ in range(ENOUGH - 1):
        lib.ms_reuse_given_up(reuse, 3)
    assert [lib.ms_reuse_probability(reuse, age) for age in (0, 1, 3, 20)] == [1, 1, 1, 1]
    lib.ms_reuse_given_up(reuse, 3)
    assert [lib.ms_reuse_probability(reuse, age) for age in (1, 3, 4, 20)] == [0, 0, 1, 1]


def test_what_this_token_used_is_never_thought_little_of() -> None:
    reuse = ffi.new("struct ms_reuse *")
    for _ in range(1000):
        lib.ms_reuse_given_up(reuse, 20)
    assert lib.ms_reuse_probability(reuse, 0) == 1
    lib.ms_reuse_used(reuse, 0)  # twice by one token: says nothing about the next
    assert lib.ms_reuse_probability(reuse, 1) == 0


def test_the_share_of_each_age_is_what_was_seen() -> None:
    reuse, rng = ffi.new("struct ms_reuse *"), random.Random(1)
    chances = {age: 0.5 / age for age in range(1, 40)}
    for _ in range(20_000):  # an expert that is used, or given up in the end
        age = next((a for a, chance in chances.items() if rng.random() < chance), None)
        if age is None:
            lib.ms_reuse_given_up(reuse, 40)
        else:
            lib.ms_reuse_used(reuse, age)
    for age in range(1, AGES - 1):
        assert lib.ms_reuse_probability(reuse, age) == pytest.approx(chances[age], rel=0.2)
    # many ages are in the last one's count: not more probable than the age before
    assert lib.ms_reuse_probability(reuse, 39) == lib.ms_reuse_probability(reuse, AGES - 2)


def test_what_was_long_ago_is_forgotten() -> None:
    reuse = ffi.new("struct ms_reuse *")
    for _ in range(200_000):
        lib.ms_reuse_used(reuse, 1)
    assert lib.ms_reuse_probability(reuse, 1) == 1
    for _ in range(200_000):
        lib.ms_reuse_given_up(reuse, 2)
    assert lib.ms_reuse_probability(reuse, 1) < 0.15
    assert reuse.of[1] < 1 << 17
