"""A benchmark: arms in turns, each alone in a process of its own, compared within one run."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import models
from .._capture import fingerprint
from .._threads import default_threads
from ..errors import MeasurementError, OptionError
from ..memory import available_bytes, format_size, parse_size
from ..model import ModelDescription, describe
from .arms import BenchArm, parse_arm
from .cgroup import limited
from .disk import block_device_of
from .machine import Disk, Machine, describe_disk, describe_machine
from .options import numbers, pair
from .record import whole_record
from .summary import Surroundings, add_compute_limits, summarise
from .turn import Configuration, Limits, Test, Tokens, Turn, take_turn

__all__ = ["DEFAULT_ARMS", "benchmark"]

DEFAULT_ARMS = ("stock-mmap-tuned", "stream-reactive", "stream-prefetch")
_PROCESS_BYTES = 96 << 20  # Python, its libraries and llama.cpp's buffers for small batches
_LONGEST_S = 10**6  # of a test
_CONTEXT_STEP = 256  # llama.cpp rounds contexts up to it
_CHARACTERS_A_TOKEN = 8  # more than any tokenizer needs
_REPEATED = "the text was too short and was given again, with the routing that it had: caches look better than they are; give a longer one"


@dataclass(frozen=True)
class _Model:
    """A file that arms run, as it was when the benchmark began."""

    path: Path
    description: ModelDescription
    fingerprint: str
    stamps: tuple[tuple[int, int], ...]
    disk: Disk

    @classmethod
    def of(cls, path: Path) -> _Model:
        description = describe(path)
        files = [file.path for file in description.files]
        return cls(path, description, fingerprint(files), _stamps(files), describe_disk(path))

    def require_unchanged(self) -> None:
        """Raises MeasurementError if it is another file by now."""
        files = [file.path for file in self.description.files]
        try:
            same = _stamps(files) == self.stamps and fingerprint(files) == self.fingerprint
        except OSError as error:
            raise MeasurementError(
                f"{self.path}: cannot be read any more: {error.strerror}; the arms would not run the same model"
            ) from error
        if not same:
            raise MeasurementError(
                f"{self.path}: was changed while it was measured, so the arms did not run the same model; measure again"
            )


def benchmark(
    *,
    model: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    arms: str | Sequence[str] = DEFAULT_ARMS,
    n_prompt: str | int | Sequence[int] = 512,
    n_gen: str | int | Sequence[int] = 128,
    n_pg: Sequence[str | tuple[int, int]] = (),
    n_depth: str | int | Sequence[int] = 0,
    threads: str | int | Sequence[int] | None = None,
    batch_size: str | int | Sequence[int] = 2048,
    ubatch_size: str | int | Sequence[int] = 512,
    expert_cache: str | Sequence[str | int] | None = None,
    memory: str | int | Sequence[str | int] | None = None,
    disk_bps: str | int | Sequence[str | int] | None = None,
    repetitions: int = 5,
    warmup: int = 256,
    test_seconds: float = 120.0,
    file: str | os.PathLike[str] | None = None,
    random: bool = False,
    on_record: Callable[[dict[str, Any]], None] = lambda record: None,
    progress: Callable[[str, int, int], None] = lambda doing, done, total: None,
) -> list[dict[str, Any]]:
    """Measures arms on a model, in turns; what `moestream bench` does, with the long names of its options.

    A turn is a process of its own: the model's pages are dropped, the process is put under the limits, loads, takes its first
    token, warms up, and does the tests. A round gives each arm its turn, and each round begins with another arm, so that what
    the machine does meanwhile favours none. Arms are compared within one set of limits, one after another.

    >>> records = benchmark(model="m.gguf", arms=["stock-mmap", "stream-prefetch"], memory="4GiB", n_prompt=0, n_gen=256)
    >>> [(record["arm"], record["avg_ts"]) for record in records]

    Args:
        model: GGUF files with experts; by default the one that ships with the package.
        arms: Names of `bench.ARMS` with options: "stream-prefetch:cache=3GiB:policy=lru" (see `bench.parse_arm`).
        n_prompt, n_gen, n_depth: Tokens of prompts, tokens written, and tokens of context before them; each a number, or several
            as llama-bench takes them ("128,256", "1-32*2"). 0 leaves that kind of test out.
        n_pg: Tests of a prompt and what is written behind it, "512,128" each.
        threads, batch_size, ubatch_size: As in llama.cpp, one or several. By default a thread a physical core.
        expert_cache: Caches of the streamed arms that name none.
        memory: Bytes that an arm may have, page cache included: "4GiB", or several. None for no limit.
        disk_bps: Bytes a second that an arm may read: "500M", or several.
        repetitions: Rounds.
        warmup: Tokens before the tests, that are not steady yet.
        test_seconds: After which a test that writes tokens ends; half of it ends the warm-up.
        file: The text that is read and written. By default that of the package, which no demo model was trained on.
        random: Draw tokens instead, as llama-bench does.
        on_record: Is handed each record when it is final.
        progress: Is told what is done, and how many turns of how many are over. What it raises breaks off.

    Returns:
        The records (docs/benchmarking.md), one an arm and test. An arm that was killed or failed has one too.

    Raises:
        OptionError: An option that is none, limits under which no streamed arm can run, or a stock arm without a limit that
            would take more memory than there is.
        ModelError: The model cannot be read or has no experts.
        MeasurementError: The limits cannot be set here, or the model was changed under way. What was measured before has been
            handed to `on_record`.
    """
    given = (
        [models.demo_model()] if model is None else [model] if isinstance(model, (str, os.PathLike)) else list(model)
    )
    chosen = _arms(arms, expert_cache)
    tests = _tests(n_prompt, n_gen, n_pg, n_depth)
    limits = [Limits(*one) for one in itertools.product(_sizes("memory", memory), _sizes("disk_bps", disk_bps))]
    if repetitions < 1 or warmup < 0 or not 0 < test_seconds <= _LONGEST_S:
        raise OptionError(
            f"repetitions must be above 0, warmup at least 0, test_seconds above 0 and at most {_LONGEST_S}"
        )
    longest = max(test.tokens for test in tests)
    n_ctx = -(-max(longest, warmup + 1) // _CONTEXT_STEP) * _CONTEXT_STEP
    running = list(
        itertools.product(
            numbers("threads", threads or default_threads(), least=1),
            numbers("batch_size", batch_size, least=1),
            numbers("ubatch_size", ubatch_size, least=1),
        )
    )
    files = {path: _Model.of(path) for path in {*map(Path, given), *(arm.model for arm in chosen if arm.model)}}
    for limit, path, arm in itertools.product(limits, map(Path, given), chosen):
        _require_room(limit, files[arm.model or path].description, arm)
    _require_limits(limits, files)

    per_round = 1 + warmup + sum(test.tokens for test in tests)
    text, workload = _workload(file, random, per_round * repetitions)
    run = _Run(files, tests, repetitions, warmup, test_seconds, per_round, text, workload, on_record, progress)
    groups = [
        [
            Configuration(arm, Path(path), limit, *numbers_of, n_ctx)
            for path, numbers_of, arm in itertools.product(given, running, chosen)
        ]
        for limit in limits
    ]
    run.total = sum(map(len, groups)) * repetitions
    with _alone():
        return [record for group in groups for record in run.measure(group)]


@dataclass
class _Run:
    """What a benchmark does with its arms, and how far it has come."""

    files: Mapping[Path, _Model]
    tests: Sequence[Test]
    repetitions: int
    warmup: int
    test_seconds: float
    per_round: int
    text: str
    workload: str
    on_record: Callable[[dict[str, Any]], None]
    progress: Callable[[str, int, int], None]
    total: int = 0
    over: int = 0
    machine: Machine = field(default_factory=describe_machine)

    def measure(self, group: Sequence[Configuration]) -> list[dict[str, Any]]:
        """The records of arms that take turns. When it is broken off, of what was measured by then; they are handed on then."""
        turns: list[list[Turn]] = [[] for _ in group]
        tokens = {one.model: Tokens(self.text, per_round=self.per_round) for one in group}
        records: list[dict[str, Any]] = []
        interrupted = True
        try:
            for number in range(self.repetitions):
                for position, index in enumerate(_order(len(group), number)):
                    if not _is_hopeless(turns[index]):
                        turns[index].append(self._turn(group[index], tokens[group[index].model], number, position))
                    self.over += 1
            for configuration in group:
                self.files[configuration.path].require_unchanged()
            interrupted = False
        finally:
            said = {turn.configuration.path: turn.model for of_arm in turns for turn in of_arm if turn.model}
            for of_arm in filter(None, turns):
                path, model = of_arm[0].configuration.path, of_arm[0].configuration.model
                broken_off = interrupted and len(of_arm) < self.repetitions
                records += self._records(of_arm, tokens[model], said.get(path, {}), broken_off)
            add_compute_limits(records)
            records[:] = map(whole_record, records)
            for record in records:
                self.on_record(record)
        return records

    def _turn(self, configuration: Configuration, tokens: Tokens, number: int, position: int) -> Turn:
        where = f"{configuration.arm.label}, round {number + 1} of {self.repetitions}"
        model = self.files[configuration.path]
        model.require_unchanged()
        self.progress(where, self.over, self.total)
        try:
            return take_turn(
                configuration,
                model.description,
                self.tests,
                tokens,
                number=number,
                position=position,
                warm_tokens=self.warmup,
                test_seconds=self.test_seconds,
                progress=lambda doing: self.progress(f"{where}: {doing}", self.over, self.total),
            )
        except OSError:
            model.require_unchanged()  # which tells it better, if it is gone
            raise

    def _records(
        self, turns: Sequence[Turn], tokens: Tokens, said: Mapping[str, Any], interrupted: bool
    ) -> list[dict[str, Any]]:
        """`said`: what llama.cpp says of the model, if any arm came to load it."""
        model = self.files[turns[0].configuration.path]
        around = Surroundings(self.machine, model.disk, self.workload)
        found = [
            summarise(turns, test, model.description, model.fingerprint, around, said=said, interrupted=interrupted)
            for test in self.tests
        ]
        if self.text and tokens.repeated:
            for record in found:
                record["warnings"].append(_REPEATED)
        return found


def _order(count: int, number: int) -> list[int]:
    """Arms of a round: each round begins with the next."""
    return [(number + index) % count for index in range(count)]


def _is_hopeless(turns: Sequence[Turn]) -> bool:
    """What was killed or refused before its first test would be again."""
    return bool(turns) and turns[-1].outcome != "ok" and not turns[-1].runs


# ------------------------------------------------------------------------------------------------------------------- options


def _arms(arms: str | Sequence[str], caches: str | Sequence[str | int] | None) -> list[BenchArm]:
    names = [name for text in ([arms] if isinstance(arms, str) else arms) for name in text.split(",") if name.strip()]
    if not names:
        raise OptionError("arms: none is given")
    sizes = [] if caches is None else caches.split(",") if isinstance(caches, str) else [str(cache) for cache in caches]
    found = []
    for name in names:
        arm = parse_arm(name)
        if sizes and arm.streamed and "cache" not in arm.options:
            found += [parse_arm(f"{name.strip()}:cache={size.strip()}") for size in sizes]
        else:
            found.append(arm)
    labels = [arm.label for arm in found]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise OptionError(f"arms: {twice} is given twice; to measure it more often give more repetitions")
    return found


def _tests(
    n_prompt: str | int | Sequence[int],
    n_gen: str | int | Sequence[int],
    n_pg: Sequence[str | tuple[int, int]],
    n_depth: str | int | Sequence[int],
) -> list[Test]:
    """In llama-bench's order: prompts, what is written, both."""
    depths = numbers("n_depth", n_depth)
    kinds = [(n, 0) for n in numbers("n_prompt", n_prompt) if n]
    kinds += [(0, n) for n in numbers("n_gen", n_gen) if n]
    kinds += [pair("n_pg", both) for both in n_pg]
    if not kinds:
        raise OptionError("there is nothing to measure: give tokens of a prompt (-p) or to write (-n)")
    return [Test(*kind, depth) for depth in depths for kind in kinds]


