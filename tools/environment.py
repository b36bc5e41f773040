"""The Python environment of this checkout, `.venv`, made or repaired as needed. For tools/test and tools/demo.

Only the standard library is used, and only syntax that an old python3 understands, since it has to say that it is too old.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "moestream-installed.json"
LLAMA_CPP_LOG = VENV / "llama-cpp-python.log"

OLDEST_PYTHON = (3, 10)
BUILD_TOOLS = ["scikit-build-core>=0.10", "cmake>=3.21", "ninja"]
SOURCES = ["CMakeLists.txt", "LICENSE", "README.md", "csrc", "pyproject.toml", "python"]

# What a python is good for: its version, whether it has pip, and where it keeps packages.
PROBE = """
import importlib.util, json, sys, sysconfig
print(json.dumps([sys.version_info[:3], importlib.util.find_spec("pip") is not None, sysconfig.get_path("purelib")]))
"""
COMPILER_REMEDY = (
    "Debian, Ubuntu: apt install build-essential; Fedora: dnf install gcc-c++; macOS: xcode-select --install"
)


class SetupError(Exception):
    """What is wrong with this machine, and the remedy."""


def prepare():
    """Makes `.venv` what this checkout needs, if it is not, and returns its python. Ends the process if that fails."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        checkout = os.open(str(ROOT), os.O_RDONLY)
        try:
            _lock(checkout)
            _prepare()
        finally:
            os.close(checkout)
    except SetupError as error:
        sys.exit(f"setup: error: {error}")
    except KeyboardInterrupt:
        say("interrupted; the next run goes on from here")
        sys.exit(130)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return str(PYTHON)


def use_interpreter_with(*packages):
    """Goes on in the checkout's own environment if the interpreter that runs us lacks a package."""
    lacking = [package for package in packages if importlib.util.find_spec(package) is None]
    if not lacking:
        return
    if PYTHON.exists() and pathlib.Path(sys.prefix) != VENV:
        os.execv(str(PYTHON), [str(PYTHON), *sys.argv])
    sys.exit(
        f"{pathlib.Path(sys.argv[0]).name}: {sys.executable} has no {lacking[0]}; run tools/test once to set up .venv, or use the python of an environment that has it"
    )


def _interrupt(*_):
    raise KeyboardInterrupt


def _prepare():
    found = _probe(PYTHON)
    if _is_current(found):
        return
    started = time.monotonic()
    if not _is_usable(found):
        _make_venv()
        found = _probe(PYTHON)
        if not _is_usable(found):
            raise SetupError(f"{PYTHON} does not work; remove {VENV} and try again")
    packages = pathlib.Path(found[2])
    # From here until the new stamp is written, an interruption leaves none: the next run does all this again.
    if STAMP.exists():
        STAMP.unlink()
    _remove_half_installed(packages)
    _require_compiler("C", os.environ.get("CC"), ["cc", "gcc", "clang"])
    llama_cpp = _llama_cpp_requirement()
    if not (packages / "llama_cpp_python-{}.dist-info".format(llama_cpp.partition("==")[2])).is_dir():
        _require_compiler("C++", os.environ.get("CXX"), ["c++", "g++", "clang++"])
        _install_llama_cpp(llama_cpp)
    say("installing moestream and what it needs")
    _pip("install", "-qq", *BUILD_TOOLS)
    # Hashed before it is built: what is edited meanwhile is built by the next run.
    sources = _hash_of_sources()
    # The pin is repeated, so that a newer version elsewhere on the index is out of the question for pip.
    _pip("install", "-qq", "--no-build-isolation", f"{ROOT}[test]", llama_cpp)
    STAMP.write_text(json.dumps(_state(found, sources)))
    say(f"ready in {time.monotonic() - started:.0f} s")


def say(line):
    """Tells what happens; on standard error, since standard output belongs to what runs afterwards."""
    print("setup: " + line, file=sys.stderr, flush=True)


# What is installed


def _is_current(found):
    """Whether the environment holds this checkout as it is now, and nothing in it has been changed since."""
    if not _is_usable(found):
        return False
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return False
    return stamp == _state(found, _hash_of_sources())


def _state(found, sources):
    """What a stamp says. It is compared as a whole, so anything that is done to `.venv` by hand makes a stamp old."""
    packages = pathlib.Path(found[2])
    return {
        "checkout": str(ROOT),
        "python": found[0],
        "sources": sources,
        "installed": _hash_of_files(packages, [packages / "moestream"]),
        "packages": sorted(path.name for path in packages.glob("*.dist-info")),
    }


def _hash_of_sources():
    return _hash_of_files(ROOT, [ROOT / name for name in SOURCES])


def _hash_of_files(base, paths):
    """Of the names and the content of all files under `paths`."""
    total = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                content = hashlib.sha256(file.read_bytes()).hexdigest()
                total.update(f"{file.relative_to(base)} {content}\n".encode())
    return total.hexdigest()


