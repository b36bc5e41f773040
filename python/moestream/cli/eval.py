"""Tell how well a model predicts a text, and how far it is from a base run.

The method and the statistics are those of llama-perplexity, and so is the file
of a base run's logits: either reads the other's.

  moestream eval -m MODEL.gguf -f text.txt
  moestream eval -m MODEL.gguf -f text.txt --kl-divergence-base base.kld
  moestream eval -m MODEL.gguf --kl-divergence-base base.kld --kl-divergence \\
      --experts-used 4
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .. import memory
from .._threads import default_threads
from ..errors import MeasurementError, OptionError
from ..memory import format_size
from ..models import validation_text
from ._interrupt import INTERRUPTED, Interrupt
from ._model import add_model_arguments, locate
from ._output import Progress, print_json, require_writable, versions
from ._summary import heads_told
from .generate import (
    add_attention_arguments,
    add_streaming_arguments,
    kv_types,
    load,
    require_adapters,
    sidecar_options,
    size_on_disk,
)

if TYPE_CHECKING:
    from ..llama import LoraPath
    from ..perplexity import Chunk, Divergence, Estimate, PerplexityReport, RoutingMismatch


@dataclass(frozen=True)
class Evaluated:
    """What `moestream eval` found, and what it took. Times are in seconds."""

    model: Path
    text: str
    """Where it is from."""
    report: PerplexityReport
    load_s: float
    threads: int
    peak_rss_bytes: int
    bytes_on_disk: int


def evaluate(
    *,
    model: str | os.PathLike[str] | None = None,
    hf_repo: str | None = None,
    hf_file: str | None = None,
    file: str | os.PathLike[str] | None = None,
    ctx_size: int | None = None,
    chunks: int = -1,
    kl_divergence_base: str | os.PathLike[str] | None = None,
    kl_divergence: bool = False,
    routing_base: str | os.PathLike[str] | None = None,
    save_routing: str | os.PathLike[str] | None = None,
    batch_size: int = 2048,
    ubatch_size: int = 512,
    threads: int | None = None,
    lora: LoraPath | Sequence[LoraPath | tuple[LoraPath, float]] | None = None,
    flash_attn: bool = False,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    expert_streaming: bool = True,
    expert_cache: int | str = "auto",
    kernels: str = "auto",
    compute: str = "exact",
    reader: str = "auto",
    direct: bool | Literal["auto"] = "auto",
    verify: bool = False,
    policy: str = "lrfu",
    prefetch: str = "auto",
    cache_aware: float = 0.0,
    experts_used: int | None = None,
    prerouter: str | os.PathLike[str] | None = None,
    prerouter_mode: Literal["route", "advise", "off"] = "route",
    force: bool = False,
    load_progress: Callable[[float], None] | None = None,
    on_note: Callable[[str], None] = lambda note: None,
    on_chunk: Callable[[Chunk], None] = lambda chunk: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluated:
    """Loads a model and evaluates it; what `moestream eval` does, with the long names of its options.

    Args:
        model: A GGUF file. By default the one that ships with the package.
        hf_repo: Instead of `model`, "user/repo" or "user/repo:quant" on the Hugging Face Hub.
        hf_file: The file in that repository.
        file: A text. By default that of the base, else the one that ships with the package. As llama-perplexity does, one
            newline at its end is left out.
        ctx_size: Tokens of a chunk, by default those of the base, else 512.
        chunks: Evaluated at most; -1 is all.
        kl_divergence_base: The file of a base run's logits: with `kl_divergence` it is compared with, else it is written.
        kl_divergence: Compare with it.
        routing_base: A routing trace of a base run to compare the experts taken with.
        save_routing: Where to write such a trace.
        batch_size, ubatch_size: Tokens computed at once at most: the smaller counts. 1 computes as decoding does.
        threads: By default the physical cores.
        lora, flash_attn, cache_type_k, cache_type_v: As in `moestream generate`.
        expert_streaming: False loads the whole model, as llama_cpp.Llama does, to compare with.
        expert_cache, kernels, compute, reader, direct, verify, policy, prefetch, cache_aware, experts_used: As in
            `moestream.ExpertStreaming`.
        prerouter, prerouter_mode, force: As in `moestream generate`.
        load_progress: Is told the share of the model that is loaded, from 0 to 1; what it raises breaks loading off. It
            is not called without `expert_streaming`.
        on_note, on_chunk, progress, should_stop: As in `moestream.evaluate`.

    Raises:
        MoestreamError: The options, the model, the text or the base are no good, or experts could not be read.
    """
    from .. import ExpertStreaming, describe
    from .. import evaluate as evaluate_text
    from .._logits_file import LogitsFile, require_new
    from ..perplexity import CONTEXT

    if kl_divergence and kl_divergence_base is None:
        raise OptionError("--kl-divergence compares with a base run: name its file with --kl-divergence-base FILE")
    if chunks < 1 and chunks != -1:
        raise OptionError(f"--chunks {chunks}: give a number of at least 1, or -1 for all")
    if ctx_size is not None and ctx_size < 3:
        raise OptionError(f"--ctx-size {ctx_size}: at least 3 tokens are needed, of which one is predicted")
    for option, value in (("--threads", threads), ("--batch-size", batch_size), ("--ubatch-size", ubatch_size)):
        if value is not None and value < 1:
            raise OptionError(f"{option} {value}: give a number of at least 1")
    type_k, type_v = kv_types(cache_type_k, cache_type_v, flash_attn)
    require_adapters(lora)
    streaming = ExpertStreaming(
        cache=expert_cache,
        kernels=kernels,
        compute=compute,
        reader=reader,
        direct=direct,
        verify=verify,
        policy=policy,
        prefetch=prefetch,
        cache_aware=cache_aware,
        experts_used=experts_used,
        **sidecar_options(prerouter, prerouter_mode, force),
    )
    if not expert_streaming and (streaming != ExpertStreaming() or routing_base or save_routing):
        raise OptionError(
            "--no-expert-streaming leaves no use for --expert-cache, --kernels, --compute, --reader, --direct, --verify, "
            "--policy, --prefetch, --cache-aware, --experts-used, --prerouter, --routing-base and --save-routing"
        )
    base = kl_divergence_base if kl_divergence else None
    save_base = None if kl_divergence else kl_divergence_base
    of_base = None if base is None else LogitsFile.read(base)
    if save_base is not None:
        require_new(save_base)
    if save_routing is not None:
        require_writable(os.fspath(save_routing), "--save-routing")
    text, source = _text(file, base)
    context = ctx_size or (of_base.context if of_base is not None else CONTEXT)
    at_once = min(batch_size, ubatch_size, context)
    path = locate(model, hf_repo, hf_file)
    bytes_on_disk = describe(path).bytes_on_disk if expert_streaming else size_on_disk(path)
    threads = threads or default_threads()
    started = time.perf_counter()
    llm = load(
        path,
        streaming if expert_streaming else None,
        load_progress=load_progress if expert_streaming else None,
        prerouter=prerouter if prerouter_mode == "route" else None,
        force=force,
        # Its own context stays unused. What an "auto" cache leaves for it is what the evaluation takes.
        n_ctx=context,
        n_batch=at_once,
        n_ubatch=at_once,
        n_threads=threads,
        n_threads_batch=threads,
        lora_path=lora,
        flash_attn=flash_attn,
        type_k=type_k,
        type_v=type_v,
        verbose=logging.getLogger("moestream").isEnabledFor(logging.DEBUG),
    )
    with contextlib.closing(llm):
        load_s = time.perf_counter() - started
        report = evaluate_text(
            llm,
            text,
            context=ctx_size,
            chunks=None if chunks == -1 else chunks,
            tokens_at_once=at_once,
            base=base,
            save_base=save_base,
            routing_base=routing_base,
            save_routing=save_routing,
            on_note=on_note,
            on_chunk=on_chunk,
            progress=progress,
            should_stop=should_stop,
        )
    return Evaluated(path, source, report, load_s, threads, memory.peak_rss_bytes(), bytes_on_disk)


def run(*, json: bool, **options: Any) -> int:
    """Runs `evaluate` for the command line and returns the exit code."""
    shown = _Shown(json, compares=options["kl_divergence"])
    try:
        with Interrupt() as interrupt, Progress(interrupt.requested) as progress:
            found = evaluate(
                **options,
                load_progress=progress.load,
                on_note=lambda note: print(f"moestream: {note}", file=sys.stderr),
                on_chunk=shown.chunk,
                progress=lambda done, total: progress.show("evaluating", done, total, unit="tokens"),
                should_stop=interrupt.requested,
            )
    except MeasurementError:
        if not interrupt.requested():
            raise
        print("moestream: interrupted before the first chunk was done: nothing is reported", file=sys.stderr)
        return INTERRUPTED
    unwritten = [options["save_routing"], None if options["kl_divergence"] else options["kl_divergence_base"]]
    if json:
        print_json(_as_json(found, options))
    else:
        shown.end(found)
    if not found.report.partial:
        return 0
    done, wanted = len(found.report.chunks), found.report.chunks_wanted
    lost = "".join(f"; {path} was not written" for path in unwritten if path is not None)
    print(f"moestream: interrupted: these are the figures of {done} of {wanted} chunks{lost}", file=sys.stderr)
    return INTERRUPTED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `evaluate`. They have llama-perplexity's names where it has such an option."""
    add_model_arguments(parser)
    text = parser.add_argument_group("text")
    text.add_argument(
        "-f",
        "--file",
        metavar="FILE",
        help="the text (default: that of the base, else the one shipped with the package)",
    )
    text.add_argument(
        "-c",
        "--ctx-size",
        type=int,
        metavar="N",
        help="tokens of a chunk, of which the second half is predicted (default: those of the base, else 512)",
    )
    text.add_argument(
        "--chunks", type=int, default=-1, metavar="N", help="chunks to evaluate at most (default: all of the text)"
    )
    base = parser.add_argument_group("base run")
    base.add_argument(
        "--kl-divergence-base",
        metavar="FILE",
        help="write the logits to this file, for others to be compared with; with --kl-divergence, compare with it",
    )
    base.add_argument("--kl-divergence", action="store_true", help="compare with the base run in that file")
    base.add_argument("--save-routing", metavar="TRACE", help="write which experts were taken to this file")
    base.add_argument("--routing-base", metavar="TRACE", help="compare them with those of a base run in this file")
    running = parser.add_argument_group("running")
    running.add_argument("-t", "--threads", type=int, metavar="N", help="threads (default: the physical cores)")
    running.add_argument(
        "-ub",
        "--ubatch-size",
        "--tokens-at-once",
        type=int,
        default=512,
        metavar="N",
        help="tokens computed at once at most; 1: as in decoding, on which --cache-aware and --prerouter depend (default: %(default)s)",
    )
    running.add_argument(
        "-b",
        "--batch-size",
        type=int,
        default=2048,
        metavar="N",
        help="the same: the smaller counts (default: %(default)s)",
    )
    add_attention_arguments(running)
    add_streaming_arguments(parser).add_argument(
        "--no-expert-streaming",
        dest="expert_streaming",
        action="store_false",
        help="load the whole model as llama-cpp-python does, to compare with",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: all figures, statistics, versions")


def _text(file: str | os.PathLike[str] | None, base: str | os.PathLike[str] | None) -> tuple[bytes | str | None, str]:
    """The text to evaluate, None for the base's, and where it is from."""
    if file is not None:
        try:
            return Path(file).read_bytes().removesuffix(b"\n"), os.fspath(file)
        except OSError as exc:
            raise OptionError(f"cannot read the text {file}: {exc.strerror}") from exc
    if base is not None:
        return None, f"that of {base}"
    return validation_text(), "the validation text shipped with the package"


# What is printed


class _Shown:
    """Prints chunks as they are done, where no bar is drawn between them, and then the rest."""

    def __init__(self, json: bool, compares: bool) -> None:
        self._live = not json and not sys.stderr.isatty()
        self._compares = compares

    def chunk(self, chunk: Chunk) -> None:
        if self._live:
            self._print(chunk)

    def end(self, found: Evaluated) -> None:
        if not self._live:
            for chunk in found.report.chunks:
                self._print(chunk)
        if not self._compares:
            print()
        print()
        for line in _lines(found):
            print(line)

    def _print(self, chunk: Chunk) -> None:
        if not self._compares:
            print(f"[{chunk.chunk}]{chunk.perplexity.value:.4f},", end="", flush=True)
            return
        if chunk.chunk == 1:
            print(_HEADINGS)
        print(_row(chunk), flush=True)


_HEADINGS = "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              Δp RMS            Same top p"
_LEAST_TOKENS = 100  # llama-perplexity tells no statistics of fewer


def _row(chunk: Chunk) -> str:
    return "    ".join(
        (
            f"{chunk.chunk:4}",
            _estimate(chunk.perplexity, 9, 4),
            _estimate(chunk.log_ratio, 10, 5),
            _estimate(chunk.kl, 10, 5),
            f"{_estimate(chunk.change_rms, 6, 3, scale=100)} %",
            f"{_estimate(chunk.same_top, 6, 3, scale=100)} %",
        )
    )


def _lines(found: Evaluated) -> Iterator[str]:
    report = found.report
    if report.divergence is None:
        yield f"Final estimate: PPL = {report.perplexity.value:.4f} +/- {report.perplexity.error:.5f}"
    elif report.tokens < _LEAST_TOKENS:
        yield f"{report.tokens} tokens are too few for statistics: they need {_LEAST_TOKENS}"
    else:
        yield from _statistics(report.perplexity, report.divergence)
    yield ""
    if report.routing is not None:
        yield from _routing(report.routing)
    speed = f"{len(report.chunks) * report.context / report.seconds:.1f} tok/s"
    chunks = "1 chunk" if len(report.chunks) == 1 else f"{len(report.chunks)} chunks"
    yield f"Text: {found.text}, {chunks} of {report.context} tokens, {report.tokens_at_once} at once, {speed}"
    if report.stats is not None and report.stats.head_layers:
        yield f"Heads: {heads_told(report.stats)}"
    yield f"Memory: {_memory(found)}"


def _statistics(perplexity: Estimate, found: Divergence) -> Iterator[str]:
    yield "====== Perplexity statistics ======"
    yield f"Mean PPL(Q)                   : {_estimate(perplexity, 10, 6)}"
    yield f"Mean PPL(base)                : {_estimate(found.base_perplexity, 10, 6)}"
    correlation = "     -" if found.correlation is None else f"{100 * found.correlation:6.2f}%"
    yield f"Cor(ln(PPL(Q)), ln(PPL(base))): {correlation}"
    yield f"Mean ln(PPL(Q)/PPL(base))     : {_estimate(found.log_ratio, 10, 6)}"
    yield f"Mean PPL(Q)/PPL(base)         : {_estimate(found.ratio, 10, 6)}"
    yield f"Mean PPL(Q)-PPL(base)         : {_estimate(found.difference, 10, 6)}"
    yield ""
    yield "====== KL divergence statistics ======"
    yield f"Mean    KLD: {_estimate(found.kl, 10, 6)}"
    yield from (f"{_percentile(percent)} KLD: {value:10.6f}" for percent, value in found.kl_percentiles.items())
    yield ""
    yield "====== Token probability statistics ======"
    yield f"Mean    Δp: {_estimate(found.change, 6, 3, 5, scale=100)} %"
    yield from (
        f"{_percentile(percent)} Δp: {100 * value:6.3f}%" for percent, value in found.change_percentiles.items()
    )
    yield f"RMS Δp    : {_estimate(found.change_rms, 6, 3, 5, scale=100)} %"
    yield f"Same top p: {_estimate(found.same_top, 6, 3, 5, scale=100)} %"


def _estimate(found: Estimate, width: int, digits: int, error_width: int | None = None, *, scale: float = 1) -> str:
    return f"{scale * found.value:{width}.{digits}f} ± {scale * found.error:{error_width or width}.{digits}f}"


def _percentile(percent: float) -> str:
    named = {100: "Maximum", 50: "Median ", 0: "Minimum"}
    return named.get(percent, f"{percent:4.1f}%  ")


def _routing(found: RoutingMismatch) -> Iterator[str]:
    """Lines on experts that are not the gate's, or could not be; none where nothing was there to differ."""
    lines = []
    if found.experts_used != found.experts_of_model:
        lines.append(("Experts used in a layer", f"{found.experts_used} of the model's {found.experts_of_model}"))
    if found.cache_aware:
        lines.append(("Replaced by cached experts", f"{found.replaced_share:7.2%} of {found.choices} choices"))
    for guess in found.predictions:
        lines.append(
            (f"Predicted: {guess.name}", f"{guess.recall:7.2%} of those chosen; all of a layer {guess.exact:.2%}")
        )
    if (base := found.against_base) is not None:
        lines.append(("Layers' choices unlike base", f"{base.choices_changed:7.2%}"))
        missing = f"{base.experts_missing:7.2%}, {base.weight_missing:.2%} by weight"
        lines.append(("Base's experts not taken", missing))
    if lines:
        width = max(len(name) for name, _ in lines)
        yield "====== Routing statistics ======"
        yield from (f"{name:<{width}}: {value}" for name, value in lines)
        yield ""


def _memory(found: Evaluated) -> str:
    told = f"{format_size(found.peak_rss_bytes)} peak RSS, {format_size(found.bytes_on_disk)} on disk"
    stats = found.report.stats
    if stats is None:
        return f"{told}; experts not streamed"
    read = format_size(stats.bytes_read / stats.tokens) if stats.tokens else "-"
    return f"{told}; expert cache {format_size(stats.cache_bytes)}, hit rate {stats.hit_rate:.1%}, {read} read a token"


def _as_json(found: Evaluated, options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": os.fspath(found.model),
        "text": found.text,
        **found.report.as_dict(),
        "load_s": found.load_s,
        "memory": {"peak_rss_bytes": found.peak_rss_bytes, "bytes_on_disk": found.bytes_on_disk},
        "options": {**options, "threads": found.threads},
        "versions": versions(),
    }
