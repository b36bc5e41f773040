"""Train a LoRA on the teacher's texts, routing by heads: phase 2.

The teacher, the model's Hugging Face weights, goes on from prompts that are
drawn from FILE. The student has the weights of the GGUF and is routed by the
sidecar's heads; a LoRA on its attention learns to say the same. OUT.sft.json
and OUT.sft.png are the curves.

  moestream train sft -m MODEL.gguf --hf DIR --sidecar heads.gguf \\
                      -f text.txt -o sft.gguf
"""

from __future__ import annotations

from typing import Any

from ._recovery import add_recovery_arguments as add_arguments
from ._recovery import show

__all__ = ["add_arguments", "run"]


def run(**options: Any) -> int:
    """Runs `train` of `_recovery` for the command line and returns the exit code."""
    return show("sft", **options)
