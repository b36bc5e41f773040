"""Shapes of published models, by name."""

from __future__ import annotations

from .architectures import Shape

PRESETS: dict[str, tuple[str, Shape]] = {
    "tiny": ("qwen3moe", Shape()),
    "qwen3-30b-a3b": (
        "qwen3moe",
        Shape(layers=48, d=2048, ff=768, experts=128, topk=8, heads=32, kv=4, head_dim=128, vocab=151936),
    ),
    "smallthinker-4b": (
        "smallthinker",
        Shape(layers=32, d=1536, ff=768, experts=32, topk=4, heads=12, kv=2, head_dim=128, vocab=151936, tied=True),
    ),
    "smallthinker-21b": (
        "smallthinker",
        Shape(layers=52, d=2560, ff=768, experts=64, topk=6, heads=28, kv=4, head_dim=128, vocab=151936),
    ),
    "mixtral-8x7b": (
        "llama",
        Shape(layers=32, d=4096, ff=14336, experts=8, topk=2, heads=32, kv=8, head_dim=128, vocab=32000),
    ),
}
