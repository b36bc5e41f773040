"""What of a model decides how well it runs: from a GGUF's header, from a remote one's, or typed in."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..layout import ggml
from ..layout.gguf_file import GgufFile, Tensor, open_gguf, open_shards, padded
from ..model import ModelDescription, describe

__all__ = ["NEEDED", "PRESETS", "ModelShape", "shape_of", "typed_shape"]

_MOST_EXPERTS = 1_000_000  # of all layers; what has more is a typing error
_ALIGNMENT = 4096  # of direct reads
_CACHED_VALUE_BYTES = 2  # of a key or value: f16
_UBATCH = 512  # tokens computed at once
_OURS = re.compile(r"ffn_(gate|up|down|gate_up)_exps\.weight$|^moestream\.blk\.\d+\.experts$")
_UNTOUCHED = ("token_embd.weight", "per_layer_token_embd.weight")  # of which a token takes a row
_ROUTED_BEFORE_ATTENTION = ("smallthinker",)


@dataclass(frozen=True)
class ModelShape:
    """A model's sizes, in bytes unless said otherwise.

    Attributes:
        name: For people.
        origin: Where this is from, in words.
        architecture: As in the GGUF; "" if it is not known.
        layers, moe_layers: All, and those with experts.
        experts, top_k: Of a layer, and of these used for a token.
        top_k_of_all: The most that a token may use.
        expert_types: Of one expert, by type; the mean over layers.
        slot_bytes: Of one expert in memory, padding included; the mean.
        read_bytes, reads: Of one read, and how many bring an expert.
        laid: One read brings an expert.
        dense_types: Of dense weights that every token goes through, by type, without the output matrix.
        output_types: The same, of the output matrix.
        dense_bytes: All that is not experts.
        bytes_on_disk: Of all files.
        minimum_cache_bytes, maximum_cache_bytes: Of one token's experts, and of all.
        d_model: Length of the hidden state, in values.
        heads: Of attention.
        attention_widths: Heads times the length of one, in values, for each layer; 0 where it does not look back.
        kv_bytes: Of keys and values of one token, for each layer.
        vocabulary: Tokens.
        routed_before_attention: The experts of a layer are known before its attention.
        notes: What was assumed.
        fetched_bytes: Read from the network for this.
        path: Of its first file, if that is on this machine.
    """

    name: str
    origin: str
    architecture: str
    layers: int
    moe_layers: int
    experts: int
    top_k: int
    top_k_of_all: int
    expert_types: Mapping[str, float]
    slot_bytes: float
    read_bytes: float
    reads: int
    laid: bool
    dense_types: Mapping[str, int]
    output_types: Mapping[str, int]
    dense_bytes: int
    bytes_on_disk: int
    minimum_cache_bytes: int
    maximum_cache_bytes: int
    d_model: int
    heads: int
    attention_widths: tuple[int, ...]
    kv_bytes: tuple[int, ...]
    vocabulary: int
    routed_before_attention: bool
    notes: tuple[str, ...] = ()
    fetched_bytes: int = 0
    path: str | None = None

    @property
    def expert_bytes(self) -> float:
        """Of one expert's weights."""
        return sum(self.expert_types.values())

    @property
    def all_expert_bytes(self) -> float:
        return self.moe_layers * self.experts * self.expert_bytes

    # llama-cpp-python makes caches of layers with a window as large as those of others (`swa_full`), and what lies outside of
    # the window is computed and masked: so a window saves neither memory nor time.

    def kv_cache_bytes(self, context: int) -> int:
        """Of the keys and values of `context` tokens."""
        return sum(self.kv_bytes) * context

    def attention_values(self, context: int) -> int:
        """Heads times the length of one times the tokens gone through, after `context` of them, of all layers."""
        return sum(self.attention_widths) * context

    def buffer_bytes(self, context: int) -> int:
        """About what llama.cpp's compute buffers take: of a batch, in f32, the logits or the scores of one layer, a mask,
        and some states."""
        at_once = min(_UBATCH, context)
        return 4 * at_once * (max(self.vocabulary, self.heads * context) + context + 6 * self.d_model)

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return asdict(self) | {"expert_bytes": self.expert_bytes, "all_expert_bytes": self.all_expert_bytes}


# From a header


