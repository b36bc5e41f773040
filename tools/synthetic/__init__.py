"""Mixture-of-Experts GGUF models with random weights, of any size and of most architectures that llama.cpp knows.

For benchmarks (a 17 GB file that routes like a real model, in a minute) and tests (a file of 1 MB with a wanted
property). `architectures` says which hyper-parameters a model has, `tensors` asks llama.cpp which tensors follow from
them, `weights` draws the numbers, `tokenizer` makes a vocabulary, and `writer` puts all of it into a file.
"""
