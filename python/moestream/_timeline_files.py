"""The files a timeline is written as: a page, Chrome's trace format, a NumPy archive."""

from __future__ import annotations

import base64
import dataclasses
import html
import importlib.resources
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ._timeline_events import EventKind, Outcome
from ._timeline_summary import evaluations_of, window_of_events, windows_of
from ._whole_file import writing_whole
from .errors import OptionError, OutputError

if TYPE_CHECKING:
    from .timeline import Timeline

__all__ = ["require_suffix", "write"]

_COLUMNS = {
    "begin": np.uint32,
    "duration": np.uint32,
    "evaluation": np.int32,
    "bytes": np.uint32,
    "block": np.int32,
    "expert": np.int32,
    "window": np.int32,
    "kind": np.uint8,
    "outcome": np.uint8,
}


def write(timeline: Timeline, path: Path) -> None:
    """See `Timeline.write`."""
    require_suffix(path)
    with writing_whole(path, OutputError) as file:
        _WRITERS[path.suffix](timeline, file)


def require_suffix(path: Path) -> None:
    """Raises OptionError unless the name says what is to be written."""
    if path.suffix not in _WRITERS:
        raise OptionError(
            f"{path}: a timeline is written as .html (a page), .json (for Perfetto) or .npz (arrays): "
            "give a name that ends in one of these"
        )


def _header(timeline: Timeline) -> dict[str, Any]:
    """All but the events."""
    fields = dataclasses.fields(timeline)
    return {field.name: getattr(timeline, field.name) for field in fields if field.name != "events"}


# ------------------------------------------------------------ .npz


def _write_npz(timeline: Timeline, file: BinaryIO) -> None:
    text = np.frombuffer(json.dumps(_header(timeline), ensure_ascii=False).encode(), np.uint8)
    np.savez_compressed(file, header=text, events=timeline.events)


# ------------------------------------------------------------ .json


def _write_json(timeline: Timeline, file: BinaryIO) -> None:
    """Chrome's trace format: complete events ("X"), times in microseconds; what overlaps is on threads of its own."""
    value = {
        "traceEvents": list(_trace_events(timeline)),
        "displayTimeUnit": "ms",
        "otherData": {name: str(value) for name, value in _header(timeline).items() if name != "tokens"},
    }
    file.write(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())


def _trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    events = timeline.events
    start = int(events["begin_ns"].min()) if len(events) else 0
    reads, computing = events[events["kind"] == EventKind.READ], events[events["kind"] != EventKind.READ]
    rows = _rows(reads)
    threads = [("compute", 1, 1, "tokens"), ("compute", 1, 2, "layers")]
    threads += [("I/O", 2, row + 1, f"reads {row + 1}") for row in range(int(rows.max()) + 1 if len(rows) else 1)]
    for process, pid, tid, thread in threads:
        for kind, name in (("process", f"{process}, {timeline.model}"), ("thread", thread)):
            yield {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}
            order = pid if kind == "process" else tid
            yield {"ph": "M", "name": f"{kind}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": order}}

    def complete(name: str, what: str, begin: Any, end: Any, pid: int, tid: int, **args: Any) -> dict[str, Any]:
        times = {"ts": (int(begin) - start) / 1e3, "dur": int(end - begin) / 1e3}
        return {"ph": "X", "name": name, "cat": what, "pid": pid, "tid": tid, **times, "args": args}

    for begin, end, label in _evaluations(timeline):
        yield complete(label, "token", begin, end, 1, 1)
    for event in computing:
        name = EventKind(event["kind"]).name.lower()
        layer = {"layer": int(event["block"])} if event["block"] >= 0 else {}
        title = f"{name} {layer['layer']}" if layer else name
        args = {**layer, "tokens": int(event["tokens"])}
        yield complete(title, name, event["begin_ns"], event["end_ns"], 1, 2, **args)
    for row, event in zip(rows, reads, strict=True):
        outcome, layer, expert = Outcome(event["outcome"]).name.lower(), int(event["block"]), int(event["expert"])
        args = {"layer": layer, "expert": expert, "outcome": outcome, "bytes": int(event["bytes"])}
        title = f"{outcome} L{layer} e{expert}"
        yield complete(title, outcome, event["begin_ns"], event["end_ns"], 2, int(row) + 1, **args)


