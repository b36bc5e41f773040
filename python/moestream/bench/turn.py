"""One turn of one arm: its process under its limits, from a cold start to the last token of its tests."""

from __future__ import annotations

import contextlib
import json
import math
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import MeasurementError
from ..model import ModelDescription
from .arms import BenchArm
from .cgroup import LimitedGroup, SystemdScope, limited
from .disk import BlockDevice, block_device_of, drop_caches, loop_device
from .machine import Watch
from .record import short_size
from .session import ArmEndedError, ArmRefusedError, ArmSilentError, Feed, Session

__all__ = ["Configuration", "Limits", "ReadShape", "Test", "TestRun", "Tokens", "Turn", "take_turn"]

READ_AT_MOST = 8  # reads that are asked of the disk together, when its bandwidth is measured
READ_S = 0.7
SETTLES_AT_MOST_S = 45.0
LOADS_AT_MOST_S = 900.0
_DRAWN_ROUNDS = 64  # random tokens, before they come again
UNUSUAL_READ_AHEAD_KIB = 256  # Linux has 128


@dataclass(frozen=True)
class Test:
    """What is timed: a prompt of `n_prompt` tokens, then `n_gen` tokens one by one, behind `n_depth` tokens that are not timed."""

    __test__ = False  # pytest would take it for a test

    n_prompt: int
    n_gen: int
    n_depth: int

    @property
    def tokens(self) -> int:
        return self.n_prompt + self.n_gen + self.n_depth


@dataclass(frozen=True)
class Limits:
    """What every arm is held to: bytes of memory, page cache included, and bytes a second of reads; None is no limit."""

    memory: int | None = None
    disk_bps: int | None = None


@dataclass(frozen=True)
class Configuration:
    """What is loaded and run in one process."""

    arm: BenchArm
    model: Path
    limits: Limits
    threads: int
    n_batch: int
    n_ubatch: int
    n_ctx: int

    @property
    def path(self) -> Path:
        return self.arm.model or self.model


@dataclass(frozen=True)
class ReadShape:
    """How the engine reads an expert of a model: bytes at once, and how many a layer may ask for."""

    size: int
    depth: int

    @classmethod
    def of(cls, model: ModelDescription) -> ReadShape:
        layer = model.moe_layers[0]
        size = layer.record_bytes or max(matrix.slice_bytes for matrix in layer.matrices)
        reads = 1 if layer.record_bytes else len(layer.matrices)
        return cls(size, min(READ_AT_MOST, model.experts_used * reads))

    def __str__(self) -> str:
        return f"{short_size(self.size)} x {self.depth}"


@dataclass(frozen=True)
class TestRun:
    """A test of one turn. `token_s` are those of the tokens written; `done` says how many tokens counted in `seconds`."""

    __test__ = False

    seconds: float
    done: int
    token_s: list[float]
    feeds: list[Feed]
    energy_j: float | None
    temperature_c: float | None
    busy: tuple[str, ...]
    in_time: bool

    def total(self, name: str) -> float:
        """A counter of the experts, over the feeds."""
        return sum(feed.experts[name] for feed in self.feeds)


@dataclass
class Turn:
    """What one turn gave; what its arm did not come to is missing.

    Attributes:
        outcome: "ok", "oom-killed", "refused" or "failed", with a sentence in `message`.
        warm: Of the tokens before the tests.
    """

    configuration: Configuration
    round: int
    position: int
    begun: str = ""
    outcome: str = "ok"
    message: str = ""
    stage: str = "loading"
    load_s: float | None = None
    first_token_s: float | None = None
    model: dict[str, Any] = field(default_factory=dict)
    warm: Feed | None = None
    runs: dict[Test, TestRun] = field(default_factory=dict)
    peak_rss: int = 0
    cgroup_peak: int | None = None
    oom_kills: int = 0
    limited_by: str = ""
    disk_bps: list[float] = field(default_factory=list)
    reads_direct: bool = True
    read_ahead_kib: int | None = None
    warnings: list[str] = field(default_factory=list)


class Tokens:
    """The tokens that all arms of a round are given: stretches of one text, one after the other; the same for every arm.

    Args:
        text: What is given; "" draws tokens at random.
        per_round: How many tokens a round needs, so that each has its own.
    """

    def __init__(self, text: str, *, per_round: int) -> None:
        self.text = text
        self.repeated = 0
        self._per_round = per_round
        self._all: list[int] = []

    def of_round(self, number: int, session: Session, vocabulary: int) -> Callable[[int], list[int]]:
        """Gives the next n tokens of a round, each time it is called."""
        if not self._all:
            self._all = session.tokenize(self.text) if self.text else self._drawn(vocabulary)
        at = number * self._per_round

        def following(n: int) -> list[int]:
            nonlocal at
            found = [self._all[(at + i) % len(self._all)] for i in range(n)]
            at += n
            self.repeated = max(self.repeated, at - len(self._all))
            return found

        return following

    def _drawn(self, vocabulary: int) -> list[int]:
        draw = random.Random(0)
        return [draw.randrange(vocabulary) for _ in range(self._per_round * _DRAWN_ROUNDS)]


