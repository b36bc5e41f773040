"""Do two implementations of a model say the same, and how well does one predict text?

    state = f16_values(config, state)
    reference = lambda tokens: reference_logits(config, state, tokens)
    compare("demo-F32.gguf", reference, windows)
    compare("demo-F16.gguf", reference, windows, alike=same_experts("demo-F16.gguf", reference_experts, windows))
    perplexity("demo-Q4_0.gguf", windows)

A window is a sequence of tokens, at most as long as the model's context, and is evaluated from an empty cache.

An F32 file with a cache in F32 differs from another implementation by the order of summation only, 1e-4 at most: that is where to
look whether two of them compute the same. An F16 file differs more, for a product with an F16 matrix rounds its *input* to F16 too: by
some thousandths; and by tenths at a token whose last expert chosen and first not chosen are as good as equal, where either may pick
the other, and a little at those that look back at it. A cache in F16 does the same to keys and values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gguf
import llama_cpp
import numpy as np

import moestream
from moestream._quality import log_softmax

from .config import ModelConfig

__all__ = ["LogitComparison", "compare", "logits", "opened", "perplexity", "reference_logits", "same_experts"]

Window = Sequence[int] | np.ndarray
Model = str | os.PathLike[str] | llama_cpp.Llama


@dataclasses.dataclass(frozen=True)
class LogitComparison:
    """How far llama.cpp is from a reference.

    Attributes:
        positions: Tokens after which all logits were compared.
        max_difference: Largest difference of two logits, in nats.
        max_difference_99: What the largest difference of a position is below, at 99 of 100 positions.
        rms_difference: Root of the mean square of all differences.
        top1_agreement: Share of positions with the same likeliest token.
        close_calls: Positions where that token differs, yet the reference has less than `max_difference` between the two.
        alike: Positions up to which, in their window, both took the same experts in all layers, as far as `compare` was told.
        max_difference_alike: Largest difference at those.
    """

    positions: int
    max_difference: float
    max_difference_99: float
    rms_difference: float
    top1_agreement: float
    close_calls: int
    alike: int
    max_difference_alike: float


# llama.cpp ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(
    model: Model,
    *,
    context: int = 512,
    cache: str = "F32",
    flash_attention: bool = False,
    threads: int = 2,
) -> Iterator[llama_cpp.Llama]:
    """A model with the logits of all tokens, in stock llama.cpp and as exact as it can be.

    Args:
        model: A file; or a model already open with `logits_all=True`, which is passed through as it is, so that the other
            arguments do not count, and left open.
        cache: Type of keys and values. F16, llama.cpp's default, rounds them.
        flash_attention: Rounds queries, keys and values to F16, whatever the cache.

    Raises:
        ValueError: The file is no model, the open model has no logits but the last, or there is no such type.
    """
    if isinstance(model, llama_cpp.Llama):
        if not model._logits_all:
            raise ValueError("the model was opened without logits_all=True: it keeps only the last token's logits")
        yield model
        return
    exact = _exact(context, cache, threads, flash_attention)
    with contextlib.closing(llama_cpp.Llama(os.fspath(model), logits_all=True, **exact)) as llm:
        yield llm


def _exact(context: int, cache: str, threads: int, flash_attention: bool = False) -> dict[str, Any]:
    """Options of a model, stock's or ours, for windows of up to `context` tokens in one batch."""
    kind = _cache_type(cache)
    return {
        "n_ctx": context,
        "n_batch": context,
        "n_ubatch": context,
        "n_threads": threads,
        "n_threads_batch": threads,
        "type_k": kind,
        "type_v": kind,
        "flash_attn": flash_attention,
        "verbose": False,
    }


def _cache_type(name: str) -> int:
    if name not in gguf.GGMLQuantizationType.__members__:
        raise ValueError(f"no type {name!r} for keys and values")
    return int(gguf.GGMLQuantizationType[name])


def _tokens(window: Window) -> list[int]:
    return np.asarray(window, dtype=np.int64).tolist()


