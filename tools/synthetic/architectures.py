"""What each Mixture-of-Experts architecture of llama.cpp must be told before it can make a model.

`ARCHITECTURES` has one entry per architecture: its keys beyond those that all have, and which optional tensors its
models carry. `UNSUPPORTED` says why others are missing. What a shape does not give (ranks, state sizes) follows from
what it gives, in about the proportions of the published models.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import gguf


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model. What an architecture does not have (shared experts, a window) is ignored.

    The defaults are tiny, and the bytes of one expert in them are no multiple of 512, so that no offset is right by
    chance. In some architectures `d` must be `heads * head_dim`, as in the defaults.

    Attributes:
        ff: Feed-forward length of one expert.
        topk: Experts per token.
        kv: Key-value heads.
        dense_ff: Feed-forward length of dense layers; 0 is twice `d`.
        shared: Shared experts, that is their length in units of `ff`.
        leading_dense: Layers before the first with experts.
        groups: Groups of experts, of which a token uses half; 1 is no groups.
        gating: "softmax" or "sigmoid"; "" is what the architecture does.
        window: Sliding attention window in tokens.
        tied: The output matrix is the embedding matrix.
        merged_gate_up: `ffn_gate_up_exps` instead of two tensors.
        expert_scales: One factor per expert and matrix.
    """

    layers: int = 4
    d: int = 128
    ff: int = 96
    experts: int = 8
    topk: int = 2
    heads: int = 4
    kv: int = 2
    head_dim: int = 32
    vocab: int = 320
    dense_ff: int = 0
    shared: int = 1
    leading_dense: int = 1
    groups: int = 1
    gating: str = ""
    window: int = 128
    context: int = 4096
    tied: bool = False
    merged_gate_up: bool = False
    expert_scales: bool = False


Keys = Mapping[str, Any]
Part = Keys | Callable[[Shape], Keys]

