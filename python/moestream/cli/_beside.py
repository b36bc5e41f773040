"""Two texts on a page: beside each other where the terminal is wide, else one below the other."""

from __future__ import annotations

import os
import re
import shutil
import time
import unicodedata
from collections.abc import Sequence
from typing import TextIO

from ._output import printable

_WIDE = 100
_WIDEST = 150
_GAP = 4
_REDRAW_S = 0.03


class Page:
    """Shows two texts while they are written, if `file` is a terminal; else both when it is closed.

    Once it is closed, what was written so far stands below what was there before, and further text is left out.
    """

    def __init__(self, file: TextIO, headings: tuple[Sequence[str], Sequence[str]]) -> None:
        """`headings` are the lines above each text."""
        columns, self._height = shutil.get_terminal_size()
        self._live = file.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._wide = self._live and columns >= _WIDE
        self._width = min(columns, _WIDEST) - 1  # a terminal goes on to the next line after its last column
        self._file = file
        self._headings = headings
        self._texts = ["", ""]
        self._drawn = 0
        self._drawn_at = 0.0
        self._closed = False

    def write(self, which: int, piece: str) -> None:
        """Adds to the first text (0) or to the second (1)."""
        if self._closed:
            return
        self._texts[which] += piece
        if self._live and time.monotonic() - self._drawn_at >= _REDRAW_S:
            self._draw(self._rows()[-(self._height - 1) :])
            self._drawn_at = time.monotonic()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._draw(self._rows() if any(self._texts) else [])

    def _rows(self) -> list[str]:
        if self._wide:
            return beside(self._headings, self._texts, self._width)
        return below(self._headings, self._texts, self._width)

    def _draw(self, rows: list[str]) -> None:
        """Draws rows in place of those drawn before, which are in sight: never more than the terminal has."""
        back = f"\x1b[{self._drawn}F" if self._drawn else ""
        end = "\x1b[K\n" if self._live else "\n"  # not all cleared at first: terminals put that in their history
        self._file.write(back + "".join(row + end for row in rows) + ("\x1b[J" if self._drawn else ""))
        self._file.flush()
        self._drawn = len(rows)


def beside(headings: Sequence[Sequence[str]], texts: Sequence[str], width: int) -> list[str]:
    """Rows of two columns."""
    column = (width - _GAP) // 2
    left, right = ([*heading, "-" * column, *wrap(text, column)] for heading, text in zip(headings, texts, strict=True))
    rows = max(len(left), len(right))
    left, right = (side + [""] * (rows - len(side)) for side in (left, right))
    return [(one + " " * (column - cells(one) + _GAP) + other).rstrip() for one, other in zip(left, right, strict=True)]


def below(headings: Sequence[Sequence[str]], texts: Sequence[str], width: int) -> list[str]:
    """Rows of one column; a text that has not begun is not there yet."""
    rows: list[str] = []
    for heading, text in zip(headings, texts, strict=True):
        if text:
            rows += [*([""] if rows else []), *heading, "-" * max(map(cells, heading)), *wrap(text, width)]
    return rows


def wrap(text: str, width: int) -> list[str]:
    """Rows of at most `width` cells; what a terminal would take for a command is replaced by U+FFFD."""
    text = printable(text.expandtabs(4).strip("\n").removeprefix(" "))
    rows = []
    for line in text.split("\n"):
        row = ""
        for part in re.findall(r" +|[^ ]+", line):
            if row and cells(row) + cells(part) > width:
                rows.append(row.rstrip())
                row = ""
                if part.isspace():
                    continue
            if cells(row) + cells(part) <= width:
                row += part
                continue
            for character in part:  # a word that is longer than a row is broken
                if cells(row) + cells(character) > width:
                    rows.append(row)
                    row = ""
                row += character
        rows.append(row.rstrip())
    return rows


def cells(text: str) -> int:
    """Columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
