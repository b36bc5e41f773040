"""``Llama``: llama-cpp-python's, with experts that stay on disk."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import logging
import os
import types
import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import llama_cpp
from llama_cpp import _internals as stock_internals
from llama_cpp import llama as stock_module

from . import _hub, _threads, timeline
from ._engine import Engine
from ._evaluation import apply_adapters
from ._native import lib, text
from ._sequences import Sequences
from .errors import ExpertReadError, ModelError, OptionError
from .memory import private_bytes
from .model import ModelDescription, describe
from .options import ExpertStreaming
from .sidecar import Sidecar, sidecar_for
from .sidecar.adapter import adapter_bytes, adapter_names, in_memory
from .sidecar.unapplied import unapplied
from .stats import ExpertStats

__all__ = ["Llama"]

logger = logging.getLogger("moestream")

_GGML_LOG_LEVEL_ERROR = 4

LoraPath = str | os.PathLike[str]
_LARGEST_SCALE = 3e38  # of a float32


class _BufferOverride(ctypes.Structure):
    """``struct llama_model_tensor_buft_override``."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


@contextlib.contextmanager
def _collected_errors(lines: list[str], forward: bool) -> Any:
    """Collects what llama.cpp logs as errors, which its NULL results do not say."""

    callback, user_data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(callback), ctypes.byref(user_data))

    @llama_cpp.llama_log_callback
    def collect(level: int, line: bytes, _: ctypes.c_void_p) -> None:
        if level == _GGML_LOG_LEVEL_ERROR:
            lines.append(line.decode("utf-8", "replace").strip())
        if forward:
            callback(level, line, user_data)

    llama_cpp.llama_log_set(collect, ctypes.c_void_p(0))
    try:
        yield
    finally:
        llama_cpp.llama_log_set(callback, user_data)


class _StreamedModel(stock_internals.LlamaModel):
    """A llama_model loaded through an engine: dense weights in memory, experts nowhere."""

    def __init__(
        self,
        *,
        path_model: str,
        params: llama_cpp.llama_model_params,
        verbose: bool = True,
        engine: Engine,
        load_progress: Callable[[float], None] | None,
    ) -> None:
        self.path_model = path_model
        self.params = params
        self.verbose = verbose
        self.sampler = None
        self.custom_samplers: list[Any] = []
        self.model = None
        self._exit_stack = contextlib.ExitStack()
        self._exit_stack.callback(engine.close)  # last: the model's buffers belong to it

        placed = [
            (text(lib.ms_expert_pattern()), engine.buffer_type()),
            (text(lib.ms_router_pattern()), engine.router_type()),
            (engine.norm_pattern(), engine.norm_type()),
        ]
        overrides = [_BufferOverride(pattern.encode(), buffer_type) for pattern, buffer_type in placed if buffer_type]
        self._overrides = (_BufferOverride * (len(overrides) + 1))(*overrides, _BufferOverride(None, None))
        params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p)
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
        params.lazy_mode = llama_cpp.LLAMA_LAZY_MODE_OFF
        params.use_extra_bufts = engine.interleaves
        failure: list[BaseException] = []
        if load_progress is not None:
            params.progress_callback = _progress_callback(load_progress, failure)

        errors: list[str] = []
        stream, address = engine.load_begin()
        with _collected_errors(errors, forward=verbose):
            self.model = llama_cpp.llama_model_load_from_file_ptr(ctypes.c_void_p(address), params)
        if self.model is not None:
            self._exit_stack.callback(self._free_model)
        engine.load_end(stream)
        if failure:
            raise failure[0]
        if self.model is None:
            remedy = "; its file fits its own number of experts a token alone: leave experts_used out" if engine.overrides_experts_used else ""
            raise ModelError(f"{path_model}: llama.cpp cannot load it: {_last_cause(errors)}{remedy}")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)

    def _free_model(self) -> None:
        if self.model is not None:
            llama_cpp.llama_model_free(self.model)
            self.model = None


