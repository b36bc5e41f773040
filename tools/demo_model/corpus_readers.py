"""How each kind of package is read: every reader takes a folder of unpacked files and gives the documents in it.

A reader yields (name, paragraphs). The name is unique within its source and stays the same for the same file, because the
choice under a cap and the split into training and validation hang on it. Libraries that only one format needs are
imported where that format is read, so that a missing one stops no other source.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from .corpus_text import clean, clean_lines, is_prose, paragraphs, prose

Reader = Callable[[Path], Iterator[tuple[str, list[str]]]]

# Entries of a dictionary or quotations are far shorter than what a model reads at once: so many make one document.
_ENTRIES_PER_DOCUMENT = 16


def _files(folder: Path, *suffixes: str) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name.endswith(suffixes):
            yield path.relative_to(folder).as_posix(), path


def _text(path: Path) -> str:
    content = path.read_bytes()
    if path.name.endswith((".gz", ".dz")):
        content = gzip.decompress(content)
    return content.decode("utf-8", errors="replace")


def _bundle(entries: Iterator[str], name: str) -> Iterator[tuple[str, list[str]]]:
    entries = iter(entries)
    for number in range(10**9):
        bundle = list(islice(entries, _ENTRIES_PER_DOCUMENT))
        if not bundle:
            return
        yield f"{name} {number:05}", bundle


# --- novels and scripture ----------------------------------------------------------------------------------------------


def austen(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The six novels of the R package janeaustenr, by chapter; its data base holds one vector of lines per novel."""
    import warnings

    import rdata

    def unserialised(content: bytes):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "unknown file type, assumed RDS": it is
            return rdata.conversion.convert(rdata.parser.parse_data(content))

    for _, index in _files(folder, "Rdata.rdx"):
        database = index.with_suffix(".rdb").read_bytes()
        for novel, (start, length) in unserialised(index.read_bytes())["variables"].items():
            # Each object: its size unpacked (4 bytes), then a zlib stream.
            packed = database[int(start) + 4 : int(start) + int(length)]
            lines = "\n".join(str(line) for line in unserialised(zlib.decompress(packed)))
            chapters = re.split(r"(?mi)^\s*chapter\s+(?:[ivxlc]+|\d+)\.?\s*$", lines)
            for number, chapter in enumerate(chapters[1:], 1):
                chapter = re.split(r"(?m)^\s*(?:THE END|FINIS|VOLUME [IVX]+)\.?\s*$", chapter)[0]
                yield f"{novel} {number:02}", list(paragraphs(chapter))


