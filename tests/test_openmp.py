"""OpenMP's threads spin shortly, unless the user wants it otherwise; each case in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from factory import make

CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
WATCHED = """
import ctypes, os, subprocess, sys
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
seen = []
real = ctypes.CDLL
class Library(real):  # through which llama_cpp loads its own
    def __init__(self, name, *arguments, **keywords):
        if "llama" in str(name):
            seen.append((getenv(b"GOMP_SPINCOUNT") or b"unset").decode())
        super().__init__(name, *arguments, **keywords)
ctypes.CDLL = Library
import moestream
child = "import os; print(os.environ.get('GOMP_SPINCOUNT', 'unset'))"
print(*sorted(set(seen)), (getenv(b"GOMP_SPINCOUNT") or b"unset").decode(), os.environ.get("GOMP_SPINCOUNT", "unset"))
print(subprocess.check_output([sys.executable, "-c", child], text=True).strip())
"""
NOTES = """
{first}
import moestream
with_notes = moestream.Llama({model!r}, expert_streaming=True, n_ctx=64, verbose=False)
print(*(note for note in with_notes.expert_stats().notes if "OpenMP" in note), sep="\\n")
"""


def run(code: str, **env: str) -> str:
    unset = {name: value for name, value in os.environ.items() if name not in CHOICES}
    process = subprocess.run(
        [sys.executable, "-c", code], env={**unset, **env}, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_the_spin_count_is_set_while_the_libraries_load_and_no_longer() -> None:
    assert run(WATCHED).splitlines() == ["1000 unset unset", "unset"]


@pytest.mark.parametrize(
    "choice, told", [({"GOMP_SPINCOUNT": "77"}, "77 77 77"), ({"OMP_WAIT_POLICY": "active"}, "unset unset unset")]
)
def test_what_the_user_set_stays(choice: dict[str, str], told: str) -> None:
    assert run(WATCHED, **choice).splitlines()[0] == told


needs_gnu_openmp = pytest.mark.skipif(
    "libgomp"
    not in run(
        "import llama_cpp; from pathlib import Path as P; m = P('/proc/self/maps'); print(m.exists() and m.read_text())"
    ),
    reason="this llama.cpp does not compute with GNU OpenMP",
)


@needs_gnu_openmp
def test_openmp_that_was_loaded_before_is_told_with_the_remedy(tmp_path: Path) -> None:
    model = str(make(tmp_path))
    note = run(NOTES.format(first="import llama_cpp", model=model))
    assert note.startswith("OpenMP was loaded before moestream")
    assert "import moestream first, or set GOMP_SPINCOUNT=1000 in the environment" in note


@needs_gnu_openmp
@pytest.mark.parametrize(
    "first, choice",
    [("import os", {}), ("import llama_cpp", {"GOMP_SPINCOUNT": "77"})],
    ids=["loaded by us", "user's choice"],
)
def test_nothing_is_told_where_nothing_is_wrong(first: str, choice: dict[str, str], tmp_path: Path) -> None:
    assert run(NOTES.format(first=first, model=str(make(tmp_path))), **choice) == ""


@needs_gnu_openmp
def test_openmp_says_that_it_read_the_spin_count() -> None:
    code = "import os, sys; os.dup2(1, 2); sys.stderr.flush(); import moestream"
    assert "GOMP_SPINCOUNT = '1000'" in run(code, OMP_DISPLAY_ENV="VERBOSE")
