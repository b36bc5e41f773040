"""A LoRA merged into the quantised weights of a model, and how much of what it does is left then."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import OptionError, OutputError, SidecarError
from ..layout import ggml
from ..layout.gguf_file import (
    DEFAULT_ALIGNMENT,
    F32,
    SPLIT_KEYS,
    STRING,
    Tensor,
    header_bytes,
    padded,
    pair,
)
from ..layout.writer import check_output, check_room
from .adapter import adapter_bytes, in_memory
from .base import BaseModel, check_base
from .format import Lora, LoraPair, Sidecar
from .imports import lora_files, read_lora

if TYPE_CHECKING:
    from ..llama import Llama

__all__ = ["Merge", "merge"]

_COPY_BYTES = 8 << 20
_ROWS_AT_ONCE = 1024
_KEYS = ("survives", "size", "tokens")


@dataclass(frozen=True)
class Merge:
    """What became of a LoRA that was merged.

    With B, L and M the logits of the base, of the base with the LoRA beside it, and of the merged model, over all tokens of a
    text and the whole vocabulary:

    Attributes:
        path: The merged model.
        tensors: Those that were merged into.
        tokens: Of the text.
        survives: <M - B, L - B> / <L - B, L - B>: how much of the LoRA's change of the logits the merged model makes; 1 is
            all.
        size: |M - B| / |L - B|: how large its change is. What is above `survives` is noise of requantising.
        top_token: Share of tokens whose likeliest next token is that of the base with the LoRA beside it.
    """

    path: Path
    tensors: tuple[str, ...]
    tokens: int
    survives: float
    size: float
    top_token: float


def merge(
    model: str | os.PathLike[str],
    lora: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    text: str,
    tokens: int = 256,
    alpha: float | None = None,
    scale: float = 1.0,
    threads: int | None = None,
    force: bool = False,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> Merge:
    """Writes a model with W + scale (alpha / rank) B A in place of W, quantised as W was, and measures what that costs.

    A change that is small against the steps of a quantised weight is lost when it is rounded to them. The figures are in
    the file too, under `moestream_merged.`.

    Args:
        model: A stock model.
        lora: An adapter as :func:`read_lora` takes it, or a sidecar for this model.
        output: The file to write; one file, also of a model in shards.
        text: What logits are compared on.
        tokens: Of the text at most.
        alpha: Of a LoRA whose file does not say it.
        scale: What the LoRA is multiplied with.
        threads: For computing; by default the physical cores.
        force: Replace `output` if it is there.
        progress: Called with what is done and the share of it.

    Raises:
        OptionError: A text of no tokens, a laid model, or a number that cannot be.
        SidecarError: The LoRA cannot be read, applied or merged.
        ModelError: The model cannot be read or run.
        OutputError: `output` cannot be written.
    """
    base, out = BaseModel.open(model), Path(output)
    if base.model.first.architecture != base.architecture:
        raise OptionError(f"{model}: is a laid file; merge into the stock file: moestream export {model} STOCK.gguf")
    if tokens < 1:
        raise OptionError(f"--tokens {tokens}: at least one is needed")
    if threads is not None and threads < 1:
        raise OptionError(f"--threads {threads}: at least one thread is needed")
    if not math.isfinite(scale) or scale == 0:
        raise OptionError(f"--scale {scale:g}: give a number other than 0")
    check_output(out, [*(file.path for file in base.model.files), *lora_files(lora)], force=force)
    chosen = _lora(Path(lora), base, alpha)
    for name in chosen.pairs:
        if ggml.needs_imatrix(base.tensors[name][1]):
            kind = ggml.type_name(base.tensors[name][1])
            raise SidecarError(
                f"{model}: {name} is {kind}, which cannot be quantised again without an importance matrix"
            )
    part = out.with_name(out.name + ".part")
    try:
        figures_at = _write(base, chosen, scale, part, lambda share: progress("merging", share))
        merged = _measured(base, chosen, scale, part, out, text, tokens, threads, progress)
        with open(part, "r+b") as file:
            for name, value in (("survives", merged.survives), ("size", merged.size), ("tokens", merged.tokens)):
                file.seek(figures_at[name])
                file.write(np.float32(value).tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, out)
    except OSError as exc:
        if isinstance(exc, OutputError):
            raise
        raise OutputError(f"{out}: cannot be written: {exc.strerror or exc}") from exc
    finally:
        part.unlink(missing_ok=True)
    return merged


def _lora(path: Path, base: BaseModel, alpha: float | None) -> Lora:
    try:
        return read_lora(path, base, alpha=alpha)
    except SidecarError as not_an_adapter:
        try:
            sidecar = Sidecar.read(path)
        except SidecarError:
            raise not_an_adapter from None
    check_base(sidecar, base)
    if sidecar.lora is None:
        raise SidecarError(f"{path}: holds heads but no LoRA: there is nothing to merge")
    return sidecar.lora


# ------------------------------------------------------------------ writing


def _write(base: BaseModel, lora: Lora, scale: float, path: Path, progress: Callable[[float], None]) -> dict[str, int]:
    """Writes the model with figures that are still 0, and returns where those are."""
    first = base.model.first
    alignment = first.alignment if first.key("general.alignment") else DEFAULT_ALIGNMENT
    pairs = [first.pair(key) for key in first.keys if key.name not in SPLIT_KEYS]
    pairs.append(pair("moestream_merged.lora_tensors", STRING, list(lora.pairs)))
    places, at = {}, 24 + sum(map(len, pairs))
    for name in _KEYS:
        pairs.append(pair(f"moestream_merged.{name}", F32, 0.0))
        at += len(pairs[-1])
        places[name] = at - 4
    tensors, infos, offset = base.model.tensors, [], 0
    for tensor in tensors:
        infos.append((tensor.name, tensor.ne, tensor.type, offset))
        offset = padded(offset + tensor.size_bytes, alignment)
    check_room(path, offset)
    with contextlib.ExitStack() as stack:
        inputs = [stack.enter_context(open(file.path, "rb", buffering=0)) for file in base.model.files]
        out = stack.enter_context(open(path, "wb"))
        out.write(header_bytes(pairs, infos, alignment))
        done = 0
        for tensor in tensors:
            source = inputs[tensor.file]
            if tensor.name in lora.pairs:
                pieces = _merged(base, tensor, lora.pairs[tensor.name], scale * lora.alpha, source.fileno())
            else:
                pieces = _copied(source.fileno(), tensor.offset, tensor.size_bytes)
            for piece in pieces:
                out.write(piece)
            out.write(bytes(padded(tensor.size_bytes, alignment) - tensor.size_bytes))
            done += tensor.size_bytes
            progress(done / max(1, offset))
    base.model.check_unchanged()
    return places


def _copied(fd: int, offset: int, size: int) -> Iterator[bytes]:
    while size:
        piece = os.pread(fd, min(size, _COPY_BYTES), offset)
        if not piece:
            raise SidecarError(f"the model ends at byte {offset}; it was longer when it was opened")
        yield piece
        offset, size = offset + len(piece), size - len(piece)


def _merged(base: BaseModel, tensor: Tensor, both: LoraPair, scaled_alpha: float, fd: int) -> Iterator[memoryview]:
    """The bytes of a tensor with the product of a pair added to it, some rows at a time."""
    columns, rows = tensor.ne[:2]
    a, b = both.a.values(), both.b.values()
    if tensor.name == "token_embd.weight":
        a, b = b.T, a  # their places are exchanged there
    a, b = a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])
    size = ggml.row_bytes(tensor.type, columns)
    at = tensor.offset
    for of_a, of_b in zip(a, b, strict=True):
        for begin in range(0, rows, _ROWS_AT_ONCE):
            n = min(_ROWS_AT_ONCE, rows - begin)
            stored = np.frombuffer(b"".join(_copied(fd, at, n * size)), np.uint8)
            at += n * size
            values = ggml.dequantise(tensor.type, stored).reshape(n, columns)
            values = values + np.float32(scaled_alpha / both.rank) * (of_b[begin : begin + n] @ of_a)
            if not np.isfinite(values).all():
                raise SidecarError(
                    f"{base.path}: {tensor.name} would hold values that are no numbers; give a smaller scale"
                )
            yield memoryview(ggml.quantise(tensor.type, np.ascontiguousarray(values, dtype=np.float32)))


# ------------------------------------------------------------------ measuring


def _measured(
    base: BaseModel,
    lora: Lora,
    scale: float,
    merged: Path,
    out: Path,
    text: str,
    tokens: int,
    threads: int | None,
    progress: Callable[[str, float], None],
) -> Merge:
    ids: list[int] = []

    def logits(path: Path, step: int, **options: Any) -> npt.NDArray[np.float32]:
        from .._evaluation import evaluating

        with contextlib.closing(_loaded(path, threads, **options)) as llm:
            if not ids:
                ids.extend(_tokens(llm, text, tokens))
            with evaluating(llm, context=len(ids), tokens_at_once=len(ids)) as evaluation:
                evaluation.decode(ids, 0)
                found = np.array(evaluation.logits())
        progress("measuring", step / 3)
        return found

    plain = logits(base.path, 1)
    with in_memory(adapter_bytes(lora, base.architecture)) as adapter:
        beside = logits(base.path, 2, lora_path=adapter, lora_scale=scale)
    inside = logits(merged, 3)
    wanted, got = (beside - plain).astype(np.float64), (inside - plain).astype(np.float64)
    square = float(np.vdot(wanted, wanted))
    if not np.isfinite(wanted).all() or not np.isfinite(got).all():
        raise SidecarError(f"with the LoRA the logits of {base.path} are no numbers: give a smaller scale")
    if square == 0.0:
        raise SidecarError(f"the LoRA changes no logit of this text on {base.path}: there is nothing to merge")
    return Merge(
        path=out,
        tensors=tuple(lora.pairs),
        tokens=len(ids),
        survives=float(np.vdot(got, wanted)) / square,
        size=float(np.sqrt(np.vdot(got, got) / square)),
        top_token=float(np.mean(inside.argmax(1) == beside.argmax(1))),
    )


def _loaded(path: Path, threads: int | None, **options: Any) -> Llama:
    from .._threads import default_threads
    from ..llama import Llama

    n = threads or default_threads()
    return Llama(str(path), expert_streaming=True, n_ctx=64, n_threads=n, n_threads_batch=n, verbose=False, **options)


def _tokens(llm: Llama, text: str, tokens: int) -> Sequence[int]:
    found = llm.tokenize(text.encode(), add_bos=True, special=False)[:tokens]
    if not found:
        raise OptionError("the text is empty: give one with -f FILE")
    return found
