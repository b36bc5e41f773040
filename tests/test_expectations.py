"""Reading ahead without a model: what is expected, known or guessed, what is read of it, and what is given up for it."""

from __future__ import annotations

import contextlib
import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import native
from factory import make
from isolation import isolated
from native import PythonReader, Store, lib

ffi = native.ffi

MIB = 1 << 20
PIECE = MIB // 2
LARGE: dict[str, Any] = {
    "type": "F16",
    "d": 512,
    "ff": 1024,
    "layers": 3,
    "experts": 6,
    "tokenizer": "none",
    "vocab": 32,
    "heads": 4,
    "kv": 2,
}
"""Three reads of 1 MiB an expert, each in two pieces if it is guessed; two pieces are in flight at once."""


@pytest.fixture
def reader() -> Iterator[PythonReader]:
    found = PythonReader()
    yield found
    found.close()


@contextlib.contextmanager
def pool(path: Path, reader: PythonReader, experts: int | None = None, **options: Any) -> Iterator[Store]:
    """Slots for so many experts (None: all), the first layer of the first batch entered."""
    with native.opened(path) as source:
        n = source.n_layers * source.layers[0].n_experts if experts is None else experts
        budget = n * lib.ms_slot_bytes(source, ffi.addressof(source.layers[0]))
        with native.store(source, reader, budget, **options) as store:
            store.enter(0, new_batch=True)
            try:
                yield store
            finally:
                reader.resume()
                store.stop()
                store.settle()


def use(store: Store, layer: int, *experts: int) -> None:
    indices = store.acquire(layer, experts)
    store.check(layer, experts, indices)
    store.release(layer, indices)


def sizes(reader: PythonReader) -> list[list[int]]:
    return [[size for _, size in batch] for batch in reader.batches]


def experts_read(store: Store, reader: PythonReader, since: int = 0) -> list[tuple[int, int]]:
    """(layer, expert) of each read from batch number `since` on whose first matrix it begins, in the order of submission."""
    begins = {}
    for layer in range(store.source.n_layers):
        m = store.source.layers[layer].matrices[0]
        begins |= {m.offset + e * m.stride_bytes: (layer, e) for e in range(store.source.layers[layer].n_experts)}
    return [begins[at] for batch in reader.batches[since:] for at, _ in batch if at in begins]


def outcomes(store: Store) -> tuple[int, int, int, int]:
    c = store.counters()
    return c.guessed, c.useful, c.late, c.wasted


def forget_all(store: Store) -> None:
    """Shows the store that what was not used for a token is not used by the next, and leaves it full."""
    keys = [(layer, e) for layer in range(store.source.n_layers) for e in range(store.source.layers[layer].n_experts)]
    for layer, expert in keys * 8:
        store.enter(0, new_batch=True)
        store.release(layer, store.acquire(layer, [expert]))


# What is known


def test_what_is_known_is_read_at_once_and_in_order_and_is_a_miss_when_it_is_wanted(
    folder: Path, reader: PythonReader
) -> None:
    with pool(make(folder, **LARGE), reader) as store:
        reader.hold()
        indices = store.begin(0, [0])
        store.expect(1, {4: 1.0, 3: 1.0})
        assert sizes(reader) == [[MIB] * 3, [MIB] * 6], "whole, though a demand is in flight"
        assert experts_read(store, reader) == [(0, 0), (1, 4), (1, 3)]
        assert outcomes(store) == (2, 0, 0, 0)
        reader.resume()
        reader.wait_until_idle()
        store.enter(1)
        use(store, 1, 3, 4)
        counters = store.counters()
        assert (counters.hits, counters.misses) == (0, 3)
        assert outcomes(store) == (2, 2, 0, 0)
        assert counters.guessed_bytes == 6 * MIB and counters.wasted_bytes == 0
        use(store, 1, 3, 4)
        assert (store.counters().hits, store.counters().misses) == (2, 3)
        store.release(0, indices)


