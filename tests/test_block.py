"""A layer's experts as one operation: stock's bits whatever the batch, the cache and the threads, and each expert read once."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

import moestream
import native
from factory import lora, make
from isolation import isolated
from logits import CONTEXT, stock_kernels
from moestream import ExpertReadError, ExpertStreaming, Llama, OptionError, describe, record_routing
from moestream._capture import _ffi as ggml_ffi
from moestream._capture import _ggml as ggml
from moestream._evaluation import apply_adapters

LAYERS, TOPK, EXPERTS = 4, 2, 8  # of the factory's models
TOKENS = random.Random(1).choices(range(256), k=400)
BATCHES = (1, 2, 3, 7, 16, 64, 130)
LONG: dict[str, Any] = {**CONTEXT, "n_ctx": 256, "n_batch": 130, "n_ubatch": 130}


def threads(n: int) -> dict[str, int]:
    return {"n_threads": n, "n_threads_batch": n}


def caches(path: Path) -> dict[str, int]:
    """From one token's experts to all."""
    described = describe(path)
    least, all_of_them = described.minimum_cache_bytes, described.maximum_cache_bytes
    return {"smallest": least, "half": (least + all_of_them) // 2, "all": all_of_them}


@contextlib.contextmanager
def streamed(path: Path, streaming: ExpertStreaming | None = None, **options: Any) -> Iterator[Llama]:
    """With the smallest cache and plain kernels, if nothing else is said."""
    streaming = streaming or ExpertStreaming(kernels="plain", reader="pread", cache=describe(path).minimum_cache_bytes)
    with contextlib.closing(Llama(str(path), expert_streaming=streaming, **{**LONG, **options})) as llm:
        yield llm


@contextlib.contextmanager
def stock(path: Path, *, kernels: str = "plain", **options: Any) -> Iterator[llama_cpp.Llama]:
    with (
        stock_kernels(kernels == "interleaved"),
        contextlib.closing(llama_cpp.Llama(str(path), **{**LONG, **options})) as llm,
    ):
        yield llm


def evaluated(llm: llama_cpp.Llama, batches: Sequence[int] = BATCHES) -> np.ndarray:
    """Logits [token, vocabulary] of batches of so many tokens, one after the other."""
    llm.reset()
    for n in batches:
        llm.eval(TOKENS[llm.n_tokens : llm.n_tokens + n])
    return llm.scores[: llm.n_tokens].copy()


def assert_all_fused(llm: Llama) -> None:
    stats = llm.expert_stats()
    assert stats.fused_blocks > 0 and stats.ggml_blocks == 0


# Bits


@pytest.mark.parametrize("n_ubatch", [*BATCHES])
@pytest.mark.parametrize("kernels", ["plain", "interleaved"])
def test_prompts_have_stocks_bits_whatever_is_computed_at_once(kernels: Any, n_ubatch: int, model: Path) -> None:
    options = {"n_ubatch": n_ubatch, "n_batch": 130}
    with stock(model, kernels=kernels, **options) as theirs:
        expected = evaluated(theirs, (130, 1))
    for cache in caches(model).values():
        with streamed(model, ExpertStreaming(kernels=kernels, reader="pread", cache=cache), **options) as ours:
            assert np.array_equal(evaluated(ours, (130, 1)), expected)
            assert_all_fused(ours)


@pytest.mark.parametrize("n_threads", [1, 2, 3, 5])
@pytest.mark.parametrize(("kernels", "cache"), [("plain", "smallest"), ("interleaved", "half"), ("interleaved", "all")])
def test_batches_of_any_size_in_turn_have_stocks_bits_with_any_threads(
    kernels: Any, n_threads: int, cache: str, model: Path
) -> None:
    with stock(model, kernels=kernels) as theirs:
        expected = evaluated(theirs)
    with streamed(
        model, ExpertStreaming(kernels=kernels, reader="uring", cache=caches(model)[cache]), **threads(n_threads)
    ) as ours:
        assert np.array_equal(evaluated(ours), expected)
        assert_all_fused(ours)


TYPES: dict[str, dict[str, Any]] = {
    "F16": {"type": "F16"},
    "F32": {"type": "F32"},
    "BF16": {"type": "BF16"},
    "Q4_1": {"type": "Q4_1"},
    "Q5_0": {"type": "Q5_0"},
    "Q8_0": {"type": "Q8_0"},
    "IQ4_NL": {"type": "IQ4_NL"},
    "MXFP4": {"type": "MXFP4"},
    "Q2_K": {"type": "Q2_K"},
    "Q4_K and Q6_K": {"type": "Q4_K", "expert_types": {"down": "Q6_K"}},
    "Q5_K and Q8_0": {"type": "Q5_K", "expert_types": {"up": "Q8_0"}},
    "biases and a clamped activation": {"arch": "gpt-oss"},
    "merged gate_up": {"arch": "qwen3next", "merged_gate_up": True},
    "ReGLU": {"arch": "smallthinker"},
    "four experts a token of 40": {"topk": 4, "experts": 40},
    "more rows than a group": {"ff": 160, "d": 128},
}


@pytest.mark.parametrize("kernels", ["plain", "interleaved"])
@pytest.mark.parametrize("type", TYPES)
def test_every_type_and_activation_has_stocks_bits(type: str, kernels: Any, folder: Path) -> None:
    path = make(folder, **TYPES[type])
    with stock(path, kernels=kernels) as theirs:
        expected = evaluated(theirs)
    for cache, n_threads in (("smallest", 2), ("all", 1)):
        with streamed(
            path, ExpertStreaming(kernels=kernels, reader="pread", cache=caches(path)[cache]), **threads(n_threads)
        ) as ours:
            assert np.array_equal(evaluated(ours), expected)
            assert_all_fused(ours)


@pytest.mark.parametrize("n_threads", [1, 3])
def test_mapped_experts_have_stocks_bits(n_threads: int, model: Path) -> None:
    with stock(model) as theirs:
        expected = evaluated(theirs)
    with streamed(model, ExpertStreaming(reader="mmap"), **threads(n_threads)) as ours:
        assert np.array_equal(evaluated(ours), expected)
        assert_all_fused(ours)


@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "smallthinker"])
@pytest.mark.parametrize("kernels", ["plain", "interleaved"])
def test_as_one_operation_or_node_by_node_the_bits_are_the_same(kernels: Any, arch: str, folder: Path) -> None:
    path = make(folder, arch)
    logits = []
    for compute in ("exact", "ggml"):
        options = {"kernels": kernels, "compute": compute, "cache": describe(path).minimum_cache_bytes}
        with streamed(path, ExpertStreaming(**options)) as llm:
            logits.append(evaluated(llm))
            stats = llm.expert_stats()
            blocks = LAYERS * len(BATCHES)
            assert (stats.fused_blocks, stats.ggml_blocks) == ((blocks, 0) if compute == "exact" else (0, blocks))
    assert np.array_equal(*logits)


