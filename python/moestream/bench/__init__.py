"""Benchmarks: ways to run a model, compared within one run, and records of what came of it (docs/benchmarking.md).

from moestream.bench import benchmark
benchmark(model="m.gguf", arms="stock-mmap,stream-prefetch", memory="4GiB", n_prompt=0, n_gen=256)
"""

from .arms import ARMS, BenchArm, parse_arm
from .rounds import benchmark

__all__ = ["ARMS", "BenchArm", "benchmark", "parse_arm"]
