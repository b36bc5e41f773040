"""Arms: ways to run one model on one token stream, each in a child process, so that they can be compared.

    with Session(Arm(model=path, kind="streamed", cache=3 << 30)) as session:
        session.feed(tokens)                      # warms the cache
        print(session.feed(tokens).tokens_per_s)

Compare arms within one run and alternate them (A B A B): the same machine gives other numbers an hour later.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil

from ..errors import MeasurementError
from .cgroup import LimitedGroup

__all__ = ["Arm", "ArmEndedError", "ArmRefusedError", "ArmSilentError", "Feed", "Session"]

_WORKER = Path(__file__).with_name("worker.py")

STREAMING = (
    "cache",
    "kernels",
    "reader",
    "direct",
    "compute",
    "prefetch",
    "policy",
    "cache_aware",
    "experts_used",
    "replay",
    "replay_recall",
    "prerouter",
    "sidecar",
)


@dataclass(frozen=True)
class Arm:
    """One way to run a model.

    A stock arm is llama_cpp.Llama, with or without repacked weights, read into memory or mapped, some keys of its file replaced by
    `kv_overrides`. A streamed arm is moestream.Llama with the options of ExpertStreaming from `cache` (bytes) to `sidecar`;
    None leaves one at its default. Context, batch and threads are the same for both. Several `sequences` share the context and
    are decoded together.
    """

    model: Path
    kind: Literal["stock", "streamed"]
    repack: bool = False
    mmap: bool = False
    cache: int | str = "auto"
    kernels: str = "auto"
    reader: str = "auto"
    direct: bool | str = "auto"
    compute: str = "exact"
    prefetch: str | None = None
    policy: str | None = None
    cache_aware: float | None = None
    experts_used: int | None = None
    replay: Path | None = None
    replay_recall: tuple[float, ...] | None = None
    prerouter: str | None = None
    sidecar: Path | None = None
    sequences: int = 1
    n_ctx: int = 512
    n_batch: int = 512
    n_ubatch: int = 512
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    kv_overrides: dict[str, int] = field(default_factory=dict)

    @property
    def streaming(self) -> dict[str, Any]:
        """The options of ExpertStreaming."""
        values = {name: getattr(self, name) for name in STREAMING}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Feed:
    """What one feed took. Lists have one entry per call: per token (of each sequence), or one for a prompt fed at once.

    `experts` (the fields of ExpertStats, for these calls) belongs to streamed arms; `logits_crc`, and `misses` of streamed
    arms, to feeds that are `checked`.
    """

    token_s: list[float]
    feed_s: float
    cpu_s: float
    major_faults: int
    read_bytes: int
    peak_rss_bytes: int
    rss_anon_bytes: int
    logits_crc: list[int] = field(default_factory=list)
    misses: list[int] = field(default_factory=list)
    experts: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """By the median token: right where all tokens do the same work, and deaf to what else ran on the machine."""
        return 1 / statistics.median(self.token_s)

    def tokens_per_s_between(self, first: int, end: int) -> float:
        """Of the tokens [first, end): by their sum, since with misses each token differs from the next."""
        return (end - first) / sum(self.token_s[first:end])


class ArmEndedError(MeasurementError):
    """The process of an arm ended before it answered.

    Attributes:
        signal: That ended it; None if none did.
    """

    def __init__(self, message: str, signal: signal.Signals | None) -> None:
        super().__init__(message)
        self.signal = signal


class ArmRefusedError(MeasurementError):
    """The model of an arm cannot be loaded or run like that; the process said why."""


class ArmSilentError(MeasurementError):
    """The process of an arm did not answer in time; it is ended with its session."""


class Session:
    """A child process with a model loaded, inside the `with` block.

    Attributes:
        load_s: seconds that the constructor of Llama took, imports not counted.
        model: what llama.cpp says of it: description, size_bytes, parameters, vocabulary.
        openmp: what the environment told the threads of ggml, as they saw it: by name, unset ones left out.

    Raises:
        ArmEndedError: the child was killed or failed; its last words are in the message.
        ArmRefusedError: the model cannot be run so.
        ArmSilentError: the child took too long.
    """

    def __init__(
        self,
        arm: Arm,
        *,
        group: LimitedGroup | None = None,
        environment: Mapping[str, str] | None = None,
        load_timeout_s: float = 600,
    ) -> None:
        self.arm = arm
        self.load_s = 0.0
        self.openmp: dict[str, str] = {}
        self.model: dict[str, Any] = {}
        self._environment = environment or {}
        self._prefix = group.prefix if group is not None else []
        self._load_timeout_s = load_timeout_s

    def __enter__(self) -> Session:
        description = asdict(self.arm) | {"streaming": self.arm.streaming}
        command = [*self._prefix, sys.executable, str(_WORKER), json.dumps(description, default=str)]
        self._words = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env=os.environ | self._environment,
        )
        self._unread = b""
        try:
            loaded = self._answer(self._load_timeout_s)
        except BaseException:
            self._process.kill()
            self._end()
            raise
        self.load_s, self.openmp, self.model = loaded["load_s"], loaded["openmp"], loaded["model"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            # It may be in the middle of a feed that nobody waits for any more.
            self._process.kill()
        self._end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def settle(self, *, at_most_s: float = 60.0) -> float:
        """Wait until the process does nothing: what arrived is put into huge pages by a thread that takes a core for it.

        Returns:
            Seconds waited.
        """
        process, begun = psutil.Process(self._process.pid), time.monotonic()
        for _ in range(int(at_most_s)):
            before = sum(process.cpu_times()[:2])
            time.sleep(1)
            if sum(process.cpu_times()[:2]) - before < 0.03:
                break
        return time.monotonic() - begun

    def tokenize(self, text: str, *, timeout_s: float = 60) -> list[int]:
        """The tokens of a text, with the one that begins texts.

        Raises:
            ArmRefusedError: the model has no tokenizer.
        """
        self._ask({"tokenize": text})
        return self._answer(timeout_s)["tokens"]

    def feed(
        self,
        tokens: list[int],
        *,
        at_once: bool = False,
        after_last: bool = False,
        seconds: float | None = None,
        prefetch: str | None = None,
        read_rate: float | None = None,
        recorded: bool = False,
        checked: bool = True,
        timeout_s: float = 900,
    ) -> Feed:
        """Evaluate tokens, one by one, or `at_once` as a prompt; from an empty context, or `after_last` behind the last feed's.

        Of an arm with several sequences, a token of each at a time, of the first, the second, and so on; always from an empty context.

        `seconds` ends it after the token running then. `prefetch` is the option of that name from now on, `read_rate` the
        bytes per second of the disk (0: as it is), for a streamed model; None leaves them. `recorded`: while a timeline is.
        `checked`: with a checksum of the logits and the misses of each call.
        """
        if self.arm.sequences > 1 and (at_once or after_last):
            raise ValueError("several sequences are fed token by token, from an empty context")
        request = {"tokens": tokens, "at_once": at_once, "after_last": after_last, "seconds": seconds}
        request |= {"prefetch": prefetch, "read_rate": read_rate, "recorded": recorded, "checked": checked}
        self._ask(request)
        answer = self._answer(timeout_s)
        return Feed(**{name: answer[name] for name in (entry.name for entry in fields(Feed)) if name in answer})

    def _ask(self, request: dict[str, Any]) -> None:
        # If it has died since, the answer that does not come says why.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise ArmSilentError(f"{self._name()} gave no answer within {timeout_s:.0f} s")
            read = os.read(pipe, 1 << 16)
            if not read:
                status = self._process.wait()
                ended_by = signal.Signals(-status) if status < 0 else None
                how = f"was ended by {ended_by.name}" if ended_by else f"ended with {status}"
                raise ArmEndedError(f"{self._name()} {how}: {self._last_words()}", ended_by)
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        answer = json.loads(line)
        if "refused" in answer:
            raise ArmRefusedError(answer["refused"])
        return answer

    def _name(self) -> str:
        arm = self.arm
        how = (
            f"repack={arm.repack}, mmap={arm.mmap}"
            if arm.kind == "stock"
            else ", ".join(f"{name}={value}" for name, value in arm.streaming.items())
        )
        return f"the {arm.kind} arm ({how})"

    def _last_words(self) -> str:
        self._words.seek(0)
        return self._words.read().strip()[-600:] or "(it said nothing)"

    def _end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._words.close()
