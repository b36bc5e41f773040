"""Write text with a model, its experts streamed from the SSD.

The text goes to stdout as it is made, a summary of speed and memory to stderr.

  moestream generate -m MODEL.gguf -p "The library is" -n 64 --expert-cache 3GiB
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import logging
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .. import memory
from .._hub import split_set
from .._threads import default_threads
from ..errors import ModelError, MoestreamError, OptionError
from ._interrupt import INTERRUPTED, Interrupt
from ._model import add_model_arguments, locate
from ._output import Progress, print_json
from ._summary import generation_as_json, print_summary

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from llama_cpp import LogitsProcessorList

    from .. import ExpertStats, ExpertStreaming, Llama
    from ..llama import LoraPath

_FLOAT_TYPES = ("f32", "f16", "bf16")
PREROUTER_MODES = ("route", "advise", "off")
CACHE_TYPES = (*_FLOAT_TYPES, "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
_SEED_END = 2**32 - 1  # this one means "random" to llama.cpp


def _ignore(*_: object) -> None:
    """A callback for those who want none."""


@dataclass(frozen=True)
class Generation:
    """What one call of `generate` made and what it took.

    Attributes:
        model: The model file.
        seed: The seed the tokens were drawn with; the same seed and options draw them again.
        text: The text, without the prompt.
        tokens: The tokens of the text. The end-of-text token is not among them.
        finish_reason: "stop" (the model ended the text), "length" (`n_predict` is reached), "context" (the context is
            full), "interrupted", or "error", told by `error`.
        error: What ended the text before its time.
        load_s: Time to load the model.
        prompt_tokens: Tokens of the prompt that were evaluated.
        prompt_s: Time to evaluate them.
        first_token_s: Time from the start of the prompt to the first token; None if there was none.
        decode_tokens: Tokens after the first, each of which took an evaluation; the first came from the prompt's.
        decode_s: Time from the first token to the last.
        prompt_stats: What the prompt asked of the experts; None if they were not streamed.
        decode_stats: The same of decode.
        stats: The same since the model was loaded, with what does not change.
        threads: Threads of decode, at its end.
        context_tokens: Tokens that prompt and text may have together: no more than the model was trained with.
        trained_tokens: What that is.
        rss_before_bytes: Resident memory of this process before the model was loaded.
        peak_rss_bytes: Highest resident memory of this process so far.
        bytes_on_disk: Size of the model's files.
    """

    model: Path
    seed: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "length", "context", "interrupted", "error"]
    error: MoestreamError | None
    load_s: float
    prompt_tokens: int
    prompt_s: float
    first_token_s: float | None
    decode_tokens: int
    decode_s: float
    prompt_stats: ExpertStats | None
    decode_stats: ExpertStats | None
    stats: ExpertStats | None
    threads: int
    context_tokens: int
    trained_tokens: int
    rss_before_bytes: int
    peak_rss_bytes: int
    bytes_on_disk: int

    @property
    def prompt_tokens_per_s(self) -> float | None:
        return self.prompt_tokens / self.prompt_s if self.prompt_tokens else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        return self.decode_tokens / self.decode_s if self.decode_tokens else None


def generate(
    *,
    model: str | os.PathLike[str] | None = None,
    hf_repo: str | None = None,
    hf_file: str | None = None,
    prompt: str | None = None,
    file: str | os.PathLike[str] | None = None,
    escape: bool = True,
    n_predict: int = 128,
    ctx_size: int = 4096,
    threads: int | None = None,
    threads_batch: int | None = None,
    batch_size: int = 2048,
    ubatch_size: int = 512,
    temp: float = 0.8,
    seed: int = -1,
    top_k: int = 40,
    top_p: float = 0.95,
    min_p: float = 0.05,
    repeat_penalty: float = 1.0,
    repeat_last_n: int = 64,
    ignore_eos: bool = False,
    lora: LoraPath | Sequence[LoraPath | tuple[LoraPath, float]] | None = None,
    flash_attn: bool = False,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    expert_streaming: bool = True,
    mmap: bool = True,
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
    on_text: Callable[[str], None] = _ignore,
    load_progress: Callable[[float], None] | None = None,
    prompt_progress: Callable[[int, int], None] = _ignore,
    should_stop: Callable[[], bool] = lambda: False,
    watch: Callable[[Llama], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Generation:
    """Continues a prompt; what `moestream generate` does, with the long names of its options.

    Args:
        model: A GGUF file. By default the one that ships with the package.
        hf_repo: Instead of `model`, "user/repo" or "user/repo:quant" on the Hugging Face Hub.
        hf_file: The file in that repository.
        prompt: The text to continue.
        file: Instead of `prompt`, a file that holds it. One newline at its end is not part of the prompt.
        escape: Replace \\n, \\r, \\t, \\', \\", \\\\ and \\x41 in the prompt by what they stand for, as llama.cpp does.
        n_predict: Tokens to write at most; -1 writes until the text ends or the context is full; 0 writes nothing.
        ctx_size: Tokens that prompt and text may have together; 0 is what the model was trained with, and more than that
            are never written.
        threads: Threads of decode. By default the number that is fastest here, which is measured once for a model, and
            fewer while other programs want the cores; without `expert_streaming` the physical cores.
        threads_batch: Threads of prompts, by default `threads`, else the physical cores.
        batch_size: Tokens llama.cpp is handed at once at most.
        ubatch_size: Tokens it computes at once at most. The prompt is evaluated in pieces of this size.
        temp: Temperature; 0 always takes the likeliest token.
        seed: Seed of the sampler; -1 takes a random one.
        top_k, top_p, min_p: Samplers as in llama.cpp.
        repeat_penalty: 1 is no penalty.
        repeat_last_n: Tokens the penalty looks back on.
        ignore_eos: Never draw an end-of-text token.
        lora: A LoRA adapter (GGUF) to apply, or a list of adapters and of (adapter, scale).
        flash_attn: Use flash attention. A quantised `cache_type_v` needs it.
        cache_type_k, cache_type_v: Types of the KV cache, one of CACHE_TYPES.
        expert_streaming: False loads the whole model, as llama_cpp.Llama does, to compare with.
        mmap: Without `expert_streaming`, map the file instead of reading it, as llama_cpp.Llama does by default. Pages of
            weights that are repacked stay mapped and count twice in the resident memory.
        expert_cache, kernels, compute, reader, direct, verify, policy, prefetch, cache_aware, experts_used: As in
            `moestream.ExpertStreaming`.
        prerouter: A sidecar made for the model. Its LoRA is applied.
        prerouter_mode: What its heads are for, as in `moestream.ExpertStreaming`.
        force: Take a sidecar that was made for another model, if it fits.
        on_text: Is handed each piece of text as it is made.
        load_progress: Is told the share of the model that is loaded, from 0 to 1; what it raises breaks loading off. It
            is not called without `expert_streaming`.
        prompt_progress: Is told how many tokens of how many in the prompt are evaluated.
        should_stop: Is asked between two tokens, and between two pieces of the prompt.
        watch: Is handed the model; prompt and text are evaluated within the context that it gives.

    Returns:
        What was made, also when `should_stop` or an error ended it after the prompt.

    Raises:
        MoestreamError: The options or the model are no good, or the prompt could not be evaluated.
    """
    import llama_cpp

    from .. import ExpertStreaming, describe

    text = _prompt_text(prompt, file).encode(errors="surrogateescape")
    if escape:
        text = unescape(text)
    _check_sizes(n_predict, ctx_size, threads, threads_batch, batch_size, ubatch_size)
    _check_sampling(temp, repeat_penalty, repeat_last_n, seed)
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
    if not expert_streaming and streaming != ExpertStreaming():
        raise OptionError(
            "--no-expert-streaming leaves no use for --expert-cache, --kernels, --compute, --reader, --direct, --verify, "
            "--policy, --prefetch, --cache-aware, --experts-used and --prerouter"
        )
    path = locate(model, hf_repo, hf_file)
    bytes_on_disk = describe(path).bytes_on_disk if expert_streaming else size_on_disk(path)
    seed = secrets.randbelow(_SEED_END) if seed == -1 else seed

    rss_before_bytes = memory.rss_bytes()
    started = time.perf_counter()
    llm = load(
        path,
        streaming if expert_streaming else None,
        load_progress=load_progress if expert_streaming else None,
        prerouter=prerouter if prerouter_mode == "route" else None,
        force=force,
        n_ctx=ctx_size,
        n_batch=batch_size,
        n_ubatch=ubatch_size,
        n_threads=threads if expert_streaming else threads or default_threads(),
        n_threads_batch=threads_batch or threads or default_threads(),
        last_n_tokens_size=repeat_last_n,
        lora_path=lora,
        use_mmap=mmap,
        flash_attn=flash_attn,
        type_k=type_k,
        type_v=type_v,
        verbose=logging.getLogger("moestream").isEnabledFor(logging.DEBUG),
    )
    with contextlib.closing(llm), contextlib.ExitStack() as watching:
        load_s = time.perf_counter() - started
        prompt_tokens = llm.tokenize(text, add_bos=True, special=True)
        trained_tokens = llama_cpp.llama_model_n_ctx_train(llm.model)
        context_tokens = min(len(llm.input_ids), trained_tokens)
        room = _room(len(prompt_tokens), n_ctx=context_tokens, n_trained=trained_tokens, n_predict=n_predict)
        logits_processor = _without_ends(llm) if ignore_eos else None
        stats = [llm.expert_stats()] if expert_streaming else []

        watching.enter_context(watch(llm))
        prompt_started = time.perf_counter()
        evaluated = _evaluate(llm, prompt_tokens, ubatch_size, prompt_progress, should_stop)
        prompt_s = time.perf_counter() - prompt_started
        stats += [llm.expert_stats()] if expert_streaming else []

        llm.set_seed(seed)  # llama_cpp.Llama takes a seed=0 for none
        draws = llm.generate(
            prompt_tokens,  # evaluated already, which it sees: it draws the first token at once
            temp=temp,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            logits_processor=logits_processor,
        )
        whole = evaluated == len(prompt_tokens)
        written = _write(llm, draws, room, on_text, should_stop) if whole else _Written(finish_reason="interrupted")
        stats += [llm.expert_stats()] if expert_streaming else []
        decode_threads = llm.decode_threads

    finish_reason = written.finish_reason
    if finish_reason == "length" and room != n_predict:
        finish_reason = "context"
    return Generation(
        model=path,
        seed=seed,
        text=written.text,
        tokens=written.tokens,
        finish_reason=finish_reason,
        error=written.error,
        load_s=load_s,
        prompt_tokens=evaluated,
        prompt_s=prompt_s,
        first_token_s=written.times[0] - prompt_started if written.times else None,
        decode_tokens=max(len(written.tokens) - 1, 0),
        decode_s=written.times[-1] - written.times[0] if written.times else 0.0,
        prompt_stats=stats[1].since(stats[0]) if stats else None,
        decode_stats=stats[2].since(stats[1]) if stats else None,
        stats=stats[2] if stats else None,
        threads=decode_threads,
        context_tokens=context_tokens,
        trained_tokens=trained_tokens,
        rss_before_bytes=rss_before_bytes,
        peak_rss_bytes=memory.peak_rss_bytes(),
        bytes_on_disk=bytes_on_disk,
    )


def run(*, json: bool, **options: Any) -> int:
    """Runs `generate` for the command line and returns the exit code."""
    with Interrupt() as interrupt, Progress(interrupt.requested) as progress:

        def on_text(piece: str) -> None:
            sys.stdout.write(piece)
            sys.stdout.flush()

        generation = generate(
            **options,
            on_text=_ignore if json else on_text,
            load_progress=progress.load,
            prompt_progress=progress.prompt,
            should_stop=interrupt.requested,
        )
    if json:
        print_json(generation_as_json(generation, options))
    else:
        if generation.text and not generation.text.endswith("\n"):
            print(flush=True)
        if generation.error is None:
            print_summary(generation)
    if generation.error is not None:
        raise generation.error
    return INTERRUPTED if generation.finish_reason == "interrupted" else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `generate`. They have llama.cpp's names where it has such an option."""
    add_model_arguments(parser)
    add_text_arguments(parser)
    add_sampling_arguments(parser)
    add_running_arguments(parser)
    streaming = add_streaming_arguments(parser)
    streaming.add_argument(
        "--no-expert-streaming",
        dest="expert_streaming",
        action="store_false",
        help="load the whole model as llama-cpp-python does, to compare with",
    )
    streaming.add_argument(
        "--mmap",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="for that, map the file instead of reading it (default: on)",
    )


