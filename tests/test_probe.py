"""What `probe` measures of a machine: everything that it says it does, at rates that are some; never how fast."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moestream
from command import PYTHON, at_terminal, moestream_command
from moestream import MeasurementError, OptionError, OutputError, Probe, _probe_compute, _probe_reads, _probe_verdict
from moestream._native import ffi, lib
from moestream._probe_compute import KernelRate, MemoryReader, Weights
from moestream._probe_reads import LEAST_BYTES, MIB, ReadRate, Reads
from moestream.probing import attention_values, cached_probe, remember, token_compute_s

SECONDS = 1.5


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that is just large enough."""
    path = tmp_path_factory.mktemp("big") / "file"
    path.write_bytes(np.random.default_rng(0).bytes(LEAST_BYTES))
    return path


@pytest.fixture(scope="module")
def measured(big: Path) -> tuple[Probe, list[tuple[str, float]]]:
    told: list[tuple[str, float]] = []
    return moestream.probe(big, seconds=SECONDS, progress=lambda *step: told.append(step)), told


@pytest.fixture(scope="module")
def found(measured: tuple[Probe, list[tuple[str, float]]]) -> Probe:
    return measured[0]


def made(**changes: Any) -> Probe:
    """A probe with round numbers."""
    reads = tuple(
        ReadRate(size, depth, "random", direct, rate * depth * (1 if direct else 0.5), rate / 2, 1e-3)
        for size, rate in ((MIB, 1e9), (4 * MIB, 3e9))
        for depth in (1, 4)
        for direct in (True, False)
    )
    kernels = (
        KernelRate("Q4_0", "dense", "plain", 2, 10e9),
        KernelRate("Q4_0", "dense", "interleaved", 2, 20e9),
        KernelRate("Q4_0", "experts", "plain", 2, 25e9),
        KernelRate("Q4_0", "experts", "interleaved", 2, 30e9),
        KernelRate("F32", "dense", "plain", 2, 40e9),
        KernelRate("F32", "experts", "plain", 2, 40e9),
        KernelRate("Q3_K", "dense", "plain", 2, 5e9),
        KernelRate("Q3_K", "experts", "plain", 2, 6e9),
    )
    probe = Probe(
        machine={"cpu": "some", "memory_bytes": 8 << 30},
        disk={
            "device": "vda",
            "file_system": "ext4",
            "model": "",
            "mount": "/",
            "size_bytes": 1,
            "read_ahead_kib": 128,
        },
        path="/model.gguf",
        when="2026-01-01T00:00:00+00:00",
        seconds=20.0,
        reader="uring",
        reads=reads,
        burst_bytes_per_s=4e9,
        memory_bytes_per_s=40e9,
        threads=2,
        kernels=kernels,
        attention_values_per_s=1e9,
        layer_overhead_s=20e-6,
        width_s=1e-9,
        token_overhead_s=1e-4,
        read_cpu_s_per_byte=1e-11,
        memory_bytes=8 << 30,
        available_bytes=4 << 30,
        verdict=("well",),
    )
    return dataclasses.replace(probe, **changes)


# Everything is measured


def test_every_point_of_the_grid_is_there_once_at_some_rate(found: Probe) -> None:
    grid = _probe_reads._COARSE
    if found.direct:
        expected = [(size, depth, *kind) for kind, points in grid.items() for size, depth in points]
    else:
        expected = [(size, d, order, False) for (order, direct), points in grid.items() if direct for size, d in points]
    usual = (2 * MIB, 4, "random", found.direct)
    assert sorted({*expected, usual}) == sorted((r.size_bytes, r.depth, r.order, r.direct) for r in found.reads)
    for rate in found.reads:
        assert 0 < rate.bytes_per_s_low <= rate.bytes_per_s < math.inf, rate
        assert 0 < rate.latency_s < found.seconds, rate
    assert found.reader in ("uring", "pread")
    assert 0 < found.burst_bytes_per_s < math.inf
    assert 0 < found.read_cpu_s_per_byte < 1e-6