def _is_laid(path: str) -> bool:
    try:
        return describe(path).laid
    except ModelError:
        return False


def _progress_callback(load_progress: Callable[[float], None], failure: list[BaseException]) -> Any:
    @llama_cpp.llama_progress_callback
    def progress(share: float, _: ctypes.c_void_p) -> bool:
        try:
            load_progress(share)
        except BaseException as error:  # an exception cannot cross C: stop loading, raise it afterwards
            failure.append(error)
            return False
        return True

    return progress


def _last_cause(errors: list[str]) -> str:
    """The first error line, without llama.cpp's function name: the later ones only say that loading failed."""
    if not errors:
        return "no reason given; verbose=True shows its log"
    cause = errors[0]
    for prefix in ("llama_model_load: ", "error loading model: ", "llama_adapter_lora_init: ", "failed to apply lora adapter: "):
        cause = cause.removeprefix(prefix)
    return cause


class _StreamedContext(stock_internals.LlamaContext):
    """A llama_context whose model's experts get their memory once it is known what is left."""

    def __init__(
        self,
        *,
        model: _StreamedModel,
        params: Any,
        verbose: bool = True,
        engine: Engine,
        allocated_before: tuple[int, int],
        choose_threads: bool,
    ) -> None:
        self._engine = engine
        self.threads: _threads.DecodeThreads | None = None
        self.sequences = engine.sequences()
        super().__init__(model=model, params=params, verbose=verbose)
        if choose_threads:
            self.threads = self._chosen_threads()
        (allocated, resident), (allocated_then, resident_then) = private_bytes(), allocated_before
        engine.start(untouched=max(0, (allocated - allocated_then) - (resident - resident_then)))

    def _chosen_threads(self) -> _threads.DecodeThreads:
        ctx, n_batch = self.ctx, self.params.n_threads_batch  # and not self: a cycle would keep the context alive
        memory = _threads.Memory(Path(self.model.path_model))
        best = memory.recall()
        return _threads.DecodeThreads(
            best or self.params.n_threads,
            set_threads=lambda n: llama_cpp.llama_set_n_threads(ctx, n, n_batch),
            known=best is not None,
            candidates=_threads.candidates(),
            remember=memory.remember,
            core_wait_s=_threads.core_wait_s,
            expert_wait_s=self._engine.wait_s,
        )

    def set_n_threads(self, n_threads: int, n_threads_batch: int) -> None:
        self.threads = None  # the user chose
        super().set_n_threads(n_threads, n_threads_batch)

    def decode(self, batch: stock_internals.LlamaBatch) -> None:
        one = self.threads is not None and batch.n_tokens() == 1
        announced = contextlib.nullcontext() if self.sequences is None else self.sequences.announced(batch.batch)
        with self._engine.decoding(), announced, self.threads.token() if one else contextlib.nullcontext():
            super().decode(batch)

    # What changes sequences between two steps of theirs.

    def kv_cache_clear(self) -> None:
        if self.sequences is not None:
            self.sequences.forget()
        super().kv_cache_clear()

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        if self.sequences is not None:
            self.sequences.cut(max(seq_id, 0), p0, p1)
        return super().kv_cache_seq_rm(seq_id, p0, p1)

    def kv_cache_seq_cp(self, seq_id_src: int, seq_id_dst: int, p0: int, p1: int) -> None:
        if self.sequences is not None:
            self.sequences.forget(seq_id_dst)
        super().kv_cache_seq_cp(seq_id_src, seq_id_dst, p0, p1)

    def kv_cache_seq_keep(self, seq_id: int) -> None:
        if self.sequences is not None:
            self.sequences.keep(seq_id)
        super().kv_cache_seq_keep(seq_id)

    def kv_cache_seq_shift(self, seq_id: int, p0: int, p1: int, shift: int) -> None:
        if self.sequences is not None:
            self.sequences.forget(seq_id)
        super().kv_cache_seq_shift(seq_id, p0, p1, shift)

    def encode(self, batch: stock_internals.LlamaBatch) -> None:
        with self._engine.decoding():
            super().encode(batch)


