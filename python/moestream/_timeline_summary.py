"""Sums over a timeline's events.

An *evaluation* is all that was computed for one batch of tokens: one token in decode. A *window* is one layer in one
evaluation: its attention, its router, its experts, and the reads for it. A read is for the first window of its layer
whose experts had not ended when it was submitted, and is of the evaluation that it was submitted in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._timeline_events import EventKind, Outcome

__all__ = [
    "EVALUATION",
    "WINDOW",
    "evaluations_of",
    "LayerTimes",
    "TimelineSummary",
    "summarise",
    "window_of_events",
    "windows_of",
]

EVALUATION = np.dtype([("begin", np.int64), ("end", np.int64), ("tokens", np.int64)])
"""Times in nanoseconds, and the tokens of the batch."""

WINDOW = np.dtype(
    [
        ("evaluation", np.int64),
        ("block", np.int64),
        ("attention_begin", np.int64),
        ("attention_end", np.int64),
        ("experts_begin", np.int64),
        ("experts_end", np.int64),
        ("prefetch_begin", np.int64),  # both 0: nothing was read ahead
        ("prefetch_end", np.int64),
        ("attention", np.int64),
        ("router", np.int64),
        ("experts", np.int64),
        ("wait", np.int64),
        ("prefetch", np.int64),
        ("bubble", np.int64),
        ("hidden", np.int64),
    ]
)
"""Times in nanoseconds; ``experts`` is without ``wait``."""


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """What a layer took in all windows, or all layers together. Times are sums, in seconds.

    The names in parentheses are those of docs/timeline.md.
    """

    layer: int | None
    """None: all layers together."""
    windows: int
    """Evaluations of this layer."""
    attention_s: float
    """(t_attention) From the end of one layer's experts, or the hook before the first layer's attention, to the router:
    what there is to hide reads behind."""
    router_s: float
    """Choosing experts."""
    prefetch_s: float
    """(t_prefetch) From the first read ahead that was submitted to the last that arrived, in each window. Ahead are reads
    for guesses, and reads for experts that were known, if submitted before the layer's attention ended."""
    bubble_s: float
    """max(0, t_prefetch - t_attention) of each window, where reads are submitted just before attention: what of them is
    not hidden behind it. In general it is t_prefetch less the time from the first read submitted to the end of attention,
    since reads that were submitted layers ahead hide behind those layers too. Computing stands still for `wait_s`, which
    is less where some experts are computed while others arrive, and more where experts are read that nobody guessed."""
    experts_s: float
    """(t_experts) Computing experts, without waiting."""
    wait_s: float
    """Without anything to compute, since experts were not there."""
    hidden: int
    """Experts whose reads ahead had all arrived when the layer's experts began, and that were used. The most that can be
    is floor(Y * B / X), with bandwidth B, expert size X and Y = t_attention."""
    reads: dict[str, int]
    """How many of each outcome: demand, pending, useful, late, wasted."""
    read_bytes: dict[str, int]
    """Their bytes."""


@dataclass(frozen=True, kw_only=True)
class TimelineSummary:
    """Where the time of evaluations went."""

    evaluations: int
    tokens: int
    wall_s: float
    """From the first event of each evaluation to its last, summed; sampling is part of it."""
    other_s: float
    """Between the last layer's experts and the next evaluation."""
    predict_s: float
    """Guessing outside of the other parts, which else it is part of."""
    reading_s: float
    """With at least one read in flight."""
    total: LayerTimes
    layers: tuple[LayerTimes, ...]

    @property
    def rest_s(self) -> float:
        """What of `wall_s` no event tells of: llama.cpp between two of our steps."""
        total = self.total
        told = total.attention_s + total.router_s + total.experts_s + total.wait_s + self.predict_s + self.other_s
        return max(0.0, self.wall_s - told)

    @property
    def tokens_per_s(self) -> float | None:
        """None if nothing was evaluated."""
        return self.tokens / self.wall_s if self.wall_s else None


