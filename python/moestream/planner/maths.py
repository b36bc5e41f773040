"""The arithmetic of streaming, for one layer and one token. Pure: sizes in bytes, times in seconds, rates in bytes per second.

Formulas and worked examples: SmallThinker (https://arxiv.org/abs/2507.20984), section on reading experts while attention is
computed. X is the size of an expert, B the bandwidth of the disk, Y the time that attention takes, k the experts of a token.
"""

from __future__ import annotations

import math

__all__ = ["bubble_s", "expert_read_s", "footprint_bytes", "hidden_experts", "token_s", "wait_s"]

_ROUNDING = 1e-9  # of a quotient: 2e-3 * 5e9 / 2e6 is 5 experts, whatever the last bit says


def expert_read_s(expert_bytes: float, disk: float) -> float:
    """Seconds to read one expert: X / B. 2 MB at 5 GB/s take 0.4 ms."""
    return expert_bytes / disk


def hidden_experts(window_s: float, disk: float, expert_bytes: float) -> int:
    """Experts whose reading hides behind `window_s` seconds of computation: n = floor(Y B / X).

    2 ms at 5 GB/s hide 5 experts of 2 MB.
    """
    exactly = window_s * disk / expert_bytes
    return math.floor(exactly * (1 + _ROUNDING))


def wait_s(experts: int, hidden: int, expert_bytes: float, disk: float) -> float:
    """Seconds that a layer waits for `experts` read for it, `hidden` of which are there in time: max(0, k - n) X / B.

    Of 8 experts of 2 MB, 5 of them hidden, 3 are waited for: 1.2 ms at 5 GB/s.
    """
    return max(0, experts - hidden) * expert_read_s(expert_bytes, disk)


def bubble_s(prefetch_s: float, attention_s: float) -> float:
    """Seconds that a layer waits for what is read from the beginning of its attention on: max(0, t_prefetch - t_attention)."""
    return max(0.0, prefetch_s - attention_s)


def footprint_bytes(dense_bytes: int, cache_bytes: int, *, kv_bytes: int = 0, buffer_bytes: int = 0) -> int:
    """Resident memory of a streamed model: dense part + expert cache + KV cache + compute buffers; never the size of the file."""
    return dense_bytes + cache_bytes + kv_bytes + buffer_bytes


def token_s(layers: int, layer_s: float, rest_s: float = 0.0) -> float:
    """Seconds of a token: those of its layers, one after the other, and of what comes after the last."""
    return layers * layer_s + rest_s