def _rows(events: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """For each event the first row in which nothing else lasts when it begins."""
    rows, ends = np.zeros(len(events), np.int64), []
    for i in np.argsort(events["begin_ns"], kind="stable"):
        row = next((row for row, end in enumerate(ends) if end <= events["begin_ns"][i]), len(ends))
        ends[row : row + 1] = [events["end_ns"][i]]
        rows[i] = row
    return rows


def _evaluations(timeline: Timeline) -> Iterator[tuple[int, int, str]]:
    """Of each evaluation its begin, its end and a label."""
    done = 0
    for number, evaluation in enumerate(evaluations_of(timeline.events)[0]):
        n = int(evaluation["tokens"])
        text = "".join(timeline.tokens[done : done + n])
        done += n
        label = f"token {number}" if n == 1 else f"prompt, {n} tokens"
        yield int(evaluation["begin"]), int(evaluation["end"]), f"{label}: {text}" if text else label


# ------------------------------------------------------------ .html


def _write_html(timeline: Timeline, file: BinaryIO) -> None:
    """One page that holds its style, its script and the data."""
    parts = importlib.resources.files("moestream").joinpath("timeline_page")
    data = json.dumps(page_data(timeline), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    page = parts.joinpath("page.html").read_text(encoding="utf-8")
    for mark, text in (
        ("{{title}}", html.escape(timeline.model)),
        ("{{style}}", parts.joinpath("page.css").read_text(encoding="utf-8")),
        ("{{script}}", parts.joinpath("page.js").read_text(encoding="utf-8")),
        ("{{data}}", data.replace("<", "\\u003c")),  # last: what it holds is not looked at any more
    ):
        page = page.replace(mark, text, 1)
    file.write(page.encode())


def page_data(timeline: Timeline) -> dict[str, Any]:
    """What the page draws: columns of events as base64, the windows of layers, evaluations, and the sums."""
    events = timeline.events[np.argsort(timeline.events["begin_ns"], kind="stable")]
    start = int(events["begin_ns"][0]) if len(events) else 0
    span = int(events["end_ns"].max()) - start if len(events) else 0
    tick = span // (2**32 - 1) + 1
    windows = windows_of(events)
    columns = {
        "window": window_of_events(windows, events),
        "evaluation": evaluations_of(events)[1],
        "begin": (events["begin_ns"] - start) // tick,
        "duration": (events["end_ns"] - events["begin_ns"]) // tick,
        **{name: events[name] for name in events.dtype.names if name in _COLUMNS},
    }
    decode = timeline.summary("decode")
    phase = "decode" if decode.evaluations else "prompt"
    summary = decode if phase == "decode" else timeline.summary("prompt")
    times = [name for name in windows.dtype.names if name.endswith(("_begin", "_end"))]
    return {
        **_header(timeline),
        "tick_ns": tick,
        "span_ns": span,
        "n_events": len(events),
        "columns": {
            name: base64.b64encode(np.ascontiguousarray(columns[name], np.dtype(kind).newbyteorder("<"))).decode()
            for name, kind in _COLUMNS.items()
        },
        "windows": {
            **{name: [int(value) - start if value else None for value in windows[name]] for name in times},
            **{name: windows[name].tolist() for name in windows.dtype.names if name not in times},
        },
        "evaluations": [
            {"begin": begin - start, "end": end - start, "label": label} for begin, end, label in _evaluations(timeline)
        ],
        "phase": phase,
        "summary": {
            **dataclasses.asdict(summary),
            "tokens_per_s": summary.tokens_per_s,
            "rest_s": summary.rest_s,
        },
    }


_WRITERS: dict[str, Callable[[Timeline, BinaryIO], None]] = {
    ".html": _write_html,
    ".json": _write_json,
    ".npz": _write_npz,
}