@pytest.mark.parametrize("kernels", ["plain", "interleaved"])
def test_fast_decodes_to_stocks_bits_and_reads_prompts_to_nearly_the_same(kernels: Any, model: Path) -> None:
    with stock(model, kernels=kernels) as theirs:
        expected = evaluated(theirs, (1, 1, 1, 130))
    with streamed(model, ExpertStreaming(kernels=kernels, compute="fast")) as ours:
        logits = evaluated(ours, (1, 1, 1, 130))
        assert_all_fused(ours)
    assert np.array_equal(logits[:3], expected[:3])
    assert np.abs(logits - expected).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize(("cache", "n_threads"), [("smallest", 1), ("all", 3)])
@pytest.mark.parametrize("type", ["Q4_0", "Q8_0"])
def test_neuron_major_matrices_have_the_bits_they_have_node_by_node(
    type: str, cache: str, n_threads: int, folder: Path
) -> None:
    """Sums over neurons go in the order of neurons, in both: rows.h promises the same bits for any way to divide them."""
    laid = folder / f"neuron-{type}.gguf"
    if not laid.exists():
        moestream.convert(
            make(folder, "smallthinker", type="F16"), laid, type, neuron_major=True, target="plain", progress=False
        )
    assert "neuron-major" in {matrix.form for matrix in describe(laid).moe_layers[0].matrices}
    logits = []
    for compute in ("ggml", "exact"):
        streaming = ExpertStreaming(kernels="plain", compute=compute, cache=caches(laid)[cache])  # type: ignore[arg-type]
        with streamed(laid, streaming, **threads(n_threads)) as llm:
            logits.append(evaluated(llm, (1, 8, 64, 1)))
            assert (llm.expert_stats().ggml_blocks == 0) == (compute == "exact")
    assert np.array_equal(*logits)


