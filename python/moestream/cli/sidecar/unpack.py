"""Write what a sidecar holds as files of its own.

They are heads.safetensors (F32), adapter.gguf, provenance.json and
quality.json, as far as there is something for them.

  moestream sidecar unpack MODEL.sidecar.gguf -o folder
"""

from __future__ import annotations

import argparse
from typing import Any

from ...memory import format_size


def run(*, file: str, output: str, **options: Any) -> int:
    """Runs `moestream.sidecar.unpack` for the command line and returns the exit code."""
    from ...sidecar import unpack

    for path in unpack(file, output, **options):
        print(f"{path}: {format_size(path.stat().st_size)}")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `unpack`."""
    parser.add_argument("file", metavar="FILE", help="the sidecar")
    parser.add_argument("-o", "--output", metavar="FOLDER", required=True, help="the folder to write into")
    parser.add_argument("--force", action="store_true", help="replace files that are there")
