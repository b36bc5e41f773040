"""`moestream bench`: arms in turns, limits that hold, and a record of whatever came of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

import bench_records
import moestream
from command import PYTHON, moestream_command
from factory import make
from moestream.bench import ARMS, benchmark, cgroup, parse_arm, rounds, turn
from moestream.bench.cgroup import LimitedGroup, SystemdScope, limited
from moestream.bench.disk import BlockDevice, block_device_of, drop_caches
from moestream.bench.options import numbers, pair
from moestream.bench.session import Arm, ArmRefusedError, ArmSilentError, Session
from moestream.bench.summary import drift
from moestream.cli import main as cli_main
from moestream.errors import MeasurementError, ModelError, OptionError, OutputError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandwidth is measured for a moment only, and nobody waits for huge pages."""
    monkeypatch.setattr(turn, "READ_S", 0.02)
    monkeypatch.setattr(Session, "settle", lambda self, **_: 0.0)


@pytest.fixture
def group() -> None:
    """Skips where no group can be made."""
    try:
        with LimitedGroup(memory_bytes=64 * MIB):
            pass
    except MeasurementError as error:
        pytest.skip(str(error))


def groups_left() -> list[Path]:
    return [*Path("/sys/fs/cgroup").rglob("moestream-bench-*")]


# Numbers


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (512, (512,)),
        ("128,256", (128, 256)),
        ("1-4", (1, 2, 3, 4)),
        ("128-512+128", (128, 256, 384, 512)),
        ("1-32*2", (1, 2, 4, 8, 16, 32)),
        ("100-512+128", (100, 228, 356, 484)),
        ([16, "32,64"], (16, 32, 64)),
        ("16,16", (16,)),
        ("0", (0,)),
    ],
)
def test_numbers_are_those_of_llama_bench(value: object, expected: tuple[int, ...]) -> None:
    assert numbers("-n", value) == expected


@pytest.mark.parametrize(
    ("value", "least", "message"),
    [
        ("many", 0, "-n 'many': expected numbers such as 512, 128,256, or a range such as 1-4, 128-512+128 or 1-32*2"),
        ("-5", 0, "-n '-5': expected numbers such as"),
        ("9-3", 0, "-n '9-3': the range ends before it begins"),
        ("1-9+0", 0, "-n '1-9+0': the range never comes to its end"),
        ("0-9*2", 0, "-n '0-9*2': the range never comes to its end"),
        ("1-9*1", 0, "-n '1-9*1': the range never comes to its end"),
        ("1-100000", 0, "-n '1-100000': more than 1000 numbers"),
        ("0", 1, "-n 0: must be at least 1"),
        ([], 0, "-n: no number is given"),
    ],
)
def test_numbers_that_are_none(value: object, least: int, message: str) -> None:
    with pytest.raises(OptionError, match=f"^{re.escape(message)}"):
        numbers("-n", value, least=least)


def test_a_prompt_and_what_is_written_behind_it() -> None:
    assert pair("-pg", "512,128") == (512, 128)
    for wrong in ("512", "512,0", "512,128,1", "a,b"):
        with pytest.raises(OptionError, match=f"^-pg '{wrong}': expected a prompt's tokens and those written after it"):
            pair("-pg", wrong)


# Arms


