"""What counts as clean English in the demo corpus: normal characters, whole paragraphs, real sentences.

Everything here is a pure function from text to text (or to a yes or no), so that it can be tested on a line or two.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator
from hashlib import blake2b

# Typography that ASCII says as well. What a reader could miss (accents, Greek, arrows) stays as it is.
_ASCII = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u00b4", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-"),
        **dict.fromkeys("\u2014\u2015", "--"),
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\ufeff\u200e\u200f", ""),
        "\u2026": "...",
        "\u00b6": " ",
        "\ufb01": "fi",
        "\ufb02": "fl",
    }
)
_EMPHASIS = re.compile(r"(?<![\w_])_([^_\s](?:[^_]{0,200}[^_\s])?)_(?![\w_])")
_SPACE_BEFORE_MARK = re.compile(r"(?<=\w) +(?=[,;:.?!](?:\s|$))")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_SENTENCE_START = re.compile(r"""["'(]*[A-Z0-9]""")
_SENTENCE_END = re.compile(r"""[.!?:;…]['")\]]*$""")
_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
_CODE_MARKS = re.compile(r"[<>{}\[\]|\\=_@#$%^~`/*+&]")
_ADDRESS = re.compile(r"https?://|www\.|ftp://|\S@\S+\.\w", re.I)
_GLUED_NUMBERS = re.compile(r"\d{4,}|\d+\.\d+\.\d+|0x[0-9a-f]+", re.I)

# Words no stretch of English does without; a paragraph with hardly any of them is a list, a table or another language.
_COMMON = frozenset(
    """a all an and any are as at be been but by can could do for from had has have he her him his how i if in into is it
    its may me more my no not of on one only or our out shall she should so some such than that the their them then there
    these they this thou thy to unto up upon us was we were what when where which who will with would you your""".split()
)


def clean(text: str) -> str:
    """One paragraph on one line: NFC, ASCII quotes and dashes, single spaces, emphasis marks of plain-text books gone."""
    text = unicodedata.normalize("NFC", text.translate(_ASCII))
    text = " ".join(_CONTROL.sub(" ", text).split())
    return _SPACE_BEFORE_MARK.sub("", _EMPHASIS.sub(r"\1", text))


def clean_lines(text: str) -> str:
    """Like `clean`, for verse: line ends stay."""
    return "\n".join(line for line in map(clean, text.splitlines()) if line)


def paragraphs(text: str) -> Iterator[str]:
    """The hard-wrapped paragraphs of `text` (blank lines between), each cleaned and joined into one line."""
    for block in re.split(r"\n\s*\n", textwrap.dedent(text)):
        if joined := clean(block):
            yield joined


def is_prose(paragraph: str, *, shortest: int = 40) -> bool:
    """Whether a cleaned paragraph reads as English sentences, rather than code, a table row, a link list or a title."""
    if len(paragraph) < shortest or not _SENTENCE_START.match(paragraph) or not _SENTENCE_END.search(paragraph):
        return False
    words = _WORD.findall(paragraph)
    if len(words) < 6 or _ADDRESS.search(paragraph):
        return False
    common = sum(word.lower() in _COMMON for word in words)
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return (
        common >= 0.22 * len(words)
        and letters >= 0.88 * len(paragraph)
        and len(_CODE_MARKS.findall(paragraph)) <= 0.012 * len(paragraph)
        and len(_GLUED_NUMBERS.findall(paragraph)) <= len(words) / 40
        and sum(word.isupper() and len(word) > 1 for word in words) <= 0.25 * len(words)
    )


def prose(candidates: Iterable[str], *, shortest: int = 40) -> list[str]:
    """The candidates that read as English, cleaned, without what immediately repeats."""
    kept: list[str] = []
    for candidate in candidates:
        paragraph = clean(candidate)
        if is_prose(paragraph, shortest=shortest) and paragraph not in kept[-3:]:
            kept.append(paragraph)
    return kept


def fingerprint(paragraph: str) -> bytes:
    """Equal for paragraphs that differ in case, punctuation and spaces only."""
    return blake2b(re.sub(r"[\W_]+", "", paragraph.lower()).encode(), digest_size=12).digest()


def position(seed: int, name: str) -> float:
    """A place in [0, 1) that depends on the seed and the name alone: stable choice, whatever else the corpus holds."""
    return int.from_bytes(blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "big") / 2**64
