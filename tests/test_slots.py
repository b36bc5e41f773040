"""The expert pool without a model: what is in a slot, what leaves it, and what happens when a read does not come."""

from __future__ import annotations

import contextlib
import errno
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import native
from factory import make
from isolation import isolated
from native import PythonReader, Store, failure, ffi, lib

MODELS: dict[str, dict[str, Any]] = {
    "one class": {},
    "slots of several sizes": {"expert_types": {"down": "Q8_0", (1, "up"): "Q5_1", (2, "gate"): "F16"}},
    "shuffled in three shards": {"order": "shuffled", "split": 3, "alignment": 64},
    "experts that are whole blocks": {"alignment": 4096, "type": "F32", "ff": 128},
    "whole blocks at odd offsets": {"alignment": 32, "type": "F32", "ff": 128},
    "merged gate and up": {"arch": "qwen3next", "merged_gate_up": True},
}


@pytest.fixture
def python_reader() -> Iterator[Callable[..., PythonReader]]:
    with contextlib.ExitStack() as stack:

        def new(**how: Any) -> PythonReader:
            reader = PythonReader(**how)
            stack.callback(reader.close)
            return reader

        yield new


def minimum(source: Any) -> int:
    return lib.ms_slots_minimum_bytes(source, ffi.NULL)


def maximum(source: Any) -> int:
    return lib.ms_slots_maximum_bytes(source, ffi.NULL)


def slot_bytes(source: Any, layer: int) -> int:
    return lib.ms_slot_bytes(source, ffi.addressof(source.layers[layer]))


class Expected:
    """What a cache of the least recently used experts must do, in Python: one list per size of slot."""

    def __init__(self, store: Store) -> None:
        source = store.source
        self.hits = self.misses = 0
        self._class_of = [slot_bytes(source, layer) for layer in range(source.n_layers)]
        self._room = {self._class_of[layer]: store.capacity(layer) for layer in range(source.n_layers)}
        self._used: dict[int, OrderedDict[tuple[int, int], int]] = {size: OrderedDict() for size in self._room}

    @property
    def slots_used(self) -> int:
        return sum(map(len, self._used.values()))

    def fits(self, layer: int, experts: list[int]) -> bool:
        """Whether these can be pinned beside what is."""
        size = self._class_of[layer]
        pinned = {key for key, pins in self._used[size].items() if pins}
        return len(pinned | {(layer, expert) for expert in experts}) <= self._room[size]

    def acquire(self, layer: int, experts: list[int]) -> None:
        size = self._class_of[layer]
        used = self._used[size]
        keys = [(layer, expert) for expert in experts]
        there = [key for key in keys if key in used]
        for key in there:
            used[key] += 1
            used.move_to_end(key)
        for key in keys:
            if key in there:
                continue
            if len(used) == self._room[size]:
                del used[next(k for k, pins in used.items() if not pins)]
            used[key] = 1
        self.hits += len(there)
        self.misses += len(keys) - len(there)

    def release(self, layer: int, experts: list[int]) -> None:
        for expert in experts:
            self._used[self._class_of[layer]][layer, expert] -= 1


def use_at_random(store: Store, rng: random.Random, steps: int) -> None:
    """Acquires and releases at random, several at a time, and checks every byte held at every step."""
    expected = Expected(store)
    held: list[tuple[int, list[int], list[int]]] = []
    for _ in range(steps):
        layer = rng.randrange(store.source.n_layers)
        n_experts = store.source.layers[layer].n_experts
        experts = rng.sample(range(n_experts), rng.randint(1, min(n_experts, store.capacity(layer), 4)))
        while not expected.fits(layer, experts) or (held and rng.random() < 0.3):
            layer_held, experts_held, indices_held = held.pop(rng.randrange(len(held)))
            store.release(layer_held, indices_held)
            expected.release(layer_held, experts_held)
        indices = store.acquire(layer, experts)
        expected.acquire(layer, experts)
        held.append((layer, experts, indices))
        for acquired in held:
            store.check(*acquired)
    for layer, _, indices in held:
        store.release(layer, indices)
    counters = store.counters()
    assert (counters.hits, counters.misses) == (expected.hits, expected.misses)
    assert counters.slots_used == expected.slots_used <= counters.slots_total
    assert counters.hits and counters.misses, "nothing was tried"


