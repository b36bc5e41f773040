"""The two small models that ship with the package; README.md beside this file is their card."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from ..errors import OptionError

__all__ = ["demo_model", "validation_text"]

_FOLDER = Path(__file__).parent
_NAMES = ("smallthinker", "qwen3moe")


def demo_model(name: str = "smallthinker") -> Path:
    """The file of a model that ships with the package: small, with real weights, and readable English for text.

    >>> llm = Llama(str(demo_model()), expert_streaming=True)

    Args:
        name: Its architecture: "smallthinker", whose routers come before attention, or "qwen3moe", whose come after it.

    Raises:
        OptionError: There is no such model, or this copy of the package came without it.
    """
    if name not in _NAMES:
        raise OptionError(f"no model {name!r} is shipped: there are {' and '.join(map(repr, _NAMES))}")
    path = _FOLDER / f"demo-{name}.gguf"
    if not path.is_file():
        raise OptionError(
            f"this copy of moestream came without {path.name}: name a model with -m FILE or -hf USER/REPO"
        )
    return path


def validation_text() -> str:
    """The text that ships with the package, which its models were not trained on: documents, an empty line between them.

    Raises:
        OptionError: This copy of the package came without it.
    """
    path = _FOLDER / "validation.jsonl.gz"
    if not path.is_file():
        raise OptionError(f"this copy of moestream came without {path.name}: name a text with -f FILE")
    return "\n\n".join(json.loads(line)["text"] for line in gzip.decompress(path.read_bytes()).splitlines())
