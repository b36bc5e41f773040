"""The timeline: the ring of events, what is summed up from them, and the files it is written as."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moestream import ExpertStreaming, Llama, MoestreamError, OptionError, OutputError, Timeline
from moestream._native import lib as installed
from moestream._timeline_summary import windows_of
from moestream.timeline import EVENT, EventKind, Outcome
from native import timeline_ffi as ffi
from native import timeline_lib as lib
from timelines import Shape, event, made_up, timeline

# The ring


@pytest.fixture
def ring() -> Iterator[Callable[..., Any]]:
    opened = []

    def new(capacity: int, first: int = 1) -> Any:
        opened.append(lib.ms_timeline_open(capacity, first))
        return opened[-1]

    yield new
    for one in opened:
        lib.ms_timeline_close(one)


def append(ring: Any, number: int) -> int:
    """Adds an event whose fields all tell its number."""
    fields = {"begin_ns": number, "end_ns": -number, "batch": number, "bytes": number, "expert": number}
    return lib.ms_timeline_append(ring, ffi.new("ms_event *", {**fields, "block": -1, "outcome": Outcome.PENDING}))


def read(ring: Any, capacity: int = 1000) -> tuple[list[int], list[int], int]:
    """The numbers and the outcomes of the events copied, each checked to be whole, and how many were dropped."""
    out, dropped = np.zeros(capacity, EVENT), ffi.new("uint64_t *")
    n = lib.ms_timeline_read(ring, ffi.from_buffer("ms_event[]", out.view(np.uint8)), capacity, dropped)
    events = out[:n]
    for name in ("batch", "bytes", "expert"):
        assert (events[name] == events["begin_ns"]).all()
    assert (events["end_ns"] == -events["begin_ns"]).all()
    return events["begin_ns"].tolist(), events["outcome"].tolist(), dropped[0]


def test_an_event_is_as_c_has_it() -> None:
    assert ffi.sizeof("ms_event") == EVENT.itemsize == 40
    for name in EVENT.names:
        assert ffi.offsetof("ms_event", name) == EVENT.fields[name][1], name
        assert ffi.sizeof(dict(ffi.typeof("ms_event").fields)[name].type) == EVENT[name].itemsize, name
    for kind in EventKind:
        assert getattr(installed, f"MS_EVENT_{kind.name}") == kind
    for outcome in Outcome:
        assert getattr(installed, f"MS_OUTCOME_{outcome.name}") == outcome


def test_a_ring_keeps_the_newest_events_in_order_and_counts_the_others(ring: Callable[..., Any]) -> None:
    kept = ring(5)
    assert read(kept) == ([], [], 0)
    assert [append(kept, number) for number in (11, 12, 13)] == [1, 2, 3]
    assert read(kept)[0::2] == ([11, 12, 13], 0)
    for number in range(14, 24):
        append(kept, number)
    assert read(kept)[0::2] == ([19, 20, 21, 22, 23], 8)
    assert read(kept, capacity=2)[0::2] == ([22, 23], 11)
    assert read(kept)[0::2] == ([19, 20, 21, 22, 23], 8), "reading takes nothing away"


def test_an_outcome_is_set_only_while_the_event_is_there(ring: Callable[..., Any]) -> None:
    kept = ring(3)
    numbers = [append(kept, number) for number in range(5)]
    lib.ms_timeline_decide(kept, numbers[3], Outcome.USEFUL)
    lib.ms_timeline_decide(kept, numbers[0], Outcome.WASTED)  # where the fourth is now
    lib.ms_timeline_decide(kept, 0, Outcome.WASTED)
    lib.ms_timeline_decide(kept, numbers[4] + 1, Outcome.WASTED)
    lib.ms_timeline_decide(ffi.NULL, numbers[4], Outcome.WASTED)
    assert read(kept)[1] == [Outcome.PENDING, Outcome.USEFUL, Outcome.PENDING]


def test_a_restarted_ring_forgets_and_its_numbers_go_on(ring: Callable[..., Any]) -> None:
    kept = ring(4)
    old = [append(kept, number) for number in (1, 2)]
    lib.ms_timeline_restart(kept, lib.ms_timeline_next(kept) + 10)
    assert read(kept) == ([], [], 0)
    assert append(kept, 3) > max(old)
    for number in old:
        lib.ms_timeline_decide(kept, number, Outcome.WASTED)
    assert read(kept) == ([3], [Outcome.PENDING], 0)


def test_a_ring_too_large_for_memory_is_none() -> None:
    assert lib.ms_timeline_open(2**62, 1) == ffi.NULL


@pytest.mark.parametrize("capacity", [7, 4096])
def test_many_threads_add_decide_and_read_at_once(capacity: int, ring: Callable[..., Any]) -> None:
    kept, n_threads, each = ring(capacity), 6, 1500
    sequences: list[list[int]] = [[] for _ in range(n_threads)]
    seen: list[tuple[list[int], list[int], int]] = []
    adding = threading.Event()

    def add(thread: int) -> None:
        adding.wait()
        for i in range(each):
            sequences[thread].append(append(kept, thread * each + i))
            lib.ms_timeline_decide(kept, sequences[thread][-1], Outcome.USEFUL)

    def look() -> None:
        adding.wait()
        while sum(map(len, sequences)) < n_threads * each:
            seen.append(read(kept, capacity))

    threads = [threading.Thread(target=add, args=(i,)) for i in range(n_threads)] + [threading.Thread(target=look)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        adding.set()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(sum(sequences, [])) == list(range(1, n_threads * each + 1))
    numbers, outcomes, dropped = read(kept, capacity)
    assert len(numbers) == min(capacity, n_threads * each) and len(numbers) + dropped == n_threads * each
    of = {sequence: t * each + i for t, of_thread in enumerate(sequences) for i, sequence in enumerate(of_thread)}
    assert numbers == [of[sequence] for sequence in sorted(of)[-len(numbers) :]]
    assert set(outcomes) == {Outcome.USEFUL}
    assert seen and all(len(numbers) == len(set(numbers)) for numbers, _, _ in seen)


# Sums

MS = 1_000_000


def ms(kind: EventKind, begin: float, end: float, **fields: Any) -> tuple[Any, ...]:
    return event(kind, int(begin * MS), int(end * MS), **fields)


def decoded(batch: int = 1, start: float = 0) -> list[tuple[Any, ...]]:
    """Two layers and what follows: 10 ms of which 2.5 are waited."""
    one, two = {"batch": batch, "block": 1}, {"batch": batch, "block": 2}

    def read(begin: float, end: float, expert: int, outcome: Outcome, **of: int) -> tuple[Any, ...]:
        return ms(EventKind.READ, start + begin, start + end, expert=expert, bytes=1000, outcome=outcome, **of)

    def did(kind: EventKind, begin: float, end: float, **of: int) -> tuple[Any, ...]:
        return ms(kind, start + begin, start + end, **of)

    return [
        did(EventKind.ATTENTION, 0, 2, **one),
        did(EventKind.ROUTER, 2, 2.25, **one),
        # two parts of expert 7, there in time; expert 8 in two parts, of which one is late
        read(0.25, 1, 7, Outcome.USEFUL, **one),
        read(0.5, 1.25, 7, Outcome.USEFUL, **one),
        read(0.5, 1.5, 8, Outcome.USEFUL, **one),
        read(0.5, 3.25, 8, Outcome.LATE, **one),
        read(2.5, 4, 9, Outcome.DEMAND, **one),
        did(EventKind.EXPERTS, 2.5, 5, **one),
        did(EventKind.WAIT, 2.75, 3.25, **one),
        did(EventKind.WAIT, 3.5, 4, **one),
        # of the next layer, submitted while this one computes
        read(4.5, 5.5, 3, Outcome.USEFUL, **two),
        read(4.5, 5.5, 4, Outcome.WASTED, **two),
        did(EventKind.PREDICT, 2.25, 2.375, **one),
        did(EventKind.PREDICT, 4.75, 5, **one),
        did(EventKind.ATTENTION, 5, 6, **two),
        did(EventKind.ROUTER, 6, 6.5, **two),
        did(EventKind.EXPERTS, 6.5, 9, **two),
        did(EventKind.WAIT, 7, 8.5, **two),
        read(6.5, 8.5, 5, Outcome.DEMAND, **two),
        did(EventKind.OTHER, 9, 10, batch=batch),
    ]


def test_a_layer_is_summed_up() -> None:
    summary = timeline(decoded()).summary()
    one, two = summary.layers
    assert (one.layer, one.windows, two.layer, two.windows) == (1, 1, 2, 1)
    assert (one.attention_s, one.router_s) == (0.002, 0.00025)
    assert one.prefetch_s == 0.003, "from 0.25 to 3.25"
    assert one.bubble_s == 0.00125, "to hide behind there was attention from 0.25 to 2"
    assert (one.experts_s, one.wait_s) == (0.0015, 0.001)
    assert one.hidden == 1, "expert 7; a part of 8 came late, and 9 was not read ahead"
    assert one.reads == {"demand": 1, "pending": 0, "useful": 3, "late": 1, "wasted": 0}
    assert one.read_bytes == {"demand": 1000, "pending": 0, "useful": 3000, "late": 1000, "wasted": 0}
    assert (two.prefetch_s, two.bubble_s, two.hidden) == (0.001, 0, 1), "the wasted one is not hidden: nobody wanted it"
    assert two.wait_s == 0.0015


def test_the_total_is_that_of_all_layers_and_tokens() -> None:
    summary = timeline(decoded() + decoded(batch=2, start=20)).summary()
    assert (summary.evaluations, summary.tokens, summary.wall_s) == (2, 2, 0.02)
    assert summary.tokens_per_s == 100
    total = summary.total
    assert (total.layer, total.windows) == (None, 4)
    assert (total.attention_s, total.prefetch_s, total.bubble_s, total.wait_s) == (0.006, 0.008, 0.0025, 0.005)
    assert (summary.other_s, summary.predict_s) == (0.002, 2 * 0.000125), "guessing within experts is not counted twice"
    assert summary.reading_s == pytest.approx(2 * (3.75 + 1 + 2) / 1e3), "overlapping reads count once"
    assert sum(total.reads.values()) == 16 and total.hidden == 4
    parts = total.attention_s + total.router_s + total.experts_s + total.wait_s + summary.other_s
    assert parts == pytest.approx(summary.wall_s - 2 * 0.00025)
    assert summary.rest_s == pytest.approx(2 * 0.000125), "between router and experts, less the guessing there"


def test_an_exact_read_before_attention_ends_is_ahead() -> None:
    events = [
        ms(EventKind.ATTENTION, 0, 2, block=0),
        ms(EventKind.READ, 0.5, 2.75, block=0, expert=1, outcome=Outcome.DEMAND),
        ms(EventKind.READ, 2, 4, block=0, expert=2, outcome=Outcome.DEMAND),
        ms(EventKind.EXPERTS, 2.75, 5, block=0),
    ]
    (layer,) = timeline(events).summary().layers
    assert (layer.prefetch_s, layer.bubble_s, layer.hidden) == (0.00225, 0.00075, 1)


@pytest.mark.parametrize("arrival, bubble", [(1.5, 0), (2, 0), (2.75, 0.75)])
def test_what_attention_does_not_hide_is_the_bubble(arrival: float, bubble: float) -> None:
    events = [
        ms(EventKind.ATTENTION, 0, 2, block=0),
        ms(EventKind.READ, 0, arrival, block=0, expert=1, outcome=Outcome.USEFUL),
        ms(EventKind.EXPERTS, 2, 5, block=0),
    ]
    (layer,) = timeline(events).summary().layers
    assert layer.bubble_s == bubble / 1e3 == pytest.approx(max(0, layer.prefetch_s - layer.attention_s))


def test_reads_submitted_layers_ahead_hide_behind_those_layers_too() -> None:
    events = [
        ms(EventKind.ATTENTION, 0, 2, block=0),
        ms(EventKind.EXPERTS, 2, 4, block=0),
        ms(EventKind.ATTENTION, 4, 6, block=1),
        ms(EventKind.READ, 1, 6.5, block=1, expert=1, outcome=Outcome.LATE),
        ms(EventKind.EXPERTS, 6, 7, block=1),
    ]
    _, layer = timeline(events).summary().layers
    assert (layer.prefetch_s, layer.attention_s, layer.bubble_s) == (0.0055, 0.002, 0.0005)


def test_a_read_belongs_to_the_next_experts_of_its_layer() -> None:
    events = [
        ms(EventKind.EXPERTS, 1, 2, block=0, batch=0),
        ms(EventKind.READ, 3, 4, block=0, batch=0, expert=1, outcome=Outcome.USEFUL),  # a token ahead
        ms(EventKind.ATTENTION, 9, 10, block=0, batch=1),
        ms(EventKind.EXPERTS, 10, 11, block=0, batch=1),
        ms(EventKind.READ, 12, 13, block=0, batch=1, expert=2, outcome=Outcome.PENDING),
    ]
    windows = windows_of(np.array(events, EVENT))
    assert windows["prefetch"].tolist() == [0, MS]
    assert windows["hidden"].tolist() == [0, 1]
    total = timeline(events).summary().total
    assert total.reads["pending"] == 1, "counted, though recording ended before its layer came"


def test_prompts_and_decode_are_told_apart() -> None:
    prompt = [(*e[:6], 12, *e[7:]) for e in decoded(batch=0, start=-20)]
    prompt[-1] = (*prompt[-1][:6], 1, *prompt[-1][7:])  # the last layer computes one token's logits
    both = timeline(prompt + decoded())
    assert (both.summary().tokens, both.summary("prompt").tokens) == (1, 12)
    assert both.summary("prompt").total.wait_s == both.summary().total.wait_s == 0.0025
    with pytest.raises(OptionError, match="^phase='all': expected 'decode' or 'prompt'$"):
        both.summary("all")  # type: ignore[arg-type]


def test_nothing_sums_up_to_nothing() -> None:
    summary = timeline([], layers=(0, 1)).summary()
    assert (summary.tokens, summary.tokens_per_s, summary.total.windows, len(summary.layers)) == (0, None, 0, 2)


# Files


class Parsed(HTMLParser):
    """The tags of a page, each with what holds its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[tuple[dict[str, Any], str]] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag not in ("meta", "input", "rect", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)