def test_what_is_known_and_wanted_while_it_is_on_its_way_is_late(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder), reader) as store:
        reader.hold()
        store.expect(1, {3: 1.0})
        store.enter(1)
        indices = store.begin(1, [3])
        assert store.presence(1, indices[0]) == 0
        assert outcomes(store) == (1, 0, 1, 0) and len(reader.batches) == 1
        reader.resume()
        use(store, 1, 3)
        store.release(1, indices)


def test_no_more_than_some_of_what_is_known_is_in_flight(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder, **LARGE), reader) as store:
        reader.hold()
        store.expect(1, dict.fromkeys(range(6), 1.0))
        assert sizes(reader) == [[MIB] * 9], "three experts: with two of them less than 8 MiB are in flight"
        reader.step()
        assert len(reader.batches) == 1
        reader.step()
        assert sizes(reader)[1:] == [[MIB] * 3]
        reader.resume()
        reader.wait_until_idle()
        assert experts_read(store, reader) == [(1, expert) for expert in range(6)]


def test_of_what_is_known_of_the_next_batch_little_is_in_flight(folder: Path, reader: PythonReader) -> None:
    """This batch may have demands yet, which would wait for it."""
    with pool(make(folder, **LARGE), reader) as store:
        reader.hold()
        store.enter(1)
        store.expect(1, dict.fromkeys(range(6), 1.0))
        assert sizes(reader) == [[MIB] * 3], "one expert, whole"
        reader.step(2)
        assert len(reader.batches) == 1
        reader.step()
        reader.wait_for_pending(3)
        assert sizes(reader) == [[MIB] * 3] * 2


def test_only_what_is_not_there_is_read(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder), reader) as store:
        use(store, 2, 5)
        store.expect(2, {5: 1.0, 6: 1.0})
        reader.wait_until_idle()
        assert experts_read(store, reader) == [(2, 5), (2, 6)]
        store.expect(2, {5: 1.0, 6: 1.0})
        assert len(reader.batches) == 2
        assert store.holds(2) == [5, 6] and store.holds(1) == []


# What is guessed


def test_a_guess_is_read_in_pieces_and_only_while_little_else_is_in_flight(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder, **LARGE), reader) as store:
        reader.hold()
        indices = store.begin(0, [0])
        store.expect(1, {3: 0.75})
        assert sizes(reader) == [[MIB] * 3]
        reader.step(2)
        assert len(reader.batches) == 1
        reader.step()
        assert sizes(reader)[1:] == [[PIECE, PIECE]]
        reader.step()
        assert sizes(reader)[2:] == [[PIECE]]
        reader.resume()
        reader.wait_until_idle()
        assert sum(map(sum, sizes(reader)[1:])) == 3 * MIB
        assert experts_read(store, reader) == [(0, 0), (1, 3)]
        store.release(0, indices)
        store.enter(1)
        use(store, 1, 3)
        assert outcomes(store) == (1, 1, 0, 0) and store.counters().guessed_bytes == 3 * MIB


def test_the_nearest_guess_is_read_first_and_of_a_layer_the_surest(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder, **LARGE), reader) as store:
        reader.hold()
        indices = store.begin(0, [0])
        store.expect(2, {1: 0.9, 2: 0.95})
        store.expect(1, {3: 0.6, 4: 0.8})
        reader.resume()
        reader.wait_until_idle()
        assert experts_read(store, reader, 1) == [(1, 4), (1, 3), (2, 2), (2, 1)]
        store.release(0, indices)


def test_a_newer_opinion_on_a_layer_replaces_the_older(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder, **LARGE), reader) as store:
        reader.hold()
        indices = store.begin(0, [0])
        store.expect(1, {3: 0.6, 4: 0.8})
        store.expect(1, {5: 0.6})
        reader.resume()
        reader.wait_until_idle()
        assert experts_read(store, reader, 1) == [(1, 5)]
        store.release(0, indices)