def test_an_arm_takes_the_options_of_streaming(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.touch()
    arm = parse_arm(f"stream-prefetch:cache=3GiB:policy=lru:experts_used=4:direct=off:disk=500M:model={other}")
    assert arm.options == {"prefetch": "auto", "cache": "3GiB", "policy": "lru", "experts_used": 4, "direct": False}
    assert (arm.disk, arm.model, arm.streamed) == (500_000_000, other, True)
    assert parse_arm("stream-reactive").options == {"prefetch": "off"}


def test_stock_arms_take_an_experts_number_by_the_key_of_the_file() -> None:
    arm = parse_arm("stock-mmap:experts_used=2").arm(Path("m.gguf"), architecture="qwen3moe")
    assert arm.kv_overrides == {"qwen3moe.expert_used_count": 2}
    assert arm.experts_used is None


def test_a_mapped_arm_has_the_usual_readahead_unless_told() -> None:
    assert parse_arm("stock-mmap").read_ahead_kib == 128
    assert parse_arm("stock-mmap:read_ahead=disk").read_ahead_kib == 0
    assert parse_arm("stock-resident").read_ahead_kib == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stock", f"arm 'stock': there is none of that name; there are {', '.join(ARMS)}"),
        ("stock-mmap:cache=1G", "arm 'stock-mmap:cache=1G': 'cache=1G' is no option of stock-mmap; it takes repack="),
        (
            "stream-reactive:speed=9",
            "arm 'stream-reactive:speed=9': 'speed=9' is no option of stream-reactive; it takes cache=",
        ),
        ("stream-reactive:cache", "arm 'stream-reactive:cache': 'cache' is no option of stream-reactive"),
        ("stream-reactive:policy=best", "arm 'stream-reactive:policy=best': policy='best': expected one of 'lru'"),
        (
            "stream-reactive:experts_used=0",
            "arm 'stream-reactive:experts_used=0': experts_used='0': expected a number of at least 1",
        ),
        (
            "stream-reactive:model=no.gguf",
            "arm 'stream-reactive:model=no.gguf': model='no.gguf': there is no such file",
        ),
        (
            "stock-none:read_ahead=128",
            "arm 'stock-none:read_ahead=128': read_ahead= is about mapped files, and stock-none maps none",
        ),
    ],
)
def test_arms_that_are_none(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=f"^{re.escape(message)}"):
        parse_arm(text)


# A run


@pytest.fixture(scope="module")
def records(folder: Path) -> list[dict]:
    path = make(folder, tokenizer="none")
    cache = moestream.describe(path).minimum_cache_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turn, "READ_S", 0.02)
        patch.setattr(Session, "settle", lambda self, **_: 0.0)
        return benchmark(
            model=path,
            arms=["stock-none", f"stream-reactive:cache={cache}", "stream-prefetch"],
            n_prompt=16,
            n_gen=24,
            n_pg=["8,8"],
            n_depth="0,8",
            threads=1,
            repetitions=2,
            warmup=4,
            random=True,
        )


def test_each_arm_and_test_has_a_record(records: list[dict]) -> None:
    arms = [record["arm"] for record in records]
    assert [arms.count(arm) for arm in dict.fromkeys(arms)] == [6, 6, 6]
    tests = [(record["n_prompt"], record["n_gen"], record["n_depth"]) for record in records[:6]]
    assert tests == [(16, 0, 0), (0, 24, 0), (8, 8, 0), (16, 0, 8), (0, 24, 8), (8, 8, 8)]
    assert {record["outcome"] for record in records} == {"ok"}
    assert {record["routing"] for record in records} == {"own"}


def test_arms_take_turns_and_each_round_begins_with_another(records: list[dict]) -> None:
    orders = {record["arm"].partition(":")[0]: record["round_order"] for record in records}
    assert orders == {"stock-none": [0, 2], "stream-reactive": [1, 0], "stream-prefetch": [2, 1]}


def test_speeds_are_those_of_the_tokens_times(records: list[dict]) -> None:
    for record in records:
        tokens = record["n_prompt"] + record["n_gen"]
        assert record["samples_ts"] == pytest.approx([tokens / ns * 1e9 for ns in record["samples_ns"]], rel=1e-6)
        assert record["avg_ts"] == pytest.approx(np.mean(record["samples_ts"]))
        assert [len(times) for times in record["token_ns"]] == [record["n_gen"]] * 2
        if record["n_gen"] and not record["n_prompt"]:
            assert [sum(times) for times in record["token_ns"]] == pytest.approx(record["samples_ns"], rel=1e-6)
            assert record["p50_ms"] <= record["p95_ms"] <= record["p99_ms"]


