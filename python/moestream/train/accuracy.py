"""What a head predicts on captured tokens, and what it is compared with. Needs no PyTorch.

For the experts of layer N + 1 at t + 1 (docs/reading-ahead.md has the same of the engine):

- *head*: N's head at t;
- *untrained*: the router of N + 1 applied to h of layer N at t, which a head begins as;
- *lookahead*: the same router applied to the state in front of layer N's experts at t + 1, with its own norm. It knows the token
  t + 1, which is what a head has to do without, and is there one layer ahead instead of a token;
- *repeat*: the experts of layer N + 1 at t.

Recall is the share of the K experts executed that are among the K predicted; exact the share of tokens for which all are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ._gguf import GgufWeights
from .dataset import Capture
from .head_arrays import HeadArrays

__all__ = ["overlap", "predicted"]

Experts = npt.NDArray[np.integer]


def predicted(capture: Capture, head: HeadArrays, weights: GgufWeights, t: npt.NDArray[np.int64]) -> dict[str, Experts]:
    """Experts [n, K] that the layer behind the head's owner takes at t + 1, by each of the above.

    A bias of the choice is applied; limits to groups of experts are not.

    Args:
        weights: The model that was captured. Where the names of its norms are not known, there is no lookahead.
        t: Tokens that have a next one in their text.
    """
    owner, top_k = head.owner, capture.header.top_k
    hidden, executed, router = capture.hidden(owner), capture.experts(owner), weights.router(owner + 1)
    bias = weights.selection_bias(owner + 1)

    def top(logits: npt.NDArray[np.float32]) -> Experts:
        scores = logits if bias is None else _scores(logits, capture.header.gating) + bias
        return np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]

    now = hidden[t].astype(np.float32)
    found = {
        "head": top(head.forward(now, executed[t], executed[np.maximum(t - 1, 0)], capture.firsts()[t])),
        "untrained": top(now @ router.T),
        "repeat": np.asarray(capture.experts(owner + 1)[t]),
    }
    mine, theirs = weights.expert_norm(owner), weights.expert_norm(owner + 1)
    if mine is not None and theirs is not None and np.abs(mine).min() > 1e-6:
        found["lookahead"] = top((hidden[t + 1].astype(np.float32) * (theirs / mine)) @ router.T)
    return found


def overlap(predicted: Experts, executed: Experts) -> tuple[float, float]:
    """Recall and exact-set rate of predicted experts [n, K] against executed ones [n, K]; a row names no expert twice."""
    found = (predicted[:, :, None].astype(np.int64) == executed[:, None, :].astype(np.int64)).any(axis=1).sum(axis=1)
    return float(found.mean() / executed.shape[1]), float((found == executed.shape[1]).mean())


def _scores(logits: npt.NDArray[np.float32], gating: str) -> npt.NDArray[np.float32]:
    if gating == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)