def _stock_init(model_class: Any, context_class: Any) -> Callable[..., None]:
    """``llama_cpp.Llama.__init__`` that builds our model and context.

    The same code, run with globals of its own in which ``internals`` holds our
    two classes: nothing of the stock module is changed, so ``llama_cpp.Llama``
    objects beside ours stay what they are.
    """
    internals = types.SimpleNamespace(**{**vars(stock_internals), "LlamaModel": model_class, "LlamaContext": context_class})
    stock = llama_cpp.Llama.__init__
    init = types.FunctionType(
        stock.__code__, {**vars(stock_module), "internals": internals}, stock.__name__, stock.__defaults__, stock.__closure__
    )
    init.__kwdefaults__ = stock.__kwdefaults__
    return init


_STOCK_PARAMETERS = {
    name: parameter
    for name, parameter in inspect.signature(llama_cpp.Llama.__init__).parameters.items()
    if parameter.kind is not inspect.Parameter.VAR_KEYWORD
}


_EXPERTS_USED_KEY = ".expert_used_count"


def _experts_used(path: str, wanted: int | None, kv_overrides: dict[str, Any] | None) -> tuple[int, dict[str, Any] | None]:
    """Top-k in place of the file's, else 0; and the overrides that tell llama.cpp so.

    Args:
        wanted: The option ``experts_used``.
        kv_overrides: Those of the user, who may override the file's number there too.

    Raises:
        OptionError: the two contradict each other, or llama.cpp cannot take that many: it would end the process.
        ModelError: the file cannot be read.
    """
    if wanted is None and not any(key.endswith(_EXPERTS_USED_KEY) for key in kv_overrides or {}):
        return 0, kv_overrides
    model = describe(path)
    key = model.architecture + _EXPERTS_USED_KEY
    number, name = wanted, f"experts_used={wanted}"
    if kv_overrides and key in kv_overrides:
        overridden = kv_overrides[key]
        if wanted not in (None, overridden):
            raise OptionError(f"experts_used={wanted} contradicts kv_overrides={{{key!r}: {overridden!r}}}: leave out one of them")
        if type(overridden) is int:  # others are nothing to llama.cpp, which warns
            number, name = overridden, f"kv_overrides={{{key!r}: {overridden}}}"
    if number is None or (number == model.experts_used and not model.experts_used_by_layer):
        return 0, kv_overrides
    _require_choosable(model, number, name)
    return number, {**(kv_overrides or {}), key: number}


def _require_choosable(model: ModelDescription, number: int, name: str) -> None:
    if model.experts_used_by_layer:
        raise OptionError(
            f"{name}: {model.path} says for each layer how many experts a token takes, which llama.cpp does not replace by one number; leave it out"
        )
    if not 1 <= number <= model.experts_choosable:
        experts = min(layer.experts for layer in model.moe_layers)
        grouped = "" if model.experts_choosable == experts else f" of the {experts} in a layer, which are in groups"
        raise OptionError(f"{name}: a token of {model.path} can take 1 to {model.experts_choosable} experts{grouped}; the file says {model.experts_used}")


