"""Tiny GGUF files with a property, for tests.

    path = make(folder, "qwen3moe", experts=300, expert_types={"down": "Q6_K"}, split=3)

A file is made once per folder and set of arguments: give all tests of a session the same folder, and do not write into what
`make` returns. Weights are random; equal seed and name give equal weights, however the tensors are laid out.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import random
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools"))

import gguf

from synthetic import architectures, writer
from synthetic.architectures import Shape
from synthetic.tensors import LlamaCppError, ggml_base
from synthetic.weights import Weights
from synthetic.writer import Tensor

__all__ = [
    "ARCHITECTURES",
    "EXPERT_SCALES",
    "MERGED_GATE_UP",
    "UNSUPPORTED",
    "LlamaCppError",
    "Shape",
    "ggml_base",
    "lora",
    "make",
]

ARCHITECTURES = tuple(architectures.ARCHITECTURES)
MERGED_GATE_UP = tuple(name for name, a in architectures.ARCHITECTURES.items() if a.merged)
EXPERT_SCALES = tuple(name for name, a in architectures.ARCHITECTURES.items() if a.scales)
UNSUPPORTED = architectures.UNSUPPORTED

Type = gguf.GGMLQuantizationType
MatrixOrLayer = str | tuple[int, str]


def make(
    folder: str | os.PathLike[str],
    arch: str = "qwen3moe",
    type: str | None = None,
    *,
    tokenizer: str = "bytes",
    expert_types: Mapping[MatrixOrLayer, str] | None = None,
    alignment: int = 32,
    order: str = "by layer",
    split: int = 1,
    truncate: int | str | None = None,
    big_endian: bool = False,
    seed: int = 0,
    zeros: float = 0.5,
    **shape: Any,
) -> pathlib.Path:
    """A model file of about 1 MB.

    Args:
        type: Of all matrices; None is the architecture's own, Q4_0 for most. For types in blocks of 256 (`Q4_K`, ...)
            the shape defaults to wider matrices.
        tokenizer: "bytes" takes any text, "none" only token ids.
        expert_types: Types of expert matrices, by matrix ("gate", "up", "down", "gate_up") or by (layer, matrix), which
            wins.
        alignment: Of the tensors in the file, a power of two.
        order: Of the tensors: "by layer", "reversed", or "shuffled".
        split: Number of shards, tensor i in shard i modulo `split`. The first is returned.
        truncate: What is missing at the end of the file (of the shard that has the last tensor): a number of bytes of
            that tensor, which is one of experts, or "expert" for one whole expert.
        big_endian: Numbers with their first byte highest; the type defaults to F16.
        zeros: Share of the gate's outputs that are at most zero.
        shape: Fields of `Shape`: experts=300, topk=4, shared=2, leading_dense=2, tied=True, merged_gate_up=True,
            expert_scales=True, gating="sigmoid", groups=4, ...

    Raises:
        ValueError: The architecture does not have the property.
    """
    type = type or ("F16" if big_endian else architectures.named(arch).type)
    names = [type, *(expert_types or {}).values()]
    if any(gguf.GGML_QUANT_SIZES[Type[name]][0] == 256 for name in names):
        shape = {"d": 256, "ff": 256, "heads": 8, **shape}
    sizes = Shape(**shape)

    arguments = (arch, type, tokenizer, expert_types, alignment, order, split, truncate, big_endian, seed, zeros, sizes)
    key = hashlib.sha256(repr(arguments).encode()).hexdigest()[:12]
    path = pathlib.Path(folder) / f"{arch}-{type}-{key}.gguf"
    first = path if split == 1 else writer.shard_path(path, 0, split)
    if first.exists():
        return first

    def wanted(name: str) -> Type:
        layer, matrix = _layer_and_matrix(name)
        types = expert_types or {}
        return Type[types.get((layer, matrix), types.get(matrix, type))]

    planned = _ordered(writer.plan(arch, sizes, wanted), order, seed)
    if truncate is not None:
        planned = _experts_last(planned)
    paths = writer.write(
        path,
        arch,
        sizes,
        planned,
        Weights(seed=seed, zeros=zeros),
        tokens=tokenizer,
        alignment=alignment,
        shards=split,
        big_endian=big_endian,
    )
    if truncate is not None:
        last = planned[-1]
        lost = last.size_bytes // last.ne[2] if truncate == "expert" else int(truncate)
        file = paths[(len(planned) - 1) % split]
        os.truncate(file, file.stat().st_size - (-last.size_bytes % alignment) - lost)
    return first


def lora(
    model: str | os.PathLike[str],
    targets: Sequence[str] = (r"attn_[qkv]\.weight", r"attn_output\.weight", r"ffn_(gate|up|down)_exps\.weight"),
    *,
    rank: int = 4,
    alpha: float = 1.0,
    seed: int = 0,
) -> pathlib.Path:
    """A LoRA adapter of a model made above, beside it: `a` and `b` for each matrix whose name matches one of `targets`.

    Those of experts have a third dimension, one pair per expert. The product is no smaller than the weights, so an
    adapter that is forgotten shows in the logits.

    Raises:
        ValueError: No tensor of the model matches.
    """
    model = pathlib.Path(model)
    arch, matrices = _matrices(model)
    chosen = [t for t in matrices if any(re.search(target, t.name) for target in targets)]
    if not chosen:
        raise ValueError(f"no matrix of {model} matches {', '.join(targets)}")

    key = hashlib.sha256(repr((targets, rank, alpha, seed)).encode()).hexdigest()[:12]
    path = model.with_name(f"{model.stem}-lora-{key}.gguf")
    if path.exists():
        return path

    pairs: list[Tensor] = []
    for tensor in chosen:
        inner, outer, *experts = tensor.ne
        pairs.append(Tensor(tensor.name + ".lora_a", (inner, rank, *experts), Type.F32))
        pairs.append(Tensor(tensor.name + ".lora_b", (rank, outer, *experts), Type.F32))

    part = path.with_suffix(".part")
    header = gguf.GGUFWriter(part, arch)
    header.add_type(gguf.GGUFType.ADAPTER)
    header.add_string(gguf.Keys.Adapter.TYPE, "lora")
    header.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    drawn = Weights(seed=seed)
    with writer.open_for_tensors(header, pairs) as out:
        for tensor in pairs:
            for chunk in drawn.chunks(tensor.name, tensor.ne, tensor.type):
                out.write(chunk)
            out.write(bytes(-tensor.size_bytes % header.data_alignment))
    os.replace(part, path)
    return path


def _layer_and_matrix(name: str) -> tuple[int, str]:
    """(1, "down") of "blk.1.ffn_down_exps.weight"; (-1, "") of what is no matrix of experts."""
    found = re.fullmatch(r"blk\.(\d+)\.ffn_(\w+)_exps\.weight", name)
    return (int(found[1]), found[2]) if found else (-1, "")


def _ordered(planned: list[Tensor], order: str, seed: int) -> list[Tensor]:
    if order == "by layer":
        return planned
    if order == "reversed":
        return planned[::-1]
    if order == "shuffled":
        return random.Random(seed).sample(planned, len(planned))
    raise ValueError(f"unknown order {order!r}; known: by layer, reversed, shuffled")


def _experts_last(planned: list[Tensor]) -> list[Tensor]:
    last = next(t for t in reversed(planned) if _layer_and_matrix(t.name)[1])
    return [t for t in planned if t is not last] + [last]


def _matrices(model: pathlib.Path) -> tuple[str, list[Tensor]]:
    """The architecture of a model, and its matrices, of all its shards."""
    shards = [model]
    if found := re.fullmatch(r"(.*)-00001-of-(\d{5})", model.stem):
        shards = [
            writer.shard_path(model.with_name(found[1] + ".gguf"), i, int(found[2])) for i in range(int(found[2]))
        ]
    readers = [gguf.GGUFReader(shard) for shard in shards]
    arch = readers[0].fields["general.architecture"].contents()
    tensors = [Tensor(t.name, tuple(map(int, t.shape)), t.tensor_type) for reader in readers for t in reader.tensors]
    return arch, [t for t in tensors if len(t.ne) >= 2]
