"""What can go wrong while the corpus is made.

CorpusError
├── NoApt               no apt-get on this machine
├── MissingPackage      apt-get knows no such package, or cannot reach its mirror
├── UnreadablePackage   the .deb is damaged
├── MissingReader       a Python library that reads one format is not installed
├── TooFewDocuments     the package is not what it was when its reader was written
└── NoRoom              the disk is full (also an OSError)
"""

from __future__ import annotations

import errno
from pathlib import Path


class CorpusError(RuntimeError):
    """The corpus cannot be made; what was there before is untouched and downloads are kept."""


class NoApt(CorpusError):
    def __init__(self, tool: str, package: str):
        super().__init__(
            f"no {tool} on this machine: the corpus is made from Debian packages (the first missing is {package}); "
            "run this on Debian 12, or put the .deb files into the downloads folder of a machine that has dpkg"
        )


class MissingPackage(CorpusError):
    def __init__(self, package: str, said: str):
        super().__init__(
            f"cannot fetch the Debian package {package}: {said}\n"
            f"  bring the package lists up to date:  apt-get update\n"
            f"  then see whether it is known:        apt-cache policy {package}"
        )


class UnreadablePackage(CorpusError):
    def __init__(self, path: Path, said: str):
        super().__init__(f"{path} is no readable Debian package: {said}")


class MissingReader(CorpusError):
    def __init__(self, source: str, library: str):
        super().__init__(f"{source} is read with the Python library {library}: pip install 'moestream[train]'")


class TooFewDocuments(CorpusError):
    def __init__(self, source: str, package: str, version: str, found: int, least: int):
        super().__init__(
            f"{source}: {found} documents in {package} {version}, at least {least} expected; "
            "the package has changed, and its reader must be looked at before the corpus is used"
        )


class NoRoom(CorpusError, OSError):
    def __init__(self, folder: Path, need_bytes: int | None, what: str):
        need = "" if need_bytes is None else f", which needs {need_bytes:,} bytes"
        # By name: through super() it would be RuntimeError's turn, which knows no errno.
        OSError.__init__(self, errno.ENOSPC, f"no room in {folder} for {what}{need}; nothing half-written was kept")

    def __str__(self) -> str:
        return str(self.args[1])
