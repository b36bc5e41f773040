"""The number of decode threads where the user gives none: the fastest, and fewer while others want the cores."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from command import moestream_command
from factory import make
from logits import CONTEXT, DECODED, PROMPT
from moestream import ExpertStreaming, Llama, MoestreamError, _threads
from moestream._threads import LONGEST_PAUSE_S, LOOK_S, DecodeThreads, Memory, core_wait_s

ALONE = {1: 0.020, 2: 0.012}  # seconds a token with so many threads, as on the machine where this was measured
SHARED = {1: 0.020, 2: 0.030}  # the same while another program wants one of the two cores


class Machine:
    """Two cores with a clock of its own, on which tokens take the times above."""

    def __init__(self, *, alone: dict[int, float] = ALONE, n: int = 2, **options: object) -> None:
        self.now = self.waited = self.from_disk = 0.0
        self.times, self.alone = alone, alone
        self.disk_s: Callable[[], float] = lambda: 0.0
        self.sets: list[int] = []
        self.remembered: list[int] = []
        self.looks = 0
        defaults = dict(known=True, candidates=(1, 2), remember=self.remembered.append)
        self.threads = DecodeThreads(
            n,
            set_threads=self.sets.append,
            core_wait_s=self.core_wait_s,
            expert_wait_s=lambda: self.from_disk,
            clock=lambda: self.now,
            **{**defaults, **options},
        )

    def core_wait_s(self) -> float:
        self.looks += 1
        return self.waited

    def decode(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            with self.threads.token():
                took, read = self.times[self.sets[-1]], self.disk_s()
                self.now += took + read
                self.from_disk += read
                if self.times is not self.alone and self.sets[-1] == 2:
                    self.waited += took


def test_on_a_quiet_machine_the_number_never_changes() -> None:
    machine = Machine()
    machine.decode(600)
    assert machine.sets == [2]


def test_a_quiet_machine_is_looked_at_seldom() -> None:
    machine = Machine()
    machine.decode(60)
    assert machine.looks <= 2 * 60 / LOOK_S + 2


def test_waiting_for_the_disk_is_no_reason_to_change() -> None:
    machine = Machine()
    reads = np.random.default_rng(1).exponential(0.05, 100_000)
    machine.disk_s = iter(reads).__next__
    machine.decode(120)
    assert machine.sets == [2]


def test_a_competitor_leaves_fewer_threads_within_a_second_or_two() -> None:
    machine = Machine()
    machine.decode(5)
    machine.times = SHARED
    machine.decode(2)
    assert machine.threads.n == machine.sets[-1] == 1
    assert (
        machine.threads.note
        == "threads: 1, because other work takes the cores; otherwise 2, the fastest when it was measured here before"
    )


def test_the_wait_for_the_disk_does_not_hide_what_is_faster() -> None:
    machine = Machine()
    reads = np.random.default_rng(1).exponential(0.2, 100_000)
    machine.disk_s = iter(reads).__next__
    machine.times = SHARED
    machine.decode(15)
    assert machine.threads.n == 1


def test_threads_that_stand_still_are_fewer_after_a_few_tokens() -> None:
    """With OpenMP's threads spinning, two on a shared core take seconds a token."""
    machine = Machine()
    machine.decode(5)
    machine.times = {1: 0.020, 2: 1.5}
    machine.decode(10)
    assert machine.threads.n == 1


def test_all_threads_are_back_when_the_competitor_is_gone() -> None:
    machine = Machine()
    machine.times = SHARED
    machine.decode(60)
    assert machine.threads.n == 1
    machine.times = ALONE
    machine.decode(LONGEST_PAUSE_S + 1)
    assert machine.threads.n == 2
    changes = len(machine.sets)
    machine.decode(60)
    assert len(machine.sets) == changes


def test_trials_get_seldom_and_cost_little_while_the_competitor_stays() -> None:
    machine = Machine()
    machine.times = SHARED
    machine.decode(60)
    before = len(machine.sets)
    machine.decode(160)
    assert 2 <= len(machine.sets) - before <= 2 * 160 / LONGEST_PAUSE_S + 2


def test_threads_that_wait_for_a_core_but_are_faster_than_fewer_stay() -> None:
    machine = Machine()
    machine.times = dict(ALONE)  # another program of low priority, say
    machine.decode(60)
    assert machine.threads.n == 2
    assert 1 in machine.sets