def add_text_arguments(parser: argparse.ArgumentParser, *, n_predict: int = 128) -> None:
    """Adds the options that say what is written."""
    text = parser.add_argument_group("text")
    prompt = text.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument("-f", "--file", metavar="FILE", help="a file that holds it")
    text.add_argument(
        "-n",
        "--n-predict",
        "--predict",
        type=int,
        default=n_predict,
        metavar="N",
        help="tokens to write at most; -1: until the text or the context ends (default: %(default)s)",
    )
    text.add_argument(
        "-e",
        "--escape",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=r"take \n, \t, \x41 and the like in the prompt for what they stand for (default: on)",
    )
    text.add_argument("--ignore-eos", action="store_true", help="write on where the model would end the text")
    text.add_argument("--json", action="store_true", help="print one JSON object: text, timings, statistics, versions")


def add_running_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say how the model is run."""
    running = parser.add_argument_group("running")
    running.add_argument(
        "-c",
        "--ctx-size",
        type=int,
        default=4096,
        metavar="N",
        help="0: as the model was trained (default: %(default)s)",
    )
    running.add_argument("-t", "--threads", type=int, metavar="N", help="threads of decode (default: the fastest)")
    running.add_argument(
        "-tb", "--threads-batch", type=int, metavar="N", help="threads of prompts (default: those of decode)"
    )
    running.add_argument(
        "-b",
        "--batch-size",
        type=int,
        default=2048,
        metavar="N",
        help="largest batch of a prompt (default: %(default)s)",
    )
    running.add_argument(
        "-ub",
        "--ubatch-size",
        type=int,
        default=512,
        metavar="N",
        help="tokens computed at once at most (default: %(default)s)",
    )
    add_attention_arguments(running)


def add_attention_arguments(running: argparse._ActionsContainer) -> None:
    """Adds the options of attention and of an adapter."""
    running.add_argument(
        "-fa", "--flash-attn", type=_on_off, default=False, metavar="{on,off}", help="flash attention (default: off)"
    )
    for letter, which in (("k", "K"), ("v", "V")):
        running.add_argument(
            f"-ct{letter}",
            f"--cache-type-{letter}",
            choices=CACHE_TYPES,
            default="f16",
            metavar="TYPE",
            help=f"type of the {which} cache: {', '.join(CACHE_TYPES)} (default: %(default)s)",
        )
    running.add_argument(
        "--lora", metavar="FILE", action="append", help="a LoRA adapter to apply; may be given several times"
    )
    running.add_argument(
        "--lora-scaled",
        metavar="FILE:SCALE",
        dest="lora",
        action="append",
        type=_scaled_adapter,
        help="the same, with a scale in place of 1",
    )


def add_streaming_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds the options of `moestream.ExpertStreaming`, and returns their group."""
    streaming = parser.add_argument_group("expert streaming")
    add_cache_arguments(streaming)
    streaming.add_argument(
        "--compute",
        choices=("exact", "fast", "ggml"),
        default="exact",
        help="a layer's experts as one operation with llama.cpp's bits (default), with faster sums in prompts, or node by node",
    )
    streaming.add_argument(
        "--direct",
        action=argparse.BooleanOptionalAction,
        default="auto",
        help="read around the page cache (default: where the file allows it)",
    )
    streaming.add_argument(
        "--verify", action="store_true", help="look for damaged weights in every expert that is read"
    )
    streaming.add_argument(
        "--policy",
        choices=("lru", "lfu", "lrfu"),
        default="lrfu",
        help="which cached expert is given up first, by recency, frequency or both (default: %(default)s)",
    )
    streaming.add_argument(
        "--prefetch",
        choices=("auto", "off", "router", "lookahead", "router+lookahead", "repeat"),
        metavar="WHICH",
        default="auto",
        help="experts to read before they are wanted: off, router, lookahead, router+lookahead, repeat, or auto, which is "
        "those that are known, and guesses where they pay (default: %(default)s)",
    )
    streaming.add_argument(
        "--cache-aware",
        type=float,
        default=0.0,
        metavar="MARGIN",
        help="take an expert in memory for one that is not, if its score is that little lower (0.05: 5%%), which changes "
        "what the model says (default: never)",
    )
    streaming.add_argument(
        "--prerouter",
        metavar="SIDECAR",
        help="trained heads, a LoRA, or both, made for this model; changes what it says (see moestream sidecar)",
    )
    streaming.add_argument(
        "--prerouter-mode",
        choices=PREROUTER_MODES,
        default="route",
        help="what its heads do in decode: choose experts a token ahead, say only what to read ahead, or nothing, which "
        "leaves the LoRA (default: %(default)s)",
    )
    streaming.add_argument(
        "--force", action="store_true", help="take a sidecar that was made for another model, if it fits"
    )
    return streaming