def shape_of(path: str | os.PathLike[str]) -> ModelShape:
    """The shape of a GGUF file, stock or laid; of a split one, its first shard is named. Only headers are read.

    Raises:
        ModelError: As `describe`: no such file, no sound GGUF, or a model without experts.
    """
    described = describe(path)
    model = open_shards(open_gguf(path))
    dense = [tensor for tensor in model.tensors if not _OURS.search(tensor.name)]
    output, layered = _split(dense)
    keys = _Keys(model.first, described.architecture)
    layers, first = described.moe_layers, described.moe_layers[0]
    counts = {layer.experts for layer in layers}
    total = sum(layer.experts for layer in layers)
    slot_bytes = described.maximum_cache_bytes / total
    slices = [matrix.slice_bytes for layer in layers for matrix in layer.matrices]
    notes = ()
    if len(counts) > 1:
        notes = (f"layers have from {min(counts)} to {max(counts)} experts; all are taken to have the mean",)
    return ModelShape(
        name=described.name or Path(path).stem,
        origin=f"header of {described.path.name}",
        architecture=described.architecture,
        layers=described.layers,
        moe_layers=len(layers),
        experts=round(total / len(layers)),
        top_k=described.experts_used,
        top_k_of_all=described.experts_choosable,
        expert_types=_mean_types(described, total),
        slot_bytes=slot_bytes,
        read_bytes=slot_bytes if described.laid else sum(slices) / len(slices),
        reads=1 if described.laid else len(first.matrices),
        laid=described.laid,
        dense_types=_by_type(layered),
        output_types=_by_type(output),
        dense_bytes=described.dense_bytes,
        bytes_on_disk=described.bytes_on_disk,
        minimum_cache_bytes=described.minimum_cache_bytes,
        maximum_cache_bytes=described.maximum_cache_bytes,
        d_model=keys.number("embedding_length", first.matrices[0].columns),
        heads=max(keys.numbers("attention.head_count", described.layers, 1)),
        attention_widths=keys.attention_widths(described.layers),
        kv_bytes=keys.kv_bytes(described.layers),
        vocabulary=_vocabulary(dense),
        routed_before_attention=described.architecture in _ROUTED_BEFORE_ATTENTION,
        notes=notes,
        path=os.fspath(path),
    )


def _split(dense: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The output matrix, and what else each token goes through."""
    output = [tensor for tensor in dense if tensor.name == "output.weight"]
    if not output:
        output = [tensor for tensor in dense if tensor.name == "token_embd.weight"]  # it serves as one
    apart = {tensor.name for tensor in output} | set(_UNTOUCHED)
    return output, [tensor for tensor in dense if tensor.name not in apart]


def _vocabulary(dense: list[Tensor]) -> int:
    return next((tensor.ne[1] for tensor in dense if tensor.name == "token_embd.weight"), 0)


def _by_type(tensors: list[Tensor]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[ggml.type_name(tensor.type)] += tensor.size_bytes
    return dict(sizes)


def _mean_types(described: ModelDescription, experts: int) -> dict[str, float]:
    return {name: size / experts for name, size in described.types.items()}


@dataclass(frozen=True)
class _Keys:
    """The numbers of a header by their names without the architecture's."""

    file: GgufFile
    architecture: str

    def number(self, name: str, default: int) -> int:
        return self.file.integer(f"{self.architecture}.{name}", default)

    def numbers(self, name: str, layers: int, default: int) -> list[int]:
        """One for each layer, of a key that has one or many."""
        key = self.file.key(f"{self.architecture}.{name}")
        if key is None or key.count is None:
            return [self.number(name, default)] * layers
        values = [int(value) for value in self.file.value(key)][:layers]
        return values + [default] * (layers - len(values))

    def heads(self, layers: int) -> list[int]:
        return self.numbers("attention.head_count", layers, 1)

    def kv_heads(self, layers: int) -> list[int]:
        return self.numbers("attention.head_count_kv", layers, max(self.heads(layers)))

    def length(self, name: str, layers: int) -> int:
        """Of a head's key or value."""
        return self.number(
            f"attention.{name}_length", self.number("embedding_length", 0) // max(1, *self.heads(layers))
        )

    def kv_bytes(self, layers: int) -> tuple[int, ...]:
        values = (
            0 if self.number("attention.kv_lora_rank", 0) else self.length("value", layers)
        )  # or a part of the keys
        return tuple(n * (self.length("key", layers) + values) * _CACHED_VALUE_BYTES for n in self.kv_heads(layers))

    def attention_widths(self, layers: int) -> tuple[int, ...]:
        both = zip(self.heads(layers), self.kv_heads(layers), strict=True)
        return tuple(heads * self.length("key", layers) if kv_heads else 0 for heads, kv_heads in both)


# Typed in

_QWEN3 = {"architecture": "qwen3moe", "vocab": 151936, "head_dim": 128}
_SMALLTHINKER = {**_QWEN3, "architecture": "smallthinker"}
PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        **_QWEN3, "layers": 48, "experts": 128, "top_k": 8, "d_model": 2048, "expert_ff": 768, "heads": 32, "kv_heads": 4
    },
    "smallthinker-4b": {
        **_SMALLTHINKER, "layers": 32, "experts": 32, "top_k": 4, "d_model": 1536, "expert_ff": 768, "heads": 12,
        "kv_heads": 2, "tied": True,
    },
    "smallthinker-21b": {
        **_SMALLTHINKER, "layers": 52, "experts": 64, "top_k": 6, "d_model": 2560, "expert_ff": 768, "heads": 28,
        "kv_heads": 4,
    },
    "mixtral-8x7b": {
        "architecture": "llama", "layers": 32, "experts": 8, "top_k": 2, "d_model": 4096, "expert_ff": 14336, "heads": 32,
        "kv_heads": 8, "head_dim": 128, "vocab": 32000,
    },
}  # fmt: skip
"""What `typed_shape` takes, for published models."""
NEEDED = ("layers", "experts", "top_k", "d_model", "expert_ff")
_ASSUMED = {"head_dim": 128, "vocab": 151936}


