"""Runs a function in a process of its own: llama.cpp aborts where a test should fail."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any


def _call(connection: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        connection.send((function(*args, **kwargs), None))
    except BaseException:
        connection.send((None, traceback.format_exc()))


def isolated(function: Callable[..., Any], *args: Any, timeout_s: float = 120, **kwargs: Any) -> Any:
    """What ``function`` returns in a new process; its exception, crash or hang is an AssertionError here."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(theirs, function, args, kwargs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout_s):
            raise AssertionError(f"{function.__name__}{args} did not end within {timeout_s} s")
        result, failure = ours.recv()
    except EOFError:
        process.join()
        raise AssertionError(f"{function.__name__}{args} ended with exit code {process.exitcode}") from None
    finally:
        if process.is_alive() and not ours.poll(0):
            process.join(2)
        process.kill()
        process.join()
        ours.close()
    assert failure is None, failure
    return result
