"""The sidecar of docs/sidecar.md: trained heads and a LoRA beside a model, bound to it by a hash."""

from .base import BaseModel, base_hash, check_base, require_fit, sidecar_for
from .format import HEAD_TYPES, LORA_TYPES, Base, Head, Heads, Lora, LoraPair, Matrix, Sidecar
from .imports import read_heads, read_lora, write_heads
from .merging import Merge, merge
from .packing import pack, unpack

__all__ = [
    "HEAD_TYPES",
    "LORA_TYPES",
    "Base",
    "BaseModel",
    "Head",
    "Heads",
    "Lora",
    "LoraPair",
    "Matrix",
    "Merge",
    "Sidecar",
    "base_hash",
    "check_base",
    "merge",
    "pack",
    "read_heads",
    "read_lora",
    "require_fit",
    "sidecar_for",
    "unpack",
    "write_heads",
]
