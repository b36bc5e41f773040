"""What a GGUF holds: the dense part, and experts by layer. Read from the header alone."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._native import check, ffi, lib, text
from .errors import ModelError

__all__ = ["ExpertMatrix", "ModelDescription", "ModelFile", "MoeLayer", "describe"]


@dataclass(frozen=True)
class ModelFile:
    """One file of a model: all of it, or a shard."""

    path: Path
    size_bytes: int


@dataclass(frozen=True)
class ExpertMatrix:
    """One matrix of every expert of a layer: each expert's is ``columns`` x ``rows`` and ``slice_bytes`` long."""

    name: str
    type: str
    columns: int
    rows: int
    slice_bytes: int
    form: str = "plain"
    """How its rows are stored: "plain", "neuron-major", or the name of an interleaving such as "q4_0 8x8"."""


@dataclass(frozen=True)
class MoeLayer:
    """A layer with experts."""

    layer: int
    experts: int
    matrices: tuple[ExpertMatrix, ...]
    record_bytes: int | None = None
    """In a laid file the length of the one read that brings an expert, padding included."""

    @property
    def expert_bytes(self) -> int:
        """Size of one expert: all its matrices."""
        return sum(matrix.slice_bytes for matrix in self.matrices)


@dataclass(frozen=True)
class ModelDescription:
    """What a model holds. Sizes are in bytes."""

    path: Path
    files: tuple[ModelFile, ...]
    architecture: str
    name: str | None
    layers: int
    moe_layers: tuple[MoeLayer, ...]
    experts_used: int
    experts_choosable: int
    """The most that a token could take in each layer: all, or those in as many groups as it may use."""
    experts_used_by_layer: bool
    """Does the file give each layer a number of its own? ``experts_used`` is the largest then."""
    laid: bool
    """Is it a laid file, with one record per expert?"""
    dense_bytes: int
    expert_bytes: int
    bytes_on_disk: int
    minimum_cache_bytes: int
    """One token's experts: under this no cache is accepted."""
    maximum_cache_bytes: int
    """Every expert in memory, in slots of its own."""

    @property
    def types(self) -> dict[str, int]:
        """Bytes of experts by quantisation type."""
        sizes: Counter[str] = Counter()
        for layer in self.moe_layers:
            for matrix in layer.matrices:
                sizes[matrix.type] += matrix.slice_bytes * layer.experts
        return dict(sizes)


def describe(path: str | os.PathLike[str]) -> ModelDescription:
    """Describes the model at ``path`` (for a split model: its first shard).

    Raises:
        ModelError: no such file, not a GGUF, a truncated or damaged one (the
            tensor is named), a missing shard, or a model without experts.
    """
    out = ffi.new("ms_source **")
    check(lib.ms_source_open, os.fsencode(path), out, error=ModelError)
    try:
        lib.ms_source_use_direct(out[0], ffi.NULL, 0)  # slots for direct reads are a little larger
        return describe_source(out[0], Path(path))
    finally:
        lib.ms_source_close(out[0])


def describe_source(source: Any, path: Path) -> ModelDescription:
    """The description of an open ``ms_source``."""
    found = lib.ms_describe(source)
    size = ffi.new("uint64_t *")
    files = []
    for index in range(found.n_files):
        name = text(lib.ms_describe_file(source, index, size))
        files.append(ModelFile(Path(name), size[0]))
    layers = []
    for index in range(found.n_layers):
        layer = lib.ms_describe_layer(source, index)
        matrices = []
        for m in range(layer.n_matrices):
            matrix = lib.ms_describe_matrix(source, index, m)
            matrices.append(
                ExpertMatrix(
                    text(matrix.tensor_name),
                    text(matrix.type_name).upper(),
                    matrix.columns,
                    matrix.rows,
                    matrix.slice_bytes,
                    text(matrix.form),
                )
            )
        layers.append(MoeLayer(layer.block, layer.n_experts, tuple(matrices), layer.record_bytes or None))
    return ModelDescription(
        path=path,
        files=tuple(files),
        architecture=text(found.architecture),
        name=text(found.model_name) or None,
        layers=found.n_blocks,
        moe_layers=tuple(layers),
        experts_used=found.n_experts_used,
        experts_choosable=found.n_experts_choosable,
        experts_used_by_layer=found.experts_used_by_layer,
        laid=found.laid,
        dense_bytes=found.dense_bytes,
        expert_bytes=found.expert_bytes,
        bytes_on_disk=found.disk_bytes,
        minimum_cache_bytes=found.minimum_cache_bytes,
        maximum_cache_bytes=found.maximum_cache_bytes,
    )