def test_a_demand_in_the_middle_of_a_guess_gets_the_rest(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder, **LARGE), reader) as store:
        reader.hold()
        store.expect(1, {3: 0.75})
        reader.step()
        store.enter(1)
        indices = store.begin(1, [3, 4])
        assert sizes(reader)[-1] == [PIECE] * 3 + [MIB] * 3, "the rest of the one before the other"
        assert outcomes(store) == (1, 0, 1, 0) and store.counters().misses == 2
        store.release(1, indices)  # nobody holds it, and yet it comes
        store.enter(2)
        store.enter(0, new_batch=True)
        reader.resume()
        reader.wait_until_idle()
        assert store.holds(1) == [3, 4]
        use(store, 1, 3, 4)
        assert outcomes(store) == (1, 0, 1, 0)


def test_a_guess_whose_layer_has_passed_ends_and_costs_its_pieces(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder, **LARGE), reader) as store:
        reader.hold()
        store.expect(1, {3: 0.75})
        store.enter(1)
        reader.step()
        assert sizes(reader) == [[PIECE] * 2, [PIECE]], "while its layer computes it may be wanted"
        store.enter(2)
        reader.resume()
        reader.wait_until_idle()
        assert sum(map(sum, sizes(reader))) == 3 * PIECE
        counters = store.counters()
        assert outcomes(store) == (1, 0, 0, 1)
        assert (counters.slots_used, counters.wasted_bytes, counters.guessed_bytes) == (0, 3 * PIECE, 3 * PIECE)
        use(store, 1, 3)


def test_a_guess_that_waits_for_the_disk_ends_when_its_layer_has_passed(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder, **LARGE), reader) as store:
        reader.hold()
        store.expect(1, {3: 0.75})
        indices = store.begin(0, [0])
        reader.step(2)
        assert store.counters().slots_used == 2
        store.enter(2)
        assert store.counters().slots_used == 1 and outcomes(store) == (1, 0, 0, 1)
        reader.resume()
        reader.wait_until_idle()
        store.release(0, indices)
        store.release(0, store.acquire(0, list(range(6))))


def test_a_guess_that_expired_is_never_read(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder, **LARGE), reader) as store:
        reader.hold()
        indices = store.begin(0, [0])
        store.expect(1, {3: 0.75})
        store.enter(1)
        reader.resume()
        reader.wait_until_idle()
        assert experts_read(store, reader) == [(0, 0)] and outcomes(store) == (0, 0, 0, 0)
        store.release(0, indices)


def test_guesses_that_nothing_is_free_for_wait(folder: Path, reader: PythonReader) -> None:
    """Only so many experts are read in pieces at once."""
    with pool(make(folder), reader) as store:
        reader.hold()
        store.expect(1, {expert: 0.9 for expert in range(8)})
        store.expect(2, {expert: 0.8 for expert in range(8)})
        reader.resume()
        reader.wait_until_idle()
        assert sorted(experts_read(store, reader)) == [(layer, expert) for layer in (1, 2) for expert in range(8)]
        assert store.holds(1) == store.holds(2) == list(range(8))


def test_what_turns_out_to_be_known_is_read_at_once(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder, **LARGE), reader) as store:
        reader.hold()
        store.expect(1, {3: 0.75})
        indices = store.begin(0, [0])
        store.expect(1, {3: 1.0, 4: 1.0})
        assert sizes(reader)[2:] == [[PIECE] * 4, [MIB] * 3]
        reader.resume()
        reader.wait_until_idle()
        store.release(0, indices)
        store.enter(1)
        use(store, 1, 3, 4)
        assert outcomes(store) == (2, 2, 0, 0)


def test_a_prompt_that_asks_ahead_gets_the_rest_of_a_guess(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder, **LARGE), reader) as store:
        reader.hold()
        store.expect(1, {3: 0.75})
        indices = store.begin(0, [0])
        reader.step(2)
        assert store.prefetch(1, [3]) == 1
        assert sizes(reader)[2:] == [[PIECE] * 4]
        store.enter(1)
        store.enter(2)
        reader.resume()
        reader.wait_until_idle()
        assert store.holds(1) == [3]
        store.release(0, indices)


# What is given up for it


def test_an_empty_slot_costs_nothing(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder), reader, 8) as store:
        use(store, 0, *range(7))
        store.expect(1, {3: 0.6, 4: 0.6})
        reader.wait_until_idle()
        assert experts_read(store, reader)[7:] == [(1, 3)]
        assert store.holds(0) == list(range(7))


