"""Captures what heads are trained on from any GGUF, through the engine that streams it.

The graph's nodes are looked at as they are computed (llama.cpp's `cb_eval`, as :mod:`moestream._capture` does), and found by
what they multiply by, so that no architecture is known by name:

- input h of the experts: the second operand of the first product with `ffn_gate_exps`, `ffn_up_exps` or `ffn_gate_up_exps`
- the router's output: the product with `ffn_gate_inp`, before bias, softmax or sigmoid; this is what a head's output replaces
- executed experts: the ids of the product with `ffn_down_exps`

Text goes through as prompts do, `tokens_at_once` at a time: a token's state and routing depend on the tokens before it alone, so
they are those of decoding but for rounding (other kernels for several tokens). `tokens_at_once=1` computes as decoding does.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._capture import (
    _F32,
    _I32,
    GraphWatcher,
    _ffi,
    _ggml,
    _layer_of_product,
    _pieces,
    _rows,
    fingerprint,
    require_streamed,
)
from .._evaluation import evaluating
from ..errors import ModelError, OptionError
from .dataset import Capture, CaptureHeader, CaptureWriter, require_room

if TYPE_CHECKING:
    from ..llama import Llama

__all__ = ["capture", "capture_bytes"]

_FIRST_PRODUCT = re.compile(rb"blk\.(\d+)\.ffn_(?:gate|up|gate_up)_exps\.weight")
_ROUTER = re.compile(rb"blk\.(\d+)\.ffn_gate_inp\.weight")


def capture(
    llm: Llama,
    texts: Iterable[str | bytes | Sequence[int]],
    out: str | os.PathLike[str],
    *,
    owners: Sequence[int] | None = None,
    context: int | None = None,
    tokens_at_once: int | None = None,
    source: str = "",
    on_size: Callable[[int, int], None] = lambda tokens, size_bytes: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Capture:
    """Evaluates texts and writes what heads are trained on into a new folder, see :mod:`moestream.train.dataset`.

    >>> llm = Llama("model.gguf", expert_streaming=True, n_ctx=512, verbose=False)
    >>> data = capture(llm, [Path("a.txt").read_text()], "data")

    Memory is that of evaluating a prompt; the folder takes `capture_bytes`.

    Args:
        llm: A model loaded with `expert_streaming`.
        texts, context, tokens_at_once: As in :func:`moestream.record_routing`.
        out: The folder; it must not exist.
        owners: Layers N to train heads of; layer N + 1 must have experts too. By default all such layers.
        on_size: Is told, before anything is computed, how many tokens and bytes it will be.
        progress: Is told how many tokens of how many are done; what it raises ends the capture, and nothing is left of it.

    Raises:
        OptionError: The model is not streamed, there is no text, or an owner cannot be.
        ModelError: Its graph is not understood.
        OutputError: The folder exists, is too large for its disk or cannot be written.
        ExpertReadError: Experts could not be read.
    """
    context, tokens_at_once = require_streamed(llm, context, tokens_at_once, "captured")
    model = llm._engine.description
    moe = {layer.layer: layer.experts for layer in model.moe_layers}
    wanted = _owners(owners, moe)
    pieces = [piece for text in texts for piece in _pieces(llm, text, context)]
    if not pieces:
        raise OptionError("there is no text to capture: give at least one that is not empty")
    counts = {moe[layer] for owner in wanted for layer in (owner, owner + 1)}
    if len(counts) != 1:
        raise ModelError(f"{model.path}: its layers have {sorted(counts)} experts; name owners of one kind")

    lengths = [len(piece) for piece in pieces]
    total, context = sum(lengths), max(lengths)
    tokens_at_once = min(tokens_at_once, context)
    recorder = _Recorder(wanted)
    writer: CaptureWriter | None = None
    done = 0
    progress(0, total)
    with evaluating(llm, context=context, tokens_at_once=tokens_at_once, on_node=recorder.look) as evaluation:
        header = CaptureHeader(
            model=model.name or model.path.name,
            model_hash=fingerprint(file.path for file in model.files),
            architecture=model.architecture,
            owners=wanted,
            n_experts=counts.pop(),
            top_k=model.experts_used,
            d=llm.n_embd(),
            gating="",
            tokens=total,
            tokens_at_once=tokens_at_once,
            source=source,
            tool=f"moestream {importlib.metadata.version('moestream')}",
        )
        on_size(total, header.size_bytes)
        require_room(Path(out), header.size_bytes)
        try:
            for piece in pieces:
                for first in range(0, len(piece), tokens_at_once):
                    batch = piece[first : first + tokens_at_once]
                    evaluation.decode(batch, first)
                    rows, gating = recorder.end_batch(len(batch), header.n_experts)
                    if writer is None:
                        # Sizes are those of the graph: top-k may differ by layer, and d where experts read a narrower state.
                        header = _of_graph(header, rows, gating)
                        starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
                        writer = CaptureWriter(out, header, np.concatenate(pieces), starts)
                    writer.append(rows)
                    done += len(batch)
                    progress(done, total)
        except BaseException as exc:
            if writer is not None:
                writer.__exit__(type(exc), exc, None)
            raise
    assert writer is not None
    writer.__exit__(None, None, None)
    return Capture(out)


def capture_bytes(tokens: int, *, owners: int, d: int, n_experts: int, top_k: int) -> int:
    """Bytes of a dataset of `owners` neighbouring layers: per token 2 d + 2 E of each owner, and K of each and one more."""
    return CaptureHeader("", "", "", list(range(owners)), n_experts, top_k, d, "", tokens, 0, "", "").size_bytes


def _owners(owners: Sequence[int] | None, moe: dict[int, int]) -> list[int]:
    possible = [layer for layer in sorted(moe) if layer + 1 in moe]
    if not possible:
        raise OptionError("no two neighbouring layers of this model have experts: there is no head to train")
    if owners is None:
        return possible
    if wrong := [owner for owner in owners if owner not in possible]:
        raise OptionError(
            f"layer {wrong[0]} cannot own a head: it and the next must have experts; layers that can: {possible[0]} to {possible[-1]}"
        )
    if not owners:
        raise OptionError("owners is empty: name at least one layer, or leave it out for all")
    return sorted(set(owners))


def _of_graph(header: CaptureHeader, rows: dict[str, npt.NDArray[Any]], gating: str) -> CaptureHeader:
    top_k = {rows[f"experts.{layer}"].shape[1] for layer in {*header.owners, *header.consumers}}
    if len(top_k) != 1:
        raise ModelError(f"its layers take {sorted(top_k)} experts a token; name owners of one kind")
    return dataclasses.replace(header, top_k=top_k.pop(), d=rows[f"hidden.{header.owners[0]}"].shape[1], gating=gating)


class _Recorder(GraphWatcher):
    """Takes, batch by batch, states, router outputs and experts."""

    def __init__(self, owners: Sequence[int]) -> None:
        super().__init__()
        self._owners = set(owners)
        self._consumers = {owner + 1 for owner in owners}
        self._taken: dict[str, npt.NDArray[Any]] = {}
        self._of_router: dict[int, int] = {}  # address of a router's output, or of what a bias makes of it -> layer
        self._sigmoid: dict[int, bool] = {}

    def is_wanted(self, node: Any) -> bool:
        self._follow(node, int(_ffi.cast("uintptr_t", node)))
        return bool(self._wanted(node))

    def _follow(self, node: Any, address: int) -> None:
        """Finds out what a consumer's graph makes of the router's output."""
        layer = _layer(_ROUTER, node)
        if layer in self._consumers:
            self._of_router[address] = layer
            self._sigmoid.setdefault(layer, False)
        elif node.src[0] and (source := int(_ffi.cast("uintptr_t", node.src[0]))) in self._of_router:
            what = _ffi.string(_ggml.ggml_op_desc(node))
            if what in (b"ADD", b"RESHAPE", b"VIEW", b"SCALE", b"GET_ROWS"):
                self._of_router[address] = self._of_router[source]
            elif what == b"SOFTPLUS":
                raise ModelError(
                    f"its states cannot be captured: the router of layer {self._of_router[source]} uses softplus, which heads are not trained for"
                )
            elif what == b"SIGMOID":
                self._sigmoid[self._of_router[source]] = True

    def _wanted(self, node: Any) -> list[tuple[str, int]]:
        found = []
        if (layer := _layer(_ROUTER, node)) in self._consumers:
            found.append(("gate", layer))
        if node.src[2]:
            if (layer := _layer(_FIRST_PRODUCT, node)) in self._owners:
                found.append(("hidden", layer))
            if (layer := _layer_of_product(node)) is not None and (layer in self._owners or layer in self._consumers):
                found.append(("experts", layer))
        # The first in a layer: grovemoe then takes other experts of the same name.
        return [(what, layer) for what, layer in found if f"{what}.{layer}" not in self._taken]

    def take(self, node: Any) -> None:
        for what, layer in self._wanted(node):
            if what == "gate":
                rows = _rows(node, _F32, 0)
            elif what == "experts":
                rows = _rows(node.src[2], _I32, 0)
            else:
                if node.src[1].ne[1] != 1:
                    raise ModelError(
                        f"its states cannot be captured: the experts of layer {layer} each read an input of their own"
                    )
                rows = _rows(node.src[1], _F32, 0, 2)
            self._taken[f"{what}.{layer}"] = rows

    def end_batch(self, n_tokens: int, n_experts: int) -> tuple[dict[str, npt.NDArray[Any]], str]:
        """The rows of a batch of `n_tokens`, in the dataset's types, and what the gates do.

        Raises:
            ModelError: Something was not found, is of an unexpected shape, or too large for float16.
        """
        self.raise_failure()
        taken, self._taken = self._taken, {}
        self._of_router.clear()
        expected = [f"hidden.{n}" for n in sorted(self._owners)] + [f"gate.{n}" for n in sorted(self._consumers)]
        expected += [f"experts.{n}" for n in sorted(self._owners | self._consumers)]
        what_it_is = {"hidden": "input of experts", "gate": "router", "experts": "choice of experts"}
        rows: dict[str, npt.NDArray[Any]] = {}
        for name in expected:
            what, _, layer = name.partition(".")
            if name not in taken or len(taken[name]) != n_tokens:
                found = f"one for {len(taken[name])} of {n_tokens} tokens" if name in taken else "none"
                raise ModelError(
                    f"its states cannot be captured: layer {layer} has no {what_it_is[what]} that is understood ({found} in its graph)"
                )
            if what == "experts":
                rows[name] = taken[name].astype(np.uint8 if n_experts <= 256 else np.uint16)
                continue
            with np.errstate(over="ignore"):  # told below
                rows[name] = taken[name].astype(np.float16)
            if not np.isfinite(rows[name]).all():
                raise ModelError(
                    f"its states cannot be captured: the {what_it_is[what]} of layer {layer} is not finite in float16"
                )
            if what == "gate" and rows[name].shape[1] != n_experts:
                raise ModelError(
                    f"its states cannot be captured: the router of layer {layer} gives {rows[name].shape[1]} values for {n_experts} experts"
                )
        kinds = {"sigmoid" if sigmoid else "softmax" for sigmoid in self._sigmoid.values()}
        if len(kinds) != 1:
            raise ModelError(
                "its states cannot be captured: some of its routers use softmax and some sigmoid; name owners of one kind"
            )
        return rows, kinds.pop()


def _layer(pattern: re.Pattern[bytes], node: Any) -> int | None:
    """The layer of the weight that a node multiplies by, if it is one of these."""
    found = pattern.fullmatch(_ffi.string(node.src[0].name)) if node.src[0] and node.src[1] else None
    return int(found[1]) if found else None