def test_an_unknown_way_to_compute_is_refused() -> None:
    with pytest.raises(OptionError, match=r"^compute='wrong': expected one of 'exact', 'fast', 'ggml'$"):
        ExpertStreaming(compute="wrong")  # type: ignore[arg-type]


# What is read


@pytest.mark.parametrize("laid", [False, True], ids=["stock", "laid"])
@pytest.mark.parametrize(("n_ubatch", "n_threads"), [(7, 1), (64, 2), (130, 1), (130, 2)])
def test_a_prompt_reads_each_expert_once_a_layer_and_batch(
    n_ubatch: int, laid: bool, n_threads: int, folder: Path
) -> None:
    path = make(folder, experts=32)
    if laid:
        stock_path, path = path, folder / "laid.gguf"
        if not path.exists():
            moestream.convert(stock_path, path, target="plain", progress=False)
    prompt, options = TOKENS[:130], {"n_ubatch": n_ubatch, **threads(n_threads)}
    with streamed(path, **options) as llm:
        chosen = record_routing(llm, [prompt], tokens_at_once=n_ubatch).experts
    used = [
        len(np.unique(chosen[first : first + n_ubatch, layer]))
        for first in range(0, len(prompt), n_ubatch)
        for layer in range(LAYERS)
    ]
    streaming = ExpertStreaming(kernels="plain", reader="pread", cache=describe(path).minimum_cache_bytes, direct=False)
    with streamed(path, streaming, **options) as llm:
        llm.eval(prompt)
        stats = llm.expert_stats()
        assert stats.slots_total == LAYERS * TOPK
        assert n_ubatch < 64 or max(used) > stats.slots_total, "it all fits"
        assert stats.hits + stats.misses == sum(used)
        layer, reads = describe(path).moe_layers[0], 1 if laid else 3
        in_vain = stats.reads // reads - stats.misses  # what was read ahead and not wanted
        assert 0 <= in_vain <= 0.03 * sum(used)
        assert stats.reads == reads * (stats.misses + in_vain)
        assert stats.bytes_read == (layer.record_bytes or layer.expert_bytes) * (stats.misses + in_vain)