def typed_shape(
    *,
    layers: int,
    experts: int,
    top_k: int,
    d_model: int,
    expert_ff: int,
    type: str = "Q4_0",
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    vocab: int | None = None,
    dense_bytes: int | None = None,
    architecture: str = "",
    tied: bool = False,
    name: str = "a shape typed in",
) -> ModelShape:
    """The shape of a model that is not there: every layer has experts of three matrices, and attention with grouped queries.

    Args:
        layers, experts, top_k, d_model, expert_ff: Sizes as model cards give them.
        type: Quantisation of all matrices but routers.
        heads, kv_heads, head_dim, vocab: What is left out is assumed, and the notes say so.
        dense_bytes: All that is not experts, if it is known; else it follows from the sizes.
        architecture: Of the GGUF.
        tied: The embeddings serve as output matrix.

    Raises:
        OptionError: A size that is none, a type that ggml does not know or that does not fit the sizes.
    """
    sizes = {"layers": layers, "experts": experts, "top_k": top_k, "d_model": d_model, "expert_ff": expert_ff}
    heads_given = heads
    head_dim = head_dim if head_dim is not None else _ASSUMED["head_dim"]
    heads = heads if heads is not None else max(1, d_model // head_dim)
    kv_heads = kv_heads if kv_heads is not None else max(1, heads // 8)
    assumed = [f"{heads} heads of {head_dim}, {kv_heads} of keys and values"] if heads_given is None else []
    if vocab is None:
        vocab = _ASSUMED["vocab"]
        assumed.append(f"a vocabulary of {vocab:,}")
    sizes |= {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "vocab": vocab}
    for option, value in sizes.items():
        if value < 1:
            raise OptionError(f"{_flag(option)}={value}: give a number of at least 1")
    if layers * experts > _MOST_EXPERTS:
        raise OptionError(
            f"--layers={layers} of --experts={experts}: no model has {layers * experts:,} experts; give those of one layer"
        )
    if top_k > experts:
        raise OptionError(f"--top-k={top_k}: a token cannot use more than the {experts} experts of a layer")
    type = type.upper()
    known = ggml.type_named(type)
    if known is None:
        raise OptionError(f"--type={type}: no type of ggml; Q4_0, Q4_K, Q6_K, Q8_0, F16, ... are")
    row = {n: _row_bytes(known, n, option) for option, n in (("--d-model", d_model), ("--expert-ff", expert_ff))}
    attention = heads * head_dim
    expert = 2 * expert_ff * row[d_model] + d_model * row[expert_ff]
    of_attention = (attention + 2 * kv_heads * head_dim) * row[d_model] + d_model * _row_bytes(
        known, attention, "--heads"
    )
    router = 4 * experts * d_model
    matrix = vocab * row[d_model]
    if dense_bytes is None:
        dense_bytes = layers * (of_attention + router + 4 * 3 * d_model) + (1 if tied else 2) * matrix
    slot = padded(expert, _ALIGNMENT)
    return ModelShape(
        name=name,
        origin=f"sizes typed in, {type}"
        if name == "a shape typed in"
        else f"sizes of {name} as they ship with moestream, {type}",
        architecture=architecture,
        layers=layers,
        moe_layers=layers,
        experts=experts,
        top_k=top_k,
        top_k_of_all=experts,
        expert_types={type: float(expert)},
        slot_bytes=slot,
        read_bytes=expert / 3,
        reads=3,
        laid=False,
        dense_types={type: layers * of_attention, "F32": layers * router},
        output_types={type: matrix},
        dense_bytes=dense_bytes,
        bytes_on_disk=dense_bytes + layers * experts * expert,
        minimum_cache_bytes=layers * top_k * slot,
        maximum_cache_bytes=layers * experts * slot,
        d_model=d_model,
        heads=heads,
        attention_widths=(heads * head_dim,) * layers,
        kv_bytes=(2 * kv_heads * head_dim * _CACHED_VALUE_BYTES,) * layers,
        vocabulary=vocab,
        routed_before_attention=architecture in _ROUTED_BEFORE_ATTENTION,
        notes=(f"assumed: {'; '.join(assumed)}",) if assumed else (),
    )


def _row_bytes(type: int, values: int, option: str) -> int:
    known = ggml.traits(type)
    assert known is not None
    if values % known.block:
        raise OptionError(
            f"{option}={values}: rows of so many values cannot be {known.name}, whose blocks have {known.block}"
        )
    return known.row_bytes(values)


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