def summarise(events: npt.NDArray[Any], layers: tuple[int, ...], *, prompt: bool) -> TimelineSummary:
    """The sums over evaluations of one token, or (`prompt`) of several."""
    evaluations, evaluation = evaluations_of(events)
    windows = windows_of(events)
    taken = (evaluations["tokens"] > 1) == prompt
    windows = windows[taken[windows["evaluation"]]]
    events = events[np.isin(evaluation, np.flatnonzero(taken))]
    evaluations, reads, computing = (
        evaluations[taken],
        events[events["kind"] == EventKind.READ],
        events[events["kind"] != EventKind.READ],
    )
    return TimelineSummary(
        evaluations=len(evaluations),
        tokens=int(evaluations["tokens"].sum()),
        wall_s=int((evaluations["end"] - evaluations["begin"]).sum()) / 1e9,
        other_s=_seconds(events, EventKind.OTHER),
        predict_s=(_union_ns(computing) - _union_ns(computing[computing["kind"] != EventKind.PREDICT])) / 1e9,
        reading_s=_union_ns(reads) / 1e9,
        total=_layer_times(None, windows, reads),
        layers=tuple(
            _layer_times(layer, windows[windows["block"] == layer], reads[reads["block"] == layer]) for layer in layers
        ),
    )


def evaluations_of(events: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """The evaluations (:data:`EVALUATION`) in their order, and for each event the index of its one; -1: none."""
    reads = events["kind"] == EventKind.READ
    batches, places = np.unique(events["batch"][~reads], return_inverse=True)
    evaluations = np.zeros(len(batches), EVALUATION)
    evaluations["begin"] = _lowest(len(batches), places, events["begin_ns"][~reads])
    evaluations["end"] = -_lowest(len(batches), places, -events["end_ns"][~reads])
    np.maximum.at(evaluations["tokens"], places, events["tokens"][~reads])  # the last layer may see fewer
    of = np.empty(len(events), np.int64)
    of[~reads] = places
    of[reads] = np.searchsorted(evaluations["begin"], events["begin_ns"][reads], side="right") - 1
    return evaluations, of


def windows_of(events: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The windows (:data:`WINDOW`), one for each layer's experts of each evaluation, in the order these began."""
    stride = int(events["block"].max()) + 1 if len(events) else 1
    key = evaluations_of(events)[1] * stride + events["block"]
    keys = np.unique(key[events["kind"] == EventKind.EXPERTS])
    windows = np.zeros(len(keys), WINDOW)
    windows["evaluation"], windows["block"] = np.divmod(keys, stride)
    durations = events["end_ns"] - events["begin_ns"]
    for kind, name in (
        (EventKind.ATTENTION, "attention"),
        (EventKind.ROUTER, "router"),
        (EventKind.EXPERTS, "experts"),
        (EventKind.WAIT, "wait"),
    ):
        chosen, places = _found(keys, key, (events["kind"] == kind) & (events["block"] >= 0))
        np.add.at(windows[name], places, durations[chosen])
        if kind in (EventKind.ATTENTION, EventKind.EXPERTS):
            windows[f"{name}_begin"] = _lowest(len(keys), places, events["begin_ns"][chosen])
            windows[f"{name}_end"] = -_lowest(len(keys), places, -events["end_ns"][chosen])
    windows["experts"] -= windows["wait"]
    windows = windows[np.argsort(windows["experts_begin"], kind="stable")]
    _read_ahead(windows, events[events["kind"] == EventKind.READ])
    return windows


def _read_ahead(windows: npt.NDArray[Any], reads: npt.NDArray[Any]) -> None:
    """Fills in what of the reads happened in which window."""
    window = window_of_reads(windows, reads)
    reads, window = reads[window >= 0], window[window >= 0]
    ahead = (reads["outcome"] != Outcome.DEMAND) | (reads["begin_ns"] < windows["attention_end"][window])
    reads, window = reads[ahead], window[ahead]
    windows["prefetch_begin"] = _lowest(len(windows), window, reads["begin_ns"])
    windows["prefetch_end"] = -_lowest(len(windows), window, -reads["end_ns"])
    windows["prefetch"] = windows["prefetch_end"] - windows["prefetch_begin"]
    wanted = np.where(windows["attention"] > 0, windows["attention_end"], windows["experts_begin"])
    windows["bubble"] = np.where(windows["prefetch"] > 0, np.maximum(0, windows["prefetch_end"] - wanted), 0)

    used = np.isin(reads["outcome"], (Outcome.DEMAND, Outcome.USEFUL, Outcome.LATE))
    reads, window = reads[used], window[used]
    stride = int(reads["expert"].max()) + 1 if len(reads) else 1
    experts, places = np.unique(window * stride + reads["expert"], return_inverse=True)
    arrived = np.zeros(len(experts), np.int64)
    np.maximum.at(arrived, places, reads["end_ns"])
    of = experts // stride
    np.add.at(windows["hidden"], of[arrived <= windows["experts_begin"][of]], 1)


def window_of_reads(windows: npt.NDArray[Any], reads: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Index of the window that each read is for; -1 where recording ended before."""
    found = np.full(len(reads), -1, np.int64)
    for block in np.unique(reads["block"]):
        of_layer, mine = np.flatnonzero(windows["block"] == block), np.flatnonzero(reads["block"] == block)
        places = np.searchsorted(windows["experts_end"][of_layer], reads["begin_ns"][mine], side="right")
        in_time = places < len(of_layer)
        found[mine[in_time]] = of_layer[places[in_time]]
    return found


def window_of_events(windows: npt.NDArray[Any], events: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Index of the window that each event is part of, or -1."""
    found = np.full(len(events), -1, np.int64)
    reads = events["kind"] == EventKind.READ
    found[reads] = window_of_reads(windows, events[reads])
    pairs = zip(windows["evaluation"].tolist(), windows["block"].tolist(), strict=True)
    index = {pair: i for i, pair in enumerate(pairs)}
    evaluation = evaluations_of(events)[1]
    for i in np.flatnonzero(~reads):
        found[i] = index.get((int(evaluation[i]), int(events["block"][i])), -1)
    return found


def _layer_times(layer: int | None, windows: npt.NDArray[Any], reads: npt.NDArray[Any]) -> LayerTimes:
    return LayerTimes(
        layer=layer,
        windows=len(windows),
        hidden=int(windows["hidden"].sum()),
        reads={outcome.name.lower(): int((reads["outcome"] == outcome).sum()) for outcome in Outcome},
        read_bytes={
            outcome.name.lower(): int(reads["bytes"][reads["outcome"] == outcome].sum(dtype=np.int64))
            for outcome in Outcome
        },
        **{
            f"{name}_s": int(windows[name].sum()) / 1e9
            for name in ("attention", "router", "prefetch", "bubble", "experts", "wait")
        },
    )


def _found(keys: npt.NDArray[Any], key: npt.NDArray[Any], wanted: npt.NDArray[np.bool_]) -> tuple[Any, Any]:
    """Indices of the wanted events that have a window, and that window's."""
    chosen = np.flatnonzero(wanted & np.isin(key, keys))
    return chosen, np.searchsorted(keys, key[chosen])


def _lowest(n: int, places: npt.NDArray[Any], values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The lowest of the values at each of `n` places; 0 where there is none."""
    lowest = np.full(n, np.iinfo(np.int64).max)
    np.minimum.at(lowest, places, values)
    lowest[lowest == np.iinfo(np.int64).max] = 0
    return lowest


def _seconds(events: npt.NDArray[Any], kind: int) -> float:
    of_kind = events[events["kind"] == kind]
    return int((of_kind["end_ns"] - of_kind["begin_ns"]).sum()) / 1e9


def _union_ns(events: npt.NDArray[Any]) -> int:
    """Time in which at least one of the events lasted."""
    events = events[np.argsort(events["begin_ns"], kind="stable")]
    if not len(events):
        return 0
    ended = np.maximum.accumulate(events["end_ns"])
    before = np.concatenate([events["begin_ns"][:1], ended[:-1]])
    return int(np.maximum(0, ended - np.maximum(before, events["begin_ns"])).sum())
