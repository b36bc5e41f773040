"""Writes a trained demo model for others to read: as a Hugging Face folder, as F16 GGUF and as Q4_0 GGUF.

    to_hugging_face(config, state, "tokenizer.json", "demo-hf")
    to_gguf(config, state, "tokenizer.json", "demo-F16.gguf", name="Demo", description="...", license="MIT")
    quantize("demo-F16.gguf", "demo-Q4_0.gguf")

All hold the same numbers: every weight is rounded to F16 (`f16_values`), also norms and routers, whose type in a GGUF is F32.
Files and folder get their names when they are complete; an error leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import llama_cpp
import numpy as np
import safetensors.numpy

from . import tokenizer
from .config import ModelConfig
from .files import completed

__all__ = ["Tensor", "f16_values", "quantize", "tensors", "to_gguf", "to_hugging_face"]

State = Mapping[str, np.ndarray]
PathLike = str | os.PathLike[str]


# What a model consists of ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a model under its three names.

    Attributes:
        name: In the state.
        shape: In the state and, reversed, in a GGUF.
        gguf: In a GGUF.
        hugging_face: In a Hugging Face folder, where `{expert}` stands for one of the first dimension.
        in_f32: Whether llama.cpp wants it in F32.
    """

    name: str
    shape: tuple[int, ...]
    gguf: str
    hugging_face: str
    in_f32: bool = False


def tensors(config: ModelConfig) -> list[Tensor]:
    """The tensors of a model, in the order of a GGUF. Embeddings are tied: there is no output matrix."""
    c = config
    d, experts, ff = c.d_model, c.n_experts, c.d_expert
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    if c.kind == "smallthinker":
        moe, router, suffix = "block_sparse_moe", "primary_router", ""
    else:
        moe, router, suffix = "mlp", "gate", "_proj"

    result = [Tensor("embed.weight", (c.vocab_size, d), "token_embd.weight", "model.embed_tokens.weight")]
    for i in range(c.n_layers):

        def add(name: str, shape: tuple[int, ...], in_gguf: str, in_hf: str, in_f32: bool = False, i: int = i) -> None:
            result.append(
                Tensor(
                    f"layers.{i}.{name}", shape, f"blk.{i}.{in_gguf}.weight", f"model.layers.{i}.{in_hf}.weight", in_f32
                )
            )

        add("attention_norm.weight", (d,), "attn_norm", "input_layernorm", in_f32=True)
        add("q.weight", (q, d), "attn_q", "self_attn.q_proj")
        add("k.weight", (kv, d), "attn_k", "self_attn.k_proj")
        add("v.weight", (kv, d), "attn_v", "self_attn.v_proj")
        add("o.weight", (d, q), "attn_output", "self_attn.o_proj")
        if c.kind == "qwen3moe":
            add("q_norm.weight", (c.head_dim,), "attn_q_norm", "self_attn.q_norm", in_f32=True)
            add("k_norm.weight", (c.head_dim,), "attn_k_norm", "self_attn.k_norm", in_f32=True)
        add("ffn_norm.weight", (d,), "ffn_norm", "post_attention_layernorm", in_f32=True)
        add("router.weight", (experts, d), "ffn_gate_inp", f"{moe}.{router}", in_f32=True)
        add("gate", (experts, ff, d), "ffn_gate_exps", f"{moe}.experts.{{expert}}.gate{suffix}")
        add("up", (experts, ff, d), "ffn_up_exps", f"{moe}.experts.{{expert}}.up{suffix}")
        add("down", (experts, d, ff), "ffn_down_exps", f"{moe}.experts.{{expert}}.down{suffix}")
    result.append(Tensor("norm.weight", (d,), "output_norm.weight", "model.norm.weight", in_f32=True))
    return result


def f16_values(config: ModelConfig, state: State) -> dict[str, np.ndarray]:
    """The state in F32, each value rounded to F16: what the exported files hold, to compare with.

    Raises:
        ValueError: The state is not one of such a model, or F16 cannot hold a value of it.
    """
    return {name: array.astype(np.float32) for name, array in _f16(config, state).items()}


