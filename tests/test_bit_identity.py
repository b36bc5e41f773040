"""Streamed logits are stock's, to the last bit: any architecture, kernels, reader, cache, split and layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import moestream
from factory import ARCHITECTURES, make
from isolation import isolated
from logits import stock, streamed
from moestream import ExpertStreaming

REQUIRED = (
    "qwen2moe qwen3moe qwen3next qwen35moe olmoe llama deepseek2 smallthinker gpt-oss granitemoe "
    "bailingmoe2 glm4moe ernie4_5-moe lfm2moe phimoe hunyuan-moe minimax-m2"
).split()


UNDEFINED_INTERLEAVED = {"grovemoe"}
"""A token chooses one of its second kind of experts more than once; then stock's interleaved kernels leave rows as the memory was."""


def compare(path: Path, shards: Path | None, *, fused: bool = True) -> list[str]:
    """The configurations whose logits differ from stock's, and what else looks wrong.

    Args:
        fused: Whether every block must have been computed as one operation.
    """
    model = moestream.describe(path)
    smallest, half = model.minimum_cache_bytes, model.maximum_cache_bytes // 2
    cases = [
        (path, ExpertStreaming(kernels="plain", reader="uring", cache=smallest)),
        (path, ExpertStreaming(kernels="plain", reader="pread", cache="auto")),
        (path, ExpertStreaming(kernels="plain", reader="mmap")),
        (path, ExpertStreaming(kernels="interleaved", reader="uring", cache=max(half, smallest))),
        (path, ExpertStreaming(kernels="interleaved", reader="pread", cache=smallest, direct=False)),
        (path, ExpertStreaming(kernels="auto", reader="auto", verify=True)),
    ]
    kept = next((type for type in model.types if type in ("F16", "F32")), None)  # which convert would quantise
    for target in ("native", "plain", "arm-dotprod"):
        laid = path.with_name(f"{target}.gguf")
        moestream.convert(path, laid, kept, target=target, progress=False)
        one_token = moestream.describe(laid).minimum_cache_bytes
        cases += [
            (laid, ExpertStreaming(kernels="plain", reader="pread", cache=one_token, verify=True)),
            (laid, ExpertStreaming(kernels="interleaved", reader="uring", cache=one_token)),
        ]
    if shards:
        cases += [(shards, ExpertStreaming(kernels="plain", reader="uring", cache=smallest)), (shards, ExpertStreaming(kernels="plain", reader="mmap"))]
    expected = {interleaved: stock(path, interleaved=interleaved) for interleaved in (False, True)}
    wrong = []
    if model.architecture in UNDEFINED_INTERLEAVED:
        cases = [case for case in cases if case[1].kernels == "plain"]
    for file, streaming in cases:
        logits, stats = streamed(file, streaming)
        interleaved = streaming.kernels != "plain"
        if not np.array_equal(logits, expected[interleaved]):
            difference = np.abs(logits - expected[interleaved])
            wrong.append(f"{streaming}: differs by up to {difference.max():.3g} in rows {np.unique(np.nonzero(difference)[0]).tolist()}")
        if stats.hits + stats.misses == 0 or stats.tokens != len(logits):
            wrong.append(f"{streaming}: nothing was streamed: {stats}")
        if fused and (stats.ggml_blocks or not stats.fused_blocks):
            wrong.append(f"{streaming}: {stats.ggml_blocks} blocks were computed node by node, {stats.fused_blocks} as one")
        if stats.slots_used > stats.slots_total:
            wrong.append(f"{streaming}: {stats.slots_used} slots used of {stats.slots_total}")
    return wrong


@pytest.mark.parametrize("architecture", REQUIRED)
def test_streamed_logits_equal_stock_bit_for_bit(architecture: str, tmp_path: Path) -> None:
    path = make(tmp_path, architecture)
    shards = make(tmp_path, architecture, split=3)
    assert isolated(compare, path, shards) == []


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - set(REQUIRED)))
def test_other_architectures_stream_bit_for_bit_too(architecture: str, tmp_path: Path) -> None:
    assert isolated(compare, make(tmp_path, architecture), None) == []


VARIANTS = {
    "merged gate_up": ("qwen3next", {"merged_gate_up": True}),
    "scales per expert": ("qwen3moe", {"expert_scales": True}),
    "more than 256 experts": ("qwen3moe", {"experts": 300}),
    "leading dense layers": ("deepseek2", {"leading_dense": 2}),
    "expert groups": ("deepseek2", {"groups": 4, "gating": "sigmoid"}),
    "shared experts": ("qwen2moe", {"shared": 2}),
    "tied embeddings": ("qwen3moe", {"tied": True}),
    "softmax smallthinker": ("smallthinker", {"gating": "softmax"}),
    "types that differ by matrix and layer": ("qwen3moe", {"type": "Q4_K", "expert_types": {"down": "Q6_K", (1, "down"): "Q5_K", (0, "up"): "Q8_0"}}),
    "F16 experts": ("qwen3moe", {"type": "F16"}),
    "F32 experts": ("olmoe", {"type": "F32"}),
    "Q8_0 experts": ("qwen3moe", {"type": "Q8_0"}),
    "IQ4_NL experts": ("qwen3moe", {"type": "IQ4_NL"}),
    "tensors in reverse order": ("qwen3moe", {"order": "reversed"}),
    "tensors in random order, aligned to 64": ("qwen3moe", {"order": "shuffled", "alignment": 64}),
    "tensors aligned to 4096": ("qwen3moe", {"alignment": 4096}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_expert_tensor_streams_bit_for_bit(variant: str, tmp_path: Path) -> None:
    architecture, properties = VARIANTS[variant]
    path = make(tmp_path, architecture, **properties)
    shards = make(tmp_path, architecture, split=3, **properties)
    assert isolated(compare, path, shards, fused="expert_scales" not in properties) == []