def add_cache_arguments(parser: argparse._ActionsContainer) -> None:
    """Adds the options that say how experts are kept and read."""
    parser.add_argument(
        "--expert-cache",
        default="auto",
        metavar="SIZE",
        help="memory for experts, like 3GiB (default: what is available, less 10%%)",
    )
    parser.add_argument(
        "--kernels",
        choices=("auto", "plain", "interleaved"),
        default="auto",
        help="layout of cached weights (default: the faster)",
    )
    parser.add_argument(
        "--reader",
        choices=("auto", "uring", "pread", "mmap"),
        default="auto",
        help="how experts are read (default: measured)",
    )
    parser.add_argument(
        "--experts-used",
        type=int,
        metavar="K",
        help="experts that a token takes in each layer, which changes what the model says (default: the model's own)",
    )


def add_sampling_arguments(
    parser: argparse.ArgumentParser, *, temp: float = 0.8, seed: int = -1, repeat_penalty: float = 1.0
) -> None:
    """Adds the options that say how tokens are drawn, with their defaults."""
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--temp", type=float, default=temp, metavar="T", help="temperature; 0: greedy (default: %(default)s)"
    )
    sampling.add_argument(
        "-s", "--seed", type=int, default=seed, metavar="N", help="-1: a random one (default: %(default)s)"
    )
    sampling.add_argument("--top-k", type=int, default=40, metavar="N", help="0: off (default: %(default)s)")
    sampling.add_argument("--top-p", type=float, default=0.95, metavar="P", help="1: off (default: %(default)s)")
    sampling.add_argument("--min-p", type=float, default=0.05, metavar="P", help="0: off (default: %(default)s)")
    sampling.add_argument(
        "--repeat-penalty", type=float, default=repeat_penalty, metavar="X", help="1: off (default: %(default)s)"
    )
    sampling.add_argument(
        "--repeat-last-n",
        type=int,
        default=64,
        metavar="N",
        help="tokens that penalty looks back on (default: %(default)s)",
    )


