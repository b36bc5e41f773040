"""Evaluates texts in a context of their own, with the logits of every token.

The context is as that of the model's object but for its size, its adapters are applied, and it is freed afterwards. For that
time it takes memory: a KV cache of `context` tokens, and logits of `tokens_at_once`. What the object has evaluated before
stays as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from .errors import ModelError, OptionError

__all__ = ["Evaluation", "apply_adapters", "evaluating", "require_tokens"]

OnNode = Callable[[int, bool, Any], bool]
"""llama.cpp's callback on the nodes of its graph: (address of the tensor, asking, user data)."""


def require_tokens(llm: llama_cpp.Llama, tokens: Sequence[int]) -> None:
    """Raises OptionError unless the model has all these tokens."""
    if wrong := [token for token in tokens if not 0 <= token < llm.n_vocab()]:
        raise OptionError(f"token {wrong[0]} does not exist: this model has {llm.n_vocab()}")


def apply_adapters(llm: llama_cpp.Llama, ctx: Any) -> None:
    """Has a context of the model apply the LoRA adapters that its object has; a model of llama-cpp-python has at most one.

    Raises:
        ModelError: llama.cpp refuses them.
    """
    adapters = list(getattr(llm, "_adapters", ()))
    if llm._lora_adapter:
        adapters.append((llm._lora_adapter, llm.lora_scale))
    if not adapters:
        return
    pointers = (llama_cpp.llama_adapter_lora_p_ctypes * len(adapters))(*(adapter for adapter, _ in adapters))
    scales = (ctypes.c_float * len(adapters))(*(scale for _, scale in adapters))
    if llama_cpp.llama_set_adapters_lora(ctx, pointers, len(adapters), scales):
        raise ModelError(f"llama.cpp cannot apply the {len(adapters)} LoRA adapters of {llm.model_path}")


class Evaluation:
    """What :func:`evaluating` gives.

    Attributes:
        n_vocab: Tokens of the vocabulary.
    """

    def __init__(self, llm: llama_cpp.Llama, ctx: Any, batch: llama_cpp.llama_batch) -> None:
        self._ctx, self._batch, self.n_vocab = ctx, batch, llm.n_vocab()
        self._engine = getattr(llm, "_engine", None)
        self._sequences = self._engine.sequences() if self._engine is not None else None

    def decode(self, tokens: Sequence[int] | npt.NDArray[np.int32], position: int) -> None:
        """Evaluates at most `tokens_at_once` tokens from a position on; position 0 begins a new text.

        All tokens' logits are asked for, because llama.cpp leaves the others out of the last layer. Where heads route the
        model they do so here too, if the tokens come one by one.

        Raises:
            ExpertReadError: Experts could not be read.
        """
        if position == 0:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._ctx), True)
            if self._sequences is not None:
                self._sequences.forget()
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = int(token)
            batch.pos[i] = position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = True
        with contextlib.ExitStack() as stack:
            if self._engine is not None:
                stack.enter_context(self._engine.failures())
            if self._sequences is not None:
                stack.enter_context(self._sequences.announced(batch))
            if code := llama_cpp.llama_decode(self._ctx, batch):
                raise RuntimeError(f"llama_decode failed with {code} while a text was evaluated")

    def logits(self) -> npt.NDArray[np.float32]:
        """[token, vocabulary] of the tokens decoded last. The array is llama.cpp's: the next `decode` overwrites it."""
        rows = llama_cpp.llama_get_logits(self._ctx)
        return np.ctypeslib.as_array(rows, shape=(self._batch.n_tokens, self.n_vocab))


@contextlib.contextmanager
def evaluating(
    llm: llama_cpp.Llama, *, context: int, tokens_at_once: int, on_node: OnNode | None = None
) -> Iterator[Evaluation]:
    """A context of the model for texts of up to `context` tokens.

    Args:
        llm: A model of ours or of llama-cpp-python.
        context: Tokens of the longest text.
        tokens_at_once: Tokens computed together at most; 1 computes as decoding does.
        on_node: Is told of every node of the graph, and must outlive the context.

    Raises:
        OptionError: There is no memory for the context.
    """
    callback = llama_cpp.ggml_backend_sched_eval_callback(on_node or 0)
    params = type(llm.context_params).from_buffer_copy(llm.context_params)
    params.n_ctx = context
    params.n_batch = params.n_ubatch = tokens_at_once
    params.n_seq_max = 1
    params.embeddings = False
    params.cb_eval = callback
    params.cb_eval_user_data = None
    with contextlib.ExitStack() as stack:
        ctx = llama_cpp.llama_init_from_model(llm.model, params)
        if not ctx:
            raise OptionError(
                f"no memory for a second context of {context} tokens: take a smaller context, or free some"
            )
        stack.callback(llama_cpp.llama_free, ctx)
        apply_adapters(llm, ctx)
        batch = llama_cpp.llama_batch_init(tokens_at_once, 0, 1)
        stack.callback(llama_cpp.llama_batch_free, batch)
        yield Evaluation(llm, ctx, batch)