def logits(llm: llama_cpp.Llama, window: Window) -> np.ndarray:
    """[token, vocabulary] of a window. The array is the model's own: it is overwritten by the next call.

    Raises:
        ValueError: The window is longer than the context.
    """
    tokens = _tokens(window)
    if len(tokens) > len(llm.scores):
        raise ValueError(f"a window of {len(tokens)} tokens, and the context has {len(llm.scores)}")
    llm.reset()
    llm.eval(tokens)
    return llm.scores[: len(tokens)]


def compare(
    model: Model,
    reference: Callable[[list[int]], np.ndarray],
    windows: Sequence[Window],
    *,
    alike: Sequence[np.ndarray] | None = None,
    **options: Any,
) -> LogitComparison:
    """Compares the logits of all tokens of all windows.

    Args:
        reference: Logits [token, vocabulary] of a list of tokens.
        alike: For each window, whether both take the same experts at each token: what `same_experts` gives. None says so
            of all tokens.
        options: Those of `opened`.

    Raises:
        ValueError: No windows, or one that is too long; and what `opened` raises.
    """
    if not len(windows):
        raise ValueError("no windows to compare")
    largest: list[np.ndarray] = []
    margins: list[float] = []
    squares, values, same = 0.0, 0, 0
    with opened(model, **options) as llm:
        for window in windows:
            theirs = logits(llm, window)
            ours = reference(_tokens(window))
            difference = np.abs(theirs - ours)
            largest.append(difference.max(axis=1))
            squares += float(np.square(difference, dtype=np.float64).sum())
            values += difference.size
            chosen, wanted = theirs.argmax(axis=1), ours.argmax(axis=1)
            same += int((chosen == wanted).sum())
            for row in np.flatnonzero(chosen != wanted):
                margins.append(float(ours[row, wanted[row]] - ours[row, chosen[row]]))

    per_position = np.concatenate(largest)
    of_alike = per_position if alike is None else per_position[np.concatenate(alike)]
    worst = float(per_position.max())
    return LogitComparison(
        positions=len(per_position),
        max_difference=worst,
        max_difference_99=float(np.quantile(per_position, 0.99)),
        rms_difference=(squares / values) ** 0.5,
        top1_agreement=same / len(per_position),
        close_calls=sum(margin < worst for margin in margins),
        alike=len(of_alike),
        max_difference_alike=float(of_alike.max(initial=0)),
    )


def same_experts(
    path: str | os.PathLike[str],
    experts: Callable[[list[int]], np.ndarray],
    windows: Sequence[Window],
    *,
    context: int = 512,
    cache: str = "F32",
    threads: int = 2,
) -> list[np.ndarray]:
    """Whether a file's model takes the same experts as another in all layers, for each token of each window and all before it.

    A token attends to those before it, so what another expert made of one of them is in its logits too.

    The experts are those of moestream, whose logits are stock's to the last bit.

    Args:
        experts: The other's, [token, layer, top_k] in any order, of a list of tokens.
        context, cache, threads: As in `opened`.
    """
    with contextlib.closing(
        moestream.Llama(os.fspath(path), expert_streaming=True, **_exact(context, cache, threads))
    ) as llm:
        trace = moestream.record_routing(llm, [_tokens(window) for window in windows])
    found = np.split(trace.experts, trace.starts[1:])
    return [
        np.logical_and.accumulate((np.sort(mine, axis=-1) == np.sort(experts(_tokens(window)), axis=-1)).all(axis=(1, 2)))
        for mine, window in zip(found, windows, strict=True)
    ]


