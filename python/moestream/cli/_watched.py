"""What commands have in common that send texts through a streamed model to see what it does: `trace record`, `train capture`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._threads import default_threads
from ..errors import OptionError
from ._model import locate
from .generate import add_cache_arguments

if TYPE_CHECKING:
    from .. import Llama


def require_sizes(ctx_size: int, ubatch_size: int, threads: int | None) -> None:
    """Raises OptionError where one of them is below 1."""
    for option, value in (("--ctx-size", ctx_size), ("--ubatch-size", ubatch_size), ("--threads", threads)):
        if value is not None and value < 1:
            raise OptionError(f"{option} {value}: give a number of at least 1")


def opened(
    model: str | os.PathLike[str] | None,
    hf_repo: str | None,
    hf_file: str | None,
    *,
    ctx_size: int,
    ubatch_size: int,
    threads: int | None,
    load_progress: Callable[[float], None] | None,
    **streaming: Any,
) -> contextlib.closing[Llama]:
    """The model, streamed with the options of `moestream.ExpertStreaming` that are given.

    Raises:
        MoestreamError: The options or the model are no good.
    """
    from .. import ExpertStreaming, Llama

    options = ExpertStreaming(**streaming)
    threads = threads or default_threads()
    llm = Llama(
        str(locate(model, hf_repo, hf_file)),
        expert_streaming=options,
        load_progress=load_progress,
        # Its own context stays unused. What an "auto" cache leaves for it is what the texts take.
        n_ctx=ctx_size,
        n_batch=ubatch_size,
        n_ubatch=ubatch_size,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=logging.getLogger("moestream").isEnabledFor(logging.DEBUG),
    )
    return contextlib.closing(llm)


def add_arguments(parser: argparse.ArgumentParser, *, ctx_size: int) -> None:
    """Adds the options of how texts are computed; `ctx_size` is the default of that one."""
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=int,
        default=ctx_size,
        metavar="N",
        help="tokens of the longest text; longer ones are cut (default: %(default)s)",
    )
    parser.add_argument(
        "-ub",
        "--ubatch-size",
        type=int,
        default=512,
        metavar="N",
        help="tokens computed at once at most; 1: as in decoding (default: %(default)s)",
    )
    parser.add_argument("-t", "--threads", type=int, metavar="N", help="threads (default: the physical cores)")
    add_cache_arguments(parser)