def test_a_prompt_leaves_each_layer_its_share_of_the_cache(folder: Path) -> None:
    """An LRU would keep all experts of the last layers and none of the first."""
    layers, experts = 8, 32
    path = make(folder, experts=experts, layers=layers)
    streaming = ExpertStreaming(kernels="plain", reader="pread", cache=describe(path).maximum_cache_bytes // 2)
    hits = [0] * layers
    with streamed(path, streaming) as llm:
        totals: list[int] = []
        for last in TOKENS[:10]:
            llm.reset()
            llm.eval(TOKENS[:130])
            totals[:] = [llm.expert_stats().hits]
            is_end = lambda name, node: name.startswith(b"l_out-")  # noqa: E731
            with watched(llm, is_end, lambda name, node: totals.append(llm.expert_stats().hits)) as decode:
                decode([last])
            hits = [sum(pair) for pair in zip(hits, np.diff(totals).tolist(), strict=True)]
    assert sum(hits) > 0.5 * 10 * layers * TOPK
    assert sum(n > 0 for n in hits) >= layers - 1, hits


# What does not look like a block


def test_scales_per_expert_are_computed_node_by_node(folder: Path) -> None:
    path = make(folder, expert_scales=True)
    with streamed(path) as ours, stock(path) as theirs:
        assert np.array_equal(evaluated(ours), evaluated(theirs))
        stats = ours.expert_stats()
        assert (stats.fused_blocks, stats.ggml_blocks) == (0, LAYERS * len(BATCHES))


@pytest.mark.parametrize(
    ("targets", "fused"),
    [
        (r"attn_q\.weight", True),
        (r"ffn_gate_exps\.weight", False),
        (r"ffn_up_exps\.weight", False),
        (r"ffn_down_exps\.weight", False),
    ],
)
def test_an_adapter_of_experts_is_computed_node_by_node(targets: str, fused: bool, model: Path) -> None:
    adapter = str(lora(model, (targets,)))
    with streamed(model, lora_path=adapter) as ours, stock(model, lora_path=adapter) as theirs:
        assert np.array_equal(evaluated(ours), evaluated(theirs))
        stats = ours.expert_stats()
        assert (stats.fused_blocks > 0, stats.ggml_blocks > 0) == (fused, not fused)


def test_a_block_that_is_in_the_file_and_not_loaded_is_left_alone(folder: Path) -> None:
    """As are the blocks that predict further tokens: reading ahead once asked for the experts of one."""
    path = make(folder, "glm4moe")
    options: dict[str, Any] = {"kv_overrides": {"glm4moe.nextn_predict_layers": 1}}
    isolated(_leave_alone, path, options)


def _leave_alone(path: Path, options: dict[str, Any]) -> None:
    with stock(path, **options) as theirs:
        expected = evaluated(theirs)
    for streaming in (None, ExpertStreaming(kernels="plain", cache="auto"), ExpertStreaming(reader="mmap")):
        with streamed(path, streaming, **options) as ours:
            assert np.array_equal(evaluated(ours), expected)
            assert_all_fused(ours)
            assert ours.expert_stats().slots_total < sum(layer.experts for layer in describe(path).moe_layers)


# Who looks on


@contextlib.contextmanager
def watched(
    llm: llama_cpp.Llama, wanted: Callable[[bytes, Any], bool], see: Callable[[bytes, Any], None]
) -> Iterator[Callable[[list[int]], None]]:
    """A further context of the model, whose nodes that are `wanted` are seen once they are computed."""
    failures: list[BaseException] = []

    @llama_cpp.ggml_backend_sched_eval_callback
    def callback(address: int, ask: bool, _: object) -> bool:
        node = ggml_ffi.cast("struct ggml_tensor *", address)
        name = ggml_ffi.string(node.name)
        try:
            if ask:
                return wanted(name, node)
            see(name, node)
        except BaseException as error:
            failures.append(error)
        return True

    params = type(llm.context_params).from_buffer_copy(llm.context_params)
    params.cb_eval, params.cb_eval_user_data = callback, None
    ctx = llama_cpp.llama_init_from_model(llm.model, params)
    assert ctx
    apply_adapters(llm, ctx)
    try:

        def decode(tokens: list[int]) -> None:
            batch = batch_of(tokens)
            assert llama_cpp.llama_decode(ctx, batch) == 0
            llama_cpp.llama_batch_free(batch)
            assert not failures, failures

        yield decode
    finally:
        llama_cpp.llama_free(ctx)


def batch_of(tokens: list[int]) -> Any:
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.logits[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, i, True, 1, 0
    return batch


def values(node: Any) -> np.ndarray | None:
    """A copy of a tensor of 4-byte numbers that lies in one piece, else None."""
    ne, nb = list(node.ne), list(node.nb)
    if node.type not in (0, 26) or nb[0] != 4 or any(nb[i + 1] != nb[i] * ne[i] for i in range(3)):
        return None
    data = ggml_ffi.buffer(ggml_ffi.cast("char *", ggml.ggml_get_data(node)), ggml.ggml_nbytes(node))
    return np.frombuffer(data, np.float32 if node.type == 0 else np.int32).copy()


def captured(
    llm: llama_cpp.Llama, wanted: Callable[[bytes, Any], bool], tokens: list[int]
) -> list[tuple[bytes, np.ndarray]]:
    found: list[tuple[bytes, np.ndarray]] = []

    def see(name: bytes, node: Any) -> None:
        if (copy := values(node)) is not None:
            found.append((name, copy))

    with watched(llm, wanted, see) as decode:
        decode(tokens)
    return found


LOOKS: dict[str, Callable[[bytes, Any], bool]] = {
    "all nodes": lambda name, node: True,
    "nodes of experts": lambda name, node: name.startswith(b"ffn_moe_"),
    "the products down": lambda name, node: name.startswith(b"ffn_moe_down"),
    "activations": lambda name, node: name.startswith((b"ffn_moe_swiglu", b"ffn_moe_reglu")),
    "products up": lambda name, node: name.startswith(b"ffn_moe_up"),
    "the weighted": lambda name, node: name.startswith(b"ffn_moe_weighted"),
    "ends of layers": lambda name, node: name.startswith(b"l_out"),
}


@pytest.mark.parametrize("n_tokens", [1, 64])
@pytest.mark.parametrize("what", LOOKS)
@pytest.mark.parametrize("arch", ["qwen3moe", "smallthinker"])
def test_who_looks_at_nodes_sees_what_stock_computes(arch: str, what: str, n_tokens: int, folder: Path) -> None:
    path, looks = make(folder, arch), LOOKS[what]
    with streamed(path) as ours, stock(path) as theirs:
        seen, expected = (captured(llm, looks, TOKENS[:n_tokens]) for llm in (ours, theirs))
    assert [name for name, _ in seen] == [name for name, _ in expected] != []
    for (name, our), (_, their) in zip(seen, expected, strict=True):
        assert np.array_equal(our, their, equal_nan=True), name


def _is_down(name: bytes, node: Any) -> bool:
    return bool(node.op) and bool(node.src[0]) and ggml_ffi.string(node.src[0].name).endswith(b".ffn_down_exps.weight")


@pytest.mark.parametrize("n_tokens", [1, 64])
def test_who_looks_at_a_product_sees_what_it_is_made_of(n_tokens: int, model: Path) -> None:
    """As collectors of activations do, who ask for the product and take its input."""
    inputs: list[list[np.ndarray]] = [[], []]
    with streamed(model) as ours, stock(model) as theirs:
        for llm, found in zip((ours, theirs), inputs, strict=True):
            with watched(llm, _is_down, lambda name, node, found=found: found.append(values(node.src[1]))) as decode:  # type: ignore[misc]
                decode(TOKENS[:n_tokens])
    assert len(inputs[0]) == LAYERS
    for our, their in zip(*inputs, strict=True):
        assert np.array_equal(our, their)


@pytest.mark.parametrize("n_tokens", [1, 64])
def test_who_looks_at_a_product_does_not_change_what_an_adapter_makes_of_it(n_tokens: int, model: Path) -> None:
    """llama.cpp gives us the graph up to what is looked at; that the adapter needs the product's input comes after."""
    adapter, logits = str(lora(model, (r"ffn_down_exps\.weight",))), []
    with streamed(model, lora_path=adapter) as ours, stock(model, lora_path=adapter) as theirs:
        for llm in (ours, theirs):

            def see(name: bytes, node: Any) -> None:
                if name == b"result_output":
                    logits.append(values(node))

            with watched(llm, lambda name, node: _is_down(name, node) or name == b"result_output", see) as decode:
                decode(TOKENS[:n_tokens])
    assert len(logits) == 2
    assert np.array_equal(*logits)


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("batches", [(1,) * 6, (129, 1)], ids=["tokens", "prompt"])
def test_zeros_are_those_behind_the_activation(batches: tuple[int, ...], n_threads: int, folder: Path) -> None:
    path = make(folder, "smallthinker")
    counts: dict[int, list[int]] = {layer: [0, 0] for layer in range(LAYERS)}

    with streamed(path, **threads(n_threads)) as ours, stock(path) as theirs:
        for name, activation in captured(theirs, LOOKS["activations"], TOKENS[: sum(batches)]):
            layer = int(name.split(b"-")[1])
            counts[layer][0] += int((activation == 0).sum())
            counts[layer][1] += activation.size
        assert ours.expert_stats().zeros == ()
        evaluated(ours, batches)
        zeros = ours.expert_stats().zeros
    expected = [zero / of for zero, of in counts.values()]
    assert min(expected) > 0.2
    assert zeros == pytest.approx(expected, abs=2e-3)  # one by one rounds as a prompt does, but not to the bit


def test_an_activation_that_gives_no_zeros_has_none_counted(model: Path) -> None:
    with streamed(model) as llm:
        evaluated(llm, (1, 16))
        assert llm.expert_stats().zeros == ()


# What interrupts


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("n_tokens", [1, 130])
def test_an_aborted_call_leaves_the_model_whole(n_tokens: int, n_threads: int, model: Path) -> None:
    isolated(_abort, model, n_tokens, n_threads, timeout_s=60)


def _abort(path: Path, n_tokens: int, n_threads: int) -> None:
    """Pins left behind would make a later call wait for ever for room in the smallest cache."""
    with streamed(path, **threads(n_threads)) as llm:
        expected = evaluated(llm)
        ctx, left = llm._ctx.ctx, 0

        @llama_cpp.ggml_abort_callback
        def abort(_: object) -> bool:
            nonlocal left
            left -= 1
            return left < 0

        llama_cpp.llama_set_abort_callback(ctx, abort, None)
        aborted = 0
        for n_polls in (*range(150), 1_000_000):
            left = n_polls
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
            batch = batch_of(TOKENS[:n_tokens])
            code = llama_cpp.llama_decode(ctx, batch)
            llama_cpp.llama_batch_free(batch)
            assert code in (0, 2)
            aborted += code == 2
        assert aborted > 10 and code == 0
        llama_cpp.llama_set_abort_callback(ctx, llama_cpp.ggml_abort_callback(), None)
        assert np.array_equal(evaluated(llm), expected)


@pytest.mark.parametrize("reader", ["uring", "pread", "mmap"])
@pytest.mark.parametrize(("batches", "n_threads"), [((130,), 1), ((130,), 3), ((3, 1), 1), ((3, 1), 3)])
def test_a_disk_that_fails_in_the_middle_ends_the_call_and_not_the_model(
    batches: tuple[int, ...], n_threads: int, reader: Any, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    content = make(folder, experts=32).read_bytes()
    path.write_bytes(content)
    cache = {} if reader == "mmap" else {"cache": describe(path).minimum_cache_bytes}
    with native.opened(path) as source:
        offset = source.layers[2].matrices[0].offset
    with streamed(path, ExpertStreaming(kernels="plain", reader=reader, **cache), **threads(n_threads)) as llm:
        expected = evaluated(llm, batches)
        for _ in range(3):
            os.truncate(path, offset)
            with pytest.raises(
                ExpertReadError,
                match=r"expert \d+ of blk\.[23]\.ffn_\w+_exps\.weight at offset \d+ \(\d+ bytes\) is gone",
            ):
                evaluated(llm, batches)
            path.write_bytes(content)
            assert np.array_equal(evaluated(llm, batches), expected)


# Several at once


@pytest.mark.parametrize("kernels", ["plain", "interleaved"])
def test_a_prompt_and_a_decode_at_once_share_the_smallest_cache(kernels: str, folder: Path) -> None:
    path = make(folder, experts=32)
    isolated(_at_once, path, kernels, timeout_s=60)


def _at_once(path: Path, kernels: Any) -> None:
    batches = [(130,), (1,) * 12, (16, 3, 64)]
    with stock(path, kernels=kernels) as theirs:
        expected = [evaluated(theirs, b) for b in batches]
        n_vocab = theirs.n_vocab()
    wrong: list[str] = []
    streaming = ExpertStreaming(kernels=kernels, reader="pread", cache=describe(path).minimum_cache_bytes)
    with streamed(path, streaming, **threads(2)) as llm, contextlib.ExitStack() as stack:

        def work(ctx: Any, sizes: tuple[int, ...], logits: np.ndarray) -> None:
            for _ in range(6):
                llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
                done = 0
                for n in sizes:
                    batch = batch_of(TOKENS[done : done + n])
                    for i in range(n):
                        batch.pos[i] = done + i
                    code = llama_cpp.llama_decode(ctx, batch)
                    got = np.ctypeslib.as_array(llama_cpp.llama_get_logits(ctx), shape=(n * n_vocab,)).reshape(
                        n, n_vocab
                    )
                    if code or not np.array_equal(got, logits[done : done + n]):
                        wrong.append(f"{sizes}: {code}, tokens {done} to {done + n}")
                    llama_cpp.llama_batch_free(batch)
                    done += n

        workers = []
        for sizes, logits in zip(batches, expected, strict=True):
            ctx = llama_cpp.llama_init_from_model(llm.model, llm.context_params)
            stack.callback(llama_cpp.llama_free, ctx)
            workers.append(threading.Thread(target=work, args=(ctx, sizes, logits)))
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert_all_fused(llm)
    assert not wrong, wrong