def page_of(timeline: Timeline, folder: Path) -> tuple[str, dict[str, Any]]:
    timeline.write(folder / "run.html")
    page = (folder / "run.html").read_text(encoding="utf-8")
    parsed = Parsed(page)
    assert parsed.open == []
    (text,) = [text for attributes, text in parsed.scripts if attributes.get("id") == "data"]
    return page, json.loads(text)


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    page, _ = page_of(made_up(Shape()), tmp_path)
    assert not re.search(r"https?:|//[a-z]+\.[a-z]|@import|url\(|\bimport\b|fetch\(|XMLHttpRequest", page)
    assert not {name for name, _ in Parsed(page).attributes} & {"src", "href", "srcset", "action"}
    assert "{{" not in page and "}}" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL).replace(
        "}\n}", ""
    )


@pytest.mark.parametrize("stretch", [1, 1000])
def test_the_page_holds_every_event(stretch: int, tmp_path: Path) -> None:
    recorded = made_up(Shape(layers=3, tokens=4))
    recorded.events["begin_ns"] *= stretch
    recorded.events["end_ns"] *= stretch
    _, data = page_of(recorded, tmp_path)
    events = recorded.events[np.argsort(recorded.events["begin_ns"], kind="stable")]
    types = {"begin": "<u4", "duration": "<u4", "evaluation": "<i4", "bytes": "<u4", "block": "<i4", "expert": "<i4"}
    columns = {
        name: np.frombuffer(base64.b64decode(text), types.get(name, "<i4" if name == "window" else "u1"))
        for name, text in data["columns"].items()
    }
    assert data["n_events"] == len(events) > 100
    tick = data["tick_ns"]
    assert (tick == 1) == (stretch == 1)
    assert np.abs(columns["begin"] * float(tick) + events["begin_ns"][0] - events["begin_ns"]).max() < tick
    assert np.abs(columns["duration"] * float(tick) - (events["end_ns"] - events["begin_ns"])).max() < tick
    for name in ("bytes", "block", "expert", "kind", "outcome"):
        assert np.array_equal(columns[name], events[name]), name
    computing = events["kind"] != EventKind.READ
    assert np.array_equal(columns["evaluation"][computing], events["batch"][computing])
    window = columns["window"]
    assert (window[events["kind"] == EventKind.OTHER] == -1).all()
    layers = events["kind"] == EventKind.EXPERTS
    assert (np.array(data["windows"]["block"])[window[layers]] == events["block"][layers]).all()
    summary = recorded.summary()
    assert data["summary"]["total"]["wait_s"] == summary.total.wait_s > 0
    assert data["tokens"] == list(recorded.tokens) and data["settings"] == recorded.settings
    assert [e["label"] for e in data["evaluations"][:2]] == [
        f"prompt, 12 tokens: {''.join(recorded.tokens[:12])}",
        f"token 1: {recorded.tokens[12]}",
    ]


