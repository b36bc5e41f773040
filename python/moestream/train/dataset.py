"""What training sees of a model: a folder of memory-mapped arrays, so that it may be larger than memory.

    DATA/header.json       format, model and its hash, layers, sizes, where the text is from
    DATA/tokens.npy        int32 [tokens]; the texts one after the other
    DATA/starts.npy        int64 [texts]: index of each text's first token
    DATA/hidden.N.npy      float16 [tokens, d]: input of the experts of layer N, an owner
    DATA/gate.N.npy        float16 [tokens, E]: what the router of layer N, a consumer, gives, before softmax or sigmoid
    DATA/experts.N.npy     uint8 (E <= 256) or uint16 [tokens, K]: experts executed in layer N, owner or consumer

The owner of a head is layer N, its consumer layer N + 1. A folder is whole or not there: it is written as DATA.part.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import OutputError, TrainingError
from ..memory import format_size

__all__ = ["Capture", "CaptureHeader", "CaptureWriter", "require_room"]

_FORMAT, _VERSION = "moestream training data", 1


@dataclass(frozen=True)
class CaptureHeader:
    """What `header.json` holds besides format and version."""

    model: str
    model_hash: str
    """As in routing traces, see docs/trace.md: what tells files apart."""
    architecture: str
    owners: list[int]
    """Layers whose experts' inputs are there, ascending; layer N + 1 of each is a consumer."""
    n_experts: int
    top_k: int
    d: int
    gating: str
    """"softmax" or "sigmoid": what the consumers' graphs make of the router's output."""
    tokens: int
    tokens_at_once: int
    source: str
    tool: str

    @property
    def consumers(self) -> list[int]:
        return [owner + 1 for owner in self.owners]

    @property
    def expert_type(self) -> type[np.unsignedinteger[Any]]:
        return np.uint8 if self.n_experts <= 256 else np.uint16

    def arrays(self) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """Type and shape of each array of the layers, by name."""
        n = self.tokens
        found: dict[str, tuple[Any, tuple[int, ...]]] = {}
        for layer in self.owners:
            found[f"hidden.{layer}"] = (np.float16, (n, self.d))
        for layer in self.consumers:
            found[f"gate.{layer}"] = (np.float16, (n, self.n_experts))
        for layer in sorted({*self.owners, *self.consumers}):
            found[f"experts.{layer}"] = (self.expert_type, (n, self.top_k))
        return found

    @property
    def size_bytes(self) -> int:
        """Of all arrays, without the few hundred bytes around each."""
        return 4 * self.tokens + sum(
            np.dtype(kind).itemsize * int(np.prod(shape)) for kind, shape in self.arrays().values()
        )


