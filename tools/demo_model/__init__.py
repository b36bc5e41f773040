"""The demo models that ship with the package: their text, tokenizer, shape, training and export to GGUF."""