def test_every_type_has_its_kernels(found: Probe) -> None:
    kinds = {(rate.type, rate.weights, rate.kernels) for rate in found.kernels}
    assert len(kinds) == len(found.kernels)
    for type in _probe_compute.TYPES:
        assert {(type, "dense", "plain"), (type, "experts", "plain")} <= kinds
        assert ((type, "dense", "interleaved") in kinds) == ((type, "experts", "interleaved") in kinds)
    assert not any(type == "F32" and kernels == "interleaved" for type, _, kernels in kinds)
    assert {rate.threads for rate in found.kernels} == {found.threads}
    assert all(0 < rate.bytes_per_s <= found.memory_bytes_per_s for rate in found.kernels)
    assert found.attention_values_per_s > 0
    assert 0 <= found.layer_overhead_s < 1
    assert 0 <= found.width_s < 1e-3
    assert 0 <= found.token_overhead_s < 1


def test_machine_disk_and_memory_are_told(found: Probe, big: Path) -> None:
    assert found.machine["memory_bytes"] == found.memory_bytes >= found.available_bytes > 0
    assert {"device", "file_system", "read_ahead_kib"} <= found.disk.keys()
    assert found.path == str(big)
    assert found.when.endswith("+00:00")


def test_progress_never_goes_back(measured: tuple[Probe, list[tuple[str, float]]]) -> None:
    _, told = measured
    assert list(dict.fromkeys(what for what, _ in told)) == ["computing", "reading"]
    for name in ("computing", "reading"):
        shares = [share for what, share in told if what == name]
        assert shares == sorted(shares)
        assert 0 <= shares[0]
        assert shares[-1] <= 1


def test_a_folder_is_measured_with_a_file_that_is_gone_afterwards(tmp_path: Path) -> None:
    seen: set[str] = set()
    told: list[str] = []

    def progress(what: str, share: float) -> None:
        seen.update(_open_files_in(tmp_path, os.getpid()))
        told.append(what)

    probe = moestream.probe(tmp_path, seconds=1, progress=progress)
    assert list(dict.fromkeys(told)) == ["writing", "computing", "reading"]
    assert len(seen) == 1
    assert list(tmp_path.iterdir()) == []
    assert probe.path == str(tmp_path)


def test_what_is_written_to_be_read_is_all_different(tmp_path: Path) -> None:
    with _probe_reads.scratch_file(tmp_path, 0.01, lambda share: None) as path:
        content = path.read_bytes()
    assert len(content) >= LEAST_BYTES
    blocks = {content[begin : begin + 4096] for begin in range(0, len(content), 4096)}
    assert len(blocks) == len(content) // 4096


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*PYTHON, "probe", str(tmp_path), "--seconds", "30"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 60
    while not (open_now := _open_files_in(tmp_path, process.pid)) and time.monotonic() < end:
        time.sleep(0.02)
    assert len(open_now) == 1
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "moestream: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def _open_files_in(folder: Path, pid: int) -> list[str]:
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as that of this listing is
            found.append(os.readlink(descriptor))
    return [file for file in found if file.startswith(f"{folder}/")]


def test_memory_is_read_at_some_speed() -> None:
    with MemoryReader(bytes=64 << 20) as memory:
        assert 1e8 < memory.bytes_per_s() < 1e13


# The core of it


def run_reads(path: Path, **changes: Any) -> tuple[int, str, Any, np.ndarray]:
    """One ms_read_probe_run: its code, its sentence, its result, its slices."""
    options = {"size_bytes": 65536, "depth": 3, "random": True, "direct": False, "uring": False}
    options |= {"for_ns": 20_000_000, "slice_ns": 1_000_000, **changes}
    out, result, message = ffi.new("ms_read_probe **"), ffi.new("ms_read_probe_result *"), ffi.new("char[]", 1024)
    slices, latencies = np.zeros(64), np.zeros(4096)
    assert lib.ms_read_probe_open(os.fsencode(path), out, message, 1024) == 0
    code = lib.ms_read_probe_run(
        out[0],
        ffi.new("ms_read_probe_options *", options),
        *(ffi.from_buffer("double[]", slices), len(slices), ffi.from_buffer("double[]", latencies), len(latencies)),
        *(result, message, 1024),
    )
    lib.ms_read_probe_close(out[0])
    return code, ffi.string(message).decode(), result, slices[: result.n_slices]


