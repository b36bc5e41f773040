"""Records as md, csv, json, jsonl and sql, as llama-bench writes them, with our columns behind its own.

    with writer("json", sys.stdout) as out:
        out.record(record)          # as soon as it is finished: what is written stays, whatever comes

docs/benchmarking.md says what the columns are.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Literal, TextIO, get_args

from ..errors import OptionError
from ._columns import Column, chosen_columns, warnings_by_arm
from .record import (
    FLAT,
    Record,
    disk_text,
    distinct,
    flat_value,
    kind_of,
    machine_text,
    whole_record,
)

__all__ = ["Format", "Writer", "writer"]

Format = Literal["md", "csv", "json", "jsonl", "sql"]

_TEXT_WIDTH = 118


class Writer:
    """Writes records to a stream, which stays open. `close` ends the table or the array; twice is once.

    Attributes:
        written: Records so far.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.written = 0
        self._closed = False
        self._begin()

    def record(self, record: Record) -> None:
        """Writes one record and hands it to the system."""
        self._add(record)
        self.written += 1
        self._stream.flush()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._end()
            self._stream.flush()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        """What comes before the first record."""

    def _add(self, record: Record) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        """What comes behind the last one."""


def writer(format: Format, stream: TextIO) -> Writer:
    """A writer of that format.

    Raises:
        OptionError: Another format.
    """
    if format not in _WRITERS:
        raise OptionError(f"output format {format!r}: expected one of {', '.join(get_args(Format))}")
    return _WRITERS[format](stream)


class _Csv(Writer):
    """Everything is quoted, as llama-bench does, except for what is not known, of which there is nothing."""

    def _begin(self) -> None:
        self._stream.write(",".join(FLAT) + "\n")

    def _add(self, record: Record) -> None:
        values = (flat_value(record, key) for key in FLAT)
        self._stream.write(",".join("" if v is None else '"' + v.replace('"', '""') + '"' for v in values) + "\n")


class _Sql(Writer):
    def _begin(self) -> None:
        types = {"int": "INTEGER", "bool": "INTEGER", "float": "REAL"}
        columns = ",\n".join(f"  {key} {types.get(kind_of(key), 'TEXT')}" for key in FLAT)
        self._stream.write(f"CREATE TABLE IF NOT EXISTS llama_bench (\n{columns}\n);\n\n")

    def _add(self, record: Record) -> None:
        values = (flat_value(record, key) for key in FLAT)
        quoted = ("NULL" if v is None else "'" + v.replace("'", "''") + "'" for v in values)
        self._stream.write(f"INSERT INTO llama_bench ({', '.join(FLAT)}) VALUES ({', '.join(quoted)});\n")


class _Json(Writer):
    def _begin(self) -> None:
        self._stream.write("[\n")

    def _add(self, record: Record) -> None:
        values = whole_record(record).items()
        lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in values)
        self._stream.write((",\n" if self.written else "") + "  {\n" + lines + "\n  }")

    def _end(self) -> None:
        self._stream.write("\n]\n")


class _JsonLines(Writer):
    def _add(self, record: Record) -> None:
        self._stream.write(json.dumps(whole_record(record)) + "\n")


# Markdown, for people


class _Markdown(Writer):
    """The table is printed at the end: only then is it known which columns vary and how wide they are.

    What is the same in all records stands in front of the table, not in each of its rows.
    """

    def _begin(self) -> None:
        self._records: list[Record] = []

    def _add(self, record: Record) -> None:
        self._records.append(record)

    def _end(self) -> None:
        if not self._records:
            return
        same, columns = chosen_columns(self._records)
        self._paragraph(", ".join(text for c in same if (text := c.sentence(self._records[0]))))
        machines = distinct(machine_text(r) for r in self._records)
        self._paragraph(f"{' / '.join(machines)}; {disk_text(self._records)}")
        self._stream.write(_table(columns, self._records) + "\n")
        for sentence, arms in warnings_by_arm(self._records):
            self._paragraph(f"- warning: {sentence}" + (f" ({', '.join(arms)})" if arms else ""), end="\n")
        if warnings_by_arm(self._records):
            self._stream.write("\n")
        for build in distinct((r.get("build_commit"), r.get("build_number")) for r in self._records):
            self._stream.write(f"build: {build[0] or 'unknown'} ({build[1] or 0})\n")

    def _paragraph(self, text: str, *, end: str = "\n\n") -> None:
        if text:
            lines = textwrap.wrap(" ".join(text.split()), _TEXT_WIDTH, break_long_words=False, break_on_hyphens=False)
            self._stream.write("\n".join(lines) + end)


def _table(columns: Sequence[Column], records: Sequence[Record]) -> str:
    rows = [[" ".join(c.cell(r).replace("|", "\\|").split()) for c in columns] for r in records]
    widths = [max(len(c.heading), *(len(row[i]) for row in rows)) for i, c in enumerate(columns)]
    lines = [[c.heading for c in columns], *rows]
    padded = [[_padded(*cell) for cell in zip(line, widths, columns, strict=True)] for line in lines]
    rule = ["-" * (w - 1) + (":" if c.right else "-") for w, c in zip(widths, columns, strict=True)]
    return "".join("| " + " | ".join(line) + " |\n" for line in (padded[0], rule, *padded[1:]))


def _padded(text: str, width: int, column: Column) -> str:
    return text.rjust(width) if column.right else text.ljust(width)


_WRITERS: dict[str, type[Writer]] = {"md": _Markdown, "csv": _Csv, "json": _Json, "jsonl": _JsonLines, "sql": _Sql}
