"""What is to be said about a demo model, measured on its files: with stock llama.cpp and through our own engine, without PyTorch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np

import moestream

from . import agreement

PERPLEXITY_WINDOWS = 96
AGREEMENT_TOKENS = 2048
TRACE_TOKENS = 24_000
SAMPLES = 10
SAMPLE_TOKENS = 160
PROMPTS = (
    "The old house stood at the end of the lane, and",
    "She had not expected to see him again, but",
    "And it came to pass in those days, that",
    "The captain looked at the stars and said,",
    "Before the system is started, it is important to",
)


def spread(windows: np.ndarray, count: int) -> np.ndarray:
    """`count` windows, evenly over all of them."""
    return windows[np.linspace(0, len(windows) - 1, min(count, len(windows))).astype(int)]


def perplexities(files: dict[str, Path], windows: np.ndarray) -> dict[str, float]:
    """Of each file, by stock llama.cpp."""
    return {name: agreement.perplexity(file, windows) for name, file in files.items()}


def trace(file: Path, documents: Sequence[np.ndarray], source: str) -> moestream.RoutingTrace:
    """The routing of a file's model on documents, recorded through our engine; each document begins with the end token."""
    with contextlib.closing(moestream.Llama(os.fspath(file), expert_streaming=True, n_ctx=512, verbose=False)) as llm:
        start = [llm.token_bos()]
        return moestream.record_routing(llm, [start + document.tolist() for document in documents], source=source)


def some_documents(tokens: np.ndarray, starts: np.ndarray, most: int) -> list[np.ndarray]:
    """Whole documents from all over the stream, `most` tokens together at most; their end tokens are left out."""
    chosen: list[np.ndarray] = []
    room = most
    for i in np.argsort(np.arange(len(starts) - 1) * 0.6180339887 % 1.0, kind="stable"):
        document = tokens[starts[i] : starts[i + 1] - 1]
        if len(document) <= room:
            chosen.append(document)
            room -= len(document)
    return chosen


def samples(file: Path) -> list[tuple[str, str]]:
    """(prompt, continuation), the seeds counted from 1: none is chosen, none left out."""
    with contextlib.closing(llama_cpp.Llama(os.fspath(file), n_ctx=512, verbose=False)) as llm:
        found = []
        for seed in range(1, SAMPLES + 1):
            prompt = PROMPTS[(seed - 1) % len(PROMPTS)]
            made = llm(prompt, max_tokens=SAMPLE_TOKENS, temperature=0.7, top_p=0.95, repeat_penalty=1.1, seed=seed)
            found.append((prompt, made["choices"][0]["text"]))
        return found