def _sizes(option: str, value: str | int | Sequence[str | int] | None) -> list[int | None]:
    if value is None:
        return [None]
    items = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else list(value)
    found: list[int | None] = []
    for item in items:
        text = item.strip() if isinstance(item, str) else item
        try:
            found.append(None if text == "none" else parse_size(text))
        except OptionError as error:
            raise OptionError(f"{option}: {error}") from None
    return found


def _require_room(limits: Limits, description: ModelDescription, arm: BenchArm) -> None:
    """Within a limit stock arms may be killed, which is a result; without one it would be the machine that suffers.

    Ours would refuse, which can be told before.
    """
    available = available_bytes()
    if limits.memory is not None and limits.memory > available:
        raise OptionError(
            f"memory: {format_size(limits.memory)} are more than the {format_size(available)} that are available, and so no limit"
        )
    if not arm.streamed:
        taken = description.bytes_on_disk + _PROCESS_BYTES
        keeps = not arm.mapped or arm.options.get("repack")
        if limits.memory is None and keeps and taken > available:
            raise OptionError(
                f"{arm.label} takes {format_size(taken)} of memory for {description.path.name}, and {format_size(available)} are "
                "available: give a limit with memory=, within which it is killed before the machine suffers, or leave it out"
            )
        return
    if limits.memory is None:
        return
    number = arm.options.get("experts_used") or description.experts_used
    smallest = description.minimum_cache_bytes * number // description.experts_used
    needed = description.dense_bytes + smallest + _PROCESS_BYTES
    if limits.memory < needed:
        raise OptionError(
            f"memory: {format_size(limits.memory)} are too few for {arm.label}: {description.path.name} needs {format_size(needed)} "
            f"({format_size(description.dense_bytes)} of dense weights, {format_size(smallest)} for the experts of one token, "
            f"{format_size(_PROCESS_BYTES)} for the process), and more for a context"
        )