def test_what_a_text_says_is_no_markup(tmp_path: Path) -> None:
    wild = "</script><b>{{style}} & é \n"
    recorded = timeline(decoded(), model=wild, tokens=(wild,))
    page, data = page_of(recorded, tmp_path)
    assert data["tokens"] == [wild] and data["model"] == wild
    assert page.count("</script>") == 2
    assert "<title>Timeline: &lt;/script&gt;&lt;b&gt;" in page


def test_an_empty_timeline_is_a_page_too(tmp_path: Path) -> None:
    _, data = page_of(timeline([], layers=(0, 1)), tmp_path)
    assert (data["n_events"], data["evaluations"], data["span_ns"]) == (0, [], 0)


def test_a_trace_is_what_perfetto_reads(tmp_path: Path) -> None:
    recorded = made_up(Shape(layers=4, tokens=5, prompt=0))
    recorded.write(tmp_path / "run.json")
    trace = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert trace["displayTimeUnit"] == "ms" and trace["otherData"]["model"] == "Made up, 4 layers"
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["ph"] for e in trace["traceEvents"]} == {"X", "M"}
    assert len(complete) == len(recorded.events) + 5, "and one for each token"
    on: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in complete:
        assert e["ts"] >= 0 and e["dur"] >= 0 and isinstance(e["args"], dict) and isinstance(e["name"], str)
        on.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["dur"]))
    assert set(on) == set(named) and named[1, 2] == "layers" and named[2, 1] == "reads 1" and len(on) > 3
    for thread, times in on.items():
        ends: list[float] = []
        for begin, duration in sorted(times, key=lambda time: (time[0], -time[1])):
            while ends and ends[-1] <= begin + 1e-9:
                ends.pop()
            assert not ends or begin + duration <= ends[-1] + 1e-6, f"{named[thread]}: events overlap without nesting"
            assert thread[0] == 1 or not ends, "reads that overlap are on threads of their own"
            ends.append(begin + duration)
    first = recorded.events[recorded.events["kind"] == EventKind.READ][0]
    start = recorded.events["begin_ns"].min()
    (found,) = [e for e in complete if e["pid"] == 2 and e["args"]["expert"] == first["expert"] and e["ts"] == 0]
    assert found["dur"] == (first["end_ns"] - first["begin_ns"]) / 1e3 and first["begin_ns"] == start
    assert found["args"]["bytes"] == 2_600_000 and found["args"]["layer"] == 0


