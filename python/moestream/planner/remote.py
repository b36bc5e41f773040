"""The shape of a model on the Hugging Face Hub, from the bytes of its header alone."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .. import _hub
from ..errors import ModelError
from ..layout.gguf_file import header_is_whole
from ..memory import format_size
from .shape import ModelShape, shape_of

__all__ = ["remote_shape"]

FIRST_BYTES = 1 << 20  # then twice as many each time, until the header is whole
_MOST_BYTES = 256 << 20


def remote_shape(repo: str, files: Sequence[str]) -> ModelShape:
    """The shape of a model in a repository.

    Args:
        files: Its files in order: one, or all shards.

    Raises:
        ModelError: The Hub does not give them, or they are no sound model.
    """
    with tempfile.TemporaryDirectory(prefix="moestream-headers-") as folder:
        fetched = 0
        for file in files:
            head, size_bytes = _header(repo, file)
            fetched += len(head)
            with open(Path(folder) / Path(file).name, "wb") as kept:
                kept.write(head)
                kept.truncate(size_bytes)  # a hole where the weights are: it takes no room
        try:
            shape = shape_of(Path(folder) / Path(files[0]).name)
        except ModelError as error:
            raise ModelError(str(error).replace(folder, repo)) from None
    what = "header" if len(files) == 1 else f"{len(files)} headers"
    return dataclasses.replace(
        shape,
        origin=f"{what} of {repo}, {files[0]}: {format_size(fetched)} read, nothing downloaded",
        fetched_bytes=fetched,
        path=None,
    )


def _header(repo: str, file: str) -> tuple[bytes, int]:
    """The beginning of a file, at least its header, and its whole size."""
    head, wanted = b"", FIRST_BYTES
    while True:
        piece, size_bytes = _hub.read_range(repo, file, len(head), wanted)
        head += piece
        if header_is_whole(head) or len(head) >= size_bytes:
            return head, size_bytes
        if len(head) >= _MOST_BYTES or not piece:
            raise ModelError(
                f"{repo}, {file}: its header does not end within {format_size(len(head))}: no sound GGUF file"
            )
        wanted = 2 * len(head)