def _on_off(value: str) -> bool:
    try:
        return {"on": True, "off": False}[value]
    except KeyError:
        raise argparse.ArgumentTypeError(f"{value!r} is neither on nor off") from None


def _prompt_text(prompt: str | None, file: str | os.PathLike[str] | None) -> str:
    if (prompt is None) == (file is None):
        raise OptionError("give the prompt either as text (-p) or in a file (-f)")
    if prompt is not None:
        return prompt
    try:
        return Path(file).read_text(encoding="utf-8").removesuffix("\n")
    except OSError as exc:
        raise OptionError(f"cannot read the prompt file {file}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise OptionError(f"the prompt file {file} is not UTF-8 text (byte {exc.start})") from exc


def unescape(text: bytes) -> bytes:
    r"""A prompt with \n, \r, \t, \', \", \\ and \x41 replaced by what they stand for; other backslashes stay, as in llama.cpp."""
    letters = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}

    def meant(match: re.Match[bytes]) -> bytes:
        escaped = match[1]
        return bytes([int(escaped[1:], 16)]) if len(escaped) > 1 else letters.get(escaped, escaped)

    return re.sub(rb"""\\(x[0-9a-fA-F]{2}|[nrt'"\\])""", meant, text)


def load(path: Path, streaming: ExpertStreaming | None, **options: Any) -> Llama:
    """The model, streamed or not. Raises MoestreamError if it cannot be loaded."""
    from .. import Llama

    if streaming is not None:
        return Llama(str(path), expert_streaming=streaming, **options)
    taken, available = size_on_disk(path), memory.available_bytes()
    if taken > available:
        raise OptionError(
            f"--no-expert-streaming: {path.name} takes {memory.format_size(taken)} of memory and {memory.format_size(available)} are "
            "available, which would stop the whole machine; leave it out"
        )
    try:
        return Llama(str(path), **options)
    except MoestreamError:
        raise
    except ValueError as exc:  # all that llama_cpp.Llama says when llama.cpp cannot load a file or make a context
        raise ModelError(f"{exc} (-vv shows llama.cpp's log)") from exc