def _adapters(lora_path: LoraPath | Sequence[LoraPath | tuple[LoraPath, float]] | None, scale: float) -> list[tuple[str, float]]:
    """Paths of LoRA adapters and their scales; ``scale`` is of those that have none of their own.

    Raises:
        OptionError: it is neither a path nor a list of such, or a scale is no number, or none of 32 bits.
    """
    if not lora_path:
        return []
    if isinstance(lora_path, (str, os.PathLike)):
        lora_path = [lora_path]
    adapters = []
    for each in lora_path if isinstance(lora_path, Sequence) else (None,):
        path, own = each if isinstance(each, (tuple, list)) and len(each) == 2 else (each, scale)
        if not isinstance(path, (str, os.PathLike)) or not isinstance(own, (int, float)):
            raise OptionError(f"lora_path={lora_path!r}: expected a path, or a list of paths and of (path, scale)")
        if not abs(own) <= _LARGEST_SCALE:
            raise OptionError(f"lora_path: the scale of {os.fspath(path)} is {own}, which is no number to multiply with")
        adapters.append((os.fspath(path), float(own)))
    return adapters


def _with_sidecar(
    model_path: str, options: ExpertStreaming, prerouter: str | os.PathLike[str] | None, *, force: bool
) -> tuple[ExpertStreaming, Sidecar | None]:
    """The sidecar that the options or ``prerouter`` name, and the options: heads that the latter has route.

    Raises:
        OptionError: the two name different ones.
        SidecarError: it is none, or for another model.
    """
    if prerouter is None:
        return options, None if options.sidecar is None else sidecar_for(model_path, options.sidecar, force=force)
    if options.sidecar is not None and os.fspath(options.sidecar) != os.fspath(prerouter):
        raise OptionError(f"prerouter={os.fspath(prerouter)!r} contradicts expert_streaming, whose sidecar is {os.fspath(options.sidecar)!r}: leave out one of them")
    if options.prerouter == "advise":
        raise OptionError(f"prerouter={os.fspath(prerouter)!r} routes, and expert_streaming has prerouter='advise': leave out one of them")
    sidecar = sidecar_for(model_path, prerouter, force=force)
    return replace(options, sidecar=prerouter, prerouter="off" if sidecar.heads is None else "route"), sidecar


def _refuse_unknown(keywords: Iterable[str], known: Container[str]) -> None:
    for name in keywords:
        if name not in known:
            raise OptionError(f"unknown keyword {name!r}; see help(moestream.Llama)")


