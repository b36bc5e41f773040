"""A slower processor: processes that get a share of the real one's time, by a cgroup.

    with SlowProcessor() as slow:
        slow.hold(session.pid)
        slow.share(0.25)      # of all cores' time, in turns of a few milliseconds
        slow.share(1)         # all of it

What reads for them is held, too: a reader's thread cannot ask for more than its process has time to. Clock and memory are those
of the fast processor, so that a token takes as much longer as there is less time, whatever it computes.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from types import TracebackType

from moestream.bench.cgroup import mounted

from .figure import MeasurementError

__all__ = ["SlowProcessor"]

_TURN_US = 5000
_ALL = -1


class SlowProcessor:
    """A cgroup inside the `with` block. What still runs in it at the end goes back to the group that it came from.

    Raises:
        MeasurementError: no cgroup controller for processor time, or no right to use it.
    """

    def __enter__(self) -> SlowProcessor:
        mounts = mounted()
        self._is_v1 = "cpu" in mounts
        parent = mounts.get("cpu", mounts.get("unified"))
        if parent is None:
            raise MeasurementError("a slower processor needs the cgroup controller cpu, and it is not mounted here")
        self._parent = parent
        self._folder: Path = parent / f"moestream-figures-{os.getpid()}-{time.monotonic_ns()}"
        try:
            self._folder.mkdir()
            self.share(1)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
            raise MeasurementError(f"cannot make a cgroup for a slower processor: {error}; it takes root") from error
        return self

    def hold(self, pid: int) -> None:
        """A process, with all of its threads."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def share(self, share: float) -> None:
        """Of the time of all cores, above 0 to 1, from now on."""
        quota = _ALL if share == 1 else int(share * (os.cpu_count() or 1) * _TURN_US)
        if self._is_v1:
            (self._folder / "cpu.cfs_quota_us").write_text(str(_ALL))
            (self._folder / "cpu.cfs_period_us").write_text(str(_TURN_US))
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self._folder / "cpu.max").write_text(f"{'max' if quota == _ALL else quota} {_TURN_US}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in (self._folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it may have ended
                (self._parent / "cgroup.procs").write_text(pid)
        self._folder.rmdir()