def test_the_fastest_is_measured_and_remembered_once() -> None:
    machine = Machine(known=False, alone={1: 0.02, 2: 0.012, 4: 0.009, 8: 0.011}, candidates=(1, 4, 8), n=4)
    machine.decode(5)
    assert machine.remembered == [4]
    assert (
        machine.threads.note == "threads: 4, the fastest here (tokens a second: 50.0 with 1, 111.1 with 4, 90.9 with 8)"
    )
    changes = len(machine.sets)
    machine.decode(60)
    assert len(machine.sets) == changes


def test_one_thread_is_the_fastest_where_it_is() -> None:
    machine = Machine(known=False, alone={1: 0.010, 2: 0.012})
    machine.decode(60)
    assert machine.threads.n == 1 and machine.remembered == [1]


def test_nothing_is_measured_nor_remembered_on_a_busy_machine() -> None:
    machine = Machine(known=False)
    machine.times = SHARED
    machine.decode(60)
    assert machine.remembered == [] and machine.threads.n == 1
    assert machine.threads.note.endswith("otherwise 2, the physical cores, not measured yet")
    machine.times = ALONE
    machine.decode(60)
    assert machine.remembered == [2] and machine.threads.n == 2


def test_a_measurement_that_a_competitor_disturbed_is_made_again() -> None:
    machine = Machine(known=False)
    machine.decode(LOOK_S + 0.2)
    machine.times = SHARED
    machine.decode(0.2)
    machine.times = ALONE
    assert machine.remembered == []
    machine.decode(60)
    assert machine.remembered == [2] and machine.threads.n == 2


def test_a_token_that_failed_is_not_counted() -> None:
    machine = Machine()
    with pytest.raises(RuntimeError, match="no token"), machine.threads.token():
        raise RuntimeError("no token")
    machine.times = SHARED
    machine.decode(5)
    assert machine.threads.n == 1


def test_a_folder_that_cannot_be_written_is_told_in_the_note() -> None:
    def refuse(n: int) -> None:
        raise PermissionError(13, "Permission denied", "/cache/threads.json.part")

    machine = Machine(known=False, remember=refuse)
    machine.decode(5)
    assert machine.threads.n == 2
    assert machine.threads.note.endswith("; not remembered: cannot write /cache/threads.json.part: Permission denied")


# ---------------------------------------------------------------- what is remembered


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "moestream" / "threads.json"


def model_file(folder: Path, *, name: str = "m.gguf", bytes: int = 100) -> Path:
    path = folder / name
    path.write_bytes(b"x" * bytes)
    return path


def test_what_is_remembered_is_recalled_for_that_model_alone(cache: Path, tmp_path: Path) -> None:
    model, other = model_file(tmp_path), model_file(tmp_path, name="other.gguf")
    assert Memory(model).recall() is None
    Memory(model).remember(1)
    Memory(other).remember(_threads.usable_cores())
    assert Memory(model).recall() == 1
    assert Memory(other).recall() == _threads.usable_cores()
    assert Memory(model_file(tmp_path, bytes=101)).recall() is None
    assert [path.name for path in cache.parent.iterdir()] == ["threads.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\xff", "3"])