def test_a_streamed_record_tells_what_was_read_and_where_the_time_went(records: list[dict]) -> None:
    for record in records:
        if not record["arm"].startswith("stream"):
            assert record["hit_rate"] is None
            continue
        parts = [record[f"{part}_ms"] for part in ("wait", "compute", "attention", "router", "other")]
        tokens = record["n_prompt"] + record["n_gen"]
        token_ms = sum(record["samples_ns"]) / 2 / tokens / 1e6
        assert sum(parts) == pytest.approx(token_ms, rel=0.5)
        assert 0 <= record["hit_rate"] <= 1
        assert record["compute_limit_ms"] == pytest.approx(token_ms - record["wait_ms"], rel=1e-3)
    reactive = next(r for r in records if r["arm"].startswith("stream-reactive") and r["n_gen"] == 24)
    assert reactive["demand_bytes_per_token"] > reactive["expert_bytes"] / 32, "more than one of 4 layers x 8 experts"
    assert reactive["useful_bytes_per_token"] == 0, "only a prompt is read ahead"


def test_few_tokens_are_not_called_steady(records: list[dict]) -> None:
    written = next(record for record in records if record["n_gen"] == 24)
    assert written["steady"] is False
    assert "24 tokens are too few to call it steady: 256 are wanted" in written["warnings"]


def test_a_record_is_json_and_names_machine_disk_and_model(records: list[dict]) -> None:
    record = json.loads(json.dumps(records[0], allow_nan=False))
    assert len(record["model_hash"]) == 64
    assert record["machine"]["versions"]["moestream"] == moestream.__version__
    assert record["bytes_on_disk"] > 0 and record["peak_rss"] > record["dense_bytes"]
    assert record["disk_bps_before"] > 0 and record["disk_bps_after"] > 0
    assert 0 <= record["bench_overhead"] < 0.2


