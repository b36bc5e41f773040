"""Training what a sidecar holds: heads that predict the routing a token ahead, and the LoRA that recovers what they cost.

    data = capture(Llama("model.gguf", expert_streaming=True), texts, "data")     # any GGUF, streamed; needs no PyTorch
    train_heads("data", "model.gguf", "model.sidecar.gguf")                       # phase 1, `moestream.train.heads`
    train_sft(...); train_distill(...)                                            # phases 2 and 3, for models with HF weights

Capturing, the dataset and the forward of heads in NumPy are here; what needs PyTorch (the extra `train`) is in modules of its
own, which are imported by name: `moestream.train.heads`, `.sft`, `.distill`, `.student`.
"""

from .capture import capture, capture_bytes
from .dataset import Capture
from .head_arrays import HeadArrays
from .plans import HeadPlan, LoraPlan

__all__ = ["Capture", "HeadArrays", "HeadPlan", "LoraPlan", "capture", "capture_bytes"]
