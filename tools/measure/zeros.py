"""How much of what the gates of experts give is at most zero, and so zero behind a ReLU: seen in stock llama.cpp while it computes."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from moestream._capture import _F32, _check_layout, _ffi

from .figure import MeasurementError

__all__ = ["zeros_by_layer"]

_GATE = re.compile(rb"ffn_moe_gate-(\d+)")


def zeros_by_layer(path: Path, tokens: list[int]) -> list[float]:
    """Share of the gate's outputs that are at most zero, per layer, over the experts that these tokens take as one text.

    Raises:
        MeasurementError: the model has no gates of experts, or llama.cpp failed.
    """
    found: dict[int, float] = {}

    def look(address: int, ask: bool, _: object) -> bool:
        node = _ffi.cast("struct ggml_tensor *", address)
        gate = _GATE.fullmatch(_ffi.string(node.name))
        if gate and not ask:
            _check_layout(node)
            found[int(gate[1])] = float((_flat(node) <= 0).mean())
        return bool(gate) or not ask

    callback = llama_cpp.ggml_backend_sched_eval_callback(look)
    with contextlib.closing(llama_cpp.Llama(str(path), n_ctx=len(tokens), logits_all=False, verbose=False)) as llm:
        params = type(llm.context_params).from_buffer_copy(llm.context_params)
        params.cb_eval = callback
        ctx = llama_cpp.llama_init_from_model(llm.model, params)
        if not ctx:
            raise MeasurementError(f"{path}: llama.cpp gives no second context of {len(tokens)} tokens")
        try:
            array = (llama_cpp.llama_token * len(tokens))(*tokens)
            if code := llama_cpp.llama_decode(ctx, llama_cpp.llama_batch_get_one(array, len(tokens))):
                raise MeasurementError(f"{path}: llama_decode ended with {code}")
        finally:
            llama_cpp.llama_free(ctx)
    if not found:
        raise MeasurementError(f"{path}: no node of its graph is the gate of experts")
    return [share for _, share in sorted(found.items())]


def _flat(node: Any) -> np.ndarray:
    """All numbers of a contiguous F32 tensor."""
    if node.type != _F32 or node.nb[0] != 4:
        raise MeasurementError(f"{_ffi.string(node.name).decode()} is no table of F32 numbers")
    count = node.ne[0] * node.ne[1] * node.ne[2] * node.ne[3]
    return np.frombuffer(_ffi.buffer(node.data, 4 * count), np.float32)