def take_turn(
    configuration: Configuration,
    description: ModelDescription,
    tests: Sequence[Test],
    tokens: Tokens,
    *,
    number: int,
    position: int,
    warm_tokens: int,
    test_seconds: float,
    progress: Callable[[str], None],
) -> Turn:
    """Runs the arm once, alone, from a cold start.

    An arm that is killed for memory, refuses or fails is a result; what cannot be measured at all is not.

    Raises:
        MeasurementError: The limits cannot be set, or pages of the model stay in memory.
    """
    turn = Turn(configuration, number, position, begun=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    with ExitStack() as stack:
        arm = configuration.arm.arm(
            configuration.model,
            architecture=description.architecture,
            threads=configuration.threads,
            n_batch=configuration.n_batch,
            n_ubatch=configuration.n_ubatch,
            n_ctx=configuration.n_ctx,
        )
        devices = _devices(configuration)
        if configuration.arm.mapped:
            loop = stack.enter_context(_usual_read_ahead(configuration, description, turn))
            if loop is not None:
                arm = replace(arm, model=loop)
                devices += [block_device_of_loop(loop)]
        group = _group(configuration.limits, devices, turn)
        if group is not None:
            stack.enter_context(group)
            turn.limited_by = "" if configuration.limits == Limits() else group.kind
        turn.disk_bps.append(_read_rate(turn, description, devices))
        # After it, for where there are no direct reads it leaves pages, of which the arm would have the use for nothing.
        for file in description.files:
            drop_caches(file.path)
        try:
            with Session(arm, group=group, load_timeout_s=LOADS_AT_MOST_S) as session:
                _measure(turn, session, tests, tokens, group, warm_tokens, test_seconds, progress)
        except ArmRefusedError as error:
            turn.outcome, turn.message = "refused", str(error)
        except ArmSilentError as error:
            turn.outcome, turn.message = "failed", f"while {_doing(turn.stage)}: {error}"
        except ArmEndedError as error:
            _ended(turn, group, error)
        if turn.outcome == "ok":
            turn.disk_bps.append(_read_rate(turn, description, devices))
    return turn


def _measure(
    turn: Turn,
    session: Session,
    tests: Sequence[Test],
    tokens: Tokens,
    group: LimitedGroup | SystemdScope | None,
    warm_tokens: int,
    test_seconds: float,
    progress: Callable[[str], None],
) -> None:
    turn.load_s, turn.model = session.load_s, session.model
    following = tokens.of_round(turn.round, session, session.model["vocabulary"])
    turn.stage = "its first token"
    first = session.feed(
        following(1), checked=False, read_rate=turn.configuration.arm.disk or None, timeout_s=LOADS_AT_MOST_S
    )
    turn.first_token_s = first.token_s[0]
    try:
        if warm_tokens:
            turn.stage = "warming up"
            progress("warming up")
            turn.warm = session.feed(
                following(warm_tokens), checked=False, seconds=test_seconds / 2, timeout_s=LOADS_AT_MOST_S
            )
            session.settle(at_most_s=SETTLES_AT_MOST_S)
        for test in tests:
            turn.stage = "measuring"
            turn.runs[test] = _run(session, test, following, test_seconds, progress)
            turn.peak_rss = max(feed.peak_rss_bytes for feed in turn.runs[test].feeds)
    finally:
        _read_usage(turn, group)


def _run(
    session: Session,
    test: Test,
    following: Callable[[int], list[int]],
    test_seconds: float,
    progress: Callable[[str], None],
) -> TestRun:
    feeds, done = [], 0
    token_s: list[float] = []
    waits_s = LOADS_AT_MOST_S + test_seconds
    if test.n_depth:
        progress(f"reading {test.n_depth} tokens of context")
        session.feed(following(test.n_depth), at_once=True, checked=False, timeout_s=waits_s)
        session.settle(at_most_s=SETTLES_AT_MOST_S)
    with Watch(pids=[session.pid]) as watch:
        if test.n_prompt:
            progress(f"a prompt of {test.n_prompt} tokens")
            prompt = following(test.n_prompt)
            feeds.append(
                session.feed(prompt, at_once=True, after_last=bool(test.n_depth), checked=False, timeout_s=waits_s)
            )
            done += test.n_prompt
        if test.n_gen:
            progress(f"{test.n_gen} tokens")
            behind = bool(test.n_depth or test.n_prompt)
            feeds.append(
                session.feed(
                    following(test.n_gen), after_last=behind, checked=False, seconds=test_seconds, timeout_s=waits_s
                )
            )
            token_s = feeds[-1].token_s
            done += len(token_s)
    return TestRun(
        seconds=sum(sum(feed.token_s) for feed in feeds),
        done=done,
        token_s=token_s,
        feeds=feeds,
        energy_j=watch.energy_j,
        temperature_c=watch.temperature_c,
        busy=watch.busy,
        in_time=len(token_s) == test.n_gen,
    )


def _ended(turn: Turn, group: LimitedGroup | SystemdScope | None, error: ArmEndedError) -> None:
    _read_usage(turn, group)
    if error.signal == signal.SIGKILL and turn.oom_kills:
        limit = turn.configuration.limits.memory
        what = "memory of this machine" if limit is None else f"memory limit of {limit / 2**30:.2f} GiB"
        turn.outcome, turn.message = (
            "oom-killed",
            f"killed by the kernel while {_doing(turn.stage)}: the {what} is too small for it",
        )
    else:
        turn.outcome, turn.message = "failed", f"while {_doing(turn.stage)}: {error}"


def _doing(stage: str) -> str:
    return f"computing {stage}" if stage.startswith("its") else stage


def _read_usage(turn: Turn, group: LimitedGroup | SystemdScope | None) -> None:
    if group is None:
        return
    try:
        usage = group.usage()
    except MeasurementError as error:
        turn.warnings.append(str(error))
        return
    turn.cgroup_peak, turn.oom_kills = usage.peak_bytes, usage.oom_kills


# ------------------------------------------------------------------------------------------------------------ the surroundings


def _devices(configuration: Configuration) -> list[BlockDevice]:
    if configuration.limits.disk_bps is None:
        return []
    return [block_device_of(configuration.path)]


def block_device_of_loop(loop: Path) -> BlockDevice:
    """The loop device itself: what is read through it is held to the limit there too, whoever reads beneath it."""
    return BlockDevice(loop.name, Path("/sys/block", loop.name, "dev").read_text().strip())


def _group(limits: Limits, devices: Sequence[BlockDevice], turn: Turn) -> LimitedGroup | SystemdScope | None:
    """The group of the arm. Without a limit it only counts, and where it cannot be made nothing is lost."""
    try:
        return limited(memory_bytes=limits.memory, read_bytes_per_s=limits.disk_bps, devices=devices)
    except MeasurementError:
        if limits == Limits():
            return None
        raise


@contextlib.contextmanager
def _usual_read_ahead(configuration: Configuration, description: ModelDescription, turn: Turn) -> Iterator[Path | None]:
    """A device with the usual readahead to map the file from, where it can be made; else a warning if the disk's is unusual."""
    wanted = configuration.arm.read_ahead_kib
    try:
        has = block_device_of(configuration.path).read_ahead_kib
    except (MeasurementError, OSError):
        has = 0
    turn.read_ahead_kib = has or None
    if not wanted or has == wanted:
        if has > UNUSUAL_READ_AHEAD_KIB and not wanted:
            turn.warnings.append(
                f"the file is mapped from a disk with a readahead of {has} KiB; usual is 128, and faults are slower with more"
            )
        yield None
        return
    with ExitStack() as stack:
        try:
            if len(description.files) > 1:
                raise MeasurementError("the model is split, and its shards are found by their names")
            loop = stack.enter_context(loop_device(configuration.path, read_ahead_kib=wanted))
            turn.read_ahead_kib = wanted
        except MeasurementError as error:
            turn.warnings.append(
                f"the file is mapped from a disk with a readahead of {has} KiB, not {wanted} as its users have it, which may be several times slower: {error}"
            )
            loop = None
        yield loop


def _read_rate(turn: Turn, description: ModelDescription, devices: Sequence[BlockDevice]) -> float:
    """Bytes a second of random reads of experts, within the limits of the arm, but not charged to its group."""
    configuration, shape = turn.configuration, ReadShape.of(description)
    limits = configuration.limits
    # Of a split model the first file may have no more than the header.
    path = max((file.path for file in description.files), key=lambda path: path.stat().st_size)
    asked = {"path": str(path), "size": shape.size, "depth": shape.depth, "seconds": READ_S}
    command = [sys.executable, "-m", "moestream.bench.reads", json.dumps(asked)]
    with ExitStack() as stack:
        if limits.disk_bps is not None:
            group = limited(memory_bytes=None, read_bytes_per_s=limits.disk_bps, devices=devices)
            command = [*stack.enter_context(group).prefix, *command]
        answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode != 0:
        raise MeasurementError(f"{path}: its disk's bandwidth cannot be measured: {answer.stderr.strip()[-300:]}")
    found = json.loads(answer.stdout)
    turn.reads_direct = found["direct"]
    # A group lets a disk that was idle make up for it.
    return min(found["bytes_per_s"], limits.disk_bps or math.inf, configuration.arm.disk or math.inf)


def median(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return statistics.median(values) if values else None
