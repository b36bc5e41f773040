"""How well text is predicted by counting: what a model has to be far better than."""

from __future__ import annotations

import numpy as np

from .tokenizer import VOCABULARY


def measure(train: np.ndarray, validation: np.ndarray, vocabulary: int = VOCABULARY) -> dict[str, float]:
    """Nats a token of `validation` by unigram and bigram counts of `train`, both uint16 streams.

    Unigrams have one added to each count. Bigrams are interpolated with them by Witten and Bell (1991): of a context seen n
    times with d different successors, the share d / (n + d) is left to unigrams.
    """
    counts = np.bincount(train, minlength=vocabulary) + 1.0
    unigram = counts / counts.sum()

    previous, current = (part.astype(np.int64) for part in (train[:-1], train[1:]))
    pairs, times = np.unique(previous * vocabulary + current, return_counts=True)
    successors = np.bincount(pairs // vocabulary, minlength=vocabulary)
    seen = np.bincount(previous, minlength=vocabulary)

    previous, current = (part.astype(np.int64) for part in (validation[:-1], validation[1:]))
    wanted = previous * vocabulary + current
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    found = np.where(pairs[place] == wanted, times[place], 0)
    bigram = (found + successors[previous] * unigram[current]) / np.maximum(seen + successors, 1)[previous]
    bigram = np.where(seen[previous] > 0, bigram, unigram[current])
    return {"unigram": float(-np.log(unigram[current]).mean()), "bigram": float(-np.log(bigram).mean())}
