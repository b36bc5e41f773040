from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

from ..errors import OptionError


def versions() -> dict[str, str]:
    """The versions of moestream and of the packages around it; `gguf` is there only if something else wants it."""
    found = {}
    for name in ("moestream", "llama-cpp-python", "gguf"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def require_writable(output: str, option: str = "--output") -> None:
    """Refuses an `option` that could not be written, before the work is done."""
    folder = Path(output).parent
    if not folder.is_dir():
        raise OptionError(f"{option} {output}: there is no folder {folder}; make it first")
    if Path(output).is_dir():
        raise OptionError(f"{option} {output}: is a folder; name a file in it")
    if not os.access(folder, os.W_OK):
        raise OptionError(f"{option} {output}: the folder {folder} cannot be written to; name another")


def print_json(value: Any) -> None:
    """Prints one JSON value, and nothing else, to stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def printable(text: str) -> str:
    """The text with U+FFFD in place of what a terminal would take for a command; line ends stay."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def print_columns(
    rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), indent: int = 0, file: TextIO | None = None
) -> None:
    """Prints rows of text in aligned columns, two spaces apart; `printable`, whatever file it came from.

    Args:
        rows: Rows of cells; a row may be shorter than the others. Its last cell may be as long as it likes.
        right: Indices of the columns that are aligned to the right; -1 is the last of the first row.
        indent: Spaces before each line.
        file: Where to print, stdout by default.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    right = {column if column >= 0 else len(rows[0]) + column for column in right} if rows else set()
    widths: dict[int, int] = {}
    for row in rows:
        for column, cell in enumerate(row):
            if column in right or column < len(row) - 1:
                widths[column] = max(widths.get(column, 0), len(cell))
    for row in rows:
        cells = [
            cell.rjust(widths[column]) if column in right else cell.ljust(widths.get(column, 0))
            for column, cell in enumerate(row)
        ]
        print((" " * indent + "  ".join(cells)).rstrip(), file=file)


def progress_bar(what: str, *, total: float, unit: str = "") -> tqdm:
    """A bar on stderr that vanishes when it is done, and is not drawn at all where stderr is no terminal."""
    counter = " {n_fmt}/{total_fmt} " + unit if unit else ""
    return tqdm(
        total=total,
        desc=what,
        bar_format="{desc} {percentage:3.0f}% |{bar:40}|" + counter + " {elapsed}",
        leave=False,
        disable=not sys.stderr.isatty(),
        file=sys.stderr,
    )


class Progress:
    """Bars for what is done one after another, such as loading a model and reading a prompt; each from its first report to its last.

        with Progress(interrupt.requested) as progress:
            generate(..., load_progress=progress.load, prompt_progress=progress.prompt)

    Loading is broken off by a KeyboardInterrupt when `should_stop` says so.
    """

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self._should_stop = should_stop
        self._bar: tqdm | None = None
        self._what = ""
        self._closed = False

    def load(self, share: float) -> None:
        if self._should_stop():
            raise KeyboardInterrupt
        self.show("loading", share, 1.0)

    def prompt(self, done: int, total: int) -> None:
        self.show("prompt", done, total, unit="tokens")

    def __enter__(self) -> Progress:
        self.load(0.0)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Takes the bar away, and draws no other."""
        self._end()
        self._closed = True

    def show(self, what: str, done: float, total: float, unit: str = "") -> None:
        """Moves the bar of `what`, which takes the place of another's."""
        if self._closed:
            return
        if what != self._what:
            self._end()
            self._bar, self._what = progress_bar(what, total=total, unit=unit), what
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        if done == total:
            self._end()

    def hide(self) -> None:
        """Takes the bar away for what is printed now; it comes back with the next report."""
        self._end()

    def validated(self, step: int, loss: float) -> None:
        """Prints a line on how far training is."""
        self.hide()
        print(f"moestream: after {step} steps: loss {loss:.4f} on validation", file=sys.stderr)

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar, self._what = None, ""
