"""Write a text twice, its experts streamed and all in memory, and compare.

Both are drawn with the same seed, so equal logits give equal tokens. The exit
code is 1 if the texts differ.

With --prerouter both are streamed: once the model's routers choose experts,
once trained heads do, a token ahead. That is another text, and another speed.

  moestream demo
  moestream demo --kind handbook --seed 7
  moestream demo --prerouter
  moestream demo -m MODEL.gguf -p "The library is" --expert-cache 3GiB
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import memory
from .._engine import MARGIN
from ..errors import OptionError
from ..memory import format_size, parse_size
from ..models import demo_model
from ._apart import generate_apart
from ._beside import Page
from ._interrupt import INTERRUPTED, Interrupt
from ._model import add_model_arguments, locate
from ._output import Progress, print_columns, print_json, versions
from ._summary import how_it_ended, made_as_json
from .generate import Generation, add_sampling_arguments
from .inspect import advise, shape

if TYPE_CHECKING:
    from .. import ModelDescription
    from ..stats import ExpertStats

PROMPTS = {
    "novel": "The old house stood at the end of the lane, and",
    "scripture": "And it came to pass in those days, that",
    "dictionary": "Library, n. A collection of",
    "handbook": "Before the system is started, it is important to",
    "programming": "This function returns the number of",
}
"""A beginning for each kind of text that the shipped models were trained on."""

CACHED_SHARE = 0.4
TOKENS = 120
TEMPERATURE = 0.7
REPEAT_PENALTY = 1.1
SEED = 2
CONTEXT = 512

STREAMED, RESIDENT, PREDICTED = "streamed", "resident", "predicted"
BESIDE = ".sidecar.gguf"
_WIDTH = 96
_CUT = ("interrupted", "error")
_WITH_HEADS = "qwen3moe"  # the shipped model that has a sidecar


@dataclass(frozen=True)
class Setting:
    """What is about to be compared."""

    description: ModelDescription
    prompt: str
    cached_share: float
    """Share of the experts that the cache holds, 0 to 1."""
    prerouter: Path | None = None
    """The sidecar whose heads route the second text."""


@dataclass(frozen=True)
class Comparison:
    """The same text, written twice."""

    setting: Setting
    streamed: Generation
    resident: Generation | None
    not_compared: str | None = None
    """Why there is no second text."""
    predicted: Generation | None = None
    """In place of `resident`: streamed, and routed by heads."""

    @property
    def second(self) -> Generation | None:
        return self.resident or self.predicted

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that is not the same, or that only one text has though nothing cut the other off."""
        if self.second is None:
            return None
        shorter, longer = sorted((self.streamed, self.second), key=lambda made: len(made.tokens))
        for index, (one, other) in enumerate(zip(shorter.tokens, longer.tokens, strict=False)):
            if one != other:
                return index
        if len(shorter.tokens) < len(longer.tokens) and shorter.finish_reason not in _CUT:
            return len(shorter.tokens)
        return None

    @property
    def identical(self) -> bool | None:
        """None if one of the texts is missing or was cut off before a difference."""
        if self.first_difference is not None:
            return False
        if self.second is None or {self.streamed.finish_reason, self.second.finish_reason} & set(_CUT):
            return None
        return True