def sword_bible(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A Bible of the SWORD library by chapter, in the paragraphs its translators made."""
    for name, osis in _sword_chapters(folder):
        found = [clean(re.sub(r"<[^>]+>", "", part)) for part in _OSIS_BREAK.split(_OSIS_SILENT.sub("", osis))]
        yield name, [part for part in found if part]


def sword_commentary(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A commentary of the SWORD library by chapter: its sentences, without verse labels and headings."""
    for name, osis in _sword_chapters(folder):
        parts = _OSIS_BREAK.split(_OSIS_SILENT.sub("", osis))
        found = (clean(re.sub(r"<[^>]+>", "", part)) for part in parts)
        yield name, prose((_VERSE_LABEL.sub("", part) for part in found), shortest=60)


_OSIS_SILENT = re.compile(r"<note\b.*?</note>|<title\b.*?</title>|¶", re.S)
_OSIS_BREAK = re.compile(r"<div\b[^>]*type=\"(?:x-p|paragraph|introduction|section)\"[^>]*/?>|<(?:p|lb)\b[^>]*/?>|</p>")
_VERSE_LABEL = re.compile(r"^(?:(?:Verses?|Ver|Psalm|Chapter|V)\.? ?[\d,:; -]+[.:]? ?(?:\(\w+\)\.? ?)?)+")


def _sword_chapters(folder: Path) -> Iterator[tuple[str, str]]:
    from pysword.bible import SwordBible
    from pysword.modules import SwordModules

    root = next((path.parent for _, path in _files(folder, ".conf") for path in [path.parent]), None)
    if root is None:
        return
    for module in SwordModules(str(root)).parse_modules().values():
        # A commentary is stored like a text: pysword knows the layout, if not the name.
        layout = module["moddrv"].lower().replace("com", "text")
        bible = SwordBible(
            str(root / module["datapath"]),
            layout,
            module.get("versification", "kjv").lower(),
            module.get("encoding", "utf-8").lower(),
            module.get("sourcetype", "osis").lower(),
            module.get("blocktype", "BOOK"),
        )
        for books in bible.get_structure().get_books().values():
            for book in books:
                for chapter in range(1, book.num_chapters + 1):
                    try:
                        osis = bible.get(books=[book.name], chapters=[chapter], clean=False, join="\0")
                    except ValueError:  # a book this module does not hold
                        continue
                    # A comment on five verses is stored five times.
                    yield f"{book.name} {chapter:03}", "\n".join(dict.fromkeys(osis.split("\0")))


# --- dictionaries and quotations ---------------------------------------------------------------------------------------


def gcide(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Webster's dictionary: "Word: meaning.", one sense a paragraph, those that are sentences."""
    yield from _bundle(_gcide_senses(folder), "entries")


def _gcide_senses(folder: Path) -> Iterator[str]:
    for _, path in _files(folder, "gcide.dict.dz"):
        for entry in re.split(r"\n(?=\S[^\n]*\\)", _text(path)):
            head = re.match(r"([A-Za-z' -]{3,30}) \\", entry)
            if not head:
                continue
            head_end = re.match(r"[^\n]*(?:\n(?!   (?:\d+\.|\([a-z]\)) )[^\n]+)*?\](?:\n|$)|[^\n]*", entry).end()
            body = entry[head_end:]
            body = re.sub(r"\n +(?:Syn|Note|Usage):.*", "", body, flags=re.S)
            for sense in re.split(r"\n +(?:\d+|\([a-z]\))\. |\n\s*\n", body):
                sense = re.sub(r"\[[^\]]*\]|\\[^\\]*\\|\([A-Z][a-z]*\.(?: & [A-Z][a-z]*\.)?\)", " ", sense)
                sense = re.sub(r"--\s*[A-Z][\w.&' ]*(?:\([^)]*\))?\.?", " ", sense)
                sense = clean(re.sub(r"[{}]", "", sense)).strip(" ;")
                sense = re.sub(r"^\d+\. ", "", sense)
                if 70 <= len(sense) <= 900 and is_prose(sense) and not re.search(r"[\[\]]|, ,", sense):
                    yield f"{head[1].strip()}: {sense}"


_WORDNET_CLASS = {"n": "noun", "v": "verb", "adj": "adjective", "adv": "adverb"}


def wordnet(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """WordNet's meanings that come with an example of their use."""
    yield from _bundle(_wordnet_senses(folder), "entries")


def _wordnet_senses(folder: Path) -> Iterator[str]:
    for _, path in _files(folder, "wn.dict.dz"):
        for entry in re.split(r"\n(?=\S)", _text(path)):
            word, _, body = entry.partition("\n")
            if not re.fullmatch(r"[a-z][a-z' -]{2,30}", word):
                continue
            part = "noun"
            for mark, sense in re.findall(
                r"(?:^|\n) +(?:(n|v|adj|adv) )?\d+: (.*?)(?=\n +(?:(?:n|v|adj|adv) )?\d+: |$)", body, re.S
            ):
                part = _WORDNET_CLASS.get(mark, part)
                sense = clean(re.sub(r"\[(?:syn|ant|also):[^\]]*\]|[{}]", "", sense))
                meaning, _, example = sense.partition('; "')
                if example and len(example.split()) >= 5 and len(meaning) >= 20:
                    examples = [text.strip() for text in re.findall(r'"([^"]+)"', '"' + example)]
                    said = " ".join(f'"{text[:1].upper()}{text[1:].rstrip(".")}."' for text in examples)
                    yield f"{word} ({part}): {meaning}. {said}"


def foldoc(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The Free On-line Dictionary of Computing: entries of at least two sentences."""

    def entries() -> Iterator[str]:
        for _, path in _files(folder, "foldoc.dict.dz"):
            for entry in re.split(r"\n(?=\S)", _text(path)):
                word, _, body = entry.partition("\n")
                body = re.sub(
                    r"\{\([^)]*\)\}|\{[^{}]*\(https?://[^{}]*\}|\[[^\]]*\]|<[a-z, -]+>|\(\d{4}-\d\d-\d\d\)", " ", body
                )
                body = re.sub(r"[{}]|__", "", body)
                found = prose(re.sub(r"^\d\. ", "", text) for text in paragraphs(body))
                if found and len(" ".join(found)) >= 120:
                    yield "\n".join([f"{clean(word)}: {found[0]}", *found[1:]])

    yield from _bundle(entries(), "entries")


def jargon(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The Jargon File: what the words of hackers mean, at length."""

    def entries() -> Iterator[str]:
        for _, path in _files(folder, "jargon.dict.dz"):
            for entry in re.split(r"\n(?=\S)", _text(path)):
                word, _, body = entry.partition("\n")
                body = re.sub(r"\[(?!\d)[^\]]*\]|[{}]", "", re.sub(r"^ [^\n]*\n", "", body))
                found = prose(re.sub(r"^\d\. ", "", text) for text in paragraphs(body))
                if found:
                    yield "\n".join([f"{clean(word)}: {found[0]}", *found[1:]])

    yield from _bundle(entries(), "entries")


def devil(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The Devil's Dictionary: definitions in prose and verse."""

    def entries() -> Iterator[str]:
        for _, path in _files(folder, "devil.dict.dz"):
            for entry in re.split(r"\n\n(?=[A-Z][A-Z' -]+, )", _text(path))[1:]:
                parts = []
                for block in re.split(r"\n\s*\n", entry.strip("\n")):
                    verse = block.startswith(" ")
                    parts.append(clean_lines(block) if verse else clean(block))
                yield "\n".join(part for part in parts if part)

    yield from _bundle(entries(), "entries")


# What other people would rather not read in a demo.
_RUDE = frozenset(
    """drugs ethnic men-women zippy ascii-art knghtbrd songs-poems linuxcookie perl debian magic medicine news nethack work
    pratchett""".split()
)


def fortunes(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Quotations and sayings; those with long lines are joined, verse and dialogue keep theirs."""
    for name, path in _files(folder, ""):
        if "." in path.name or path.name in _RUDE or "off" in path.parent.name or path.parent.name != "fortunes":
            continue
        yield from _bundle(_sayings(_text(path)), name.rsplit("/", 1)[-1])


def _sayings(text: str) -> Iterator[str]:
    for saying in re.split(r"(?m)^%.*$", text):
        body, _, by = saying.partition("\t\t--")
        lines = body.strip("\n").splitlines()
        wrapped = len(lines) > 1 and sum(map(len, lines[:-1])) >= 55 * (len(lines) - 1)
        body = clean(body) if wrapped or len(lines) <= 1 else clean_lines(body)
        letters = sum(c.isalpha() or c.isspace() for c in body)
        if 40 <= len(body) <= 1500 and letters >= 0.88 * len(body) and not re.search(r"[{}<>\\|_=~^]", body):
            by = clean(by)
            yield f"{body}\n-- {by}" if 0 < len(by) <= 80 else body


# --- stories told in games ---------------------------------------------------------------------------------------------


def wesnoth(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The campaigns of Battle for Wesnoth by scenario: what the story tells and the characters say, in their order."""
    for name, path in _files(folder, ".cfg"):
        found = []
        for key, text in re.findall(r'\b(story|message|description|text|note)\s*=\s*_\s*"((?:[^"]|"")*)"', _text(path)):
            text = re.sub(r"<[^>]*>|^\w+\^", "", text.replace('""', '"'))
            for part in paragraphs(text.replace("\n", "\n\n")):
                if key in ("message", "story", "text") or is_prose(part):
                    found.append(part)
        yield name.rsplit("/data/", 1)[-1], [text for text in found if _is_speech(text)]


def _is_speech(text: str) -> bool:
    return len(text) >= 12 and not re.search(r"[$|{}<>_\\=]", text) and " " in text


def endless_sky(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Endless Sky's conversations, one document per mission, and the descriptions of its planets and ships."""
    for name, path in _files(folder, ".txt"):
        for number, block in enumerate(re.split(r"\n(?=\S)", _text(path))):
            told = re.findall(r"(?m)^\s*(?:description |dialog |spaceport |log .*?)?`([^`]+)`", block)
            told += re.findall(r'(?m)^\s*(?:description|log|spaceport) "([^"]{60,})"', block)
            told = [
                re.sub(r"<(first|last|ship|planet|destination|system|origin|npc|commodity)>", _stand_in, text)
                for text in told
            ]
            found = prose((text.replace("\t", " ") for text in told if "<" not in text), shortest=50)
            yield f"{name.rsplit('/data/', 1)[-1]} {number:04}", found


def _stand_in(match: re.Match[str]) -> str:
    names = {
        "first": "Alex",
        "last": "Morgan",
        "ship": "Swallow",
        "commodity": "grain",
        "npc": "Heron",
        "system": "Sol",
    }
    return names.get(match[1], "Earth")


def crawl(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Dungeon Crawl's descriptions of monsters, places, gods and things, and the quotations that go with them."""

    def entries(path: Path) -> Iterator[str]:
        for entry in re.split(r"(?m)^%%%%.*$", _text(path)):
            head, _, body = re.sub(r"(?m)^#.*\n?", "", entry).strip("\n").partition("\n\n")
            if found := prose(paragraphs(body)):
                word = clean(head)
                yield "\n".join(
                    [
                        f"{word}: {found[0]}"
                        if word[:1].isalpha() and ":" not in word and "\n" not in head and "_" not in word
                        else found[0],
                        *found[1:],
                    ]
                )

    for name, path in _files(folder, ".txt"):
        if path.parent.name in ("descript",):
            yield from _bundle(entries(path), name.rsplit("/", 1)[-1])


def cataclysm(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Cataclysm's notes, diaries, radio talk, dialogue and descriptions, by file."""
    keys = {"text", "description", "dynamic_line", "offer", "advice", "success", "info", "accepted", "str", "yes", "no"}

    def told(node, key: str = "") -> Iterator[str]:
        if isinstance(node, dict):
            for name, value in node.items():
                yield from told(value, name if name not in ("str", "yes", "no") else (key or name))
        elif isinstance(node, list):
            for value in node:
                yield from told(value, key)
        elif isinstance(node, str) and key in keys:
            yield re.sub(r"</?color[^>]*>", "", node).replace("\n", " ")

    for name, path in _files(folder, ".json"):
        found = prose((text for text in told(json.loads(_text(path))) if "<" not in text), shortest=60)
        for number in range(0, len(found), 40):
            yield f"{name.rsplit('/json/', 1)[-1]} {number // 40:03}", found[number : number + 40]


# --- handbooks and documentation -----------------------------------------------------------------------------------------


_NOT_TEXT = (
    "//script|//style|//pre|//table|//nav|//header|//footer|//form|//figure|//dl[@class='toc']|//sup|//svg"
    "|//div[@class='navheader' or @class='navfooter' or @class='toc' or @class='sphinxsidebar' or @class='footer'"
    " or @class='related' or contains(@class,'highlight') or contains(@class,'legalnotice') or @class='footnotes']"
    "|//ul[contains(@class,'docnav')]|//a[@class='headerlink']"
)


def html(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The prose of HTML pages, one document a page: paragraphs and long list items, no code, tables or navigation."""
    import lxml.html

    for name, path in _files(folder, ".html", ".htm", ".html.gz"):
        try:
            page = lxml.html.document_fromstring(_text(path).encode(), parser=lxml.html.HTMLParser(encoding="utf-8"))
        except lxml.etree.ParserError:  # an empty file
            continue
        for paragraph in page.xpath("//div[@class='para']"):  # Publican's, which Debian's handbooks are made with
            paragraph.tag = "p"
        yield name, _blocks(page, _NOT_TEXT, ("p", "li", "dd", "blockquote"))


def xml(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The prose of Mallard and DocBook help pages."""
    import lxml.etree

    parser_options = dict(recover=True, resolve_entities=False, no_network=True, remove_comments=True)
    for name, path in _files(folder, ".page", ".xml", ".docbook"):
        if path.name.startswith(("legal", "fdl", "gfdl")):
            continue
        page = lxml.etree.fromstring(_text(path).encode(), lxml.etree.XMLParser(**parser_options))
        if page is not None:
            for node in page.iter():
                if isinstance(node.tag, str):
                    node.tag = lxml.etree.QName(node).localname
            skip = "//code[ancestor::screen]|//screen|//programlisting|//info|//articleinfo|//bookinfo|//table|//legalnotice"
            yield name, _blocks(page, skip, ("p", "para"))


def _blocks(page, skip: str, tags: tuple[str, ...]) -> list[str]:
    for node in page.xpath(skip):
        node.drop_tree() if hasattr(node, "drop_tree") else _drop(node)
    nested = "|".join(f".//{tag}" for tag in (*tags, "ul", "ol", "dl", "itemizedlist", "orderedlist"))
    candidates = []
    for node in page.iter(*tags):
        if not node.xpath(nested):
            candidates.append("".join(node.itertext()))
    return prose(candidates, shortest=60)


def _drop(node) -> None:
    parent, tail = node.getparent(), node.tail or ""
    if parent is not None:
        before = node.getprevious()
        if before is not None:
            before.tail = (before.tail or "") + tail
        else:
            parent.text = (parent.text or "") + tail
        parent.remove(node)


def pod(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The prose of Perl's own manual pages."""
    for name, path in _files(folder, ".pod"):
        text = re.sub(r"(?ms)^=(?:begin|for)\b.*?^=(?:end\b.*?$|cut\b)", "", _text(path))
        blocks = [block for block in re.split(r"\n\s*\n", text) if not block.startswith(("=", " ", "\t"))]
        plain = []
        for block in blocks:
            block = re.sub(r"[XZ]<[^<>]*>", "", block)
            block = re.sub(r"[A-Z](<<+) (.*?) >>+", r"\2", block, flags=re.S)
            for _ in range(3):  # codes nest
                block = re.sub(r"L<(?:([^<>|]+)\|)?([^<>]*)>", lambda m: m[1] or m[2].strip('/"'), block)
                block = re.sub(r"[BCEFIS]<([^<>]*)>", r"\1", block)
            plain.append(block)
        yield name, prose(plain, shortest=60)
