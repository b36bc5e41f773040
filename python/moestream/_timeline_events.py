"""The events of a timeline, as csrc/moestream.h has them."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

__all__ = ["EVENT", "EventKind", "Outcome"]

EVENT = np.dtype(
    [
        ("begin_ns", np.int64),
        ("end_ns", np.int64),
        ("batch", np.uint32),
        ("bytes", np.uint32),
        ("block", np.int32),
        ("expert", np.int32),
        ("tokens", np.uint16),
        ("kind", np.uint8),
        ("outcome", np.uint8),
    ],
    align=True,
)
"""``ms_event`` of csrc/moestream.h: times by the monotonic clock; block and expert are -1 where there is none."""


class EventKind(IntEnum):
    """What an event is, as ``enum ms_event_kind``."""

    ATTENTION = 0
    """From the end of one layer's experts to the router of the next; of the first layer from before its attention."""
    ROUTER = 1
    """Choosing experts."""
    EXPERTS = 2
    """All of a layer's experts, waits included."""
    WAIT = 3
    """Within those, without anything to compute."""
    READ = 4
    """Of an expert or a part of it, from submitted to arrived."""
    PREDICT = 5
    """Guessing which experts are next."""
    OTHER = 6
    """From the last layer's experts to the next evaluation: what comes before the logits, and sampling."""


class Outcome(IntEnum):
    """What became of a read, as ``enum ms_outcome``."""

    DEMAND = 0
    """Read because it was wanted; the others were read ahead."""
    PENDING = 1
    """Neither used nor evicted when recording ended."""
    USEFUL = 2
    """There in time."""
    LATE = 3
    """Wanted while it was on its way."""
    WASTED = 4
    """Evicted unused."""