def test_an_archive_holds_the_events_and_the_rest(tmp_path: Path) -> None:
    recorded = made_up(Shape(layers=2, tokens=2))
    recorded.write(tmp_path / "run.npz")
    with np.load(tmp_path / "run.npz") as archive:
        assert np.array_equal(archive["events"], recorded.events) and archive["events"].dtype == EVENT
        header = json.loads(archive["header"].tobytes().decode())
    assert header["layers"] == [0, 1] and header["settings"]["cache"] == 2 << 30
    assert header["tokens"] == list(recorded.tokens) and header["dropped"] == 0


@pytest.mark.parametrize("name", ["run", "run.txt", "run.HTML", "run.html.gz"])
def test_another_suffix_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=rf"{name}: a timeline is written as \.html \(a page\), \.json .* or \.npz"):
        timeline(decoded()).write(tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="none/run.html: cannot be written: No such file or directory"):
        timeline(decoded()).write(tmp_path / "none" / "run.html")
    (tmp_path / "run.html").mkdir()
    with pytest.raises(OutputError, match="run.html: cannot be written: Is a directory"):
        timeline(decoded()).write(tmp_path / "run.html")
    assert os.listdir(tmp_path) == ["run.html"]


# Recording a model


def loaded(model: Path, **options: Any) -> Llama:
    streaming = ExpertStreaming(reader="pread", **options)
    return Llama(str(model), expert_streaming=streaming, n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False)


