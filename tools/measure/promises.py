"""Figures that are counts of tests passed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from dataclasses import dataclass
from pathlib import Path

from .figure import MeasurementError, note

__all__ = ["Outcome", "outcomes"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """A test that ran."""

    name: str
    passed: bool


def outcomes(test: str, *, wanted: str | None = None) -> list[Outcome]:
    """Runs the tests of a file, those that `wanted` (an expression for pytest -k) names. Skipped ones are told on standard error and left out.

    Raises:
        MeasurementError: pytest ran none.
    """
    with tempfile.NamedTemporaryFile(suffix=".xml") as file:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            f"--junit-xml={file.name}",
            str(ROOT / test),
        ]
        command += ["-k", wanted] if wanted else []
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        try:
            cases = list(xml.etree.ElementTree.parse(file.name).iter("testcase"))
        except xml.etree.ElementTree.ParseError as error:
            raise MeasurementError(
                f"pytest {test} ended with {answer.returncode}: {(answer.stdout + answer.stderr)[-600:]}"
            ) from error
    found = []
    for case in cases:
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        if outcome != "passed":
            note(f"{case.get('name')}: {outcome}: {case.find(outcome).get('message', '')[:300]}")
        if outcome != "skipped":
            found.append(Outcome(case.get("name", ""), outcome == "passed"))
    if not found:
        raise MeasurementError(f"pytest {test} ran no test: {(answer.stdout + answer.stderr)[-600:]}")
    return found
