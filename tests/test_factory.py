"""The synthetic models are what other tests take them for: stock llama.cpp runs them, and routing follows the token.

llama.cpp aborts where it dislikes a model, so each model runs in a process of its own: this file, run with a path.
"""

from __future__ import annotations

import functools
import json
import pathlib
import subprocess
import sys

import pytest

import factory

PROMPT = [5, 6, 7, 13, 40, 41, 42, 43]
NEXT = 21


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("arch", factory.ARCHITECTURES)
def test_stock_llama_cpp_runs_it(folder, arch):
    ran = run(factory.make(folder, arch))
    assert ran["finite"]
    assert ran["distinct_logits"] == len(PROMPT) + 1


@pytest.mark.parametrize("arch", factory.ARCHITECTURES)
def test_tokens_choose_different_experts(folder, arch):
    ran = run(factory.make(folder, arch))
    assert ran["experts"], "no layer chose experts"
    topk = factory.Shape().topk
    assert all(len(chosen) > topk for chosen in ran["experts"].values()), ran["experts"]


PROPERTIES = {
    "300 experts": dict(experts=300),
    "tied embeddings": dict(tied=True),
    "sigmoid gating": dict(arch="smallthinker", gating="sigmoid"),
    "softmax gating": dict(arch="smallthinker", gating="softmax"),
    "expert groups": dict(arch="deepseek2", gating="sigmoid", groups=4),
    "two dense layers, three shared experts": dict(arch="deepseek2", leading_dense=2, shared=3),
    "mixed types": dict(expert_types={"down": "Q6_K", "gate": "Q5_K", (1, "down"): "Q8_0"}),
    "no tokenizer": dict(tokenizer="none"),
    **{kind: dict(type=kind) for kind in ("F32", "F16", "Q8_0", "Q4_1", "Q4_K", "Q6_K", "IQ4_NL", "IQ2_XXS", "MXFP4")},
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_stock_llama_cpp_runs_a_model_with(folder, name):
    ran = run(factory.make(folder, **PROPERTIES[name]))
    assert ran["finite"]


@pytest.mark.parametrize("arch", factory.MERGED_GATE_UP)
def test_stock_llama_cpp_runs_merged_gate_and_up(folder, arch):
    model = factory.make(folder, arch, merged_gate_up=True)
    names = {t.name for t in factory.gguf.GGUFReader(model).tensors}
    assert any("ffn_gate_up_exps" in name for name in names)
    assert not any("ffn_gate_exps" in name for name in names)
    assert run(model)["finite"]


@pytest.mark.parametrize("arch", factory.EXPERT_SCALES)
def test_scales_of_experts_change_the_logits(folder, arch):
    assert run(factory.make(folder, arch, expert_scales=True))["logits"] != run(factory.make(folder, arch))["logits"]


LAYOUTS = {
    "three shards": dict(split=3),
    "shuffled tensors": dict(order="shuffled"),
    "alignment 64": dict(alignment=64),
    "alignment 4096": dict(alignment=4096, order="reversed"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_does_not_change_the_logits(folder, name):
    assert run(factory.make(folder, **LAYOUTS[name]))["logits"] == run(factory.make(folder))["logits"]


def test_a_layer_is_in_several_shards(folder):
    first = factory.make(folder, split=3)
    shards = sorted(first.parent.glob(first.name.replace("-00001-of-", "-0000[123]-of-")))
    layers = [{t.name for t in factory.gguf.GGUFReader(s).tensors if t.name.startswith("blk.1.")} for s in shards]
    assert len(layers) == 3 and all(layers)


def test_expert_slices_are_no_multiple_of_a_sector(folder):
    experts = [t for t in factory.gguf.GGUFReader(factory.make(folder)).tensors if "_exps" in t.name]
    assert all(t.n_bytes // int(t.shape[2]) % 512 for t in experts)


@pytest.mark.parametrize(
    "damage",
    [dict(truncate=1), dict(truncate="expert"), dict(truncate=1, split=3), dict(big_endian=True)],
    ids=str,
)
def test_stock_llama_cpp_refuses(folder, damage):
    with pytest.raises(subprocess.CalledProcessError):
        run(factory.make(folder, **damage))


def test_truncation_cuts_one_expert_off(folder):
    whole, cut = factory.make(folder, truncate=0), factory.make(folder, truncate="expert")
    last = factory.gguf.GGUFReader(whole).tensors[-1]
    assert "_exps" in last.name
    assert whole.stat().st_size - cut.stat().st_size == last.n_bytes // int(last.shape[2])


@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "deepseek2"])
@pytest.mark.parametrize("target", [r"attn_output\.weight", r"_exps\.weight"])
def test_lora_changes_the_logits(folder, arch, target):
    model = factory.make(folder, arch)
    assert run(model, factory.lora(model, [target]))["logits"] != run(model)["logits"]


def test_lora_of_no_tensor_is_refused(folder):
    with pytest.raises(ValueError, match="no matrix of .* matches nonsense"):
        factory.lora(factory.make(folder), ["nonsense"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (dict(arch="mamba"), "unknown architecture 'mamba'; known: afmoe"),
        (dict(arch="rnd1"), "no synthetic models of architecture rnd1: it is a diffusion model"),
        (
            dict(arch="qwen3moe", merged_gate_up=True),
            "qwen3moe knows no merged gate_up tensor; those that do: cohere2moe",
        ),
        (dict(arch="dbrx", expert_scales=True), "dbrx knows no scale per expert"),
        (dict(topk=9), "topk is 9 of 8 experts"),
        (dict(big_endian=True, type="Q4_0"), "only F32, F16 and BF16 can be big-endian"),
        (dict(order="by name"), "unknown order 'by name'"),
        (dict(vocab=100), "at least 259 tokens, not 100"),
    ],
)
def test_what_cannot_be_made_is_named(folder, arguments, says):
    with pytest.raises(ValueError, match=says):
        factory.make(folder, **arguments)


def test_an_abort_of_llama_cpp_is_an_error_that_tells_its_reason(folder):
    with pytest.raises(factory.LlamaCppError, match="GGML_ASSERT"):
        factory.make(folder, layers=100000)


def test_an_equal_request_is_answered_with_the_same_file(folder):
    first = factory.make(folder, seed=3)
    made = first.stat().st_mtime_ns
    assert factory.make(folder, seed=3) == first
    assert first.stat().st_mtime_ns == made


def test_text_goes_through_the_bytes_tokenizer_unchanged(folder):
    text = "Grüße,  world\n"
    assert run(factory.make(folder), text=text)["text"] == text


# The process that runs a model ----------------------------------------------------------------------------------------


@functools.cache
def run(model: pathlib.Path, lora: pathlib.Path | None = None, text: str = "") -> dict:
    """What stock llama.cpp makes of a model: see `_run`."""
    question = json.dumps({"model": str(model), "lora": str(lora) if lora else None, "text": text})
    done = subprocess.run([sys.executable, __file__, question], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


def _run(model: str, lora: str | None, text: str) -> dict:
    import hashlib

    import llama_cpp
    import numpy as np

    experts: dict[str, set[int]] = {}
    watch = _watch_experts(experts)
    llm = llama_cpp.Llama(model_path=model, n_ctx=128, lora_path=lora, logits_all=True, n_threads=1, verbose=False)
    llm.eval(PROMPT)
    llm.eval([NEXT])
    logits = np.array(llm.scores[: len(PROMPT) + 1])
    tokens = llm.tokenize(text.encode(), add_bos=False) if text else []
    del watch
    return {
        "finite": bool(np.isfinite(logits).all()),
        "distinct_logits": len(np.unique(logits, axis=0)),
        "logits": hashlib.sha256(logits.tobytes()).hexdigest(),
        "experts": {layer: sorted(ids) for layer, ids in experts.items()},
        "text": llm.detokenize(tokens).decode(),
    }


def _watch_experts(experts: dict[str, set[int]]) -> object:
    """Has the next context collect, per layer, the experts that tokens choose, for as long as the result lives."""
    import ctypes

    import llama_cpp

    class Tensor(ctypes.Structure):
        """The first members of the public `struct ggml_tensor`."""

        _fields_ = [
            ("type", ctypes.c_int),
            ("buffer", ctypes.c_void_p),
            ("ne", ctypes.c_int64 * 4),
            ("nb", ctypes.c_size_t * 4),
        ]

    ggml = factory.ggml_base()
    ggml.ggml_get_data.restype = ctypes.c_void_p
    ggml.ggml_get_data.argtypes = [ctypes.c_void_p]

    @llama_cpp.ggml_backend_sched_eval_callback
    def watch(tensor, ask, _):
        name = ggml.ggml_get_name(tensor).decode()
        if name.startswith("ffn_moe_topk") and not ask:
            shape = ctypes.cast(tensor, ctypes.POINTER(Tensor)).contents
            for token in range(shape.ne[1]):
                row = ggml.ggml_get_data(tensor) + token * shape.nb[1]
                experts.setdefault(name, set()).update((ctypes.c_int32 * shape.ne[0]).from_address(row))
        return name.startswith("ffn_moe_topk") or not ask

    defaults = llama_cpp.llama_cpp.llama_context_default_params

    def watched_defaults():
        params = defaults()
        params.cb_eval = watch
        return params

    llama_cpp.llama_cpp.llama_context_default_params = watched_defaults
    return watch


if __name__ == "__main__":
    print(json.dumps(_run(**json.loads(sys.argv[1]))))
