"""A slower processor: what it does is interrupted, many times a millisecond's length, on all cores at once.

    with SlowProcessor() as slow:
        slow.share(0.25)      # of its time is left to others, whoever they are
        slow.share(1)         # all of it

On each core a process of real-time priority takes the rest of every half millisecond, at the same time on all of them. So whatever is
computed takes as much longer, and so does all that a reader does; a disk and the pauses of who waits for it are what they were. (A
quota of a cgroup is no slower processor: who waits for a disk half of the time has used half of it, and computes at full speed.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from types import TracebackType

from .figure import MeasurementError

__all__ = ["SlowProcessor"]

_TURN_S = 500e-6
_HOG = """
import os, sys, time
core, turn, busy = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
os.sched_setaffinity(0, {core})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
print(flush=True)
parent = os.getppid()
while os.getppid() == parent:
    begin = time.monotonic() // turn * turn
    while time.monotonic() < begin + busy:
        pass
    time.sleep(max(0.0, begin + turn - time.monotonic()))
"""


class SlowProcessor:
    """Inside the `with` block the processor can be slowed down, for the whole machine.

    Raises:
        MeasurementError: no right to real-time priority.
    """

    def __init__(self) -> None:
        self._hogs: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlowProcessor:
        return self

    def share(self, share: float) -> None:
        """Of the processor's time, above 0 to 1, from now on."""
        self._stop()
        if share == 1:
            return
        for core in sorted(os.sched_getaffinity(0)):
            command = [sys.executable, "-S", "-c", _HOG, str(core), str(_TURN_S), str((1 - share) * _TURN_S)]
            hog = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            self._hogs.append(hog)
            if not hog.stdout.readline():
                error = hog.communicate()[1].decode().strip().splitlines()[-1:]
                self._stop()
                raise MeasurementError(f"a slower processor needs real-time priority, and so root: {' '.join(error)}")
        time.sleep(0.1)

    def _stop(self) -> None:
        for hog in self._hogs:
            with contextlib.suppress(ProcessLookupError):
                hog.send_signal(signal.SIGKILL)
            hog.wait()
            hog.stdout.close()
            hog.stderr.close()
        self._hogs.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