def test_a_text_is_the_same_for_all_arms_and_said_when_it_is_too_short(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("The library is open.")
    found = benchmark(
        model=make(folder), arms="stock-none,stream-reactive", n_prompt=0, n_gen=40, repetitions=1, warmup=0, file=text
    )
    assert {record["workload"] for record in found} == {"text: short.txt"}
    for record in found:
        assert any(warning.startswith("the text was too short and was given again") for warning in record["warnings"])


def test_a_model_without_a_tokenizer_asks_for_random_tokens(folder: Path) -> None:
    (found,) = benchmark(
        model=make(folder, tokenizer="none"), arms="stream-reactive", n_prompt=0, n_gen=8, repetitions=2, warmup=0
    )
    assert found["outcome"] == "failed"
    assert found["outcome_message"].endswith("no text can be given to it; use random tokens (--random)")


def test_a_slow_test_ends_and_what_was_done_counts(folder: Path) -> None:
    cache = moestream.describe(make(folder)).minimum_cache_bytes
    (found,) = benchmark(
        model=make(folder),
        arms=f"stream-reactive:cache={cache}:disk=2M",
        n_prompt=0,
        n_gen=5000,
        repetitions=1,
        warmup=0,
        test_seconds=0.5,
    )
    assert found["outcome"] == "too slow"
    written = len(found["token_ns"][0])
    assert 0 < written < 5000
    assert found["outcome_message"] == f"{written} tokens were written in the time that a test has"
    assert found["avg_ts"] == pytest.approx(written / found["samples_ns"][0] * 1e9)


def test_a_slower_disk_inside_the_reader_is_what_the_record_counts_with(folder: Path) -> None:
    path = make(folder)
    cache = moestream.describe(path).minimum_cache_bytes
    slow, quick = benchmark(
        model=path,
        arms=[f"stream-reactive:cache={cache}:disk=4M", f"stream-reactive:cache={cache}"],
        n_prompt=0,
        n_gen=48,
        repetitions=1,
        warmup=8,
    )
    assert slow["disk_bps_before"] <= 4e6
    assert slow["avg_ts"] < quick["avg_ts"]
    assert slow["read_limit_ms"] == pytest.approx(slow["demand_bytes_per_token"] / 4e6 * 1e3, rel=0.05)
    assert slow["limit_share"] < 1.1


def test_random_tokens_differ_from_each_other_and_from_round_to_round(folder: Path) -> None:
    with Session(Arm(make(folder, tokenizer="none"), "stock")) as session:
        tokens = turn.Tokens("", per_round=50)
        rounds = [tokens.of_round(number, session, 1000)(50) for number in (0, 1, 0)]
    assert len(set(rounds[0])) > 40
    assert rounds[0] == rounds[2] != rounds[1]


# Limits


def test_several_sequences_are_decoded_together(folder: Path) -> None:
    model, texts = make(folder), [[5, 6, 7, 8], [50, 60, 70, 80], [9, 99, 9, 99]]
    with Session(Arm(model, "streamed", sequences=3, threads=1)) as session:
        feed = session.feed([text[step] for step in range(4) for text in texts])
        again = session.feed([text[step] for step in range(4) for text in texts])
        with pytest.raises(ValueError, match="several sequences are fed token by token, from an empty context"):
            session.feed([1, 2, 3], at_once=True)
    with Session(Arm(model, "streamed", threads=1)) as session:
        alone = session.feed(texts[2])
    assert len(feed.token_s) == 4 and again.logits_crc == feed.logits_crc == alone.logits_crc



def test_an_arm_that_is_killed_for_memory_is_a_result(folder: Path, group: None) -> None:
    path = make(folder, d=512, ff=512, heads=8, head_dim=64, layers=8, experts=48, topk=4)
    limit = 150 * MIB
    assert moestream.describe(path).expert_bytes > limit
    killed, lived = benchmark(
        model=path,
        arms="stock-resident,stream-reactive",
        memory=limit,
        n_prompt=0,
        n_gen=8,
        batch_size=32,
        ubatch_size=32,
        repetitions=2,
        warmup=0,
    )
    assert killed["outcome"] == "oom-killed"
    assert killed["outcome_message"].startswith("killed by the kernel while ")
    assert killed["oom_kills"] >= 1 and killed["avg_ts"] == 0 and killed["limited_by"].startswith("cgroup")
    assert killed["model_type"] == lived["model_type"] and killed["model_n_params"] == lived["model_n_params"]
    assert killed["round_order"] == [0], "what was killed while loading is not tried again"
    assert lived["outcome"] == "ok", lived["outcome_message"]
    assert lived["cgroup_peak"] <= limit
    assert groups_left() == []


def test_a_limit_in_which_a_model_cannot_be_streamed_is_refused_before(folder: Path) -> None:
    path = make(folder)
    with pytest.raises(
        OptionError,
        match=r"^memory: 50.00 MiB are too few for stream-prefetch: .* needs .* for the experts of one token",
    ):
        benchmark(model=path, arms="stream-prefetch", memory="50MiB")


def test_an_arm_that_would_take_all_memory_is_refused_where_nothing_limits_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(folder)
    monkeypatch.setattr(rounds, "available_bytes", lambda: 90 * MIB)
    for arm in ("stock-resident", "stock-none", "stock-mmap"):
        with pytest.raises(
            OptionError, match=f"^{arm} takes .* and 90.00 MiB are available: give a limit with memory="
        ):
            benchmark(model=path, arms=arm)
    with pytest.raises(
        OptionError, match=r"^memory: 1.00 GiB are more than the 90.00 MiB that are available, and so no limit$"
    ):
        benchmark(model=path, arms="stock-mmap", memory="1GiB")
    (found,) = benchmark(model=path, arms="stock-mmap-tuned", n_prompt=0, n_gen=4, repetitions=1, warmup=0)
    assert found["outcome"] == "ok", "its pages can be given up"


def test_without_the_right_to_make_a_group_nothing_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_mounts", dict)
    monkeypatch.setattr(cgroup.shutil, "which", lambda name: None)
    with pytest.raises(
        MeasurementError,
        match=r"^a memory limit needs a cgroup memory controller \(v1 or v2\), and none is mounted here; and systemd-run is not installed$",
    ):
        benchmark(model=make(folder), arms="stock-mmap", memory="2GiB", on_record=pytest.fail)


def test_without_limits_a_group_is_not_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_mounts", dict)
    monkeypatch.setattr(cgroup.shutil, "which", lambda name: None)
    (found,) = benchmark(model=make(folder), arms="stream-reactive", n_prompt=0, n_gen=4, repetitions=1, warmup=0)
    assert (found["outcome"], found["cgroup_peak"], found["limited_by"]) == ("ok", None, "")


def test_a_group_of_a_process_that_is_gone_is_removed(group: None) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with LimitedGroup(memory_bytes=64 * MIB) as kept:
        root = kept._folders[0].parent
        forgotten = root / f"moestream-bench-{gone.pid}-1"
        forgotten.mkdir()
        with LimitedGroup(memory_bytes=64 * MIB):
            assert not forgotten.exists()
            assert kept._folders[0].exists()


def fake_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, works: bool, has: str = "") -> Path:
    """A systemd-run that runs the command and writes down how it was called, or fails as without a bus.

    Its trial finds the limits `has`.
    """
    log = tmp_path / "calls"
    run = tmp_path / "systemd-run"
    run.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n'
        + (
            f'case "$*" in *unit=trial-*) echo "{has}"; exit 0;; esac\n'
            'while [ "$1" != -- ]; do shift; done; shift; exec "$@"\n'
            if works
            else "echo Failed to connect to bus >&2\nexit 1\n"
        )
    )
    (tmp_path / "systemctl").write_text("#!/bin/sh\nexit 0\n")
    for file in (run, tmp_path / "systemctl"):
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(cgroup, "_mounts", dict)
    return log


