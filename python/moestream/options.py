"""How experts are to be streamed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .errors import OptionError
from .memory import parse_size

__all__ = ["ExpertStreaming"]

Kernels = Literal["auto", "plain", "interleaved"]
Compute = Literal["exact", "fast", "ggml"]
Reader = Literal["auto", "uring", "pread", "mmap"]


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
        reader: ``"uring"`` (Linux io_uring), ``"pread"`` (threads, anywhere) or
            ``"mmap"`` (experts computed in place, the page cache is the cache:
            for several processes on one file; with rows as the file has them).
            ``"auto"`` takes the faster of the first two by a short measurement on the file.
        direct: Read past the page cache (O_DIRECT). ``"auto"`` does where the
            file system serves such reads; True fails where it does not.
        verify: Check every expert that is read, at the cost of looking at each
            byte: its checksum in a laid file, else its weights (NaN or infinite
            scales).

    Raises:
        OptionError: a value that is none of these, or two that exclude each other.
    """

    cache: int | str = "auto"
    kernels: Kernels = "auto"
    compute: Compute = "exact"
    reader: Reader = "auto"
    direct: bool | Literal["auto"] = "auto"
    verify: bool = False

    def __post_init__(self) -> None:
        if self.cache != "auto":
            try:
                parse_size(self.cache)
            except OptionError as error:
                raise OptionError(f"cache={self.cache!r}: {error}; or 'auto'") from None
        for name, known in (("kernels", get_args(Kernels)), ("compute", get_args(Compute)), ("reader", get_args(Reader))):
            if getattr(self, name) not in known:
                raise OptionError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(map(repr, known))}")
        if not any(self.direct is value for value in (True, False)) and self.direct != "auto":
            raise OptionError(f"direct={self.direct!r}: expected True, False or 'auto'")
        if not isinstance(self.verify, bool):
            raise OptionError(f"verify={self.verify!r}: expected True or False")
        if self.reader == "mmap":
            if self.direct is True:
                raise OptionError("reader='mmap' goes through the page cache by its nature; leave out direct=True or use another reader")
            if self.cache != "auto":
                raise OptionError("reader='mmap' leaves caching to the kernel, so cache= would have no effect; leave it out or use another reader")

    @property
    def cache_bytes(self) -> int | None:
        """The cache in bytes, or None for ``"auto"``."""
        return None if self.cache == "auto" else parse_size(self.cache)
