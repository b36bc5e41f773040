"""A vocabulary for models that were never trained.

`none` is no tokenizer: token ids only. `bytes` is a byte-level BPE, so every text has tokens and every token a text:
256 single bytes, two spaces, `<bos>`, `<eos>`, and words ` w259`, ` w260`, ... that fill the vocabulary up. No text is
tokenised to those words, but a model may say them.
"""

from __future__ import annotations

import gguf

KINDS = ("none", "bytes")
BOS = 257
EOS = 258
FIRST_WORD = 259


def add_keys(writer: gguf.GGUFWriter, kind: str, vocab: int) -> None:
    """Adds the `tokenizer.ggml.*` keys.

    Raises:
        ValueError: `kind` is not in `KINDS`, or `vocab` has no room for the bytes.
    """
    if kind == "none":
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(vocab)
        return
    if kind != "bytes":
        raise ValueError(f"unknown tokenizer {kind!r}; known: {', '.join(KINDS)}")
    if vocab < FIRST_WORD:
        raise ValueError(f"the bytes tokenizer needs a vocabulary of at least {FIRST_WORD} tokens, not {vocab}")

    letters = _byte_letters()
    space = letters[ord(" ")]
    tokens = [*letters, space + space, "<bos>", "<eos>", *(f"{space}w{i}" for i in range(FIRST_WORD, vocab))]
    types = [gguf.TokenType.NORMAL] * vocab
    types[BOS] = types[EOS] = gguf.TokenType.CONTROL

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{space} {space}"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte in GPT-2's vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
