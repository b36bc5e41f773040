"""Debian packages as files to read: fetched once with `apt-get download`, never installed."""

from __future__ import annotations

import fnmatch
import hashlib
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from .corpus_errors import MissingPackage, NoApt, NoRoom, UnreadablePackage


@dataclass(frozen=True)
class Package:
    """A fetched .deb file."""

    name: str
    version: str
    sha256: str
    path: Path


def fetch(name: str, downloads: Path) -> Package:
    """The package `name`, from `downloads` if it is there already, otherwise from the Debian mirror.

    A download lands under its name only when it is whole, so what an interrupt leaves is never taken for a package.

    Raises:
        NoApt: this machine has no apt-get or no dpkg-deb.
        MissingPackage: apt-get does not know the package, or cannot reach its mirror.
        NoRoom: the folder's disk is full.
        UnreadablePackage: the file is no package.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise NoApt(tool, name)
    found = sorted(downloads.glob(f"{name}_*.deb"))
    if not found:
        unfinished = downloads / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        asked = subprocess.run(["apt-get", "download", name], cwd=unfinished, capture_output=True, text=True)
        said = (asked.stderr + asked.stdout).strip()
        fetched = sorted(unfinished.glob(f"{name}_*.deb"))
        if asked.returncode or not fetched:
            if "No space left" in said or "enough free space" in said:
                raise NoRoom(downloads, None, f"the package {name}")
            raise MissingPackage(name, said.splitlines()[-1] if said else "it said nothing")
        found = [fetched[-1].rename(downloads / fetched[-1].name)]
        unfinished.rmdir()
    path = found[-1]
    field = subprocess.run(["dpkg-deb", "--field", str(path), "Version"], capture_output=True, text=True)
    if field.returncode:
        raise UnreadablePackage(path, field.stderr.strip())
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else _sha256(file)
    return Package(name, field.stdout.strip(), digest.hexdigest(), path)


def _sha256(file):  # Python 3.10
    digest = hashlib.sha256()
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest


def unpack(package: Package, patterns: tuple[str, ...], folder: Path) -> None:
    """Those regular files of the package whose path (`usr/share/...`) matches a pattern, below `folder`.

    The archive is streamed, so a game of hundreds of megabytes of pictures costs the disk only its texts.
    """
    with subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", str(package.path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                for member in archive:
                    name = member.name.removeprefix("./")
                    if member.isreg() and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                        target = folder / name
                        if ".." in target.parts:
                            continue
                        target.parent.mkdir(parents=True, exist_ok=True)
                        with target.open("wb") as file:
                            shutil.copyfileobj(archive.extractfile(member), file)
        except tarfile.TarError as error:
            raise UnreadablePackage(package.path, f"{error}; delete the file to fetch it again") from error
        process.stdout.close()
        said = process.stderr.read().decode(errors="replace").strip()
    if process.returncode:
        raise UnreadablePackage(package.path, f"{said}; delete the file to fetch it again")
