"""The student of phases 2 and 3: transformers models on their prerouted path, with a quantised base and a LoRA."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

torch = pytest.importorskip("torch", reason="needs PyTorch, of the extra train")
transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers, of the extra train")

from command import moestream_command  # noqa: E402
from factory import make  # noqa: E402
from moestream import MoestreamError, OptionError, TrainingError  # noqa: E402
from moestream.cli.train._texts import tokenised  # noqa: E402
from moestream.sidecar import BaseModel, Sidecar  # noqa: E402
from moestream.train._gguf import GgufWeights  # noqa: E402
from moestream.train._run import Interrupted  # noqa: E402
from moestream.train.distill import train_distill  # noqa: E402
from moestream.train.head_arrays import HeadArrays, packed, unpacked  # noqa: E402
from moestream.train.plans import LoraPlan  # noqa: E402
from moestream.train.recovery import draw_prompts  # noqa: E402
from moestream.train.sft import next_token_loss, rows_of, soft_loss, train_sft  # noqa: E402
from moestream.train.student import (  # noqa: E402  # noqa: E402
    Model,
    add_lora,
    find_moe,
    load_lora,
    load_model,
    lora_of,
    measure,
    tensor_names,
    without_lora,
    write_text,
)

TOKENS = torch.tensor([[(7 * i * i + (3 + k) * i) % 250 + 3 for i in range(18)] for k in range(3)])
PLAN = LoraPlan(
    steps=4,
    batch=3,
    prompt_tokens=4,
    new_tokens=8,
    texts=16,
    rank=4,
    alpha=8.0,
    top_k=5,
    learning_rate=0.02,
    warm_up=1,
    validate_every=2,
)
TEXTS = [[(5 * i * i + 3 * i) % 250 + 3 for i in range(100)], [9] * 3]


def random_head(owner: int, d: int, n_experts: int, *, width: int = 12, scale: float = 0.5) -> HeadArrays:
    draw = np.random.default_rng(owner)
    columns = d + 2 * n_experts
    return HeadArrays(
        owner,
        *(
            draw.normal(scale=scale, size=shape).astype(np.float32)
            for shape in ((n_experts, columns), (width, columns), (n_experts, width))
        ),
    )


SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3Moe": (
        "num_experts",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "moe_intermediate_size": 16,
            "intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "Qwen2Moe": (
        "num_experts",
        {
            "num_key_value_heads": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "Mixtral": (
        "num_local_experts",
        {"num_key_value_heads": 2, "intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "Olmoe": (
        "num_experts",
        {"num_key_value_heads": 2, "intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2},
    ),
    "DeepseekV3": (
        "n_routed_experts",
        {
            **{
                "num_key_value_heads": 4,
                "intermediate_size": 32,
                "moe_intermediate_size": 16,
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
            },
            **{
                "n_group": 4,
                "topk_group": 2,
                "first_k_dense_replace": 1,
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
            },
        },
    ),
    "GptOss": (
        "num_local_experts",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "intermediate_size": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
}


def random_model(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **CLASSES[name][1])
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model


def prerouted(name: str) -> Model:
    hf = random_model(name)
    layers = sorted(find_moe(hf))
    return Model(
        hf, {owner: random_head(owner, 48, 8) for owner in layers if owner + 1 in layers and owner != layers[1]}
    )


# The path


@pytest.mark.parametrize("name", list(CLASSES))
def test_all_positions_at_once_are_what_decoding_token_by_token_is(name: str) -> None:
    model = prerouted(name)
    prompt, n = 6, TOKENS.shape[1]
    with torch.no_grad():
        logits = model.text(TOKENS, torch.full((3,), prompt))
        executed = {layer: chosen.clone() for layer, chosen in model.routing.executed.items()}
        plain = model.text(TOKENS, torch.full((3,), n))
    last, cache = model.prompt(TOKENS[:, :prompt])
    decoded = [last]
    for t in range(prompt, n):
        decoded.append(model.step(TOKENS[:, t], cache))
        for layer, chosen in model.routing.executed.items():
            assert torch.equal(chosen[:, 0].sort(-1)[0], executed[layer][:, t].sort(-1)[0]), (layer, t)
    assert (torch.stack(decoded, 1) - logits[:, prompt - 1 :]).abs().max() < 1e-3
    # Up to the first step the gate routes; after it the heads say something else.
    assert torch.allclose(logits[:, : prompt + 1], plain[:, : prompt + 1], atol=1e-4)
    assert (logits[:, prompt + 1 :] - plain[:, prompt + 1 :]).abs().max() > 0.1


def test_experts_follow_the_head_two_shifts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer N + 1 at t takes the top-k of what N's head makes of N's input and experts at t - 1 and of N's experts at t - 2."""
    model = prerouted("Qwen3Moe")
    seen: dict[int, torch.Tensor] = {}
    for layer, block in model.blocks.items():
        block.experts.register_forward_pre_hook(
            lambda module, args, layer=layer: seen.update({layer: args[0].detach().clone()})
        )
    first = torch.tensor([3, 0, 7])
    with torch.no_grad():
        model.text(TOKENS, first)
    executed = {layer: chosen.numpy() for layer, chosen in model.routing.executed.items()}
    for owner in model.heads:
        arrays = random_head(owner, 48, 8)
        h = seen[owner].reshape(*TOKENS.shape, -1).numpy()
        for text in range(3):
            s = int(first[text])
            for t in range(s + 1, TOKENS.shape[1]):
                z = arrays.forward(
                    h[text, t - 1 : t],
                    executed[owner][text, t - 1 : t],
                    executed[owner][text, [t - 2]],
                    np.array([t - 2 < s]),
                )
                assert set(np.argsort(-z[0])[:2]) == set(executed[owner + 1][text, t].tolist()), (owner, text, t)


