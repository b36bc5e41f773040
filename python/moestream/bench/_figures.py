"""The pictures of a report: what is drawn from which records. Each drawer gives none where the records lack the points for it."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._frame import INK, LINE, PAPER, SOFT, Picture, framed, legend, limit_text, patch, stroke
from .record import Record, distinct, loss_text, measured_ts, rate_text, test_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "SECTIONS",
    "Styles",
    "arm_line",
    "by_cache",
    "by_depth",
    "by_disk",
    "by_memory",
    "memory_against_disk",
    "time_by_part",
    "token_times",
]

# Okabe and Ito's colours, which the colour-blind tell apart (Color Universal Design, 2008), without black and the pale yellow;
# the dark ones first, since they are seen best on white.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_MARKERS = "osD^vPX"
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
# Other colours than the arms', near those of Tol's "muted" set (2021), but seen on dark too.
_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("attention_ms", {"facecolor": "#5b55b8"}),
    "router": ("router_ms", {"facecolor": "#ddcc77"}),
    "experts": ("compute_ms", {"facecolor": "#117733"}),
    "waiting for experts": ("wait_ms", {"facecolor": "#cc6677", "hatch": "////", "edgecolor": PAPER}),
    "other": ("other_ms", {"facecolor": "#aab4c1"}),
}
_UNTOLD = {"facecolor": LINE, "edgecolor": SOFT}


class Styles:
    """The colour and the marker of each arm: the same in all pictures. Sizes of a cache are no arms of their own."""

    def __init__(self, arms: Iterable[str]) -> None:
        self._lines = distinct(arm_line(arm) for arm in arms)

    def of(self, arm: str) -> dict[str, Any]:
        number = self._lines.index(arm_line(arm))
        return {"color": _COLOURS[number % len(_COLOURS)], "marker": _MARKERS[number % len(_MARKERS)]}


def arm_line(arm: str) -> str:
    """The arm without the size of its cache: arms that are points of one line."""
    return ":".join(part for part in arm.split(":") if not part.startswith("cache="))


# Speed against something


def by_memory(records: Sequence[Record], styles: Styles) -> Iterator[Picture]:
    """Tokens a second by memory limit, a line an arm."""
    for group in _groups(records, "memory_limit"):
        yield from _speeds(group, styles, "memory_limit", "memory limit (GiB)", "Speed by memory limit", scale=2**30)


def by_cache(records: Sequence[Record], styles: Styles) -> Iterator[Picture]:
    """Tokens a second by cache size, a line an arm without the size of its cache; arms without a cache are level lines."""
    for group in _groups(records, "cache_bytes"):
        yield from _speeds(group, styles, "cache_bytes", "expert cache (GiB)", "Speed by cache size", scale=2**30)


def by_depth(records: Sequence[Record], styles: Styles) -> Iterator[Picture]:
    for group in _groups(records, "n_depth"):
        yield from _speeds(group, styles, "n_depth", "context depth (tokens)", "Speed by context depth")


def by_disk(records: Sequence[Record], styles: Styles) -> Iterator[Picture]:
    """By the limit of the disk; where there is none, by the rate measured before."""
    for group in _groups(records, "disk_bps_limit"):
        rated = [{**r, "_rate": r.get("disk_bps_limit") or r.get("disk_bps_before")} for r in group]
        yield from _speeds(rated, styles, "_rate", "disk: limit, or rate measured (GB/s)", "Speed by disk", scale=1e9)


def _groups(records: Sequence[Record], varied: str) -> list[list[Record]]:
    """Records that differ in nothing but `varied` and the arm."""
    found: dict[str, list[Record]] = {}
    for record in records:
        held = {key: record.get(key) for key in _HELD if key != varied}
        held["machine"] = (record.get("machine") or {}).get("cores_usable")
        found.setdefault(repr(held), []).append(record)
    return list(found.values())


# Not the file: a laid file and the stock file that it was made of are one model.
_HELD = ("model_type", "model_n_params", "n_prompt", "n_gen", "n_depth", "n_threads", "n_batch", "n_ubatch") + (
    "type_k",
    "type_v",
    "workload",
    "routing",
    "memory_limit",
    "disk_bps_limit",
    "cpu_info",
)


def _speeds(
    records: Sequence[Record], styles: Styles, key: str, label: str, title: str, *, scale: float = 1
) -> Iterator[Picture]:
    """None if no arm was measured at two places."""
    lines: dict[str, list[Record]] = {}
    for record in records:
        lines.setdefault(arm_line(record["arm"]) if key == "cache_bytes" else record["arm"], []).append(record)
    level = {arm: ones for arm, ones in lines.items() if all(r.get(key) is None for r in ones)}
    lines = {arm: [r for r in ones if r.get(key) is not None] for arm, ones in lines.items() if arm not in level}
    if not any(len(distinct(r[key] for r in ones)) > 1 for ones in lines.values()):
        return
    if key != "cache_bytes":
        level = {}
    with framed(f"{title}, {test_name_of(records, key)}", _used(lines, level), 2.7) as (picture, axes):
        places = sorted({r[key] / scale for ones in lines.values() for r in ones})
        handles: list[Any] = []
        for arm, ones in lines.items():
            ones = sorted(ones, key=lambda r: r[key])
            handles += _speed_line(axes, [r[key] / scale for r in ones], ones, arm, styles.of(arm))
        for arm, ones in level.items():
            for record in ones:
                style = {"color": styles.of(arm)["color"], "linewidth": 1, "linestyle": (0, (4, 2))}
                name = f"{arm}: {loss_text(record)}" if loss_text(record) else f"{arm} (no cache)"
                handles.append(axes.axhline(_speed(record), label=name, **style))
        if len(places) > 2 and places[0] > 0 and places[-1] / places[0] > 20:
            axes.set_xscale("log")
        axes.set_xticks(places, [f"{round(place, 2):g}" for place in places])
        axes.minorticks_off()
        axes.set_xlabel(label)
        axes.set_ylabel("tokens a second")
        axes.set_ylim(bottom=0)
        legend(axes, handles)
    yield picture


def _speed_line(
    axes: Axes, places: Sequence[float], records: Sequence[Record], arm: str, style: dict[str, Any]
) -> list[Any]:
    """Through what was measured. What was not is a cross at 0, and breaks the line. Gives what the legend is to show."""
    outcomes = [loss_text(r) for r in records]
    speeds = [math.nan if outcome else _speed(r) for r, outcome in zip(records, outcomes, strict=True)]
    handles = []
    if not all(outcomes):
        spread = [r.get("stddev_ts") or 0 for r in records]
        line = {"linewidth": 1.6, "markersize": 5, "capsize": 2.5, "elinewidth": 1, **style}
        handles.append(axes.errorbar(places, speeds, spread, label=arm, **line))
    cross = {"linestyle": "", "marker": "x", "markersize": 8, "markeredgewidth": 2.2, "color": style["color"]}
    for outcome in distinct(filter(None, outcomes)):
        of = [(x, _speed(r)) for x, r, which in zip(places, records, outcomes, strict=True) if which == outcome]
        label = f"{arm}: {outcome}"
        handles += axes.plot(*zip(*of, strict=True), label=label, clip_on=False, zorder=5, **cross)
    return handles


def _speed(record: Record) -> float:
    """0 of an arm that was killed or failed."""
    return measured_ts(record) or 0.0


def test_name_of(records: Sequence[Record], varied: str) -> str:
    return test_name({**records[0], "n_depth": 0} if varied == "n_depth" else records[0])


def _used(*lines: dict[str, list[Record]]) -> list[Record]:
    return [record for each in lines for ones in each.values() for record in ones]


# By arm


def memory_against_disk(records: Sequence[Record], styles: Styles) -> Iterator[Picture]:
    """Peak memory and size on disk of each arm, side by side."""
    for group in _by_model(records):
        rows = _rows([r for r in group if r.get("peak_rss") is not None and r.get("bytes_on_disk") is not None])
        if not rows:
            continue
        used = [record for _, record in rows]
        with framed("Memory against disk", used, 0.36 * len(rows) + 0.25) as (picture, axes):
            for y, (_, record) in enumerate(rows):
                style = styles.of(record["arm"])
                disk, rss, limit = (record.get(key) for key in ("bytes_on_disk", "peak_rss", "memory_limit"))
                axes.barh(y + 0.19, rss / 2**30, 0.34, color=style["color"])
                axes.barh(
                    y - 0.19, disk / 2**30, 0.34, color=PAPER, edgecolor=style["color"], hatch="/////", linewidth=0.8
                )
                if limit:
                    axes.plot([limit / 2**30] * 2, [y, y + 0.4], color=INK, linewidth=2)
                note = f"{rss / 2**30:.2f}" + (f", {loss_text(record)}" if loss_text(record) else "")
                _note(axes, max(rss, limit or 0) / 2**30, y + 0.19, note)
                _note(axes, disk / 2**30, y - 0.19, f"{disk / 2**30:.2f}")
            _name_rows(axes, rows)
            axes.set_xlabel("GiB")
            keys = [
                patch("peak RSS", facecolor=SOFT),
                patch("on disk", facecolor=PAPER, edgecolor=SOFT, hatch="/////"),
            ]
            legend(axes, [*keys, *([stroke("memory limit")] if any(r.get("memory_limit") for r in used) else [])])
        yield picture


def time_by_part(records: Sequence[Record], styles: Styles) -> Iterator[Picture]:
    """Where the time of a token goes; of stock arms, which do not tell, the whole."""
    for group in _by_test(records):
        if not group[0].get("n_gen") or not any(r.get("wait_ms") is not None for r in group):
            continue
        rows = _rows([r for r in group if measured_ts(r) or loss_text(r)])
        with framed(
            f"Time of a token by part, {test_name(group[0])}{_limits({**group[0], 'memory_limit': None})}",
            [r for _, r in rows],
            0.3 * len(rows) + 0.25,
        ) as (picture, axes):
            for y, (_, record) in enumerate(rows):
                _parts_of_row(axes, y, record)
            _name_rows(axes, rows)
            axes.set_xlabel("ms a token")
            keys = [patch(name, **style) for name, (_, style) in _PARTS.items()]
            if any(r.get("wait_ms") is None and measured_ts(r) for _, r in rows):
                keys.append(patch("not told apart (stock)", **_UNTOLD))
            legend(axes, keys)
        yield picture


def _parts_of_row(axes: Axes, y: int, record: Record) -> None:
    speed = measured_ts(record)
    if not speed:
        _outcome_of_row(axes, y, record)
        return
    end = 0.0
    if record.get("wait_ms") is None:
        end = 1e3 / speed
        axes.barh(y, end, 0.62, linewidth=0.8, **_UNTOLD)
    else:
        for key, style in _PARTS.values():
            width = record.get(key) or 0.0
            axes.barh(y, width, 0.62, left=end, linewidth=0, **style)
            end += width
    _note(axes, end, y, f"{_short_ms(end)} ms")


def _note(axes: Axes, x: float, y: float, text: str, points: float = 4) -> None:
    """Text on the right of a place."""
    axes.annotate(text, (x, y), (points, 0), textcoords="offset points", va="center", fontsize=7)


def _outcome_of_row(axes: Axes, y: float, record: Record) -> None:
    axes.plot([0], [y], marker="x", markersize=7, markeredgewidth=2, color=INK, clip_on=False)
    _note(axes, 0, y, loss_text(record), 8)


def _short_ms(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


# Times of tokens

_SHARES = (0, 50, 90, 95, 99, 99.9)
_MARKED = (50, 95, 99)


def token_times(records: Sequence[Record], styles: Styles) -> Iterator[Picture]:
    """What share of tokens took no longer than so long; the slow ones, which are few, have as much room as the others."""
    for group in _by_conditions(records):
        timed = [
            (r, np.sort(np.concatenate(r["token_ns"])) / 1e6)
            for r in group
            if sum(map(len, r.get("token_ns") or ())) > 1
        ]
        if not timed or not group[0].get("n_gen"):
            continue
        others = [r for r in group if loss_text(r) and not any(r is one for one, _ in timed)]
        used = [r for r, _ in timed] + others
        with framed(f"Time of tokens, {test_name(group[0])}{_limits(group[0])}", used, 2.9) as (picture, axes):
            lines: dict[str, int] = {}
            for record, times in timed:
                again = lines[arm_line(record["arm"])] = lines.get(arm_line(record["arm"]), -1) + 1
                _distribution(axes, record, times, styles, _DASHES[again % len(_DASHES)])
            for record in others:
                axes.plot(
                    [],
                    [],
                    "x",
                    color=styles.of(record["arm"])["color"],
                    label=f"{record['arm']}: {loss_text(record)}",
                )
            axes.set_xscale("log")
            _plain_ticks(axes, [ms for _, times in timed for ms in (times[0], times[-1])])
            axes.set_yticks([_depth(share) for share in _SHARES], [f"{share:g}%" for share in _SHARES])
            axes.set_ylim(0, _depth(99.95))
            axes.set_xlabel("ms a token; the markers are p50, p95 and p99")
            axes.set_ylabel("of tokens took no longer")
            legend(axes)
        yield picture


def _distribution(axes: Axes, record: Record, times: Any, styles: Styles, dashes: Any) -> None:
    style = styles.of(record["arm"])
    shares = 100 * np.linspace(0, 1, len(times), endpoint=False)
    kept = np.unique(
        np.r_[np.linspace(0, len(times) - 1, 150).astype(int), np.arange(max(0, len(times) - 60), len(times))]
    )
    outcome = f": {loss_text(record)}" if loss_text(record) else ""
    depths = [_depth(share) for share in shares[kept]]
    axes.plot(times[kept], depths, color=style["color"], linestyle=dashes, linewidth=1.5)
    marks = np.percentile(times, _MARKED)
    axes.plot(marks, [_depth(share) for share in _MARKED], linestyle="", markersize=5.5, **style)
    axes.plot([], [], linewidth=1.5, linestyle=dashes, label=record["arm"] + outcome, **style)


def _depth(share: float) -> float:
    """Where a percentage stands: 0, 90, 99, 99.9 at equal distances."""
    return -math.log10(max(1 - share / 100, 1e-6))


def _plain_ticks(axes: Axes, values: Sequence[float]) -> None:
    """1, 2, 5, 10, ... as far as the values go, three at least, in place of powers of ten."""
    low, high = min(values) * 0.9, max(values) * 1.1
    steps = [s * 10.0**e for e in range(-4, 8) for s in (1, 2, 5)]
    fine = [s * 10.0**e for e in range(-4, 8) for s in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)]
    ticks = [tick for tick in steps if low <= tick <= high]
    ticks = ticks if len(ticks) >= 3 else [tick for tick in fine if low <= tick <= high]
    axes.set_xlim(low, high)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


# What they share

Drawer = Callable[[Sequence[Record], Styles], Iterator[Picture]]

SECTIONS: tuple[tuple[str, tuple[Drawer, ...]], ...] = (
    ("Speed", (by_memory, by_cache, by_depth, by_disk)),
    ("Memory against disk", (memory_against_disk,)),
    ("Times of tokens", (token_times,)),
    ("Where the time of a token goes", (time_by_part,)),
)


def _by_model(records: Sequence[Record]) -> list[list[Record]]:
    """One record of an arm and a limit: memory hardly depends on the test, and the most it took is shown."""
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        group = found.setdefault(
            repr((record.get("model_type"), record.get("model_n_params"), record.get("cpu_info"))), {}
        )
        row = repr((record["arm"], record.get("memory_limit")))
        if (record.get("peak_rss") or 0) >= (group.get(row, {}).get("peak_rss") or 0):
            group[row] = record
    return [list(group.values()) for group in found.values()]


def _by_test(records: Sequence[Record]) -> list[list[Record]]:
    """All memory limits of a test in one picture."""
    return _groups(records, "memory_limit")


def _by_conditions(records: Sequence[Record]) -> list[list[Record]]:
    return _groups(records, "arm")


def _rows(records: Sequence[Record]) -> list[tuple[str, Record]]:
    """Names of rows, with the memory limit where there are several."""
    several = len(distinct(r.get("memory_limit") for r in records)) > 1
    name = lambda r: f"{r['arm']}, {limit_text(r)}".replace(" GiB", "\u00a0GiB") if several else r["arm"]  # noqa: E731
    return [(name(r), r) for r in records]


def _limits(record: Record) -> str:
    """For a title: what tells apart pictures that are otherwise of the same."""
    memory = f", {limit_text(record)} of memory" if record.get("memory_limit") else ""
    return memory + (f", {rate_text(record['disk_bps_limit'])}" if record.get("disk_bps_limit") else "")


def _name_rows(axes: Axes, rows: Sequence[tuple[str, Record]]) -> None:
    axes.set_yticks(range(len(rows)), [_wrapped(name) for name, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    # Room for what is written on the right of bars: 4.2 points a letter, on axes of 310 points at least.
    ends = [float(axes.dataLim.x1)]
    ends += [note.xy[0] / (1 - min(0.6, (4.2 * len(note.get_text()) + 8) / 310)) for note in _notes_of(axes)]
    axes.set_xlim(0, max(ends) or 1)
    axes.grid(False, axis="y")


def _wrapped(name: str) -> str:
    """A name that is longer than the margin, in lines: cut behind the commas and the colon of its options."""
    return (
        "\n".join(textwrap.wrap(re.sub(r"([,:])(?=\S)", r"\1 ", name), 30, break_on_hyphens=False))
        if len(name) > 30
        else name
    )


def _notes_of(axes: Axes) -> list[Any]:
    from matplotlib.text import Annotation

    return [text for text in axes.texts if isinstance(text, Annotation)]
