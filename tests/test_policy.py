"""Which slot is given up next: the policies alone, each against a model of it in Python."""

from __future__ import annotations

import errno
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moestream.options import Policy
from native import called, failure, ffi, lib

POLICIES = Policy.__args__
SLOTS, KEYS = 9, 20


@ffi.callback("bool(void *, int)")
def may(context: Any, slot: int) -> bool:
    return slot in ffi.from_handle(context)


def victim(policy: Any, allowed: set[int]) -> int:
    return policy.victim(policy, may, ffi.new_handle(allowed))


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    policies = []

    def open_(name: str, n_slots: int = SLOTS, n_keys: int = KEYS) -> Any:
        out = ffi.new("struct ms_policy **")
        called(lib.ms_policy_open, name.encode(), n_slots, n_keys, out)
        policies.append(out[0])
        return out[0]

    yield open_
    for policy in policies:
        policy.free(policy)


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest, opened: Callable[..., Any]) -> Any:
    return opened(request.param)


# What holds for each


def test_a_victim_is_one_that_may_go(policy: Any) -> None:
    for slot in (3, 1, 4):
        policy.filled(policy, slot, slot)
    assert victim(policy, {1, 3, 4}) == 3
    assert victim(policy, {1, 4}) == 1
    assert victim(policy, {4}) == 4
    assert victim(policy, set()) == -1


def test_an_empty_slot_is_no_victim(policy: Any) -> None:
    assert victim(policy, set(range(SLOTS))) == -1
    policy.filled(policy, 0, 0)
    policy.emptied(policy, 0)
    assert victim(policy, set(range(SLOTS))) == -1
    policy.emptied(policy, 0)


def test_asking_for_a_victim_changes_nothing(policy: Any) -> None:
    for slot in range(SLOTS):
        policy.filled(policy, slot, slot)
    assert [victim(policy, set(range(SLOTS))) for _ in range(3)] == [0, 0, 0]


def test_a_slot_that_cooled_goes_before_all_others(policy: Any) -> None:
    for slot in (3, 1, 4):
        policy.filled(policy, slot, slot)
        for _ in range(slot):
            policy.used(policy, slot)
    policy.cooled(policy, 4)
    assert victim(policy, {1, 3, 4}) == 4
    policy.cooled(policy, 1)
    assert victim(policy, {1, 3, 4}) == 1, "the last to cool is the first to go"
    assert victim(policy, {3, 4}) == 4
    policy.used(policy, 1)
    policy.used(policy, 4)
    assert victim(policy, {3, 4}) == 3, "used again, it is as any other"


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    out = ffi.new("struct ms_policy **")
    code, message = failure(called, lib.ms_policy_open, b"mru", SLOTS, KEYS, out)
    assert (code, message) == (-errno.EINVAL, 'unknown policy "mru"; known are lru, lfu and lrfu')
    assert set(POLICIES) == {"lru", "lfu", "lrfu"}


# What tells them apart


def hits(policy: Any, n_slots: int, requests: list[int]) -> list[bool]:
    """Whether each request finds its expert in a cache that is empty at first."""
    slot_of: dict[int, int] = {}
    found = []
    for key in requests:
        found.append(key in slot_of)
        if key in slot_of:
            policy.used(policy, slot_of[key])
            continue
        slot = len(slot_of)
        if slot == n_slots:
            slot = victim(policy, set(range(n_slots)))
            del slot_of[next(k for k, s in slot_of.items() if s == slot)]
            policy.emptied(policy, slot)
        policy.filled(policy, slot, key)
        slot_of[key] = slot
    return found


@pytest.mark.parametrize("name, found", [("lru", 0), ("lfu", 3), ("lrfu", 3)])
def test_a_scan_flushes_the_frequent_ones_out_of_lru_alone(name: str, found: int, opened: Callable[..., Any]) -> None:
    frequent, scan = [0, 1, 2], list(range(10, 20))
    requests = frequent * 4 + scan + frequent
    assert sum(hits(opened(name, 6, 100), 6, requests)[-3:]) == found


@pytest.mark.parametrize("name, found", [("lru", False), ("lfu", True), ("lrfu", True)])
def test_what_was_evicted_is_remembered_when_it_comes_back(name: str, found: bool, opened: Callable[..., Any]) -> None:
    policy = opened(name, 2, 100)
    requests = [0, 0, 0, 1, 2]  # of 1 and 2 one is in memory beside 0
    assert hits(policy, 2, requests) == [False, True, True, False, False]
    policy.cooled(policy, 0)  # 0 goes for 3
    slot = victim(policy, {0, 1})
    policy.emptied(policy, slot)
    policy.filled(policy, slot, 3)
    policy.emptied(policy, slot)
    policy.filled(policy, slot, 0)  # and is back
    policy.used(policy, 1 - slot)
    policy.used(policy, 1 - slot)
    assert (victim(policy, {0, 1}) != slot) == found


