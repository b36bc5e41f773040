"""Which slot is given up next: the policies alone, against a list in Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from native import ffi, lib

SLOTS = 9


@ffi.callback("bool(void *, int)")
def may(context: Any, slot: int) -> bool:
    return slot in ffi.from_handle(context)


def victim(policy: Any, allowed: set[int]) -> int:
    return policy.victim(policy, may, ffi.new_handle(allowed))


@pytest.fixture
def lru() -> Iterator[Any]:
    policy = lib.ms_policy_lru(SLOTS)
    yield policy
    policy.free(policy)


def test_the_least_recently_used_slot_goes_first(lru: Any) -> None:
    for slot in (3, 1, 4):
        lru.filled(lru, slot)
    lru.used(lru, 3)
    assert victim(lru, {1, 3, 4}) == 1


def test_a_victim_is_one_that_may_go(lru: Any) -> None:
    for slot in (3, 1, 4):
        lru.filled(lru, slot)
    assert victim(lru, {1, 4}) == 1
    assert victim(lru, {4}) == 4
    assert victim(lru, set()) == -1


def test_an_empty_slot_is_no_victim(lru: Any) -> None:
    assert victim(lru, set(range(SLOTS))) == -1
    lru.filled(lru, 0)
    lru.emptied(lru, 0)
    assert victim(lru, set(range(SLOTS))) == -1


def test_asking_for_a_victim_changes_nothing(lru: Any) -> None:
    for slot in range(SLOTS):
        lru.filled(lru, slot)
    assert [victim(lru, set(range(SLOTS))) for _ in range(3)] == [0, 0, 0]


def test_a_slot_that_cooled_goes_before_all_others(lru: Any) -> None:
    for slot in (3, 1, 4):
        lru.filled(lru, slot)
    lru.cooled(lru, 4)
    assert victim(lru, {1, 3, 4}) == 4
    assert victim(lru, {1, 3}) == 3
    lru.cooled(lru, 1)
    assert victim(lru, {1, 3, 4}) == 1, "the last to cool is the first to go"
    lru.used(lru, 1)
    lru.used(lru, 4)
    assert victim(lru, {1, 3, 4}) == 3, "used again, it is as any other"


@pytest.mark.parametrize("seed", range(5))
def test_the_order_is_that_of_use_after_any_operations(lru: Any, seed: int) -> None:
    rng = random.Random(seed)
    order: list[int] = []  # least recent first
    for _ in range(2000):
        slot = rng.randrange(SLOTS)
        operation = rng.choice(("filled", "used", "cooled", "emptied", "victim"))
        if operation == "victim":
            allowed = set(rng.sample(range(SLOTS), rng.randrange(SLOTS + 1)))
            assert victim(lru, allowed) == next((s for s in order if s in allowed), -1)
            continue
        if operation in ("used", "cooled") and slot not in order:
            continue
        getattr(lru, operation)(lru, slot)
        order = [s for s in order if s != slot]
        if operation == "cooled":
            order.insert(0, slot)
        elif operation != "emptied":
            order.append(slot)