@pytest.mark.parametrize("random", [True, False], ids=["random", "sequential"])
def test_reads_go_by_whole_batches_and_slices_of_time(random: bool, big: Path) -> None:
    code, _, result, slices = run_reads(big, random=random)
    assert code == 0
    assert result.bytes % (3 * 65536) == 0
    assert result.bytes // (3 * 65536) == result.n_latencies > 0
    assert 0 < result.ns
    assert 0 < len(slices) <= 64
    assert all(slices > 0)


def test_the_least_time_is_one_batch(big: Path) -> None:
    code, _, result, slices = run_reads(big, for_ns=0, slice_ns=10**12)
    assert (code, result.bytes, len(slices)) == (0, 3 * 65536, 1)


@pytest.mark.parametrize(
    "changes",
    [{"size_bytes": 1000}, {"size_bytes": 0}, {"depth": 0}, {"depth": 2000}, {"size_bytes": LEAST_BYTES + 4096}],
    ids=str,
)
def test_reads_that_are_none_are_refused(changes: dict[str, int], big: Path) -> None:
    code, message, _, _ = run_reads(big, **changes)
    assert code < 0
    assert str(big) in message
    assert "cannot be measured with" in message


def test_a_read_that_fails_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "shrinks"
    path.write_bytes(bytes(1 << 20))
    out, message = ffi.new("ms_read_probe **"), ffi.new("char[]", 1024)
    assert lib.ms_read_probe_open(os.fsencode(path), out, message, 1024) == 0
    os.truncate(path, 0)
    options = {"size_bytes": 65536, "depth": 1, "for_ns": 1, "slice_ns": 1}
    result = ffi.new("ms_read_probe_result *")
    code = lib.ms_read_probe_run(
        out[0], ffi.new("ms_read_probe_options *", options), ffi.NULL, 0, ffi.NULL, 0, result, message, 1024
    )
    lib.ms_read_probe_close(out[0])
    assert code < 0
    assert ffi.string(message).decode().startswith(f"{path}: cannot be read: ")


def test_kernels_that_ggml_does_not_have_are_told_apart_from_what_is_none() -> None:
    seconds = np.zeros(8)
    with Weights("dense", 1) as weights:
        assert weights.bytes_per_s("F32", "interleaved", 0.0) is None

        def code(**changes: Any) -> tuple[int, str]:
            options = {
                "type": 2,
                "kernels": 0,
                "columns": 256,
                "rows": 16,
                "n": 4,
                "scattered": True,
                "for_ns": 0,
            } | changes
            message = ffi.new("char[]", 1024)
            given = ffi.new("ms_kernel_probe_options *", options)
            call = lib.ms_kernel_probe_products
            return call(weights._probe, given, ffi.from_buffer("double[]", seconds), 8, message, 1024), ffi.string(
                message
            ).decode()

        assert code()[0] == 1
        assert 0 < seconds[0] < 10
        assert code(type=1000) == (-22, "type 1000 is none of this ggml")
        assert code(columns=255)[0] == -22
        assert code(n=10**6) == (-22, "1000000 matrices of 256 x 16 do not fit")


# What follows from it


def test_rates_lie_between_the_sizes_measured_by_their_logarithm() -> None:
    probe = made()
    assert probe.read_rate(MIB, depth=1) == 1e9
    assert probe.read_rate(2 * MIB, depth=1) == pytest.approx(2e9)
    assert probe.read_rate(4 * MIB, depth=1) == 3e9
    assert probe.read_rate(1, depth=1) == 1e9
    assert probe.read_rate(1 << 40, depth=1) == 3e9
    assert probe.read_rate(MIB) == probe.read_rate(MIB, depth=3) == probe.read_rate(MIB, depth=100) == 4e9
    assert probe.read_rate(MIB, depth=4, direct=False) == 2e9


