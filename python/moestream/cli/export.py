"""Give the stock GGUF back that a laid file was made from.

Keys, tensors, their order and bytes are those of the source.

  moestream export laid.gguf stock.gguf
"""

from __future__ import annotations

import argparse
from typing import Any

from ..layout import export as export_model
from ._output import print_json
from ._written import as_json, written
from .convert import add_output_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `export`."""
    parser.add_argument("laid", metavar="LAID", help="the laid file, or the first of its shards")
    parser.add_argument("stock", metavar="STOCK", help="the file to write")
    add_output_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(*, json: bool, **options: Any) -> int:
    """Runs `export` for the command line and returns the exit code."""
    result = export_model(**options)
    if json:
        print_json(as_json(result))
        return 0
    for note in result.notes:
        print(f"note: {note}")
    print(f"{written([result.path], result.size_bytes, result.seconds)}: {result.tensors} tensors")
    return 0