def test_what_this_batch_used_is_not_given_up_for_a_guess(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder), reader, 8) as store:
        forget_all(store)
        store.enter(0, new_batch=True)
        use(store, 0, *range(6))
        before = len(reader.batches)
        store.expect(1, {3: 0.9, 4: 0.8, 5: 0.7})
        reader.wait_until_idle()
        assert experts_read(store, reader, before) == [(1, 3), (1, 4)]
        assert store.holds(0) == list(range(6))
        store.expect(1, {6: 1.0})
        reader.wait_until_idle()
        assert experts_read(store, reader, before) == [(1, 3), (1, 4), (1, 6)], "for what is known it is"


def test_what_is_likely_to_be_used_is_not_given_up_for_a_guess(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder), reader, 8) as store:
        for _ in range(100):  # each expert is used by every token
            store.enter(0, new_batch=True)
            use(store, 0, *range(8))
        store.enter(0, new_batch=True)
        before = len(reader.batches)
        store.expect(1, {3: 0.99})
        assert len(reader.batches) == before
        forget_all(store)
        forget_all(store)
        store.enter(0, new_batch=True)
        before = len(reader.batches)
        store.expect(1, {3: 0.99})
        reader.wait_until_idle()
        assert experts_read(store, reader, before) == [(1, 3)]


def test_what_is_expected_and_there_is_not_given_up(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder), reader, 8, policy="lru") as store:
        use(store, 2, 5)  # longest ago
        use(store, 0, *range(7))
        store.enter(0, new_batch=True)
        store.expect(2, {5: 0.8})
        use(store, 1, 0)
        assert store.holds(2) == [5] and store.holds(0) == list(range(1, 7))
        store.enter(2)
        use(store, 1, 1)
        assert store.holds(2) == [5], "while its layer computes"
        store.enter(3)
        use(store, 1, 2)
        assert store.holds(2) == []


def test_what_is_hardly_expected_is_not_kept(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder), reader, 8, policy="lru") as store:
        use(store, 2, 5)
        use(store, 0, *range(7))
        store.expect(2, {5: 0.4})
        use(store, 1, 0)
        assert store.holds(2) == []


def test_where_all_are_expected_a_demand_takes_one_yet(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder), reader, 8) as store:
        use(store, 2, *range(8))
        store.expect(2, {expert: 0.8 for expert in range(8)})
        before = len(reader.batches)
        store.expect(3, {1: 0.99})
        assert len(reader.batches) == before
        use(store, 1, 0)
        assert len(store.holds(2)) == 7


def test_what_the_next_batch_wants_is_kept_where_this_one_uses_it(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder), reader, 8, policy="lru") as store:
        store.enter(1)
        store.expect(1, {5: 1.0})  # its layer is computing: it is for the next batch
        reader.wait_until_idle()
        use(store, 1, 5)
        use(store, 0, *range(7))
        use(store, 0, 7)
        assert store.holds(1) == [5] and store.holds(0) == list(range(1, 8))
        store.enter(0, new_batch=True)
        store.enter(1)
        use(store, 1, 5)
        store.enter(2)
        use(store, 2, *range(8))
        assert store.holds(1) == [], "that batch was it"


def test_a_demand_takes_what_the_next_batch_wants_before_what_this_one_does(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder), reader, 8, policy="lru") as store:
        use(store, 2, *range(4))  # longest ago
        use(store, 1, *range(4))
        store.enter(1)
        store.expect(1, dict.fromkeys(range(4), 1.0))
        store.expect(2, dict.fromkeys(range(4), 1.0))
        use(store, 3, 0)
        assert store.holds(2) == [0, 1, 2, 3] and store.holds(1) == [1, 2, 3]


