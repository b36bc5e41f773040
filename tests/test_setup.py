"""The environment that tools/test and tools/demo make: never stale, repaired where it was cut off. Nothing is installed here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import environment

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `_probe` finds in a small checkout with an environment that is complete."""
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "STAMP", tmp_path / ".venv/stamp.json")
    for name in ("CMakeLists.txt", "pyproject.toml", "csrc/a.c", "python/moestream/a.py", "README.md", "LICENSE"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    packages = tmp_path / ".venv/packages"
    for name in ("moestream/a.py", "moestream/libmoestream.so", "numpy-2.0.dist-info/INSTALLER"):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(name)
    found = [[3, 11, 0], True, str(packages)]
    environment.STAMP.write_text(json.dumps(environment._state(found, environment._hash_of_sources())))
    return found


def test_complete_environment_is_left_alone(found: list[Any], tmp_path: Path) -> None:
    assert environment._is_current(found)
    cached = tmp_path / "python/moestream/__pycache__/a.pyc"
    cached.parent.mkdir()
    cached.write_text("")
    os.utime(tmp_path / "csrc/a.c", (1, 1))
    assert environment._is_current(found)


@pytest.mark.parametrize(
    "name",
    [
        "csrc/a.c",
        "csrc/new.h",
        "python/moestream/a.py",
        "CMakeLists.txt",
        "pyproject.toml",
        ".venv/packages/moestream/a.py",
        ".venv/packages/moestream/libmoestream.so",
        ".venv/stamp.json",
    ],
)
def test_any_change_of_sources_or_of_what_is_installed_is_seen(found: list[Any], tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("changed")
    assert not environment._is_current(found)


def test_a_file_that_is_gone_is_seen(found: list[Any], tmp_path: Path) -> None:
    (tmp_path / "csrc/a.c").unlink()
    assert not environment._is_current(found)


def test_other_packages_or_another_python_are_seen(found: list[Any], tmp_path: Path) -> None:
    assert not environment._is_current([[3, 12, 0], *found[1:]])
    (tmp_path / ".venv/packages/numpy-2.0.dist-info").rename(tmp_path / ".venv/packages/numpy-2.1.dist-info")
    assert not environment._is_current(found)


def test_environment_that_does_not_run_or_has_no_pip_is_not_used(found: list[Any]) -> None:
    assert not environment._is_usable(None)
    assert not environment._is_usable([found[0], False, found[2]])
    assert not environment._is_usable([[3, 9, 18], True, found[2]])
    assert environment._probe("/nowhere/python") is None


def test_package_whose_installation_was_cut_off_is_installed_again(found: list[Any], tmp_path: Path) -> None:
    half = tmp_path / ".venv/packages/torn-1.0.dist-info"
    half.mkdir()
    (half / "METADATA").write_text("")
    environment._remove_half_installed(Path(found[2]))
    assert not half.exists()
    assert (tmp_path / ".venv/packages/numpy-2.0.dist-info").exists()


def test_missing_compiler_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        environment.SetupError, match=r"^no C\+\+ compiler \(c\+\+ or g\+\+\) was found. Debian, Ubuntu: apt"
    ):
        environment._require_compiler("C++", None, ["c++", "g++"])
    with pytest.raises(environment.SetupError, match=r"^no C compiler \(my-cc\) was found"):
        environment._require_compiler("C", "my-cc -m64", ["cc"])


def test_too_old_python_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "OLDEST_PYTHON", (3, 99))
    with pytest.raises(environment.SetupError, match=r"^Python 3.99 or newer is needed, and .* is 3\.\d+; install"):
        environment._find_python()


def test_pin_is_that_of_the_package() -> None:
    assert environment._llama_cpp_requirement() == "llama-cpp-python==0.3.36"


@pytest.mark.parametrize("name", ["test", "demo"])
def test_help_needs_no_environment(name: str) -> None:
    run = subprocess.run([sys.executable, ROOT / "tools" / name, "--help"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and run.stderr == ""
    assert f"tools/{name}" in run.stdout
