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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


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
def test_checking_weights_leaves_them_as_they_are(direct: bool, folder: Path, python_reader: Callable[..., PythonReader]) -> None:
    with native.opened(make(folder)) as source:
        if direct and not native.direct(source):
            pytest.skip("the file system of the temporary folder refuses direct reads")
        reader = python_reader(shuffle=random.Random(4))
        with native.store(source, reader, minimum(source), verify=True) as store:
            use_at_random(store, random.Random(5), 100)


def test_what_is_interleaved_on_arrival_is_what_ggml_interleaves(folder: Path, python_reader: Callable[..., PythonReader]) -> None:
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


def test_a_budget_under_one_tokens_experts_is_refused_with_the_minimum(folder: Path, python_reader: Callable[..., PythonReader]) -> None:
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
            assert counters.misses == counters.hits == counters.slots_used == counters.slots_total == 8 * source.n_layers
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


def test_an_expert_that_is_being_read_is_not_read_twice(folder: Path, python_reader: Callable[..., PythonReader]) -> None:
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
            assert message == (f"{path}: reading expert 5 of {name} at offset {offset} ({m.slice_bytes} bytes): Input/output error")


def test_a_call_that_fails_holds_nothing_and_the_next_works(folder: Path, python_reader: Callable[..., PythonReader]) -> None:
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


def test_errors_in_the_middle_of_any_use_leave_the_pool_whole(folder: Path, python_reader: Callable[..., PythonReader]) -> None:
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


def test_whoever_waits_for_the_same_read_fails_with_it(folder: Path, python_reader: Callable[..., PythonReader]) -> None:
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


def test_a_damaged_expert_is_found_only_when_asked_to(folder: Path, tmp_path: Path, python_reader: Callable[..., PythonReader]) -> None:
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

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(n_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
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