def test_systemd_limits_where_we_may_not(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_systemd(tmp_path, monkeypatch, works=True, has=f"memory {1 << 30}")
    (found,) = benchmark(
        model=make(folder), arms="stream-reactive", memory="1GiB", n_prompt=0, n_gen=4, repetitions=1, warmup=0
    )
    assert (found["outcome"], found["limited_by"]) == ("ok", "systemd-run")
    assert f"--property MemoryMax={1 << 30} --property MemorySwapMax=0 -- " in log.read_text()


@pytest.mark.parametrize(
    ("has", "message"),
    [
        ("memory max", "systemd-run does not set a memory limit here"),
        ("memory ", "systemd-run does not set a memory limit here"),
        (f"memory {64 * MIB}\n8:0 rbps=max wbps=1 riops=max wiops=max", "systemd-run does not set a read limit here"),
        (f"memory {64 * MIB}", "systemd-run does not set a read limit here"),
    ],
)
def test_a_limit_that_systemd_leaves_out_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: str, message: str
) -> None:
    fake_systemd(tmp_path, monkeypatch, works=True, has=has)
    limits = {"memory_bytes": 64 * MIB, "read_bytes_per_s": 10**8, "devices": [BlockDevice("sda", "8:0")]}
    with pytest.raises(MeasurementError, match=f"^{message}"), SystemdScope(**limits):
        pass


def test_limits_that_systemd_sets_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has = f"memory {64 * MIB}\n8:0 rbps=100000000 wbps=max riops=max wiops=max"
    fake_systemd(tmp_path, monkeypatch, works=True, has=has)
    with SystemdScope(memory_bytes=64 * MIB, read_bytes_per_s=10**8, devices=[BlockDevice("sda", "8:0")]):
        pass


def test_systemd_that_may_not_either_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_systemd(tmp_path, monkeypatch, works=False)
    with pytest.raises(MeasurementError, match="and systemd-run cannot set these limits: Failed to connect to bus$"):
        limited(memory_bytes=64 * MIB)
    with (
        pytest.raises(MeasurementError, match="^systemd-run cannot set these limits"),
        SystemdScope(memory_bytes=64 * MIB),
    ):
        pass


