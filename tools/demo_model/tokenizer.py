"""The demo models' tokenizer: a byte-level BPE that llama.cpp reproduces token by token.

    train("corpus", "tokenizer.json")
    tokenizer = load("tokenizer.json")
    documents = encode_documents(tokenizer, ["Call me Ishmael.", ...])

Text is cut into words by the expression that llama.cpp knows as "qwen2", then merged within words. Nothing is normalised, so
decoding gives back every text. `<|endoftext|>`, token 0, ends each document; in a stream of documents it therefore also
stands before each, and llama.cpp puts it before a prompt.

The two disagree only beside the letters and digits that Unicode 16 added in 2024, 4,382 of them and most of them hieroglyphs:
llama.cpp's tables do not know these yet.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
from collections.abc import Iterable, Iterator

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from .files import completed

__all__ = ["END", "END_ID", "PRE_TOKENIZER", "VOCABULARY", "encode_documents", "load", "train"]

VOCABULARY = 8192
END = "<|endoftext|>"
END_ID = 0
PRE_TOKENIZER = "qwen2"
"""The value of `tokenizer.ggml.pre`: the name of `_WORDS` in llama.cpp."""

# Contractions in either case; letters with the one sign before them; digits one by one, which keeps numbers out of a small
# vocabulary; signs; line ends; spaces but the last, which belongs to the next word.
_WORDS = (
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
_LONGEST_TOKEN = 16  # letters; else rulers and indentation take part of the vocabulary
_BATCH = 256  # documents


def train(
    corpus: str | os.PathLike[str], out_file: str | os.PathLike[str], *, vocabulary: int = VOCABULARY
) -> tokenizers.Tokenizer:
    """Learns the merges from `train.jsonl` in the folder `corpus`, and writes them as a `tokenizer.json`.

    Equal documents give an equal file, byte for byte.

    Raises:
        ValueError: The documents do not hold enough different text for the vocabulary.
        OSError: The corpus cannot be read or the file not written; nothing half-written is left behind.
    """
    result = tokenizers.Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    result.decoder = decoders.ByteLevel()
    result.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, END_ID)])
    result.train_from_iterator(
        _texts(pathlib.Path(corpus) / "train.jsonl"),
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            max_token_length=_LONGEST_TOKEN,
            show_progress=False,
        ),
    )
    if result.get_vocab_size() < vocabulary:
        raise ValueError(
            f"{corpus} has text for a vocabulary of {result.get_vocab_size()} tokens only, and {vocabulary} are wanted"
        )

    with completed(pathlib.Path(out_file)) as part:
        part.write_text(result.to_str(pretty=True), encoding="utf-8")
    return load(out_file)


def load(file: str | os.PathLike[str]) -> tokenizers.Tokenizer:
    """A trained tokenizer, to which `<|endoftext|>` in a text is text and not the end of a document.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no tokenizer.
    """
    text = pathlib.Path(file).read_text(encoding="utf-8")
    try:
        result = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{file} is no tokenizer: {error}") from error
    result.encode_special_tokens = True
    return result


def encode_documents(tokenizer: tokenizers.Tokenizer, texts: Iterable[str]) -> list[np.ndarray]:
    """Token ids of each document, uint16, the last of each `END_ID`."""
    documents: list[np.ndarray] = []
    remaining = iter(texts)
    while batch := list(itertools.islice(remaining, _BATCH)):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            documents.append(np.array([*encoding.ids, END_ID], dtype=np.uint16))
    return documents


def _texts(documents: pathlib.Path) -> Iterator[str]:
    with documents.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]
