"""The list of what may be wanted soon: the nearest first, among these the surest."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from native import ffi, lib

Guess = tuple[int, int, int, float]  # due, layer, expert, confidence


@pytest.fixture
def new() -> Iterator[Callable[[int], Any]]:
    made = []

    def new_(capacity: int) -> Any:
        made.append(lib.ms_guesses_new(capacity))
        return made[-1]

    yield new_
    for guesses in made:
        lib.ms_guesses_free(guesses)


def add(guesses: Any, *added: Guess) -> None:
    for due, layer, expert, confidence in added:
        guess = {"due": due, "layer": layer, "expert": expert, "confidence": confidence}
        lib.ms_guesses_add(guesses, ffi.new("struct ms_guess *", guess)[0])


def taken(guesses: Any) -> list[Guess]:
    """All of them, in order; the list is empty afterwards."""
    found = []
    while (first := lib.ms_guesses_first(guesses)) != ffi.NULL:
        found.append((first.due, first.layer, first.expert, first.confidence))
        lib.ms_guesses_drop_first(guesses)
    lib.ms_guesses_drop_first(guesses)  # of none: nothing
    return found


def test_the_nearest_come_first_and_among_these_the_surest(new: Callable[[int], Any]) -> None:
    guesses = new(8)
    add(guesses, (7, 3, 1, 1.0), (5, 1, 2, 0.5), (6, 2, 3, 0.75), (5, 1, 4, 0.875), (5, 1, 6, 0.5))
    assert taken(guesses) == [(5, 1, 4, 0.875), (5, 1, 2, 0.5), (5, 1, 6, 0.5), (6, 2, 3, 0.75), (7, 3, 1, 1.0)]
    assert taken(guesses) == []


def test_the_latest_opinion_on_an_expert_counts(new: Callable[[int], Any]) -> None:
    guesses = new(4)
    add(guesses, (5, 1, 2, 0.5), (5, 1, 3, 0.75), (5, 1, 2, 1.0))
    assert taken(guesses) == [(5, 1, 2, 1.0), (5, 1, 3, 0.75)]
    add(guesses, (5, 1, 2, 1.0), (9, 1, 2, 0.25))
    assert taken(guesses) == [(9, 1, 2, 0.25)]


def test_a_layers_guesses_are_withdrawn_together(new: Callable[[int], Any]) -> None:
    guesses = new(8)
    add(guesses, (5, 1, 2, 0.5), (6, 2, 2, 0.5), (5, 1, 3, 0.5), (7, 3, 2, 0.5))
    lib.ms_guesses_withdraw(guesses, 1)
    lib.ms_guesses_withdraw(guesses, 0)
    assert taken(guesses) == [(6, 2, 2, 0.5), (7, 3, 2, 0.5)]


def test_what_is_due_now_or_before_expires(new: Callable[[int], Any]) -> None:
    guesses = new(8)
    add(guesses, *((due, due, 0, 0.5) for due in (4, 5, 6)))
    lib.ms_guesses_expire(guesses, 5)
    assert taken(guesses) == [(6, 6, 0, 0.5)]
    add(guesses, (7, 7, 0, 0.5))
    lib.ms_guesses_clear(guesses)
    assert taken(guesses) == []


def test_where_it_is_full_the_last_of_all_is_dropped(new: Callable[[int], Any]) -> None:
    guesses = new(3)
    add(guesses, *((due, due, 0, 0.5) for due in (1, 2, 3)))
    add(guesses, (4, 4, 0, 1.0))
    add(guesses, (2, 2, 1, 0.75))
    assert taken(guesses) == [(1, 1, 0, 0.5), (2, 2, 1, 0.75), (2, 2, 0, 0.5)]


@pytest.mark.parametrize("capacity", [1, 5, 40])
def test_any_use_does_what_a_sorted_list_does(capacity: int, new: Callable[[int], Any]) -> None:
    rng = random.Random(capacity)
    guesses, expected = new(capacity), list[Guess]()

    def before(guess: Guess) -> tuple[int, float]:
        return (guess[0], -guess[3])

    for _ in range(3000):
        what = rng.random()
        if what < 0.7:
            guess = (rng.randrange(50), rng.randrange(6), rng.randrange(8), rng.randrange(8) / 8)
            add(guesses, guess)
            expected = [g for g in expected if g[1:3] != guess[1:3]]
            if len(expected) == capacity and before(guess) < before(expected[-1]):
                expected.pop()
            if len(expected) < capacity:
                expected.append(guess)
                expected.sort(key=before)  # stable: an equal one goes behind
        elif what < 0.9:
            lib.ms_guesses_drop_first(guesses)
            expected = expected[1:]
        elif what < 0.97:
            layer = rng.randrange(6)
            lib.ms_guesses_withdraw(guesses, layer)
            expected = [g for g in expected if g[1] != layer]
        else:
            now = rng.randrange(20)
            lib.ms_guesses_expire(guesses, now)
            expected = [g for g in expected if g[0] > now]
        first = lib.ms_guesses_first(guesses)
        assert (first != ffi.NULL) == bool(expected)
        if expected:
            assert (first.due, first.layer, first.expert, first.confidence) == expected[0]
    assert taken(guesses) == expected
