"""Records the routing of a streamed model, through llama.cpp's callback on the nodes of its graph.

The callback is asked about every node before it is computed. For the product with an expert tensor, the choice of
experts is then already there: what we copy is the very tensor that the engine takes its experts from. The weights are
read where the graph multiplies by them (``ffn_moe_weighted``), so that all a model does to them is in.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from cffi import FFI

from ._evaluation import evaluating, require_tokens
from ._native import LIBRARY
from .errors import ModelError, OptionError
from .trace import RoutingTrace

if TYPE_CHECKING:
    from .llama import Llama

__all__ = ["GraphWatcher", "RoutingRecorder", "fingerprint", "record_routing", "require_streamed"]

_ffi = FFI()
_ffi.cdef(
    """
    struct ggml_tensor { /* ggml.h */
        int type;
        void * buffer;
        int64_t ne[4];
        size_t nb[4];
        int op;
        int32_t op_params[16];
        int32_t flags;
        struct ggml_tensor * src[10];
        struct ggml_tensor * view_src;
        size_t view_offs;
        char * data;
        char name[64];
        void * extra;
        char padding[8];
    };
    const char * ggml_get_name(const struct ggml_tensor * tensor);
    void * ggml_get_data(const struct ggml_tensor * tensor);
    size_t ggml_nbytes(const struct ggml_tensor * tensor);
    const char * ggml_op_desc(const struct ggml_tensor * tensor);
    """
)
_ggml = _ffi.dlopen(str(LIBRARY))  # which is linked against ggml
_F32, _I32 = 0, 26
_EXPERT_PRODUCT = re.compile(rb"blk\.(\d+)\.ffn_down_exps\.weight")
_WEIGHTED = re.compile(rb"ffn_moe_weighted-(\d+)")
_HASHED_BYTES = 2**20  # at each end of a file


def record_routing(
    llm: Llama,
    texts: Iterable[str | bytes | Sequence[int]],
    *,
    context: int | None = None,
    tokens_at_once: int | None = None,
    source: str = "",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RoutingTrace:
    """Evaluates texts and records which experts each of their tokens takes, in every layer.

    >>> llm = Llama("model.gguf", expert_streaming=True, n_ctx=512, verbose=False)
    >>> trace = record_routing(llm, [Path("a.txt").read_text(), Path("b.txt").read_text()], source="a.txt, b.txt")
    >>> trace.write("model.trace")

    The model computes in a context of its own, see :mod:`moestream._evaluation`.

    Args:
        llm: A model loaded with `expert_streaming`. The recording is part of its :meth:`Llama.expert_stats`.
        texts: Texts, or the tokens of texts. A text longer than `context` is cut, and its pieces are independent texts
            of the trace. If the model begins texts with a token of its own, each piece of a str or bytes gets it.
        context: Tokens of the longest piece; by default those of the context of `llm`.
        tokens_at_once: Tokens that are computed together; by default the `n_ubatch` of `llm`. 1 computes as decoding
            does, which with some kernels rounds differently from a prompt.
        source: Where the texts are from, for the trace.
        progress: Is told how many tokens of how many are done; what it raises ends the recording.

    Raises:
        OptionError: The model is not streamed, there is nothing to record, or a number makes no sense.
        ModelError: Its routing cannot be put into a trace.
        ExpertReadError: Experts could not be read.
    """
    context, tokens_at_once = require_streamed(llm, context, tokens_at_once, "traced")
    pieces = [piece for text in texts for piece in _pieces(llm, text, context)]
    if not pieces:
        raise OptionError("there is no text to record: give at least one that is not empty")
    context = max(map(len, pieces))
    tokens_at_once = min(tokens_at_once, context)

    total = sum(map(len, pieces))
    recorder = RoutingRecorder()
    progress(0, total)
    done = 0
    with evaluating(llm, context=context, tokens_at_once=tokens_at_once, on_node=recorder.look) as evaluation:
        for piece in pieces:
            for first in range(0, len(piece), tokens_at_once):
                batch = piece[first : first + tokens_at_once]
                evaluation.decode(batch, first)
                recorder.end_batch(len(batch))
                done += len(batch)
                progress(done, total)

    return recorder.trace(llm, pieces, tokens_at_once=tokens_at_once, source=source)


def require_streamed(llm: Llama, context: int | None, tokens_at_once: int | None, what: str) -> tuple[int, int]:
    """Tokens of the longest piece and of a batch: those given, or the model's own. `what` is done with it, for the message.

    Raises:
        OptionError: The model is not streamed, or a number is below 1.
        MoestreamError: The model is closed.
    """
    if llm._engine is None:
        raise OptionError(f"only streamed models are {what}: load this one with expert_streaming=True")
    llm._engine.require_open()
    context = llm.n_ctx() if context is None else context
    tokens_at_once = llm.context_params.n_ubatch if tokens_at_once is None else tokens_at_once
    for name, value in (("context", context), ("tokens_at_once", tokens_at_once)):
        if value < 1:
            raise OptionError(f"{name}={value}: at least one token is needed")
    return context, tokens_at_once


def fingerprint(paths: Iterable[Path]) -> str:
    """SHA-256 over each file's size (8 bytes, lowest first), its first MiB and its last, which may overlap.

    The first holds shapes and metadata, the last some weights. Models of 100 GB are told apart in a blink.
    """
    hashed = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        hashed.update(size.to_bytes(8, "little"))
        with open(path, "rb") as file:
            hashed.update(file.read(_HASHED_BYTES))
            file.seek(max(0, size - _HASHED_BYTES))
            hashed.update(file.read(_HASHED_BYTES))
    return hashed.hexdigest()


def _pieces(llm: Llama, text: str | bytes | Sequence[int], context: int) -> Iterator[npt.NDArray[np.int32]]:
    """The tokens of a text, in pieces of at most `context`."""
    begin: list[int] = []
    if isinstance(text, (str, bytes)):
        encoded = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        tokens: Sequence[int] = llm.tokenize(encoded, add_bos=False) if encoded else []
        if llama_cpp.llama_vocab_get_add_bos(llama_cpp.llama_model_get_vocab(llm.model)):
            begin = [llm.token_bos()]
            if context < 2 and tokens:
                raise OptionError(
                    f"context={context}: this model begins texts with a token of its own: at least 2 are needed"
                )
    else:
        tokens = text
        require_tokens(llm, tokens)
    step = context - len(begin)
    for first in range(0, len(tokens), step):
        yield np.array([*begin, *tokens[first : first + step]], np.int32)


class GraphWatcher:
    """Looks at nodes of a graph as they are computed; `look` is the `on_node` of `evaluating`.

    A subclass says which nodes it wants, and takes their results.
    """

    def __init__(self) -> None:
        self._failure: BaseException | None = None
        self._layout_checked = False

    def is_wanted(self, node: Any) -> bool:
        """Before a node is computed: is its result wanted?"""
        raise NotImplementedError

    def take(self, node: Any) -> None:
        """A wanted node was computed."""
        raise NotImplementedError

    def look(self, address: int, ask: bool, _: object) -> bool:
        """llama.cpp's callback: whether a node's result is wanted when `ask`, else whether to go on."""
        if self._failure is not None:  # an exception cannot cross C: raise_failure does
            return not ask
        try:
            node = _ffi.cast("struct ggml_tensor *", address)
            if not self._layout_checked:
                _check_layout(node)
                self._layout_checked = True
            if ask:
                return self.is_wanted(node)
            self.take(node)
            return True
        except BaseException as error:
            self._failure = error
            return not ask

    def raise_failure(self) -> None:
        """Raises what `look` could not, after a batch."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class RoutingRecorder(GraphWatcher):
    """Gathers, batch by batch, what each layer chose; its `look` is the `on_node` of :func:`moestream._evaluation.evaluating`.

    Attributes:
        layers: Numbers of the layers that chose experts, ascending.
        experts: Of each batch int32 [tokens, layers, top_k].
        weights: Of each batch float16, of the same shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[int] = []
        self.experts: list[npt.NDArray[np.int32]] = []
        self.weights: list[npt.NDArray[np.float16]] = []
        self._chosen: dict[int, npt.NDArray[np.int32]] = {}
        self._weighted: dict[int, npt.NDArray[np.float32]] = {}

    def is_wanted(self, node: Any) -> bool:
        layer = _layer_of_product(node)
        return bool(_WEIGHTED.fullmatch(_ffi.string(node.name))) or (layer is not None and layer not in self._chosen)

    def take(self, node: Any) -> None:
        # The first in a layer: grovemoe then takes other experts of the same name.
        if (layer := _layer_of_product(node)) is not None:
            self._chosen[layer] = _rows(node.src[2], _I32, 0)
        elif found := _WEIGHTED.fullmatch(_ffi.string(node.name)):
            self._weighted.setdefault(int(found[1]), _rows(node.src[1], _F32, 1))

    def end_batch(self, n_tokens: int) -> None:
        """Puts together what the layers chose for the `n_tokens` of a batch.

        Raises:
            ModelError: A layer told less or more than one choice of `top_k` experts per token.
        """
        self.raise_failure()
        chosen, weighted = self._chosen, self._weighted
        self._chosen, self._weighted = {}, {}
        self.layers = self.layers or sorted(chosen)
        if not chosen or sorted(chosen) != self.layers or sorted(weighted) != self.layers:
            raise ModelError(
                f"its routing cannot be recorded: experts were chosen in layers {sorted(chosen)}, weighted in {sorted(weighted)}"
            )
        top_k = chosen[self.layers[0]].shape[1]
        for layer in self.layers:
            for what, rows in (("choice", chosen[layer]), ("weights", weighted[layer])):
                if rows.shape != (n_tokens, top_k):
                    raise ModelError(
                        f"its routing cannot be recorded: the {what} of layer {layer} is of shape {rows.shape}, "
                        f"not {(n_tokens, top_k)} as for all {n_tokens} tokens with the experts of the first layer"
                    )
        self.experts.append(np.stack([chosen[layer] for layer in self.layers], axis=1))
        self.weights.append(np.stack([weighted[layer] for layer in self.layers], axis=1).astype(np.float16))

    def trace(
        self, llm: Llama, pieces: Sequence[npt.NDArray[np.int32]], *, tokens_at_once: int, source: str
    ) -> RoutingTrace:
        """What was gathered, of a model and the texts that it evaluated.

        Raises:
            ModelError: Its layers have different numbers of experts.
        """
        model = llm._engine.description
        layers = tuple(self.layers)
        counts = {layer.experts for layer in model.moe_layers if layer.layer in layers}
        if len(counts) != 1:
            raise ModelError(
                f"{model.path}: its layers have different numbers of experts, which a routing trace cannot hold"
            )
        n_experts = counts.pop()
        lengths = [len(piece) for piece in pieces]
        return RoutingTrace(
            model=model.name or model.path.name,
            model_hash=fingerprint(file.path for file in model.files),
            architecture=model.architecture,
            layers=layers,
            n_experts=n_experts,
            tokens=np.concatenate(pieces),
            experts=np.concatenate(self.experts).astype(np.uint8 if n_experts <= 256 else np.uint16),
            weights=np.concatenate(self.weights),
            starts=np.cumsum([0, *lengths[:-1]], dtype=np.int64),
            source=source,
            tool=f"moestream {importlib.metadata.version('moestream')}",
            tokens_at_once=tokens_at_once,
            synthetic="",
        )


def _layer_of_product(node: Any) -> int | None:
    """The layer whose experts a node multiplies by, or None."""
    if not (node.src[2] and node.src[0]):
        return None
    found = _EXPERT_PRODUCT.fullmatch(_ffi.string(node.src[0].name))
    return int(found[1]) if found else None


def _check_layout(tensor: Any) -> None:
    """Raises ModelError unless ggml sees in a tensor what we see in it."""
    same = (
        _ffi.cast("const char *", tensor.name) == _ggml.ggml_get_name(tensor)
        and _ffi.cast("void *", tensor.data) == _ggml.ggml_get_data(tensor)
        and (tensor.ne[0] - 1) * tensor.nb[0] < _ggml.ggml_nbytes(tensor)
    )
    if not same:
        raise ModelError(
            "its routing cannot be recorded: ggml's tensors are laid out differently in this llama-cpp-python"
        )


def _rows(tensor: Any, kind: int, axis: int, rows_axis: int | None = None) -> npt.NDArray[Any]:
    """A copy of [rows, columns] of 4-byte numbers: the columns are dimension `axis` of the tensor, the rows by default the next."""
    rows_axis = axis + 1 if rows_axis is None else rows_axis
    columns, n = tensor.ne[axis], tensor.ne[rows_axis]
    others = [tensor.ne[i] for i in range(4) if i not in (axis, rows_axis)]
    if tensor.type != kind or others != [1, 1]:
        raise ModelError(
            f"its routing cannot be recorded: {_ffi.string(tensor.name).decode()!r} is no table of choices"
        )
    strides = (tensor.nb[rows_axis], tensor.nb[axis])
    span = (n - 1) * strides[0] + (columns - 1) * strides[1] + 4 if n else 0
    data = _ffi.buffer(tensor.data, span)
    return np.ndarray((n, columns), np.float32 if kind == _F32 else np.int32, data, strides=strides).copy()
