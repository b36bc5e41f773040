"""A bar for gigabytes: how many, how fast, how long still."""

from __future__ import annotations

import sys

from tqdm import tqdm

__all__ = ["bytes_bar"]


def bytes_bar(what: str, total_bytes: int, *, progress: bool, done_bytes: int = 0) -> tqdm:
    """A bar on stderr that vanishes when it is done, and is not drawn at all where stderr is no terminal."""
    return tqdm(
        total=total_bytes,
        initial=done_bytes,
        desc=what,
        unit="B",
        unit_scale=True,
        bar_format="{desc} {percentage:3.0f}% |{bar:30}| {n_fmt}B/{total_fmt}B {rate_fmt}, {remaining} left",
        leave=False,
        disable=not (progress and sys.stderr.isatty()),
        file=sys.stderr,
    )
