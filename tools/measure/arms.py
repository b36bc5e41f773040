"""Arms: ways to run one model on one token stream, each in a child process, so that they can be compared.

    stream = zipf_stream(tokens=48, vocabulary=151936)
    with Session(Arm(model=path, kind="streamed", cache=3 << 30)) as session:
        session.feed(stream)                      # warms the cache
        print(session.feed(stream).tokens_per_s)

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

import numpy as np
import psutil

from .cgroup import LimitedGroup
from .figure import MeasurementError

__all__ = ["Arm", "Feed", "Session", "random_prompt", "zipf_stream"]

# Drawing from few ids by a Zipf law makes some tokens frequent, as text does: their experts are cached, the others are not.
STREAM_IDS = 400
ZIPF_EXPONENT = 1.3

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
)


def zipf_stream(*, tokens: int, vocabulary: int, seed: int = 1) -> list[int]:
    """Token ids whose frequency follows a Zipf law over 400 ids."""
    ranks = np.minimum(np.random.default_rng(seed).zipf(ZIPF_EXPONENT, tokens), STREAM_IDS)
    return [int(id) for id in ranks * 7 % vocabulary]


def random_prompt(*, tokens: int, vocabulary: int, seed: int = 1) -> list[int]:
    """Token ids from all of the vocabulary: a hundred of them already ask for nearly all experts."""
    return [int(id) for id in np.random.default_rng(seed).integers(vocabulary, size=tokens)]


@dataclass(frozen=True)
class Arm:
    """One way to run a model.

    A stock arm is llama_cpp.Llama, with or without repacked weights, read into memory or mapped. A streamed arm is
    moestream.Llama with the options of ExpertStreaming from `cache` (bytes) to `replay_recall`; None leaves one at its default. Context,
    batch and threads are the same for both.
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
    n_ctx: int = 512
    n_batch: int = 512
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    @property
    def streaming(self) -> dict[str, Any]:
        """The options of ExpertStreaming."""
        values = {name: getattr(self, name) for name in STREAMING}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Feed:
    """What one feed took. Lists have one entry per call: per token, or one for a prompt fed at once.

    `misses` and `experts` (the fields of ExpertStats, for these calls) belong to streamed arms.
    """

    token_s: list[float]
    logits_crc: list[int]
    misses: list[int]
    peak_rss_bytes: int
    rss_anon_bytes: int
    experts: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """By the median token: right where all tokens do the same work, and deaf to what else ran on the machine."""
        return 1 / statistics.median(self.token_s)

    def tokens_per_s_between(self, first: int, end: int) -> float:
        """Of the tokens [first, end): by their sum, since with misses each token differs from the next."""
        return (end - first) / sum(self.token_s[first:end])


class Session:
    """A child process with a model loaded, inside the `with` block.

    Attributes:
        load_s: seconds that the constructor of Llama took, imports not counted.
        openmp: what the environment told the threads of ggml, as they saw it: by name, unset ones left out.

    Raises:
        MeasurementError: the child failed or took too long; its last words are in the message.
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
        self._environment = environment or {}
        self._prefix = group.prefix if group is not None else []
        self._load_timeout_s = load_timeout_s

    def __enter__(self) -> Session:
        description = json.dumps(asdict(self.arm) | {"streaming": self.arm.streaming}, default=str)
        command = [*self._prefix, sys.executable, "-m", "measure.worker", description]
        tools = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [tools, os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path} | self._environment
        self._words = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, env=environment
        )
        self._unread = b""
        try:
            loaded = self._answer(self._load_timeout_s)
        except BaseException:
            self._process.kill()
            self._end()
            raise
        self.load_s, self.openmp = loaded["load_s"], loaded["openmp"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            # It may be in the middle of a feed that nobody waits for any more.
            self._process.kill()
        self._end()

    def settle(self, *, at_most_s: float = 60.0) -> None:
        """Wait until the process does nothing: what arrived is put into huge pages by a thread that takes a core for it."""
        process = psutil.Process(self._process.pid)
        for _ in range(int(at_most_s)):
            before = sum(process.cpu_times()[:2])
            time.sleep(1)
            if sum(process.cpu_times()[:2]) - before < 0.03:
                return

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
        timeout_s: float = 900,
    ) -> Feed:
        """Evaluate tokens, one by one, or `at_once` as a prompt; from an empty context, or `after_last` behind the last feed's.

        `seconds` ends it after the token running then. `prefetch` is the option of that name from now on, `read_rate` the
        bytes per second of the disk (0: as it is), for a streamed model; None leaves them. `recorded`: while a timeline is.
        """
        request = {"tokens": tokens, "at_once": at_once, "after_last": after_last, "seconds": seconds}
        request |= {"prefetch": prefetch, "read_rate": read_rate, "recorded": recorded}
        # If it has died since, the answer that does not come says why.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        answer = self._answer(timeout_s)
        return Feed(**{name: answer[name] for name in (entry.name for entry in fields(Feed)) if name in answer})

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise MeasurementError(f"{self._name()} gave no answer within {timeout_s:.0f} s")
            read = os.read(pipe, 1 << 16)
            if not read:
                status = self._process.wait()
                how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
                raise MeasurementError(f"{self._name()} {how}: {self._last_words()}")
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

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
