"""The table of what the demo corpus is made of. To add a source, add a line here; its reader is in corpus_readers.py."""

from __future__ import annotations

from dataclasses import dataclass

from . import corpus_readers as read

MB = 1_000_000


@dataclass(frozen=True)
class Source:
    """One part of the corpus.

    Attributes:
        name: unique, used in document ids.
        packages: the Debian packages it is read from.
        kind: the kind of English, for balance and for the model card.
        licence: of the text, as the package's copyright file states it.
        files: patterns of paths in the package that the reader needs.
        reader: from `corpus_readers`.
        least: documents that must be found, or the package has changed and the source is refused.
        cap: most bytes of text to take; documents are chosen by a seeded hash.
        weight: how often the training should see it, relative to the others.
    """

    name: str
    packages: tuple[str, ...]
    kind: str
    licence: str
    files: tuple[str, ...]
    reader: read.Reader
    least: int
    cap: int = 100 * MB
    weight: int = 1


def _one(package: str, kind: str, licence: str, files, reader, least, **more) -> Source:
    files = (files,) if isinstance(files, str) else tuple(files)
    return Source(more.pop("name", package), (package,), kind, licence, files, reader, least, **more)


_CAMPAIGNS = "did dm dw ei httt l low nr sof sota sotbe thot trow tsg ttb utbs".split()

