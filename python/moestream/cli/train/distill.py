"""Train the LoRA on what the student writes, as the teacher sees it: phase 3.

The student, with the weights of the GGUF, the sidecar's LoRA and routed by its
heads, goes on from prompts drawn from FILE; the teacher, the model's Hugging
Face weights, says at each token what it would have thought. The loss is the
reverse divergence over the teacher's likeliest tokens and all others together.
OUT.distill.json and OUT.distill.png are the curves.

  moestream train distill -m MODEL.gguf --hf DIR --sidecar sft.gguf \\
                          -f text.txt -o MODEL.sidecar.gguf
"""

from __future__ import annotations

from typing import Any

from ._recovery import add_recovery_arguments as add_arguments
from ._recovery import show

__all__ = ["add_arguments", "run"]


def run(**options: Any) -> int:
    """Runs `train` of `_recovery` for the command line and returns the exit code."""
    return show("distill", **options)