def _llama_cpp_requirement():
    """The version that pyproject.toml wants, as in llama-cpp-python==1.2.3."""
    return re.search(r'"(llama-cpp-python==[^"]+)"', (ROOT / "pyproject.toml").read_text())[1]


def _remove_half_installed(packages):
    """Makes pip forget packages whose installation was cut off: it writes INSTALLER when all files are there."""
    for info in packages.glob("*.dist-info"):
        if not (info / "INSTALLER").exists():
            shutil.rmtree(str(info))


# Python and compilers


def _probe(python):
    """[version, has pip, folder of packages] of a python; None if it does not run."""
    try:
        run = subprocess.run([str(python), "-c", PROBE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        return json.loads(run.stdout.decode())
    except (OSError, ValueError):
        return None


def _is_usable(found):
    return found is not None and tuple(found[0]) >= OLDEST_PYTHON and found[1]


def _make_venv():
    python = _find_python()
    if VENV.exists():
        say(f"{VENV} is unfinished or broken: making it anew")
    else:
        say(f"making {VENV}")
    run = subprocess.run([python, "-m", "venv", "--clear", str(VENV)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if run.returncode != 0:
        print(run.stdout.decode(errors="replace"), file=sys.stderr)
        raise SetupError(
            f"'{python} -m venv' failed, see above; on Debian and Ubuntu it needs: apt install python3-venv"
        )


def _find_python():
    names = [sys.executable] + [f"python3.{minor}" for minor in range(20, OLDEST_PYTHON[1] - 1, -1)]
    for name in names:
        python = shutil.which(name)
        version = _probe(python)[0] if python and _probe(python) else None
        if version and tuple(version) >= OLDEST_PYTHON:
            return python
    raise SetupError(
        "Python {}.{} or newer is needed, and {} is {}.{}; install a newer one, as python3 or as python3.x".format(
            *OLDEST_PYTHON, sys.executable, *sys.version_info[:2]
        )
    )


def _require_compiler(language, chosen, usual):
    names = [chosen.split()[0]] if chosen else usual
    if not any(shutil.which(name) for name in names):
        raise SetupError("no {} compiler ({}) was found. {}".format(language, " or ".join(names), COMPILER_REMEDY))


# pip


def _pip_command(*arguments):
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def _pip(*arguments):
    if subprocess.run(_pip_command(*arguments), cwd=str(ROOT), stdout=sys.stderr).returncode != 0:
        raise SetupError("pip failed, see above; run this again when that is put right")


def _install_llama_cpp(requirement):
    """Installs it, with the progress of its build on one line and all of pip's output in a file."""
    say(f"installing {requirement}; where it has to be compiled, that takes 5 to 10 minutes on two cores")
    started = time.monotonic()
    command = _pip_command("install", "--verbose", requirement)
    with LLAMA_CPP_LOG.open("wb") as log, _Progress("compiling llama.cpp") as progress:
        pip = subprocess.Popen(command, cwd=str(ROOT), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            for line in pip.stdout:
                log.write(line)
                step = re.match(rb"\s*\[(\d+)/(\d+)\]", line)  # as ninja counts
                if step:
                    progress.reached(int(step[1]), int(step[2]))
            failed = pip.wait() != 0
        except KeyboardInterrupt:
            with contextlib.suppress(subprocess.TimeoutExpired):
                pip.wait(10)  # Ctrl-C is for pip too, which removes what it unpacked
            raise
        finally:
            pip.kill()
            pip.wait()
    if failed:
        lines = LLAMA_CPP_LOG.read_text(errors="replace").splitlines()
        print("\n".join(lines[-30:]), file=sys.stderr)
        raise SetupError(f"{requirement} could not be installed; the whole log is {LLAMA_CPP_LOG}")
    say(f"{requirement} is installed, after {time.monotonic() - started:.0f} s")


class _Progress:
    """On a terminal one line that is rewritten, elsewhere a line for every tenth of the way."""

    def __init__(self, what):
        self.what = what
        self.started = time.monotonic()
        self.tenths = 0
        self.drawn = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.drawn:
            print(file=sys.stderr)

    def reached(self, done, total):
        line = f"{self.what}: {done} of {total} steps, {time.monotonic() - self.started:.0f} s"
        if sys.stderr.isatty():
            print("\rsetup: " + line, end="\x1b[K", file=sys.stderr, flush=True)
            self.drawn = True
        elif done * 10 // total > self.tenths:
            self.tenths = done * 10 // total
            say(line)


def _lock(checkout):
    """Waits until no other process sets up this checkout; the lock goes with the process."""
    try:
        fcntl.flock(checkout, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"waiting for another setup in {ROOT}")
        fcntl.flock(checkout, fcntl.LOCK_EX)