SOURCES: tuple[Source, ...] = (
    # Stories.
    _one(
        "r-cran-janeaustenr",
        "novel",
        "public domain",
        "*/janeaustenr/data/*",
        read.austen,
        200,
        name="austen",
        weight=4,
    ),
    Source(
        "wesnoth",
        tuple(f"wesnoth-1.16-{campaign}" for campaign in _CAMPAIGNS),
        "story",
        "GPL-2+",
        ("*.cfg",),
        read.wesnoth,
        150,
        weight=4,
    ),
    _one("endless-sky-data", "story", "GPL-3+", "*/data/*.txt", read.endless_sky, 500, weight=3),
    _one("cataclysm-dda-data", "story", "CC-BY-SA-3.0", "*/json/*.json", read.cataclysm, 500, weight=2),
    _one("crawl-common", "story", "GPL-2+", "*/dat/descript/*.txt", read.crawl, 60),
    # Scripture and what was written about it.
    _one(
        "sword-text-web",
        "scripture",
        "public domain",
        "*",
        read.sword_bible,
        1180,
        name="world-english-bible",
        weight=2,
    ),
    _one("sword-text-kjv", "scripture", "public domain", "*", read.sword_bible, 1180, name="king-james-bible"),
    _one("sword-comm-mhcc", "commentary", "public domain", "*", read.sword_commentary, 900, name="matthew-henry"),
    _one(
        "sword-comm-tdavid",
        "commentary",
        "public domain",
        "*",
        read.sword_commentary,
        100,
        name="treasury-of-david",
        cap=6 * MB,
    ),
    _one("sword-comm-scofield", "commentary", "public domain", "*", read.sword_commentary, 100, name="scofield"),
    # Words.
    _one("dict-gcide", "dictionary", "GPL-2+", "*.dict.dz", read.gcide, 3000, cap=5 * MB),
    _one("dict-wn", "dictionary", "WordNet licence", "*.dict.dz", read.wordnet, 1500, cap=3 * MB),
    _one("dict-foldoc", "dictionary", "GFDL-1.1+", "*.dict.dz", read.foldoc, 250),
    _one("dict-jargon", "dictionary", "public domain", "*.dict.dz", read.jargon, 80, weight=2),
    _one("dict-devil", "dictionary", "public domain", "*.dict.dz", read.devil, 40, weight=2),
    _one(
        "fortunes",
        "quotation",
        "BSD, of short quotations",
        "usr/share/games/fortunes/*",
        read.fortunes,
        300,
        weight=2,
    ),
    # Handbooks.
    _one("debian-handbook", "handbook", "GPL-2+ or CC-BY-SA-3.0", "*/html/en-US/*.html", read.html, 15, weight=2),
    _one("debian-reference-en", "handbook", "GPL-2+", "*.en.html", read.html, 10),
    _one("debian-history", "handbook", "GPL-2+", "*.en.html", read.html, 5),
    _one("debian-faq", "handbook", "GPL-2+", "*/FAQ/*.en.html", read.html, 10),
    _one("developers-reference", "handbook", "GPL-2+", "*/developers-reference/*.html", read.html, 8),
    _one("debian-edu-doc-en", "handbook", "GPL-2+", "*.html", read.html, 1, cap=MB),
    _one("debian-kernel-handbook", "handbook", "GPL-2+", "*.html", read.html, 5),
    _one("harden-doc", "handbook", "GPL-2+", "*/html/en-US/*.html", read.html, 30),
    _one("installation-guide-amd64", "handbook", "GPL-2+", "*/en/*.html", read.html, 40),
    _one("maint-guide", "handbook", "GPL-2+", "*.en.html", read.html, 5),
    _one("freedombox-doc-en", "handbook", "CC-BY-SA-4.0", "*/manual/en/*.html", read.html, 20, cap=MB),
    # Desktop.
    _one(
        "gnome-user-docs",
        "desktop",
        "CC-BY-SA-3.0",
        ("usr/share/help/C/*.page", "usr/share/help/C/*.xml"),
        read.xml,
        150,
    ),
    _one("mate-user-guide", "desktop", "GFDL-1.1+", "usr/share/help/C/*.xml", read.xml, 5),
    _one(
        "gnucash-docs",
        "desktop",
        "GFDL-NIV-1.1+",
        ("usr/share/help/C/*.xml", "usr/share/help/C/*.docbook"),
        read.xml,
        10,
    ),
    _one("libreoffice-help-en-us", "desktop", "MPL-2.0", "*/en-US/text/*.html", read.html, 800, cap=3 * MB),
    _one("gimp-help-en", "desktop", "GFDL-NIV-1.2+", "*/help/en/*.html", read.html, 300, cap=2 * MB),
    _one("kicad-doc-en", "desktop", "GPL-2+ or CC-BY-SA-3.0", "*/help/en/*.html", read.html, 5),
    # Programming.
    _one(
        "python3.11-doc",
        "programming",
        "PSF-2.0",
        tuple(f"*/html/{part}/*.html" for part in "faq howto library reference tutorial whatsnew".split()),
        read.html,
        250,
        cap=4 * MB,
    ),
    _one(
        "python-django-doc",
        "programming",
        "BSD-3-clause",
        tuple(f"*/html/{part}/*.html" for part in "intro topics howto faq misc internals ref".split()),
        read.html,
        100,
        cap=2 * MB,
    ),
    _one(
        "rust-doc",
        "programming",
        "MIT or Apache-2.0",
        ("*/html/book/*.html", "*/html/nomicon/*.html", "*/html/cargo/*.html", "*/html/reference/*.html"),
        read.html,
        100,
        cap=2 * MB,
    ),
    _one("perl-doc", "programming", "Artistic or GPL-1+", "*.pod", read.pod, 100, cap=3 * MB),
    _one("postgresql-doc-15", "programming", "PostgreSQL", "*/html/*.html", read.html, 500, cap=3 * MB),
    _one("git-doc", "programming", "GPL-2", "*/git-doc/*.html", read.html, 100, cap=2 * MB),
    _one(
        "linux-doc-6.1",
        "programming",
        "GPL-2",
        (
            "*/html/admin-guide/*.html",
            "*/html/process/*.html",
            "*/html/filesystems/*.html",
            "*/html/core-api/*.html",
            "*/html/mm/*.html",
            "*/html/scheduler/*.html",
            "*/html/networking/*.html",
            "*/html/driver-api/*.html",
        ),
        read.html,
        300,
        cap=4 * MB,
    ),
)