def test_reads_are_as_the_engine_reads_where_nothing_is_said() -> None:
    buffered = tuple(rate for rate in made().reads if not rate.direct)
    assert made().direct
    assert made().read_rate(MIB) == made().read_rate(MIB, direct=True)
    assert not made(reads=buffered).direct
    assert made(reads=buffered).read_rate(MIB) == 2e9
    with pytest.raises(
        MeasurementError, match=r"^the probe of /model.gguf has no direct random reads; .* ask for buffered"
    ):
        made(reads=buffered).read_rate(MIB, direct=True)
    with pytest.raises(MeasurementError, match=r"no direct sequential reads; .* ask for buffered"):
        made().read_rate(MIB, order="sequential")


def test_kernels_are_those_that_decode_has() -> None:
    probe = made()
    assert probe.kernel_rate("Q4_0") == 20e9
    assert probe.kernel_rate("q4_0", expert=True) == 30e9
    assert probe.kernel_rate("Q4_0", interleaved=False) == 10e9
    assert probe.kernel_rate("Q4_0", interleaved=False, expert=True) == 25e9
    assert probe.kernel_rate("F32") == 40e9
    assert probe.kernel_rate("IQ1_S") == 5e9
    assert probe.kernel_rate("IQ1_S", expert=True) == 6e9


def test_a_token_is_its_weights_its_layers_and_its_context() -> None:
    sizes: dict[str, Any] = {"dense_bytes": {"Q4_0": 20e6, "F32": 40e6}, "expert_bytes": {"Q4_0": 30e6}}
    weights, layers, rest = 1e-3 + 1e-3 + 1e-3, 10 * 20e-6, 1e-4
    assert token_compute_s(made(), **sizes, layers=10, width=256) == pytest.approx(weights + layers + rest)
    wide = token_compute_s(made(), **sizes, layers=10, width=2256, attention_values=1e6)
    assert wide == pytest.approx(weights + layers + rest + 10 * 2000 * 1e-9 + 1e-3)
    plain = token_compute_s(made(), **sizes, layers=10, width=256, interleaved=False)
    assert plain == pytest.approx(2e-3 + 1e-3 + 30 / 25 * 1e-3 + layers + rest)


def test_attention_is_computed_for_whole_runs_of_positions() -> None:
    shape = {"layers": 2, "heads": 4, "head": 8}
    assert attention_values(**shape, positions=0) == attention_values(**shape, positions=256) == 2 * 4 * 8 * 256
    assert attention_values(**shape, positions=257) == 2 * 4 * 8 * 512


# The verdict


def said(probe: Probe, *, file_bytes: int | None = None, busy: tuple[str, ...] = (), **changes: Any) -> str:
    given = {"why_buffered": "", "burst_bytes_per_s": 1e9, "steady_bytes_per_s": 1e9, "cached_share": 0.0} | changes
    reads = Reads(rates=probe.reads, reader="uring", cpu_s_per_byte=0.0, **given)
    return "\n".join(_probe_verdict.sentences(probe, reads, file_bytes, busy))


def test_the_verdict_has_numbers_and_what_follows() -> None:
    plain = said(made())
    assert "The disk (vda) gives 8.0 GB/s in reads of 2 MiB, 4 at a time" in plain
    assert "a token that misses 100 MB of experts waits 12 ms" in plain
    assert "Buffered reads are 2.0 times slower than direct ones (4.0 GB/s)" in plain
    assert "Memory gives 40.0 GB/s: a token that needs 1.75 GB of weights" in plain
    assert "at least 44 ms; with the kernels there are for it, on 2 threads, 58 ms" in plain
    assert "4.00 GiB of 8.00 GiB of memory are free" in plain
    for absent in ("bursts", "read-ahead", "stays in memory", "page cache", "Disturbed", "again and again"):
        assert absent not in plain


