"""Records made of turns: one of each arm and test, over all rounds."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..memory import format_size
from ..model import ModelDescription
from .machine import Disk, Machine
from .turn import ReadShape, Test, TestRun, Turn, median

__all__ = ["STEADY_TOKENS", "Surroundings", "add_compute_limits", "drift", "summarise"]

STEADY_TOKENS = 256
DRIFTS = 0.05  # of the time a token takes, between the first half and the last
_BLOCK = 8  # tokens that are moved together: neighbours miss alike
_SHUFFLES = 2000
_CREDITS = (
    "the disk is held back by cgroup v1, which lets it make up for the time that it was idle: what reads in bursts seems faster "
    "than on a disk of that rate; for streamed arms disk=RATE slows reads down without credit"
)
_OVER = 1.02  # of the limit: what rounding and a disk's moods explain


class Surroundings:
    """What is the same for all records of a run."""

    def __init__(self, machine: Machine, disk: Disk, workload: str) -> None:
        self.machine, self.disk, self.workload = machine, disk, workload
        versions = machine.versions
        self.llama_bench = {
            "build_commit": versions.get("ggml-commit") or f"llama-cpp-python {versions.get('llama-cpp-python', '')}",
            "build_number": 0,  # the libraries of llama-cpp-python do not have it
            "cpu_info": machine.cpu,
            "gpu_info": "",
            "backends": "CPU",
            "cpu_mask": "0x0",
            "cpu_strict": False,
            "poll": 0,
            "type_k": "f16",
            "type_v": "f16",
            "n_gpu_layers": 0,
            "n_cpu_moe": 0,
            "split_mode": "layer",
            "main_gpu": 0,
            "no_kv_offload": False,
            "flash_attn": 0,
            "devices": "none",
            "tensor_split": "0.00",
            "tensor_buft_overrides": "none",
            "lazy_mode": "auto",
            "embeddings": False,
            "no_op_offload": 0,
            "no_host": False,
            "fit_target": 0,
            "fit_min_ctx": 0,
        }


def summarise(
    turns: Sequence[Turn],
    test: Test,
    description: ModelDescription,
    fingerprint: str,
    around: Surroundings,
    *,
    said: Mapping[str, Any],
    interrupted: bool,
) -> dict[str, Any]:
    """The record of one arm in one test.

    Args:
        turns: Of that arm, a round each.
        said: `Session.model`, of this arm or another on the same file; empty if none was loaded.
        interrupted: Was the run broken off before all rounds were done?
    """
    configuration = turns[0].configuration
    runs = [turn.runs[test] for turn in turns if test in turn.runs and turn.runs[test].done]
    arm, limits = configuration.arm, configuration.limits
    samples_ns = [round(run.seconds * 1e9) for run in runs]
    samples_ts = [run.done / run.seconds for run in runs]
    record = {
        **around.llama_bench,
        "model_filename": configuration.path.name,
        "model_type": said.get("description", description.architecture),
        "model_size": said.get("size_bytes", description.bytes_on_disk),
        "model_n_params": said.get("parameters"),
        "n_batch": configuration.n_batch,
        "n_ubatch": configuration.n_ubatch,
        "n_threads": configuration.threads,
        "tensor_buft_overrides": "experts" if arm.streamed else "none",
        "load_mode": "mmap" if arm.mapped else "none",
        "repack": arm.options.get("kernels", "auto") != "plain" if arm.streamed else bool(arm.options.get("repack")),
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.n_depth,
        "test_time": turns[0].begun,
        "avg_ns": round(statistics.mean(samples_ns)) if runs else 0,
        "stddev_ns": round(statistics.stdev(samples_ns)) if len(runs) > 1 else 0,
        "avg_ts": statistics.mean(samples_ts) if runs else 0.0,
        "stddev_ts": statistics.stdev(samples_ts) if len(runs) > 1 else 0.0,
        "samples_ns": samples_ns,
        "samples_ts": samples_ts,
        "arm": arm.label,
        "workload": around.workload,
        "routing": "own" if arm.replayed is None else f"replayed: {arm.replayed.name}",
        "model_hash": fingerprint,
        "model_laid": description.laid,
        "bytes_on_disk": description.bytes_on_disk,
        "dense_bytes": description.dense_bytes,
        "expert_bytes": description.expert_bytes,
        "memory_limit": limits.memory,
        "disk_bps_limit": limits.disk_bps,
        "limited_by": next((turn.limited_by for turn in turns if turn.limited_by), ""),
        "round_order": [turn.position for turn in turns],
        "load_s": median([turn.load_s for turn in turns if turn.load_s is not None]),
        "first_token_s": median([turn.first_token_s for turn in turns if turn.first_token_s is not None]),
        "peak_rss": max(turn.peak_rss for turn in turns) or None,
        "cgroup_peak": max((turn.cgroup_peak for turn in turns if turn.cgroup_peak is not None), default=None),
        "oom_kills": max(turn.oom_kills for turn in turns),
        "read_shape": f"{ReadShape.of(description)}, {'direct' if turns[0].reads_direct else 'buffered'}",
        "disk_bps_before": median([turn.disk_bps[0] for turn in turns if turn.disk_bps]),
        "disk_bps_after": median([turn.disk_bps[1] for turn in turns if len(turn.disk_bps) > 1]),
        "read_ahead_kib": turns[0].read_ahead_kib,
        "experts_used": arm.options.get("experts_used") or description.experts_used,
        "machine": around.machine.as_dict(),
        "disk": around.disk.as_dict(),
    }
    record |= _outcome(turns, runs, interrupted)
    if runs:
        record |= _times(turns, test, runs) | _costs(runs)
        if arm.streamed:
            record |= _streaming(runs, record)
    record["warnings"] = _warnings(record, turns, runs, test, description, resident=arm.resident)
    return record


def _outcome(turns: Sequence[Turn], runs: Sequence[TestRun], interrupted: bool) -> dict[str, Any]:
    ended = next((turn for turn in turns if turn.outcome != "ok"), None)
    if ended is not None and len(runs) < len(turns):  # else it was in a later test that it ended
        of = f" (in {sum(turn.outcome == ended.outcome for turn in turns)} of {len(turns)} rounds)" if runs else ""
        outcome = "failed" if ended.outcome == "refused" else ended.outcome
        return {"outcome": outcome, "outcome_message": ended.message + of}
    if slow := [run for run in runs if not run.in_time]:
        return {
            "outcome": "too slow",
            "outcome_message": f"{min(len(run.token_s) for run in slow)} tokens were written in the time that a test has",
        }
    if interrupted:
        return {"outcome": "interrupted", "outcome_message": f"broken off after {len(runs)} rounds"}
    return {"outcome": "ok", "outcome_message": ""}


def _times(turns: Sequence[Turn], test: Test, runs: Sequence[TestRun]) -> dict[str, Any]:
    warm = [turn.warm for turn in turns if turn.warm is not None]
    found: dict[str, Any] = {
        "warm_tokens": round(statistics.mean(len(feed.token_s) for feed in warm)) if warm else 0,
        "warm_ts": median([len(feed.token_s) / sum(feed.token_s) for feed in warm]),
        "token_ns": [[round(second * 1e9) for second in run.token_s] for run in runs],
    }
    if not test.n_gen:
        return found
    times = np.concatenate([run.token_s for run in runs])
    p50, p95, p99 = np.quantile(times, (0.5, 0.95, 0.99)) * 1e3
    fewest = min(len(run.token_s) for run in runs)
    ratio, chance = drift([run.token_s for run in runs])
    drifts = ratio is not None and abs(ratio - 1) > DRIFTS and chance < 0.05
    return found | {
        "p50_ms": float(p50),
        "p95_ms": float(p95),
        "p99_ms": float(p99),
        "steady": fewest >= STEADY_TOKENS and not drifts,
        "steady_tokens": fewest,
        "drift": ratio,
        "drift_p": chance,
    }


def drift(rounds: Sequence[Sequence[float]]) -> tuple[float | None, float | None]:
    """Is the second half of the tokens slower than the first, or faster?

    Tokens are moved in blocks, for neighbours miss alike; a round keeps its own.

    Args:
        rounds: Seconds of each token, a round each.

    Returns:
        Mean time of the second halves over that of the first; and how often blocks in a random order give a difference as
        large (a permutation test). Both None for fewer than two blocks.
    """
    blocks = []
    for times in rounds:
        count = len(times) // _BLOCK // 2 * 2
        if count:
            blocks.append(np.asarray(times[: count * _BLOCK]).reshape(count, _BLOCK).mean(axis=1))
    if not blocks:
        return None, None
    draw = np.random.default_rng(0)

    def ratio(order: Sequence[npt.NDArray[np.float64]]) -> float:
        first = np.concatenate([one[: len(one) // 2] for one in order]).mean()
        return float(np.concatenate([one[len(one) // 2 :] for one in order]).mean() / first)

    found = ratio(blocks)
    shuffled = [ratio([draw.permutation(one) for one in blocks]) for _ in range(_SHUFFLES)]
    as_far = sum(abs(np.log(other)) >= abs(np.log(found)) - 1e-12 for other in shuffled)
    return found, (as_far + 1) / (_SHUFFLES + 1)


def _costs(runs: Sequence[TestRun]) -> dict[str, Any]:
    feeds, done = [feed for run in runs for feed in run.feeds], sum(run.done for run in runs)
    energy = [run.energy_j for run in runs]
    return {
        "major_faults_per_token": sum(feed.major_faults for feed in feeds) / done,
        "cpu_s_per_token": sum(feed.cpu_s for feed in feeds) / done,
        "demand_bytes_per_token": sum(feed.read_bytes for feed in feeds) / done,
        "energy_j_per_token": sum(energy) / done if all(one is not None for one in energy) else None,
        "temperature_c": max((run.temperature_c for run in runs if run.temperature_c is not None), default=None),
        "bench_overhead": 1 - sum(sum(feed.token_s) for feed in feeds) / sum(feed.feed_s for feed in feeds),
    }


def _streaming(runs: Sequence[TestRun], record: Mapping[str, Any]) -> dict[str, Any]:
    done = sum(run.done for run in runs)

    def per_token(name: str) -> float:
        return sum(run.total(name) for run in runs) / done

    last = runs[-1].feeds[-1].experts
    found, missed = per_token("hits"), per_token("misses")
    guessed, wasted = per_token("guessed_bytes"), per_token("wasted_bytes")
    read = per_token("bytes_read")
    token_s = sum(run.seconds for run in runs) / done
    wait_s = per_token("wait_s")
    disk_bps = _disk_bps(record)
    values = {
        **{name: last[name] for name in ("cache_bytes", "kernels", "prefetch", "policy", "reader", "direct")},
        "hit_rate": found / (found + missed) if found + missed else None,
        "demand_bytes_per_token": max(0.0, read - guessed),
        "useful_bytes_per_token": max(0.0, min(guessed, read) - wasted),
        "wasted_bytes_per_token": wasted,
        **{f"{name}_ms": per_token(f"{name}_s") * 1e3 for name in ("wait", "compute", "attention", "router", "other")},
        "prefetch_ms": per_token("read_s") * 1e3,
        "bubble_ms": wait_s * 1e3,
        "compute_limit_ms": (token_s - wait_s) * 1e3,
    }
    if disk_bps is not None:
        values["read_limit_ms"] = max(0.0, read - wasted) / disk_bps * 1e3
    return values | _limit(1 / token_s, values.get("read_limit_ms"), values["compute_limit_ms"])


def add_compute_limits(records: Sequence[dict[str, Any]]) -> None:
    """Gives stock arms their limits: what they compute in a token is what the arm does that has all in memory, if one was measured."""
    resident = {
        _same_work(record): 1e3 / _speed(record)
        for record in records
        if record["arm"].startswith("stock-resident")
        and record["outcome"] == "ok"
        and record["avg_ts"]
        and record["repack"]
        and not any(sentence.startswith("error: not resident") for sentence in record["warnings"])
    }
    for record in records:
        computes_ms, disk_bps = resident.get(_same_work(record)), _disk_bps(record)
        if record.get("limit_ts") is None and computes_ms and record["avg_ts"] and disk_bps is not None:
            reads_ms = record["demand_bytes_per_token"] / disk_bps * 1e3
            record |= {"read_limit_ms": reads_ms, "compute_limit_ms": computes_ms}
            record |= _limit(_speed(record), reads_ms, computes_ms)


def _speed(record: Mapping[str, Any]) -> float:
    """Tokens a second of all rounds together: unlike the mean of the rounds' speeds, what one token took over that of another."""
    return statistics.harmonic_mean(record["samples_ts"])


