"""What tools/figures measures with: that it counts what it says, and says what it lacks."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest

import moestream
from factory import make
from isolation import isolated
from measure import compiler, compute, disk, head_quality, quality
from measure.competitor import Competitor
from measure.figure import MeasurementError
from measure.processor import SlowProcessor
from measure.streams import random_prompt
from measure.subject import Subject
from measure.zeros import zeros_by_layer
from moestream.bench.session import Arm, Session
from synthetic.weights import Weights

FIGURES = Path(__file__).resolve().parent.parent / "tools" / "figures"


def whole(path: Path) -> int:
    return moestream.describe(path).maximum_cache_bytes


# The command


def test_an_unknown_figure_is_told_with_those_there_are() -> None:
    done = subprocess.run([sys.executable, str(FIGURES), "compute", "--only", "speed"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"figures: no figure 'speed' in compute; there are: {', '.join(compute.FIGURES)}\n"


# Models of many zeros


@pytest.mark.parametrize("zeros", [0.5, 0.7, 0.9])
def test_the_gates_of_a_synthetic_model_give_the_share_of_zeros_asked_for(zeros: float, tmp_path: Path) -> None:
    path = make(tmp_path, "smallthinker", zeros=zeros, d=512, ff=256)
    shares = isolated(zeros_by_layer, path, list(range(3, 203)))
    assert len(shares) == moestream.describe(path).layers
    assert statistics.mean(shares) == pytest.approx(zeros, abs=0.05)


@pytest.mark.parametrize("zeros", [0, 1, -0.1])
def test_a_share_of_zeros_that_cannot_be(zeros: float) -> None:
    with pytest.raises(ValueError, match=f"^zeros must be within 0..1 and neither, not {zeros}$"):
        Weights(zeros=zeros)


# The file


def test_the_ranges_of_an_expert_hold_its_bytes(tmp_path: Path) -> None:
    path = make(tmp_path, "qwen3moe")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    expected = [tensors[f"blk.2.ffn_{matrix}_exps.weight"].data[5].tobytes() for matrix in ("gate", "up", "down")]
    content = path.read_bytes()
    found = [content[offset : offset + size] for offset, size in Subject(path).expert_ranges(2, 5)]
    assert sorted(found) == sorted(expected)


def test_the_range_of_an_expert_in_a_laid_file_is_its_record(tmp_path: Path) -> None:
    path = make(tmp_path, "qwen3moe")
    laid = tmp_path / "laid.gguf"
    moestream.convert(path, laid, target="plain", progress=False)
    ((offset, size),) = Subject(laid).expert_ranges(2, 5)
    assert size == moestream.describe(laid).moe_layers[2].record_bytes
    record = laid.read_bytes()[offset : offset + size]
    content = path.read_bytes()
    for start, length in Subject(path).expert_ranges(2, 5):
        assert content[start : start + length] in record


def test_a_token_reads_the_embeddings_only_where_they_are_the_output_matrix(tmp_path: Path) -> None:
    for tied in (False, True):
        path = make(tmp_path, "qwen3moe", tied=tied)
        model = moestream.describe(path)
        of_experts = sum(model.experts_used * layer.expert_bytes for layer in model.moe_layers)
        embeddings = 0 if tied else 320 * 128 // 32 * 18
        assert Subject(path).bytes_of_a_token(model.experts_used) == model.dense_bytes + of_experts - embeddings


# Memory and disk


def test_without_a_compiler_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    with pytest.raises(
        MeasurementError, match=r"^no C compiler \(cc, gcc or clang\) was found, .*: apt-get install gcc"
    ):
        compiler.shared_library(tmp_path / "kernels.c", tmp_path)


@pytest.mark.parametrize("direct", [True, False])
def test_slices_are_read_whole_each_once(direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100_001))
    if direct:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            pytest.skip("the file system of the temporary folder has no direct reads")
    read: list[tuple[int, int]] = []
    real = os.preadv

    def preadv(file: int, buffers: list[memoryview], offset: int) -> int:
        got = real(file, buffers, offset)
        read.append((offset, got))
        return got

    monkeypatch.setattr(disk.os, "preadv", preadv)
    seconds = disk.seconds_to_read_slices(path, [(5000, 4000), (0, 4096), (99_000, 1001)], depth=2, direct=direct)
    assert seconds > 0
    assert sorted((offset, got) for offset, got in read if got) == [(0, 4096), (4096, 8192), (98_304, 1697)]


# Children and company


def test_a_child_tells_what_openmp_is_told(tmp_path: Path) -> None:
    path = make(tmp_path, "qwen3moe")
    with Session(Arm(path, "streamed", cache=whole(path)), environment={"GOMP_SPINCOUNT": "7"}) as session:
        assert session.openmp["GOMP_SPINCOUNT"] == "7"


def test_options_of_an_arm_that_are_none_are_left_at_their_defaults(tmp_path: Path) -> None:
    path = make(tmp_path, "qwen3moe")
    assert set(Arm(path, "streamed").streaming) == {"cache", "kernels", "reader", "direct", "compute"}
    with Session(Arm(path, "streamed", cache=whole(path), experts_used=1, threads=1)) as session:
        assert session.feed([3, 4]).misses[0] == moestream.describe(path).layers


def test_a_feed_goes_on_where_the_last_ended(tmp_path: Path) -> None:
    path = make(tmp_path, "qwen3moe")
    with Session(Arm(path, "streamed", cache=whole(path), kernels="plain", threads=1)) as session:
        (*_, expected) = session.feed([3, 4, 5, 6]).logits_crc
        session.feed([3, 4])
        (*_, found) = session.feed([5, 6], after_last=True).logits_crc
        (*_, alone) = session.feed([5, 6]).logits_crc
    assert found == expected != alone


def test_a_competitor_runs_in_a_session_of_its_own_and_is_gone_afterwards() -> None:
    with Competitor() as competitor:
        process = competitor._process
        assert process.poll() is None
        assert os.getsid(process.pid) == process.pid != os.getsid(0)
        ours, its = (_autogroup(pid) for pid in ("self", process.pid))
        if ours:
            assert ours[0] != its[0]
            assert ours[-1] == its[-1]
    assert process.poll() is not None


def test_a_competitor_ends_when_who_started_it_is_killed() -> None:
    script = (
        "import time\nfrom measure.competitor import Competitor\n"
        "with Competitor() as it: print(it._process.pid, flush=True); time.sleep(60)"
    )
    environment = os.environ | {"PYTHONPATH": str(FIGURES.parent)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as parent:
        competitor = int(parent.stdout.readline())
        assert Path(f"/proc/{competitor}/stat").exists()
        parent.kill()
    deadline = time.monotonic() + 20
    while _runs(competitor) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(competitor)


def test_a_competitor_needs_no_autogroups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()  # as some kernels have it
    for path in (tmp_path / "empty", tmp_path / "missing"):
        monkeypatch.setattr("measure.competitor._AUTOGROUP", str(path))
        with Competitor() as competitor:
            assert _runs(competitor._process.pid)


def _autogroup(pid: int | str) -> list[str]:
    """Empty where the kernel has none."""
    try:
        return Path(f"/proc/{pid}/autogroup").read_text().split()
    except OSError:
        return []


def _runs(pid: int) -> bool:
    """Also a process that has ended is there until its parent, or who inherited it, has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# What a figure counts


