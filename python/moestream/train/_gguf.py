"""Tensors of a model file by name, as float32: routers, norms, and all weights of a student."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ..errors import ModelError
from ..layout import ggml
from ..sidecar import BaseModel

__all__ = ["GgufWeights"]

Floats = npt.NDArray[np.float32]


class GgufWeights:
    """The tensors of a model, all its shards; each is read when asked for. Of a laid file those outside of the experts.

    Raises:
        ModelError: It is no model with experts.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.model = BaseModel.open(path)
        self.path = self.model.path

    def __contains__(self, name: str) -> bool:
        return name in self.model.stored

    @property
    def names(self) -> Iterable[str]:
        return self.model.stored.keys()

    def __getitem__(self, name: str) -> Floats:
        """float32, in NumPy's order of dimensions (ggml's reversed).

        Raises:
            ModelError: The model does not have it.
        """
        if name not in self.model.stored:
            laid = (
                "; experts are read from the stock file: give that, or export this one"
                if name in self.model.tensors
                else ""
            )
            raise ModelError(f"{self.path}: has no tensor {name}{laid}")
        tensor = self.model.stored[name]
        values = ggml.dequantise(tensor.type, np.frombuffer(self.model.read(name), np.uint8))
        return np.array(values, np.float32).reshape(tuple(reversed(tensor.ne)))

    def router(self, layer: int) -> Floats:
        """[E, d]: the router of a layer."""
        return self[f"blk.{layer}.ffn_gate_inp.weight"]

    def selection_bias(self, layer: int) -> Floats | None:
        """[E]: what is added to a layer's scores where experts are chosen, but not where they are weighted."""
        name = f"blk.{layer}.exp_probs_b.bias"
        return self[name] if name in self else None

    def expert_norm(self, layer: int) -> Floats | None:
        """[d]: weights of the norm whose output the experts of a layer read, where its name says so."""
        for name in (f"blk.{layer}.ffn_norm.weight", f"blk.{layer}.post_attention_norm.weight"):
            if name in self:
                return self[name]
        return None
