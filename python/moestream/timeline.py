"""What happened when while a model computed: attention, experts, waits and reads, by layer and token.

docs/timeline.md tells what the figures mean and how the page is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import llama_cpp
import numpy as np
import numpy.typing as npt
import psutil

from . import _threads
from ._timeline_events import EVENT, EventKind, Outcome
from ._timeline_summary import TimelineSummary, evaluations_of, summarise
from .errors import OptionError

if TYPE_CHECKING:
    from .llama import Llama

__all__ = ["EVENT", "EventKind", "Outcome", "Timeline"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """Events of a model's computation and reading, and the conditions they were recorded under.

    >>> with llm.record_timeline() as timeline:
    ...     llm("The library is", max_tokens=30)
    >>> timeline.write("run.html")
    >>> timeline.summary().total.wait_s

    Args:
        model: The model's name, or that of its file.
        machine: ``cpu`` (name), ``cores`` and ``memory_bytes``.
        date: When recording began, ISO 8601.
        tool: What recorded, with its version.
        layers: Transformer layers with experts, ascending.
        expert_bytes: Of one expert in each of them.
        threads: Of decode.
        settings: What the experts were streamed with: every option of :class:`ExpertStreaming`, as it was chosen where
            it was left open.
        events: :data:`EVENT` [events], in the order they were added.
        tokens: The text of each token evaluated, in order; empty if it is not known.
        dropped: Events that the recording had no room for; they were the oldest.
    """

    model: str
    machine: dict[str, Any]
    date: str
    tool: str
    layers: tuple[int, ...]
    expert_bytes: tuple[int, ...]
    threads: int
    settings: dict[str, Any]
    events: npt.NDArray[Any] = dataclasses.field(default_factory=lambda: np.empty(0, EVENT))
    tokens: tuple[str, ...] = ()
    dropped: int = 0

    def summary(self, phase: Literal["decode", "prompt"] = "decode") -> TimelineSummary:
        """Where time and bytes went, by layer: of evaluations of one token (decode), or of those of several (prompt).

        Raises:
            OptionError: Another phase.
        """
        if phase not in ("decode", "prompt"):
            raise OptionError(f"phase={phase!r}: expected 'decode' or 'prompt'")
        return summarise(self.events, self.layers, prompt=phase == "prompt")

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the timeline, first as `path` with ".part" behind it: `path` is whole or not there.

        Args:
            path: ``.html`` is one page for the browser that needs nothing else; ``.json`` Chrome's trace format, which
                ui.perfetto.dev opens; ``.npz`` the events (``events``, of type :data:`EVENT`) and all else
                (``header``, JSON in UTF-8) as a NumPy archive.

        Raises:
            OptionError: Another suffix.
            OutputError: It cannot be written.
        """
        from ._timeline_files import write

        write(self, Path(path))


@contextlib.contextmanager
def record(llm: Llama, capacity: int) -> Iterator[Timeline]:
    """What :meth:`Llama.record_timeline` does."""
    if llm._engine is None:
        raise OptionError("this model is not streamed: load it with expert_streaming=True for record_timeline()")
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
        raise OptionError(f"capacity={capacity!r}: expected a number of events, at least 1")
    if llm._evaluated is not None:
        raise OptionError(
            "the timeline of this model is being recorded already: leave the other record_timeline() first"
        )
    engine, model = llm._engine, llm._engine.description
    timeline = Timeline(
        model=model.name or model.path.name,
        machine={
            "cpu": _threads.processor(),
            "cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        tool=f"moestream {importlib.metadata.version('moestream')}",
        layers=tuple(layer.layer for layer in model.moe_layers),
        expert_bytes=tuple(layer.expert_bytes for layer in model.moe_layers),
        threads=llm.decode_threads,
        settings={},
    )
    began_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    engine.record(capacity)
    llm._evaluated = []
    try:
        yield timeline
    finally:
        evaluated, llm._evaluated = llm._evaluated, None
        events, dropped = engine.recorded()
        events = events[events["begin_ns"] >= began_ns]  # the first may tell of the time before
        filled = {
            "events": events,
            "dropped": dropped,
            "tokens": _texts(llm, _tokens_of(events, dropped, evaluated)),
            "threads": llm.decode_threads,
            "settings": engine.settings(),
        }
        for name, value in filled.items():
            object.__setattr__(timeline, name, value)  # it was handed out before it was known


def _tokens_of(events: npt.NDArray[Any], dropped: int, evaluated: list[int]) -> list[int]:
    """Those of the tokens given to ``eval`` that the events are of; none if others were evaluated besides."""
    n = int(evaluations_of(events)[0]["tokens"].sum())
    if n == len(evaluated) or (dropped and n < len(evaluated)):
        return evaluated[len(evaluated) - n :]
    return []


def _texts(llm: Llama, tokens: list[int]) -> tuple[str, ...]:
    """Their texts; none where the model has no vocabulary."""
    vocabulary = llama_cpp.llama_model_get_vocab(llm.model)
    if llama_cpp.llama_vocab_type(vocabulary) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
        return ()
    return tuple(llm.detokenize([token], special=True).decode("utf-8", "replace") for token in tokens)