def test_two_benchmarks_at_once_would_spoil_each_other(folder: Path) -> None:
    with (
        rounds._alone(),
        pytest.raises(MeasurementError, match=r"^another benchmark runs on this machine \(.* is locked\)"),
    ):
        benchmark(model=make(folder), arms="stock-none", n_prompt=0, n_gen=4, repetitions=1)


# What goes wrong


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arms": ""}, "arms: none is given"),
        ({"arms": "stock-mmap,stock-mmap"}, "arms: stock-mmap is given twice"),
        (
            {"n_prompt": 0, "n_gen": 0},
            "there is nothing to measure: give tokens of a prompt (-p) or to write (-n)",
        ),
        ({"memory": "much"}, "memory: size 'much': expected a number and a unit"),
        ({"repetitions": 0}, "repetitions must be above 0, warmup at least 0, test_seconds above 0"),
        ({"file": "no.txt"}, "cannot read the text no.txt: No such file or directory"),
        ({"file": "no.txt", "random": True}, "both a text and random tokens are asked for: give one"),
    ],
)
def test_options_that_are_refused(folder: Path, options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=f"^{re.escape(message)}"):
        benchmark(model=make(folder), **options)


def test_a_model_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no.gguf"):
        benchmark(model=tmp_path / "no.gguf")


