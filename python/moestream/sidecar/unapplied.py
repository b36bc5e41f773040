"""Matrices whose LoRA llama.cpp loads and then does not use: its graph multiplies by them without asking for one.

The table is what a LoRA of every matrix of a small model of each architecture showed: which of its tensors are in the graph
of llama.cpp (as in llama-cpp-python 0.3.36), and which are not. `tests/test_sidecar.py` asks it again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["unapplied"]

_EVERYWHERE = r".*norm|.*conv1d(_[qkv])?|shortconv\.conv|.*_ape|.*hc_\w+_fn|dense_2"
_LATENT = r"attn_(q|q_a|q_b|kv_a_mqa|kv_b|k_b|v_b)|output"
_SPARSE = _LATENT + r"|indexer\.(proj|attn_k|attn_q_b)"
_LINEAR = _LATENT + r"|attn_(k|v|output)|ssm_(f_a|f_b|g|g_a|g_b|beta)"
_ARCHITECTURES = {
    "bailingmoe3": _LINEAR + "|attn_gate",
    "deepseek2": _LATENT,
    "deepseek2-ocr": "output",
    "deepseek32": _SPARSE,
    "deepseek4": "output|output_hc_fn|attn_output_a",
    "dots3note": _SPARSE,
    "glm-dsa": _SPARSE,
    "glm5-next": _LINEAR + "|" + _SPARSE + "|indexer_compressor_gate",
    "hy_v4": _SPARSE + "|output_hc_fn|attn_gate",
    "kimi-k3": _LINEAR + r"|attn_gate|ffn_(gate|up|down)(_shexp)?|ffn_gate_inp|ffn_routed_(up|down)",
    "kimi-linear": _LINEAR,
    "minimax-m3": r"indexer\.[qk]_proj",
    "mistral4": _LATENT,
    "nemotron_h_moe": r"ffn_latent_(up|down)",
}


def unapplied(architecture: str, names: Iterable[str]) -> list[str]:
    """Those of `names`, such as `blk.0.attn_q.weight`, whose LoRA would change nothing in at least one layer."""
    pattern = re.compile(rf"(?:blk\.\d+\.)?(?:{_EVERYWHERE}|{_ARCHITECTURES.get(architecture, '$^')})\.weight")
    return [name for name in names if pattern.fullmatch(name) or not name.endswith(".weight")]