def _require_limits(limits: Sequence[Limits], files: Mapping[Path, _Model]) -> None:
    """Raises MeasurementError where one of the limits cannot be set, before anything is measured."""
    for one in limits:
        if one != Limits():
            devices = [] if one.disk_bps is None else list({block_device_of(path) for path in files})
            with limited(memory_bytes=one.memory, read_bytes_per_s=one.disk_bps, devices=devices):
                pass


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """No other benchmark runs within the block: each drops the pages of the other's model, and takes its cores.

    Raises:
        MeasurementError: There is another one.
    """
    path = Path(tempfile.gettempdir(), "moestream-bench.lock")
    file = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MeasurementError(
                f"another benchmark runs on this machine ({path} is locked), and each would spoil the other: wait for its end"
            ) from None
        yield
    finally:
        os.close(file)  # which unlocks it


def _workload(file: str | os.PathLike[str] | None, random: bool, tokens: int) -> tuple[str, str]:
    """The text, no longer than needed, and what it is called; none for random tokens."""
    if random:
        if file is not None:
            raise OptionError("both a text and random tokens are asked for: give one")
        return "", "random tokens"
    if file is None:
        packed = Path(models.__file__).with_name("validation.jsonl.gz")
        try:
            with gzip.open(packed, "rt", encoding="utf-8") as lines:
                text = "\n\n".join(json.loads(line)["text"] for line in lines)
        except FileNotFoundError:
            raise OptionError(
                f"this copy of moestream came without {packed.name}: name a text with --file, or give --random"
            ) from None
        name = "text: demo corpus"
    else:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise OptionError(f"cannot read the text {file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise OptionError(f"the text {file} is not UTF-8 (byte {error.start})") from error
        name = f"text: {Path(file).name}"
    if not text.strip():
        raise OptionError(f"the text {file} is empty")
    return text[: tokens * _CHARACTERS_A_TOKEN], name


def _stamps(files: Sequence[Path]) -> tuple[tuple[int, int], ...]:
    return tuple((found.st_size, found.st_mtime_ns) for found in map(os.stat, files))
