"""The record of one arm in one test: which keys it has, of which kind, and files of records.

A record is a flat dict. It begins with the keys of llama-bench, in its order and with its kinds of values, so that what reads
llama-bench's output reads ours; ours follow. What is not known is None. docs/benchmarking.md says what each key means.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import OptionError

__all__ = [
    "FLAT",
    "KILLED",
    "LLAMA_BENCH_KEYS",
    "OUR_KEYS",
    "Record",
    "disk_text",
    "distinct",
    "flat_value",
    "kind_of",
    "measured_ts",
    "machine_text",
    "loss_text",
    "outcome_text",
    "rate_text",
    "read_records",
    "short_size",
    "test_name",
    "whole_record",
]

Record = Mapping[str, Any]

# The kinds: text, whole numbers, numbers, yes or no, sentences; and what only json and jsonl hold.
_LLAMA_BENCH: dict[str, str] = {
    "build_commit": "text",
    "build_number": "int",
    "cpu_info": "text",
    "gpu_info": "text",
    "backends": "text",
    "model_filename": "text",
    "model_type": "text",
    "model_size": "int",
    "model_n_params": "int",
    "n_batch": "int",
    "n_ubatch": "int",
    "n_threads": "int",
    "cpu_mask": "text",
    "cpu_strict": "bool",
    "poll": "int",
    "type_k": "text",
    "type_v": "text",
    "n_gpu_layers": "int",
    "n_cpu_moe": "int",
    "split_mode": "text",
    "main_gpu": "int",
    "no_kv_offload": "bool",
    "flash_attn": "int",
    "devices": "text",
    "tensor_split": "text",
    "tensor_buft_overrides": "text",
    "load_mode": "text",
    "lazy_mode": "text",
    "embeddings": "bool",
    "no_op_offload": "int",
    "no_host": "bool",
    "repack": "bool",
    "fit_target": "int",
    "fit_min_ctx": "int",
    "n_prompt": "int",
    "n_gen": "int",
    "n_depth": "int",
    "test_time": "text",
    "avg_ns": "int",
    "stddev_ns": "int",
    "avg_ts": "float",
    "stddev_ts": "float",
    "samples_ns": "numbers",
    "samples_ts": "numbers",
}
_OURS: dict[str, str] = {
    "arm": "text",
    "outcome": "text",
    "outcome_message": "text",
    "warnings": "sentences",
    "workload": "text",
    "routing": "text",
    "model_hash": "text",
    "model_laid": "bool",
    "bytes_on_disk": "int",
    "dense_bytes": "int",
    "expert_bytes": "int",
    "memory_limit": "int",
    "disk_bps_limit": "int",
    "limited_by": "text",
    "round_order": "numbers",
    "load_s": "float",
    "first_token_s": "float",
    "warm_tokens": "int",
    "warm_ts": "float",
    "steady": "bool",
    "steady_tokens": "int",
    "drift": "float",
    "drift_p": "float",
    "p50_ms": "float",
    "p95_ms": "float",
    "p99_ms": "float",
    "peak_rss": "int",
    "cgroup_peak": "int",
    "oom_kills": "int",
    "major_faults_per_token": "float",
    "cache_bytes": "int",
    "experts_used": "int",
    "kernels": "text",
    "prefetch": "text",
    "policy": "text",
    "reader": "text",
    "direct": "bool",
    "read_ahead_kib": "int",
    "hit_rate": "float",
    "demand_bytes_per_token": "float",
    "useful_bytes_per_token": "float",
    "wasted_bytes_per_token": "float",
    "wait_ms": "float",
    "compute_ms": "float",
    "attention_ms": "float",
    "router_ms": "float",
    "other_ms": "float",
    "prefetch_ms": "float",
    "bubble_ms": "float",
    "disk_bps_before": "float",
    "disk_bps_after": "float",
    "read_shape": "text",
    "read_limit_ms": "float",
    "compute_limit_ms": "float",
    "limit_ts": "float",
    "limit_share": "float",
    "energy_j_per_token": "float",
    "temperature_c": "float",
    "cpu_s_per_token": "float",
    "bench_overhead": "float",
    "machine": "dict",
    "disk": "dict",
    "token_ns": "rounds",
}
_KINDS = {**_LLAMA_BENCH, **_OURS}
_ONLY_JSON = ("numbers", "rounds", "dict")

LLAMA_BENCH_KEYS: tuple[str, ...] = tuple(_LLAMA_BENCH)
"""What llama-bench writes as JSON. In its other formats the last two, one value a round, are not there."""
OUR_KEYS: tuple[str, ...] = tuple(_OURS)
FLAT: tuple[str, ...] = tuple(key for key, kind in _KINDS.items() if kind not in _ONLY_JSON)
"""The keys that csv and sql have."""

KILLED = "oom-killed"
_OUTCOMES = {KILLED: "killed: out of memory", "too slow": "cut short"}
# What was measured before it was cut off counts. Of what was killed or failed nothing does.
_COUNTS = ("ok", "too slow", "interrupted")


def kind_of(key: str) -> str:
    """ "text", "int", "float", "bool", "sentences", "numbers", "rounds" (of numbers) or "dict"; "any" of a key that is not ours."""
    return _KINDS.get(key, "any")


def whole_record(record: Record) -> dict[str, Any]:
    """The record with all keys in their order and values of their kinds; keys of others are last, as they are."""
    known = {key: _of_kind(record.get(key), kind) for key, kind in _KINDS.items()}
    return {**known, **{key: value for key, value in record.items() if key not in _KINDS}}


def flat_value(record: Record, key: str) -> str | None:
    """A value as csv and sql write it, which is as llama-bench does: 0 or 1, six decimals in what is its own. None: not known."""
    value, kind = _of_kind(record.get(key), kind_of(key)), kind_of(key)
    if value is None:
        return None
    if kind == "bool":
        return str(int(value))
    if kind == "sentences":
        return "; ".join(value)
    if kind == "float" and key in _LLAMA_BENCH:
        return f"{value:.6f}"
    return str(value)


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a file of `moestream bench -o json` or `-o jsonl`. Keys that this version does not know are kept.

    Raises:
        OptionError: The file cannot be read, is neither, or holds something that is no record of `moestream bench`.
    """
    try:
        text = Path(path).read_bytes().decode()
    except OSError as exc:
        raise OptionError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise OptionError(f"{path}: is not text: {_WANTED}") from exc
    entries = _parse(path, text)
    if not entries:
        raise OptionError(f"{path}: has no records: {_WANTED}")
    for number, entry in enumerate(entries, 1):
        _require_record(f"{path}: record {number}", entry)
    return entries


