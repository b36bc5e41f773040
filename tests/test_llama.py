"""`moestream.Llama` is a `llama_cpp.Llama`: whatever that one does, this one does with its experts on disk."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import psutil
import pytest
from llama_cpp import _internals as internals

from factory import lora, make
from isolation import isolated
from logits import CONTEXT, DECODED, PROMPT, run, stock_kernels
from moestream import CacheTooSmallError, ExpertStats, ExpertStreaming, Llama, MoestreamError, OptionError, describe

TEXT = "The library is"
LAYERS, TOPK, EXPERTS = 4, 2, 8  # of the factory's models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"))


def smallest(path: Path, **options: Any) -> ExpertStreaming:
    """The least cache, so that most tokens read; kernels and reader fixed."""
    return ExpertStreaming(**{"kernels": "plain", "reader": "pread", "cache": describe(path).minimum_cache_bytes, **options})


@contextlib.contextmanager
def streamed(path: Path, streaming: ExpertStreaming | None = None, **options: Any) -> Iterator[Llama]:
    streaming = streaming or smallest(path)
    with contextlib.closing(Llama(str(path), expert_streaming=streaming, **{**CONTEXT, **options})) as llm:
        yield llm


@contextlib.contextmanager
def stock(path: Path, *, interleaved: bool = False, **options: Any) -> Iterator[llama_cpp.Llama]:
    with stock_kernels(interleaved), contextlib.closing(llama_cpp.Llama(str(path), **{**CONTEXT, **options})) as llm:
        yield llm


@contextlib.contextmanager
def both(path: Path, **options: Any) -> Iterator[tuple[Llama, llama_cpp.Llama]]:
    with streamed(path, **options) as ours, stock(path, **options) as theirs:
        yield ours, theirs
        assert ours.expert_stats().misses > LAYERS * EXPERTS, "most was not streamed"


def assert_same_logits(ours: llama_cpp.Llama, theirs: llama_cpp.Llama) -> None:
    assert ours.n_tokens == theirs.n_tokens > 0
    assert np.array_equal(ours.scores[: ours.n_tokens], theirs.scores[: theirs.n_tokens])


# The surface


def test_the_signature_is_stocks_and_four_keywords() -> None:
    ours = inspect.signature(Llama)
    theirs = inspect.signature(llama_cpp.Llama)
    added = list(ours.parameters)[len(theirs.parameters) - 1 :]  # stock's **kwargs swallows mistakes: it is left out
    assert added == ["expert_streaming", "prerouter", "force", "load_progress"]
    for name, parameter in theirs.parameters.items():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            assert ours.parameters[name].default == parameter.default, name
    assert ours.parameters["expert_streaming"].default is False
    assert issubclass(Llama, llama_cpp.Llama)


def test_without_streaming_it_is_stock(model: Path) -> None:
    with stock_kernels(False), contextlib.closing(Llama(str(model), **CONTEXT)) as ours, stock(model) as theirs:
        run(ours)
        run(theirs)
        assert_same_logits(ours, theirs)
        with pytest.raises(OptionError, match="^this model is not streamed: load it with expert_streaming=True"):
            ours.expert_stats()


def test_true_means_the_defaults(model: Path) -> None:
    with contextlib.closing(Llama(str(model), expert_streaming=True, **CONTEXT)) as llm, stock(model, interleaved=True) as theirs:
        run(llm)
        run(theirs)
        assert_same_logits(llm, theirs)
        assert llm.expert_stats().reader in ("uring", "pread")


def test_a_path_may_be_a_path(model: Path) -> None:
    with contextlib.closing(Llama(model, expert_streaming=smallest(model), **CONTEXT)) as llm:  # type: ignore[arg-type]
        assert len(run(llm)) == len(PROMPT) + len(DECODED)


# Text


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "seeded"])
def test_completion_writes_what_stock_writes(sampling: dict[str, Any], model: Path) -> None:
    with both(model) as (ours, theirs):
        options = {"max_tokens": 24, "logprobs": 3, **sampling}
        written, expected = ours(TEXT, **options), theirs(TEXT, **options)
        assert written["choices"] == expected["choices"]
        assert written["usage"] == expected["usage"]
        assert written["usage"]["completion_tokens"] > 4


def test_streamed_text_is_the_text(model: Path) -> None:
    with streamed(model) as llm:
        whole = llm(TEXT, max_tokens=24, temperature=0.0)["choices"][0]["text"]
        pieces = list(llm(TEXT, max_tokens=24, temperature=0.0, stream=True))
        assert len(pieces) > 1
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole


def test_chat_answers_what_stock_answers(model: Path) -> None:
    messages = [{"role": "user", "content": TEXT}]
    with both(model) as (ours, theirs):
        options = {"messages": messages, "max_tokens": 16, "temperature": 0.0}
        answer = theirs.create_chat_completion(**options)["choices"][0]["message"]
        assert ours.create_chat_completion(**options)["choices"][0]["message"] == answer
        pieces = [piece["choices"][0]["delta"] for piece in ours.create_chat_completion(**options, stream=True)]
        assert "".join(piece.get("content") or "" for piece in pieces) == answer["content"]


def test_tokens_are_stocks(model: Path) -> None:
    with streamed(model) as ours, stock(model) as theirs:
        tokens = ours.tokenize(TEXT.encode())
        assert tokens == theirs.tokenize(TEXT.encode())
        assert ours.detokenize(tokens) == theirs.detokenize(tokens)
        assert (ours.n_vocab(), ours.n_embd()) == (theirs.n_vocab(), theirs.n_embd())
        own = {"general.alignment": ours.metadata["general.alignment"]}  # of the stream that llama.cpp loads from
        assert ours.metadata == theirs.metadata | own


def test_vocab_only_tokenises_and_reads_no_expert(model: Path) -> None:
    assert isolated(_tokenise_only, model) == [True, 0, 0]


def _tokenise_only(path: Path) -> list[Any]:
    with streamed(path, ExpertStreaming(), vocab_only=True) as ours, stock(path, vocab_only=True) as theirs:
        same = ours.tokenize(TEXT.encode()) == theirs.tokenize(TEXT.encode())
        stats = ours.expert_stats()
        return [same, stats.slots_total, stats.bytes_read]


# State


def test_a_saved_state_goes_on_as_stock_does(model: Path) -> None:
    with both(model) as (ours, theirs):
        for llm in (ours, theirs):
            llm.eval(PROMPT)
            state = llm.save_state()
            llm.eval(DECODED[::-1])
            llm.load_state(state)
            llm.eval(DECODED)
        assert_same_logits(ours, theirs)


def test_stocks_state_goes_on_streamed(model: Path) -> None:
    with streamed(model) as ours, stock(model) as theirs:
        theirs.eval(PROMPT)
        ours.load_state(theirs.save_state())
        theirs.eval(DECODED)
        ours.eval(DECODED)
        assert_same_logits(ours, theirs)
        assert ours.expert_stats().tokens == len(DECODED)


def test_pickling_keeps_streaming(model: Path) -> None:
    with streamed(model) as llm:
        expected = run(llm)
        pickled = pickle.dumps(llm)
    with contextlib.closing(pickle.loads(pickled)) as copy:
        assert type(copy) is Llama
        assert np.array_equal(run(copy), expected)
        assert copy.expert_stats().slots_total == LAYERS * TOPK


# What computes


LORA_TARGETS = {
    "attention": (r"attn_[qkv]\.weight", r"attn_output\.weight"),
    "experts": (r"ffn_(gate|up|down)_exps\.weight",),
    "attention, experts and router": (r"attn_q\.weight", r"ffn_down_exps\.weight", r"ffn_gate_inp\.weight"),
}


@pytest.mark.parametrize("kernels", ["plain", "interleaved"])
@pytest.mark.parametrize("targets", LORA_TARGETS)
def test_a_lora_leaves_streaming_on_and_equals_stock(targets: str, kernels: str, model: Path) -> None:
    isolated(_compare_lora, model, str(lora(model, LORA_TARGETS[targets])), kernels)


def _compare_lora(path: Path, adapter: str, kernels: str) -> None:
    options = {"lora_path": adapter, "lora_scale": 0.7}
    with streamed(path) as llm:
        without = run(llm)
    with streamed(path, smallest(path, kernels=kernels), **options) as ours:
        with stock(path, interleaved=kernels == "interleaved", **options) as theirs:
            run(ours)
            run(theirs)
            assert_same_logits(ours, theirs)
            assert not np.array_equal(ours.scores[: ours.n_tokens], without)
            assert ours.expert_stats().misses > LAYERS * EXPERTS


@pytest.mark.parametrize("pooling", ["UNSPECIFIED", "MEAN", "LAST"])
def test_embeddings_are_stocks(pooling: str, model: Path) -> None:
    options = {"embedding": True, "logits_all": False, "n_ubatch": 64, "pooling_type": getattr(llama_cpp, f"LLAMA_POOLING_TYPE_{pooling}")}
    with streamed(model, **options) as ours, stock(model, **options) as theirs:
        texts = [TEXT, "A street is"]
        ours_data, theirs_data = ours.create_embedding(texts)["data"], theirs.create_embedding(texts)["data"]
        assert len(ours_data) == 2
        for our, their in zip(ours_data, theirs_data, strict=True):
            assert np.array_equal(np.array(our["embedding"]), np.array(their["embedding"]))
        assert np.array(ours_data[0]["embedding"]).any()
        assert ours.expert_stats().misses


@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(64, 64), (8, 8), (7, 3), (64, 1)])
def test_any_batch_size_equals_stock(n_batch: int, n_ubatch: int, model: Path) -> None:
    with both(model, n_batch=n_batch, n_ubatch=n_ubatch) as (ours, theirs):
        run(ours)
        run(theirs)
        assert_same_logits(ours, theirs)


def test_two_threads_give_the_same_bits(model: Path) -> None:
    with both(model, n_threads=2, n_threads_batch=2) as (ours, theirs):
        run(ours)
        run(theirs)
        assert_same_logits(ours, theirs)


@pytest.mark.parametrize("topk", [1, 3])
def test_an_overridden_number_of_experts_counts(topk: int, model: Path) -> None:
    options: dict[str, Any] = {"kv_overrides": {"qwen3moe.expert_used_count": topk}}
    minimum = describe(model).minimum_cache_bytes // TOPK * topk
    with pytest.raises(CacheTooSmallError, match=f"is {minimum} bytes"):
        Llama(str(model), expert_streaming=ExpertStreaming(cache=minimum - 1), **CONTEXT, **options)
    with streamed(model, smallest(model, cache=minimum), **options) as ours, stock(model, **options) as theirs:
        run(ours)
        run(theirs)
        assert_same_logits(ours, theirs)
        before = ours.expert_stats()
        ours.eval([3])
        during = ours.expert_stats().since(before)
        assert during.hits + during.misses == LAYERS * topk


# Low-level contexts


@contextlib.contextmanager
def context(llm: llama_cpp.Llama, n_sequences: int = 1) -> Iterator[Any]:
    """A further llama_context on the model of `llm`."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 256, 64, 16, n_sequences
    params.n_threads = params.n_threads_batch = 1
    ctx = llama_cpp.llama_init_from_model(llm._model.model, params)
    assert ctx
    try:
        yield ctx
    finally:
        llama_cpp.llama_free(ctx)