def test_the_verdict_warns_of_what_is_unusual() -> None:
    probe = made(disk={**made().disk, "read_ahead_kib": 8192})
    assert "It has bursts: 2.4 GB/s at first, then 1.1 GB/s." in said(
        probe, burst_bytes_per_s=2.4e9, steady_bytes_per_s=1.1e9
    )
    assert "read-ahead is 8192 KiB: stock llama.cpp with mmap suffers from it, 128 is usual" in said(probe)
    assert "40% of /model.gguf stays in memory" in said(probe, cached_share=0.4)
    assert "/model.gguf has only 100.00 MiB" in said(probe, file_bytes=100 * MIB)
    assert "Disturbed: another used a core" in said(probe, busy=("another used a core",))
    slow = tuple(dataclasses.replace(rate, bytes_per_s=rate.bytes_per_s / 4) for rate in probe.kernels)
    assert "Computing is slower than memory for Q4_0 7.5 GB/s" in said(made(kernels=slow))
    buffered = tuple(rate for rate in probe.reads if not rate.direct)
    assert "Reads go through the page cache, for its file system refuses" in said(
        made(reads=buffered), why_buffered="its file system refuses direct reads (Invalid argument)"
    )


def test_an_uneven_disk_is_called_so() -> None:
    uneven = ReadRate(2 * MIB, 4, "random", True, 2e9, 0.5e9, 1e-3)
    assert "in a tenth of the time it gives 500 MB/s or less" in said(made(reads=(*made().reads, uneven)))


# Files of it


def test_a_probe_is_the_same_after_a_file(found: Probe, tmp_path: Path) -> None:
    found.write(tmp_path / "probe.json")
    assert Probe.read(tmp_path / "probe.json") == found
    written = json.loads((tmp_path / "probe.json").read_text())
    assert (written["format"], written["version"]) == ("moestream probe", 1)
    assert written == found.as_dict()


def test_a_probe_is_remembered_by_disk(
    found: Probe, big: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cached_probe(big) is None
    kept = remember(found)
    assert kept.parent == tmp_path / "cache" / "moestream" / "probes"
    assert cached_probe(big) == cached_probe(big.parent) == found
    remember(dataclasses.replace(found, machine={**found.machine, "cpu": "another"}))
    assert cached_probe(big) is None
    remember(dataclasses.replace(found, disk={**found.disk, "size_bytes": 1}))
    assert cached_probe(big) is None


def test_a_cache_that_cannot_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OutputError, match=r"file/moestream/probes: cannot be made"):
        remember(made())


def test_what_is_no_probe_is_told(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    with pytest.raises(MeasurementError, match=r"some.json: cannot be read .*; make a probe with: moestream probe -o"):
        Probe.read(path)
    for content in ("no json", "[]", "{}", '{"format": "other"}', '"text"'):
        path.write_text(content)
        with pytest.raises(
            MeasurementError, match=r"some.json: is no probe of a machine; make one with: moestream probe"
        ):
            Probe.read(path)
    path.write_text(json.dumps({**made().as_dict(), "version": 2}))
    with pytest.raises(MeasurementError, match=r"is a probe of version 2, and this moestream reads 1; make it again"):
        Probe.read(path)
    path.write_text(json.dumps({name: value for name, value in made().as_dict().items() if name != "reads"}))
    with pytest.raises(MeasurementError, match=r"some.json: is a damaged probe \('reads'\); make it again with"):
        Probe.read(path)
    for empty in ("reads", "kernels"):
        path.write_text(json.dumps({**made().as_dict(), empty: []}))
        with pytest.raises(MeasurementError, match=r"some.json: is a damaged probe \('no reads, or no kernels'\)"):
            Probe.read(path)


# What cannot be measured


def test_a_path_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"nowhere: there is no such file or folder; name a model's file, or a folder"
    ):
        moestream.probe(tmp_path / "nowhere")


