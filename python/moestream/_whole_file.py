"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import MoestreamError

__all__ = ["writing_whole"]


@contextlib.contextmanager
def writing_whole(path: str | os.PathLike[str], error: type[MoestreamError]) -> Iterator[BinaryIO]:
    """A file to write within the block, called like `path` with ".part" behind it, and renamed once it is on the disk.

    Raises:
        error: It cannot be written; `path` is as it was.
    """
    part = Path(f"{os.fspath(path)}.part")
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except MoestreamError:
        raise
    except OSError as exc:
        raise error(f"{path}: cannot be written: {exc.strerror or exc}") from exc
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
