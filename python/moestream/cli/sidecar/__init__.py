"""Pack, look at and take apart the trained heads and LoRA of a model.

A sidecar is one file beside a model, bound to it by a hash of the model:
trained heads, which predict one token ahead which experts each layer takes, and
a LoRA, which is applied unmerged. docs/sidecar.md describes it.

  moestream sidecar pack -m MODEL.gguf --heads HEADS --lora ADAPTER -o SIDECAR
  moestream sidecar inspect SIDECAR -m MODEL.gguf
  moestream sidecar unpack SIDECAR -o FOLDER
  moestream generate -m MODEL.gguf --prerouter SIDECAR -p "The library is"
"""

from . import inspect, merge, pack, unpack

__all__ = ["COMMANDS"]

COMMANDS = {"inspect": inspect, "merge": merge, "pack": pack, "unpack": unpack}