def test_no_time_is_too_little(tmp_path: Path) -> None:
    for seconds in (0, 0.1, -1, math.nan):
        with pytest.raises(OptionError, match=r"^seconds=.*: nothing can be measured in less than 0.5"):
            moestream.probe(tmp_path, seconds=seconds)
    with pytest.raises(OptionError, match=r"^seconds=inf: more than 3600 tell no more"):
        moestream.probe(tmp_path, seconds=math.inf)


def test_a_small_file_is_refused_and_the_least_is_named(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(bytes(1 << 20))
    with pytest.raises(
        MeasurementError, match=r"small.gguf: 1.00 MiB are too few .* at least 64.00 MiB, better of 1 GiB"
    ):
        moestream.probe(path)


def test_holes_are_no_disk(tmp_path: Path) -> None:
    path = tmp_path / "holes"
    with open(path, "wb") as file:
        file.write(bytes(1 << 20))
        file.truncate(2 * LEAST_BYTES)
    if path.stat().st_blocks * 512 >= LEAST_BYTES:
        pytest.skip("the file system of the temporary folder has no holes")
    with pytest.raises(
        MeasurementError, match=r"holes: 1\d\d.\d\d MiB of its 128.00 MiB are holes, .* cp --sparse=never"
    ):
        moestream.probe(path)


def test_no_room_for_a_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = _probe_reads.shutil._ntuple_diskusage(1 << 30, 1 << 29, 1 << 29)
    monkeypatch.setattr(_probe_reads.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        MeasurementError, match=r"a file of 64.00 MiB is written there .* free some, or name a model's file"
    ):
        moestream.probe(tmp_path)


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_probe_reads.tempfile, "mkstemp", refuse)
    with pytest.raises(
        MeasurementError, match=r"no file can be written there .*\(Permission denied\); name a folder that"
    ):
        moestream.probe(tmp_path)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_probe_reads.os, "write", full)
    with pytest.raises(
        MeasurementError, match=r"cannot be written \(No space left on device\); free some room, or name"
    ):
        moestream.probe(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_read_is_told(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(MeasurementError, match=r"file: cannot be read \(Permission denied\); name a file that can"):
        _probe_reads.require_whole(big)


# The command


def test_the_command_prints_tables_and_a_verdict_and_keeps_it(big: Path, tmp_path: Path) -> None:
    done = moestream_command(
        "probe", big, "--seconds", 1, "-o", tmp_path / "out.json", XDG_CACHE_HOME=str(tmp_path / "c")
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "random reads, " in done.stdout
    assert "Q4_0" in done.stdout
    assert "- The disk (" in done.stdout
    probe = Probe.read(tmp_path / "out.json")
    (kept,) = (tmp_path / "c" / "moestream" / "probes").iterdir()
    assert Probe.read(kept) == probe
    assert done.stdout.rstrip().endswith(f"Kept in {kept} and {tmp_path / 'out.json'}")


def test_the_command_prints_json_alone(big: Path, tmp_path: Path) -> None:
    done = moestream_command("probe", big, "--seconds", 1, "--json", XDG_CACHE_HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert Probe.from_dict(json.loads(done.stdout)).path == str(big)


def test_progress_is_drawn_at_a_terminal_and_vanishes(big: Path) -> None:
    code, drawn = at_terminal("probe", big, "--seconds", 1, stdout=subprocess.DEVNULL)
    assert code == 0
    assert "computing" in drawn
    assert "reading" in drawn
    assert "\r" in drawn


def test_errors_of_the_command_are_one_line(tmp_path: Path) -> None:
    done = moestream_command("probe", tmp_path / "nowhere")
    assert done.returncode == 1
    assert done.stderr.startswith("moestream: error: ")
    assert done.stderr.count("\n") == 1
    done = moestream_command("probe", tmp_path, "-o", tmp_path / "no" / "out.json")
    assert done.returncode == 1
    assert f"there is no folder {tmp_path / 'no'}; make it first" in done.stderr