def test_conditions_and_tokens_are_told(model: Path) -> None:
    llm = loaded(model)
    tokens = llm.tokenize(b"The library is open.")
    with llm.record_timeline() as recorded:
        llm.eval(tokens)
        llm.eval([5])
    llm.eval([6])
    description = llm._engine.description
    assert recorded.layers == tuple(layer.layer for layer in description.moe_layers)
    assert recorded.expert_bytes == tuple(layer.expert_bytes for layer in description.moe_layers)
    assert (recorded.threads, recorded.dropped, recorded.machine["cores"]) == (1, 0, os.cpu_count())
    assert recorded.settings["reader"] == "pread" and recorded.settings["kernels"] != "auto"
    assert recorded.settings["cache"] == llm.expert_stats().cache_bytes
    assert {"cache", "reader", "kernels", "compute", "direct", "verify"} <= set(recorded.settings)
    llm.close()


def wait_for_reads(llm: Llama) -> None:
    """A prompt reads ahead what may never be wanted: until that is there, and so in the recording."""
    before = -1
    while (now := llm.expert_stats().bytes_read) != before:
        before = now
        time.sleep(0.1)


def test_a_recording_tells_of_every_layer_and_token(model: Path) -> None:
    llm = loaded(model, prefetch="off")
    tokens = llm.tokenize(b"The library is open.")
    before = llm.expert_stats()
    with llm.record_timeline() as recorded:
        llm.eval(tokens)
        for token in (5, 6):
            llm.eval([token])
        wait_for_reads(llm)
    stats = llm.expert_stats().since(before)
    evaluated = [*tokens, 5, 6]
    assert recorded.tokens == tuple(llm.detokenize([t], special=True).decode("utf-8", "replace") for t in evaluated)
    events = recorded.events
    assert (events["begin_ns"] <= events["end_ns"]).all()
    of_kind = {kind: events[events["kind"] == kind] for kind in EventKind}
    assert len(of_kind[EventKind.EXPERTS]) == 3 * len(recorded.layers)
    assert sorted(set(of_kind[EventKind.EXPERTS]["block"].tolist())) == list(recorded.layers)
    assert sorted(set(of_kind[EventKind.EXPERTS]["tokens"].tolist())) == [1, len(tokens)]
    reads = of_kind[EventKind.READ]
    wanted = np.isin(reads["outcome"], [Outcome.DEMAND, Outcome.USEFUL, Outcome.LATE])  # prompts read ahead too
    assert wanted.sum() == stats.misses > 0
    assert int(reads["bytes"].sum()) == pytest.approx(stats.bytes_read, rel=0.01)  # the last of a file may be shorter
    decode, prompt = recorded.summary(), recorded.summary("prompt")
    assert (decode.tokens, prompt.tokens) == (2, len(tokens))
    for summary in (decode, prompt):
        assert summary.total.windows == summary.evaluations * len(recorded.layers)
        assert 0 < summary.total.attention_s + summary.total.experts_s < summary.wall_s
    assert decode.total.wait_s + prompt.total.wait_s == pytest.approx(stats.wait_s, rel=0.2, abs=1e-3)
    llm.close()