GATING = {"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}


class Architecture:
    """One architecture.

    Args:
        parts: Its keys, or functions from a shape to keys; later ones win.
        carries: Pattern of the optional biases, scales and rope factors that its models have.
        absent: Pattern of other tensors that llama.cpp would accept but its models do not have.
        dense_or_experts: llama.cpp accepts both kinds of feed-forward in every layer and uses what is there.
        merged: Its graph takes `ffn_gate_up_exps`.
        scales: Its graph takes a scale per expert.
        type: Quantisation of its published models, where that is part of the architecture.
    """

    def __init__(
        self,
        *parts: Part,
        carries: str = "$^",
        absent: str = "$^",
        dense_or_experts: bool = False,
        merged: bool = False,
        scales: bool = False,
        type: str = "Q4_0",
    ):
        self.parts = parts
        self.carries = re.compile(f"{carries}|{_REQUIRED}")
        self.absent = re.compile(f"{absent}|{_UNUSED}")
        self.dense_or_experts = dense_or_experts
        self.merged = merged
        self.scales = scales
        self.type = type


_REQUIRED = r"exp_probs_b\.bias|ssm_dt\.bias|ssm_conv1d\.bias|indexer\.k_norm\.bias"
_UNUSED = r"^dense_2_out"
_EXPERT_SCALES = r"ffn_(gate|up|down)_exps\.scale"
_QKV_BIASES = r"attn_[qkv]\.bias"


# Parts of several architectures ---------------------------------------------------------------------------------------


def _ff_is_experts(s: Shape) -> Keys:
    return {"feed_forward_length": s.ff}


def _shared(s: Shape) -> Keys:
    return {"expert_shared_count": s.shared, "expert_shared_feed_forward_length": s.shared * s.ff}


def _kv_in_every_head(s: Shape) -> Keys:
    return {"attention.head_count_kv": s.heads}


def _leading_dense(s: Shape) -> Keys:
    return {"leading_dense_block_count": s.leading_dense}


def _window(s: Shape) -> Keys:
    return {"attention.sliding_window": s.window, "rope.freq_base_swa": 1e4}


def _window_per_layer(s: Shape) -> Keys:
    return {**_window(s), "attention.sliding_window_pattern": [i % 2 == 1 for i in range(s.layers)]}


def _mrope(s: Shape) -> Keys:
    third = s.head_dim // 2 // 3
    return {"rope.dimension_sections": [s.head_dim // 2 - 2 * third, third, third, 0]}


def _mla(s: Shape) -> Keys:
    """Latent attention in DeepSeek's proportions: rope 1/2, latent 4 times a head."""
    rope, latent = s.head_dim // 2, 4 * s.head_dim
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": latent,
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rope,
        "attention.value_length": latent,
        "attention.key_length_mla": s.head_dim + rope,
        "attention.value_length_mla": s.head_dim,
        "rope.dimension_count": rope,
    }


def _indexer(s: Shape) -> Keys:
    """Sparse attention that keeps all: which tokens are attended to must not decide what a test sees."""
    return {
        "attention.indexer.head_count": 64,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 131072,
    }


def _indexer_in_even_layers(s: Shape) -> Keys:
    return {**_indexer(s), "attention.indexer.types": [1 - i % 2 for i in range(s.layers)]}


def _indexer_blocks(s: Shape) -> Keys:
    return {
        **_indexer(s),
        "attention.indexer.head_count": s.kv,
        "attention.indexer.block_size": 4,
        "attention.indexer.local_blocks": 1,
    }


def _delta_net(s: Shape) -> Keys:
    """Gated delta net in every layer but each fourth."""
    return {
        "ssm.conv_kernel": 4,
        "ssm.state_size": s.head_dim,
        "ssm.group_count": s.heads // 2,
        "ssm.time_step_rank": s.heads,
        "ssm.inner_size": s.heads * s.head_dim,
        "full_attention_interval": 4,
    }


def _mamba(s: Shape) -> Keys:
    return {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 2 * s.d,
        "ssm.state_size": 16,
        "ssm.time_step_rank": s.heads,
        "ssm.group_count": 1,
    }


def _recurrent_odd_layers(s: Shape) -> Keys:
    return {"attention.head_count_kv": [0 if i % 2 else s.kv for i in range(s.layers)]}


def _recurrent_odd_layers_mla(s: Shape) -> Keys:
    return {"attention.head_count_kv": [0 if i % 2 else 1 for i in range(s.layers)]}


def _kda(s: Shape) -> Keys:
    return {"ssm.conv_kernel": 4, "kda.head_dim": s.head_dim, "kda.gate_lower_bound": -5.0}


def _hyper_connections(s: Shape) -> Keys:
    return {
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 2,
        "hyper_connection.epsilon": 1e-6,
        "hyper_connection.low_rank": 8,
        "hyper_connection.magnitude": 2.0,
    }


# Parts of single architectures ----------------------------------------------------------------------------------------


def _deepseek4(s: Shape) -> Keys:
    return {
        **_hyper_connections(s),
        **_indexer(s),
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": 2 * s.head_dim,
        "rope.dimension_count": s.head_dim // 2,
        "attention.output_group_count": s.heads,
        "attention.output_lora_rank": 32,
        "attention.compress_ratios": [0 if i < 2 else (4 if i % 2 == 0 else 128) for i in range(s.layers)],
        "attention.compress_rope_freq_base": 160000.0,
        "hash_layer_count": 0,
        "swiglu_clamp_exp": 10.0,
        "expert_gating_func": GATING["sqrtsoftplus"],
    }


def _dots3note(s: Shape) -> Keys:
    mla = _mla(s)
    swa = {f"{key}_swa": value for key, value in mla.items() if key.endswith(("kv_lora_rank", "_length", "_mla"))}
    return {
        **mla,
        **swa,
        **_window_per_layer(s),
        **_indexer_in_even_layers(s),
    }


def _gemma4(s: Shape) -> Keys:
    return {
        **_window_per_layer(s),
        "embedding_length_per_layer_input": 0,
        "attention.key_length_swa": s.head_dim,
        "attention.value_length_swa": s.head_dim,
    }


def _glm5_next(s: Shape) -> Keys:
    return {
        **_hyper_connections(s),
        **_indexer(s),
        "attention.key_length": 4 * s.head_dim,
        "rope.dimension_count": 0,
        "attention.indexer.kpool": 4,
        "attention.indexer.kpool_select_tail": True,
    }


def _qwen4exp(s: Shape) -> Keys:
    return {
        **_hyper_connections(s),
        **_indexer(s),
        "attention.indexer.key_length": s.head_dim,
        "attention.compress_ratios": [4] * s.layers,
    }


def _kimi_k3(s: Shape) -> Keys:
    return {
        "expert_latent_length": s.d // 2,
        "attn_res.block_size": 12,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
    }


def _grovemoe(s: Shape) -> Keys:
    return {"expert_chunk_feed_forward_length": 32, "expert_group_scale": 0.05, "experts_per_group": 2}


def _nemotron_h(s: Shape) -> Keys:
    """Each layer is one of: state space, attention, experts."""
    kinds = [i % 3 for i in range(s.layers)]
    return {
        "attention.head_count_kv": [s.kv if kind == 1 else 0 for kind in kinds],
        "feed_forward_length": [s.ff if kind == 2 else 0 for kind in kinds],
    }


_SIGMOID = {"expert_gating_func": GATING["sigmoid"], "expert_weights_norm": True, "expert_weights_scale": 1.5}
_SOFTMAX = {"expert_gating_func": GATING["softmax"]}
_CLAMPED = {"swiglu_clamp_exp": 7.0}
_GRANITE = {"logit_scale": 1.0, "residual_scale": 1.0, "embedding_scale": 1.0, "attention.scale": 0.1}


# The architectures ----------------------------------------------------------------------------------------------------

_SHARED_SIGMOID = (_shared, _leading_dense, _SIGMOID)
_LATENT_LINEAR = (_mla, _kda, _recurrent_odd_layers_mla)

ARCHITECTURES: dict[str, Architecture] = {
    "afmoe": Architecture(*_SHARED_SIGMOID, _window),
    "arctic": Architecture(_ff_is_experts),
    "bailingmoe": Architecture(_shared, _leading_dense),
    "bailingmoe2": Architecture(*_SHARED_SIGMOID),
    "bailingmoe3": Architecture(*_SHARED_SIGMOID, *_LATENT_LINEAR),
    "cohere2moe": Architecture(*_SHARED_SIGMOID, _window, {"logit_scale": 1.0}, merged=True, scales=True),
    "dbrx": Architecture(_ff_is_experts, {"attention.clamp_kqv": 8.0}),
    "deepseek": Architecture(_shared, _leading_dense),
    "deepseek2": Architecture(_shared, _leading_dense, _mla, _SOFTMAX, merged=True),
    "deepseek2-ocr": Architecture(_shared, _leading_dense, _kv_in_every_head, _SOFTMAX, {"rope.freq_base": 1e4}),
    "deepseek32": Architecture(*_SHARED_SIGMOID, _mla, _indexer, scales=True),
    "deepseek4": Architecture(_shared, _SIGMOID, _window, _deepseek4),
    "dots1": Architecture(*_SHARED_SIGMOID, _kv_in_every_head),
    "dots3note": Architecture(*_SHARED_SIGMOID, _dots3note, scales=True),
    "ernie4_5-moe": Architecture(_shared, _leading_dense, {"interleave_moe_layer_step": 1}),
    "exaone-moe": Architecture(*_SHARED_SIGMOID, _window),
    "gemma4": Architecture(_gemma4, carries=r"ffn_(gate_inp|down_exps)\.scale|rope_freqs", merged=True),
    "glm-dsa": Architecture(*_SHARED_SIGMOID, _mla, _indexer, scales=True),
    "glm4moe": Architecture(*_SHARED_SIGMOID, carries=_QKV_BIASES),
    "glm5-next": Architecture(*_SHARED_SIGMOID, *_LATENT_LINEAR, _glm5_next),
    "gpt-oss": Architecture(_window, carries=r"\.bias", type="MXFP4"),
    "granite_swa": Architecture(_ff_is_experts, _GRANITE, _window_per_layer, merged=True),
    "granitehybrid": Architecture(_ff_is_experts, _GRANITE, _mamba, _recurrent_odd_layers),
    "granitemoe": Architecture(_ff_is_experts, _GRANITE),
    "grok": Architecture(_ff_is_experts, absent=r"ffn_(gate|up|down)\."),
    "grovemoe": Architecture(_grovemoe),
    "hunyuan-moe": Architecture(_shared),
    "hy_v3": Architecture(_shared, _SIGMOID, dense_or_experts=True, merged=True, scales=True),
    "hy_v4": Architecture(*_SHARED_SIGMOID, _mla, _hyper_connections, _indexer_in_even_layers, _CLAMPED),
    "jamba": Architecture(_ff_is_experts, _mamba, _recurrent_odd_layers, absent=r"ffn_(gate|up|down)\."),
    "kimi-k3": Architecture(*_SHARED_SIGMOID, *_LATENT_LINEAR, _kimi_k3),
    "kimi-linear": Architecture(*_SHARED_SIGMOID, *_LATENT_LINEAR),
    "laguna": Architecture(*_SHARED_SIGMOID, _window),
    "lfm2moe": Architecture(_leading_dense, _SIGMOID, _recurrent_odd_layers, {"shortconv.l_cache": 3}),
    "llama": Architecture(_ff_is_experts, scales=True),
    "llama4": Architecture({"interleave_moe_layer_step": 2}),
    "maple": Architecture(_window_per_layer, _CLAMPED),
    "mellum": Architecture(_window, scales=True),
    "mimo2": Architecture(_window_per_layer, dense_or_experts=True),
    "minimax-01": Architecture(_ff_is_experts, {"residual_scale": 1.0, "full_attention_interval": 2}),
    "minimax-m2": Architecture(_SIGMOID),
    "minimax-m3": Architecture(*_SHARED_SIGMOID, _indexer_blocks),
    "mistral3": Architecture(_ff_is_experts, scales=True),
    "mistral4": Architecture(_shared, _leading_dense, _mla, _SOFTMAX, merged=True),
    "nemotron_h_moe": Architecture(_shared, _SIGMOID, _mamba, _nemotron_h, scales=True),
    "olmoe": Architecture(_ff_is_experts, _kv_in_every_head),
    "phimoe": Architecture(_ff_is_experts, carries=r"\.bias"),
    "qwen2moe": Architecture(_shared, carries=_QKV_BIASES),
    "qwen35moe": Architecture(_shared, _delta_net, _mrope, merged=True, scales=True),
    "qwen3moe": Architecture(scales=True),
    "qwen3next": Architecture(_shared, _delta_net, absent=r"ssm_in\.weight", merged=True, scales=True),
    "qwen3vlmoe": Architecture(_mrope),
    "qwen4exp": Architecture(_shared, _delta_net, _mrope, _qwen4exp, merged=True, scales=True),
    "smallthinker": Architecture(_SIGMOID),
    "step35": Architecture(_shared, _SIGMOID, _window_per_layer, dense_or_experts=True),
}

UNSUPPORTED: dict[str, str] = {
    "dflash": "a draft model, which reads the hidden states of another model",
    "llada-moe": "a diffusion model: it has no memory, and llama_cpp.Llama cannot run it",
    "nomic-bert-moe": "an encoder: it has no logits",
    "rnd1": "a diffusion model: it has no memory, and llama_cpp.Llama cannot run it",
}


# Questions about them -------------------------------------------------------------------------------------------------


def named(arch: str) -> Architecture:
    """The entry of an architecture.

    Raises:
        ValueError: Not one of `ARCHITECTURES`; the message says why, or names those.
    """
    if arch in UNSUPPORTED:
        raise ValueError(f"no synthetic models of architecture {arch}: it is {UNSUPPORTED[arch]}")
    if arch not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {arch!r}; known: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[arch]


def check(arch: str, shape: Shape) -> None:
    """Raises ValueError for what can be seen to be wrong without asking llama.cpp."""
    architecture = named(arch)
    if not 0 < shape.topk <= shape.experts:
        raise ValueError(f"topk is {shape.topk} of {shape.experts} experts")
    if shape.groups > 1 and shape.experts % shape.groups:
        raise ValueError(f"{shape.experts} experts cannot be in {shape.groups} groups")
    if shape.merged_gate_up and not architecture.merged:
        raise ValueError(f"{arch} knows no merged gate_up tensor; those that do: {_those(lambda a: a.merged)}")
    if shape.expert_scales and not architecture.scales:
        raise ValueError(f"{arch} knows no scale per expert; those that do: {_those(lambda a: a.scales)}")


def _those(which: Callable[[Architecture], bool]) -> str:
    return ", ".join(name for name, architecture in ARCHITECTURES.items() if which(architecture))


def keys(arch: str, shape: Shape) -> dict[str, Any]:
    """All hyper-parameters of a model, without the prefix `<arch>.`."""
    result: dict[str, Any] = {
        "context_length": shape.context,
        "block_count": shape.layers,
        "embedding_length": shape.d,
        "feed_forward_length": shape.dense_ff or 2 * shape.d,
        "expert_feed_forward_length": shape.ff,
        "expert_count": shape.experts,
        "expert_used_count": shape.topk,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": 1e6,
    }
    for part in named(arch).parts:
        result.update(part(shape) if callable(part) else part)
    if shape.groups > 1:
        result.update({"expert_group_count": shape.groups, "expert_group_used_count": shape.groups // 2})
    if shape.gating:
        result["expert_gating_func"] = GATING[shape.gating]
    return result


def add_keys(writer: gguf.GGUFWriter, arch: str, shape: Shape) -> None:
    """Adds all hyper-parameters to a file."""
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in keys(arch, shape).items():
        adders[type(value)](f"{arch}.{key}", value)


def keeps(arch: str, shape: Shape, name: str) -> bool:
    """Whether a tensor that llama.cpp would accept is in the models of an architecture."""
    architecture = named(arch)
    if architecture.absent.search(name) or (shape.tied and name == "output.weight"):
        return False
    if architecture.dense_or_experts and name.startswith("blk."):
        is_dense = int(name.split(".")[1]) < shape.leading_dense
        if re.search(r"_exps|_shexp|ffn_gate_inp|exp_probs" if is_dense else r"ffn_(gate|up|down)\.", name):
            return False
    if shape.expert_scales and re.search(_EXPERT_SCALES, name):
        return True
    if name.endswith((".bias", ".scale", ".input_scale")) or name.startswith("rope_"):
        return bool(architecture.carries.search(name))
    return True


def smallest_ask(shape: Shape) -> Shape:
    """A shape of few, narrow experts and a short vocabulary, everything else the same."""
    unit = 2 * shape.groups
    return dataclasses.replace(shape, experts=unit * (shape.topk // unit + 2), ff=32, vocab=32)
