"""C that a measurement needs and the library does not: compiled when it is wanted, for this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from .figure import MeasurementError

__all__ = ["shared_library"]


def shared_library(source: Path, folder: Path) -> Path:
    """The library made from a source, in `folder`.

    Raises:
        MeasurementError: there is no compiler, or it refuses the source.
    """
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None:
        raise MeasurementError(
            f"no C compiler (cc, gcc or clang) was found, and {source.name} is measured with one: "
            "apt-get install gcc, or your system's equivalent"
        )
    library = folder / f"{source.stem}.so"
    command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-pthread", "-o", library, source]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise MeasurementError(f"{compiler} cannot compile {source.name}: {done.stderr[-500:]}")
    return library
