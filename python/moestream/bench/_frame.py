"""What all pictures have: letters and colours, a frame with title, legend and conditions, and how they become SVG.

A picture holds its conditions itself, since pictures are passed on without their page. All are drawn in one light set of
colours; :func:`svg` can put a page's own variables in their place.

matplotlib is only imported where something is drawn.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import OptionError
from .record import Record, disk_text, distinct, machine_text, rate_text, short_size, test_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "INK",
    "LINE",
    "PAPER",
    "SOFT",
    "Picture",
    "conditions",
    "framed",
    "legend",
    "limit_text",
    "patch",
    "require_matplotlib",
    "stroke",
    "svg",
]

INK, SOFT, LINE, PAPER = "#17202c", "#5d6878", "#d5dbe4", "#ffffff"

_WIDTH = 6.2  # inches
_CONDITION_COLUMNS = 112  # characters of its small print


@dataclass(frozen=True)
class Picture:
    """A drawn figure, and in words what it is of."""

    title: str
    figure: Figure


def require_matplotlib() -> None:
    """Raises OptionError if it is not there."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as exc:
        raise OptionError(
            "plots need matplotlib: pip install 'moestream[plots]'; or take -o md, csv, json, jsonl or sql"
        ) from exc


def svg(picture: Picture, *, prefix: str = "", text: bool = True, variables: bool = False) -> str:
    """The picture as SVG, the same for the same records and the same matplotlib.

    Args:
        prefix: In front of all ids, which several pictures of one page must not share.
        text: Text as text, which can be found and copied; else as outlines, which look the same everywhere.
        variables: Colours of ink, lines and paper as var(--ink) and so on, of the page.
    """
    import matplotlib

    out = io.StringIO()
    with (
        _drawing({"svg.fonttype": "none" if text else "path", "svg.hashsalt": "moestream"}),
        matplotlib.rc_context({"savefig.facecolor": "none" if variables else PAPER}),
    ):
        picture.figure.savefig(out, format="svg", metadata={"Date": None})
    drawn = out.getvalue()
    drawn = drawn[drawn.index("<svg") :] if variables else drawn
    if prefix:
        drawn = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}", drawn)
    if variables:
        for name, colour in (("ink", INK), ("soft", SOFT), ("line", LINE), ("paper", PAPER)):
            drawn = drawn.replace(colour, f"var(--{name})")
    return re.sub(r"[ \t]+$", "", drawn, flags=re.MULTILINE)


def limit_text(record: Record) -> str:
    return short_size(record["memory_limit"]) if record.get("memory_limit") else "no limit"


def patch(label: str, **style: Any) -> Any:
    from matplotlib.patches import Patch

    return Patch(label=label, linewidth=0.8, **style)


def stroke(label: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=INK, linewidth=2, label=label)


def legend(axes: Axes, handles: Sequence[Any] | None = None) -> None:
    """Above the axes, in as many columns as there is room for; :func:`framed` makes the room."""
    entries = axes.get_legend_handles_labels() if handles is None else (handles, [h.get_label() for h in handles])
    unique = dict(zip(entries[1], entries[0], strict=True))
    longest = max(map(len, unique))
    columns = max(1, min(len(unique), 84 // (longest + 7)))
    axes.legend(
        list(unique.values()),
        list(unique),
        ncols=columns,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        frameon=False,
        borderaxespad=0.3,
    )


def conditions(records: Sequence[Record]) -> list[str]:
    """What held when these records were measured, in lines for a picture: where they differ, from which to which."""

    def each(form: Callable[[Record], str]) -> str:
        values = distinct(text for r in records if (text := form(r)))
        return ", ".join(values) if len(values) <= 3 else f"{values[0]} ... {values[-1]}"

    def versions(record: Record) -> str:
        machine = record.get("machine") or {}
        named = machine.get("versions") or {}
        said = [f"{name} {named[name]}" for name in ("moestream", "llama-cpp-python") if named.get(name)]
        said += [f"llama.cpp {record['build_commit']}"] if record.get("build_commit") else []
        return ", ".join([*said, *([machine["kernel"]] if machine.get("kernel") else [])])

    model = each(lambda r: f"{r.get('model_type') or r['model_filename']} ({_on_disk(r)})")
    depth = each(lambda r: f"{r.get('n_depth') or 0}")
    memory, disk = (
        each(limit_text),
        each(lambda r: rate_text(r["disk_bps_limit"]) if r.get("disk_bps_limit") else "no limit"),
    )
    routing = each(lambda r: r.get("routing") or "")
    lines = [
        f"{model}; {each(lambda r: test_name({**r, 'n_depth': 0}))} at context depth {depth}; {each(lambda r: r.get('workload') or '')}"
        + (f"; routing {routing}" if routing not in ("", "own") else ""),
        f"{each(machine_text)}; {each(lambda r: str(r.get('n_threads') or '?'))} threads; memory limit: {memory}",
        f"{disk_text(records)}; limit of the disk: {disk}",
        f"{each(lambda r: (r.get('test_time') or '')[:10])}; {each(versions)}",
    ]
    return [wrapped for line in lines for wrapped in textwrap.wrap(_printable(line), _CONDITION_COLUMNS)]


def _on_disk(record: Record) -> str:
    size = record.get("bytes_on_disk") or record.get("model_size")
    return f"{size / 2**30:.2f} GiB on disk" if size else "size unknown"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


_STYLE = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8.5,
    "axes.titlesize": 10.5,
    "text.parse_math": False,  # a $ in a name is a $
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.labelcolor": INK,
    "hatch.linewidth": 0.6,
    "figure.dpi": 100,
}


@contextmanager
def _drawing(style: dict[str, Any]) -> Iterator[None]:
    """Letters that the font has not are the reader's browser's to find."""
    import matplotlib

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE, **style}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        yield


@contextmanager
def framed(title: str, records: Sequence[Record], axes_inches: float) -> Iterator[tuple[Picture, Axes]]:
    """A figure whose parts have the room they need: title, legend, axes of that height, conditions."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with _drawing({}):
        figure = Figure(figsize=(_WIDTH, axes_inches + 2))
        axes = figure.add_axes((0.1, 0.2, 0.8, 0.6))
        yield Picture(title, figure), axes
        small = conditions(records)
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        inches = lambda box: (box.width / figure.dpi, box.height / figure.dpi)  # noqa: E731
        drawn_legend = axes.get_legend()
        legend_height = inches(drawn_legend.get_window_extent(renderer))[1] if drawn_legend else 0.0
        left = min(3.0, max(inches(label.get_window_extent(renderer))[0] for label in axes.get_yticklabels()) + 0.18)
        left += 0.24 if axes.get_ylabel() else 0.0
        below, above = 0.55 + 0.135 * len(small), 0.36 + legend_height
        height = below + axes_inches + above
        figure.set_size_inches(_WIDTH, height)
        axes.set_position((left / _WIDTH, below / height, (_WIDTH - left - 0.15) / _WIDTH, axes_inches / height))
        if drawn_legend:
            drawn_legend.set_bbox_to_anchor(
                (0.1 / _WIDTH, 1 - (0.3 + legend_height) / height), transform=figure.transFigure
            )
        figure.text(0.1 / _WIDTH, 1 - 0.08 / height, title, va="top", fontsize=10.5, fontweight="bold")
        figure.text(0.1 / _WIDTH, 0.06 / height, "\n".join(small), va="bottom", fontsize=7, color=SOFT, linespacing=1.3)
