"""Which model a plan is for: a file, one on the Hub, a name, or sizes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .. import _hub
from ..errors import ModelError, OptionError
from .remote import remote_shape
from .shape import NEEDED, PRESETS, ModelShape, shape_of, typed_shape

__all__ = ["model_shape"]


def model_shape(
    model: str | os.PathLike[str] | None = None,
    *,
    hf_repo: str | None = None,
    hf_file: str | None = None,
    layers: int | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    d_model: int | None = None,
    expert_ff: int | None = None,
    type: str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    vocab: int | None = None,
    dense_bytes: int | None = None,
) -> ModelShape:
    """The shape of a model that is here, on the Hub, or nowhere yet.

    Args:
        model: A GGUF file, or the name of one of PRESETS.
        hf_repo: "user/repo" or "user/repo:quant" on the Hugging Face Hub: the bytes of its header are read.
        hf_file: The file in that repository.
        layers, experts, top_k, d_model, expert_ff: Sizes typed in; with the name of a preset, in place of its own.
        type, heads, kv_heads, head_dim, vocab, dense_bytes: As `typed_shape` has them.

    Raises:
        ModelError: The file or what is on the Hub is no sound model with experts, or is not there.
        OptionError: Nothing or too much is named, or sizes are missing.
    """
    sizes = {
        "layers": layers, "experts": experts, "top_k": top_k, "d_model": d_model, "expert_ff": expert_ff, "type": type,
        "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "vocab": vocab, "dense_bytes": dense_bytes,
    }  # fmt: skip
    given: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    if hf_file is not None and hf_repo is None:
        raise OptionError("--hf-file names a file in a repository: give that with -hf USER/REPO")
    if hf_repo is not None:
        if model is not None or given:
            raise OptionError("both -hf and another model or sizes are given: name the model once")
        return _on_the_hub(hf_repo, hf_file)
    if model is not None and Path(model).exists():
        if given:
            raise OptionError(
                f"--{next(iter(given)).replace('_', '-')}: {os.fspath(model)} has its own sizes; leave out one of the two"
            )
        return shape_of(model)
    if model is not None:
        name = os.fspath(model)
        if name not in PRESETS:
            raise ModelError(f"{name}: no such file, and none of the names that are known here: {', '.join(PRESETS)}")
        return typed_shape(**PRESETS[name] | given, name=name)
    if missing := [name for name in NEEDED if name not in given]:
        raise OptionError(
            f"which model? Give a GGUF file, -hf USER/REPO, one of {', '.join(PRESETS)}, or its sizes: "
            + ", ".join(f"--{name.replace('_', '-')}" for name in missing)
            + (" is missing" if len(missing) == 1 else " are missing")
        )
    return typed_shape(**given)


def _on_the_hub(hf_repo: str, hf_file: str | None) -> ModelShape:
    repo, _, quant = hf_repo.partition(":")
    try:
        chosen = _hub.choose_files(repo, _hub.list_files(repo), quant=quant or None, name=hf_file)
    except OptionError as error:
        raise OptionError(f"-hf {error}, with :QUANT if wanted") from error
    return remote_shape(repo, chosen)
