"""How many threads decode, where the user gave no number.

Two questions, both answered by the time that tokens take. Which number is the fastest on this machine? It
is measured once, during the first tokens of a text, and remembered in the user's cache folder. And which is it
while other programs want the cores? All threads of an operation wait for the slowest, so one that shares its
core holds up all others, and fewer are faster. That our threads wait for a core is seen by what Linux counts for
each of them; only then is a smaller number tried, and later, now and again, a larger one.

The number of threads changes no bit of what is computed, except in flash attention: there it stays fixed.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

__all__ = ["DecodeThreads", "Memory", "candidates", "core_wait_s", "default_threads", "processor", "usable_cores"]

LOOK_S = 0.5  # a machine that is quiet is looked at so often
LONGEST_PAUSE_S = 10.0  # between two trials of which none was faster
CROWDED = 0.4  # of a core, for which our threads waited: a competitor takes 0.5 to 1, our own background work up to 0.3
DISTURBED = 0.2  # the same, while it is measured which number is the fastest
FASTER = 0.95  # of the time that the present number takes, or it is not worth a change
SAMPLE_TOKENS = 6
SAMPLE_S = 1.0  # slow tokens: two of them, if they take that long
WARM_UP_TOKENS = 4

Tokens = Generator[None, float, None]
"""Is resumed behind every token with the seconds that it took."""


class DecodeThreads:
    """Chooses the number of threads a token at a time.

    >>> threads = DecodeThreads(2, set_threads=context.set, known=False, candidates=candidates(), core_wait_s=core_wait_s)
    >>> with threads.token():
    ...     decode()

    Args:
        n: The number to begin with.
        set_threads: Sets the number for the tokens to come.
        known: ``n`` is what was measured as the fastest on this machine before; else it is measured.
        candidates: The numbers among which it is looked for.
        remember: Is told the fastest once it is known. What it raises as OSError becomes a sentence in :attr:`note`.
        core_wait_s: Seconds so far that our threads were ready to run and had no core.
        expert_wait_s: Seconds so far that computing waited for the disk.
        clock: Seconds.
    """

    def __init__(
        self,
        n: int,
        *,
        set_threads: Callable[[int], None],
        known: bool,
        candidates: Sequence[int],
        remember: Callable[[int], None] = lambda n: None,
        core_wait_s: Callable[[], float],
        expert_wait_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.n = n
        self._best = n
        self._known = known
        self._candidates = tuple(candidates)
        self._remember = remember
        self._set_threads = set_threads
        self._core_wait_s = core_wait_s
        self._expert_wait_s = expert_wait_s
        self._clock = clock
        self._why = "the fastest when it was measured here before" if known else "the physical cores, not measured yet"
        set_threads(n)
        self._course = self._decide()
        next(self._course)

    @property
    def note(self) -> str:
        """The number and why it is that, in a sentence."""
        if self.n == self._best:
            return f"threads: {self.n}, {self._why}"
        return f"threads: {self.n}, because other work takes the cores; otherwise {self._best}, {self._why}"

    @contextlib.contextmanager
    def token(self) -> Iterator[None]:
        """Takes the time of what decodes one token inside the ``with`` block; of one that fails, none."""
        start, waited = self._clock(), self._expert_wait_s()
        yield
        waited = self._expert_wait_s() - waited
        self._course.send(max(0.0, self._clock() - start - waited))

    # ------------------------------------------------- the course of things: each yield is a token

    def _decide(self) -> Tokens:
        for _ in range(WARM_UP_TOKENS):
            yield
        pause_s = LOOK_S
        while True:
            crowded = yield from self._watch(pause_s)
            if crowded and self.n > 1:
                changed = yield from self._try(self.n - 1)
            elif self.n < self._best:
                changed = yield from self._try(self.n + 1)
            elif not self._known and not crowded:
                changed = yield from self._measure()
            else:
                changed = True  # nothing to try: look again as soon as before
            pause_s = LOOK_S if changed else min(2 * pause_s, LONGEST_PAUSE_S)

    def _watch(self, seconds: float) -> Generator[None, float, bool]:
        """Lets tokens pass for so long. Did our threads wait for a core meanwhile?"""
        end, waited, computed = self._clock() + seconds, self._core_wait_s(), 0.0
        while self._clock() < end:
            computed += yield
        return self._core_wait_s() - waited > CROWDED * computed

    def _try(self, other: int) -> Generator[None, float, bool]:
        """Takes another number if it is faster."""
        present = self.n
        now = yield from self._sample(present)
        then = yield from self._sample(other)
        if then < FASTER * now:
            return True
        self._set(present)
        return False

    def _measure(self) -> Generator[None, float, bool]:
        """Finds the fastest of the candidates: each twice, since the first tokens are not like later ones."""
        start, waited = self._clock(), self._core_wait_s()
        times: dict[int, list[float]] = {n: [] for n in self._candidates}
        for _ in range(2):
            for n in self._candidates:
                times[n].append((yield from self._sample(n)))
        if self._core_wait_s() - waited > DISTURBED * (self._clock() - start):
            self._set(self._best)
            return False
        self._best = min(times, key=lambda n: sum(times[n]))
        self._set(self._best)
        self._known = True
        speeds = ", ".join(f"{2 / sum(taken):.1f} with {n}" for n, taken in times.items())
        self._why = f"the fastest here (tokens a second: {speeds})"
        try:
            self._remember(self._best)
        except OSError as error:
            self._why += f"; not remembered: cannot write {error.filename}: {error.strerror}"
        return True

    def _sample(self, n: int) -> Generator[None, float, float]:
        """The median time of a few tokens with ``n`` threads."""
        if n != self.n:
            self._set(n)
            yield  # with the first, threads are made or wake up
        times: list[float] = []
        while len(times) < SAMPLE_TOKENS and (len(times) < 2 or sum(times) < SAMPLE_S):
            times.append((yield))
        return statistics.median(times)

    def _set(self, n: int) -> None:
        if n != self.n:
            self._set_threads(n)
            self.n = n


class Memory:
    """The fastest number for one model on one machine, in ``threads.json`` in the user's cache folder.

    Args:
        model: The model's (first) file.
    """

    def __init__(self, model: Path) -> None:
        self._key = f"{processor()}, {usable_cores()} cores, {model.name}, {model.stat().st_size} bytes"

    def recall(self) -> int | None:
        """The number; None if there is none, or nothing that could be read as one."""
        n = self._entries().get(self._key)
        return n if type(n) is int and 1 <= n <= usable_cores() else None

    def remember(self, n: int) -> None:
        """Adds or changes the number.

        Raises:
            OSError: the folder or the file cannot be written.
        """
        path = self._path()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps({**self._entries(), self._key: n}, indent=1) + "\n")
        os.replace(part, path)

    def _entries(self) -> dict[str, object]:
        try:
            entries = json.loads(self._path().read_text())
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}

    @staticmethod
    def _path() -> Path:
        folder = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return Path(folder) / "moestream" / "threads.json"


def usable_cores() -> int:
    """Logical cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """Physical cores, as far as this process may use them."""
    import psutil

    return min(psutil.cpu_count(logical=False) or 1, usable_cores())


def candidates() -> tuple[int, ...]:
    """The numbers worth a measurement: one, the physical cores, all."""
    return tuple(sorted({1, default_threads(), usable_cores()}))


def core_wait_s() -> float:
    """Seconds so far that threads of this process were ready to run and had no core, summed.

    Threads of lower priority are not counted, for they are meant to wait: ours that makes huge pages is one.
    0.0 where the system does not say: outside of Linux, or without its scheduler's statistics.
    """
    total_ns = 0
    with contextlib.suppress(FileNotFoundError):
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                if os.getpriority(os.PRIO_PROCESS, int(thread)) <= usual:
                    total_ns += int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1])
    return total_ns / 1e9


def processor() -> str:
    """The name of the CPU."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