def decode(ctx: Any, n_vocab: int, sequences: dict[int, list[int]], begin: int = 0) -> np.ndarray:
    """Logits [token, vocabulary] of one batch, with tokens of each sequence from position `begin` on."""
    n = sum(map(len, sequences.values()))
    batch = llama_cpp.llama_batch_init(n, 0, 1)
    for sequence, tokens in sequences.items():
        for i, token in enumerate(tokens):
            at = batch.n_tokens
            batch.token[at], batch.pos[at], batch.logits[at] = token, begin + i, True
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            batch.n_tokens += 1
    assert llama_cpp.llama_decode(ctx, batch) == 0
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(ctx), shape=(n * n_vocab,)).reshape(n, n_vocab).copy()
    llama_cpp.llama_batch_free(batch)
    return logits


def test_several_sequences_in_one_batch_equal_stock(model: Path) -> None:
    logits = []
    with both(model) as pair:
        for llm in pair:
            with context(llm, n_sequences=2) as ctx:
                first = decode(ctx, llm.n_vocab(), {0: PROMPT, 1: PROMPT[::-1]})
                logits.append([first, *(decode(ctx, llm.n_vocab(), {0: [t], 1: [t + 1]}, len(PROMPT) + i) for i, t in enumerate(DECODED))])
    for ours, theirs in zip(*logits, strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize(("reader", "kernels"), [("uring", "plain"), ("pread", "interleaved"), ("mmap", "plain")])
def test_two_contexts_of_one_model_decode_at_once(reader: str, kernels: str, model: Path) -> None:
    isolated(_decode_at_once, model, reader, kernels, timeout_s=60)


def _decode_at_once(path: Path, reader: str, kernels: str) -> None:
    prompts = [PROMPT, PROMPT[::-1]]
    with stock(path, interleaved=kernels == "interleaved") as theirs:
        expected = []
        for prompt in prompts:
            with context(theirs) as ctx:
                expected.append(_all(ctx, theirs.n_vocab(), prompt))
    streaming = smallest(path, reader=reader, kernels=kernels, **({"cache": "auto"} if reader == "mmap" else {}))
    got: list[Any] = [None, None]
    with streamed(path, streaming) as ours, context(ours) as one, context(ours) as two:

        def work(i: int, ctx: Any) -> None:
            for _ in range(5):
                llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
                got[i] = _all(ctx, ours.n_vocab(), prompts[i])
                assert np.array_equal(got[i], expected[i])

        threads = [threading.Thread(target=work, args=args) for args in ((0, one), (1, two))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert np.array_equal(got, expected)


def _all(ctx: Any, n_vocab: int, prompt: list[int]) -> np.ndarray:
    logits = [decode(ctx, n_vocab, {0: prompt})]
    logits += [decode(ctx, n_vocab, {0: [token]}, len(prompt) + i) for i, token in enumerate(DECODED)]
    return np.concatenate(logits)


# Several models


def test_models_side_by_side_do_not_disturb_each_other(model: Path, tmp_path: Path) -> None:
    other = make(tmp_path, "gpt-oss", seed=1)
    openers = [lambda: streamed(model), lambda: streamed(other), lambda: stock(model), lambda: stock(other)]
    alone = []
    for opener in openers:
        with opener() as llm:
            alone.append(run(llm))
    with contextlib.ExitStack() as stack:
        llms = [stack.enter_context(opener()) for opener in openers]
        for tokens in (PROMPT, *([token] for token in DECODED)):
            for llm in llms:
                llm.eval(tokens)
        for llm, expected in zip(llms, alone, strict=True):
            assert np.array_equal(llm.scores[: llm.n_tokens], expected)


def test_stock_modules_are_left_as_they_are(model: Path) -> None:
    before = {name: getattr(internals, name) for name in ("LlamaModel", "LlamaContext", "LlamaBatch")}
    load = llama_cpp.llama_cpp.llama_model_load_from_file
    with streamed(model):
        assert {name: getattr(internals, name) for name in before} == before
        assert llama_cpp.llama_cpp.llama_model_load_from_file is load
        assert llama_cpp.llama.internals is internals


def test_closing_and_opening_again_leaves_nothing_behind(model: Path) -> None:
    grown = isolated(_reopen, model, str(lora(model)))
    assert grown == {"descriptors": 0, "threads": 0, "mappings": 0, "resident": 0}


def _reopen(path: Path, adapter: str) -> dict[str, int]:
    def once(reader: str, options: dict[str, Any]) -> None:
        streaming = ExpertStreaming(reader=reader) if reader == "mmap" else smallest(path, reader=reader, kernels="auto")  # type: ignore[arg-type]
        with streamed(path, streaming, **options) as llm:
            run(llm)

    def all_kinds() -> None:
        for reader in ("uring", "pread", "mmap"):
            once(reader, {})
        once("uring", {"lora_path": adapter})
        gc.collect()

    def now() -> dict[str, int]:
        time.sleep(0.1)  # a thread that was joined is listed for a moment more
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
            "resident": psutil.Process().memory_info().rss,
        }

    for _ in range(8):
        all_kinds()
    before = now()
    for _ in range(30):
        all_kinds()
    grown = {name: count - before[name] for name, count in now().items()}
    # the allocator keeps some pages and splits some mappings: only what grows with every model is a leak
    allowed = {"descriptors": 0, "threads": 0, "mappings": 20, "resident": 4 << 20}
    return {name: 0 if count <= allowed[name] else count for name, count in grown.items()}


def test_a_closed_model_says_so(model: Path) -> None:
    with streamed(model) as llm:
        run(llm)
    with pytest.raises(MoestreamError, match="^the model is closed$"):
        llm.expert_stats()
    llm.close()


# Loading


def test_load_progress_rises_to_one(model: Path) -> None:
    shares: list[float] = []
    with streamed(model, load_progress=shares.append):
        pass
    assert shares == sorted(shares)
    assert 0.0 <= shares[0] < shares[-1] == 1.0
    assert len(shares) > 2


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_in_load_progress_stops_loading_and_comes_out(error: type[BaseException], model: Path) -> None:
    def progress(share: float) -> None:
        if share > 0.3:
            raise error("enough")

    with pytest.raises(error, match="enough"):
        Llama(str(model), expert_streaming=smallest(model), load_progress=progress, **CONTEXT)
    with streamed(model) as llm:
        assert len(run(llm))


def test_a_context_that_gets_no_cache_is_freed_before_its_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's contexts look at their model when they are freed."""
    freed: list[str] = []
    for name in ("llama_free", "llama_model_free"):
        original = getattr(llama_cpp, name)

        def recorded(pointer: Any, name: str = name, original: Any = original) -> None:
            freed.append(name)
            original(pointer)

        monkeypatch.setattr(llama_cpp, name, recorded)
        monkeypatch.setattr(llama_cpp.llama_cpp, name, recorded)
    memory = iter([1 << 40, 0])  # enough before loading, nothing afterwards
    monkeypatch.setattr("moestream._engine.available_bytes", lambda: next(memory))
    with pytest.raises(CacheTooSmallError) as raised:
        Llama(str(model), expert_streaming=True, **CONTEXT)
    assert str(raised.value).startswith("cache='auto': 0 bytes of memory is available")
    assert str(raised.value).endswith("lower n_ctx or n_ubatch, or free some memory")
    del raised
    gc.collect()
    assert freed == ["llama_free", "llama_model_free"]


# Statistics


@pytest.mark.parametrize("reader", ["uring", "pread"])
@pytest.mark.parametrize("direct", [False, "auto"])
def test_stats_count_what_happened(reader: Any, direct: Any, model: Path) -> None:
    described = describe(model)
    expert_bytes = described.moe_layers[0].expert_bytes
    with streamed(model, smallest(model, reader=reader, direct=direct)) as llm:
        assert llm.expert_stats().as_dict() | {"notes": []} == llm.expert_stats().as_dict() | {"notes": []}
        assert llm.expert_stats().tokens == llm.expert_stats().bytes_read == 0
        llm.eval(PROMPT)
        prompt = llm.expert_stats()
        assert prompt.tokens == len(PROMPT)
        for token in DECODED:
            before = llm.expert_stats()
            llm.eval([token])
            during = llm.expert_stats().since(before)
            assert during.tokens == 1
            assert during.hits + during.misses == LAYERS * TOPK
            assert during.bytes_read >= during.misses * expert_bytes
        stats = llm.expert_stats()
        assert 0 < stats.slots_used <= stats.slots_total == LAYERS * TOPK
        assert stats.cache_bytes == stats.slots_total * stats.slot_bytes <= described.minimum_cache_bytes
        assert stats.resident_bytes == described.dense_bytes + stats.slots_used * stats.slot_bytes
        assert (stats.dense_bytes, stats.expert_bytes) == (described.dense_bytes, described.expert_bytes)
        assert stats.bytes_on_disk == model.stat().st_size
        assert stats.bytes_read >= stats.misses * expert_bytes
        assert stats.hit_rate == stats.hits / (stats.hits + stats.misses)
        assert stats.read_bandwidth == stats.bytes_read / stats.read_s > 0
        assert 0 < stats.compute_s
        assert 0 <= stats.wait_s  # 0 if each read was done when it was asked about, as from the page cache
        assert (stats.reader, stats.kernels) == (reader, "plain")
        assert direct == "auto" or not stats.direct


def test_a_cache_of_all_reads_every_expert_once(model: Path) -> None:
    with streamed(model, smallest(model, cache="auto")) as llm:
        for _ in range(3):
            llm.reset()
            run(llm)
        stats = llm.expert_stats()
        assert stats.misses == stats.slots_used <= LAYERS * EXPERTS
        assert any(note.startswith("cache: ") for note in stats.notes)


def test_stats_since_are_differences_of_counters_only(model: Path) -> None:
    with streamed(model) as llm:
        llm.eval(PROMPT)
        earlier = llm.expert_stats()
        llm.eval(DECODED)
        later = llm.expert_stats()
    difference = later.since(earlier)
    assert isinstance(difference, ExpertStats)
    for name in ("tokens", "hits", "misses", "reads", "bytes_read", "read_s", "wait_s", "compute_s", "convert_s"):
        assert getattr(difference, name) == getattr(later, name) - getattr(earlier, name) >= 0
    assert difference.slots_total == later.slots_total
    assert later.since(later).hit_rate == later.since(later).read_bandwidth == 0.0


def test_kernels_are_named_after_what_computes(model: Path, tmp_path: Path) -> None:
    def kernels(path: Path, **options: Any) -> str:
        with streamed(path, ExpertStreaming(reader="pread", **options)) as llm:
            return llm.expert_stats().kernels

    assert kernels(model, kernels="plain") == "plain"
    if kernels(model) == "plain":
        pytest.skip("ggml interleaves no Q4_0 of this shape on this CPU")
    assert kernels(model) == "interleaved"
    assert kernels(make(tmp_path, expert_types={"down": "F16"})) == "mixed"
    assert kernels(make(tmp_path, type="F16")) == "plain"