# What is in a slot


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("model", MODELS)
def test_slots_hold_the_files_bytes_whatever_the_order_of_use_and_arrival(
    model: str, direct: bool, folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    reader = python_reader(shuffle=random.Random(1))
    with native.opened(make(folder, **MODELS[model])) as source:
        if direct and not native.direct(source):
            pytest.skip("the file system of the temporary folder refuses direct reads")
        with native.store(source, reader, (minimum(source) + maximum(source)) // 2) as store:
            use_at_random(store, random.Random(2), 150)


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("name", ["uring", "pread"])
def test_the_readers_fill_slots_alike(name: str, direct: bool, folder: Path) -> None:
    with native.opened(make(folder, **MODELS["slots of several sizes"])) as source:
        if direct and not native.direct(source):
            pytest.skip("the file system of the temporary folder refuses direct reads")
        with native.reader(name) as reader, native.store(source, reader, minimum(source)) as store:
            use_at_random(store, random.Random(3), 150)


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_checking_weights_leaves_them_as_they_are(
    direct: bool, folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    with native.opened(make(folder)) as source:
        if direct and not native.direct(source):
            pytest.skip("the file system of the temporary folder refuses direct reads")
        reader = python_reader(shuffle=random.Random(4))
        with native.store(source, reader, minimum(source), verify=True) as store:
            use_at_random(store, random.Random(5), 100)


def test_what_is_interleaved_on_arrival_is_what_ggml_interleaves(
    folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    reader = python_reader(shuffle=random.Random(6))
    with native.opened(make(folder)) as source, native.interleaving(source) as interleaving:
        matrices = source.layers[0].matrices
        if interleaving == ffi.NULL or not lib.ms_interleaving_prototype(interleaving, ffi.addressof(matrices[0])):
            pytest.skip("ggml interleaves no Q4_0 of this shape on this CPU")
        native.direct(source)
        with native.store(source, reader, minimum(source), interleaving=interleaving) as store:
            rng = random.Random(7)
            for _ in range(40):
                layer, experts = rng.randrange(source.n_layers), rng.sample(range(8), 3)
                indices = store.acquire(layer, experts)
                for expert, index in zip(experts, indices, strict=True):
                    for m in range(source.layers[layer].n_matrices):
                        assert store.view(layer, m).prototype != ffi.NULL
                        assert store.held(layer, m, index) == _interleaved(store, interleaving, layer, m, expert)
                store.release(layer, indices)


def _interleaved(store: Store, interleaving: Any, layer: int, m: int, expert: int) -> bytes:
    matrix = ffi.addressof(store.source.layers[layer].matrices[m])
    plain = store.on_disk(layer, m, expert)
    room = ffi.new("uint64_t[]", len(plain) // 8 + 9)  # on a cache line, as slots are
    begin = ffi.cast("char *", (int(ffi.cast("uintptr_t", room)) + 63) // 64 * 64)
    prototype = lib.ms_interleaving_prototype(interleaving, matrix)
    lib.ms_interleave(prototype, matrix, ffi.from_buffer(plain), begin)
    out = bytes(ffi.buffer(begin, len(plain)))
    assert out != plain
    return out


# How many there are


def test_a_budget_under_one_tokens_experts_is_refused_with_the_minimum(
    folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    reader = python_reader()
    with native.opened(make(folder, **MODELS["slots of several sizes"])) as source:

        def open_store() -> None:
            with native.store(source, reader, minimum(source) - 1):
                pass

        code, message = failure(open_store)
        assert code == -errno.ENOSPC
        assert f"the smallest for this model is {minimum(source)} bytes" in message


def test_the_minimum_is_one_tokens_experts(folder: Path, python_reader: Callable[..., PythonReader]) -> None:
    with native.opened(make(folder, **MODELS["slots of several sizes"])) as source:
        sizes = [slot_bytes(source, layer) for layer in range(source.n_layers)]
        assert minimum(source) == source.n_experts_used * sum(sizes)
        with native.store(source, python_reader(), minimum(source)) as store:
            held = [(layer, [3, 6], store.acquire(layer, [3, 6])) for layer in range(source.n_layers)]
            for acquired in held:
                store.check(*acquired)
            for layer, _, indices in held:
                store.release(layer, indices)


@pytest.mark.parametrize("share", [0, 0.25, 0.5, 0.99])
def test_classes_get_their_minimum_and_share_the_rest_within_the_budget(
    share: float, folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    with native.opened(make(folder, **MODELS["slots of several sizes"])) as source:
        budget = int(minimum(source) + share * (maximum(source) - minimum(source)))
        with native.store(source, python_reader(), budget) as store:
            classes: dict[int, list[int]] = {}
            for layer in range(source.n_layers):
                classes.setdefault(slot_bytes(source, layer), []).append(layer)
            assert len(classes) > 1
            spent = 0
            for size, layers in classes.items():
                experts = sum(source.layers[layer].n_experts for layer in layers)
                slots = store.capacity(layers[0])
                assert source.n_experts_used * len(layers) <= slots <= experts
                even = source.n_experts_used * len(layers) + share * (experts - source.n_experts_used * len(layers))
                assert slots > even - 1, "a class got less than its share"
                spent += slots * size
            counters = store.counters()
            assert spent == counters.capacity_bytes <= budget
            assert counters.slot_bytes == max(classes)


def test_a_budget_for_all_holds_all(folder: Path, python_reader: Callable[..., PythonReader]) -> None:
    with native.opened(make(folder, **MODELS["slots of several sizes"])) as source:
        with native.store(source, python_reader(), 2 * maximum(source)) as store:
            for _ in range(2):
                for layer in range(source.n_layers):
                    store.release(layer, store.acquire(layer, list(range(8))))
            counters = store.counters()
            assert (
                counters.misses == counters.hits == counters.slots_used == counters.slots_total == 8 * source.n_layers
            )
            assert counters.capacity_bytes == counters.resident_bytes == maximum(source)


# What is read


def test_all_that_a_layer_lacks_is_asked_for_at_once(folder: Path, python_reader: Callable[..., PythonReader]) -> None:
    reader = python_reader()
    with native.opened(make(folder)) as source, native.store(source, reader, maximum(source)) as store:
        store.release(1, store.acquire(1, [2, 5]))
        store.release(1, store.acquire(1, [5, 0, 7, 2]))
        assert [len(batch) for batch in reader.batches] == [2 * 3, 2 * 3]
        counters = store.counters()
        assert counters.bytes_read == sum(size for batch in reader.batches for _, size in batch)
        assert (counters.hits, counters.misses) == (2, 4)


def test_an_expert_that_is_being_read_is_not_read_twice(
    folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    reader = python_reader()
    with native.opened(make(folder)) as source, native.store(source, reader, maximum(source)) as store:
        reader.hold()
        threads = []
        for experts, pending in (([4], 3), ([1, 4], 6)):
            threads.append(threading.Thread(target=lambda e=experts: store.release(0, _checked(store, 0, e))))
            threads[-1].start()
            reader.wait_for_pending(pending)
        reader.resume()
        for thread in threads:
            thread.join()
        counters = store.counters()
        assert (counters.hits, counters.misses, counters.slots_used) == (1, 2, 2)


def _checked(store: Store, layer: int, experts: list[int]) -> list[int]:
    indices = store.acquire(layer, experts)
    store.check(layer, experts, indices)
    return indices


# What is begun and not waited for


def test_begin_takes_what_there_is_room_for_and_what_is_there_first(
    folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    with native.opened(make(folder)) as source, native.store(source, python_reader(), minimum(source)) as store:
        assert store.capacity(0) == 8
        held = store.acquire(0, [0, 1, 2, 3, 4, 5])
        store.release(1, store.acquire(1, [7]))
        indices = store.begin(1, [3, 4, 5, 7])  # room for two, one of which 7 has
        assert [index >= 0 for index in indices] == [True, False, False, True]
        assert store.begin(1, [3, 4, 5, 7], indices) == indices, "there is no more room"
        counters = store.counters()
        assert (counters.hits, counters.misses) == (1, 8)
        store.release(0, held)
        more = store.begin(1, [3, 4, 5, 7], indices)
        assert [more[0], more[3]] == [indices[0], indices[3]], "what was pinned stays where it is"
        for index in more:
            _wait_for(store, 1, index)
        store.check(1, [3, 4, 5, 7], more)
        store.release(1, more)
        store.release(0, store.acquire(0, list(range(8))))  # waits for ever if something was pinned twice


def _wait_for(store: Store, layer: int, index: int) -> int:
    """The presence of a pinned expert, once it is known."""
    while True:
        seen = store.events()
        if presence := store.presence(layer, index):
            return presence
        store.wait(seen)


def _is_blocked(thread: threading.Thread) -> bool:
    thread.join(0.1)
    return thread.is_alive()


def test_begin_with_all_waits_until_another_makes_room(
    folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    with native.opened(make(folder)) as source, native.store(source, python_reader(), minimum(source)) as store:
        held = store.acquire(0, [0, 1, 2, 3, 4, 5])
        got: list[int] = []
        thread = threading.Thread(target=lambda: got.extend(store.begin(1, [1, 2, 3], room="ALL")))
        thread.start()
        assert _is_blocked(thread) and not got
        assert store.counters().misses == 6, "it holds some while it waits for others"
        store.release(0, held[:1])
        thread.join(10)
        assert len(got) == 3 and min(got) >= 0
        for index in got:
            assert _wait_for(store, 1, index) == 1
        store.check(1, [1, 2, 3], got)
        store.release(1, got)
        store.release(0, held[1:])


def test_presence_is_0_until_all_of_an_expert_is_there(
    folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    with native.opened(make(folder)) as source:
        bad = source.layers[0].matrices[1].offset + 2 * source.layers[0].matrices[1].slice_bytes
        reader = python_reader(fails=lambda at: -errno.EIO if at == bad else 0)
        with native.store(source, reader, maximum(source)) as store:
            reader.hold()
            good, failed = store.begin(0, [6, 2])
            reader.wait_for_pending(6)
            assert [store.presence(0, good), store.presence(0, failed)] == [0, 0]
            reader.resume()
            assert _wait_for(store, 0, good) == 1
            store.check(0, [6], [good])
            assert _wait_for(store, 0, failed) == -errno.EIO
            code, message = store.failure(0, failed)
            assert code == -errno.EIO
            assert message.endswith(
                f"at offset {bad} ({source.layers[0].matrices[1].slice_bytes} bytes): Input/output error"
            )
            assert "reading expert 2 of blk.0.ffn_" in message
            store.release(0, [good, failed])
            assert store.counters().slots_used == 1, "the expert that failed has a slot"
            reader.fails = lambda at: 0
            store.release(0, _checked(store, 0, [2]))


def test_a_wait_ends_with_an_event_and_not_before(folder: Path, python_reader: Callable[..., PythonReader]) -> None:
    reader = python_reader()
    with native.opened(make(folder)) as source, native.store(source, reader, maximum(source)) as store:
        reader.hold()
        seen = store.events()
        indices = store.begin(0, [1])
        thread = threading.Thread(target=store.wait, args=(seen,))
        thread.start()
        assert _is_blocked(thread)
        reader.resume()
        thread.join(10)
        assert not thread.is_alive()
        assert store.events() > seen
        store.wait(seen)  # what happened already is not waited for
        seen = store.events()
        store.release(0, indices)
        store.wait(seen)  # a release is one


def test_what_arrives_is_converted_without_anyone_in_acquire(
    folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    reader = python_reader(shuffle=random.Random(12))
    with native.opened(make(folder)) as source, native.interleaving(source) as interleaving:
        if interleaving == ffi.NULL or not lib.ms_interleaving_prototype(
            interleaving, ffi.addressof(source.layers[0].matrices[0])
        ):
            pytest.skip("ggml interleaves no Q4_0 of this shape on this CPU")
        with native.store(source, reader, maximum(source), interleaving=interleaving, verify=True) as store:
            experts = list(range(8))
            indices = store.begin(0, experts)
            assert [_wait_for(store, 0, index) for index in indices] == [1] * 8
            for expert, index in zip(experts, indices, strict=True):
                for m in range(source.layers[0].n_matrices):
                    assert store.held(0, m, index) == _interleaved(store, interleaving, 0, m, expert)
            store.release(0, indices)
            assert store.counters().convert_ns > 0


def test_begin_of_an_expert_on_its_way_does_not_read_it_again(
    folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    reader = python_reader()
    with native.opened(make(folder)) as source, native.store(source, reader, maximum(source)) as store:
        reader.hold()
        store.prefetch(0, [3])
        (first,) = store.begin(0, [3])
        (second,) = store.begin(0, [3])
        assert first == second
        assert [len(batch) for batch in reader.batches] == [3]
        reader.resume()
        assert _wait_for(store, 0, first) == 1
        store.check(0, [3], [first])
        store.release(0, [first, second])
        counters = store.counters()
        assert (counters.hits, counters.misses) == (1, 1)


# Advice


def test_what_cooled_goes_before_what_was_used_longer_ago(
    folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    with native.opened(make(folder)) as source, native.store(source, python_reader(), minimum(source)) as store:
        indices = store.acquire(0, list(range(8)))
        store.cool(0, indices[5:6])
        store.check(0, range(8), indices)
        store.release(0, indices)
        store.release(1, store.acquire(1, [0]))
        before = store.counters().hits
        store.release(0, store.acquire(0, [0, 1, 2, 3, 4, 6, 7]))
        assert store.counters().hits - before == 7


def test_an_expert_asked_for_ahead_is_a_miss_once_and_then_a_hit(
    folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    reader = python_reader()
    with native.opened(make(folder)) as source, native.store(source, reader, minimum(source)) as store:
        seen = store.events()
        store.prefetch(2, [4, 1])
        store.wait_for_events(seen, 2)
        counters = store.counters()
        assert (counters.hits, counters.misses, counters.slots_used) == (0, 0, 2)
        for hits in range(3):
            store.release(2, _checked(store, 2, [1]))
            counters = store.counters()
            assert (counters.hits, counters.misses) == (hits, 1)
        store.prefetch(2, [1, 4])
        assert [len(batch) for batch in reader.batches] == [6], "what is there was read again"


def test_what_was_asked_for_ahead_is_not_pinned(folder: Path, python_reader: Callable[..., PythonReader]) -> None:
    with native.opened(make(folder)) as source, native.store(source, python_reader(), minimum(source)) as store:
        seen = store.events()
        store.prefetch(0, list(range(8)))
        store.wait_for_events(seen, 8)
        indices = store.acquire(1, list(range(8)))  # waits for ever for a slot that is pinned
        store.check(1, range(8), indices)
        store.release(1, indices)


def _cooled(store: native.Store, layer: int, experts: list[int]) -> None:
    indices = store.acquire(layer, experts)
    store.cool(layer, indices)
    store.release(layer, indices)


def test_reading_ahead_takes_spare_room_only(folder: Path, python_reader: Callable[..., PythonReader]) -> None:
    reader = python_reader()
    with native.opened(make(folder)) as source, native.store(source, reader, minimum(source)) as store:
        store.release(0, store.acquire(0, list(range(7))))  # not in use, but not spare either
        _cooled(store, 1, [6])
        seen, n_batches = store.events(), len(reader.batches)
        assert store.prefetch(1, [2, 3]) == 1, "there was room for one"
        store.wait_for_events(seen, 1)
        assert store.prefetch(1, [2, 3]) == 1, "what is there counts, and is not given up for the other"
        assert len(reader.batches) == n_batches + 1
        before = store.counters()
        store.release(0, _checked(store, 0, list(range(7))))
        assert store.counters().hits - before.hits == 7


def test_reading_ahead_does_not_give_up_what_it_was_asked_for(
    folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    with native.opened(make(folder)) as source, native.store(source, python_reader(), minimum(source)) as store:
        _cooled(store, 1, [6])
        store.release(0, store.acquire(0, list(range(7))))
        assert store.prefetch(1, [2, 6]) == 0
        before = store.counters()
        store.release(1, _checked(store, 1, [6]))
        assert store.counters().hits - before.hits == 1


def test_who_holds_experts_takes_spare_room_for_more(folder: Path, python_reader: Callable[..., PythonReader]) -> None:
    with native.opened(make(folder)) as source, native.store(source, python_reader(), minimum(source)) as store:
        _cooled(store, 1, [6])
        store.release(0, store.acquire(0, list(range(7))))
        held = store.begin(2, [0, 1, 2], room="SPARE")
        assert [index >= 0 for index in held] == [True, False, False]
        held = store.begin(2, [0, 1, 2], held)
        assert [_wait_for(store, 2, index) for index in held] == [1, 1, 1]
        store.check(2, range(3), held)
        store.release(2, held)


def test_when_settled_no_read_is_on_its_way_that_nobody_holds(
    folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    reader = python_reader(fails=lambda at: -errno.EIO)
    with native.opened(make(folder)) as source, native.store(source, reader, minimum(source)) as store:
        store.prefetch(0, [1, 2])
        store.settle()
        assert store.counters().slots_used == 0, "what failed is gone, and not the answer to who asks next"
        reader.fails = lambda at: 0
        store.release(0, _checked(store, 0, [1, 2]))


def test_a_read_ahead_that_fails_leaves_no_trace(folder: Path, python_reader: Callable[..., PythonReader]) -> None:
    reader = python_reader(fails=lambda at: -errno.EIO)
    with native.opened(make(folder)) as source, native.store(source, reader, minimum(source)) as store:
        seen = store.events()
        store.prefetch(3, [5])
        store.wait_for_events(seen, 1)
        assert store.counters().slots_used == 0
        reader.fails = lambda at: 0
        store.release(3, _checked(store, 3, [5]))
        assert [len(batch) for batch in reader.batches] == [3, 3]
        store.release(0, store.acquire(0, list(range(8))))


@pytest.mark.parametrize("share", [0, 0.3, 1])
@pytest.mark.parametrize("model", ["one class", "slots of several sizes"])
def test_fair_shares_are_a_tokens_experts_at_least_and_fit_together(
    model: str, share: float, folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    with native.opened(make(folder, **MODELS[model])) as source:
        budget = int(minimum(source) + share * (maximum(source) - minimum(source)))
        with native.store(source, python_reader(), budget) as store:
            classes: dict[int, list[int]] = {}
            for layer in range(source.n_layers):
                classes.setdefault(slot_bytes(source, layer), []).append(layer)
            for layers in classes.values():
                shares = [store.fair_share(layer) for layer in layers]
                assert min(shares) >= source.n_experts_used
                assert len(set(shares)) == 1, "layers of as many experts"
                assert store.capacity(layers[0]) - len(layers) < sum(shares) <= store.capacity(layers[0])


# What fails


@pytest.mark.parametrize("verify", [False, True], ids=["", "verified"])
@pytest.mark.parametrize("matrix", [0, 1, 2])
def test_a_read_that_fails_names_file_tensor_expert_and_offset(
    matrix: int, verify: bool, folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    path = make(folder)
    with native.opened(path) as source:
        m = source.layers[2].matrices[matrix]
        offset = m.offset + 5 * m.slice_bytes
        reader = python_reader(fails=lambda at: -errno.EIO if at == offset else 0)
        with native.store(source, reader, maximum(source), verify=verify) as store:
            code, message = failure(store.acquire, 2, [1, 5])
            assert code == -errno.EIO
            name = ffi.string(m.name).decode()
            assert message == (
                f"{path}: reading expert 5 of {name} at offset {offset} ({m.slice_bytes} bytes): Input/output error"
            )


def test_a_call_that_fails_holds_nothing_and_the_next_works(
    folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    broken = True
    with native.opened(make(folder)) as source:
        m = source.layers[0].matrices[1]
        bad = m.offset + 3 * m.slice_bytes
        reader = python_reader(fails=lambda at: -errno.EIO if broken and at == bad else 0, shuffle=random.Random(8))
        with native.store(source, reader, minimum(source)) as store:
            full = store.capacity(0)
            for _ in range(3):
                assert failure(store.acquire, 0, [3, *range(4, 8)])[0] == -errno.EIO
                assert store.counters().slots_used == 4, "the expert that failed has a slot"
            indices = store.acquire(1, list(range(full)))  # a pin left behind would make this wait forever
            store.check(1, range(full), indices)
            store.release(1, indices)
            broken = False
            store.release(0, _checked(store, 0, [3, 5]))


def test_errors_in_the_middle_of_any_use_leave_the_pool_whole(
    folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    rng, order = random.Random(9), random.Random(10)
    reader = python_reader(fails=lambda at: -errno.EIO if rng.random() < 0.05 else 0, shuffle=order)
    failed = 0
    with native.opened(make(folder, **MODELS["slots of several sizes"])) as source:
        native.direct(source)
        with native.store(source, reader, minimum(source)) as store:
            for _ in range(300):
                layer = order.randrange(source.n_layers)
                experts = order.sample(range(8), order.randint(1, min(store.capacity(layer), 8)))
                try:
                    indices = store.acquire(layer, experts)
                except AssertionError as error:
                    assert "Input/output error" in str(error)
                    failed += 1
                    continue
                store.check(layer, experts, indices)
                store.release(layer, indices)
            assert store.counters().slots_used <= store.counters().slots_total
    assert 0 < failed < 300


def test_whoever_waits_for_the_same_read_fails_with_it(
    folder: Path, python_reader: Callable[..., PythonReader]
) -> None:
    with native.opened(make(folder)) as source:
        m = source.layers[0].matrices[0]
        reader = python_reader(fails=lambda at: -errno.EIO if at == m.offset else 0)
        with native.store(source, reader, maximum(source)) as store:
            reader.hold()
            codes: list[int] = []
            threads = []
            for experts, pending in (([0], 3), ([0, 1], 6)):
                threads.append(threading.Thread(target=lambda e=experts: codes.append(failure(store.acquire, 0, e)[0])))
                threads[-1].start()
                reader.wait_for_pending(pending)
            reader.resume()
            for thread in threads:
                thread.join()
            assert codes == [-errno.EIO, -errno.EIO]
            assert store.counters().slots_used == 1


def test_a_damaged_expert_is_found_only_when_asked_to(
    folder: Path, tmp_path: Path, python_reader: Callable[..., PythonReader]
) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(make(folder).read_bytes())
    with native.opened(path) as source:
        m = source.layers[1].matrices[2]
        offset = m.offset + 6 * m.slice_bytes
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(b"\x00\x7c")  # the first block's scale: infinite
        with native.store(source, python_reader(), maximum(source)) as store:
            store.release(1, _checked(store, 1, [6]))
        with native.store(source, python_reader(), maximum(source), verify=True) as store:
            code, message = failure(store.acquire, 1, [6])
            assert code == -errno.EBADMSG
            name = ffi.string(m.name).decode()
            assert message.startswith(f"{path}: expert 6 of {name} at offset {offset} ({m.slice_bytes} bytes) holds no")
            store.release(1, _checked(store, 1, [5]))


# Several threads


def _in_threads(n_threads: int, work: Callable[[int], None]) -> None:
    """Runs `work` in so many threads at once, each with a number of its own, and waits for all."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def hammer(path: Path, n_threads: int, interleaved: bool) -> str:
    """Threads that want more of a pool than it has, all at once; an empty string if all of them got it."""
    wrong: list[str] = []
    reader = PythonReader(shuffle=random.Random(11))
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(native.opened(path))
        how = stack.enter_context(native.interleaving(source)) if interleaved else ffi.NULL
        store = stack.enter_context(native.store(source, reader, minimum(source), interleaving=how))

        def work(seed: int) -> None:
            rng = random.Random(seed)
            try:
                for _ in range(150):
                    layer = rng.randrange(source.n_layers)
                    experts = rng.sample(range(8), rng.randint(1, store.capacity(layer)))
                    indices = store.acquire(layer, experts)
                    if not interleaved:
                        store.check(layer, experts, indices)
                    store.release(layer, indices)
            except BaseException as error:
                wrong.append(repr(error))

        _in_threads(n_threads, work)
        counters = store.counters()
        if counters.slots_used > counters.slots_total:
            wrong.append(f"{counters.slots_used} of {counters.slots_total} slots used")
        reader.close()
    return "\n".join(wrong)


@pytest.mark.parametrize("interleaved", [False, True], ids=["plain", "interleaved"])
@pytest.mark.parametrize("n_threads", [2, 4])
def test_threads_that_want_more_than_there_is_take_turns(n_threads: int, interleaved: bool, folder: Path) -> None:
    path = make(folder, topk=1, layers=2)
    assert isolated(hammer, path, n_threads, interleaved, timeout_s=30) == ""


def hammer_piecemeal(path: Path, n_threads: int, interleaved: bool) -> str:
    """Threads that compute as blocks do: begin some, use what is there, cool, release, ask ahead; reads fail now and then."""
    wrong: list[str] = []
    errors = random.Random(13)
    reader = PythonReader(shuffle=random.Random(14), fails=lambda at: -errno.EIO if errors.random() < 0.02 else 0)
    failed = 0
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(native.opened(path))
        how = stack.enter_context(native.interleaving(source)) if interleaved else ffi.NULL
        store = stack.enter_context(native.store(source, reader, minimum(source), interleaving=how))

        def use(layer: int, expert: int, index: int) -> int:
            presence = store.presence(layer, index)
            if presence > 0 and not interleaved:
                store.check(layer, [expert], [index])
            if presence:
                store.cool(layer, [index])
                store.release(layer, [index])
            return presence

        def work(seed: int) -> None:
            nonlocal failed
            rng = random.Random(seed)
            try:
                for _ in range(40):
                    layer = rng.randrange(source.n_layers)
                    experts = rng.sample(range(8), rng.randint(1, 8))
                    indices, left = [-1] * len(experts), set(range(len(experts)))
                    if rng.random() < 0.3 and len(experts) <= store.capacity(layer):
                        indices = store.begin(layer, experts, room="ALL")
                    while left:
                        seen = store.events()
                        for i in sorted(left):
                            if indices[i] >= 0 and (presence := use(layer, experts[i], indices[i])):
                                left.remove(i)
                                failed += presence < 0
                        rest = sorted(i for i in left if indices[i] < 0)
                        begun = store.begin(layer, [experts[i] for i in rest]) if rest else []
                        for i, index in zip(rest, begun, strict=True):
                            indices[i] = index
                        if left and all(index < 0 for index in begun):
                            store.wait(seen)
                    store.prefetch(rng.randrange(source.n_layers), rng.sample(range(8), 2))
            except BaseException as error:
                wrong.append(repr(error))

        _in_threads(n_threads, work)
        reader.fails = lambda at: 0
        for layer in range(source.n_layers):  # waits for ever for a pin that was left behind
            store.release(layer, store.acquire(layer, list(range(store.capacity(layer)))[:8]))
        if not failed:
            wrong.append("no read failed")
        reader.close()
    return "\n".join(wrong)


@pytest.mark.parametrize("interleaved", [False, True], ids=["plain", "interleaved"])
def test_threads_that_compute_piece_by_piece_take_turns(interleaved: bool, folder: Path) -> None:
    path = make(folder, topk=1, layers=2)
    assert isolated(hammer_piecemeal, path, 4, interleaved, timeout_s=30) == ""