def test_name(record: Record) -> str:
    """As llama-bench calls it: ``pp512``, ``tg256 @ d512``, ``pp512+tg128``."""
    prompt, generated, depth = (record.get(key) or 0 for key in ("n_prompt", "n_gen", "n_depth"))
    if prompt and generated:
        name = f"pp{prompt}+tg{generated}"
    else:
        name = f"pp{prompt}" if prompt else f"tg{generated}"
    return f"{name} @ d{depth}" if depth else name


test_name.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test


def outcome_text(record: Record) -> str:
    """For people: "" of what went well, else "killed: out of memory", "failed", ..."""
    outcome = record.get("outcome") or "ok"
    return "" if outcome == "ok" else _OUTCOMES.get(outcome, outcome)


def measured_ts(record: Record) -> float | None:
    """Tokens a second; None of an arm that was killed or failed, whatever it did before, or had no token."""
    return record.get("avg_ts") if (record.get("outcome") or "ok") in _COUNTS else None


def loss_text(record: Record) -> str:
    """As `outcome_text`, but "" as well of what was measured before it was cut short."""
    return "" if measured_ts(record) else outcome_text(record)


def machine_text(record: Record) -> str:
    """What it was measured on: CPU, cores, memory."""
    machine = record.get("machine") or {}
    cores, memory = machine.get("cores_usable"), machine.get("memory_bytes")
    parts = [record.get("cpu_info") or machine.get("cpu") or "unknown CPU"]
    parts += [f"{cores} {'core' if cores == 1 else 'cores'}"] if cores else []
    parts += [f"{short_size(memory)} of memory"] if memory else []
    parts += [f"virtual machine ({machine['virtual']})"] if machine.get("virtual") else []
    return ", ".join(parts)


