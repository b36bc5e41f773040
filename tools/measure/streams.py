"""Token streams to measure with."""

from __future__ import annotations

import numpy as np

__all__ = ["random_prompt", "zipf_stream"]

# Drawing from few ids by a Zipf law makes some tokens frequent, as text does: their experts are cached, the others are not.
STREAM_IDS = 400
ZIPF_EXPONENT = 1.3


def zipf_stream(*, tokens: int, vocabulary: int, seed: int = 1) -> list[int]:
    """Token ids whose frequency follows a Zipf law over 400 ids."""
    ranks = np.minimum(np.random.default_rng(seed).zipf(ZIPF_EXPONENT, tokens), STREAM_IDS)
    return [int(id) for id in ranks * 7 % vocabulary]


def random_prompt(*, tokens: int, vocabulary: int, seed: int = 1) -> list[int]:
    """Token ids from all of the vocabulary: a hundred of them already ask for nearly all experts."""
    return [int(id) for id in np.random.default_rng(seed).integers(vocabulary, size=tokens)]