@pytest.mark.parametrize("confidence", [0.9, 1.0], ids=["guessed", "known"])
@pytest.mark.parametrize("policy", ["lru", "lfu", "lrfu"])
def test_a_mistaken_guess_goes_first(policy: str, confidence: float, folder: Path, reader: PythonReader) -> None:
    with pool(make(folder), reader, 8, policy=policy) as store:
        use(store, 0, *range(7))
        store.expect(1, {3: confidence})
        reader.wait_until_idle()
        store.enter(1)
        assert store.holds(1) == [3]
        store.enter(2)
        use(store, 2, 0)
        assert store.holds(1) == [] and store.holds(0) == list(range(7))
        assert outcomes(store) == (1, 0, 0, 1)


def test_a_mistaken_guess_leaves_its_room_to_the_next_in_the_same_batch(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder), reader, 8) as store:
        use(store, 0, *range(7))
        store.expect(1, {3: 0.9})
        reader.wait_until_idle()
        store.enter(2)
        store.expect(3, {4: 0.9, 5: 0.9})
        reader.wait_until_idle()
        assert store.holds(1) == [] and store.holds(3) == [4] and store.holds(0) == list(range(7))


def test_what_a_prompt_asked_for_is_not_given_up_for_a_guess(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder), reader, 8) as store:
        use(store, 0, *range(7))
        assert store.prefetch(1, [2]) == 1
        reader.wait_until_idle()
        before = len(reader.batches)
        store.expect(2, {3: 0.9})
        reader.wait_until_idle()
        assert len(reader.batches) == before and store.holds(1) == [2]


def test_what_is_known_waits_for_room(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder), reader, 8) as store:
        indices = store.acquire(0, list(range(8)))
        before = len(reader.batches)
        store.expect(1, {3: 1.0})
        assert len(reader.batches) == before
        store.release(0, indices)
        reader.wait_until_idle()
        assert experts_read(store, reader, before) == [(1, 3)]


def demand_beside_a_guess(path: Path, room: str) -> str:
    """A layer with slots of its own, as many as a token takes, one of them taken by a guess that is not read on."""
    reader = PythonReader()
    with (
        native.opened(path) as source,
        native.store(source, reader, lib.ms_slots_minimum_bytes(source, ffi.NULL)) as store,
    ):
        assert store.capacity(1) == 2
        store.enter(0, new_batch=True)
        reader.hold()
        store.expect(1, {5: 0.75})
        store.expect(1, {3: 1.0, 4: 1.0})  # there is room for one
        reader.resume()
        reader.wait_until_idle()
        assert store.holds(1) == [3]
        store.enter(1)
        if room == "ALL":
            indices = store.begin(1, [3, 4], room="ALL")
        else:
            held = store.begin(1, [3])
            store.release(1, held)
            index, room_of = -1, store.begin(1, [3])
            while index < 0:
                seen = store.events()
                (index,) = store.begin(1, [4], room="ANY")
                if index < 0:
                    store.wait(seen)
            indices = [*room_of, index]
        for index in indices:
            while store.presence(1, index) == 0:
                store.wait(store.events())
        store.check(1, [3, 4], indices)
        store.release(1, indices)
        store.stop()
        store.settle()
    reader.close()
    return ""


@pytest.mark.parametrize("room", ["ALL", "ANY"])
def test_a_demand_does_not_wait_for_a_guess_that_nobody_reads_on(room: str, folder: Path) -> None:
    path = make(folder, **{**LARGE, "layers": 2}, expert_types={(1, "down"): "F32"})
    assert isolated(demand_beside_a_guess, path, room, timeout_s=20) == ""


# What fails


@pytest.mark.parametrize("confidence", [0.75, 1.0], ids=["guessed", "known"])
@pytest.mark.parametrize("verify", [False, True], ids=["", "verified"])
def test_a_read_ahead_that_fails_does_no_harm_and_is_read_again(
    confidence: float, verify: bool, folder: Path, reader: PythonReader
) -> None:
    reader.fails = lambda at: -errno.EIO
    with pool(make(folder, **LARGE), reader, 6, verify=verify) as store:
        store.expect(1, {3: confidence})
        reader.wait_until_idle()
        assert outcomes(store) == (1, 0, 0, 1) and store.counters().slots_used == 0
        reader.fails = lambda at: 0
        store.enter(1)
        use(store, 1, 3)
        store.release(0, store.acquire(0, list(range(6))))


