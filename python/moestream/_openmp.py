"""How long OpenMP's threads spin: what moestream asks of the library that ggml computes with.

Between two operations a thread of GNU OpenMP waits in a loop before it sleeps, by default for
milliseconds. Where another program wants the same core, the thread that loops keeps the one it waits
for from running: two threads on two cores, one of them shared, then decode a hundred times slower. A
thousand rounds are a few microseconds, as long as a wait takes on a quiet machine.

The library reads ``GOMP_SPINCOUNT`` once, while it is loaded. So it is set for that moment only: programs
that this process starts are to find the environment as the user made it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["notes", "short_spins"]

_SPINS = "1000"
_VARIABLE = "GOMP_SPINCOUNT"
_USERS_CHOICE = (_VARIABLE, "OMP_WAIT_POLICY")
_LOADED_BEFORE = (
    "OpenMP was loaded before moestream: its threads spin, and decoding gets far slower when other programs want the same cores; "
    f"import moestream first, or set {_VARIABLE}={_SPINS} in the environment"
)

_notes: list[str] = []


@contextlib.contextmanager
def short_spins() -> Iterator[None]:
    """The libraries that are loaded inside the ``with`` block get an OpenMP that spins shortly, unless the user chose."""
    if any(name in os.environ for name in _USERS_CHOICE):
        yield
        return
    before = _libraries()
    os.environ[_VARIABLE] = _SPINS
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)
    after = _libraries()
    # Of two libraries of that name (one comes inside the wheels of PyTorch) each reads the environment for itself.
    if after and after == before:
        _notes.append(_LOADED_BEFORE)


def notes() -> tuple[str, ...]:
    """What could not be done, in sentences for the user."""
    return tuple(_notes)


def _libraries() -> set[str]:
    """The GNU OpenMP libraries in this process; none where the system does not say."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[5] for line in lines if "libgomp" in line}
    return {path for path in paths if Path(path).name.startswith("libgomp")}