def test_a_damaged_file_is_as_none_and_is_written_anew(text: str, cache: Path, tmp_path: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(text.encode("latin-1"))
    memory = Memory(model_file(tmp_path))
    assert memory.recall() is None
    memory.remember(1)
    assert memory.recall() == 1


@pytest.mark.parametrize("number", [0, -1, 1_000_000, "2", 1.5, None, True, [2]])
def test_a_number_that_cannot_be_is_not_taken(number: object, cache: Path, tmp_path: Path) -> None:
    memory = Memory(model_file(tmp_path))
    memory.remember(1)
    (key,) = json.loads(cache.read_text())
    cache.write_text(json.dumps({key: number}))
    assert memory.recall() is None


# ---------------------------------------------------------------- in Llama

# No flash attention: it divides the context among the threads, and its sums are others for each number.
OPTIONS = {name: value for name, value in CONTEXT.items() if name != "n_threads"}


@pytest.fixture
def model(tmp_path: Path, cache: Path) -> Path:
    return make(tmp_path)


@contextlib.contextmanager
def streamed(path: Path, **options: object):
    streaming = ExpertStreaming(kernels="plain", reader="pread")
    with contextlib.closing(Llama(str(path), expert_streaming=streaming, **{**OPTIONS, **options})) as llm:
        yield llm


def told(llm: Llama) -> list[str]:
    return [note for note in llm.expert_stats().notes if note.startswith("threads: ")]


def test_the_note_says_which_number_and_why(model: Path) -> None:
    with streamed(model) as llm:
        assert told(llm) == [f"threads: {llm.decode_threads}, the physical cores, not measured yet"]
        assert llm.decode_threads == _threads.default_threads()


def test_a_remembered_number_is_taken(model: Path) -> None:
    Memory(model).remember(1)
    with streamed(model) as llm:
        assert llm.decode_threads == 1
        assert told(llm) == ["threads: 1, the fastest when it was measured here before"]


def test_the_number_given_is_left_alone(model: Path) -> None:
    Memory(model).remember(1)
    with streamed(model, n_threads=3) as llm:
        assert llm.decode_threads == 3 and told(llm) == []
    with streamed(model) as llm:
        llm._ctx.set_n_threads(1, 1)
        assert told(llm) == []


def test_with_flash_attention_the_number_does_not_change_under_way(model: Path) -> None:
    Memory(model).remember(1)
    with streamed(model, flash_attn=True) as llm:
        assert llm.decode_threads == _threads.default_threads() and told(llm) == []


def test_a_closed_model_has_no_threads(model: Path) -> None:
    with streamed(model) as llm:
        pass
    with pytest.raises(MoestreamError, match="the model is closed"):
        _ = llm.decode_threads


def test_an_unpickled_model_chooses_for_itself_too(model: Path) -> None:
    with streamed(model) as llm:
        data = pickle.dumps(llm)
    Memory(model).remember(1)
    with contextlib.closing(pickle.loads(data)) as copy:
        assert copy.decode_threads == 1


def test_logits_are_the_same_bits_while_the_number_changes(model: Path) -> None:
    def logits(numbers: list[int]) -> np.ndarray:
        with streamed(model) as llm:
            llm.eval(PROMPT)
            for number, token in zip(numbers, DECODED, strict=True):
                llm._ctx.set_n_threads(number, 1)
                llm.eval([token])
            return llm.scores[: llm.n_tokens].copy()

    assert np.array_equal(logits([1] * len(DECODED)), logits([2, 1, 3, 2, 4, 1]))


def test_tokens_are_handed_to_the_choice_one_by_one_and_prompts_are_not(model: Path) -> None:
    with streamed(model) as llm:
        times: list[float] = []
        llm._ctx.threads._course = type("Course", (), {"send": lambda self, seconds: times.append(seconds)})()
        llm.eval(PROMPT)
        assert times == []
        for token in DECODED:
            llm.eval([token])
        assert len(times) == len(DECODED) and statistics.median(times) > 0


def test_generate_says_which_number_was_taken_and_why(model: Path) -> None:
    Memory(model).remember(1)
    arguments = ("generate", "-m", model, "-p", "x", "-n", 3, "-c", 64, "--ignore-eos")
    run = moestream_command(*arguments)
    assert run.returncode == 0, run.stderr
    assert " kernels, 1 thread\n" in run.stderr
    assert "threads: 1, the fastest when it was measured here before\n" in run.stderr
    assert "threads: " not in moestream_command(*arguments, "-t", 1).stderr


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this system does not count what threads wait for a core"
)
def test_the_wait_for_a_core_is_counted() -> None:
    before = core_wait_s()
    core = min(os.sched_getaffinity(0))
    busy = f"import os, time\nos.sched_setaffinity(0, [{core}])\nend = time.time() + 0.6\nwhile time.time() < end: pass"
    allowed = os.sched_getaffinity(0)
    with subprocess.Popen([sys.executable, "-c", busy]):
        os.sched_setaffinity(0, {core})
        try:
            end = time.perf_counter() + 0.5
            while time.perf_counter() < end:
                pass
        finally:
            os.sched_setaffinity(0, allowed)
    assert core_wait_s() - before > 0.02
