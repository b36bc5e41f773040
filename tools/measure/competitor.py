"""A process that keeps one core busy, as a program of somebody else does: in a session of its own.

    with Competitor():
        print(session.feed(stream).tokens_per_s)

Linux shares the processor between sessions first (autogroups), then between the processes of one. A session of a program's own
gets as much as ours, whatever our number of threads; so it is given the weight that ours has.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

__all__ = ["Competitor"]

_AUTOGROUP = "/proc/self/autogroup"
# It ends by itself when we are gone: killed, we could not end it, and it would go on for ever.
_BUSY = f"""
import os, sys
if sys.argv[2]:
    with open("{_AUTOGROUP}", "w") as weight:
        weight.write(sys.argv[2])
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""
SETTLES_S = 0.3  # until the scheduler has found it a core


class Competitor:
    """Runs inside the `with` block."""

    def __enter__(self) -> Competitor:
        # A kernel without autogroups, or with an empty file for them, shares by process alone: there is nothing to set.
        weight = ""
        with contextlib.suppress(OSError):
            weight = "".join(Path(_AUTOGROUP).read_text().split()[-1:])
        command = [sys.executable, "-S", "-c", _BUSY, str(os.getpid()), weight]
        self._process = subprocess.Popen(command, start_new_session=True)
        time.sleep(SETTLES_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
