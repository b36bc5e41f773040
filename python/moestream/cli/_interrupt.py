from __future__ import annotations

import os
import select
import signal
import sys
import threading
from types import TracebackType

INTERRUPTED = 128 + signal.SIGINT  # the exit code
_PATIENCE_S = 1.0


class Interrupt:
    """Turns Ctrl-C into a question to ask between two tokens; a second Ctrl-C ends the process at once.

    Python runs signal handlers only between bytecodes, so a Ctrl-C pressed while llama.cpp works on a batch would go
    unanswered for seconds, and a KeyboardInterrupt raised inside one of its callbacks would be lost. The signal's
    wake-up pipe has neither flaw: a thread sees every Ctrl-C as it is pressed.

    Use it in the main thread:

        with Interrupt() as interrupt:
            while not interrupt.requested():
                ...
    """

    def __init__(self) -> None:
        self._requested = threading.Event()

    def requested(self) -> bool:
        return self._requested.is_set()

    def __enter__(self) -> Interrupt:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._handler = signal.signal(signal.SIGINT, lambda *_: None)
        self._wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="moestream-interrupt", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakeup_fd)
        signal.signal(signal.SIGINT, self._handler)
        os.close(self._write_fd)  # the thread reads the end of the pipe and leaves
        self._thread.join()
        os.close(self._read_fd)

    def _watch(self) -> None:
        while signals := os.read(self._read_fd, 64):
            presses = signals.count(signal.SIGINT)
            if presses > 1 or (presses and self.requested()):
                os._exit(INTERRUPTED)
            if presses:
                self._requested.set()
                still_busy = not select.select([self._read_fd], [], [], _PATIENCE_S)[0]
                if still_busy and sys.stderr.isatty():
                    print("\nmoestream: stopping after this batch; Ctrl-C again ends it at once", file=sys.stderr)
