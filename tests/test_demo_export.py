"""The demo models as files: a tokenizer that llama.cpp has too, and the same numbers in every format."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

import gguf
import llama_cpp
import numpy as np
import pytest

import moestream
from isolation import isolated
from logits import stock, streamed
from moestream import ExpertStreaming

safetensors = pytest.importorskip("safetensors.numpy", reason="needs safetensors, of the extra train")
pytest.importorskip("tokenizers", reason="needs tokenizers, of the extra train")

from demo_model import agreement, export, tokenizer  # noqa: E402
from demo_model.config import KINDS, ModelConfig  # noqa: E402

VOCABULARY = 1024
CARD = {"name": "Demo", "description": "A model for tests.", "license": "MIT"}

ODD = {
    "nothing": "",
    "one space": " ",
    "spaces": "x" + " " * 300 + "y",
    "spaces at both ends": "   lead, trail   ",
    "tabs": "\t\tx\t y\t",
    "line ends": "a\r\nb\r\n\r\nc\rd \n \n  e\n\n\n",
    "no-break spaces": "a\u00a0b \u00a0 c\u2009d\u3000e\u202f!",
    "line and paragraph separators": "a\u2028b\u2029 c\u0085d \u0085",
    "zero width": "a\u200bb\u200d c\ufeffd\u180ee",
    "control characters": "\x00a\x01\x02 \x1c\x1d\x1e\x1f\x7f \x80\x9f",
    "family of joined emoji": "a 👩‍👩‍👧‍👦👩‍👩‍👧‍👦 family!",
    "flags": "🇩🇪🇫🇷 🇯🇵",
    "Chinese and Japanese": "漢字かな交じり文。「はい」、と 言った。",
    "combining accents": "e\u0301a\u0300 n\u0303\u0303 \u0301x",
    "other scripts": "नमस्ते ไทย עברית العربية Ελλάδα ǅ ß ﬁ Ｆｕｌｌ",
    "contractions": "don't DON'T we'Ve I'LL 'S 'ſ '\u212a o'reilly'd''s",
    "digits": "1234567 3.14159 ١٢٣ ½ Ⅷ ²x2 1st",
    "quotes and dashes": '“Hello,” she said—then… ‘no’–(maybe)… "the" (the) -the',
    "rulers": "=" * 70 + "\n" + "-" * 70 + "\r\n!!!\n\n???",
    "names of code": "__init__ foo_bar fooBar #define\n    def f(x): return x",
    "end of document as text": "<|endoftext|>a<|endoftext|> <|end of text|>",
    "no characters": "\ufffd\ufffe\uffff\ufdd0\U0010ffff\U000e0001 \ue000",
    "a long word": "the" * 3000,
}


small = functools.partial(
    ModelConfig, vocab_size=VOCABULARY, n_layers=2, n_experts=8, top_k=2, d_expert=32, context=128
)
"""A small model of a kind."""


def random_state(config: ModelConfig) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(0)
    return {
        t.name: (numbers.standard_normal(t.shape) * t.shape[-1] ** -0.5 + ("norm" in t.name)).astype(np.float32)
        for t in export.tensors(config)
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python's manual, and enough of the odd inputs that the vocabulary has tokens of them."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [*list(topics.topics.values())[:20], *(text[:400] for text in ODD.values() for _ in range(20))]
    documents = [{"id": str(i), "kind": "test", "source": "", "text": text} for i, text in enumerate(texts)]
    (folder / "train.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def words(corpus: Path) -> Path:
    tokenizer.train(corpus, corpus / "tokenizer.json", vocabulary=VOCABULARY)
    return corpus / "tokenizer.json"


@pytest.fixture(scope="module", params=KINDS)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return small(request.param)


@pytest.fixture(scope="module")
def f16(config: ModelConfig, words: Path) -> Path:
    return export.to_gguf(config, random_state(config), words, words.with_name(f"{config.kind}-F16.gguf"), **CARD)


@pytest.fixture(scope="module")
def vocabulary(words: Path) -> Iterator[llama_cpp.Llama]:
    """llama.cpp with the tokenizer only."""
    config = small("qwen3moe")
    path = export.to_gguf(config, random_state(config), words, words.with_name("vocabulary.gguf"), **CARD)
    with contextlib.closing(llama_cpp.Llama(str(path), vocab_only=True, verbose=False)) as llm:
        yield llm


# Tokenizer ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ODD.values(), ids=ODD.keys())
def test_llama_cpp_tokenises_alike(text: str, words: Path, vocabulary: llama_cpp.Llama) -> None:
    (document,) = tokenizer.encode_documents(tokenizer.load(words), [text])
    assert vocabulary.tokenize(text.encode(), add_bos=False) == document.tolist()[:-1]


def test_llama_cpp_tokenises_mixtures_alike(words: Path, vocabulary: llama_cpp.Llama) -> None:
    pieces = [
        *"'sStTmdZzé漢1½٣!.\"-\n\r\t\x00",
        " ",
        "  ",
        "ll",
        "RE",
        "ve",
        "the",
        "👩",
        "\u200d",
        "\u00a0",
        "\u0301",
        "“",
    ]
    draw = random.Random(0)
    texts = ["".join(draw.choices(pieces, k=draw.randrange(1, 40))) for _ in range(2000)]
    ours = [d.tolist()[:-1] for d in tokenizer.encode_documents(tokenizer.load(words), texts)]
    differs = [
        t for t, tokens in zip(texts, ours, strict=True) if vocabulary.tokenize(t.encode(), add_bos=False) != tokens
    ]
    assert differs == []


def test_a_document_comes_back_and_has_the_end_token_behind_it(words: Path) -> None:
    loaded = tokenizer.load(words)
    documents = tokenizer.encode_documents(loaded, ODD.values())
    for text, document in zip(ODD.values(), documents, strict=True):
        assert document.dtype == np.uint16
        assert np.flatnonzero(document == tokenizer.END_ID).tolist() == [len(document) - 1]
        assert loaded.decode(document[:-1].tolist(), skip_special_tokens=False) == text


def test_a_prompt_begins_a_document(vocabulary: llama_cpp.Llama) -> None:
    end = tokenizer.END_ID
    assert vocabulary.tokenize(b"the")[0] == end
    assert vocabulary.tokenize(b"the<|endoftext|>", special=True)[-1] == end
    assert (vocabulary.token_bos(), vocabulary.token_eos()) == (end, end)


def test_equal_documents_give_an_equal_tokenizer(corpus: Path, words: Path, tmp_path: Path) -> None:
    tokenizer.train(corpus, tmp_path / "again.json", vocabulary=VOCABULARY)
    assert (tmp_path / "again.json").read_bytes() == words.read_bytes()


def test_too_little_text_for_a_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "aa aa"}\n')
    with pytest.raises(ValueError, match="text for a vocabulary of 25. tokens only, and 8192 are wanted"):
        tokenizer.train(tmp_path, tmp_path / "tokenizer.json")
    assert [p.name for p in tmp_path.iterdir()] == ["train.jsonl"]


def test_what_is_no_tokenizer_says_so(tmp_path: Path, config: ModelConfig) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is no tokenizer"):
        tokenizer.load(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="is no tokenizer of a demo model"):
        export.to_gguf(config, random_state(config), tmp_path / "tokenizer.json", tmp_path / "m.gguf", **CARD)


# Files ----------------------------------------------------------------------------------------------------------------

OF_A_LAYER = {
    "smallthinker": (
        {"input_layernorm", "post_attention_layernorm", "block_sparse_moe.primary_router"},
        "block_sparse_moe.experts.{}.{}.weight",
        ("gate", "up", "down"),
    ),
    "qwen3moe": (
        {"input_layernorm", "post_attention_layernorm", "mlp.gate", "self_attn.q_norm", "self_attn.k_norm"},
        "mlp.experts.{}.{}.weight",
        ("gate_proj", "up_proj", "down_proj"),
    ),
}


def test_hugging_face_folder_has_the_published_names(config: ModelConfig, words: Path, tmp_path: Path) -> None:
    state = random_state(config)
    folder = export.to_hugging_face(config, state, words, tmp_path / "hf")
    found = safetensors.load_file(folder / "model.safetensors")

    singles, expert, matrices = OF_A_LAYER[config.kind]
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    for i in range(config.n_layers):
        prefix = f"model.layers.{i}."
        names |= {f"{prefix}{name}.weight" for name in singles}
        names |= {f"{prefix}self_attn.{name}_proj.weight" for name in "qkvo"}
        names |= {prefix + expert.format(e, m) for e in range(config.n_experts) for m in matrices}
    assert found.keys() == names
    assert {array.dtype for array in found.values()} == {np.dtype(np.float16)}
    down = found["model.layers.1." + expert.format(5, matrices[2])]
    assert np.array_equal(down, state["layers.1.down"][5].astype(np.float16))

    described = json.loads((folder / "config.json").read_text())
    assert described["tie_word_embeddings"] is True and described["norm_topk_prob"] is True
    if config.kind == "smallthinker":
        assert described["architectures"] == ["SmallThinkerForCausalLM"]
        assert described["moe_primary_router_apply_softmax"] is False
        assert (described["moe_num_primary_experts"], described["moe_num_active_primary_experts"]) == (8, 2)
        assert (described["rope_layout"], described["sliding_window_layout"]) == ([1, 1], [0, 0])
    else:
        assert described["architectures"] == ["Qwen3MoeForCausalLM"]
        assert (described["num_experts"], described["num_experts_per_tok"]) == (8, 2)
    assert {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"} <= {
        p.name for p in folder.iterdir()
    }


def test_gguf_says_what_the_model_is(config: ModelConfig, f16: Path) -> None:
    fields = {name: field.contents() for name, field in gguf.GGUFReader(f16).fields.items()}
    expected = {
        "general.architecture": config.kind,
        "general.name": "Demo",
        "general.description": "A model for tests.",
        "general.license": "MIT",
        "general.file_type": gguf.LlamaFileType.MOSTLY_F16,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    expected |= {
        f"{config.kind}.{key}": value
        for key, value in {
            "context_length": 128,
            "block_count": 2,
            "embedding_length": 256,
            "expert_count": 8,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
            "expert_gating_func": {"smallthinker": 2, "qwen3moe": 1}[config.kind],
            "rope.freq_base": 10000.0,
            "attention.head_count_kv": 2,
        }.items()
    }
    assert {key: fields.get(key) for key in expected} == expected
    assert len(fields["tokenizer.ggml.tokens"]) == VOCABULARY
    assert "smallthinker.attention.sliding_window" not in fields
    assert not [key for key in fields if "author" in key]


def test_gguf_has_norms_and_routers_in_f32_and_no_output_matrix(config: ModelConfig, f16: Path) -> None:
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(f16).tensors}
    f32 = {name for name, type in types.items() if type == "F32"}
    assert f32 == {name for name in types if "norm" in name or "ffn_gate_inp" in name}
    assert set(types.values()) == {"F16", "F32"}
    assert "output.weight" not in types


def test_q4_0_is_as_small_as_it_can_be(f16: Path, tmp_path: Path) -> None:
    path = export.quantize(f16, tmp_path / "q.gguf")
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert {types[f"blk.1.ffn_{m}_exps.weight"] for m in ("gate", "up", "down")} == {"Q4_0"}
    assert types["blk.0.attn_q.weight"] == "Q4_0"
    assert types["token_embd.weight"] == "Q6_K"
    assert types["blk.0.ffn_gate_inp.weight"] == "F32"
    assert path.stat().st_size < 0.4 * f16.stat().st_size

    larger = export.quantize(f16, tmp_path / "q8.gguf", embeddings="Q8_0")
    assert larger.stat().st_size - path.stat().st_size == VOCABULARY * 256 * 34 // 32 - VOCABULARY * 210


# Logits ---------------------------------------------------------------------------------------------------------------


def test_logits_are_those_of_the_formulas(config: ModelConfig, words: Path, tmp_path: Path) -> None:
    state = random_state(config)
    path = export.to_gguf(config, state, words, tmp_path / "f32.gguf", **CARD, type="F32")
    values = export.f16_values(config, state)
    windows = np.random.default_rng(1).integers(0, VOCABULARY, (2, 100))
    found = agreement.compare(
        path, lambda tokens: agreement.reference_logits(config, values, tokens), windows, context=128, threads=1
    )
    assert found.positions == 200
    assert found.max_difference < 1e-4
    assert found.top1_agreement == 1


def test_f16_is_close_to_the_formulas(config: ModelConfig, f16: Path) -> None:
    values = export.f16_values(config, random_state(config))
    windows = np.random.default_rng(1).integers(0, VOCABULARY, (2, 100))
    found = agreement.compare(
        f16, lambda tokens: agreement.reference_logits(config, values, tokens), windows, context=128, threads=1
    )
    assert found.max_difference_99 < 1e-2
    assert found.top1_agreement >= 0.99


def test_pytorch_computes_the_formulas_too(config: ModelConfig) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch, of the extra train")
    from demo_model.model import DemoModel

    model = DemoModel(config)
    state = random_state(config)
    model.load_export({name: torch.from_numpy(array) for name, array in state.items()})
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, 100)
    logits = model.logits(torch.from_numpy(tokens)[None])[0].numpy()
    assert np.abs(logits - agreement.reference_logits(config, state, tokens)).max() < 1e-4
    assert export.tensors(config) and model.export().keys() == state.keys()


def test_positions_from_other_experts_on_are_told_apart(f16: Path) -> None:
    windows = [list(range(10)), list(range(20, 50))]
    with contextlib.closing(
        moestream.Llama(str(f16), expert_streaming=True, n_ctx=128, n_threads=1, n_threads_batch=1, verbose=False)
    ) as llm:
        chosen = moestream.record_routing(llm, windows).experts
    chosen[12, 1, 0] = next(expert for expert in range(8) if expert not in chosen[12, 1])
    experts = {10: chosen[:10, :, ::-1], 30: chosen[10:]}
    alike = agreement.same_experts(f16, lambda tokens: experts[len(tokens)], windows, context=128, threads=1)
    assert [np.flatnonzero(~a).tolist() for a in alike] == [[], list(range(2, 30))], "later tokens look back at it"

    ours = np.zeros((30, VOCABULARY), dtype=np.float32)
    found = agreement.compare(f16, lambda tokens: ours[: len(tokens)], windows, alike=alike, context=128, threads=1)
    assert (found.positions, found.alike) == (40, 12)
    assert 0 < found.max_difference_alike <= found.max_difference


def streamed_differs(f16: Path, q4_0: Path) -> list[str]:
    differs = []
    for path, kernels in ((f16, "plain"), (q4_0, "plain"), (q4_0, "interleaved")):
        expected = stock(path, interleaved=kernels == "interleaved")
        if not np.array_equal(expected, streamed(path, ExpertStreaming(kernels=kernels))[0]):
            differs.append(f"{path.name}, {kernels}")
    return differs


def test_streamed_logits_equal_stock_bit_for_bit(f16: Path, tmp_path: Path) -> None:
    assert isolated(streamed_differs, f16, export.quantize(f16, tmp_path / "q.gguf")) == []


def test_perplexity_is_the_same_streamed(f16: Path) -> None:
    window = np.random.default_rng(2).integers(0, VOCABULARY, 90)
    options = {"n_ctx": 128, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "flash_attn": False}
    f16_cache = {"type_k": llama_cpp.GGML_TYPE_F16, "type_v": llama_cpp.GGML_TYPE_F16}
    with contextlib.closing(
        moestream.Llama(str(f16), expert_streaming=True, logits_all=True, **options, **f16_cache)
    ) as llm:
        streamed = agreement.perplexity(llm, [window])
    assert streamed == agreement.perplexity(f16, [window], context=128, cache="F16", threads=1)


def test_perplexity_of_a_model_that_knows_nothing_is_the_vocabulary(
    config: ModelConfig, words: Path, tmp_path: Path
) -> None:
    state = random_state(config) | {"norm.weight": np.zeros(config.d_model, dtype=np.float32)}
    path = export.to_gguf(config, state, words, tmp_path / "m.gguf", **CARD)
    assert agreement.perplexity(path, [range(100)], context=128, threads=1) == pytest.approx(VOCABULARY)


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_a_state_of_another_model_is_refused(words: Path, tmp_path: Path) -> None:
    config = small("smallthinker")
    other = random_state(small("qwen3moe"))
    with pytest.raises(
        ValueError, match="not one of a smallthinker model of 2 layers: layers.0.k_norm.weight is not of it"
    ):
        export.to_gguf(config, other, words, tmp_path / "m.gguf", **CARD)
    state = random_state(config)
    with pytest.raises(ValueError, match="layers.1.down is missing"):
        export.f16_values(config, {name: array for name, array in state.items() if name != "layers.1.down"})
    with pytest.raises(ValueError, match=r"norm.weight has the shape \(3,\), not \(256,\)"):
        export.f16_values(config, state | {"norm.weight": np.ones(3, dtype=np.float32)})
    with pytest.raises(ValueError, match="norm.weight has values that are no numbers or too large for F16"):
        export.f16_values(config, state | {"norm.weight": np.full(256, 1e5, dtype=np.float32)})
    with pytest.raises(ValueError, match="unknown kind of model 'mixtral'; known: smallthinker, qwen3moe"):
        export.tensors(small("mixtral"))
    with pytest.raises(ValueError, match="tokenizer.json has 1024 tokens, and the model 2048"):
        wider = dataclasses.replace(config, vocab_size=2048)
        export.to_gguf(wider, random_state(wider), words, tmp_path / "m.gguf", **CARD)
    assert list(tmp_path.iterdir()) == []


def test_a_type_that_does_not_exist_is_refused(words: Path, f16: Path, config: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no GGUF in 'Q4_0' is written here; known: F16, F32"):
        export.to_gguf(config, random_state(config), words, tmp_path / "m.gguf", **CARD, type="Q4_0")
    with pytest.raises(ValueError, match="no type to quantise to"):
        export.quantize(f16, tmp_path / "q.gguf", type="Q4_9")
    with pytest.raises(ValueError, match="no type to quantise to"):
        export.quantize(f16, tmp_path / "q.gguf", embeddings="Q4_9")
    with pytest.raises(ValueError, match="no type 'Q4_9' for keys and values"):
        agreement.perplexity(f16, [[1, 2]], cache="Q4_9")


def test_windows_that_cannot_be_compared_are_refused(f16: Path) -> None:
    with pytest.raises(ValueError, match="a window of 200 tokens, and the context has 128"):
        agreement.compare(f16, lambda tokens: np.zeros((len(tokens), VOCABULARY)), [range(200)], context=128, threads=1)
    with pytest.raises(ValueError, match="no windows to compare"):
        agreement.compare(f16, lambda tokens: np.zeros((len(tokens), VOCABULARY)), [], context=128, threads=1)
    with pytest.raises(ValueError, match="no window has a token to predict"):
        agreement.perplexity(f16, [[1]], context=128, threads=1)
    with contextlib.closing(llama_cpp.Llama(str(f16), n_ctx=128, n_threads=1, n_threads_batch=1, verbose=False)) as llm:
        with pytest.raises(ValueError, match="opened without logits_all=True"):
            agreement.perplexity(llm, [[1, 2]])


@contextlib.contextmanager
def full_disk(size_bytes: int) -> Iterator[None]:
    """No file can grow above a size: what a full disk does, but only to this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing_behind(
    config: ModelConfig, corpus: Path, words: Path, f16: Path, tmp_path: Path
) -> None:
    state = random_state(config)
    with full_disk(20_000):
        with pytest.raises(OSError) as of_gguf:
            export.to_gguf(config, state, words, tmp_path / "m.gguf", **CARD)
        with pytest.raises(OSError) as of_hf:
            export.to_hugging_face(config, state, words, tmp_path / "hf")
        with pytest.raises(OSError, match="could not be quantised to .*q.gguf"):
            export.quantize(f16, tmp_path / "q.gguf")
        with pytest.raises(OSError) as of_tokenizer:
            tokenizer.train(corpus, tmp_path / "tokenizer.json", vocabulary=VOCABULARY)
    assert [e.value.errno for e in (of_gguf, of_hf, of_tokenizer)] == [errno.EFBIG] * 3
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_file_survives_a_failed_export(config: ModelConfig, words: Path, f16: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("earlier")
    with full_disk(20_000), pytest.raises(OSError):
        export.to_gguf(config, random_state(config), words, tmp_path / "m.gguf", **CARD)
    with full_disk(20_000), pytest.raises(OSError):
        export.quantize(f16, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_text() == "earlier"
    with pytest.raises(FileExistsError):
        export.to_hugging_face(config, random_state(config), words, tmp_path)


def test_a_folder_that_does_not_exist_says_so(config: ModelConfig, words: Path, f16: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError, match="missing"):
        export.to_gguf(config, random_state(config), words, missing / "m.gguf", **CARD)
    with pytest.raises(FileNotFoundError, match="missing"):
        export.to_hugging_face(config, random_state(config), words, missing / "hf")
    with pytest.raises(OSError, match="missing/q.gguf"):
        export.quantize(f16, missing / "q.gguf")
    with pytest.raises(OSError, match="missing.gguf could not be quantised"):
        export.quantize(tmp_path / "missing.gguf", tmp_path / "q.gguf")