def _disk_bps(record: Mapping[str, Any]) -> float | None:
    """Between what was measured before the turns and after them; None if it was not."""
    rates = [record[name] for name in ("disk_bps_before", "disk_bps_after") if record[name]]
    return statistics.mean(rates) if rates else None


def _same_work(record: Mapping[str, Any]) -> str:
    names = ("model_hash", "n_prompt", "n_gen", "n_depth", "n_threads", "n_batch", "n_ubatch", "experts_used")
    return json.dumps([record[name] for name in names])


def _limit(speed: float, read_ms: float | None, compute_ms: float) -> dict[str, Any]:
    if read_ms is None:
        return {}
    limit = 1e3 / max(read_ms, compute_ms)
    return {"limit_ts": limit, "limit_share": speed / limit}


def _one_of_a_kind(sentences: Iterable[str]) -> list[str]:
    """The first of those that differ in their numbers and what follows alone."""
    found: dict[str, str] = {}
    for sentence in sentences:
        found.setdefault(re.split(r"[0-9]", sentence, maxsplit=1)[0], sentence)
    return list(found.values())


def _warnings(
    record: Mapping[str, Any],
    turns: Sequence[Turn],
    runs: Sequence[TestRun],
    test: Test,
    description: ModelDescription,
    *,
    resident: bool,
) -> list[str]:
    found = [*dict.fromkeys(sentence for turn in turns for sentence in turn.warnings)]
    if runs and record["outcome"] == "ok":
        found += dict.fromkeys(f"a later test of this arm: {turn.message}" for turn in turns if turn.outcome != "ok")
    if runs and record["disk_bps_limit"] and record["limited_by"] == "cgroup v1":
        found.append(_CREDITS)
    found += _one_of_a_kind(sentence for run in runs for sentence in run.busy)
    if test.n_gen and runs and not record["steady"]:
        if record["steady_tokens"] < STEADY_TOKENS:
            found.append(f"{record['steady_tokens']} tokens are too few to call it steady: {STEADY_TOKENS} are wanted")
        else:
            found.append(
                f"not steady: the last half of the tokens took {record['drift']:.2f} of the time of the first; warm up longer"
            )
    if (share := record.get("limit_share")) is not None and share > _OVER:
        found.append(
            f"error: {share:.2f} of the limit that disk and computing set: the disk was faster than when its bandwidth was measured, "
            "or less was read than counted"
        )
    if resident and runs and record["peak_rss"] and record["peak_rss"] < description.bytes_on_disk * 0.98:
        found.append(
            f"error: not resident: {format_size(record['peak_rss'])} of memory were used for a file of {format_size(description.bytes_on_disk)}"
        )
    if record.get("bench_overhead") is not None and record["bench_overhead"] > 0.01:
        found.append(f"error: measuring itself took {record['bench_overhead']:.1%} of the time")
    return found
