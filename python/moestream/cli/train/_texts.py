"""Texts that commands of `moestream train` read: files of text, or of token ids as NumPy stores them."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...errors import OptionError, TrainingError

__all__ = ["layers", "read_texts", "require_packages", "tokenised"]

Text = bytes | list[int]


def read_texts(paths: Sequence[str | os.PathLike[str]]) -> list[Text]:
    """A text of each file: its bytes, or the token ids of a `.npy` file.

    Raises:
        OptionError: A file cannot be read, is empty, or holds no token ids.
    """
    return [_text(Path(path)) for path in paths]


def _text(path: Path) -> Text:
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)  # mapped: its header may lie about its size
            if not isinstance(tokens, np.ndarray):
                raise OptionError(f"{path}: holds several arrays, not one of token ids")
            if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
                raise OptionError(f"{path}: is {tokens.dtype} {tokens.shape}, no row of token ids")
            return tokens.tolist()
        text = path.read_bytes()
    except OSError as exc:
        raise OptionError(f"cannot read the text {path}: {exc.strerror or exc}") from exc
    except ValueError as exc:
        if isinstance(exc, OptionError):
            raise
        raise OptionError(f"{path}: no NumPy file of token ids: {exc}") from exc
    if not text:
        raise OptionError(f"the text {path} is empty: leave it out")
    return text


def tokenised(texts: Sequence[Text], folder: str | os.PathLike[str]) -> list[list[int]]:
    """The tokens of texts, by the tokenizer in a Hugging Face folder.

    Raises:
        TrainingError: There is none.
    """
    if all(isinstance(text, list) for text in texts):
        return [text for text in texts if isinstance(text, list)]
    from transformers import AutoTokenizer

    if not any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise TrainingError(
            f"{folder}: has no tokenizer (tokenizer.json or tokenizer.model); add it, or give token ids in .npy files"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(os.fspath(folder), local_files_only=True)
    except Exception as exc:  # of many kinds, and of the package tokenizers plain ones
        raise TrainingError(
            f"{folder}: transformers cannot load its tokenizer: {exc}; give token ids in .npy files"
        ) from exc
    return [
        text
        if isinstance(text, list)
        else tokenizer(text.decode("utf-8", "replace"), add_special_tokens=False, verbose=False)["input_ids"]
        for text in texts
    ]


def layers(value: str | None) -> list[int] | None:
    """Layers of an option like "6-38" or "2,4,6-9".

    Raises:
        OptionError: It is none.
    """
    if value is None:
        return None
    found: list[int] = []
    for part in value.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not re.fullmatch(r"\d{1,4} \d{1,4}", f"{first} {last}", re.ASCII) or int(last) < int(first):
            raise OptionError(f"--owners {value}: give layers like 6-38 or 2,4,6-9")
        found += range(int(first), int(last) + 1)
    return sorted(set(found))


def require_packages(*names: str) -> None:
    """Raises TrainingError unless packages of the extra `train` are there."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise TrainingError(f"training needs {', '.join(missing)}: pip install 'moestream[train]'")
