"""The figures of converting Hugging Face models: that llama.cpp computes from the GGUF what transformers does from the folder.

For each family that `moestream.layout.huggingface` names as tested, a tiny model with random weights is saved, converted to F32 and to
F16, and its logits compared with those of transformers (SmallThinker, which that does not have: with the formulas in NumPy). All
have the same weights, rounded to F16. An F16 file rounds also the *inputs* of its products, and where two experts are as good as
equal, that may choose the other. So that this stays rare, what a layer adds is small beside the embedding, which is exact.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np

from demo_model import agreement, export, tokenizer
from demo_model.config import ModelConfig
from moestream.layout.huggingface import to_gguf

from .figure import Figure, MeasurementError, note

__all__ = ["FIGURES", "Bench", "open_bench", "save_random"]

VOCABULARY = 512
CONTEXT = 128
_ADDS_TO_RESIDUAL = re.compile(r"\b(o|o_proj|down|down_proj|output_linear)(\.weight)?$")
_ADDED = 0.25
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": tokenizer.END_ID,
    "eos_token_id": tokenizer.END_ID,
    "pad_token_id": tokenizer.END_ID,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}

OPTIONS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": _EXPERTS | {"head_dim": 32, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "Qwen2Moe": _EXPERTS | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
    # llama.cpp has the norm of the keys as wide as that of the queries, as the published models are.
    "Olmoe": _EXPERTS | {"num_key_value_heads": 4},
    "Mixtral": _LOCAL_EXPERTS,
    # Multipliers as far from 1 as those of the published models.
    "GraniteMoe": _LOCAL_EXPERTS
    | {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0156,
        "logits_scaling": 6.0,
    },
    # A window that the text is longer than, in one of the two layers. The positions are scaled as published, 32 times 4096;
    # llama.cpp rounds where that begins and ends to whole dimensions, which is all of the difference that is left with F32.
    "GptOss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 32,
        "sliding_window": 32,
        "max_position_embeddings": 131072,
    },
}
"""What sets the families of transformers apart, by the beginnings of their classes' names."""


@dataclass(frozen=True)
class Bench:
    folder: Path
    windows: int

    @cached_property
    def words(self) -> Path:
        """A tokenizer.json, learnt from Python's manual."""
        texts = [{"text": text} for text in list(topics.topics.values())[:20]]
        lines = "".join(json.dumps(text) + "\n" for text in texts)
        (self.folder / "train.jsonl").write_text(lines, encoding="utf-8")
        tokenizer.train(self.folder, self.folder / "tokenizer.json", vocabulary=VOCABULARY)
        return self.folder / "tokenizer.json"

    @cached_property
    def tokens(self) -> np.ndarray:
        """[window, token], at random."""
        return np.random.default_rng(1).integers(1, VOCABULARY, (self.windows, CONTEXT))


@contextlib.contextmanager
def open_bench(model: Path | None, quick: bool, keep: bool) -> Iterator[Bench]:
    folder = Path(tempfile.mkdtemp(prefix="moestream-families-"))
    try:
        yield Bench(folder, windows=1 if quick else 2)
    finally:
        if keep:
            note(f"kept {folder}")
        else:
            shutil.rmtree(folder)


Reference = Callable[[list[int]], np.ndarray]


def save_random(family: str, words: Path, folder: Path) -> Reference:
    """Writes a model of a family of transformers to a folder, and gives its logits [token, vocabulary] of tokens.

    Raises:
        MeasurementError: There is no transformers or torch.
    """
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise MeasurementError(f"needs {error.name}: pip install '.[hf]', and run this with that python") from error

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**_SHAPE | OPTIONS[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "embed_tokens" in name:
                weights.normal_(0, 1 / getattr(config, "embedding_multiplier", 1.0))
            elif weights.ndim > 1:
                gain = _ADDED / getattr(config, "residual_multiplier", 1.0) if _ADDS_TO_RESIDUAL.search(name) else 1.0
                weights.normal_(0, gain * weights.shape[-1] ** -0.5)
            else:
                weights.normal_(1 if "norm" in name else 0, 0.1)
            weights.copy_(weights.half())
    # A copy, for half() also rounds what is no weight: the frequencies of the positions.
    copy.deepcopy(model).half().save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(words), bos_token=tokenizer.END, eos_token=tokenizer.END, pad_token=tokenizer.END
    ).save_pretrained(folder)

    def logits(tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].numpy()

    return logits


def _save_small_thinker(words: Path, folder: Path) -> Reference:
    config = ModelConfig(
        "smallthinker",
        vocab_size=VOCABULARY,
        n_layers=2,
        d_model=128,
        head_dim=32,
        n_experts=8,
        top_k=2,
        context=CONTEXT,
    )
    numbers = np.random.default_rng(0)
    state = {}
    for tensor in export.tensors(config):
        gain = _ADDED if _ADDS_TO_RESIDUAL.search(tensor.name) else 1.0
        values = numbers.standard_normal(tensor.shape) * gain * tensor.shape[-1] ** -0.5
        state[tensor.name] = (1 + 0.1 * values if "norm" in tensor.name else values).astype(np.float32)
    export.to_hugging_face(config, state, words, folder)
    return functools.partial(agreement.reference_logits, config, export.f16_values(config, state))


def family(bench: Bench, name: str) -> Iterator[Figure]:
    """How far the logits of the converted files are from the model's own."""
    folder = bench.folder / name
    if name == "SmallThinker":
        reference = _save_small_thinker(bench.words, folder)
    else:
        reference = save_random(name, bench.words, folder)
    for dtype in ("f32", "f16"):
        file = bench.folder / f"{name}-{dtype}.gguf"
        to_gguf(folder, file, dtype=dtype)
        found = agreement.compare(file, reference, bench.tokens, context=CONTEXT, threads=1)
        yield Figure(f"logits_apart_{dtype}[{name}]", found.max_difference, below=0.01)
        yield Figure(f"same_top1_{dtype}[{name}]", found.top1_agreement, at_least=1.0)


FIGURES: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    name: functools.partial(family, name=name) for name in ("SmallThinker", *OPTIONS)
}
