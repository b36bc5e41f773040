"""Routing traces: which experts a model took for each token of a text, and with which weights.

The file format is told in docs/trace.md; :func:`moestream.record_routing` makes a trace, and
:func:`moestream.routing_statistics` tells how local its routing is.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ._whole_file import writing_whole
from .errors import TraceError

__all__ = ["RoutingTrace"]

_VERSION = 1
_FORMAT = "moestream routing trace"
_ARRAYS = ("tokens", "experts", "weights", "starts")
_MEMBERS = ("header", *_ARRAYS)
_HEADER: dict[str, type] = {
    "model": str,
    "model_hash": str,
    "architecture": str,
    "layers": list,
    "n_experts": int,
    "source": str,
    "tool": str,
    "tokens_at_once": int,
    "synthetic": str,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingTrace:
    """What the routers of a model chose, for each token of one or several texts.

    >>> trace = RoutingTrace.read("validation.trace")
    >>> trace.experts[0, 0]  # of the first token, in the first layer that has experts
    array([17,  3, 30,  8], dtype=uint8)

    Args:
        model: The model's name, or that of its file.
        model_hash: Tells models of one name apart: 64 hex digits, made of its files as docs/trace.md says; "" if there
            is no such file.
        architecture: As in the GGUF.
        layers: Numbers of the layers with experts, in ascending order.
        n_experts: Experts in each of these layers.
        tokens: int32 [tokens].
        experts: [tokens, layers, top_k], uint8 up to 256 experts, else uint16. In the router's order: its first choice
            comes first.
        weights: float16 [tokens, layers, top_k]: what each expert's output is multiplied with, after all that the model
            does to it (normalising, scaling).
        starts: int64 [texts]: index of the first token of each text. Texts are independent: no context passes from one
            to the next.
        source: Where the text is from.
        tool: What made the trace, with its version.
        tokens_at_once: Tokens computed together at most when it was recorded (1 is how decoding computes); 0 if it was
            not recorded.
        synthetic: What kind of invented routing this is; "" for that of a model.

    Raises:
        TraceError: The parts do not fit together, or one is not what it should be.
    """

    model: str
    model_hash: str
    architecture: str
    layers: tuple[int, ...]
    n_experts: int
    tokens: npt.NDArray[np.int32]
    experts: npt.NDArray[Any]
    weights: npt.NDArray[np.float16]
    starts: npt.NDArray[np.int64]
    source: str
    tool: str
    tokens_at_once: int
    synthetic: str

    def __post_init__(self) -> None:
        if fault := _fault(self):
            raise TraceError(fault)

    @property
    def top_k(self) -> int:
        """Experts of a token in each layer."""
        return self.experts.shape[2]

    def texts(self) -> Iterator[slice]:
        """The tokens of each text, as slices."""
        for start, end in zip(self.starts, [*self.starts[1:], len(self.tokens)], strict=True):
            yield slice(int(start), int(end))

    @staticmethod
    def read(path: str | os.PathLike[str]) -> RoutingTrace:
        """The trace in a file.

        Raises:
            TraceError: No such file, not a trace, a damaged one, or one of another version.
        """
        header, arrays = _read_members(Path(path))
        try:
            return RoutingTrace(**{**header, "layers": tuple(header["layers"])}, **arrays)
        except TraceError as exc:
            raise TraceError(f"{path}: {exc}; record the trace again") from None

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace, first as `path` with ".part" behind it: `path` is whole or not there.

        Raises:
            TraceError: It cannot be written.
        """
        header: dict[str, Any] = {"format": _FORMAT, "version": _VERSION}
        header |= {name: getattr(self, name) for name in _HEADER}
        text = np.frombuffer(json.dumps(header, ensure_ascii=False).encode(), np.uint8)
        with writing_whole(path, TraceError) as file:
            np.savez_compressed(file, header=text, **{name: getattr(self, name) for name in _ARRAYS})


