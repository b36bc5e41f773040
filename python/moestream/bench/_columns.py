"""The columns of the tables for people: what was measured under which conditions, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .record import Record, distinct, measured_ts, outcome_text, rate_text, short_size, test_name

__all__ = ["Column", "chosen_columns", "warnings_by_arm"]


@dataclass(frozen=True)
class Column:
    """A column: its heading, its cell of a record ("" if there is nothing to say), and how it is put where it is the same in all.

    What is as usual is not put.
    """

    heading: str
    cell: Callable[[Record], str]
    said: str = "{}"
    usual: str = ""
    right: bool = True
    always: bool = False
    wide: bool = False
    """For where there is room: not in a terminal."""

    def sentence(self, record: Record) -> str:
        cell = self.cell(record)
        return self.said.format(cell) if cell and cell != self.usual else ""


def chosen_columns(records: Sequence[Record], *, wide: bool = False) -> tuple[list[Column], list[Column]]:
    """Conditions that are the same in all records, and the columns of their table: conditions that vary, and results."""
    varies = [c for c in _CONDITIONS if len(distinct(c.cell(r) for r in records)) > 1]
    results = [c for c in _RESULTS if (wide or not c.wide) and (c.always or any(c.cell(r) for r in records))]
    return [c for c in _CONDITIONS if c not in varies], [*varies, *results]


def warnings_by_arm(records: Iterable[Record]) -> list[tuple[str, list[str]]]:
    """Each warning once, and each outcome that is none, with the arms it is about; no arms: it is about all of them."""
    records = list(records)
    found: dict[str, list[str]] = {}
    for record in records:
        sentences = list(record.get("warnings") or ())
        if outcome_text(record) and record.get("outcome_message"):
            sentences.append(record["outcome_message"])
        for sentence in sentences:
            found.setdefault(sentence, []).append(record["arm"])
    everyone = len(distinct(r["arm"] for r in records))
    named = {sentence: distinct(arms) for sentence, arms in found.items()}
    return [(s, arms if len(arms) < everyone or everyone == 1 else []) for s, arms in named.items()]


def _size(size_bytes: int | None) -> str:
    """As llama-bench writes it."""
    if size_bytes is None:
        return ""
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.2f} MiB"


def _params(n: int | None) -> str:
    if n is None:
        return ""
    return f"{n / 1e9:.2f} B" if n >= 10**9 else f"{n / 1e6:.2f} M"


def _speed(record: Record) -> str:
    speed, outcome = measured_ts(record), outcome_text(record)
    if speed is None:
        return outcome
    return f"{outcome}: {speed:.2f}" if outcome else f"{speed:.2f} ± {record.get('stddev_ts') or 0:.2f}"


def _memory(record: Record) -> str:
    """Peak memory and size on disk; one says little without the other."""
    rss, disk = record.get("peak_rss"), record.get("bytes_on_disk")
    if rss is None or disk is None:
        return ""
    unit, divisor = ("GiB", 2**30) if disk >= 2**30 else ("MiB", 2**20)
    return f"{rss / divisor:.1f}/{disk / divisor:.1f} {unit}"


def _number(key: str, form: Callable[[Any], str]) -> Callable[[Record], str]:
    return lambda record: "" if record.get(key) is None else form(record[key])


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


_CONDITIONS = (
    Column("model", lambda r: r.get("model_type") or r.get("model_filename") or "", right=False),
    Column("size", _number("model_size", _size)),
    Column("params", _number("model_n_params", _params), said="{} parameters"),
    Column("backend", lambda r: r.get("backends") or "", right=False),
    Column("threads", _number("n_threads", str), said="{} threads"),
    Column("n_batch", _number("n_batch", str), said="batch {}", usual="2048"),
    Column("n_ubatch", _number("n_ubatch", str), said="ubatch {}", usual="512"),
    Column("type_k", lambda r: r.get("type_k") or "", said="K cache {}", usual="f16", right=False),
    Column("type_v", lambda r: r.get("type_v") or "", said="V cache {}", usual="f16", right=False),
    Column("workload", lambda r: r.get("workload") or "", right=False),
    Column("routing", lambda r: r.get("routing") or "", said="routing: {}", usual="own", right=False),
    Column(
        "memory", lambda r: short_size(r["memory_limit"]) if r.get("memory_limit") else "no limit", said="memory: {}"
    ),
    Column(
        "disk",
        lambda r: rate_text(r["disk_bps_limit"]) if r.get("disk_bps_limit") else "as it is",
        said="disk: {}",
    ),
)


def _ms(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}"


_RESULTS = (
    Column("arm", lambda r: r["arm"], right=False, always=True),
    Column("test", test_name, always=True),
    Column("t/s", _speed, always=True),
    Column("hits", _number("hit_rate", _percent)),
    Column("p50 ms", _number("p50_ms", _ms), wide=True),
    Column("p95 ms", _number("p95_ms", _ms)),
    Column("p99 ms", _number("p99_ms", _ms), wide=True),
    Column("load s", _number("load_s", "{:.2f}".format), wide=True),
    Column("first token s", _number("first_token_s", "{:.2f}".format), wide=True),
    Column("RSS / on disk", _memory),
    Column("limit", _number("limit_share", _percent)),
)