def test_the_experts_a_prompt_uses_are_those_it_misses_with_room_for_all(tmp_path: Path) -> None:
    path = make(tmp_path, "qwen3moe", experts=64, topk=2)
    arm = Arm(path, "streamed", cache=whole(path), kernels="plain", threads=1)
    prompt = random_prompt(tokens=24, vocabulary=320)
    slices = isolated(compute._slices_used, arm, prompt)
    with Session(arm) as session:
        feed = session.feed(prompt, at_once=True)
    assert 0 < len(slices) // 3 == feed.experts["misses"] < 4 * 64


def test_two_ways_to_stream_are_compared_on_one_text_with_what_each_asked_for(tmp_path: Path) -> None:
    path = make(tmp_path, "qwen3moe")
    description = moestream.describe(path)
    texts = np.array([random_prompt(tokens=25, vocabulary=320, seed=seed) for seed in (1, 2)])
    ways = [
        moestream.ExpertStreaming(kernels="plain", cache=cache)
        for cache in (description.maximum_cache_bytes, description.minimum_cache_bytes)
    ]
    found = quality.compared(path, *ways, texts)
    assert (found.report.tokens, found.report.kl_largest, found.report.changed) == (48, 0, 0)
    assert found.reference.tokens == found.variant.tokens == 48
    assert found.reference.misses <= description.layers * 8 < found.variant.misses


def test_a_cache_that_still_misses_the_second_time_gives_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "drop_caches", lambda path: None)
    path = make(tmp_path, "qwen3moe", experts=64)
    arm = Arm(path, "streamed", cache=moestream.describe(path).minimum_cache_bytes, threads=1)
    with compute.open_bench(model=path, quick=True, keep=False) as bench:
        with pytest.raises(MeasurementError, match=r"^\d+ misses the second time, with a cache of \d+ bytes for every"):
            compute._resident(bench, arm)


# A slower processor


def real_time_children() -> list[int]:
    """The core of each child process of real-time priority."""
    children = psutil.Process().children()
    return [
        core for child in children if os.sched_getscheduler(child.pid) == os.SCHED_FIFO for core in child.cpu_affinity()
    ]


def test_a_slower_processor_is_one_inside_its_block() -> None:
    cores = sorted(os.sched_getaffinity(0))
    try:
        with SlowProcessor() as slow:
            assert real_time_children() == []
            slow.share(0.9)
            assert sorted(real_time_children()) == cores
            slow.share(1)
            assert real_time_children() == []
            slow.share(0.9)
    except MeasurementError as error:
        assert "needs real-time priority, and so root" in str(error)
        pytest.skip(str(error))
    assert real_time_children() == []


# What the heads of a demo model are worth


def recall_of_shipped_heads() -> list[tuple[str, float, bool]]:
    with head_quality.open_bench(quick=True) as bench:
        return [(figure.name, figure.value, figure.ok) for figure in head_quality.recall(bench)]


def test_recall_of_the_heads_that_ship_is_that_which_the_engine_counts() -> None:
    found = {name: (value, ok) for name, value, ok in isolated(recall_of_shipped_heads)}
    assert found["recall[all head].apart"][1] and found["recall_over_repeat[all]"][1]
    chance = 4 / 32
    assert (
        chance < found["recall[all repeat]"][0] < found["recall[all head]"][0] < found["recall[all lookahead]"][0] < 1
    )
    assert found["exact[all head]"][0] < found["exact[all lookahead]"][0]


def test_without_the_sidecar_its_maker_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_quality.demo_model, "MODELS", tmp_path)
    (tmp_path / "demo-qwen3moe.gguf").symlink_to(make(tmp_path, "qwen3moe"))
    with head_quality.open_bench(quick=True) as bench:
        with pytest.raises(MeasurementError, match="sidecar.gguf is not there: tools/train_demo_heads --ship makes it"):
            bench.sidecar  # noqa: B018