def perplexity(model: Model, windows: Iterable[Window], **options: Any) -> float:
    """exp of the mean of -log p(token | those before it in its window), over all tokens but each window's first.

    Args:
        model: A file for stock llama.cpp, or an open model: stock's or moestream's.
        options: Those of `opened`.

    Raises:
        ValueError: No window has two tokens, or one is too long; and what `opened` raises.
    """
    nats, count = 0.0, 0
    with opened(model, **options) as llm:
        for window in windows:
            tokens = np.asarray(window, dtype=np.int64)
            if len(tokens) < 2:
                continue
            log_p = log_softmax(logits(llm, tokens[:-1]))
            nats -= float(log_p[np.arange(len(log_p)), tokens[1:]].sum())
            count += len(log_p)
    if not count:
        raise ValueError("no window has a token to predict")
    return float(np.exp(nats / count))


# NumPy ----------------------------------------------------------------------------------------------------------------


def reference_logits(config: ModelConfig, state: Mapping[str, np.ndarray], tokens: Sequence[int]) -> np.ndarray:
    """Logits [token, vocabulary] of a model, in F32: the formulas written down once more, without PyTorch.

    Args:
        state: As `f16_values` gives it.
    """
    c = config

    def times(x: np.ndarray, name: str) -> np.ndarray:
        return x @ state[name].T

    x = state["embed.weight"][np.asarray(tokens)]
    for i in range(c.n_layers):
        layer = f"layers.{i}."
        entered = x
        normed = _rms_norm(x, state[layer + "attention_norm.weight"], c.norm_eps)
        q, k, v = (_heads(times(normed, f"{layer}{name}.weight"), c.head_dim) for name in "qkv")
        if c.kind == "qwen3moe":
            q = _rms_norm(q, state[layer + "q_norm.weight"], c.norm_eps)
            k = _rms_norm(k, state[layer + "k_norm.weight"], c.norm_eps)
        mixed = _attention(_rotated(q, c.rope_theta), _rotated(k, c.rope_theta), v)
        x = x + times(mixed, layer + "o.weight")

        normed = _rms_norm(x, state[layer + "ffn_norm.weight"], c.norm_eps)
        seen = entered if c.kind == "smallthinker" else normed
        chosen, weights = _route(c, times(seen, layer + "router.weight"))
        added = np.zeros_like(x)
        for expert in np.unique(chosen):
            rows, slots = np.nonzero(chosen == expert)
            gate, up = (normed[rows] @ state[layer + name][expert].T for name in ("gate", "up"))
            inner = (np.maximum(gate, 0) if c.kind == "smallthinker" else gate * _sigmoid(gate)) * up
            added[rows] += weights[rows, slots, None] * (inner @ state[layer + "down"][expert].T)
        x = x + added
    return times(_rms_norm(x, state["norm.weight"], c.norm_eps), "embed.weight")


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight


def _heads(x: np.ndarray, head_dim: int) -> np.ndarray:
    """[token, heads * head_dim] -> [head, token, head_dim]"""
    return x.reshape(len(x), -1, head_dim).transpose(1, 0, 2)


def _rotated(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotary positions, where the first half of a head is turned with the second. x: [head, token, head_dim]."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Each token's mean of the values up to its own, [token, heads * head_dim]."""
    shared = len(q) // len(k)
    k, v = np.repeat(k, shared, axis=0), np.repeat(v, shared, axis=0)
    scores = q @ k.transpose(0, 2, 1) / np.float32(np.sqrt(q.shape[-1]))
    scores += np.triu(np.full(scores.shape[1:], -np.inf, dtype=np.float32), k=1)
    mixed = _softmax(scores) @ v
    return mixed.transpose(1, 0, 2).reshape(q.shape[1], -1)


def _route(c: ModelConfig, router_logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The chosen experts [token, top_k] and their weights, whose sum is 1."""
    scores = _sigmoid(router_logits) if c.kind == "smallthinker" else _softmax(router_logits)
    chosen = np.argsort(-scores, axis=-1, kind="stable")[:, : c.top_k]
    weights = np.take_along_axis(scores, chosen, axis=-1)
    # llama.cpp's guard against division by zero: the smallest normal F16.
    return chosen, weights / np.maximum(weights.sum(axis=-1, keepdims=True), np.float32(2**-14))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return (1 + np.tanh(x / 2)) / 2


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)
