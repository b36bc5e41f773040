"""`generate` in a process of its own, so that the memory it takes can be told from that of everything else.

The new process reports what happens through a pipe; a message the other way asks it to stop, and the pipe's end, however
this process ended, ends it at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ..errors import MoestreamError
from ._interrupt import INTERRUPTED
from ._logging import log_levels, log_to_stderr
from .generate import Generation, generate

_CALLBACKS = ("on_text", "load_progress", "prompt_progress")
_POLL_S = 0.1


def generate_apart(*, should_stop: Callable[[], bool], **options: Any) -> Generation:
    """What `generate(**options)` gives, made in a new process; its callbacks are called in this one.

    Raises:
        MoestreamError: As `generate`; also if the process ends without a result, as when the system is out of memory.
        KeyboardInterrupt: `should_stop` was true while the model loaded.
    """
    callbacks = {name: options.pop(name) for name in _CALLBACKS if name in options}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, options, tuple(callbacks), log_levels()), daemon=True)
    process.start()
    theirs.close()
    asked = False
    try:
        while True:
            if should_stop() and not asked:
                ours.send("stop")
                asked = True
            if not ours.poll(_POLL_S):
                continue
            name, arguments = ours.recv()
            if name == "made":
                return arguments
            if name == "raised":
                raise arguments
            callbacks[name](*arguments)
    except (EOFError, ConnectionError):
        process.join()
        raise MoestreamError(
            f"the process that runs the model ended without a result ({_ending(process.exitcode)})"
        ) from None
    finally:
        ours.close()
        process.join()


def _ending(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    hint = "; the system may be out of memory" if -exit_code == signal.SIGKILL else ""
    return f"{signal.Signals(-exit_code).name}{hint}"


def _run(connection: Connection, options: dict[str, Any], callbacks: tuple[str, ...], levels: tuple[int, int]) -> None:
    """The new process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asked for us
    log_to_stderr(*levels)
    stop = threading.Event()
    threading.Thread(target=_listen, args=(connection, stop), daemon=True).start()

    def report(name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            if name == "load_progress" and stop.is_set():
                raise KeyboardInterrupt
            connection.send((name, arguments))

        return call

    try:
        made = generate(**options, **{name: report(name) for name in callbacks}, should_stop=stop.is_set)
    except (Exception, KeyboardInterrupt) as exc:
        connection.send(("raised", exc))
    else:
        connection.send(("made", made))


def _listen(connection: Connection, stop: threading.Event) -> None:
    try:
        while connection.recv():
            stop.set()
    except (EOFError, OSError):
        os._exit(INTERRUPTED)