def size_on_disk(path: Path) -> int:
    """Bytes of all files of the model whose first file is `path`, with experts or without."""
    return sum(shard.stat().st_size for shard in _shards(path))


def _shards(path: Path) -> list[Path]:
    """The files of the model whose first file is `path`."""
    paths = [path.with_name(name) for name in split_set(path.name)]
    if missing := [path for path in paths if not path.is_file()]:
        raise ModelError(f"{missing[0]}: {'is a directory' if missing[0].is_dir() else 'no such file'}")
    return paths


def _check_sizes(
    n_predict: int,
    ctx_size: int,
    threads: int | None,
    threads_batch: int | None,
    batch_size: int,
    ubatch_size: int,
) -> None:
    if n_predict < -1:
        raise OptionError(f"--n-predict {n_predict}: give a number of tokens, or -1 for no limit")
    if ctx_size < 0:
        raise OptionError(f"--ctx-size {ctx_size}: give a number of tokens, or 0 for what the model was trained with")
    for option, value in (("--threads", threads), ("--threads-batch", threads_batch)):
        if value is not None and value < 1:
            raise OptionError(f"{option} {value}: at least one thread is needed")
    if ubatch_size < 1:
        raise OptionError(f"--ubatch-size {ubatch_size}: at least one token is needed")
    if ubatch_size > batch_size:
        raise OptionError(f"--ubatch-size {ubatch_size} is more than --batch-size {batch_size}: raise -b or lower -ub")


