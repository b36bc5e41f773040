"""A trained demo model as PyTorch has it, and how far its files are from that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from . import agreement, checkpoint, export
from .config import ModelConfig
from .model import DemoModel


def load(file: Path) -> DemoModel:
    """The model of a checkpoint, its weights rounded to F16 as in all its files.

    Raises:
        CheckpointError: The file is damaged or not there.
    """
    state = checkpoint.load(file)
    model = DemoModel(ModelConfig(**state["plan"]["model"]))
    model.load_state_dict(state["model"])
    weights = {name: tensor.numpy() for name, tensor in model.export().items()}
    rounded = export.f16_values(model.config, weights)
    model.load_export({name: torch.from_numpy(array) for name, array in rounded.items()})
    return model


def agreements(model: DemoModel, files: dict[str, Path], windows: np.ndarray) -> dict[str, agreement.LogitComparison]:
    """How far stock llama.cpp is from PyTorch on each file. `model` holds the weights as the files have them."""

    def reference(tokens: list[int]) -> np.ndarray:
        return model.logits(torch.tensor([tokens]))[0].numpy()

    def experts(tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            _, _, routings = model.hidden(torch.tensor([tokens]), torch.float32)
        return np.stack([routing.experts.numpy() for routing in routings], axis=1)

    return {
        name: agreement.compare(file, reference, windows, alike=agreement.same_experts(file, experts, windows))
        for name, file in files.items()
    }


def zeros_by_layer(model: DemoModel, windows: np.ndarray) -> list[float]:
    """Share of the gate's outputs that are exactly zero behind the activation, per layer."""
    with torch.no_grad():
        _, reports, _ = model.hidden(torch.from_numpy(windows[:, :-1]), torch.float32)
    return [report.zeros.item() for report in reports]