def disk_text(records: Sequence[Record]) -> str:
    """The disk that they were read from, and the rates it was measured to give before and after."""
    disks = (r.get("disk") or {} for r in records)
    names = distinct(
        " ".join(str(d[key]) for key in ("device", "file_system") if d.get(key)) or "unknown" for d in disks
    )
    rates = sorted(rate / 1e9 for r in records for key in ("disk_bps_before", "disk_bps_after") if (rate := r.get(key)))
    shapes = distinct(r["read_shape"] for r in records if r.get("read_shape"))
    if not rates:
        return f"disk {' / '.join(names)}, not measured"
    low, high = f"{rates[0]:.2f}", f"{rates[-1]:.2f}"
    measured = low if low == high else f"{low} to {high}"
    return f"disk {' / '.join(names)}, read at {measured} GB/s" + (f" ({shapes[0]})" if len(shapes) == 1 else "")


def rate_text(bytes_per_s: float) -> str:
    """A rate of a disk as disks are sold: ``500 MB/s``, ``2.5 GB/s``."""
    return f"{bytes_per_s / 1e9:g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:g} MB/s"


def short_size(size_bytes: float) -> str:
    """A size without decimals that say nothing: ``4 GiB``, ``3.75 GiB``, ``512 MiB``."""
    unit, divisor = next(
        ((unit, 2**bits) for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)) if size_bytes >= 2**bits),
        ("bytes", 1),
    )
    return f"{round(size_bytes / divisor, 2):g} {unit}"


# Reading

_WANTED = "a file of records is what `moestream bench -o json` or `-o jsonl` writes"
# What is behind every table and plot; a record that lacks one of them is of another tool.
_NEEDED = ("model_filename", "n_prompt", "n_gen", "n_depth", "avg_ts", "arm", "outcome")


def _parse(path: str | os.PathLike[str], text: str) -> list[Any]:
    """An array, or a line each. What else JSON can be is given back as one entry, for the caller to refuse."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        pass
    else:
        return whole if isinstance(whole, list) else [whole]
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                entries.append(json.loads(line))
            except (ValueError, RecursionError) as exc:
                raise OptionError(f"{path}: line {number} is not JSON ({exc}): {_WANTED}") from exc
    return entries


def _require_record(where: str, entry: Any) -> None:
    if not isinstance(entry, dict):
        raise OptionError(f"{where} is not an object: {_WANTED}")
    missing = [key for key in _NEEDED if key not in entry]
    if missing == ["arm", "outcome"]:
        raise OptionError(
            f"{where} is of llama-bench itself, without arm and outcome: measure that arm with `moestream bench --arms`"
        )
    if missing:
        raise OptionError(f"{where} has no {missing[0]!r}: {_WANTED}")
    for key, value in entry.items():
        if value is not None and not _fits(value, kind_of(key)):
            raise OptionError(f"{where} has {key!r} = {_shortened(value)}: expected {_EXPECTED[kind_of(key)]}")
    machine = entry.get("machine") or {}
    for key, kind in (("cores_usable", "int"), ("memory_bytes", "int"), ("versions", "dict")):
        if machine.get(key) is not None and not _fits(machine[key], kind):
            raise OptionError(f"{where} has machine[{key!r}] = {_shortened(machine[key])}: expected {_EXPECTED[kind]}")
    for key in ("n_prompt", "n_gen", "n_depth", "arm", "outcome", "model_filename"):
        if entry[key] is None:
            raise OptionError(f"{where} has {key!r} = null: expected {_EXPECTED[kind_of(key)]}")


_EXPECTED = {
    "text": "text",
    "int": "a number",
    "float": "a number",
    "bool": "true or false",
    "sentences": "a list of texts",
    "numbers": "a list of numbers",
    "rounds": "a list of lists of numbers above 0",
    "dict": "an object",
}


def _fits(value: Any, kind: str) -> bool:
    if kind in ("int", "float", "bool"):
        return isinstance(value, (int, float)) and abs(value) < 1e30  # which NaN is not either
    if kind == "text":
        return isinstance(value, str)
    if kind == "sentences":
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    if kind == "numbers":
        return isinstance(value, list) and all(_fits(one, "float") for one in value)
    if kind == "rounds":
        return isinstance(value, list) and all(_fits(one, "numbers") and all(n > 0 for n in one) for one in value)
    return kind == "any" or isinstance(value, dict)


def _shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _of_kind(value: Any, kind: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _of_kind(one, "any") for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_of_kind(one, "any") for one in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None  # JSON has no such number
    if value is None or isinstance(value, str) or kind not in ("int", "float", "bool"):
        return value
    return {"int": round, "float": float, "bool": bool}[kind](value)


def distinct(values: Iterable[Any]) -> list[Any]:
    """In the order of their first coming. Values need not be hashable."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found
