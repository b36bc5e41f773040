"""How much memory there is for experts: sizes as people write them, limits as kernels write them."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import moestream
from factory import make
from moestream import OptionError, memory
from moestream._engine import auto_cache_bytes
from moestream.bench.cgroup import LimitedGroup
from moestream.errors import MeasurementError
from moestream.memory import available_bytes, format_size, parse_size

GIB = 2**30
MIB = 2**20

# Sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("3GiB", 3 * GIB),
        ("3Gi", 3 * GIB),
        ("3gib", 3 * GIB),
        ("512MiB", 512 * MIB),
        ("1KiB", 1024),
        ("1TiB", 2**40),
        ("2G", 2 * 10**9),
        ("2GB", 2 * 10**9),
        ("5k", 5000),
        ("1.5GiB", 3 * GIB // 2),
        ("1000000", 1000000),
        ("17B", 17),
        (4096, 4096),
    ],
)
def test_a_size_in_bytes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["3GB ", " 3GB", "3 GB", "-1", "+3GiB", "1e9", "GiB", "", "3GiBi", "3X", ".5GiB", "3.GiB", "1_000", "²GiB", "３GiB", "3GiB\n"]
)
def test_a_text_that_is_no_size(text: str) -> None:
    said = f"size {text!r}: expected a number and a unit without blanks, such as '3GiB', '512MiB' or '2G'"
    with pytest.raises(OptionError) as raised:
        parse_size(text)
    assert str(raised.value) == said


@pytest.mark.parametrize("text", [0, -1, "0", "0GiB", "0.0001"])
def test_a_size_of_nothing(text: str | int) -> None:
    with pytest.raises(OptionError, match=f"^size {re.escape(repr(text))}: must be more than zero bytes$"):
        parse_size(text)


@pytest.mark.parametrize("text", [True, None, 1.5, b"3GiB"])
def test_what_is_no_size_at_all(text: object) -> None:
    with pytest.raises(OptionError, match="expected bytes as a number or a size such as '3GiB'$"):
        parse_size(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (3 * GIB, "3.00 GiB"),
        (1536 * MIB, "1.50 GiB"),
        (5 * 2**40, "5.00 TiB"),
        (5000 * 2**40, "5000.00 TiB"),
    ],
)
def test_a_size_for_reading(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("available", "untouched", "maximum", "cache"),
    [
        (10 * GIB, 0, 20 * GIB, 9 * GIB),
        (10 * GIB, 5 * GIB, 20 * GIB, int(4.5 * GIB)),
        (10 * GIB, 0, 3 * GIB, 3 * GIB),
        (1 * GIB, 2 * GIB, 3 * GIB, 0),
        (0, 0, 3 * GIB, 0),
    ],
)
def test_auto_takes_what_is_left_less_a_tenth_and_never_more_than_all(available: int, untouched: int, maximum: int, cache: int) -> None:
    assert auto_cache_bytes(available=available, untouched=untouched, maximum=maximum) == pytest.approx(cache, abs=1)


# Limits

MACHINE = 64 * GIB
V1_UNLIMITED = 9223372036854771712


@pytest.fixture
def limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Files as the kernel would show them. `group(path, ...)` writes a cgroup; `available()` asks under them."""
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=MACHINE))
    proc, mounts = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()

    def group(path: str, **files: object) -> None:
        folder = mounts / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if isinstance(content, dict):
                content = "".join(f"{key} {value}\n" for key, value in content.items())
            (folder / f"memory.{name}").write_text(f"{content}\n")

    def available(memberships: str) -> int:
        (proc / "cgroup").write_text(memberships)
        return available_bytes(proc=proc, mounts=mounts)

    return SimpleNamespace(group=group, available=available, proc=proc, mounts=mounts)


def test_without_limits_it_is_what_the_machine_has(limits: SimpleNamespace) -> None:
    assert available_bytes(proc=limits.proc / "none", mounts=limits.mounts) == MACHINE
    assert limits.available("0::/\n") == MACHINE
    assert limits.available("0::/no/such/folder\n") == MACHINE
    assert limits.available("") == MACHINE


def test_a_v2_limit_less_what_is_used(limits: SimpleNamespace) -> None:
    limits.group("app", max=6 * GIB, current=2 * GIB, stat={})
    assert limits.available("0::/app\n") == 4 * GIB


def test_a_v1_limit_less_what_is_used(limits: SimpleNamespace) -> None:
    limits.group("memory/app", limit_in_bytes=6 * GIB, usage_in_bytes=2 * GIB, stat={})
    assert limits.available("4:cpu,cpuacct:/\n3:memory:/app\n0::/\n") == 4 * GIB


