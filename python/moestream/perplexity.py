"""How well a model predicts a text, and how far it is from a base run: llama-perplexity's method and statistics, also streamed.

The text is cut into chunks of `context` tokens, each evaluated on its own with the model's begin token in place of its first. The
first half of a chunk and one more token are context alone; of those behind, the logarithm of the probability of each is counted.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from ._capture import RoutingRecorder
from ._evaluation import Evaluation, evaluating, require_tokens
from ._ladder import Chunk, Divergence, Estimate, Scored, chunk_of, divergence_of
from ._logits_file import LogitsFile, require_new, scored_tokens, size_bytes, writing_logits
from ._mismatch import RoutingDifference, RoutingMismatch, difference, require_same_layers, require_same_tokens
from ._quality import divergence_sums, log_softmax
from .errors import MeasurementError, OptionError
from .llama import Llama
from .memory import format_size
from .model import describe
from .stats import ExpertStats
from .trace import RoutingTrace

__all__ = ["Chunk", "Divergence", "Estimate", "PerplexityReport", "RoutingMismatch", "evaluate"]

CONTEXT = 512  # llama-perplexity's
_SHALLOWEST = -16.0  # log of probabilities of the base under which llama-perplexity counts no divergence
_VALUES_AT_ONCE = 1 << 20  # of float64, in each of a few arrays
_CACHE_AWARE_TOKENS = 8  # of a batch at most (MOST_TOKENS in csrc/routing.c)


@dataclass(frozen=True)
class PerplexityReport:
    """What :func:`evaluate` found. Times are in seconds."""

    context: int
    tokens_at_once: int
    chunks_wanted: int
    chunks: tuple[Chunk, ...]
    """Those that were evaluated, each with the figures of all up to it."""
    tokens: int
    """Scored."""
    perplexity: Estimate
    divergence: Divergence | None
    """From the base, if one was given."""
    routing: RoutingMismatch | None
    """None of a model that is not streamed."""
    stats: ExpertStats | None
    """Of the evaluation alone."""
    seconds: float
    notes: tuple[str, ...]
    """What to know about these figures, in sentences."""

    @property
    def partial(self) -> bool:
        """Was it stopped before its last chunk?"""
        return len(self.chunks) < self.chunks_wanted

    def as_dict(self) -> dict[str, Any]:
        """Everything, derived figures included, ready for JSON."""
        routing = self.routing and asdict(self.routing) | {
            "replaced_share": self.routing.replaced_share,
            "left_out": self.routing.left_out,
        }
        stats = self.stats and self.stats.as_dict()
        return asdict(self) | {"partial": self.partial, "routing": routing, "stats": stats}


class _Stopped(Exception):
    """`should_stop` said so."""


@dataclass(frozen=True)
class _Text:
    """A text in chunks."""

    tokens: npt.NDArray[np.int32]
    """[chunks * context], of the text."""
    inputs: npt.NDArray[np.int32]
    """The same as the model gets them."""
    context: int

    @property
    def chunks(self) -> int:
        return len(self.tokens) // self.context


def evaluate(
    llm: llama_cpp.Llama,
    text: str | bytes | Sequence[int] | None = None,
    *,
    context: int | None = None,
    chunks: int | None = None,
    tokens_at_once: int | None = None,
    base: str | os.PathLike[str] | None = None,
    save_base: str | os.PathLike[str] | None = None,
    routing_base: str | os.PathLike[str] | None = None,
    save_routing: str | os.PathLike[str] | None = None,
    on_note: Callable[[str], None] = lambda note: None,
    on_chunk: Callable[[Chunk], None] = lambda chunk: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> PerplexityReport:
    """The perplexity of a text, and the distance from a base run on the same.

    >>> evaluate(llm, Path("text.txt").read_text(), save_base="base.kld").perplexity
    >>> evaluate(changed, base="base.kld").divergence.kl

    The model computes in a context of its own, see :mod:`moestream._evaluation`.

    Args:
        llm: A model of ours or of llama-cpp-python.
        text: A text, or its tokens with all that begins it. Without one, the tokens of `base`.
        context: Tokens of a chunk; by default those of `base`, else 512.
        chunks: How many to evaluate at most, from the first; by default all, or those of `base`.
        tokens_at_once: Tokens that are computed together, by default the `n_ubatch` of `llm`. 1 computes as decoding does.
            Each takes 8 bytes a token of the vocabulary meanwhile: 512 of 150,000 take 600 MB.
        base: A file of a base run's logits, of `save_base` or of llama-perplexity's ``--kl-divergence-base``.
        save_base: Where to write such a file: 2 bytes a scored token and token of the vocabulary.
        routing_base: A routing trace to compare the experts taken with, of `save_routing` on the same tokens.
        save_routing: Where to write such a trace.
        on_note: Is told what to know beforehand, in sentences.
        on_chunk: Is told the figures after each chunk.
        progress: Is told how many tokens of how many are done.
        should_stop: Is asked between two batches. What was begun is not counted, and no file written.

    Raises:
        OptionError: The base is of other tokens, another context or vocabulary, or damaged; the text is too short; options
            that make no sense.
        OutputError: A file to write exists, or cannot be written.
        TraceError: `routing_base` is no trace, or `save_routing` cannot be written.
        MeasurementError: A probability is no number, or no chunk was done before `should_stop`.
        ExpertReadError: Experts could not be read.
        MoestreamError: The model is closed.
    """
    engine = llm._engine if isinstance(llm, Llama) else None
    if engine is not None:
        engine.require_open()
    if base is not None and save_base is not None:
        raise OptionError(f"{save_base}: a base is either compared with or written: give one of base and save_base")
    if engine is None and (routing_base is not None or save_routing is not None):
        raise OptionError("only streamed models are traced: load this one with expert_streaming=True")
    file = None if base is None else _base_of(llm, base, context)
    cut = _cut(llm, text, file, context=context, chunks=chunks)
    tokens_at_once = min(llm.context_params.n_ubatch if tokens_at_once is None else tokens_at_once, cut.context)
    if tokens_at_once < 1:
        raise OptionError(f"tokens_at_once={tokens_at_once}: at least one token is needed")
    trace = None if routing_base is None else RoutingTrace.read(routing_base)
    if trace is not None:
        require_same_tokens(trace, routing_base, cut.inputs, chunks=cut.chunks)
    if save_base is not None:
        require_new(save_base)
    notes = tuple(_notes(llm, cut, tokens_at_once, save_base))
    for note in notes:
        on_note(note)

    recorder = RoutingRecorder() if trace is not None or save_routing is not None else None
    before = None if engine is None else llm.expert_stats()
    started = time.perf_counter()
    progress(0, len(cut.inputs))
    with contextlib.ExitStack() as stack:
        # In this order: a text that is stopped leaves no file, and frees the context first.
        stack.enter_context(contextlib.suppress(_Stopped))
        run = _Run(cut, tokens_at_once, file, None, recorder, progress, should_stop)
        if save_base is not None:
            writing = writing_logits(save_base, cut.tokens, context=cut.context, n_vocab=llm.n_vocab())
            run.write = stack.enter_context(writing)
        on_node = None if recorder is None else recorder.look
        evaluation = stack.enter_context(
            evaluating(llm, context=cut.context, tokens_at_once=tokens_at_once, on_node=on_node)
        )
        for number in range(cut.chunks):
            run.evaluate(evaluation, number)
            if trace is not None:
                require_same_layers(trace, routing_base, recorder.layers)
            on_chunk(run.chunks[-1])
    seconds = time.perf_counter() - started
    if not run.chunks:
        raise MeasurementError("stopped before the first chunk was done: there is nothing to report")

    against = None
    if recorder is not None:
        if trace is not None:
            against = difference(trace, run.routing_taken())
        if save_routing is not None and len(run.chunks) == cut.chunks:
            pieces = np.split(cut.inputs, cut.chunks)
            recorder.trace(llm, pieces, tokens_at_once=tokens_at_once, source="moestream eval").write(save_routing)
    stats = None if engine is None else llm.expert_stats().since(before)
    return PerplexityReport(
        context=cut.context,
        tokens_at_once=tokens_at_once,
        chunks_wanted=cut.chunks,
        chunks=tuple(run.chunks),
        tokens=run.chunks[-1].tokens,
        perplexity=run.chunks[-1].perplexity,
        divergence=None if file is None else divergence_of(Scored.together(run.scored)),
        routing=None if stats is None else _mismatch(llm, stats, len(run.chunks) * cut.context, against),
        stats=stats,
        seconds=seconds,
        notes=notes,
    )


def _mismatch(llm: Llama, stats: ExpertStats, tokens: int, against: RoutingDifference | None) -> RoutingMismatch:
    model = llm._engine.description  # with the number of experts used
    return RoutingMismatch(
        choices=tokens * len(model.moe_layers) * model.experts_used,
        cache_aware=llm._engine.options.cache_aware,
        replaced=stats.replaced,
        experts_used=model.experts_used,
        experts_of_model=describe(model.path).experts_used,
        predictions=tuple(found for found in stats.predictions if found.layers),
        against_base=against,
    )


# What is evaluated


def _base_of(llm: llama_cpp.Llama, base: str | os.PathLike[str], context: int | None) -> LogitsFile:
    file = LogitsFile.read(base)
    if file.n_vocab != llm.n_vocab():
        raise OptionError(
            f"{base}: is of a model with {file.n_vocab} tokens, and this one has {llm.n_vocab()}: compare models of the same vocabulary"
        )
    if context not in (None, file.context):
        raise OptionError(
            f"{base}: was made with a context of {file.context} tokens, not {context}: give -c {file.context}, or leave it out"
        )
    return file


def _cut(
    llm: llama_cpp.Llama,
    text: str | bytes | Sequence[int] | None,
    file: LogitsFile | None,
    *,
    context: int | None,
    chunks: int | None,
) -> _Text:
    """The chunks to evaluate. Raises OptionError if there are none, or not those of the base."""
    if chunks is not None and chunks < 1:
        raise OptionError(f"chunks={chunks}: at least one is needed")
    context = file.context if file is not None else CONTEXT if context is None else context
    if context < 3:
        raise OptionError(f"context={context}: at least 3 tokens are needed, of which one is predicted")
    if text is None and file is None:
        raise OptionError("there is no text to evaluate: give one, or a base run, which holds its tokens")
    if text is None:
        tokens = file.tokens
    else:
        tokens = _tokens(llm, text)
        if len(tokens) < 2 * context:
            smaller = f", or a smaller context (-c {len(tokens) // 2})" if len(tokens) >= 6 else ""
            raise OptionError(
                f"the text is too short: it has {len(tokens)} of the at least {2 * context} tokens that a context of {context} needs: "
                f"take a longer one{smaller}"
            )
        if file is not None and not np.array_equal(tokens[: len(file.tokens)], file.tokens):
            raise OptionError(
                f"{file.path}: was made with another text: give the same, or none, which takes the base's tokens"
            )
    most = (len(tokens) if file is None else len(file.tokens)) // context
    tokens = tokens[: min(most, chunks or most) * context]
    inputs = tokens.copy()
    if llama_cpp.llama_vocab_get_add_bos(llama_cpp.llama_model_get_vocab(llm.model)):
        inputs[::context] = llm.token_bos()
    return _Text(tokens, inputs, context)


def _tokens(llm: llama_cpp.Llama, text: str | bytes | Sequence[int]) -> npt.NDArray[np.int32]:
    if isinstance(text, (str, bytes)):
        encoded = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return np.array(llm.tokenize(encoded, add_bos=True, special=False), np.int32)
    require_tokens(llm, text)
    return np.array(text, np.int32)


def _notes(
    llm: llama_cpp.Llama, cut: _Text, tokens_at_once: int, save_base: str | os.PathLike[str] | None
) -> Iterator[str]:
    if cut.context > (trained := llama_cpp.llama_model_n_ctx_train(llm.model)) > 0:
        yield f"the model was trained with {trained} tokens, and a chunk has {cut.context}"
    streaming = llm._expert_streaming if isinstance(llm, Llama) and llm._engine is not None else None
    if streaming and streaming.cache_aware:
        if tokens_at_once > _CACHE_AWARE_TOKENS:
            yield (
                f"cache-aware routing acts on up to {_CACHE_AWARE_TOKENS} tokens at once, and here {tokens_at_once} are computed together, "
                "so that hardly any of it shows: --tokens-at-once 1 computes as decoding does"
            )
        elif streaming.predictors:
            yield (
                "with cache-aware routing and reading ahead, figures depend on time and differ from run to run; --prefetch off makes them repeatable"
            )
    if streaming and llm._engine.options.prerouter == "route" and tokens_at_once > 1:
        yield (
            f"heads route what is decoded token by token, and here {tokens_at_once} are computed together, so that the model's own routers "
            "choose: --tokens-at-once 1 computes as decoding does"
        )
    if save_base is not None:
        size = size_bytes(context=cut.context, n_vocab=llm.n_vocab(), chunks=cut.chunks)
        yield f"{save_base} takes {format_size(size)}: {cut.chunks * scored_tokens(cut.context)} predictions of {llm.n_vocab()} tokens"


# A chunk


class _Run:
    """Chunks as they are evaluated.

    Attributes:
        write: Takes the logits of scored tokens, of a base run.
        chunks, scored: Of whole chunks.
    """

    def __init__(
        self,
        text: _Text,
        tokens_at_once: int,
        base: LogitsFile | None,
        write: Callable[[npt.NDArray[np.float32]], object] | None,
        recorder: RoutingRecorder | None,
        progress: Callable[[int, int], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self.write = write
        self.chunks: list[Chunk] = []
        self.scored: list[Scored] = []
        self._text, self._tokens_at_once, self._base, self._recorder = text, tokens_at_once, base, recorder
        self._progress, self._should_stop = progress, should_stop

    def evaluate(self, evaluation: Evaluation, number: int) -> None:
        """Evaluates the next chunk.

        Raises:
            _Stopped: It was broken off, and does not count.
        """
        context, parts = self._text.context, []
        start = number * context
        for begin in range(0, context, self._tokens_at_once):
            if self._should_stop():
                raise _Stopped
            batch = self._text.inputs[start + begin : start + min(begin + self._tokens_at_once, context)]
            evaluation.decode(batch, begin)
            if self._recorder is not None:
                self._recorder.end_batch(len(batch))
            parts += self._scored(evaluation, number, begin, len(batch))
            self._progress(start + begin + len(batch), len(self._text.inputs))
        self.scored.append(Scored.together(parts))
        self.chunks.append(chunk_of(number + 1, Scored.together(self.scored)))

    def routing_taken(self) -> npt.NDArray[np.int32]:
        """Experts [tokens, layers, top_k] of whole chunks."""
        tokens = len(self.chunks) * self._text.context
        return np.concatenate(self._recorder.experts)[:tokens]

    def _scored(self, evaluation: Evaluation, number: int, begin: int, n_tokens: int) -> Iterator[Scored]:
        """Of the tokens evaluated last, those behind position `begin`, a few MiB at once."""
        context = self._text.context
        first = context // 2  # whose prediction is the first that counts
        logits = evaluation.logits()
        rows_at_once = max(1, _VALUES_AT_ONCE // evaluation.n_vocab)
        end = min(begin + n_tokens, context - 1)
        for at in range(max(begin, first), end, rows_at_once):
            count = min(rows_at_once, end - at)
            rows = logits[at - begin : at - begin + count]
            came = self._text.tokens[number * context + at + 1 :][:count]
            base = None if self._base is None else self._base.log_probabilities(number, at - first, count)
            found = _compared(rows, came, base)
            if not (np.isfinite(found.nats).all() and np.isfinite(found.kl).all()):
                base_too = "" if self._base is None else f", or is {self._base.path}"
                raise MeasurementError(
                    f"chunk {number + 1}: a probability is no number: are weights damaged (moestream verify){base_too}?"
                )
            if self.write is not None:
                self.write(rows)
            yield found


def _compared(
    logits: npt.NDArray[np.float32], came: npt.NDArray[np.int32], base: npt.NDArray[np.float32] | None
) -> Scored:
    """Of rows [token, vocabulary], with the tokens that came behind."""
    each = np.arange(len(came))
    log_q = log_softmax(logits)
    nats = -log_q[each, came]
    if base is None:
        return Scored(nats, *(np.empty(0) for _ in range(4)))
    log_p = base.astype(np.float64)
    base_nats = -log_p[each, came]
    same_top = (logits.argmax(axis=1) == base.argmax(axis=1)).astype(np.float64)
    log_p[log_p <= _SHALLOWEST] = -np.inf
    return Scored(nats, base_nats, divergence_sums(log_p, log_q), np.exp(-nats) - np.exp(-base_nats), same_top)