@pytest.mark.parametrize("name", ["lfu", "lrfu"])
def test_a_frequency_of_long_ago_counts_no_more(name: str, opened: Callable[..., Any]) -> None:
    policy = opened(name, 3, 3)
    for key in range(3):
        policy.filled(policy, key, key)
    for _ in range(30):
        policy.used(policy, 0)
    for _ in range(100):
        policy.used(policy, 1)
        policy.used(policy, 2)
    assert victim(policy, {0, 1, 2}) == 0


@pytest.mark.parametrize("name, goes", [("lru", 0), ("lrfu", 1), ("lfu", 1)])
def test_between_a_frequent_and_a_recent_one(name: str, goes: int, opened: Callable[..., Any]) -> None:
    policy = opened(name, 2, 100)
    policy.filled(policy, 0, 0)
    policy.used(policy, 0)
    policy.filled(policy, 1, 1)
    assert victim(policy, {0, 1}) == goes


# Models


class Lru:
    def __init__(self) -> None:
        self.order: list[int] = []  # the next to go first

    def filled(self, slot: int, key: int) -> None:
        self.used(slot)

    def used(self, slot: int) -> None:
        self.emptied(slot)
        self.order.append(slot)

    def cooled(self, slot: int) -> None:
        self.emptied(slot)
        self.order.insert(0, slot)

    def emptied(self, slot: int) -> None:
        self.order = [other for other in self.order if other != slot]


class Lfu:
    """Slots by count, each with its place among those of the same count; a halving puts the higher of two before the lower."""

    def __init__(self) -> None:
        self.count = [0] * KEYS
        self.key_of: dict[int, int] = {}
        self.by_count: list[list[int]] = [[] for _ in range(64)]
        self.cool: list[int] = []
        self.uses = 0

    @property
    def order(self) -> list[int]:
        return self.cool + [slot for slots in self.by_count for slot in slots]

    def filled(self, slot: int, key: int) -> None:
        self.key_of[slot] = key
        self.used(slot)

    def used(self, slot: int) -> None:
        key = self.key_of[slot]
        self.count[key] = min(63, self.count[key] + 1)
        self.emptied(slot)
        self.by_count[self.count[key]].append(slot)
        self.uses += 1
        if self.uses % (4 * KEYS) == 0:
            self.count = [count // 2 for count in self.count]
            pairs = zip(self.by_count[::2], self.by_count[1::2], strict=True)
            self.by_count = [low + high for low, high in pairs] + [[] for _ in range(32)]

    def cooled(self, slot: int) -> None:
        self.emptied(slot)
        self.cool.insert(0, slot)

    def emptied(self, slot: int) -> None:
        for slots in (self.cool, *self.by_count):
            if slot in slots:
                slots.remove(slot)


class Lrfu:
    """Every use of every expert, weighed by its age when the order is asked for."""

    def __init__(self) -> None:
        self.times: dict[int, list[int]] = {key: [] for key in range(KEYS)}
        self.key_of: dict[int, int] = {}
        self.hot: set[int] = set()
        self.cool: list[int] = []
        self.now = 0

    def value(self, slot: int) -> float:
        return math.fsum(2 ** ((time - self.now) / (0.5 * KEYS)) for time in self.times[self.key_of[slot]])

    @property
    def order(self) -> list[int]:
        return self.cool + sorted(self.hot, key=self.value)

    def filled(self, slot: int, key: int) -> None:
        self.key_of[slot] = key
        self.used(slot)

    def used(self, slot: int) -> None:
        self.emptied(slot)
        self.now += 1
        self.times[self.key_of[slot]].append(self.now)
        self.hot.add(slot)

    def cooled(self, slot: int) -> None:
        self.emptied(slot)
        self.cool.insert(0, slot)

    def emptied(self, slot: int) -> None:
        self.hot.discard(slot)
        if slot in self.cool:
            self.cool.remove(slot)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name, model", [("lru", Lru), ("lfu", Lfu), ("lrfu", Lrfu)])
def test_the_order_is_that_of_the_model_after_any_operations(
    name: str, model: Callable[[], Any], seed: int, opened: Callable[..., Any]
) -> None:
    rng = random.Random(seed)
    policy, expected = opened(name), model()
    key_of: dict[int, int] = {}
    for _ in range(2000):
        slot = rng.randrange(SLOTS)
        operation = rng.choices(("filled", "used", "cooled", "emptied", "victim"), (3, 5, 1, 1, 3))[0]
        if operation == "victim":
            allowed = set(rng.sample(range(SLOTS), rng.randrange(SLOTS + 1)))
            assert victim(policy, allowed) == next((s for s in expected.order if s in allowed), -1)
            continue
        if (operation == "filled") == (slot in key_of):
            continue
        key = ()
        if operation == "filled":
            skewed = sorted(set(range(KEYS)) - set(key_of.values()))
            key = (skewed[min(int(rng.expovariate(0.3)), len(skewed) - 1)],)
            key_of[slot] = key[0]
        elif operation == "emptied":
            del key_of[slot]
        getattr(policy, operation)(policy, slot, *key)
        getattr(expected, operation)(slot, *key)
