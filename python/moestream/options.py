"""How experts are to be streamed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

from .errors import OptionError
from .memory import parse_size

__all__ = ["ExpertStreaming"]

Kernels = Literal["auto", "plain", "interleaved"]
Compute = Literal["exact", "fast", "ggml"]
Reader = Literal["auto", "uring", "pread", "mmap"]
Prefetch = Literal["auto", "off", "router", "lookahead", "router+lookahead", "repeat", "oracle", "random"]
_OF_REPLAYS = ("oracle", "random")
Policy = Literal["lru", "lfu", "lrfu"]
Prerouter = Literal["off", "route", "advise"]


@dataclass(frozen=True, kw_only=True)
class ExpertStreaming:
    """How the experts of a model are to be streamed.

    >>> from moestream import ExpertStreaming, Llama
    >>> llm = Llama("model.gguf", expert_streaming=ExpertStreaming(cache="3GiB", kernels="plain"))

    Args:
        cache: Memory for experts: bytes, a size such as ``"3GiB"``, or ``"auto"``
            for what the machine has left after dense weights, KV cache and
            compute buffers, minus a tenth. Never more than the model's experts.
        kernels: ``"plain"`` makes the whole model compute, to the bit, like
            stock llama.cpp without repacking; ``"interleaved"`` like stock with
            it. ``"auto"`` takes interleaved rows for each matrix whose type and
            shape ggml interleaves on this CPU.
        compute: ``"exact"`` computes a layer's experts as one operation, each as
            soon as it has been read, to stock's bits. ``"fast"`` also takes
            matrix kernels whose sums are rounded in another order than stock's,
            for prompts. ``"ggml"`` waits for all experts of a layer and computes
            them node by node; what the others do where a model's graph is not understood.
        experts_used: Experts that a token takes in each layer, of prompts as of
            what is written, in place of the model's own number. It needs less
            memory and reading with fewer, and **what the model says changes**:
            most models weigh the experts they take so that their shares add up
            to 1, some add up less without the rest, and none was trained for it.
        reader: ``"uring"`` (Linux io_uring), ``"pread"`` (threads, anywhere) or
            ``"mmap"`` (experts computed in place, the page cache is the cache:
            for several processes on one file; with rows as the file has them).
            ``"auto"`` takes the faster of the first two by a short measurement on the file.
        direct: Read past the page cache (O_DIRECT). ``"auto"`` does where the
            file system serves such reads; True fails where it does not.
        prefetch: Which experts are read before they are wanted, while attention is
            computed. ``"router"``: those that the model's own router names, where
            it does so before attention (SmallThinker); they are known, not guessed.
            ``"lookahead"``: those that the routers of the next layers would name
            for the state as it is now. ``"router+lookahead"``: both. ``"repeat"``:
            those of the token before. ``"auto"``: what is known always, and what a
            lookahead guesses where a trial on this machine says that it pays.
            ``"off"``: none. Results never depend on it.
        cache_aware: Changes results. An expert in memory is chosen in place of one
            that is not, if its odds are at least ``1 - cache_aware`` of those of
            the last one chosen; in decode and small batches. 0 is off.
        replay: Changes results, and is for measuring: the routers follow this
            routing trace, over and over, because those of random weights choose
            like no model does.
        replay_recall: With ``replay``, how many of the true experts a lookahead finds
            (there is no state to look at): just before a layer's attention, one layer
            before, two, up to seven; the last stands for those that are missing.
        prerouter: What the trained heads of ``sidecar`` are for. ``"route"`` **changes results**: in
            decode a head chooses the experts of the next token's layers, which are read while this
            token is still computed; the model's routers choose in prompts, in the first step after
            one, and in layers without a head. ``"advise"``: what heads say is read ahead, the
            routers choose, and results are as without (but for ``cache_aware``, which goes by what
            is in memory). ``"off"``: heads are not loaded. With
            ``prefetch="off"`` heads that route are not read ahead for. ``draft_model`` is refused
            with ``"route"``: what it drafts is evaluated as prompts are.
        sidecar: A file with heads, a LoRA, or both, made for this model. A LoRA in it is applied
            whatever ``prerouter`` is.
        verify: Check every expert that is read, at the cost of looking at each
            byte: its checksum in a laid file, else its weights (NaN or infinite
            scales).
        policy: Which expert the cache gives up first: ``"lru"`` the one used
            longest ago, ``"lfu"`` the one used least often lately, ``"lrfu"`` the
            one whose uses weigh least, each the less the longer ago it was.
            ``moestream simulate`` tells what they find on a routing trace.

    Raises:
        OptionError: a value that is none of these, or two that exclude each other.
    """

    cache: int | str = "auto"
    kernels: Kernels = "auto"
    compute: Compute = "exact"
    experts_used: int | None = None
    reader: Reader = "auto"
    direct: bool | Literal["auto"] = "auto"
    verify: bool = False
    prefetch: Prefetch = "auto"
    cache_aware: float = 0.0
    replay: str | os.PathLike[str] | None = None
    replay_recall: tuple[float, ...] = (0.0,)
    policy: Policy = "lrfu"
    prerouter: Prerouter = "off"
    sidecar: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.experts_used is not None and (type(self.experts_used) is not int or self.experts_used < 1):
            raise OptionError(f"experts_used={self.experts_used!r}: expected a number of at least 1, or None for the model's own")
        if self.cache != "auto":
            try:
                parse_size(self.cache)
            except OptionError as error:
                raise OptionError(f"cache={self.cache!r}: {error}; or 'auto'") from None
        for name, kinds in (("kernels", Kernels), ("compute", Compute), ("reader", Reader), ("policy", Policy), ("prefetch", Prefetch), ("prerouter", Prerouter)):
            known = get_args(kinds)
            if getattr(self, name) not in known:
                raise OptionError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(map(repr, known))}")
        if not any(self.direct is value for value in (True, False)) and self.direct != "auto":
            raise OptionError(f"direct={self.direct!r}: expected True, False or 'auto'")
        if not isinstance(self.verify, bool):
            raise OptionError(f"verify={self.verify!r}: expected True or False")
        if not (isinstance(self.cache_aware, (int, float)) and 0 <= self.cache_aware < 1):
            raise OptionError(f"cache_aware={self.cache_aware!r}: expected a share of a score, from 0 (off) to below 1")
        if self.prefetch in _OF_REPLAYS and self.replay is None:
            raise OptionError(f"prefetch={self.prefetch!r} is for measuring with a recorded routing; give replay= as well, or use 'auto'")
        if self.replay is not None and self.cache_aware:
            raise OptionError("replay= fixes the choice of experts, so cache_aware= would have no effect; leave one of them out")
        if self.prerouter != "off" and self.sidecar is None:
            raise OptionError(f"prerouter={self.prerouter!r} is what heads are for, and there are none; give sidecar= as well")
        if self.prerouter == "route" and self.cache_aware:
            raise OptionError("prerouter='route' fixes the choice of experts a token before, so cache_aware= would replace what was read for it; leave one of them out")
        if self.prerouter == "advise" and self.replay is not None:
            raise OptionError("replay= fixes the choice of experts, of which heads that advise know nothing; leave out prerouter=, or measure with prerouter='route'")
        if self.prerouter == "advise" and (self.prefetch == "off" or self.reader == "mmap"):
            named = "reader='mmap'" if self.reader == "mmap" else "prefetch='off'"
            raise OptionError(f"{named} reads nothing ahead, so prerouter='advise' would have no effect; leave one of them out")
        if not 1 <= len(self.replay_recall) <= 8 or not all(0 <= share <= 1 for share in self.replay_recall):
            raise OptionError(f"replay_recall={self.replay_recall!r}: expected one to eight shares, each from 0 to 1")
        if self.reader == "mmap":
            if self.prefetch not in ("auto", "off"):
                raise OptionError(f"reader='mmap' leaves caching to the kernel, which is not told who comes next; leave out prefetch={self.prefetch!r} or use another reader")
            if self.cache_aware:
                raise OptionError("reader='mmap' does not know what is in memory, so cache_aware= would have no effect; leave it out or use another reader")
            if self.direct is True:
                raise OptionError("reader='mmap' goes through the page cache by its nature; leave out direct=True or use another reader")
            if self.cache != "auto":
                raise OptionError("reader='mmap' leaves caching to the kernel, so cache= would have no effect; leave it out or use another reader")
            if self.policy != ExpertStreaming.policy:
                raise OptionError("reader='mmap' leaves caching to the kernel, so policy= would have no effect; leave it out or use another reader")

    @property
    def predictors(self) -> tuple[str, ...]:
        """Names of the predictors that ``prefetch`` stands for."""
        if self.prefetch == "off" or self.reader == "mmap":
            return ()
        return tuple(("router+lookahead" if self.prefetch == "auto" else self.prefetch).split("+"))

    @property
    def cache_bytes(self) -> int | None:
        """The cache in bytes, or None for ``"auto"``."""
        return None if self.cache == "auto" else parse_size(self.cache)
