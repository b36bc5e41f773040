"""Logits of a prompt and some decoding, stock and streamed, for comparing bits."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

import moestream

PROMPT = [3, 17, 41, 5, 99, 17, 23, 64, 8, 120, 31, 77, 2, 54, 11, 90, 13, 47, 66, 19, 101, 7, 38]
DECODED = [12, 88, 45, 3, 70, 29]
CONTEXT: dict[str, Any] = {"n_ctx": 128, "n_batch": 64, "n_ubatch": 16, "n_threads": 1, "n_threads_batch": 1, "logits_all": True, "verbose": False}


def run(llm: llama_cpp.Llama) -> np.ndarray:
    """Logits [token, vocabulary] of the prompt (in two ubatches) and of tokens decoded one by one."""
    llm.eval(PROMPT)
    for token in DECODED:
        llm.eval([token])
    return llm.scores[: llm.n_tokens].copy()


@contextlib.contextmanager
def stock_kernels(interleaved: bool) -> Any:
    """llama_cpp.Llama has no keyword for repacking: its default parameters are changed meanwhile."""
    original = llama_cpp.llama_cpp.llama_model_default_params

    def defaults() -> Any:
        params = original()
        params.use_extra_bufts = interleaved
        return params

    llama_cpp.llama_cpp.llama_model_default_params = defaults
    try:
        yield
    finally:
        llama_cpp.llama_cpp.llama_model_default_params = original


def stock(path: Path, *, interleaved: bool, **options: Any) -> np.ndarray:
    with stock_kernels(interleaved), contextlib.closing(llama_cpp.Llama(str(path), **{**CONTEXT, **options})) as llm:
        return run(llm)


def streamed(path: Path, streaming: moestream.ExpertStreaming, **options: Any) -> tuple[np.ndarray, moestream.ExpertStats]:
    with contextlib.closing(moestream.Llama(str(path), expert_streaming=streaming, **{**CONTEXT, **options})) as llm:
        return run(llm), llm.expert_stats()