def test_a_recording_keeps_the_newest_events_and_the_next_begins_anew(model: Path) -> None:
    llm = loaded(model)
    with llm.record_timeline(capacity=5) as short:
        for token in (5, 6, 7):
            llm.eval([token])
    assert len(short.events) == 5 and short.dropped > 10
    last = llm.detokenize([7], special=True).decode("utf-8", "replace")
    assert short.tokens == (last,), "those that the events are of"
    with llm.record_timeline(capacity=5) as nothing:
        pass
    assert (len(nothing.events), nothing.dropped, nothing.tokens) == (0, 0, ())
    with llm.record_timeline() as again:
        llm.eval([8])
    assert again.dropped == 0 and again.events["begin_ns"].min() > short.events["end_ns"].max()
    assert again.summary().tokens == len(again.tokens) == 1
    llm.close()


def test_recording_changes_no_logits(model: Path) -> None:
    def logits(record: bool) -> list[float]:
        llm = loaded(model)
        with llm.record_timeline() if record else contextlib.nullcontext():
            llm.eval([1, 5, 6])
            llm.eval([7])
        found = list(llm._ctx.get_logits()[: llm.n_vocab()])
        llm.close()
        return found

    assert logits(True) == logits(False)


def test_what_cannot_be_recorded_is_refused(model: Path) -> None:
    llm = loaded(model)
    with (
        llm.record_timeline(),
        pytest.raises(OptionError, match="^the timeline of this model is being recorded already"),
    ):
        with llm.record_timeline():
            pass
    for capacity in (0, -1, True, "many"):
        with pytest.raises(OptionError, match="capacity=.*: expected a number of events, at least 1"):
            with llm.record_timeline(capacity=capacity):
                pass
    with pytest.raises(OptionError, match=f"^capacity={2**58}: no memory for .* of events; record fewer"):
        with llm.record_timeline(capacity=2**58):
            pass
    with llm.record_timeline():  # works after what was refused
        pass
    with pytest.raises(MoestreamError, match="^the model is closed$"):
        with llm.record_timeline():
            llm.close()
    with pytest.raises(MoestreamError, match="^the model is closed$"):
        with llm.record_timeline():
            pass
    stock = Llama(str(model), n_ctx=64, verbose=False)
    with pytest.raises(OptionError, match=r"this model is not streamed: .* for record_timeline\(\)"):
        with stock.record_timeline():
            pass
    stock.close()