def test_of_a_guess_that_fails_no_more_is_read(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder, **LARGE), reader) as store:
        m = store.source.layers[1].matrices[0]
        first = m.offset + 3 * m.stride_bytes
        reader.fails = lambda at: -errno.EIO if at == first else 0
        store.expect(1, {3: 0.75})
        reader.wait_until_idle()
        assert sizes(reader) == [[PIECE, PIECE]]
        assert outcomes(store) == (1, 0, 0, 1)
        assert (store.counters().slots_used, store.counters().wasted_bytes) == (0, MIB)
        reader.fails = lambda at: 0
        use(store, 1, 3)


def test_whoever_wants_a_guess_that_fails_is_told(folder: Path, reader: PythonReader) -> None:
    path = make(folder, **LARGE)
    with pool(path, reader) as store:
        m = store.source.layers[1].matrices[2]
        last = m.offset + 3 * m.stride_bytes + PIECE
        reader.fails = lambda at: -errno.EIO if at == last else 0
        reader.hold()
        store.expect(1, {3: 0.75})
        indices = store.begin(1, [3])
        reader.resume()
        reader.wait_until_idle()
        assert store.presence(1, indices[0]) == -errno.EIO
        code, message = store.failure(1, indices[0])
        offset = m.offset + 3 * m.stride_bytes
        name = ffi.string(m.name).decode()
        assert code == -errno.EIO
        assert message == f"{path}: reading expert 3 of {name} at offset {offset} ({MIB} bytes): Input/output error"
        store.release(1, indices)
        assert store.counters().slots_used == 0
        reader.fails = lambda at: 0
        use(store, 1, 3)


@pytest.mark.parametrize("name", ["uring", "pread"])
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_the_last_expert_of_a_file_is_read_in_pieces_to_its_end(name: str, direct: bool, folder: Path) -> None:
    """Its last piece needs less than it asks for, or nothing."""
    path = make(folder, **LARGE, truncate=0)  # experts last, and no padding behind them
    with native.opened(path) as source:
        if direct and not native.direct(source):
            pytest.skip("the file system of the temporary folder refuses direct reads")
        with (
            native.reader(name) as real,
            native.store(source, real, lib.ms_slots_maximum_bytes(source, ffi.NULL)) as store,
        ):
            for layer in range(source.n_layers):
                store.enter(layer, new_batch=layer == 0)
                if layer + 1 < source.n_layers:
                    store.expect(layer + 1, {5: 0.75, 0: 0.75})
                while layer + 1 < source.n_layers and store.holds(layer + 1) != [0, 5]:
                    store.wait(store.events())
                use(store, layer, 5, 0)
            store.stop()
            store.settle()
            assert outcomes(store) == (4, 4, 0, 0)


# Ends


def settled_beside(store: Store, reader: PythonReader, meanwhile: Callable[[], None]) -> None:
    """A thread settles while a read ahead is in flight, and `meanwhile` happens."""
    reader.hold()
    store.expect(1, {3: 1.0})
    thread = threading.Thread(target=store.settle)
    thread.start()
    while True:  # until it waits: what is expected is not read then
        before = len(reader.batches)
        store.expect(2, {5: 1.0})
        if len(reader.batches) == before:
            break
        store.expect(2, {})
    meanwhile()
    reader.resume()
    thread.join()


def test_when_settled_nothing_is_on_its_way_and_reading_ahead_goes_on(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder), reader) as store:
        settled_beside(store, reader, lambda: None)
        assert reader.n_pending == 0
        store.expect(3, {1: 0.75})
        reader.wait_until_idle()
        assert store.holds(3) == [1]


def test_what_is_stopped_while_somebody_settles_stays_stopped(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder), reader) as store:
        settled_beside(store, reader, store.stop)
        before = len(reader.batches)
        store.expect(3, {1: 1.0, 2: 0.75})
        assert len(reader.batches) == before
        use(store, 3, 1)


