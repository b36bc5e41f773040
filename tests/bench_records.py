"""Records of `moestream bench` as they might be, made up: for the tests of what it puts out."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

GIB = 2**30
MACHINE: dict[str, Any] = {
    "cpu": "AMD EPYC 9R14",
    "architecture": "x86_64",
    "cores_physical": 2,
    "cores_logical": 2,
    "cores_usable": 2,
    "flags": ["avx2", "avx512f", "avx512_vnni", "fma", "f16c"],
    "governor": None,
    "frequency_mhz": None,
    "memory_bytes": 15 * GIB,
    "swap_bytes": 0,
    "kernel": "6.12.9",
    "system": "Debian GNU/Linux 13",
    "virtual": "kvm",
    "python": "3.11.7",
    "versions": {"moestream": "0.1.0", "llama-cpp-python": "0.3.36", "numpy": "2.3.5"},
    "commit": None,
}
DISK: dict[str, Any] = {
    "device": "nvme0n1",
    "model": "Acme NVMe",
    "file_system": "ext4",
    "mount": "/data",
    "size_bytes": 500 * GIB,
    "rotational": False,
    "read_ahead_kib": 128,
    "scheduler": "none",
}
SPEEDS = {"stock-mmap": 1.4, "stock-none": 9.0, "stream-reactive": 5.2, "stream-prefetch": 6.1}
"""Tokens a second at 4 GiB; stock-none's is with memory enough."""


