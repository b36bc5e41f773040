"""Records as one page: a table, pictures, and everything that the records say.

    write_report(read_records("result.json"), "result.html")

The page needs nothing from elsewhere. docs/benchmarking.md says what its figures mean.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from typing import Any

from .._whole_file import writing_whole
from ..errors import OptionError, OutputError
from . import _figures, _frame
from ._columns import chosen_columns, warnings_by_arm
from ._frame import require_matplotlib
from .record import (
    LLAMA_BENCH_KEYS,
    Record,
    disk_text,
    distinct,
    loss_text,
    machine_text,
    measured_ts,
    test_name,
    whole_record,
)

__all__ = ["require_matplotlib", "write_report"]

# Of one kind of picture; the others are there, folded.
_SHOWN = 4


def write_report(records: Sequence[Record], path: str | os.PathLike[str], *, title: str | None = None) -> None:
    """Writes records as one HTML file. A plot is there if the records have the points for it.

    Raises:
        OptionError: There are no records, or matplotlib is not installed.
        OutputError: The file cannot be written; what was there is as it was.
    """
    if not records:
        raise OptionError("a report needs at least one record")
    require_matplotlib()
    page = _page(records, title or f"Benchmark of {' / '.join(distinct(_model(r) for r in records))}")
    with writing_whole(path, OutputError) as file:
        file.write(page.encode("utf-8", "replace"))


def _page(records: Sequence[Record], title: str) -> str:
    body = [
        f"<h1>{_text(title)}</h1>",
        _conditions(records),
        _warnings(records),
        _table(records),
        *_pictures(records),
        "<h2>Records</h2>",
        *(_record(record) for record in records),
    ]
    return _PAGE.format(title=_text(title), style=_STYLE, body="\n".join(part for part in body if part))


def _text(text: Any) -> str:
    return html.escape(str(text))


def _model(record: Record) -> str:
    return record.get("model_type") or record["model_filename"]


def _conditions(records: Sequence[Record]) -> str:
    same, _ = chosen_columns(records)
    sentences = [
        ", ".join(text for column in same if (text := column.sentence(records[0]))),
        f"{' / '.join(distinct(machine_text(r) for r in records))}; {disk_text(records)}",
    ]
    return "".join(f'<p class="soft">{_text(sentence)}</p>' for sentence in sentences if sentence)


def _warnings(records: Sequence[Record]) -> str:
    items = [
        f"<li>{_text(sentence)}" + (f" <span>({_text(', '.join(arms))})</span>" if arms else "") + "</li>"
        for sentence, arms in warnings_by_arm(records)
    ]
    return f'<div class="warning"><b>Warnings</b><ul>{"".join(items)}</ul></div>' if items else ""


def _table(records: Sequence[Record]) -> str:
    _, columns = chosen_columns(records, wide=True)
    side = ["" if column.right else ' class="left"' for column in columns]
    heading = "".join(f"<th{of}>{_text(column.heading)}</th>" for of, column in zip(side, columns, strict=True))
    rows = []
    for record in records:
        cells = (f"<td{of}>{_text(column.cell(record))}</td>" for of, column in zip(side, columns, strict=True))
        rows.append(f"<tr{' class=bad' if loss_text(record) else ''}>{''.join(cells)}</tr>")
    return f'<div class="wide"><table><thead><tr>{heading}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _pictures(records: Sequence[Record]) -> list[str]:
    styles = _figures.Styles(record["arm"] for record in records)
    found = []
    for name, drawers in _figures.SECTIONS:
        pictures = [picture for draw in drawers for picture in draw(records, styles)]
        drawn = [_figure(picture, f"p{len(found)}-{number}-") for number, picture in enumerate(pictures)]
        if not drawn:
            continue
        more = drawn[_SHOWN:]
        folded = f'<details><summary>{len(more)} more</summary><div class="plots">{"".join(more)}</div></details>'
        found.append(
            f'<h2>{_text(name)}</h2><div class="plots">{"".join(drawn[:_SHOWN])}</div>' + (folded if more else "")
        )
    return found


def _figure(picture: _frame.Picture, prefix: str) -> str:
    drawing = _frame.svg(picture, prefix=prefix, variables=True)
    return f'<figure role="img" aria-label="{_text(picture.title)}">{drawing}</figure>'


def _record(record: Record) -> str:
    """Everything it says; what is not known is left out, and named at the end."""
    whole = whole_record(record)
    known = [key for key, value in whole.items() if value is not None]
    unknown = [key for key in whole if key not in known]
    rows = "".join(f"<tr><th>{_text(key)}</th><td>{_value(key, whole[key])}</td></tr>" for key in known)
    outcome = loss_text(record) or f"{measured_ts(record) or 0:.2f} t/s"
    limit = f", {_frame.limit_text(record)}"
    return (
        f"<details><summary>{_text(record['arm'])}, {_text(test_name(record))}{_text(limit)}: {_text(outcome)}</summary>"
        f'<div class="wide"><table class="record">{rows}</table></div>'
        + (f'<p class="soft">Not known: {_text(", ".join(unknown))}</p>' if unknown else "")
        + "</details>"
    )


def _value(key: str, value: Any) -> str:
    if key == "token_ns":
        rounds = "".join(f"<li>{_text(', '.join(map(str, times)))}</li>" for times in value)
        return f"<details><summary>{sum(map(len, value))} tokens</summary><ol>{rounds}</ol></details>"
    if isinstance(value, dict):
        lines = (f"{name}: {one if isinstance(one, str) else json.dumps(one)}" for name, one in value.items())
        return "<br>".join(map(_text, lines))
    if isinstance(value, list):
        return (
            "<br>".join(map(_text, value))
            if all(isinstance(one, str) for one in value)
            else _text(json.dumps(value)[1:-1])
        )
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _text(f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}")
    if isinstance(value, int) and key not in ("build_number", *LLAMA_BENCH_KEYS[:2]):
        return _text(f"{value:,}")
    return _text(value)


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --panel: #f4f6f9; --ink: #17202c; --soft: #5d6878; --line: #d5dbe4; --bad: #b3261e; --bad-panel: #fdeceb; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #12161d; --panel: #1b212b; --ink: #e4e9f0; --soft: #94a1b3; --line: #313a48; --bad: #ff8a80; --bad-panel: #33191a; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1360px; padding: 14px 20px 40px; background: var(--paper); color: var(--ink); font: 14px/1.5 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 20px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 26px 0 8px; }
p { margin: 2px 0; overflow-wrap: anywhere; }
.soft { color: var(--soft); font-size: 13px; }
.warning { background: var(--bad-panel); border-left: 4px solid var(--bad); padding: 8px 12px; margin: 12px 0; }
.warning b { color: var(--bad); } .warning ul { margin: 2px 0 0; padding-left: 20px; } .warning span { color: var(--soft); }
.wide { overflow-x: auto; margin-top: 12px; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 3px 14px 3px 0; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 500; }
.left { text-align: left; }
.bad td { color: var(--bad); }
.record th, .record td { text-align: left; vertical-align: top; white-space: normal; overflow-wrap: anywhere; } .record th { white-space: nowrap; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 560px), 1fr)); gap: 16px; align-items: start; margin-bottom: 8px; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 4px; padding: 8px; overflow-x: auto; }
figure svg { display: block; width: 100%; height: auto; min-width: 430px; max-width: 720px; }
figure svg text { font-family: "DejaVu Sans", Verdana, sans-serif !important; }
details { margin: 4px 0; } summary { cursor: pointer; }
details details summary { color: var(--soft); }
details > .wide { margin: 4px 0 10px 16px; }
ol { margin: 4px 0; padding-left: 22px; font-size: 12px; }
@media (max-width: 640px) { body { padding: 10px 10px 30px; } figure { padding: 4px; } }
"""
