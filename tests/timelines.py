"""Timelines made up from a few numbers: what a model of that shape would do, with reads ahead or without."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moestream import Timeline
from moestream.timeline import EVENT, EventKind, Outcome

__all__ = ["Shape", "event", "made_up", "timeline"]


def event(kind: EventKind, begin_ns: int, end_ns: int, **fields: Any) -> tuple[Any, ...]:
    """One event as EVENT has it; without an expert, of one token, unless said otherwise."""
    values = {"batch": 0, "bytes": 0, "block": -1, "expert": -1, "tokens": 1, "outcome": 0, **fields}
    return (begin_ns, end_ns, *(values[name] for name in EVENT.names[2:7]), int(kind), values["outcome"])


def timeline(events: list[tuple[Any, ...]], **fields: Any) -> Timeline:
    """A timeline of events under conditions that matter to nobody."""
    conditions: dict[str, Any] = {
        "model": "A model",
        "machine": {"cpu": "A processor", "cores": 4, "memory_bytes": 8 << 30},
        "date": "2026-01-02T03:04:05+0000",
        "tool": "moestream 0",
        "layers": tuple(sorted({int(e[4]) for e in events if e[4] >= 0})),
        "threads": 4,
        "settings": {"cache": 1 << 30, "reader": "uring", "kernels": "plain"},
    }
    conditions["expert_bytes"] = (1000,) * len(conditions["layers"])
    return Timeline(**{**conditions, **fields}, events=np.array(events, EVENT))


@dataclass
class Shape:
    """What to make up. Times in milliseconds; `ahead` is the share of misses that is guessed."""

    layers: int = 8
    tokens: int = 10
    top_k: int = 4
    n_experts: int = 64
    hit_rate: float = 0.5
    ahead: float = 0.7
    wrong: float = 0.2
    attention_ms: float = 0.5
    router_ms: float = 0.02
    expert_ms: float = 0.1
    read_ms: float = 0.4
    other_ms: float = 3.0
    in_flight: int = 4
    expert_bytes: int = 2_600_000
    prompt: int = 12
    seed: int = 0
    text: tuple[str, ...] = field(
        default=(" The", " library", " is", " open", " until", " nine", ",", " and", " <b>", "é")
    )


def made_up(shape: Shape) -> Timeline:
    """A plausible run: layer after layer, `in_flight` reads at a time, demands first, guesses while attention computes."""
    draw = np.random.default_rng(shape.seed)
    events: list[tuple[Any, ...]] = []
    now, queues = 1_000_000_000, [0] * shape.in_flight

    def ms(value: float) -> int:
        return int(value * 1e6 * draw.uniform(0.8, 1.3))

    def read(when: int, **fields: Any) -> int:
        queue = int(np.argmin(queues))
        begin = max(when, queues[queue])
        end = queues[queue] = begin + ms(shape.read_ms)
        events.append(
            event(
                EventKind.READ,
                begin,
                end,
                expert=int(draw.integers(shape.n_experts)),
                bytes=shape.expert_bytes,
                **fields,
            )
        )
        return end

    for batch in range(shape.tokens + bool(shape.prompt)):
        tokens = shape.prompt if shape.prompt and batch == 0 else 1
        for block in range(shape.layers):
            here = {"batch": batch, "block": block, "tokens": tokens}
            attention_end = now + ms(shape.attention_ms) * (1 + tokens // 4)
            missing = int(draw.binomial(shape.top_k * (1 + tokens // 4), 1 - shape.hit_rate))
            guessed = int(draw.binomial(missing, shape.ahead))
            arrivals = []
            for _ in range(guessed):
                arrived = read(now, **here, outcome=Outcome.USEFUL)
                arrivals.append(arrived)
                if arrived > attention_end + ms(shape.router_ms):
                    events[-1] = (*events[-1][:-1], int(Outcome.LATE))
            if shape.ahead and draw.random() < shape.wrong:
                read(now, **here, outcome=Outcome.WASTED if draw.random() < 0.8 else Outcome.PENDING)
            events.append(event(EventKind.ATTENTION, now, attention_end, **here))
            router_end = attention_end + ms(shape.router_ms)
            events.append(event(EventKind.ROUTER, attention_end, router_end, **here))
            arrivals += [read(router_end, **here, outcome=Outcome.DEMAND) for _ in range(missing - guessed)]
            at = router_end + ms(shape.expert_ms) * (shape.top_k - missing if missing < shape.top_k else 0)
            for arrived in sorted(arrivals):
                if arrived > at:
                    events.append(event(EventKind.WAIT, at, arrived, **here))
                    at = arrived
                at += ms(shape.expert_ms)
            end = max(at, router_end + ms(shape.expert_ms))
            events.append(event(EventKind.EXPERTS, router_end, end, **here))
            if shape.ahead:
                events.append(event(EventKind.PREDICT, end - 20_000, end, **here))
            now = end
        events.append(event(EventKind.OTHER, now, now + ms(shape.other_ms), batch=batch, tokens=tokens))
        now = events[-1][1]
    n = shape.prompt + shape.tokens
    return timeline(
        events,
        model=f"Made up, {shape.layers} layers",
        layers=tuple(range(shape.layers)),
        expert_bytes=(shape.expert_bytes,) * shape.layers,
        tokens=tuple(shape.text[i % len(shape.text)] for i in range(n)),
        settings={
            "cache": 2 << 30,
            "prefetch": "router+lookahead",
            "policy": "lru",
            "reader": "uring",
            "kernels": "plain",
        },
    )