def require_adapters(lora: LoraPath | Sequence[LoraPath | tuple[LoraPath, float]] | None) -> None:
    """Raises OptionError for an adapter that is not there."""
    for each in [lora] if isinstance(lora, (str, os.PathLike)) else lora or ():
        path = each[0] if isinstance(each, tuple) else each
        if not Path(path).is_file():
            raise OptionError(f"--lora: there is no file {path}")


def sidecar_options(prerouter: str | os.PathLike[str] | None, mode: str, force: bool) -> dict[str, Any]:
    """What `moestream.ExpertStreaming` is told of a sidecar. Where its heads are to route, `moestream.Llama` is told of it
    besides: it may have none, but a LoRA.

    Raises:
        OptionError: There is no sidecar, but something is said of it.
    """
    if prerouter is not None:
        return {"sidecar": prerouter, "prerouter": "off" if mode == "route" else mode}
    if mode != "route":
        raise OptionError(f"--prerouter-mode {mode}: is about the heads of a sidecar; name it with --prerouter SIDECAR")
    if force:
        raise OptionError("--force: is about a sidecar of another model; name it with --prerouter SIDECAR")
    return {}


def _scaled_adapter(text: str) -> tuple[str, float]:
    path, _, scale = text.rpartition(":")
    try:
        number = float(scale)
    except ValueError:
        number = math.nan
    if not path or not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r}: give the file and its scale, such as adapter.gguf:0.5")
    return path, number


def kv_types(cache_type_k: str, cache_type_v: str, flash_attn: bool) -> tuple[int, int]:
    """ggml's numbers of the types of a KV cache. Raises OptionError if there is no such cache."""
    types = _ggml_type(cache_type_k), _ggml_type(cache_type_v)
    if cache_type_v not in _FLOAT_TYPES and not flash_attn:
        raise OptionError(f"--cache-type-v {cache_type_v} needs flash attention: add -fa on")
    return types