def test_a_prompt_forgets_what_was_predicted() -> None:
    model = prerouted("Qwen3Moe")

    def run() -> torch.Tensor:
        logits, cache = model.prompt(TOKENS[:, :5])
        return torch.stack([logits, *(model.step(TOKENS[:, t], cache) for t in range(5, 9))])

    once = run()
    _, cache = model.prompt(TOKENS[:, 9:12])
    model.step(TOKENS[:, 12], cache)
    assert torch.equal(run(), once)


def test_without_heads_the_model_is_as_it_is() -> None:
    hf = random_model("Qwen3Moe")
    with torch.no_grad():
        expected = hf.eval()(input_ids=TOKENS).logits
        assert torch.equal(Model(hf).text(TOKENS, torch.zeros(3, dtype=torch.long)), expected)


def test_fewer_experts_are_taken_everywhere() -> None:
    model = Model(random_model("Qwen3Moe"), {0: random_head(0, 48, 8)}, experts_used=1)
    with torch.no_grad():
        model.text(TOKENS, torch.full((3,), 4))
    assert {chosen.shape[-1] for chosen in model.routing.executed.values()} == {1}
    with pytest.raises(OptionError, match="experts_used=9: layer 0 has 8 experts"):
        Model(random_model("Qwen3Moe"), experts_used=9)


# What is not supported