def test_clean_page_cache_counts_as_free(limits: SimpleNamespace) -> None:
    stat = {"anon": GIB, "file": 3 * GIB, "inactive_file": 2 * GIB, "active_file": GIB, "file_dirty": GIB // 2}
    limits.group("app", max=6 * GIB, current=5 * GIB, stat=stat)
    assert limits.available("0::/app\n") == GIB + 3 * GIB - GIB // 2
    stat = {"inactive_file": 7, "active_file": 7, "dirty": 7, "total_inactive_file": 2 * GIB, "total_active_file": GIB, "total_dirty": GIB}
    limits.group("memory/app", limit_in_bytes=6 * GIB, usage_in_bytes=5 * GIB, stat=stat)
    assert limits.available("3:memory:/app\n") == GIB + 3 * GIB - GIB


@pytest.mark.parametrize("unlimited", ["max", V1_UNLIMITED])
def test_no_limit_is_none(unlimited: object, limits: SimpleNamespace) -> None:
    limits.group("app", max=unlimited, current=50 * GIB, stat={})
    limits.group("memory/app", limit_in_bytes=unlimited, usage_in_bytes=50 * GIB, stat={})
    assert limits.available("3:memory:/app\n0::/app\n") == MACHINE


def test_the_tightest_of_nested_limits_holds(limits: SimpleNamespace) -> None:
    limits.group("", max="max", current=40 * GIB, stat={})
    limits.group("slice", max=8 * GIB, current=6 * GIB, stat={})
    limits.group("slice/app", max=6 * GIB, current=GIB, stat={})
    limits.group("slice/app/worker", max="max", current=GIB, stat={})
    assert limits.available("0::/slice/app/worker\n") == 2 * GIB
    limits.group("slice", max=20 * GIB, current=6 * GIB, stat={})
    assert limits.available("0::/slice/app/worker\n") == 5 * GIB


def test_other_groups_limits_do_not_hold(limits: SimpleNamespace) -> None:
    limits.group("other", max=GIB, current=0, stat={})
    limits.group("memory/other", limit_in_bytes=GIB, usage_in_bytes=0, stat={})
    limits.group("cpu/app", limit_in_bytes=GIB, usage_in_bytes=0, stat={})
    assert limits.available("3:memory:/app\n2:cpu:/app\n0::/app\n") == MACHINE


def test_in_a_hybrid_hierarchy_the_controller_that_has_memory_holds(limits: SimpleNamespace) -> None:
    limits.group("memory/app", limit_in_bytes=6 * GIB, usage_in_bytes=2 * GIB, stat={})
    limits.group("unified/app", max=3 * GIB, current=GIB, stat={})
    assert limits.available("3:memory:/app\n0::/\n") == 4 * GIB
    assert limits.available("3:memory:/\n0::/app\n") == 2 * GIB
    assert limits.available("3:memory:/app\n0::/app\n") == 2 * GIB


def test_inside_a_container_the_limit_is_at_the_mount(limits: SimpleNamespace) -> None:
    """Without a cgroup namespace the path is the host's, which is not mounted inside; the root that is has the limit."""
    limits.group("", max=6 * GIB, current=2 * GIB, stat={})
    assert limits.available("0::/docker/0123456789ab\n") == 4 * GIB


def test_a_group_over_its_limit_leaves_nothing(limits: SimpleNamespace) -> None:
    limits.group("app", max=GIB, current=2 * GIB, stat={})
    assert limits.available("0::/app\n") == 0


def test_the_machine_may_have_less_than_the_limit(limits: SimpleNamespace) -> None:
    limits.group("app", max=2 * MACHINE, current=0, stat={})
    assert limits.available("0::/app\n") == MACHINE


# This process


def test_this_process_has_memory() -> None:
    assert 0 < memory.rss_bytes() <= memory.peak_rss_bytes() + 4 * MIB  # the kernel adds up the peak with some delay
    allocated, resident = memory.private_bytes()
    assert 0 < resident <= allocated
    assert 0 < available_bytes() <= memory.psutil.virtual_memory().total


def test_peak_of_a_new_process_is_not_that_of_its_parent() -> None:
    ballast = bytearray(200 * MIB)
    ballast[::4096] = b"x" * len(ballast[::4096])
    code = "from moestream import memory; print(memory.peak_rss_bytes())"
    peak = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert peak < memory.rss_bytes() - 100 * MIB


# A real limit

_DECODE = """
import json, sys
import numpy as np
from moestream import Llama
llm = Llama(sys.argv[1], expert_streaming=True, n_ctx=64, n_batch=32, n_threads=1, verbose=False)
llm.eval(list(range(32)))
for token in range(16):
    llm.eval([3 * token])
print(json.dumps(llm.expert_stats().as_dict()))
"""


def test_auto_stays_under_a_real_limit(tmp_path: Path) -> None:
    path = make(tmp_path, d=512, ff=512, heads=8, head_dim=64, layers=8, experts=48, topk=4)
    experts = moestream.describe(path).expert_bytes
    limit = 128 * MIB
    assert experts > limit
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(LimitedGroup(memory_bytes=limit))
        except MeasurementError as error:
            pytest.skip(str(error))
        command = [*group.prefix, sys.executable, "-W", "ignore", "-c", _DECODE, str(path)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        usage = group.usage()
    stats = json.loads(run.stdout)
    assert usage.oom_kills == 0
    assert limit / 4 < stats["cache_bytes"] < limit
    assert stats["misses"] > 0