def test_several_may_settle_at_once(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder), reader) as store:
        for _ in range(20):
            threads = [threading.Thread(target=store.settle) for _ in range(3)]

            def start(threads: list[threading.Thread] = threads) -> None:
                for thread in threads:
                    thread.start()
                threading.Event().wait(0.02)  # they all wait by then, as a rule

            settled_beside(store, reader, start)
            for thread in threads:
                thread.join()
            store.expect(3, {1: 1.0})
            reader.wait_until_idle()
            assert store.holds(3) == [1], "reading ahead goes on"


def test_settling_gives_up_what_waits_for_the_disk(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder, **LARGE), reader) as store:
        reader.hold()
        store.expect(1, {3: 0.75})
        indices = store.begin(0, [0])
        reader.step(2)
        store.settle()
        assert outcomes(store) == (1, 0, 0, 1) and store.counters().slots_used == 1
        reader.resume()
        reader.wait_until_idle()
        store.release(0, indices)


def test_after_stopping_nothing_is_read_ahead_and_demands_are(folder: Path, reader: PythonReader) -> None:
    with pool(make(folder, **LARGE), reader) as store:
        reader.hold()
        store.expect(1, {3: 0.75, 4: 0.75})
        indices = store.begin(0, [0])
        reader.step(2)
        store.stop()
        assert store.counters().slots_used == 1 and outcomes(store)[3] == outcomes(store)[0]
        reader.resume()
        reader.wait_until_idle()
        store.expect(2, {1: 1.0})
        assert experts_read(store, reader, 1) == [(0, 0)]
        store.release(0, indices)
        use(store, 1, 3)


def test_stopping_waits_for_who_hands_reads_to_the_reader(folder: Path, reader: PythonReader) -> None:
    """The reader is closed next."""
    with pool(make(folder), reader) as store:
        entered, leave = threading.Event(), threading.Event()

        def submit(struct: Any, read: Any) -> None:
            entered.set()
            assert leave.wait(10)
            reader._submitted(struct, read)

        slow = ffi.callback("void(struct ms_reader *, struct ms_read *)", submit)
        quick, reader.struct.submit = reader.struct.submit, slow
        expecting = threading.Thread(target=store.expect, args=(1, {3: 1.0}))
        expecting.start()
        assert entered.wait(10)
        stopping = threading.Thread(target=store.stop)
        stopping.start()
        stopping.join(0.2)
        assert stopping.is_alive()
        leave.set()
        stopping.join(10)
        assert not stopping.is_alive()
        expecting.join()
        reader.struct.submit = quick
        reader.wait_until_idle()
        assert store.holds(1) == [3]


# A slower disk


def test_reads_arrive_one_after_the_other_as_from_a_disk_of_that_rate(folder: Path, reader: PythonReader) -> None:
    rate = 20 * MIB
    with pool(make(folder, **LARGE), reader) as store:
        store.pace(rate)
        begun = time.monotonic()
        indices = store.begin(0, [0, 1])
        there: list[float] = []
        for index in indices:  # in the order in which they were read
            while store.presence(0, index) == 0:
                store.wait(store.events())
            there.append(time.monotonic() - begun)
        store.check(0, [0, 1], indices)
        store.release(0, indices)
        assert there[0] >= 3 * MIB / rate and there[1] >= 6 * MIB / rate
        assert store.counters().busy_ns >= 6 * MIB / rate * 1e9
        store.pace(0)
        use(store, 1, 0, 1)
        assert (store.counters().hits, store.counters().misses) == (0, 4)


def test_pieces_of_guesses_come_at_that_rate_too(folder: Path, reader: PythonReader) -> None:
    rate = 30 * MIB
    with pool(make(folder, **LARGE), reader) as store:
        store.pace(rate)
        begun = time.monotonic()
        store.expect(1, {3: 0.75})
        while store.holds(1) != [3]:
            store.wait(store.events())
        assert time.monotonic() - begun >= 3 * MIB / rate
        store.enter(1)
        use(store, 1, 3)
        assert outcomes(store) == (1, 1, 0, 0)