class Odd(torch.nn.Module):
    """A router that does more with states than to multiply them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 48))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(states / states.norm(dim=-1, keepdim=True), self.weight)


def with_router(router: torch.nn.Module) -> torch.nn.Module:
    hf = random_model("Qwen3Moe")
    hf.model.layers[2].mlp.gate = router
    return hf


def with_separate_experts() -> torch.nn.Module:
    hf = random_model("Qwen3Moe")
    hf.model.layers[1].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(48, 48)])
    return hf


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        (
            lambda: with_router(Odd()),
            "Qwen3MoeSparseMoeBlock at model.layers.2.mlp: its router Odd makes something else of its product than of its weights; this class is not supported",
        ),
        (
            lambda: with_router(torch.nn.Identity()),
            "Qwen3MoeSparseMoeBlock at model.layers.2.mlp: its router Identity has no matrix `weight`; this class is not supported",
        ),
        (
            with_separate_experts,
            "Qwen3MoeSparseMoeBlock at model.layers.1.mlp: its experts are separate modules, which transformers before 5 has; install transformers>=5",
        ),
        (
            lambda: torch.nn.Linear(2, 2),
            "Linear: no block with `experts` and a `gate` or `router` was found; this class is not supported",
        ),
    ],
)
def test_classes_that_are_not_understood_are_refused_by_name(hf: Any, message: str) -> None:
    with pytest.raises(TrainingError, match=f"^{re.escape(message)}$"):
        find_moe(hf())


def test_heads_of_another_model_are_refused() -> None:
    with pytest.raises(
        TrainingError,
        match="the head of layer 3 needs experts in layer 4, which Qwen3MoeForCausalLM has not there; take heads of this model",
    ):
        Model(random_model("Qwen3Moe"), {3: random_head(3, 48, 8)})
    with pytest.raises(
        TrainingError,
        match=r"the head of layer 1 is for 16 experts and 48 columns, and the router of layer 1 of Qwen3MoeForCausalLM is \(8, 48\)",
    ):
        Model(random_model("Qwen3Moe"), {1: random_head(1, 48, 16)})


# The weights of a GGUF


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[Path, Path]:
    """A GGUF, and a Hugging Face folder of weights near it, as if the GGUF were quantised. Its layers have a say in its logits."""
    gguf = Path(shutil.copy(make(folder, "qwen3moe", "F16", layers=3), folder / "both.gguf"))
    for tensor in GGUFReader(gguf, "r+").tensors:
        if re.search("attn_v|attn_output|ffn_down_exps", tensor.name):
            tensor.data[:] *= 4
    weights = GgufWeights(gguf)
    config = transformers.Qwen3MoeConfig(
        **{
            "vocab_size": 320,
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
        **{
            "moe_intermediate_size": 96,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
        rms_norm_eps=1e-6,
    )
    hf, draw = transformers.Qwen3MoeForCausalLM(config), torch.Generator().manual_seed(0)
    named = tensor_names(weights)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            value = torch.from_numpy(
                np.concatenate([weights[one] for one in named(name)], axis=1 if len(named(name)) > 1 else 0)
            )
            parameter.copy_(value + 0.08 * value.std(correction=0) * torch.randn(value.shape, generator=draw))
    hf.save_pretrained(folder / "hf")
    return gguf, folder / "hf"


@pytest.fixture(scope="module")
def sidecar(folder: Path, both: tuple[Path, Path]) -> Path:
    out = folder / "heads.sidecar.gguf"
    heads = packed([random_head(owner, 128, 8, scale=0.1) for owner in (0, 1)], top_k=2)
    Sidecar(
        BaseModel.open(both[0]).base, heads=heads, provenance={"heads": {"seed": 3}}, quality={"heads": {"tokens": 1}}
    ).write(out)
    return out


def test_a_student_computes_with_the_weights_of_its_gguf(both: tuple[Path, Path]) -> None:
    gguf, folder = both
    teacher, student, weights = load_model(folder), load_model(folder, weights=gguf), GgufWeights(gguf)
    parameters = dict(student.hf.named_parameters())
    assert np.array_equal(parameters["model.layers.1.self_attn.q_proj.weight"].numpy(), weights["blk.1.attn_q.weight"])
    assert np.array_equal(
        parameters["model.layers.2.mlp.experts.gate_up_proj"].numpy()[:, :96], weights["blk.2.ffn_gate_exps.weight"]
    )
    assert np.array_equal(
        parameters["model.layers.2.mlp.experts.gate_up_proj"].numpy()[:, 96:], weights["blk.2.ffn_up_exps.weight"]
    )
    assert not any(parameter.requires_grad for parameter in parameters.values())
    first = torch.zeros(3, dtype=torch.long)
    with torch.no_grad():
        assert 0.01 < (teacher.text(TOKENS, first) - student.text(TOKENS, first)).abs().max()


def test_weights_that_are_not_those_of_the_model_are_refused_by_name(
    both: tuple[Path, Path], folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        TrainingError, match=r"\.gguf: .* is not what the weight .* is quantised; give a GGUF of this very model"
    ):
        load_model(both[1], weights=make(folder, "qwen3moe", layers=3, seed=4))
    with pytest.raises(
        TrainingError,
        match=r"token_embd.weight: is \(288, 128\), and the weight model.embed_tokens.weight \(320, 128\)",
    ):
        load_model(both[1], weights=make(folder, "qwen3moe", layers=3, vocab=288))
    with pytest.raises(
        TrainingError, match=r"has no tensor for the weight model.layers.2.\S+; give a GGUF of this very model"
    ):
        load_model(both[1], weights=make(folder, "qwen3moe", layers=2))
    with pytest.raises(TrainingError, match="has no config.json; give a folder of Hugging Face weights"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no such model"}')
    with pytest.raises(TrainingError, match="transformers cannot load it: "):
        load_model(tmp_path)


# The LoRA


def test_a_lora_is_on_attention_alone_and_changes_nothing_at_first(both: tuple[Path, Path]) -> None:
    student = load_model(both[1], weights=both[0])
    first = torch.zeros(3, dtype=torch.long)
    before = student.text(TOKENS, first)
    names = add_lora(student, rank=4, alpha=8.0)
    assert names == sorted(
        f"blk.{layer}.attn_{part}.weight" for layer in range(3) for part in ("q", "k", "v", "output")
    )
    assert torch.equal(student.text(TOKENS, first), before)
    trained = [name for name, parameter in student.hf.named_parameters() if parameter.requires_grad]
    assert len(trained) == 24 and all(".self_attn." in name for name in trained)
    lora, base = student.loras["blk.1.attn_q.weight"], student.loras["blk.1.attn_q.weight"].base.weight
    lora.b.data.normal_()
    x = torch.randn(5, 128)
    assert torch.allclose(lora(x), x @ (base + 8.0 / 4 * lora.b @ lora.a).T, atol=1e-4)
    with without_lora(student):
        assert torch.equal(student.text(TOKENS, first), before)
    assert (student.text(TOKENS, first) - before).abs().max() > 0.1

    again = load_model(both[1], weights=both[0])
    load_lora(again, lora_of(student))
    assert (
        torch.allclose(again.loras["blk.1.attn_q.weight"].b, lora.b, atol=2e-3)
        and again.loras["blk.0.attn_k.weight"].alpha == 8.0
    )
    few = dataclasses.replace(
        lora_of(student), pairs={"blk.1.attn_q.weight": lora_of(student).pairs["blk.1.attn_q.weight"]}
    )
    with pytest.raises(
        TrainingError,
        match="the sidecar's LoRA and the model's attention differ in blk.0.attn_k.weight: it cannot be trained on",
    ):
        load_lora(load_model(both[1], weights=both[0]), few)
    with pytest.raises(
        TrainingError, match="no projection of attention has a tensor blk.N.attn_.*; load the model with its GGUF"
    ):
        add_lora(load_model(both[1]))
    with pytest.raises(OptionError, match="rank=0, alpha=32.0: give a rank of at least 1 and an alpha above 0"):
        add_lora(load_model(both[1]), rank=0)


def test_the_loss_is_over_what_was_written_and_texts_come_in_a_new_order_each_time() -> None:
    logits = torch.zeros(2, 9, 7)
    tokens = torch.arange(20).reshape(2, 10) % 7
    for text in range(2):
        for at in range(3, 9):  # of the tokens behind a prompt of 4: said at 3 to 8
            logits[text, at, tokens[text, at + 1]] = 50.0
    assert float(next_token_loss(logits, tokens, 4)) < 1e-9 < float(next_token_loss(logits, tokens, 3))
    epochs = [torch.cat([rows_of(3 * epoch + i, 9, 3, 1) for i in range(3)]).tolist() for epoch in range(2)]
    assert all(sorted(epoch) == list(range(9)) for epoch in epochs) and epochs[0] != epochs[1]


def test_soft_targets_are_the_mean_over_what_the_teacher_could_have_said() -> None:
    draw = torch.Generator().manual_seed(1)
    student, teacher = (2 * torch.randn(1, 5, 3, generator=draw) for _ in range(2))
    shares = teacher.softmax(-1)[0]
    mean = 0.0
    for v in itertools.product(range(3), repeat=2):  # behind a prompt of 4: said at 3 and 4
        tokens = torch.tensor([[0, 0, 0, 0, *v]])
        mean += float(shares[3, v[0]] * shares[4, v[1]] * next_token_loss(student, tokens, 4))
    assert float(soft_loss(student, teacher, 4)) == pytest.approx(mean, rel=1e-5)


def test_losses_of_soft_targets_scatter_less(both: tuple[Path, Path], sidecar: Path, tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, steps=12, validate_every=6, learning_rate=1e-6)
    found = []
    for soft in (False, True):
        one = dataclasses.replace(plan, soft_targets=soft)
        found.append(train_sft(both[1], both[0], sidecar, TEXTS, tmp_path / "out.gguf", plan=one).history)
    assert found[0].validation[0] == found[1].validation[0]  # which is of the tokens that the teacher drew, either way
    assert np.std(found[1].train) < 0.5 * np.std(found[0].train)


def test_prompts_are_within_texts(both: tuple[Path, Path]) -> None:
    texts = [list(range(10)), list(range(100, 106)), [7]]
    prompts = draw_prompts(texts, 300, 5, 1)
    assert {tuple(row) for row in prompts.tolist()} == {tuple(range(a, a + 5)) for a in (*range(6), 100, 101)}
    assert np.array_equal(prompts, draw_prompts(texts, 300, 5, 1))
    with pytest.raises(
        TrainingError, match="no text has the 11 tokens of a prompt: give longer texts, or shorter prompts"
    ):
        draw_prompts(texts, 3, 11, 1)


def test_text_is_drawn_by_its_seed_and_the_likeliest_without_temperature() -> None:
    model = prerouted("Qwen3Moe")
    prompts = TOKENS[:, :4]
    one, same, other = (write_text(model, prompts, 6, temperature=1.0, top_p=0.9, seed=[seed]) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other) and torch.equal(one[:, :4], prompts)
    greedy = write_text(model, prompts, 6, temperature=0, top_p=1.0, seed=[1])
    with torch.no_grad():
        likeliest = model.text(greedy, torch.full((3,), 4)).argmax(-1)
    assert torch.equal(likeliest[:, 3:-1], greedy[:, 4:])
    assert torch.equal(write_text(model, prompts, 6, temperature=1.0, top_p=1e-9, seed=[5]), greedy)


def test_a_student_is_measured_against_its_teacher(both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from moestream.train import student as module

    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", 2 * 18 * 320)  # two windows, then one
    teacher = load_model(both[1])
    windows = TOKENS.numpy()
    same = measure(teacher, teacher, windows)
    assert same.kl == 0 and same.perplexity == same.teacher_perplexity and same.tokens == 51
    student = load_model(both[1], weights=both[0], heads={0: random_head(0, 128, 8)})
    by_gate, by_heads = (measure(teacher, student, windows, gate=gate) for gate in (True, False))
    assert 0 < by_gate.kl < by_heads.kl and by_gate.teacher_perplexity == pytest.approx(same.perplexity, rel=1e-6)
    with torch.no_grad():
        log_p = teacher.text(TOKENS, torch.zeros(3, dtype=torch.long)).log_softmax(-1)
    nats = -log_p[:, :-1].gather(2, TOKENS[:, 1:, None]).mean()
    assert same.perplexity == pytest.approx(float(nats.exp()), rel=1e-5)


# The phases

PHASES = pytest.mark.parametrize(("phase", "train"), [("sft", train_sft), ("distill", train_distill)])


@PHASES
def test_a_phase_trains_a_lora_and_keeps_the_heads(
    phase: str, train: Any, both: tuple[Path, Path], sidecar: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.gguf"
    plan = dataclasses.replace(PLAN, steps=30, validate_every=10, temperature=0.0, learning_rate=3e-3)
    result = train(both[1], both[0], sidecar, TEXTS, out, plan=plan, validation=[TEXTS[0][:40]])
    losses = [loss for _, loss in result.history.validation]
    assert [step for step, _ in result.history.validation][:2] == [0, 10] and min(losses) < losses[0]
    found = Sidecar.read(out)
    assert found.lora is not None and found.lora.rank == 4 and found.lora.alpha == 8.0 and len(found.lora.pairs) == 12
    before = dict(Sidecar.read(sidecar).matrices())
    assert all(np.array_equal(matrix.data, before[name].data) for name, matrix in found.matrices() if name in before)
    assert any(pair.b.values().any() for pair in found.lora.pairs.values())
    assert found.provenance["heads"] == {"seed": 3} and found.provenance[phase]["steps"] == 30
    assert found.quality[phase]["after"]["kl"] == result.after.kl and result.without == result.before
    assert json.loads(Path(f"{out}.{phase}.json").read_text())["history"]["train"] == result.history.train
    assert Path(f"{out}.{phase}.png").read_bytes().startswith(b"\x89PNG")


@PHASES
def test_heads_are_trained_too_where_that_is_asked_for(
    phase: str, train: Any, both: tuple[Path, Path], sidecar: Path, tmp_path: Path
) -> None:
    plan = dataclasses.replace(PLAN, steps=20, validate_every=5, train_heads=True, temperature=0.0, learning_rate=3e-3)
    given, window = Sidecar.read(sidecar), [TEXTS[0][:12]]
    result = train(both[1], both[0], sidecar, TEXTS, tmp_path / "whole.gguf", plan=plan, validation=window)
    found = Sidecar.read(tmp_path / "whole.gguf")
    assert found.heads.owners == given.heads.owners and found.heads.top_k == given.heads.top_k
    before = dict(given.matrices())
    for name, matrix in found.matrices():
        if name in before:
            assert matrix.type == before[name].type
            changed = np.abs(matrix.values() - before[name].values()).max()
            assert 1e-4 < changed < 0.1, name
    assert found.provenance[phase]["train_heads"] is True

    # What is told of it is of the heads as they are stored.
    student = load_model(both[1], weights=both[0], heads=unpacked(found.heads))
    load_lora(student, found.lora)
    again = measure(load_model(both[1]), student, np.array(window))
    assert again.kl == pytest.approx(result.after.kl, rel=1e-3) and again.kl != result.before.kl

    seen: list[tuple[str, int]] = []
    for stop in (("training", 7), None):
        with contextlib.suppress(Interrupted):
            train(
                both[1], both[0], sidecar, TEXTS, tmp_path / "parts.gguf", plan=plan,
                progress=lambda what, done, total: seen.append((what, done)), should_stop=lambda: seen[-1] == stop,  # noqa: B023
            )  # fmt: skip
    parts = dict(Sidecar.read(tmp_path / "parts.gguf").matrices())
    assert all(np.array_equal(matrix.data, parts[name].data) for name, matrix in found.matrices())


@PHASES
def test_an_interrupted_phase_goes_on_to_the_same_weights(
    phase: str, train: Any, both: tuple[Path, Path], sidecar: Path, tmp_path: Path
) -> None:
    train(both[1], both[0], sidecar, TEXTS, tmp_path / "whole.gguf", plan=PLAN)
    seen: list[tuple[str, int]] = []

    def run(stop: tuple[str, int] | None) -> None:
        train(
            both[1], both[0], sidecar, TEXTS, tmp_path / "parts.gguf", plan=PLAN,
            progress=lambda what, done, total: seen.append((what, done)), should_stop=lambda: seen[-1] == stop,
        )  # fmt: skip

    with pytest.raises(
        Interrupted, match="stopped after 3 of 4 steps; the same command goes on from .*parts.gguf.checkpoint"
    ):
        run(("training", 3))
    seen.clear()
    run(None)
    assert [done for what, done in seen if what == "training"] == [3, 4]
    whole, parts = (dict(Sidecar.read(tmp_path / name).matrices()) for name in ("whole.gguf", "parts.gguf"))
    assert all(np.array_equal(matrix.data, parts[name].data) for name, matrix in whole.items())


def test_the_teachers_texts_are_kept_and_written_on(
    both: tuple[Path, Path], sidecar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moestream.train import recovery

    monkeypatch.setattr(recovery, "_TEXTS_AT_ONCE", 4)
    out, seen = tmp_path / "out.gguf", []
    options: dict[str, Any] = {"plan": PLAN, "progress": lambda what, done, total: seen.append((what, done, total))}
    with pytest.raises(
        Interrupted,
        match="stopped after 8 of 14 texts of the teacher; the same command goes on from .*out.gguf.texts.npz",
    ):
        train_sft(both[1], both[0], sidecar, TEXTS, out, **options, should_stop=lambda: seen[-1] == ("teacher", 8, 14))
    seen.clear()
    train_sft(both[1], both[0], sidecar, TEXTS, out, **options)
    assert [one for one in seen if one[0] == "teacher"] == [
        ("teacher", 2, 2),
        ("teacher", 8, 14),
        ("teacher", 12, 14),
        ("teacher", 14, 14),
    ]
    with pytest.raises(
        TrainingError,
        match="out.gguf.held-out.npz: its texts were written with another prompts, seed; give the same as then, or remove it",
    ):
        train_sft(both[1], both[0], sidecar, TEXTS, out, plan=dataclasses.replace(PLAN, seed=2))
    (tmp_path / "out.gguf.held-out.npz").write_bytes(b"PK nothing")
    with pytest.raises(
        TrainingError,
        match="out.gguf.held-out.npz: no texts of a teacher, or damaged ones .*; remove it to have them written anew",
    ):
        train_sft(both[1], both[0], sidecar, TEXTS, out, plan=PLAN)


def test_phase_3_goes_on_with_the_lora_of_phase_2(both: tuple[Path, Path], sidecar: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "sft.gguf", tmp_path / "distill.gguf"
    plan = dataclasses.replace(PLAN, steps=10, validate_every=5, temperature=0.0, learning_rate=3e-3)
    train_sft(both[1], both[0], sidecar, TEXTS, one, plan=plan)
    result = train_distill(
        both[1],
        both[0],
        one,
        TEXTS,
        two,
        plan=dataclasses.replace(PLAN, learning_rate=1e-6),
        validation=[TEXTS[0][:40]],
    )
    assert result.before != result.without
    pairs = [Sidecar.read(file).lora.pairs["blk.0.attn_q.weight"].b.values() for file in (one, two)]
    assert np.abs(pairs[0]).max() > 1e-3 and np.abs(pairs[0] - pairs[1]).max() < 1e-4
    assert {*Sidecar.read(two).provenance} == {"heads", "sft", "distill"}


def test_a_sidecar_without_heads_or_for_another_model_is_refused(
    both: tuple[Path, Path], sidecar: Path, folder: Path, tmp_path: Path
) -> None:
    student = load_model(both[1], weights=both[0])
    add_lora(student, rank=4)
    Sidecar(BaseModel.open(both[0]).base, lora=lora_of(student)).write(tmp_path / "lora.gguf")
    with pytest.raises(
        TrainingError,
        match="lora.gguf: has no heads, so there is no path to train on; begin with `moestream train heads`",
    ):
        train_sft(both[1], both[0], tmp_path / "lora.gguf", TEXTS, tmp_path / "out.gguf", plan=PLAN)
    with pytest.raises(MoestreamError, match="heads.sidecar.gguf: is for .*"):
        train_sft(both[1], make(folder, "qwen3moe", layers=3, seed=4), sidecar, TEXTS, tmp_path / "out.gguf", plan=PLAN)


def test_texts_of_another_tokenizer_are_refused(both: tuple[Path, Path], sidecar: Path, tmp_path: Path) -> None:
    for texts, validation, wrong in (([[1, 2, 320]], None, 320), ([[-1, 2]], None, -1), (TEXTS, [[7, 999]], 999)):
        with pytest.raises(TrainingError, match=f"token {wrong} does not exist: the model in .*hf has 320"):
            train_sft(both[1], both[0], sidecar, texts, tmp_path / "out.gguf", plan=PLAN, validation=validation)


def test_a_phase_is_not_written_over_what_it_reads(both: tuple[Path, Path], sidecar: Path) -> None:
    for out in (sidecar, both[0]):
        before = out.read_bytes()
        with pytest.raises(
            OptionError, match=f"^{re.escape(str(out))}: is read from, as .*; give the output another name"
        ):
            train_sft(both[1], both[0], sidecar, TEXTS, out, plan=PLAN)
        assert out.read_bytes() == before


def test_damaged_weights_and_tokenizers_are_told_by_their_folder(both: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(both[1], tmp_path / "hf"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(TrainingError, match="hf: transformers cannot load it: "):
        load_model(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "none"}}')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(
        TrainingError, match="hf: transformers cannot load its tokenizer: .*; give token ids in .npy files"
    ):
        tokenised([b"words"], folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch=0: give a number of at least 1"),
        *[
            (
                change,
                "temperature and warm_up must be at least 0, top_p above 0 and at most 1, alpha, learning_rate and clip above 0",
            )
            for change in ({"temperature": math.nan}, {"learning_rate": math.inf}, {"alpha": math.inf})
        ],
        *[({"seed": seed}, f"seed={seed}: give a number from 0 to 4294967295") for seed in (-1, 2**64)],
        ({"texts": 1}, "texts=1: at least one to train on and one for validation are needed"),
        (
            {"top_p": 0.0},
            "temperature and warm_up must be at least 0, top_p above 0 and at most 1, alpha, learning_rate and clip above 0",
        ),
    ],
)
def test_plans_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        LoraPlan(**change)


def test_the_command_runs_both_phases_and_tells_what_came_of_them(
    both: tuple[Path, Path], sidecar: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "text.npy", np.array(TEXTS[0]))
    sizes = ["--steps", 2, "--batch", 2, "--prompt-tokens", 4, "--new-tokens", 6, "--texts", 4, "--rank", 2, "-t", 1]
    given = sidecar
    for phase in ("sft", "distill"):
        out = tmp_path / f"{phase}.gguf"
        command = [
            "train",
            phase,
            "-m",
            both[0],
            "--hf",
            both[1],
            "--sidecar",
            given,
            "-f",
            tmp_path / "text.npy",
            "--validation",
            tmp_path / "text.npy",
            "-o",
            out,
        ]
        run = moestream_command(*command, *sizes)
        assert run.returncode == 0, run.stderr
        losses = r"after 0 steps: loss [\d.]+ on validation\nmoestream: after 2 steps: loss [\d.]+ on validation"
        assert re.fullmatch(rf"moestream: {losses}\n", run.stderr)
        assert (
            re.search(r"^by the heads +[\d.]+ +[\d.]+$", run.stdout, re.M)
            and f"{out}: heads and a LoRA; curves: {out}.{phase}.png" in run.stdout
        )
        given = out
    text = tmp_path / "text.txt"
    text.write_text("words")
    run = moestream_command(
        "train",
        "sft",
        "-m",
        both[0],
        "--hf",
        both[1],
        "--sidecar",
        given,
        "-f",
        text,
        "-o",
        tmp_path / "x.gguf",
        *sizes,
    )
    assert (
        run.returncode == 1
        and "hf: has no tokenizer (tokenizer.json or tokenizer.model); add it, or give token ids in .npy files"
        in run.stderr
    )