def test_a_model_that_changes_between_turns_ends_it_and_keeps_what_was_measured(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "changing.gguf"
    path.write_bytes(make(folder).read_bytes())
    kept: list[dict] = []

    def change(doing: str, done: int, total: int) -> None:
        if done == 2:
            os.utime(path, (1, 1))

    with pytest.raises(
        MeasurementError,
        match="changing.gguf: was changed while it was measured, so the arms did not run the same model",
    ):
        benchmark(
            model=path,
            arms="stock-none,stream-reactive",
            n_prompt=0,
            n_gen=4,
            repetitions=2,
            warmup=0,
            on_record=kept.append,
            progress=change,
        )
    assert [(record["arm"], record["outcome"], len(record["samples_ns"])) for record in kept] == [
        ("stock-none", "interrupted", 1),
        ("stream-reactive", "ok", 2),
    ]
    assert kept[0]["outcome_message"] == "broken off after 1 rounds"


def test_a_model_that_goes_away_between_turns_ends_it_and_keeps_what_was_measured(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "going.gguf"
    path.write_bytes(make(folder).read_bytes())
    kept: list[dict] = []

    def remove(doing: str, done: int, total: int) -> None:
        if done == 1:
            path.unlink(missing_ok=True)

    options = {"n_prompt": 0, "n_gen": 4, "repetitions": 3, "warmup": 0, "on_record": kept.append, "progress": remove}
    with pytest.raises(MeasurementError, match="going.gguf: cannot be read any more"):
        benchmark(model=path, arms="stream-reactive", **options)
    assert [record["outcome"] for record in kept] == ["interrupted"]


def test_an_arm_that_does_not_answer_is_a_result_and_others_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Session.feed

    def feed(self: Session, *given: object, **options: object) -> object:
        if self.arm.kind == "stock":
            raise ArmSilentError("the stock arm gave no answer within 900 s")
        return answer(self, *given, **options)

    monkeypatch.setattr(Session, "feed", feed)
    silent, ran = benchmark(
        model=make(folder), arms="stock-none,stream-reactive", n_prompt=0, n_gen=4, repetitions=1, warmup=0
    )
    assert silent["outcome"] == "failed"
    assert silent["outcome_message"] == "while computing its first token: the stock arm gave no answer within 900 s"
    assert ran["outcome"] == "ok"


def test_a_test_that_was_done_counts_though_a_later_one_was_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Session.feed

    def feed(self: Session, tokens: list[int], **options: object) -> object:
        if len(tokens) == 9:
            raise ArmSilentError("no answer")
        return answer(self, tokens, **options)

    monkeypatch.setattr(Session, "feed", feed)
    first, second = benchmark(
        model=make(folder), arms="stream-reactive", n_prompt=0, n_gen="4,9", repetitions=2, warmup=0
    )
    assert first["outcome"] == "ok" and "a later test of this arm: while measuring: no answer" in first["warnings"]
    assert second["outcome"] == "failed" and second["avg_ts"] == 0


def test_bandwidth_is_measured_on_the_largest_file_of_a_split_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = make(folder, split=3), []
    run = subprocess.run
    monkeypatch.setattr(
        turn.subprocess, "run", lambda command, **options: (asked.append(command), run(command, **options))[1]
    )
    benchmark(model=path, arms="stream-reactive", n_prompt=0, n_gen=2, repetitions=1, warmup=0)
    read = {json.loads(command[-1])["path"] for command in asked if "moestream.bench.reads" in command}
    assert read == {str(max(moestream.describe(path).files, key=lambda file: file.path.stat().st_size).path)}


def test_where_not_all_caches_may_be_dropped_those_of_the_file_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Path.write_text

    def refuse(self: Path, *given: object) -> int:
        if self == Path("/proc/sys/vm/drop_caches"):
            raise OSError(30, "Read-only file system")
        return written(self, *given)

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    drop_caches(make(folder))


def test_a_file_in_memory_is_told_as_that() -> None:
    memory = Path("/dev/shm")
    if not shutil.which("fincore") or not os.access(memory, os.W_OK):
        pytest.skip("there is no fincore or no /dev/shm here")
    with tempfile.NamedTemporaryFile(dir=memory) as file:
        file.write(bytes(MIB))
        file.flush()
        with pytest.raises(
            MeasurementError, match="stay in the page cache: its file system is memory; put it on a disk$"
        ):
            drop_caches(Path(file.name))
        with pytest.raises(MeasurementError, match="is not on a block device"):
            block_device_of(Path(file.name))


def test_an_arm_that_cannot_be_loaded_says_why(folder: Path) -> None:
    with (
        pytest.raises(ArmRefusedError, match="cannot hold the experts of one token"),
        Session(Arm(make(folder), "streamed", cache=1)),
    ):
        pass


def test_a_stock_arm_does_not_import_moestream(folder: Path) -> None:
    """Its process must be stock down to its libraries."""
    with Session(Arm(make(folder), "stock")) as session:
        maps = Path(f"/proc/{session.pid}/maps").read_text()
    assert "libllama" in maps
    assert "libmoestream" not in maps


# Drift


def test_drift_is_found_where_there_is_some_and_not_where_there_is_none() -> None:
    draw = np.random.default_rng(1)
    even = [draw.gamma(4, size=256) for _ in range(3)]
    ratio, chance = drift(even)
    assert ratio == pytest.approx(1, abs=0.1) and chance > 0.05
    slower = [times * np.linspace(1, 1.6, 256) for times in even]
    ratio, chance = drift(slower)
    assert ratio > 1.15 and chance < 0.01
    assert drift([[1.0] * 15]) == (None, None)


# The command


def test_the_table_says_how_arms_did(folder: Path, tmp_path: Path) -> None:
    done = moestream_command(
        *("bench", "-m", make(folder, tokenizer="none"), "--arms", "stock-none,stream-reactive", "--random"),
        *("-p", "0", "-n", "8", "-r", "1", "--warmup", "2", "-o", "md", "-o", f"json={tmp_path / 'run.json'}"),
        *("-o", f"csv={tmp_path / 'run.csv'}"),
    )
    assert done.returncode == 0, done.stderr
    assert "| stock-none " in done.stdout and "| stream-reactive " in done.stdout and "tg8" in done.stdout
    found = json.loads((tmp_path / "run.json").read_text())
    assert [record["arm"] for record in found] == ["stock-none", "stream-reactive"]
    assert (tmp_path / "run.csv").read_text().startswith("build_commit,build_number,cpu_info,")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.csv", "run.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "xml"), "-o xml: expected md, csv, json, jsonl, sql, html, each with =FILE behind it if wanted"),
        (("-o", "html"), "-o html: a report is a file: give -o html=FILE"),
        (
            ("-o", "md", "-o", "csv"),
            "-o: only one format can go to the terminal; give the others a file, as in -o json=FILE",
        ),
        (("-o", "json=/nowhere/run.json"), "--output /nowhere/run.json: there is no folder /nowhere; make it first"),
        (("--arms", "stock"), "arm 'stock': there is none of that name"),
    ],
)
def test_wrong_options_of_the_command(arguments: tuple[str, ...], message: str) -> None:
    done = moestream_command("bench", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(f"moestream: error: {message}")
    assert done.stdout == ""


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_is_told_to_stop_keeps_what_was_measured_and_leaves_no_group(
    folder: Path, tmp_path: Path, by: signal.Signals
) -> None:
    command = [*PYTHON, "bench", "-m", str(make(folder)), "--arms", "stock-none,stream-reactive", "-p", "0", "-n", "16"]
    command += ["-r", "500", "--warmup", "0", "--progress", "-o", f"json={tmp_path / 'run.json'}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "round 2 of 500" in line:
            break
    time.sleep(0.3)
    process.send_signal(by)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert told.endswith("moestream: interrupted: what was measured so far is told\n")
    found = json.loads((tmp_path / "run.json").read_text())
    assert {record["outcome"] for record in found} == {"interrupted"}
    assert all(record["avg_ts"] > 0 for record in found)
    assert groups_left() == []


@pytest.mark.parametrize("format", ["json", "csv", "sql", "jsonl", "md"])
def test_a_file_of_before_stays_where_nothing_was_measured(folder: Path, tmp_path: Path, format: str) -> None:
    before = tmp_path / "before"
    before.write_text("of before")
    code = cli_main(["bench", "-m", str(make(folder)), "--arms", "none", "-o", f"{format}={before}"])
    assert code == 1
    assert before.read_text() == "of before"
    assert list(tmp_path.iterdir()) == [before]


def test_a_file_of_before_stays_where_the_disk_is_full(tmp_path: Path) -> None:
    from moestream.cli.bench import _written_to

    before = tmp_path / "before"
    before.write_text("of before")
    full = OSError(28, "No space left on device")
    with (
        pytest.raises(OutputError, match="before: cannot be written: No space left on device$"),
        _written_to(before, "json") as out,
    ):
        out.record(bench_records.record())
        out.close = lambda: (_ for _ in ()).throw(full)
    assert before.read_text() == "of before"
    assert list(tmp_path.iterdir()) == [before]


def test_two_formats_need_two_files(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = tmp_path / "run"
    assert cli_main(["bench", "-m", str(make(folder)), "-o", f"json={same}", "-o", f"csv={same}"]) == 1
    assert f"-o: {same} is given twice; each format needs a file of its own" in capsys.readouterr().err


def test_a_full_disk_is_told(folder: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [
                *PYTHON,
                "bench",
                "-m",
                str(make(folder)),
                "--arms",
                "stream-reactive",
                "-p",
                "0",
                "-n",
                "4",
                "-r",
                "1",
                "--warmup",
                "0",
            ],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert done.returncode == 1
    assert "No space left on device" in done.stderr


def test_the_function_and_the_command_have_the_same_options() -> None:
    import inspect

    from moestream.cli import _parser

    options = {action.dest for action in _parser()._subparsers._group_actions[0].choices["bench"]._actions}
    only_of_the_command = {"help", "verbose", "hf_repo", "hf_file", "output", "progress", "compare", "no_warmup"}
    assert options - only_of_the_command == set(inspect.signature(benchmark).parameters) - {
        "on_record",
        "progress",
    }
