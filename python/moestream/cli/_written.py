from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..memory import format_size


def written(paths: Sequence[Path], size_bytes: int, seconds: float) -> str:
    """What was written and how fast, in short."""
    shards = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{paths[0]}{shards}: {read(size_bytes, seconds)}"


def read(size_bytes: int, seconds: float) -> str:
    """A size, a time and what it makes in a second."""
    return f"{format_size(size_bytes)} in {seconds:.1f} s, {size_bytes / 1e6 / max(seconds, 1e-9):.0f} MB/s"


def as_json(result: Any) -> dict[str, Any]:
    """A dataclass as JSON has it: paths are text."""
    return dataclasses.asdict(result, dict_factory=lambda items: {name: _plain(value) for name, value in items})


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