class Llama(llama_cpp.Llama):
    """A :class:`llama_cpp.Llama` that can leave the experts of its model on disk.

    >>> llm = Llama("model.gguf", expert_streaming=True, n_ctx=4096)
    >>> llm("The library is", max_tokens=64)["choices"][0]["text"]
    >>> llm.expert_stats().hit_rate

    Args:
        model_path: A GGUF; of a split model its first shard.
        expert_streaming: True for :class:`ExpertStreaming` with its defaults, or
            one with options. False (the default) makes this a plain
            ``llama_cpp.Llama``.
        lora_path: A LoRA adapter (GGUF), or a list of adapters and of (adapter,
            scale). They are never merged: y = W x + scale (alpha / rank) B A x
            for each. ``lora_scale`` is the scale of those that have none.
        prerouter: A sidecar of trained heads, a LoRA, or both, made for this
            model (docs/sidecar.md): short for ``ExpertStreaming(sidecar=...,
            prerouter="route")``. Heads route decode and change its results; the
            LoRA is applied as those of ``lora_path`` are. Needs
            ``expert_streaming``.
        force: Take a sidecar that was made for another model, if it fits.
        load_progress: Called with the share of the model loaded, 0.0 to 1.0.
        **kwargs: Everything else as in :class:`llama_cpp.Llama`. With streaming,
            ``use_mmap`` has no meaning (dense weights are always in anonymous
            memory) and ``use_mlock`` is refused. Without ``n_threads`` the
            number of decode threads is the one that is fastest here, and fewer
            while other programs want the cores; with ``flash_attn``, whose
            result depends on the number, it is the physical cores.

    Raises:
        OptionError: an unknown keyword, or options that cannot work here.
        ModelError: a file that cannot be loaded or streamed.
        SidecarError: a sidecar that is damaged, or for another model.
        ExpertReadError: from later calls, when experts cannot be read.
    """

    def __init__(
        self,
        model_path: str,
        *,
        expert_streaming: bool | ExpertStreaming = False,
        lora_path: LoraPath | Sequence[LoraPath | tuple[LoraPath, float]] | None = None,
        prerouter: str | os.PathLike[str] | None = None,
        force: bool = False,
        load_progress: Callable[[float], None] | None = None,
        **kwargs: Any,
    ) -> None:
        self._engine: Engine | None = None
        self._prerouter, self._force = prerouter, force
        self._adapters: list[tuple[Any, float]] = []
        self._expert_streaming = expert_streaming
        self._threads_given = True
        self._evaluated: list[int] | None = None  # tokens since the timeline is recorded
        self._prompt_follows = False  # the next token evaluated is a prompt's, though it may be alone
        self._stack = contextlib.ExitStack()
        self._sampler = None
        _refuse_unknown(kwargs, _STOCK_PARAMETERS)
        if not isinstance(expert_streaming, (bool, ExpertStreaming)):
            raise OptionError(f"expert_streaming={expert_streaming!r}: expected True, False or ExpertStreaming(...)")
        adapters = _adapters(lora_path, kwargs.get("lora_scale", 1.0))
        if expert_streaming is False:
            for name, given in (("load_progress= reports on", load_progress), ("prerouter= routes", prerouter)):
                if given is not None:
                    raise OptionError(f"{name} a streamed model; it needs expert_streaming")
            if adapters:
                kwargs["use_mmap"] = False  # as stock has it
            try:
                super().__init__(model_path, **kwargs)
            except ValueError as error:
                if not _is_laid(model_path):
                    raise
                raise ModelError(
                    f"{model_path}: is a laid file, which only streaming can load; give expert_streaming=True, or make a stock file "
                    f"of it: moestream export {model_path} STOCK.gguf"
                ) from error
            try:
                self._apply(adapters, None, lora_path)
            except BaseException:
                self.close()
                raise
            return
        if kwargs.get("use_mlock"):
            raise OptionError("use_mlock=True would lock the whole model in memory, which streaming exists to avoid; leave it out")
        options = ExpertStreaming() if expert_streaming is True else expert_streaming
        model_path = os.fspath(model_path)
        options, sidecar = _with_sidecar(model_path, options, prerouter, force=force)
        if options.prerouter == "route" and kwargs.get("draft_model") is not None:
            raise OptionError(
                "draft_model= has several tokens evaluated at once, and what heads say is of one: what is written would depend on the drafts; "
                "leave it out, or take prerouter='advise'"
            )
        self._threads_given = bool(kwargs.get("n_threads"))
        if not self._threads_given:
            kwargs["n_threads"] = _threads.default_threads()
        before = private_bytes()
        experts_used, kwargs["kv_overrides"] = _experts_used(model_path, options.experts_used, kwargs.get("kv_overrides"))
        self._engine = Engine(model_path, options, experts_used=experts_used, sidecar=sidecar)
        try:
            self._engine.require_memory()
            for note in self._engine.stats().notes:
                logger.info("%s", note)
            init = _stock_init(
                functools.partial(_StreamedModel, engine=self._engine, load_progress=load_progress),
                functools.partial(
                    _StreamedContext,
                    engine=self._engine,
                    allocated_before=before,
                    # what flash attention computes depends on their number, which so must not change under way
                    choose_threads=not self._threads_given and not kwargs.get("flash_attn"),
                ),
            )
            init(self, model_path, **kwargs)
            self._apply(adapters, sidecar, lora_path)
        except BaseException:
            self.close()
            raise

    def _apply(self, adapters: Sequence[tuple[str, float]], sidecar: Sidecar | None, lora_path: Any) -> None:
        """Loads LoRA adapters and has the context apply all of them. Stock knows one, and crashes on one that failed to load."""
        self.lora_path = lora_path
        if sidecar is not None and sidecar.lora is not None:
            self._require_routers(sidecar.path, sidecar.lora.pairs)
            with in_memory(adapter_bytes(sidecar.lora, sidecar.base.architecture)) as path:
                self._load_adapter(path, 1.0, sidecar.path)
        for path, scale in adapters:
            names = adapter_names(path)
            self._require_routers(path, names)
            if ignored := unapplied(self.metadata.get("general.architecture", ""), names):
                raise ModelError(f"{path}: has a LoRA of {ignored[0]}, which llama.cpp would not apply in this model; train one without it")
            self._load_adapter(path, scale, path)
        apply_adapters(self, self.ctx)

    def _require_routers(self, path: Any, names: Iterable[str]) -> None:
        """Raises ModelError for a LoRA of a router where heads route: what they say would have it added."""
        routers = [name for name in names if name.endswith(".ffn_gate_inp.weight")]
        if routers and self._engine is not None and self._engine.options.prerouter == "route":
            raise ModelError(f"{path}: has a LoRA of the router {routers[0]}, which heads take the place of; leave it out, or load with prerouter='advise' or 'off'")

    def _load_adapter(self, path: str, scale: float, name: Any) -> None:
        errors: list[str] = []
        with _collected_errors(errors, forward=self.verbose):
            adapter = llama_cpp.llama_adapter_lora_init(self.model, os.fsencode(path))
        if not adapter:
            raise ModelError(f"{name}: llama.cpp cannot load it as a LoRA adapter for {self.model_path}: {_last_cause(errors)}")
        self._stack.callback(llama_cpp.llama_adapter_lora_free, adapter)
        self._adapters.append((adapter, scale))

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None,
        additional_files: list[str] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        local_dir_use_symlinks: bool | Literal["auto"] = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> Llama:
        """A model from the Hugging Face Hub, downloaded unless it was before.

        Args:
            repo_id: ``"user/repo"``.
            filename: The file in it, or a glob pattern that matches one. Of a
                split model all shards are downloaded. None takes the Q4_K_M,
                else the first.
            additional_files: More names or patterns of files to download.
            local_dir: The folder to download to, instead of the Hub's cache.
            local_dir_use_symlinks: Has had no effect since huggingface_hub 0.23.
            cache_dir: The Hub's cache, if it is elsewhere than usual.
            **kwargs: As for :class:`Llama`.

        Raises:
            OptionError: an unknown keyword, before anything is downloaded.
            ModelError: no such repository or file, or no connection.
        """
        _refuse_unknown(kwargs, {*_STOCK_PARAMETERS, *_OWN_PARAMETERS} - {"model_path"})
        if local_dir_use_symlinks != "auto":
            warnings.warn("local_dir_use_symlinks has had no effect since huggingface_hub 0.23", DeprecationWarning, stacklevel=2)
        folders = {"local_dir": local_dir, "cache_dir": cache_dir}
        files = _hub.list_files(repo_id, **folders)
        if filename is None:
            chosen = _hub.choose_files(repo_id, files)
        else:
            chosen = _hub.split_set(_hub.matching_file(repo_id, files, filename))
        chosen += [_hub.matching_file(repo_id, files, name) for name in additional_files or ()]
        paths = _hub.download(repo_id, list(dict.fromkeys(chosen)), **folders)
        return cls(model_path=str(paths[0]), **kwargs)

    def eval(self, tokens: Sequence[int]) -> None:
        """As :meth:`llama_cpp.Llama.eval`; later calls do not build upon what a failed one leaves behind.

        Raises:
            ExpertReadError: experts could not be read. Models with a recurrent state
                lose their context with it: call :meth:`reset` before another ``eval``.
            MoestreamError: the model is closed.
        """
        if self._engine is not None:
            self._engine.require_open()
        sequences = self._sequences()
        if sequences is not None:
            if tokens:
                sequences.prompt = len(tokens) > 1 or self._prompt_follows
            self._prompt_follows = False  # nor does it where `generate` found all of it evaluated
        try:
            super().eval(tokens)
        except ExpertReadError:
            self._requires_eval = True  # the context's logits are not those of the last token evaluated
            if llama_cpp.llama_memory_seq_pos_max(self._ctx.memory, 0) + 1 < self.n_tokens:
                # a recurrent state cannot go back a token, so llama.cpp dropped it: no prompt is a continuation of it
                self.input_ids[: self.n_tokens] = -1
            raise
        if self._evaluated is not None:
            self._evaluated += tokens

    def _sequences(self) -> Sequences | None:
        """Of the context; None where no routing is predicted."""
        return self._ctx.sequences if self._engine is not None else None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`llama_cpp.Llama.generate`. With predicted routing the prompt begins anew, also where it is kept from before."""
        if (sequences := self._sequences()) is not None:
            sequences.forget(0)
            self._prompt_follows = True
        return (yield from super().generate(*args, **kwargs))

    def reset(self) -> None:
        """As :meth:`llama_cpp.Llama.reset`."""
        if (sequences := self._sequences()) is not None:
            sequences.forget(0)
        super().reset()

    def save_state(self) -> llama_cpp.LlamaState:
        """As :meth:`llama_cpp.Llama.save_state`. What heads said of the next token goes with it."""
        state = super().save_state()
        if (sequences := self._sequences()) is not None:
            state.said_by_heads = sequences.saved(0)
        return state

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """As :meth:`llama_cpp.Llama.load_state`. The next token is routed as it would have been, if these heads spoke when the state was
        saved; else as the first one after a prompt."""
        sequences = self._sequences()
        if sequences is not None:
            sequences.forget()
        super().load_state(state)
        if sequences is not None:
            sequences.restore(0, getattr(state, "said_by_heads", None))

    def expert_stats(self) -> ExpertStats:
        """What streaming did so far.

        Raises:
            OptionError: the model was not loaded with ``expert_streaming``.
            MoestreamError: the model is closed.
        """
        if self._engine is None:
            raise OptionError("this model is not streamed: load it with expert_streaming=True for expert_stats()")
        stats = self._engine.stats()
        threads = self._ctx.threads
        return stats if threads is None else replace(stats, notes=(*stats.notes, threads.note))

    def record_timeline(self, *, capacity: int = 262_144) -> AbstractContextManager[timeline.Timeline]:
        """Records what happens when, from here to the end of a ``with`` block; the timeline is filled then.

        >>> with llm.record_timeline() as timeline:
        ...     llm("The library is", max_tokens=30)
        >>> timeline.write("run.html")

        Args:
            capacity: Events to keep, 88 bytes each while recording: the newest. A token takes some 10 a layer.

        Raises:
            OptionError: the model is not streamed, is being recorded already, or there is no memory.
            MoestreamError: the model is closed, or was within the block.
        """
        return timeline.record(self, capacity)

    @property
    def decode_threads(self) -> int:
        """Threads that the next token will be decoded with.

        Raises:
            MoestreamError: the model is closed.
        """
        if self._engine is None:
            return self.n_threads
        self._engine.require_open()
        return self.n_threads if self._ctx.threads is None else self._ctx.threads.n

    def close(self) -> None:
        """Frees the model, its contexts and the expert cache. Further calls fail."""
        super().close()
        if self._engine is not None:
            self._engine.close()

    def __getstate__(self) -> dict[str, Any]:
        own = {"expert_streaming": self._expert_streaming, "prerouter": self._prerouter, "force": self._force}
        state = {**super().__getstate__(), **own}
        return state if self._threads_given else {**state, "n_threads": None}


_OWN_PARAMETERS = ("expert_streaming", "prerouter", "force", "load_progress")

Llama.__init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        *(p for p in _STOCK_PARAMETERS.values()),
        *(p for n, p in inspect.signature(Llama.__init__).parameters.items() if n in _OWN_PARAMETERS),
    ]
)