def _check_sampling(temp: float, repeat_penalty: float, repeat_last_n: int, seed: int) -> None:
    if not temp >= 0:
        raise OptionError(f"--temp {temp}: the temperature is 0 or more")
    if not repeat_penalty > 0:
        raise OptionError(f"--repeat-penalty {repeat_penalty}: the penalty is more than 0, and 1 is none")
    if repeat_last_n < 0:
        raise OptionError(f"--repeat-last-n {repeat_last_n}: give a number of tokens, or 0 for no penalty")
    if not -1 <= seed < _SEED_END:
        raise OptionError(f"--seed {seed}: give a number from 0 to {_SEED_END - 1}, or -1 for a random one")


def _room(n_prompt: int, *, n_ctx: int, n_trained: int, n_predict: int) -> int:
    """Tokens that may be written after a prompt of `n_prompt` tokens."""
    if n_prompt == 0:
        raise OptionError("the prompt is empty, and this model has no token to begin a text with: give a prompt")
    if n_prompt >= n_ctx:
        if n_prompt >= n_trained:
            raise OptionError(f"the prompt has {n_prompt} tokens, the model was trained with {n_trained}: shorten it")
        wanted = min(n_prompt + max(n_predict, 1), n_trained)
        raise OptionError(f"the prompt has {n_prompt} tokens, the context holds {n_ctx}: raise -c to {wanted}")
    return n_ctx - n_prompt if n_predict == -1 else min(n_predict, n_ctx - n_prompt)


def _ggml_type(name: str) -> int:
    import llama_cpp

    if name not in CACHE_TYPES:
        raise OptionError(f"there is no KV cache of type {name!r}: choose from {', '.join(CACHE_TYPES)}")
    return getattr(llama_cpp, f"GGML_TYPE_{name.upper()}")


def _evaluate(
    llm: Llama,
    tokens: Sequence[int],
    piece_size: int,
    progress: Callable[[int, int], None],
    should_stop: Callable[[], bool],
) -> int:
    """Evaluates the prompt, piece by piece, and returns how many of its tokens it came to."""
    done = 0
    progress(done, len(tokens))
    while done < len(tokens) and not should_stop():
        piece = tokens[done : done + piece_size]
        llm.eval(piece)
        done += len(piece)
        progress(done, len(tokens))
    return done


@dataclass(frozen=True)
class _Written:
    finish_reason: Literal["stop", "length", "interrupted", "error"]
    text: str = ""
    tokens: tuple[int, ...] = ()
    times: tuple[float, ...] = ()
    error: MoestreamError | None = None


def _write(
    llm: Llama, draws: Iterator[int], room: int, on_text: Callable[[str], None], should_stop: Callable[[], bool]
) -> _Written:
    """Turns at most `room` of the tokens that `draws` gives into text."""
    tokens: list[int] = []
    times: list[float] = []
    pieces: list[str] = []
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may be spread over several tokens

    def write(data: bytes, final: bool = False) -> None:
        if piece := utf8.decode(data, final):
            pieces.append(piece)
            on_text(piece)

    def written(
        finish_reason: Literal["stop", "length", "interrupted", "error"], error: MoestreamError | None = None
    ) -> _Written:
        write(b"", final=True)
        return _Written(finish_reason, "".join(pieces), tuple(tokens), tuple(times), error)

    try:
        while len(tokens) < room:
            if should_stop():
                return written("interrupted")
            token = next(draws)
            if _ends_text(llm, token):
                return written("stop")
            times.append(time.perf_counter())
            tokens.append(token)
            write(llm.detokenize([token]))
    except MoestreamError as exc:
        return written("error", exc)
    return written("length")


def _ends_text(llm: Llama, token: int) -> bool:
    import llama_cpp

    return llama_cpp.llama_vocab_is_eog(llama_cpp.llama_model_get_vocab(llm.model), token)


def _without_ends(llm: Llama) -> LogitsProcessorList:
    """Rules out all tokens that end a text."""
    import llama_cpp
    import numpy as np

    ends = [token for token in range(llm.n_vocab()) if _ends_text(llm, token)]

    def rule_out(tokens: npt.NDArray[np.intc], logits: npt.NDArray[np.single]) -> npt.NDArray[np.single]:
        logits[ends] = -np.inf
        return logits

    return llama_cpp.LogitsProcessorList([rule_out])
