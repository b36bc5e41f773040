"""Read all of a model and check all that can be checked.

Of a laid file every expert has a checksum. Of a stock file nothing is known but
the values: where they are no numbers, something is wrong.

  moestream verify laid.gguf
"""

from __future__ import annotations

import argparse
from typing import Any

from ..layout import VerifyReport
from ..layout import verify as verify_model
from ._output import print_json
from ._written import as_json, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `verify`."""
    parser.add_argument("path", metavar="FILE", help="a laid or a stock file, or the first of its shards")
    parser.add_argument("--check-tensors", action="store_true", help="look at the values in the records too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(*, json: bool, **options: Any) -> int:
    """Runs `verify` for the command line and returns the exit code: 1 if something is damaged."""
    report = verify_model(**options)
    if json:
        print_json({**as_json(report), "ok": report.ok})
    else:
        print(
            f"{report.path}: {'a laid file' if report.laid else 'a stock file'}, {read(report.size_bytes, report.seconds)}"
        )
        print(_verdict(report))
    return 0 if report.ok else 1


def _verdict(report: VerifyReport) -> str:
    if report.first is None:
        return f"All is well: {report.experts} experts, {report.tensors} other tensors."
    experts = f"{report.bad_experts} of {report.experts} experts"
    tensors = f"{report.bad_tensors} of {report.tensors} other tensors"
    return f"DAMAGED: {experts}, {tensors}. The first: {report.first}\nDownload or convert the model again."
