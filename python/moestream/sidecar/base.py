"""The model that a sidecar is for: its hash, and whether what is in a sidecar fits a model."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError, SidecarError
from ..layout.convert import RELU_ARCHITECTURES
from ..layout.format import is_laid
from ..layout.gguf_file import GgufFile, Model, Tensor, open_gguf, open_shards
from ..layout.source import open_source
from .format import Base, Heads, Lora, Sidecar
from .unapplied import unapplied

__all__ = ["BaseModel", "base_hash", "check_base", "require_fit", "sidecar_for"]

_SHAPING = (
    "block_count",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "attention.head_count",
    "attention.head_count_kv",
)
_ROUTER = re.compile(r"blk\.(\d+)\.ffn_gate_inp\.weight")
_DOWN = re.compile(r"blk\.\d+\.ffn_down_exps\.weight")
_HASHED = re.compile(_ROUTER.pattern + r"|output_norm\.weight")
_NO_TYPE = -1


@dataclass(frozen=True)
class BaseModel:
    """A model as a sidecar sees it, stock or laid, whole or in shards.

    Attributes:
        path: Its first file.
        name: `general.name`, or that of its source's file.
        architecture: Of the stock model.
        numbers: Keys of its architecture that are numbers or lists of them, without its name.
        tensors: Dimensions and types of all tensors of the stock model, by name. The type is -1 where a laid file does not
            tell it, see :func:`base_hash`.
    """

    path: Path
    name: str
    architecture: str
    numbers: Mapping[str, int | float | list[int | float]] = field(repr=False)
    tensors: Mapping[str, tuple[tuple[int, ...], int]] = field(repr=False)
    model: Model = field(repr=False)
    stored: Mapping[str, Tensor] = field(repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> BaseModel:
        """Reads the headers.

        Raises:
            ModelError: It is no GGUF, a damaged one, or a model without experts.
        """
        first = open_gguf(path)
        if is_laid(first):
            source = open_source(Path(path))
            model, architecture, name = source.model, source.architecture, Path(source.name).stem
            stored = dict(source.dense)
            tensors = {tensor.name: (tensor.ne, tensor.type) for tensor in source.dense.values()}
            tensors |= {tensor.name: (tensor.ne, tensor.type) for tensor in source.experts.values()}
        else:
            model = open_shards(first)
            architecture, name = first.architecture, Path(path).stem
            stored = {tensor.name: tensor for tensor in model.tensors}
            tensors = {tensor.name: (tensor.ne, tensor.type) for tensor in model.tensors}
        if architecture in RELU_ARCHITECTURES:
            tensors |= {each: (ne, _NO_TYPE) for each, (ne, _) in tensors.items() if _DOWN.fullmatch(each)}
        if not any(map(_ROUTER.fullmatch, stored)):
            raise ModelError(f"{path}: has no routers, so it is no Mixture-of-Experts model; give one that is")
        general = model.first.key("general.name")
        if general is not None and general.type_name == "string":
            name = model.first.value(general)
        return cls(Path(path), name, architecture, dict(_numbers(model.first, architecture)), tensors, model, stored)

    def number(self, name: str, layer: int = 0) -> int:
        """A number of the architecture, in a layer if layers have their own; 0 if there is none."""
        value = self.numbers.get(name, 0)
        return int(value[layer] if isinstance(value, list) else value)

    @property
    def base(self) -> Base:
        """What a sidecar for this model says of it."""
        return Base(self.hash(), self.name, self.architecture)

    def hash(self) -> str:
        """See :func:`base_hash`."""
        shape = {name: self.numbers[name] for name in _SHAPING if name in self.numbers}
        tensors = [[name, list(ne), type] for name, (ne, type) in sorted(self.tensors.items())]
        digest = hashlib.sha256(json.dumps([self.architecture, shape, tensors]).encode("utf-8", "surrogateescape"))
        for name in sorted(filter(_HASHED.fullmatch, self.stored)):
            digest.update(self.read(name))
        return digest.hexdigest()

    def read(self, name: str) -> bytes:
        """The bytes of a tensor outside of the experts.

        Raises:
            ModelError: They cannot be read.
        """
        tensor = self.stored[name]
        path = self.model.files[tensor.file].path
        try:
            with open(path, "rb", buffering=0) as file:
                found = os.pread(file.fileno(), tensor.size_bytes, tensor.offset)
                while found and len(found) < tensor.size_bytes:
                    more = os.pread(file.fileno(), tensor.size_bytes - len(found), tensor.offset + len(found))
                    if not more:
                        break
                    found += more
        except OSError as exc:
            raise ModelError(f"{path}: {name} cannot be read: {exc.strerror}; check the disk") from exc
        if len(found) < tensor.size_bytes:
            raise ModelError(f"{path}: ends within {name}; download it again")
        return found


def _numbers(first: GgufFile, architecture: str) -> Iterator[tuple[str, Any]]:
    for key in first.keys:
        if key.name.startswith(f"{architecture}.") and "string" not in key.type_name:
            value = first.value(key)
            yield key.name.removeprefix(f"{architecture}."), value.tolist() if isinstance(value, np.ndarray) else value


def base_hash(path: str | os.PathLike[str]) -> str:
    """What tells one model from another, as 64 hexadecimal digits: docs/sidecar.md says of what it is made.

    It stays what it is when the model is laid, exported or split; it differs for another quantisation and for other
    weights. Neuron-major down matrices are of a type of their own, so for architectures that may have these the type of
    the down matrices does not count.

    Raises:
        ModelError: The model cannot be read, or has no experts.
    """
    return BaseModel.open(path).hash()


def check_base(sidecar: Sidecar, model: BaseModel, *, force: bool = False) -> None:
    """Raises SidecarError unless a sidecar is for a model, or is to be used with it all the same and fits.

    Args:
        force: Let the hashes differ. Architecture and shapes must be right even so.
    """
    file = sidecar.path or "the sidecar"
    wanted, found = sidecar.base, model.hash()
    if wanted.architecture != model.architecture:
        raise SidecarError(
            f"{file}: is for a model of the architecture {wanted.architecture} ({wanted.name}), but {model.path} is "
            f"{model.architecture}; give the model that it was made for"
        )
    if wanted.hash != found and not force:
        raise SidecarError(
            f"{file}: is for {wanted.name} (base hash {wanted.hash[:12]}...), but {model.path} is {model.name} "
            f"({found[:12]}...): other weights or another quantisation, for which it was not trained; give that model, or "
            "force=True (--force) to use it all the same"
        )
    require_fit(file, sidecar.heads, sidecar.lora, model)


def require_fit(file: str | os.PathLike[str], heads: Heads | None, lora: Lora | None, model: BaseModel) -> None:
    """Raises SidecarError unless heads and a LoRA have the shapes that a model asks for.

    Args:
        file: Where they are from, for the message.
    """
    if heads is not None:
        _require_heads(file, heads, model)
    if lora is not None:
        _require_lora(file, lora, model)


def _require_heads(file: str | os.PathLike[str], heads: Heads, model: BaseModel) -> None:
    columns = model.number("embedding_length")
    if heads.columns != columns:
        raise SidecarError(
            f"{file}: heads read {heads.columns} columns, but the embedding length of {model.path} is {columns}; "
            "give the heads of this model"
        )
    routers = {int(found[1]): model.stored[name] for name in model.stored if (found := _ROUTER.fullmatch(name))}
    for owner in heads.owners:
        for layer, what in ((owner, "owns a head"), (owner + 1, f"is what the head of layer {owner} predicts")):
            if layer not in routers:
                raise SidecarError(
                    f"{file}: layer {layer} {what}, but {model.path} has no experts in it: those are in layers "
                    f"{min(routers)} to {max(routers)}"
                )
            if routers[layer].ne[-1] != heads.experts:
                raise SidecarError(
                    f"{file}: heads are for {heads.experts} experts, but layer {layer} of {model.path} has "
                    f"{routers[layer].ne[-1]}; give the heads of this model"
                )


def _require_lora(file: str | os.PathLike[str], lora: Lora, model: BaseModel) -> None:
    for name, pair in lora.pairs.items():
        if name not in model.tensors:
            raise SidecarError(
                f"{file}: has a LoRA of {name}, which {model.path} has not; give the model that it is for"
            )
        ne, _ = model.tensors[name]
        a, b = pair.a.ne, pair.b.ne
        made = (b[1], a[1]) if name == "token_embd.weight" else (a[0], b[1], *a[2:])
        if made != ne:
            raise SidecarError(
                f"{file}: the LoRA of {name} is for a matrix of {' x '.join(map(str, made))}, but that of {model.path} is "
                f"{' x '.join(map(str, ne))}; give the model that it is for"
            )
    if ignored := unapplied(model.architecture, lora.pairs):
        raise SidecarError(
            f"{file}: has a LoRA of {ignored[0]}, which llama.cpp does not apply in models of the architecture "
            f"{model.architecture}; train one without it"
        )


def sidecar_for(model_path: str | os.PathLike[str], path: str | os.PathLike[str], *, force: bool = False) -> Sidecar:
    """The sidecar at `path`, which is for the model at `model_path`.

    Raises:
        SidecarError: It is none, a damaged one, or for another model.
        ModelError: The model cannot be read.
    """
    sidecar = Sidecar.read(path)
    check_base(sidecar, BaseModel.open(model_path), force=force)
    return sidecar