class Capture:
    """A dataset on disk. Arrays are memory-mapped and read-only.

    >>> data = Capture("data")
    >>> data.hidden(3)[:10]          # float16 [10, d]
    >>> t = data.pairs()             # tokens whose next token is of the same text
    >>> data.gate(4)[t + 1]          # what a head of layer 3 at t is to say

    Raises:
        TrainingError: It is no dataset, a damaged one, or one of another version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.header = _read_header(self.path)
        self.tokens = self._array("tokens", np.int32, (self.header.tokens,))
        self.starts = self._array("starts", np.int64, None)
        starts = self.starts
        if len(starts) == 0 or starts[0] != 0 or (np.diff(starts) <= 0).any() or starts[-1] >= self.header.tokens:
            raise TrainingError(
                f"{self.path / 'starts.npy'}: the starts of its texts do not ascend from 0 to its last token; capture it again"
            )
        self._arrays = {name: self._array(name, *expected) for name, expected in self.header.arrays().items()}
        for name, array in self._arrays.items():
            if name.startswith("experts.") and array.max() >= self.header.n_experts:
                raise TrainingError(
                    f"{self.path / name}.npy: names expert {array.max()} of {self.header.n_experts}; capture it again"
                )

    def hidden(self, layer: int) -> npt.NDArray[np.float16]:
        return self._layer("hidden", layer)

    def gate(self, layer: int) -> npt.NDArray[np.float16]:
        return self._layer("gate", layer)

    def experts(self, layer: int) -> npt.NDArray[Any]:
        return self._layer("experts", layer)

    def texts(self) -> list[slice]:
        """The tokens of each text."""
        ends = [*self.starts[1:].tolist(), self.header.tokens]
        return [slice(int(first), end) for first, end in zip(self.starts, ends, strict=True)]

    def pairs(self, texts: Sequence[int] | None = None) -> npt.NDArray[np.int64]:
        """All tokens t that have a next token t + 1 in their text, of all texts or of some."""
        slices = self.texts()
        chosen = slices if texts is None else [slices[i] for i in texts]
        return np.concatenate(
            [np.arange(s.start, s.stop - 1, dtype=np.int64) for s in chosen] or [np.zeros(0, np.int64)]
        )

    def firsts(self) -> npt.NDArray[np.bool_]:
        """[tokens]: is it the first of its text, before which nothing was executed?"""
        first = np.zeros(self.header.tokens, bool)
        first[self.starts] = True
        return first

    def _layer(self, what: str, layer: int) -> npt.NDArray[Any]:
        try:
            return self._arrays[f"{what}.{layer}"]
        except KeyError:
            raise TrainingError(
                f"{self.path}: holds no {what} of layer {layer}, but heads of layers {self.header.owners}; capture it with that owner"
            ) from None

    def _array(self, name: str, kind: Any, shape: tuple[int, ...] | None) -> npt.NDArray[Any]:
        path = self.path / f"{name}.npy"
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as exc:
            raise TrainingError(f"{path}: missing, truncated or damaged ({exc}); capture the data again") from exc
        if array.dtype != np.dtype(kind) or (array.ndim != 1 if shape is None else array.shape != shape):
            raise TrainingError(
                f"{path}: is {array.dtype} {array.shape}, not {np.dtype(kind)} {shape} as the header says; capture the data again"
            )
        return array


class CaptureWriter:
    """Writes a dataset batch by batch; leaving its block without an error makes it whole.

    Raises:
        OutputError: It exists, its disk is too small, or it cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: CaptureHeader,
        tokens: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int64],
    ) -> None:
        self.path, self.header, self._done = Path(path), header, 0
        self._part = self.path.with_name(self.path.name + ".part")
        require_room(self.path, header.size_bytes)
        try:
            if self._part.exists():
                shutil.rmtree(self._part)
            self._part.mkdir()
            np.save(self._part / "tokens.npy", tokens)
            np.save(self._part / "starts.npy", starts)
            self._arrays = {name: self._array(name, kind, shape) for name, (kind, shape) in header.arrays().items()}
        except OSError as exc:
            shutil.rmtree(self._part, ignore_errors=True)
            raise OutputError(f"{self.path}: cannot be written: {exc.strerror or exc}") from exc

    def _array(self, name: str, kind: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        file = self._part / f"{name}.npy"
        array = np.lib.format.open_memmap(file, mode="w+", dtype=kind, shape=shape)
        if hasattr(os, "posix_fallocate"):  # a disk that is full says so here; where the pages are written it would be a signal
            with open(file, "r+b") as opened:
                os.posix_fallocate(opened.fileno(), 0, os.fstat(opened.fileno()).st_size)
        return array

    def append(self, rows: dict[str, npt.NDArray[Any]]) -> None:
        """Adds the rows of the next tokens, one array for each of `header.arrays()`."""
        n = len(next(iter(rows.values())))
        for name, array in self._arrays.items():
            array[self._done : self._done + n] = rows[name]
        self._done += n

    def __enter__(self) -> CaptureWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._arrays.clear()
            shutil.rmtree(self._part, ignore_errors=True)
            return
        if self._done != self.header.tokens:
            raise RuntimeError(f"{self._done} of {self.header.tokens} tokens were written")
        try:
            for array in self._arrays.values():
                array.flush()
            self._arrays.clear()
            header = {"format": _FORMAT, "version": _VERSION, **asdict(self.header)}
            (self._part / "header.json").write_text(
                json.dumps(header, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
            )
            os.rename(self._part, self.path)
        except OSError as exc:
            raise OutputError(f"{self.path}: cannot be written: {exc.strerror or exc}") from exc


def require_room(path: Path, size_bytes: int) -> None:
    """Raises OutputError if a folder is there already, or its disk has less than that free."""
    if path.exists():
        raise OutputError(f"{path}: exists already; name another folder, or remove it")
    try:
        free = shutil.disk_usage(path.absolute().parent).free
    except OSError as exc:
        raise OutputError(f"{path}: cannot be written: {exc.strerror or exc}") from exc
    if free < size_bytes:
        raise OutputError(
            f"{path}: needs {format_size(size_bytes)}, and {format_size(free)} are free; give fewer owners or less text"
        )


def _read_header(path: Path) -> CaptureHeader:
    file = path / "header.json"
    try:
        header = json.loads(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise TrainingError(
            f"{path}: no training data ({file.name}: {exc.strerror}); `moestream train capture` makes it"
        ) from exc
    except ValueError as exc:
        raise TrainingError(f"{file}: damaged ({exc}); capture the data again") from exc
    if not isinstance(header, dict) or header.pop("format", None) != _FORMAT:
        raise TrainingError(f"{file}: not the header of training data; `moestream train capture` makes it")
    if (version := header.pop("version", None)) != _VERSION:
        raise TrainingError(
            f"{file}: version {version}, and this moestream reads version {_VERSION}: capture the data again"
        )
    known = {field.name: field.type for field in fields(CaptureHeader)}
    if wrong := sorted(header.keys() ^ known.keys()):
        raise TrainingError(
            f"{file}: {wrong[0]!r} is {'missing' if wrong[0] in known else 'unknown'}; capture the data again"
        )
    kinds = {"str": str, "int": int, "list[int]": list}
    for name, kind in known.items():
        value = header[name]
        whole = value if kind == "list[int]" and isinstance(value, list) else [value] if kind == "int" else []
        if not isinstance(value, kinds[str(kind)]) or any(type(one) is not int or one < 0 for one in whole):
            raise TrainingError(f"{file}: {name!r} is {header[name]!r}; capture the data again")
    return CaptureHeader(**header)