def test_closing_waits_for_no_slow_disk_and_loses_nothing(folder: Path) -> None:
    """In the engine's order: nothing more is asked for, the reader ends, then the slots."""
    reader = PythonReader()
    with native.opened(make(folder, **LARGE)) as source:
        out, name = ffi.new("struct ms_store **"), ffi.new("char[]", b"lru")
        options = {"budget_bytes": lib.ms_slots_maximum_bytes(source, ffi.NULL), "wanted": ffi.NULL, "policy": name}
        native.called(
            lib.ms_slots_open, source, reader.struct, ffi.NULL, ffi.new("struct ms_slots_options *", options)[0], out
        )
        store = Store(source, out[0])
        store.enter(0, new_batch=True)
        store.pace(1000)  # an hour for each
        store.expect(1, {3: 0.75, 4: 0.75})
        store.expect(2, {3: 1.0, 4: 1.0})
        reader.wait_until_idle()
        begun = time.monotonic()
        store.stop()
        reader.close()
        out[0].close(out[0])
        assert time.monotonic() - begun < 10


# Anything in any order


@pytest.mark.parametrize("broken", [0.0, 0.05], ids=["", "reads fail"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", ["small", "large"])
def test_any_use_counts_right_and_loses_no_slot(model: str, seed: int, broken: float, folder: Path) -> None:
    rng, errors = random.Random(seed), random.Random(seed + 100)
    reader = PythonReader(
        shuffle=random.Random(seed + 200), fails=lambda at: -errno.EIO if errors.random() < broken else 0
    )
    path = make(
        folder,
        **(LARGE if model == "large" else {}),
        **({"expert_types": {(1, "down"): "Q8_0"}} if model == "small" else {}),
    )
    wanted = failed = 0
    try:
        with native.opened(path) as source:
            lowest, highest = (f(source, ffi.NULL) for f in (lib.ms_slots_minimum_bytes, lib.ms_slots_maximum_bytes))
            budget = lowest + (highest - lowest) * (seed % 3) // 4
            with native.store(source, reader, budget, policy=("lru", "lfu", "lrfu")[seed % 3]) as store:
                layer, n_layers, n_experts = 0, source.n_layers, source.layers[0].n_experts
                for step in range(150 if model == "small" else 60):
                    layer = (layer + 1) % n_layers if rng.random() < 0.9 else rng.randrange(n_layers)
                    store.enter(layer, new_batch=layer == 0 or step == 0)
                    for _ in range(rng.randrange(4)):
                        ahead = rng.randrange(n_layers)
                        said = rng.sample(range(n_experts), rng.randint(0, n_experts))
                        store.expect(ahead, {expert: rng.choice([0.3, 0.6, 0.9, 1.0]) for expert in said})
                    experts = rng.sample(range(n_experts), rng.randint(1, min(store.capacity(layer), n_experts)))
                    wanted += len(experts)
                    try:
                        indices = store.acquire(layer, experts)
                        store.check(layer, experts, indices)
                        if rng.random() < 0.2:
                            store.cool(layer, indices)
                        store.release(layer, indices)
                    except AssertionError as error:
                        assert "Input/output error" in str(error)
                        failed += 1
                    if rng.random() < 0.2:
                        store.prefetch(rng.randrange(n_layers), rng.sample(range(n_experts), 2))
                    if rng.random() < 0.05:
                        store.settle()
                    c = store.counters()
                    pending = c.guessed - c.useful - c.late - c.wasted
                    assert 0 <= pending <= c.slots_used <= c.slots_total
                    assert c.wasted_bytes <= c.guessed_bytes
                    assert c.hits + c.misses == wanted
                assert c.guessed and c.late + c.useful and c.wasted
                assert bool(failed) == bool(broken)
                store.stop()
                store.settle()
                reader.fails = lambda at: 0
                for layer in range(n_layers):  # as many as there are slots: waits for ever if one is lost
                    full = list(range(min(store.capacity(layer), n_experts)))
                    use(store, layer, *full)
                    use(store, layer, *full[::-1])
                for layer in reversed(range(n_layers)):
                    for expert in range(n_experts):
                        use(store, layer, expert)
                c = store.counters()
                if c.slots_total < n_layers * n_experts // 2:
                    assert c.guessed == c.useful + c.late + c.wasted, "all were used or given up by now"
    finally:
        reader.close()
