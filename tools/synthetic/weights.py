"""Random weights with which a Mixture-of-Experts model behaves like one.

What matters is that tokens choose different experts. Residual branches are small (0.03) against the embeddings, so the
hidden state stays the token's own; the router's rows are long (3/sqrt(d)), so its choice is sharp; embeddings come in
clusters (token id modulo `clusters`) of correlation `corr`, so that tokens of one cluster share experts as neighbouring
words do.

Experts with ReLU leave out what their gate makes zero, in trained models more than half of it. `zeros` asks for that share: all
embeddings get something in common (a constant), which survives the norms, and gate rows a mean against which it counts.

Weights are Gaussian numbers quantised by ggml. A big matrix has more of them than there is time to draw, so each (type,
scale) has a *ring* of random blocks, and a tensor is a window onto it that starts at a place of its own and wraps
around. The ring has a prime number of blocks: the experts of a tensor, each a fixed number of blocks after the one
before, start at different blocks. No two experts or layers are alike: one read in place of another changes the output.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
import zlib
from collections.abc import Iterator

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from .tensors import ggml_base

# What ggml can quantise to. The others are for numbers in flight (Q8_1, Q8_K) or are no types of weights.
TYPES = sorted(t.name for t in Type if not re.match(r"Q8_[1K]|F64|I\d", t.name))
RING_WEIGHTS = 1 << 22
EMBEDDING_CHUNK_WEIGHTS = 1 << 23

# What embeddings have in common, against a spread of 1: enough for a mean of the gate that a quantised row still has, too little to
# make tokens choose the same experts.
IN_COMMON = 0.3

_GATE = re.compile(r"ffn_gate(_up)?_exps\.weight$")
_RESIDUAL = re.compile(r"(attn_output|ffn_down|ssm_out|shortconv\.out_proj)[a-z_]*\.weight$")
_NOT_QUANTISED = re.compile(r"norm|ffn_gate_inp|ffn_gate_tid2eid|conv1d|shortconv\.conv|_ape\.|(^|\.)hc_")


def is_matrix(name: str, ne: tuple[int, ...]) -> bool:
    """Whether a tensor is stored in the type of the model; the others are F32 whatever that is."""
    return len(ne) >= 2 and ne[0] >= 32 and min(ne) > 1 and name.endswith(".weight") and not _NOT_QUANTISED.search(name)


def type_of(name: str, ne: tuple[int, ...], wanted: Type) -> Type:
    """The type in which a tensor is stored.

    As in llama.cpp, MXFP4 is for experts only and the rest of such a model is Q8_0, and a row that is not a whole
    number of blocks falls back to Q8_0 or F16.
    """
    if not is_matrix(name, ne):
        return Type.F32
    if wanted == Type.MXFP4 and "_exps." not in name:
        wanted = Type.Q8_0
    return next(t for t in (wanted, Type.Q8_0, Type.F16) if ne[0] % gguf.GGML_QUANT_SIZES[t][0] == 0)


def quantise(values: np.ndarray, wanted: Type) -> memoryview:
    """ggml's own quantisation of `values` (float32, [rows, columns]), as bytes."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    rows, columns = values.shape
    block, block_bytes = gguf.GGML_QUANT_SIZES[wanted]
    out = np.empty(rows * columns // block * block_bytes, dtype=np.uint8)
    importance = np.ones(columns, dtype=np.float32) if ggml_base().ggml_quantize_requires_imatrix(wanted) else None
    ggml_base().ggml_quantize_chunk(
        *(wanted, values.ctypes.data, out.ctypes.data, 0, rows, columns),
        None if importance is None else importance.ctypes.data,
    )
    return memoryview(out)


class Weights:
    """Draws the bytes of tensors, which depend on the seed and on each one's name, shape and type, nothing else.

    Args:
        clusters: Groups of similar embeddings; token `t` belongs to group `t % clusters`.
        corr: Correlation of two embeddings of one group, 0 to 1.
        zeros: Share of the gate's outputs in an expert that are at most zero.
    """

    def __init__(self, *, seed: int = 0, clusters: int = 8, corr: float = 0.8, zeros: float = 0.5):
        if not 0 < zeros < 1:
            raise ValueError(f"zeros must be within 0..1 and neither, not {zeros}")
        if clusters < 1 or not 0 <= corr <= 1:
            raise ValueError(f"clusters must be at least 1 and corr within 0..1, not {clusters} and {corr}")
        self._seed = seed
        self._clusters = clusters
        self._corr = corr
        self._in_common = 0.0 if zeros == 0.5 else IN_COMMON
        # A gate's output is then a Gaussian number of spread 1 and this mean.
        self._gate_mean = -statistics.NormalDist().inv_cdf(zeros)
        self._ring = functools.lru_cache(maxsize=None)(self._draw_ring)

    def chunks(self, name: str, ne: tuple[int, ...], type: Type) -> Iterator[memoryview]:
        """The bytes of a tensor (`ne[0]` is the length of a row), in pieces of bounded size."""
        if name == "token_embd.weight":
            yield from self._embeddings(ne, type)
        elif is_matrix(name, ne):
            std = (0.03 if _RESIDUAL.search(name) else 1.0) / math.sqrt(ne[0])
            yield from self._window(name, math.prod(ne), type, std, self._mean(name, ne))
        else:
            yield memoryview(self._values(name, ne)).cast("B")

    def _mean(self, name: str, ne: tuple[int, ...]) -> float:
        """Of the weights of a matrix: what makes the gate's mean out of the constant that normed hidden states have."""
        if not self._in_common or not _GATE.search(name):
            return 0.0
        return self._gate_mean * math.hypot(1, self._in_common) / (self._in_common * ne[0])

    def _rng(self, what: object) -> np.random.Generator:
        return np.random.default_rng([self._seed, zlib.crc32(repr(what).encode())])

    def _values(self, name: str, ne: tuple[int, ...]) -> np.ndarray:
        """What is not a matrix: norms, biases, the router, the parameters of state spaces."""
        noise = self._rng(name).standard_normal(ne[::-1], dtype=np.float32)
        if name.startswith("rope_"):
            return np.ones_like(noise)  # factors of frequencies
        if name.endswith(("norm.weight", "scale", "scale.weight", "ssm_d")):
            return 1 + np.float32(0.1) * noise
        if name.endswith("ssm_a"):
            return -1 - np.float32(0.1) * noise  # of a decay exp(a * dt), which must not grow
        if name.endswith("ffn_gate_inp.weight"):
            return noise * np.float32(3 / math.sqrt(ne[0]))
        if len(ne) == 1 or name.endswith(".bias"):
            return noise * np.float32(0.1)
        return noise / np.float32(math.sqrt(ne[0]))

    def _embeddings(self, ne: tuple[int, ...], type: Type) -> Iterator[memoryview]:
        rng = self._rng("token_embd")
        d, vocab = ne
        centres = rng.standard_normal((self._clusters, d), dtype=np.float32) * np.float32(math.sqrt(self._corr))
        step = max(1, EMBEDDING_CHUNK_WEIGHTS // d)
        for first in range(0, vocab, step):
            ids = np.arange(first, min(first + step, vocab))
            rows = rng.standard_normal((len(ids), d), dtype=np.float32)
            rows *= np.float32(math.sqrt(1 - self._corr))
            rows += centres[ids % self._clusters] + np.float32(self._in_common)
            yield quantise(rows, type)

    def _window(self, name: str, weights: int, type: Type, std: float, mean: float) -> Iterator[memoryview]:
        block, block_bytes = gguf.GGML_QUANT_SIZES[type]
        ring = self._ring(_prime_from(min(RING_WEIGHTS, 2 * weights) // block), type, std, mean)
        left = weights // block * block_bytes
        at = int(self._rng(name).integers(len(ring) // block_bytes)) * block_bytes
        while left > 0:
            piece = ring[at : at + left]
            yield piece
            left -= len(piece)
            at = 0

    def _draw_ring(self, blocks: int, type: Type, std: float, mean: float) -> memoryview:
        block = gguf.GGML_QUANT_SIZES[type][0]
        values = self._rng((blocks, type.name, std)).standard_normal((blocks, block), dtype=np.float32)
        return quantise(values * np.float32(std) + np.float32(mean), type)


@functools.cache
def _prime_from(n: int) -> int:
    """The smallest prime that is at least `n`."""
    n = max(n, 2)
    while any(n % k == 0 for k in range(2, math.isqrt(n) + 1)):
        n += 1
    return n
