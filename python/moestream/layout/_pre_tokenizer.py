"""How a `tokenizer.json` cuts text into words, by the name that llama.cpp has for it.

llama.cpp's converter knows published tokenizers by a hash of what they make of a text, and refuses all others, also those that cut
as a known one does. Here the description of the cutting is compared instead, and must be equal.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["PreTokenizer", "recognise"]


@dataclass(frozen=True)
class PreTokenizer:
    """A way of cutting text into words.

    Attributes:
        name: Value of `tokenizer.ggml.pre`.
        why: What it was recognised by.
    """

    name: str
    why: str


# What the published files have, and the same without the group for either case, which not every engine knows.
_CONTRACTIONS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]",
)
_BYTES = ("ByteLevel", False, False)  # add_prefix_space, use_regex
_BYTES_OF_WORDS = ("ByteLevel", False, True)  # with GPT-2's expression


def _words(digits: str) -> list[tuple[tuple[Any, ...], ...]]:
    """The steps of those that first split by an expression, of which only `digits` differs."""
    rest = rf"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return [(("Split", contractions + rest, "Isolated", False), _BYTES) for contractions in _CONTRACTIONS]


# Steps, and whether a word that is a token is taken without merging (`ignore_merges`), to name and description.
_KNOWN: dict[tuple[tuple[tuple[Any, ...], ...], bool], tuple[str, str]] = {
    ((_BYTES_OF_WORDS,), False): ("gpt-2", "GPT-2's ByteLevel"),
    ((("Digits", True), _BYTES_OF_WORDS), False): ("starcoder", "single digits, then GPT-2's ByteLevel"),
    **{(steps, False): ("qwen2", "Qwen2's Split expression") for steps in _words(r"\p{N}")},
    **{(steps, True): ("llama-bpe", "Llama 3's Split expression") for steps in _words(r"\p{N}{1,3}")},
    **{(steps, False): ("dbrx", "Llama 3's Split expression, all words merged") for steps in _words(r"\p{N}{1,3}")},
}


def recognise(file: Path) -> PreTokenizer | None:
    """The pre-tokenizer of a byte-level BPE; None for any other tokenizer, and if it is not exactly one that is known here.

    Raises:
        ValueError: The file is no JSON.
        OSError: It cannot be read.
    """
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    try:
        model, steps = tokenizer["model"], _steps(tokenizer["pre_tokenizer"])
        plain = model["type"] == "BPE" and not any(
            model.get(key) for key in ("byte_fallback", "continuing_subword_prefix", "dropout", "end_of_word_suffix")
        )
        normalizer = (tokenizer.get("normalizer") or {}).get("type")
        known = _KNOWN.get((steps, bool(model.get("ignore_merges"))))
    except (KeyError, TypeError, AttributeError):
        return None
    if not plain or known is None or normalizer not in (None, "NFC"):
        return None
    name, why = known
    return PreTokenizer(name, why + ("; llama.cpp leaves out its NFC" if normalizer else ""))


def _steps(pre_tokenizer: dict[str, Any]) -> tuple[tuple[Any, ...], ...]:
    """What counts of each step; a step of another kind is only its kind, which is in no entry."""
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return tuple(step for part in pre_tokenizer["pretokenizers"] for step in _steps(part))
    if kind == "Split":
        pattern = pre_tokenizer["pattern"].get("Regex")
        return ((kind, pattern, pre_tokenizer["behavior"], pre_tokenizer["invert"]),)
    if kind == "Digits":
        return ((kind, pre_tokenizer["individual_digits"]),)
    if kind == "ByteLevel":
        return ((kind, pre_tokenizer["add_prefix_space"], pre_tokenizer.get("use_regex", True)),)
    return ((kind,),)
