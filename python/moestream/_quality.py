"""How much worse a variant of a model is than the model, on a text: perplexity, divergence, agreement.

    report = compare_quality(reference, variant, texts)
    print(report.perplexity / report.reference_perplexity, report.kl)

The divergence is Kullback and Leibler's, of the reference's distribution p over the next token from the variant's q: the sum of
p log(p / q) over the vocabulary, in nats. It is 0 for the same and grows with every difference, where perplexity, which looks at
the token that came alone, may even fall by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import llama_cpp
import numpy as np
import numpy.typing as npt

from ._evaluation import evaluating, require_tokens
from .errors import OptionError
from .llama import Llama

__all__ = ["QualityReport", "compare_quality", "divergence_sums", "divergences", "log_softmax"]

_VALUES_AT_ONCE = 1 << 20  # of float64, in each of a few arrays


@dataclass(frozen=True)
class QualityReport:
    """What a variant of a model makes of texts, against the model itself. Divergences are in nats."""

    tokens: int
    """Tokens that were predicted: all but the first of each text."""
    reference_perplexity: float
    perplexity: float
    """exp of the mean of -log q(token that came)."""
    kl: float
    """Mean divergence of a token; the next three are of the same."""
    kl_median: float
    kl_99: float
    """What it is at most, for 99 of 100 tokens."""
    kl_largest: float
    same_top1: float
    """Share of tokens for which both think the same token the likeliest."""
    changed: float
    """Share of tokens for which any logit differs."""


def compare_quality(
    reference: llama_cpp.Llama,
    variant: llama_cpp.Llama,
    texts: Iterable[Sequence[int]],
    *,
    context: int | None = None,
    tokens_at_once: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> QualityReport:
    """Evaluates texts with two models, token by token as decoding does, and compares what they predict.

    Both take the tokens by turns, in contexts of their own (see :mod:`moestream._evaluation`); the expert cache of each is what
    it was and goes on through all texts, on which cache-aware routing depends. Of a batch of logits, a few MiB are looked at at once.

    Args:
        reference: The model as it is, ours or of llama-cpp-python.
        variant: The model to judge. The two may be one object.
        texts: Tokens of texts, of two at least each. What is longer than `context` is cut, and its pieces are texts of their own.
        context: Tokens of the longest text, by default what both models have room for.
        tokens_at_once: More than 1 evaluates a text as a prompt, in batches of so many.
        progress: Is told how many tokens of how many are done; what it raises ends the comparison.

    Raises:
        OptionError: The vocabularies differ, a token does not exist, there is nothing to predict, or a number makes no sense.
        ExpertReadError: Experts could not be read.
        MoestreamError: A model is closed.
    """
    for llm in (reference, variant):
        if isinstance(llm, Llama) and llm._engine is not None:
            llm._engine.require_open()
    if reference.n_vocab() != variant.n_vocab():
        raise OptionError(
            f"the models have {reference.n_vocab()} and {variant.n_vocab()} tokens: compare a model with one of the same vocabulary"
        )
    context = min(reference.n_ctx(), variant.n_ctx()) if context is None else context
    for name, value in (("context", context), ("tokens_at_once", tokens_at_once)):
        if value < 1:
            raise OptionError(f"{name}={value}: at least one token is needed")
    pieces = [piece for text in texts for piece in _pieces(text, context)]
    if not pieces:
        raise OptionError("there is no token to predict: give at least one text of two tokens")
    for piece in pieces:
        require_tokens(reference, piece.tolist())

    total = sum(len(piece) - 1 for piece in pieces)
    context = max(map(len, pieces)) - 1
    options = {"context": context, "tokens_at_once": min(tokens_at_once, context)}
    gathered: list[_Compared] = []
    progress(0, total)
    done = 0
    with evaluating(reference, **options) as first, evaluating(variant, **options) as second:
        for piece in pieces:
            for begin in range(0, len(piece) - 1, options["tokens_at_once"]):
                batch = piece[:-1][begin : begin + options["tokens_at_once"]]
                for evaluation in (first, second):
                    evaluation.decode(batch, begin)
                follow = piece[begin + 1 : begin + 1 + len(batch)]
                gathered += _compared(first.logits(), second.logits(), follow)
                done += len(batch)
                progress(done, total)
    return _report(gathered)


def _pieces(text: Sequence[int], context: int) -> Iterator[npt.NDArray[np.int64]]:
    """A text in pieces of `context` tokens and the one to predict behind the last, which also begins the next piece."""
    tokens = np.asarray(text, np.int64)
    for first in range(0, len(tokens) - 1, context):
        yield tokens[first : first + context + 1]


@dataclass(frozen=True)
class _Compared:
    """Of some tokens, each array one value a token."""

    reference_nats: npt.NDArray[np.float64]
    nats: npt.NDArray[np.float64]
    divergence: npt.NDArray[np.float64]
    same_top1: npt.NDArray[np.bool_]
    changed: npt.NDArray[np.bool_]


def _compared(
    reference: npt.NDArray[np.float32], variant: npt.NDArray[np.float32], follow: npt.NDArray[np.int64]
) -> Iterator[_Compared]:
    rows_at_once = max(1, _VALUES_AT_ONCE // reference.shape[1])
    for first in range(0, len(follow), rows_at_once):
        rows = slice(first, first + rows_at_once)
        theirs, ours, came = reference[rows], variant[rows], follow[rows]
        log_p, log_q = log_softmax(theirs), log_softmax(ours)
        each = np.arange(len(came))
        yield _Compared(
            reference_nats=-log_p[each, came],
            nats=-log_q[each, came],
            divergence=divergences(log_p, log_q),
            same_top1=theirs.argmax(axis=1) == ours.argmax(axis=1),
            changed=(theirs != ours).any(axis=1),
        )


def _report(gathered: Sequence[_Compared]) -> QualityReport:
    def all_of(name: str) -> npt.NDArray[np.float64]:
        return np.concatenate([getattr(compared, name) for compared in gathered])

    divergence = all_of("divergence")
    return QualityReport(
        tokens=len(divergence),
        reference_perplexity=float(np.exp(all_of("reference_nats").mean())),
        perplexity=float(np.exp(all_of("nats").mean())),
        kl=float(divergence.mean()),
        kl_median=float(np.median(divergence)),
        kl_99=float(np.quantile(divergence, 0.99)),
        kl_largest=float(divergence.max()),
        same_top1=float(all_of("same_top1").mean()),
        changed=float(all_of("changed").mean()),
    )


def log_softmax(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Logarithms of the probabilities of the last dimension, whose sum is 1. A logit of -inf gives -inf."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def divergences(log_p: npt.NDArray[np.float64], log_q: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The sum of p log(p / q) over the last dimension, in nats. What p excludes adds nothing; what q alone excludes, infinity."""
    return np.maximum(divergence_sums(log_p, log_q), 0)  # rounding may leave a little less than nothing


def divergence_sums(log_p: npt.NDArray[np.float64], log_q: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The same of what need not add up to 1, which may be less than 0."""
    p = np.exp(log_p)
    with np.errstate(invalid="ignore"):  # -inf less -inf, which the next line replaces
        terms = log_p - log_q
    terms[p == 0] = 0
    return (p * terms).sum(axis=-1)