def _f16(config: ModelConfig, state: State) -> dict[str, np.ndarray]:
    wanted = {tensor.name: tensor.shape for tensor in tensors(config)}
    if wrong := sorted(wanted.keys() ^ state.keys()):
        raise ValueError(
            f"the state is not one of a {config.kind} model of {config.n_layers} layers: "
            + ", ".join(f"{name} is {'missing' if name in wanted else 'not of it'}" for name in wrong[:3])
            + (f", and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        )
    result = {}
    for name, shape in wanted.items():
        if state[name].shape != shape:
            raise ValueError(f"{name} has the shape {state[name].shape}, not {shape}")
        with np.errstate(over="ignore"):
            result[name] = np.ascontiguousarray(state[name], dtype=np.float16)
        if not np.isfinite(result[name]).all():
            raise ValueError(f"{name} has values that are no numbers or too large for F16")
    return result


# Hugging Face ---------------------------------------------------------------------------------------------------------


def to_hugging_face(config: ModelConfig, state: State, tokenizer_file: PathLike, folder: PathLike) -> pathlib.Path:
    """Writes `model.safetensors` in F16 with configuration and tokenizer, named as the published models name theirs.

    Returns:
        The folder, which must not exist before.

    Raises:
        ValueError: The state or the tokenizer is not one of such a model.
        OSError: The folder exists or cannot be written.
    """
    folder = pathlib.Path(folder)
    if folder.exists():
        raise FileExistsError(errno.EEXIST, "a model is written to a new folder only", str(folder))
    halves = _f16(config, state)
    words = _Vocabulary(config, tokenizer_file)

    named: dict[str, np.ndarray] = {}
    for tensor in tensors(config):
        array = halves[tensor.name]
        if "{expert}" in tensor.hugging_face:
            named.update({tensor.hugging_face.format(expert=e): array[e] for e in range(len(array))})
        else:
            named[tensor.hugging_face] = array

    special = {"bos_token": tokenizer.END, "eos_token": tokenizer.END, "pad_token": tokenizer.END}
    ids = {"bos_token_id": tokenizer.END_ID, "eos_token_id": tokenizer.END_ID, "pad_token_id": tokenizer.END_ID}
    documents = {
        "config.json": _config(config) | ids,
        "generation_config.json": ids,
        "special_tokens_map.json": special,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.context,
            "added_tokens_decoder": {
                str(tokenizer.END_ID): {key: value for key, value in words.end.items() if key != "id"}
            },
            **special,
        },
    }
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir()
        for name, document in documents.items():
            (part / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        shutil.copyfile(tokenizer_file, part / "tokenizer.json")
        # Not the library's own save_file: its error for a full disk is no OSError.
        (part / "model.safetensors").write_bytes(safetensors.numpy.save(named, metadata={"format": "pt"}))
        part.replace(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return folder


def _config(c: ModelConfig) -> dict[str, Any]:
    common = {
        "attention_dropout": 0.0,
        "dtype": "float16",
        "head_dim": c.head_dim,
        "hidden_size": c.d_model,
        "initializer_range": 0.02,
        "max_position_embeddings": c.context,
        "norm_topk_prob": True,
        "num_attention_heads": c.n_heads,
        "num_hidden_layers": c.n_layers,
        "num_key_value_heads": c.n_kv_heads,
        "output_router_logits": False,
        "rms_norm_eps": c.norm_eps,
        "rope_scaling": None,
        "rope_theta": c.rope_theta,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": c.vocab_size,
    }
    if c.kind == "smallthinker":
        return common | {
            "architectures": ["SmallThinkerForCausalLM"],
            "model_type": "smallthinker",
            "moe_ffn_hidden_size": c.d_expert,
            "moe_num_active_primary_experts": c.top_k,
            "moe_num_primary_experts": c.n_experts,
            "moe_primary_router_apply_softmax": False,
            "rope_layout": [1] * c.n_layers,
            "sliding_window_layout": [0] * c.n_layers,
            "sliding_window_size": c.context,
        }
    return common | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "intermediate_size": _feed_forward(c),
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": c.d_expert,
        "num_experts": c.n_experts,
        "num_experts_per_tok": c.top_k,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
    }


# GGUF -----------------------------------------------------------------------------------------------------------------


_FILE_TYPES = {"F16": gguf.LlamaFileType.MOSTLY_F16, "F32": gguf.LlamaFileType.ALL_F32}


def to_gguf(
    config: ModelConfig,
    state: State,
    tokenizer_file: PathLike,
    path: PathLike,
    *,
    name: str,
    description: str,
    license: str,
    type: str = "F16",
) -> pathlib.Path:
    """Writes an unquantised GGUF.

    Args:
        name, description: What the model calls itself.
        license: Its SPDX identifier.
        type: Of the matrices, "F16" or "F32". In F32 the numbers are the same, but llama.cpp then does not round what it
            multiplies them with to F16 either: the file to compare with another implementation.

    Raises:
        ValueError: No such type, or the state or the tokenizer is not one of such a model.
        OSError: The file cannot be written.
    """
    if type not in _FILE_TYPES:
        raise ValueError(f"no GGUF in {type!r} is written here; known: {', '.join(_FILE_TYPES)}")
    halves = _f16(config, state)
    words = _Vocabulary(config, tokenizer_file)
    with completed(pathlib.Path(path)) as part:
        writer = gguf.GGUFWriter(part, config.kind)
        try:
            writer.add_type(gguf.GGUFType.MODEL)
            writer.add_name(name)
            writer.add_description(description)
            writer.add_license(license)
            writer.add_file_type(_FILE_TYPES[type])
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            _add_hyper_parameters(writer, config)
            words.add_to(writer)
            for tensor in tensors(config):
                array = halves[tensor.name]
                in_f32 = tensor.in_f32 or type == "F32"
                writer.add_tensor(tensor.gguf, array.astype(np.float32) if in_f32 else array)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()
    return pathlib.Path(path)


def _add_hyper_parameters(writer: gguf.GGUFWriter, c: ModelConfig) -> None:
    writer.add_context_length(c.context)
    writer.add_embedding_length(c.d_model)
    writer.add_block_count(c.n_layers)
    writer.add_feed_forward_length(_feed_forward(c))
    writer.add_expert_feed_forward_length(c.d_expert)
    writer.add_expert_count(c.n_experts)
    writer.add_expert_used_count(c.top_k)
    # Without this key llama.cpp aborts on a smallthinker model; of qwen3moe it knows the answer.
    sigmoid, softmax = gguf.ExpertGatingFuncType.SIGMOID, gguf.ExpertGatingFuncType.SOFTMAX
    writer.add_expert_gating_func(sigmoid if c.kind == "smallthinker" else softmax)
    writer.add_head_count(c.n_heads)
    writer.add_head_count_kv(c.n_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    # No attention.sliding_window: with that key llama.cpp leaves rotation out of each fourth layer of a smallthinker model.
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_vocab_size(c.vocab_size)


def _feed_forward(c: ModelConfig) -> int:
    """The length of a dense layer, which the models do not have. SmallThinker's give that of an expert."""
    return c.d_expert if c.kind == "smallthinker" else c.d_expert * c.top_k


class _Vocabulary:
    """What a GGUF holds of a `tokenizer.json`."""

    def __init__(self, config: ModelConfig, file: PathLike) -> None:
        try:
            document = json.loads(pathlib.Path(file).read_text(encoding="utf-8"))
            ids: dict[str, int] = document["model"]["vocab"]
            merges: list[list[str]] = document["model"]["merges"]
            (self.end,) = document["added_tokens"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} is no tokenizer of a demo model: {error!r}") from error
        self._tokens = sorted(ids, key=ids.__getitem__)
        self._merges = [" ".join(pair) for pair in merges]
        if len(ids) != config.vocab_size:
            raise ValueError(f"{file} has {len(ids)} tokens, and the model {config.vocab_size}")
        if self._tokens[tokenizer.END_ID] != tokenizer.END:
            raise ValueError(f"token {tokenizer.END_ID} of {file} is not {tokenizer.END}")

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        types = [gguf.TokenType.NORMAL] * len(self._tokens)
        types[tokenizer.END_ID] = gguf.TokenType.CONTROL
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(tokenizer.PRE_TOKENIZER)
        writer.add_token_list(self._tokens)
        writer.add_token_types(types)
        writer.add_token_merges(self._merges)
        writer.add_bos_token_id(tokenizer.END_ID)
        writer.add_eos_token_id(tokenizer.END_ID)
        writer.add_pad_token_id(tokenizer.END_ID)
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(False)


# Quantising -----------------------------------------------------------------------------------------------------------


def quantize(
    path: PathLike, out: PathLike, *, type: str = "Q4_0", embeddings: str | None = None, threads: int = 1
) -> pathlib.Path:
    """Quantises a GGUF with ggml's own quantiser.

    Args:
        type: Of the matrices of attention and experts.
        embeddings: Type of the embedding matrix; None leaves it to llama.cpp, which takes Q6_K.

    Raises:
        ValueError: No such type.
        OSError: llama.cpp could not read `path` or write `out`; the message is its own.
    """
    try:
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{type}")
        params.nthread = threads
        if embeddings is not None:
            params.token_embedding_type = gguf.GGMLQuantizationType[embeddings]
    except (AttributeError, KeyError) as error:
        raise ValueError(f"no type to quantise to: {error}") from error

    with completed(pathlib.Path(out)) as part, _errors_of_llama_cpp() as said:
        failed = llama_cpp.llama_model_quantize(os.fsencode(path), os.fsencode(part), params)
        if failed:
            raise OSError(f"{path} could not be quantised to {out}: {'; '.join(said) or 'llama.cpp does not say why'}")
    return pathlib.Path(out)


@contextlib.contextmanager
def _errors_of_llama_cpp() -> Iterator[list[str]]:
    """Collects what llama.cpp logs as errors, and silences the rest."""
    said: list[str] = []
    callback, user_data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(callback), ctypes.byref(user_data))

    @llama_cpp.llama_log_callback
    def collect(level: int, line: bytes, _: ctypes.c_void_p) -> None:
        if level == _GGML_LOG_LEVEL_ERROR:
            said.append(line.decode("utf-8", "replace").strip())

    llama_cpp.llama_log_set(collect, ctypes.c_void_p())
    try:
        yield said
    finally:
        llama_cpp.llama_log_set(callback, user_data)


_GGML_LOG_LEVEL_ERROR = 4
