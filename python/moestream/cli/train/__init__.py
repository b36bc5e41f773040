"""Train heads that predict routing, and the LoRA that recovers what that costs.

First what a model does on some text is captured, which needs the GGUF alone,
streamed; then the phases, which need the extra `train` (PyTorch). A phase that
was interrupted goes on where it was, given the same command.

  moestream train capture -m MODEL.gguf -f text.txt -o data
  moestream train heads -m MODEL.gguf -d data -o heads.gguf
  moestream train sft -m MODEL.gguf --hf DIR --sidecar heads.gguf \\
                      -f text.txt -o sft.gguf
  moestream train distill -m MODEL.gguf --hf DIR --sidecar sft.gguf \\
                      -f text.txt -o MODEL.sidecar.gguf
"""

from . import capture, distill, heads, sft

__all__ = ["COMMANDS"]

COMMANDS = {"capture": capture, "heads": heads, "sft": sft, "distill": distill}
