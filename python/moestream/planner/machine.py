"""What a machine gives: its disk as the engine reads it, and how long it computes a token."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..probing import KernelRate, Probe, ReadRate, token_compute_s
from .maths import token_s
from .shape import ModelShape

__all__ = ["Costs", "DiskRate", "Machine", "assumed_probe"]

_INTERLEAVING_S_PER_BYTE = 0.1e-9  # what speed a stock file lost against a laid one, 3 GB/s from the disk, two cores

# Of a machine of which only disk and memory bandwidth are known. Named in the answer.
_SHARE_OF_BANDWIDTH = 0.6  # that kernels read weights with
_VALUE_BYTES = 4  # a key and a value
_LAYER_OVERHEAD_S = 100e-6
_WIDTH_S = 20e-9


@dataclass(frozen=True)
class DiskRate:
    """Bytes per second: the median, and what it falls to in one of ten stretches of time."""

    usual: float
    low: float


@dataclass(frozen=True)
class Costs:
    """Seconds of computation when everything is in memory.

    Attributes:
        layers: With experts.
        attention_s: Of a layer, before its experts are known to it: attention, norms, router.
        experts_s: Of a layer's experts.
        rest_s: Of a token, after its last layer: the output matrix, and layers without experts.
    """

    layers: int
    attention_s: float
    experts_s: float
    rest_s: float

    @property
    def layer_s(self) -> float:
        return self.attention_s + self.experts_s

    @property
    def token_s(self) -> float:
        return token_s(self.layers, self.layer_s, self.rest_s)


@dataclass(frozen=True)
class Machine:
    """A probe, and what was asked for in its place.

    Attributes:
        probe: The measurement.
        disk: The most that the disk is to give, in bytes per second; None leaves it as it was measured.
        assumed: Nothing was measured: the kernels are a guess.
    """

    probe: Probe
    disk: int | None = None
    assumed: bool = False

    def disk_rate(self, shape: ModelShape, missed_at_once: float) -> DiskRate:
        """Of reads as the engine makes them when it misses so many experts in a layer."""
        usual = self._read_rate(shape.read_bytes, max(1.0, missed_at_once * shape.reads))
        low = usual * self._low_share()
        most = math.inf if self.disk is None else self.disk
        return DiskRate(min(usual, most), min(low, most))

    def _read_rate(self, size_bytes: float, depth: float) -> float:
        """Of so many reads at once on average, between the depths that were measured."""
        depths = sorted({rate.depth for rate in self._reads()})
        rates = [self.probe.read_rate(size_bytes, depth=measured) for measured in depths]
        return float(np.interp(math.log(depth), np.log(depths), rates))

    def _reads(self) -> list[ReadRate]:
        """Those like the engine's."""
        return [rate for rate in self.probe.reads if rate.order == "random" and rate.direct == self.probe.direct]

    def _low_share(self) -> float:
        """What a slow stretch of time gives of the median."""
        return statistics.median(rate.bytes_per_s_low / rate.bytes_per_s for rate in self._reads())

    def costs(self, shape: ModelShape, *, depth: int, top_k: int, read_bytes: float = 0.0) -> Costs:
        """Of a token after `depth` others, for which `read_bytes` are read from the disk."""
        experts = {name: size * shape.moe_layers * top_k for name, size in shape.expert_types.items()}
        reading = read_bytes * (self.probe.read_cpu_s_per_byte + self._conversion_s_per_byte(shape))
        of_experts = self._computing(experts=experts) + reading
        of_layers = self._computing(
            dense=shape.dense_types,
            layers=shape.layers,
            width=shape.d_model,
            attention_values=shape.attention_values(depth),
        )
        attention_s = of_layers / shape.layers
        without_experts = shape.layers - shape.moe_layers
        return Costs(
            layers=shape.moe_layers,
            attention_s=attention_s,
            experts_s=of_experts / shape.moe_layers,
            rest_s=self._computing(dense=shape.output_types)
            + self.probe.token_overhead_s
            + without_experts * attention_s,
        )

    def _conversion_s_per_byte(self, shape: ModelShape) -> float:
        """Of experts that arrive as a stock file has them and are computed with interleaved rows."""
        interleaved = {rate.type for rate in self.probe.kernels if rate.kernels == "interleaved"}
        sizes = [size for name, size in shape.expert_types.items() if name in interleaved]
        return 0.0 if shape.laid else _INTERLEAVING_S_PER_BYTE * sum(sizes) / shape.expert_bytes

    def _computing(
        self,
        *,
        dense: Mapping[str, float] | None = None,
        experts: Mapping[str, float] | None = None,
        layers: int = 0,
        width: int = 0,
        attention_values: float = 0.0,
    ) -> float:
        """Seconds of a part of a token."""
        with_overhead = token_compute_s(
            self.probe,
            dense_bytes=dense or {},
            expert_bytes=experts or {},
            layers=layers,
            width=width,
            attention_values=attention_values,
        )
        return with_overhead - self.probe.token_overhead_s


def assumed_probe(*, disk: int, memory_bandwidth: int) -> Probe:
    """A machine of which two numbers are known, in bytes per second; all else is a usual value."""
    kernels = memory_bandwidth * _SHARE_OF_BANDWIDTH
    return Probe(
        machine={},
        disk={},
        path="",
        when="",
        seconds=0.0,
        reader="",
        reads=(
            ReadRate(
                size_bytes=1 << 20,
                depth=4,
                order="random",
                direct=True,
                bytes_per_s=disk,
                bytes_per_s_low=disk,
                latency_s=(1 << 20) / disk,
            ),
        ),
        burst_bytes_per_s=disk,
        memory_bytes_per_s=memory_bandwidth,
        threads=0,
        kernels=tuple(
            KernelRate(type="Q4_0", weights=weights, kernels="plain", threads=0, bytes_per_s=kernels)
            for weights in ("dense", "experts")
        ),
        attention_values_per_s=memory_bandwidth / _VALUE_BYTES,
        layer_overhead_s=_LAYER_OVERHEAD_S,
        width_s=_WIDTH_S,
        token_overhead_s=0.0,
        read_cpu_s_per_byte=0.0,
        memory_bytes=0,
        available_bytes=0,
        verdict=(),
    )