def demo(
    *,
    model: str | os.PathLike[str] | None = None,
    hf_repo: str | None = None,
    hf_file: str | None = None,
    prompt: str | None = None,
    kind: str | None = None,
    n_predict: int = TOKENS,
    ctx_size: int = CONTEXT,
    threads: int | None = None,
    temp: float = TEMPERATURE,
    seed: int = SEED,
    top_k: int = 40,
    top_p: float = 0.95,
    min_p: float = 0.05,
    repeat_penalty: float = REPEAT_PENALTY,
    repeat_last_n: int = 64,
    expert_cache: int | str | None = None,
    prerouter: str | os.PathLike[str] | None = None,
    force: bool = False,
    on_ready: Callable[[Setting], None] = lambda setting: None,
    on_text: Callable[[str, str], None] = lambda arm, piece: None,
    load_progress: Callable[[float], None] = lambda share: None,
    prompt_progress: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Continues a prompt twice, each time in a new process: streamed, then with stock llama_cpp.Llama, or routed by heads.

    Args:
        kind: Instead of `prompt`, the kind of text to begin, one of PROMPTS.
        expert_cache: As in `moestream.ExpertStreaming`; None is CACHED_SHARE of the model's experts, if the machine has
            that much, and no less than works.
        prerouter: A sidecar made for the model: the second text is streamed too, and routed by its heads. "" is the one
            beside the model; if there is no model, that of a shipped one.
        force: Take a sidecar that was made for another model, if it fits.
        on_ready: Is told what will be compared when the streamed model is loaded.
        on_text: Is handed STREAMED, RESIDENT or PREDICTED and each piece of text as it is made.
        Everything else is as in `generate`.

    Raises:
        MoestreamError: As `generate`.
    """
    from .. import describe

    if prompt is not None and kind is not None:
        raise OptionError("both a prompt and a kind of prompt are given: give one")
    if n_predict == 0:
        raise OptionError("--n-predict 0: there would be nothing to compare; give a number of tokens")
    prompt = PROMPTS[kind or "novel"] if prompt is None else prompt
    if prerouter == "" and model is None and hf_repo is None:
        model = demo_model(_WITH_HEADS)
    description = describe(locate(model, hf_repo, hf_file))
    sidecar = None if prerouter is None else Path(prerouter) if prerouter else _beside(description.path)
    if force and sidecar is None:
        raise OptionError("--force: is about a sidecar of another model; name it with --prerouter SIDECAR")
    if expert_cache is None:
        expert_cache = _small_cache_bytes(description)
    setting = Setting(description, prompt, _cached_share(expert_cache, description), sidecar)
    options: dict[str, Any] = dict(
        model=description.path,
        prompt=prompt,
        n_predict=n_predict,
        ctx_size=ctx_size,
        threads=threads,
        temp=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        repeat_last_n=repeat_last_n,
        should_stop=should_stop,
    )
    ready = False

    def first_prompt_progress(done: int, total: int) -> None:
        nonlocal ready
        if not ready:
            on_ready(setting)
            ready = True
        prompt_progress(done, total)

    streamed = generate_apart(
        **options,
        seed=seed,
        expert_cache=expert_cache,
        on_text=functools.partial(on_text, STREAMED),
        load_progress=load_progress,
        prompt_progress=first_prompt_progress,
    )
    if streamed.finish_reason in _CUT or should_stop():
        rest = "the model in memory wrote the same" if sidecar is None else "heads routed the same"
        return Comparison(setting, streamed, None, f"interrupted before {rest}")
    if sidecar is not None:
        predicted = generate_apart(
            **options,
            seed=streamed.seed,
            expert_cache=expert_cache,
            prerouter=sidecar,
            force=force,
            on_text=functools.partial(on_text, PREDICTED),
            prompt_progress=prompt_progress,
        )
        return Comparison(setting, streamed, None, predicted=predicted)
    if description.laid:
        return Comparison(
            setting, streamed, None, "a laid file can only be streamed; moestream export makes a stock one of it"
        )
    available = memory.available_bytes()
    if description.bytes_on_disk > available * (1 - MARGIN):
        wanted = format_size(description.bytes_on_disk)
        return Comparison(
            setting, streamed, None, f"the whole model is {wanted}, and {format_size(available)} of memory is available"
        )
    resident = generate_apart(
        **options,
        seed=streamed.seed,
        expert_streaming=False,
        mmap=False,  # what is mapped and repacked would count twice as memory
        on_text=functools.partial(on_text, RESIDENT),
        prompt_progress=prompt_progress,
    )
    return Comparison(setting, streamed, resident)


def run(*, json: bool, **options: Any) -> int:
    """Runs `demo` for the command line and returns the exit code."""
    with (
        Interrupt() as interrupt,
        Progress(interrupt.requested) as progress,
        contextlib.ExitStack() as pages,
    ):
        page: Page | None = None

        def on_ready(setting: Setting) -> None:
            nonlocal page
            print_setting(setting)
            page = pages.enter_context(contextlib.closing(Page(sys.stdout, _headings(setting))))

        def on_text(arm: str, piece: str) -> None:
            if page is not None:
                page.write(int(arm != STREAMED), piece)

        def should_stop() -> bool:
            if interrupt.requested():  # nobody draws on the terminal any more, before a message comes up there
                progress.close()
                if page is not None:
                    page.close()
            return interrupt.requested()

        comparison = demo(
            **options,
            **({} if json else {"on_ready": on_ready, "on_text": on_text}),
            load_progress=progress.load,
            prompt_progress=progress.prompt,
            should_stop=should_stop,
        )
    if json:
        print_json(comparison_as_json(comparison, options))
    else:
        print_comparison(comparison)
    for made in (comparison.streamed, comparison.second):
        if made is not None and made.error is not None:
            raise made.error
    if comparison.resident is not None and comparison.identical is False:
        return 1
    return INTERRUPTED if interrupt.requested() else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `demo`. They have the names they have in `generate`."""
    add_model_arguments(parser)
    text = parser.add_argument_group("text")
    prompt = text.add_mutually_exclusive_group()
    prompt.add_argument(
        "-p", "--prompt", metavar="TEXT", help="the text to continue (default: the beginning of a novel)"
    )
    prompt.add_argument(
        "--kind", choices=PROMPTS, metavar="KIND", help=f"or a beginning of this kind: {', '.join(PROMPTS)}"
    )
    text.add_argument(
        "-n",
        "--n-predict",
        type=int,
        default=TOKENS,
        metavar="N",
        help="tokens to write at most (default: %(default)s)",
    )
    text.add_argument("--json", action="store_true", help="print one JSON object: both texts, timings, statistics")
    add_sampling_arguments(parser, temp=TEMPERATURE, seed=SEED, repeat_penalty=REPEAT_PENALTY)
    running = parser.add_argument_group("running")
    running.add_argument(
        "-c",
        "--ctx-size",
        type=int,
        default=CONTEXT,
        metavar="N",
        help="tokens that prompt and text may have together (default: %(default)s)",
    )
    running.add_argument("-t", "--threads", type=int, metavar="N", help="threads (default: the physical cores)")
    running.add_argument(
        "--expert-cache",
        metavar="SIZE",
        help=f"memory for streamed experts, like 3GiB (default: {100 * CACHED_SHARE:.0f}%% of what all of them take)",
    )
    running.add_argument(
        "--prerouter",
        nargs="?",
        const="",
        metavar="SIDECAR",
        help=f"route the second text by the heads of a sidecar (default: the one beside the model, MODEL{BESIDE}; without "
        "a model that of a shipped one)",
    )
    running.add_argument(
        "--force", action="store_true", help="take a sidecar that was made for another model, if it fits"
    )


def _beside(model: Path) -> Path:
    sidecar = model.with_suffix(BESIDE)
    if not sidecar.is_file():
        raise OptionError(
            f"--prerouter: there is no {sidecar.name} beside {model}; name a sidecar: --prerouter SIDECAR"
        )
    return sidecar


def _small_cache_bytes(description: ModelDescription) -> int:
    affordable = advise(description, memory.available_bytes()).recommended_bytes
    wanted = min(int(CACHED_SHARE * description.maximum_cache_bytes), affordable)
    return max(wanted, description.minimum_cache_bytes)


def _cached_share(expert_cache: int | str, description: ModelDescription) -> float:
    if expert_cache == "auto":
        return advise(description, memory.available_bytes()).cached_share
    return min(parse_size(expert_cache) / description.maximum_cache_bytes, 1.0)


def _headings(setting: Setting) -> tuple[tuple[str, ...], tuple[str, ...]]:
    cache = f"with a cache for {setting.cached_share:.0%} of the experts"
    if setting.prerouter is not None:
        return ("Streamed, routed by the model", cache), ("Streamed, routed by heads", "with a cache of the same size")
    return ("Streamed from the disk", cache), ("All in memory", "with stock llama-cpp-python")


def print_setting(setting: Setting) -> None:
    """Prints the model and the prompt."""
    description = setting.description
    experts, on_disk = format_size(description.expert_bytes), format_size(description.bytes_on_disk)
    for line in (
        f"{description.path.name}, {description.architecture}: {on_disk}, of which {experts} are experts",
        shape(description),
        "",
        f"Prompt: {setting.prompt}",
    ):
        print(textwrap.fill(line, _width(), subsequent_indent="  "))
    print(flush=True)


def print_comparison(comparison: Comparison) -> None:
    """Prints whether the texts are the same, and what each took."""
    print()
    print(textwrap.fill(_verdict(comparison), _width()))
    both = [made for made in (comparison.streamed, comparison.second) if made is not None]
    ends = dict.fromkeys(map(how_it_ended, both))
    print(textwrap.fill(f"End of the text: {'; '.join(ends)}.", _width()))
    print()
    print_columns(_taken(comparison, both), right=range(1, 1 + len(both)))


def comparison_as_json(comparison: Comparison, options: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison as one JSON object, with the options it ran under and the versions of all that matters."""
    streamed, resident, predicted = comparison.streamed, comparison.resident, comparison.predicted
    return {
        "model": str(streamed.model),
        "prompt": comparison.setting.prompt,
        "identical": comparison.identical,
        "first_difference": comparison.first_difference,
        "not_compared": comparison.not_compared,
        STREAMED: made_as_json(streamed),
        RESIDENT: None if resident is None else made_as_json(resident),
        PREDICTED: None if predicted is None else made_as_json(predicted),
        "options": {**options, "seed": streamed.seed, "threads": streamed.threads},
        "versions": versions(),
    }


def _verdict(comparison: Comparison) -> str:
    streamed, second, difference = comparison.streamed, comparison.second, comparison.first_difference
    if second is None:
        return f"Not compared: {comparison.not_compared}."
    if comparison.predicted is not None:
        return _routed_verdict(comparison.predicted, difference)
    if difference is not None:
        one, other = (_token(made, difference) for made in (streamed, second))
        return f"DIFFERENT from token {difference + 1} on: streamed it is {one}, in memory {other}."
    same = min(len(streamed.tokens), len(second.tokens))
    if not comparison.identical:
        return f"Interrupted: the {same} tokens that both wrote are the same."
    return f"Identical: the same {same} tokens, streamed and in memory."


def _routed_verdict(predicted: Generation, difference: int | None) -> str:
    same = "the texts are the same" if difference is None else f"the texts part at token {difference + 1}"
    decode = predicted.decode_stats
    assert decode is not None
    dropped = f"{decode.dropped} experts that they chose were left out"
    return f"Heads chose the experts a token ahead, so {same}; {dropped}. What that costs in quality: docs/training.md."


def _token(made: Generation, index: int) -> str:
    return f"token id {made.tokens[index]}" if index < len(made.tokens) else "the end of the text"


def _taken(comparison: Comparison, both: Sequence[Generation]) -> Iterator[tuple[str, ...]]:
    """What the texts took: a label, a column for each, and what it means."""

    def each(value: Callable[[Generation, ExpertStats], str]) -> list[str]:
        return [value(made, made.decode_stats) if made.decode_stats is not None else "" for made in both]

    stats = comparison.streamed.stats
    assert stats is not None
    predicted = comparison.setting.prerouter is not None
    yield "", *(("by routers", "by heads") if predicted else ("streamed", "in memory"))[: len(both)]
    speeds = [f"{made.decode_tokens_per_s:.1f} tok/s" if made.decode_tokens else "-" for made in both]
    yield "speed", *speeds, "of writing, after the prompt"
    yield "waiting", *each(_waiting), "of that time, for experts to arrive"
    if predicted:
        yield "heads", *each(_heads), "of that time, to compute what they say"
    grown = [format_size(made.peak_rss_bytes - made.rss_before_bytes) for made in both]
    yield "memory", *grown, "for the model: growth of the process"
    yield "peak RSS", *(format_size(made.peak_rss_bytes) for made in both), "Python and llama.cpp included"
    experts = format_size(stats.expert_bytes)
    yield "cache", *each(lambda made, _: format_size(made.stats.cache_bytes)), f"for {experts} of experts"
    yield "hit rate", *each(_hit_rate), "experts found in the cache"
    source = "read for the others" if stats.direct else "read through the page cache"
    yield "per token", *each(_read_a_token), source


def _waiting(made: Generation, decode: ExpertStats) -> str:
    return f"{decode.wait_s / made.decode_s:.0%}" if made.decode_tokens else "-"


def _heads(made: Generation, decode: ExpertStats) -> str:
    return f"{decode.heads_s / made.decode_s:.0%}" if made.decode_tokens and decode.heads_s else "-"


def _hit_rate(made: Generation, decode: ExpertStats) -> str:
    return f"{decode.hit_rate:.1%}" if decode.hits + decode.misses else "-"


def _read_a_token(made: Generation, decode: ExpertStats) -> str:
    return format_size(decode.bytes_read / made.decode_tokens) if made.decode_tokens else "-"


def _width() -> int:
    return min(shutil.get_terminal_size().columns - 1, _WIDTH)