def record(
    arm: str = "stream-prefetch",
    *,
    speed: float | None = None,
    memory: int | None = 4 * GIB,
    depth: int = 0,
    rounds: int = 3,
    tokens: int = 256,
    seed: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    """One record that went well, with token times of gamma distribution about 1 / speed; `changes` are put over it."""
    rng = np.random.default_rng([seed, zlib.crc32(repr((arm, memory, depth)).encode())])
    kind = arm.partition(":")[0]
    streamed = kind.startswith("stream")
    mean_ns = 1e9 / (SPEEDS.get(kind, 5.0) if speed is None else speed)
    token_ns = [[round(float(ns)) for ns in rng.gamma(20, mean_ns / 20, tokens)] for _ in range(rounds)]
    samples_ns = [sum(times) for times in token_ns]
    samples_ts = [1e9 * tokens / ns for ns in samples_ns]
    every = np.concatenate(token_ns) / 1e6
    cache = (memory or 15 * GIB) - 5 * GIB // 4 if streamed else None
    mean_ms = mean_ns / 1e6
    parts = {"wait_ms": 0.45, "compute_ms": 0.3, "attention_ms": 0.15, "router_ms": 0.02, "other_ms": 0.08}
    made: dict[str, Any] = {
        "build_commit": "b1d2e3f",
        "build_number": 9999,
        "cpu_info": MACHINE["cpu"],
        "gpu_info": "",
        "backends": "CPU",
        "model_filename": "qwen3-30b-a3b-q4_0.gguf",
        "model_type": "qwen3moe 30B.A3B Q4_0",
        "model_size": 17219000000,
        "model_n_params": 30532000000,
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_threads": 2,
        "cpu_mask": "0x0",
        "cpu_strict": False,
        "poll": 50,
        "type_k": "f16",
        "type_v": "f16",
        "n_gpu_layers": 0,
        "n_cpu_moe": 0,
        "split_mode": "layer",
        "main_gpu": 0,
        "no_kv_offload": False,
        "flash_attn": -1,
        "devices": "auto",
        "tensor_split": "0.00",
        "tensor_buft_overrides": "none",
        "load_mode": "mmap" if kind == "stock-mmap" else "none",
        "lazy_mode": "off",
        "embeddings": False,
        "no_op_offload": 0,
        "no_host": False,
        "repack": True,
        "fit_target": 0,
        "fit_min_ctx": 0,
        "n_prompt": 0,
        "n_gen": tokens,
        "n_depth": depth,
        "test_time": "2026-05-04T11:57:09Z",
        "avg_ns": round(float(np.mean(samples_ns))),
        "stddev_ns": round(float(np.std(samples_ns))),
        "avg_ts": float(np.mean(samples_ts)),
        "stddev_ts": float(np.std(samples_ts)),
        "samples_ns": samples_ns,
        "samples_ts": samples_ts,
        "arm": arm,
        "outcome": "ok",
        "outcome_message": "",
        "warnings": [],
        "workload": "text: demo corpus",
        "routing": "own",
        "model_hash": "0123456789abcdef",
        "model_laid": False,
        "bytes_on_disk": 17223000000,
        "dense_bytes": 911000000,
        "expert_bytes": 16311000000,
        "memory_limit": memory,
        "disk_bps_limit": None,
        "limited_by": "cgroup v1" if memory else "",
        "round_order": list(range(rounds)),
        "load_s": 1.62,
        "first_token_s": 0.81,
        "warm_tokens": 64,
        "warm_ts": float(np.mean(samples_ts)) * 0.8,
        "steady": True,
        "steady_tokens": tokens,
        "drift": 1.01,
        "drift_p": 0.43,
        **{f"p{p}_ms": float(np.percentile(every, p)) for p in (50, 95, 99)},
        "peak_rss": round((memory or 15 * GIB) * (0.93 if streamed else 0.99)),
        "cgroup_peak": memory,
        "oom_kills": 0,
        "major_faults_per_token": 0.0 if streamed else 2100.5,
        "cache_bytes": cache,
        "experts_used": 8 if streamed else None,
        "kernels": "interleaved" if streamed else None,
        "prefetch": kind.partition("-")[2] if streamed else None,
        "policy": "lrfu" if streamed else None,
        "reader": "uring" if streamed else None,
        "direct": True if streamed else None,
        "hit_rate": 0.62 if streamed else None,
        "demand_bytes_per_token": 3.1e8 if streamed else None,
        "useful_bytes_per_token": 5e7 if streamed else None,
        "wasted_bytes_per_token": 1e7 if streamed else None,
        **{key: share * mean_ms if streamed else None for key, share in parts.items()},
        "prefetch_ms": 0.2 * mean_ms if streamed else None,
        "bubble_ms": 0.45 * mean_ms if streamed else None,
        "disk_bps_before": 2.48e9,
        "disk_bps_after": 2.51e9,
        "read_shape": "2.7 MB x 4, direct",
        "read_limit_ms": 0.6 * mean_ms if streamed else None,
        "compute_limit_ms": 0.5 * mean_ms if streamed else None,
        "limit_ts": 1e3 / (0.6 * mean_ms) if streamed else None,
        "limit_share": 0.6 if streamed else None,
        "energy_j_per_token": None,
        "temperature_c": None,
        "cpu_s_per_token": 0.21,
        "bench_overhead": 0.003,
        "machine": MACHINE,
        "disk": DISK,
        "token_ns": token_ns,
    }
    return {**made, **changes}


def killed(arm: str = "stock-none", **conditions: Any) -> dict[str, Any]:
    """A record of an arm that the system killed before it had a token."""
    unknown = dict.fromkeys(
        (
            "avg_ns",
            "stddev_ns",
            "avg_ts",
            "stddev_ts",
            "load_s",
            "first_token_s",
            "warm_tokens",
            "warm_ts",
            "steady",
            "drift",
        )
        + (
            "steady_tokens",
            "drift_p",
            "p50_ms",
            "p95_ms",
            "p99_ms",
            "cpu_s_per_token",
            "major_faults_per_token",
            "bench_overhead",
        )
        + (
            "disk_bps_after",
            "hit_rate",
            "wait_ms",
            "compute_ms",
            "attention_ms",
            "router_ms",
            "other_ms",
            "limit_ts",
            "limit_share",
        )
    )
    message = "killed by the system: it needs more memory than its limit of 4 GiB"
    outcome = {"outcome": "oom-killed", "outcome_message": message, "oom_kills": 1}
    return {**record(arm, **conditions), **unknown, "samples_ns": [], "samples_ts": [], "token_ns": [], **outcome}


def sweep() -> list[dict[str, Any]]:
    """Four arms at several memory limits, and at 4 GiB at several depths and disk limits; 32 records."""
    records = []
    for gib in (2, 4, 6, 8, 12):
        for arm in SPEEDS:
            if arm == "stock-none":
                records.append(killed(arm, memory=gib * GIB))
                continue
            speed = SPEEDS[arm] * (gib / 4) ** (1.1 if arm == "stock-mmap" else 0.5)
            records.append(record(arm, memory=gib * GIB, speed=speed))
    for depth in (1024, 4096):
        for arm in ("stock-mmap", "stream-reactive", "stream-prefetch"):
            records.append(record(arm, depth=depth, speed=SPEEDS[arm] / (1 + depth / 8192)))
    for bps in (500_000_000, 1_000_000_000):
        for arm in ("stock-mmap", "stream-reactive", "stream-prefetch"):
            slowed = SPEEDS[arm] * bps / 2.5e9
            records.append(record(arm, disk_bps_limit=bps, speed=slowed, disk_bps_before=bps * 0.99))
    busy = "other processes used 31% of a core meanwhile; figures may be too low"
    records[3]["warnings"].append(busy)
    records[6]["warnings"].append(busy)
    records[5]["warnings"].append("random weights: what is routed where says nothing about a trained model")
    return records


def cache_sizes() -> list[dict[str, Any]]:
    """The two streamed arms with caches given in their names, and stock-mmap beside them, without a limit of memory."""
    records = [record("stock-mmap", memory=None, speed=7.0)]
    for gib in (1, 2, 3):
        for kind in ("stream-reactive", "stream-prefetch"):
            speed = SPEEDS[kind] * (gib / 3) ** 0.6
            records.append(record(f"{kind}:cache={gib}GiB", memory=None, speed=speed, cache_bytes=gib * GIB))
    return records