def _fault(trace: RoutingTrace) -> str | None:
    """What is wrong with a trace, or None."""
    n, n_layers, n_experts = len(trace.tokens), len(trace.layers), trace.n_experts
    wanted: tuple[tuple[str, Any, int], ...] = (
        ("tokens", np.int32, 1),
        ("experts", np.uint8 if n_experts <= 256 else np.uint16, 3),
        ("weights", np.float16, 3),
        ("starts", np.int64, 1),
    )
    for name, dtype, dimensions in wanted:
        array = getattr(trace, name)
        if array.dtype != dtype or array.ndim != dimensions:
            return f"{name} are {array.dtype} in {array.ndim} dimensions, not {np.dtype(dtype)} in {dimensions}"
    if not 1 <= n_experts <= 65536:
        return f"it says {n_experts} experts, which is not within 1 and 65536"
    if n == 0 or n_layers == 0:
        return "it holds no tokens" if n == 0 else "it holds no layers"
    if trace.layers[0] < 0 or any(a >= b for a, b in zip(trace.layers, trace.layers[1:], strict=False)):
        return f"its layers {list(trace.layers)} do not ascend"
    top_k = trace.experts.shape[2]
    for name in ("experts", "weights"):
        shape = getattr(trace, name).shape
        if shape != (n, n_layers, top_k) or not 1 <= top_k <= n_experts:
            return f"{name} are of shape {shape}, with {n} tokens, {n_layers} layers and {n_experts} experts"
    starts = trace.starts
    if len(starts) == 0 or starts[0] != 0 or (np.diff(starts) <= 0).any() or starts[-1] >= n:
        return f"the starts of its texts do not ascend from 0 to the last of {n} tokens"
    if (trace.tokens < 0).any():
        return f"token {int(trace.tokens.min())} does not exist"
    if (largest := int(trace.experts.max())) >= n_experts:
        where = np.argwhere(trace.experts == largest)[0]
        return f"expert {largest} of token {where[0]} in layer {trace.layers[where[1]]} does not exist: there are {n_experts}"
    in_order = np.sort(trace.experts, axis=2)
    if (twice := (in_order[..., 1:] == in_order[..., :-1]).any(axis=2)).any():
        token, layer = np.argwhere(twice)[0]
        return f"token {token} has an expert twice in layer {trace.layers[layer]}"
    if not np.isfinite(trace.weights).all():
        token, layer, _ = np.argwhere(~np.isfinite(trace.weights))[0]
        return f"a weight of token {token} in layer {trace.layers[layer]} is not finite"
    return None


def _read_members(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The header, checked, and the arrays of a file.

    Raises:
        TraceError: It is no trace, or a damaged one.
    """
    damaged = f"{path}: a truncated or damaged routing trace; record it again, or copy it again"
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"PK\x03\x04":
                raise TraceError(f"{path}: not a routing trace; `moestream trace record` makes one")
            file.seek(0)
            with np.load(file, allow_pickle=False) as members:
                if missing := [name for name in _MEMBERS if name not in members.files]:
                    raise TraceError(
                        f"{path}: not a routing trace: it has no {missing[0]}; `moestream trace record` makes one"
                    )
                header = _header(path, members["header"])
                if unknown := [name for name in members.files if name not in _MEMBERS]:
                    raise TraceError(f"{path}: has a member that no routing trace has, {unknown[0]!r}; record it again")
                return header, {name: members[name] for name in _ARRAYS}
    except OSError as exc:
        raise TraceError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, MemoryError, NotImplementedError) as exc:
        if isinstance(exc, TraceError):
            raise
        raise TraceError(damaged) from exc


def _header(path: Path, member: npt.NDArray[Any]) -> dict[str, Any]:
    """The header without what names the format, its values of the right types.

    Raises:
        TraceError: It is none of this version.
    """
    header = json.loads(member.tobytes().decode())
    if not isinstance(header, dict) or header.pop("format", None) != _FORMAT:
        raise TraceError(f"{path}: not a routing trace: its header does not say so; `moestream trace record` makes one")
    if (version := header.pop("version", None)) != _VERSION:
        raise TraceError(
            f"{path}: a routing trace of version {version}, and this moestream reads version {_VERSION}: record it again, "
            "or take the moestream that made it"
        )
    for name in sorted(header.keys() ^ _HEADER.keys()):
        what = "lacks" if name in _HEADER else "has an unknown"
        raise TraceError(f"{path}: its header {what} {name!r}; record the trace again")
    for name, kind in _HEADER.items():
        value = header[name]
        numbers = value if kind is list and isinstance(value, list) else [value] if kind is int else []
        if not isinstance(value, kind) or any(type(number) is not int for number in numbers):
            raise TraceError(f"{path}: {name!r} in its header is {value!r}; record the trace again")
    return header
