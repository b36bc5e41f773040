"""Training: heads on captured data, the student on its prerouted path, and a LoRA for it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch, of the extra train")

from command import PYTHON, moestream_command  # noqa: E402
from factory import make  # noqa: E402
from moestream import ExpertStreaming, Llama, MoestreamError, OptionError, TrainingError  # noqa: E402
from moestream._capture import fingerprint  # noqa: E402
from moestream.sidecar import BaseModel, Sidecar  # noqa: E402
from moestream.train import Capture, HeadArrays, capture  # noqa: E402
from moestream.train._run import Interrupted, cosine, load_checkpoint, save_checkpoint  # noqa: E402
from moestream.train.accuracy import overlap  # noqa: E402
from moestream.train.curves import History, write_curves  # noqa: E402
from moestream.train.dataset import CaptureHeader, CaptureWriter  # noqa: E402
from moestream.train.distill import tail_aware_divergence  # noqa: E402
from moestream.train.head_model import Head, StackedHeads, features, head_loss  # noqa: E402
from moestream.train.heads import head_inputs, split, train_heads, worth_keeping  # noqa: E402
from moestream.train.plans import HeadPlan  # noqa: E402

QUICK = HeadPlan(width=16, steps=12, batch=16, validate_every=5, warm_up=2)


def random_head(
    owner: int = 0, d: int = 16, n_experts: int = 8, width: int = 12, seed: int = 0, scale: float = 0.5
) -> HeadArrays:
    draw = np.random.default_rng([seed, owner])
    columns = d + 2 * n_experts
    return HeadArrays(
        owner,
        *(
            draw.normal(scale=scale, size=shape).astype(np.float32)
            for shape in ((n_experts, columns), (width, columns), (n_experts, width))
        ),
    )


# Heads


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_a_head_in_pytorch_says_what_it_says_in_numpy(kind: str) -> None:
    heads = [random_head(owner, d=64, n_experts=32, width=32, scale=0.1).stored(kind) for owner in (0, 3)]
    draw = np.random.default_rng(1)
    h = draw.normal(size=(20, 64)).astype(np.float32)
    now, before = (np.stack([draw.permutation(32)[:4] for _ in range(20)]) for _ in range(2))
    first = np.arange(20) % 5 == 0
    x = features(*(torch.from_numpy(one) for one in (h, now, before, ~first)), 32)
    together = StackedHeads(heads)(torch.stack([x, x]))
    for head, stacked in zip(heads, together, strict=True):
        expected = head.forward(h, now, before, first)
        assert np.abs(Head.of(head)(x).detach().numpy() - expected).max() < 1e-3
        assert np.abs(stacked.detach().numpy() - expected).max() < 1e-3 and expected.std() > 0.3
    assert all(
        np.array_equal(a.linear, b.linear) and np.array_equal(a.fc1, b.fc1)
        for a, b in zip(StackedHeads(heads).arrays(), heads, strict=True)
    )
    assert np.array_equal(Head.of(heads[1]).arrays(3).fc2, heads[1].fc2)
    assert list(Head(4, 2, 3).state_dict()) == ["linear_init.weight", "fc1.weight", "fc2.weight"]


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_the_loss_of_heads_is_a_divergence(gating: str) -> None:
    draw = np.random.default_rng(0)
    gate, z = (torch.from_numpy(draw.normal(scale=2, size=(5, 6))) for _ in range(2))
    for i, found in enumerate(head_loss(z, gate, gating)):
        if gating == "softmax":
            p, q = (np.exp(one[i].numpy()) / np.exp(one[i].numpy()).sum() for one in (gate, z))
            expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        else:
            p, q = (1 / (1 + np.exp(-one[i].numpy())) for one in (gate, z))
            expected = sum(
                a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)) for a, b in zip(p, q, strict=True)
            )
        assert float(found) == pytest.approx(expected, rel=1e-9)
    assert float(head_loss(gate, gate, gating).abs().max()) < 1e-12


def test_overlap_and_the_choice_of_owners() -> None:
    assert overlap(np.array([[0, 1], [2, 3], [4, 5]]), np.array([[1, 0], [3, 7], [6, 7]])) == (0.5, 1 / 3)
    assert worth_keeping({3: 0.2, 4: 0.4, 5: 0.7, 6: 0.39}, 0.1, 0.5) == {4, 5}
    assert worth_keeping({3: 0.2, 4: 0.4, 5: 0.7}, 0.1, 0.0) == {3, 4, 5}
    assert worth_keeping({3: 0.2, 4: 0.1}, 0.2, 0.5) == set()


# A dataset whose answer is known


def made(
    folder: Path,
    lengths: Sequence[int],
    *,
    n_experts: int = 8,
    model_hash: str = "",
    owners: Sequence[int] = (0, 1),
    d: int = 4,
) -> Capture:
    """What layer N + 1 takes is told by layer N a token before: expert e there, and f a token earlier, make e + 1 and f + 2.

    At the first token of a text nothing is told, and the router says what would spoil every head that looks there.
    """
    draw = np.random.default_rng(0)
    n, starts = sum(lengths), np.cumsum([0, *lengths[:-1]])
    header = CaptureHeader(
        "made up", model_hash, "qwen3moe", list(owners), n_experts, 2, d, "softmax", n, 1, "here", "test"
    )
    first = np.zeros(n, bool)
    first[starts] = True
    chosen = {
        layer: np.stack([draw.permutation(n_experts)[:2] for _ in range(n)]).astype(np.uint8)
        for layer in {*owners, *header.consumers}
    }
    rows: dict[str, np.ndarray] = {f"hidden.{owner}": draw.normal(size=(n, d)).astype(np.float16) for owner in owners}
    for owner in sorted(owners):
        gate = np.zeros((n, n_experts), np.float16)
        for t in range(1, n):
            for e in chosen[owner][t - 1]:
                gate[t, (e + 1) % n_experts] += 4 + 0.5 * float(e)
            for f in chosen[owner][t - 2] if not first[t - 1] else ():
                gate[t, (f + 2) % n_experts] += 3.13 + 0.41 * float(f)
        gate[first] = 1000 * draw.integers(0, 2, size=(len(starts), n_experts))
        rows[f"gate.{owner + 1}"] = gate
        chosen[owner + 1] = np.argsort(-gate, axis=1)[:, :2].astype(np.uint8)
    rows |= {f"experts.{layer}": experts for layer, experts in chosen.items()}
    with CaptureWriter(folder, header, np.arange(n, dtype=np.int32), starts.astype(np.int64)) as writer:
        writer.append(rows)
    return Capture(folder)


def test_inputs_are_of_the_token_and_the_one_before_it_in_its_text(tmp_path: Path) -> None:
    data = made(tmp_path / "data", [3, 1, 4])
    t = data.pairs()
    assert t.tolist() == [0, 1, 4, 5, 6]
    x = head_inputs(data, 1, t, data.firsts())
    assert x.shape == (5, 4 + 16)
    for row, at in zip(x, t.tolist(), strict=True):
        assert np.array_equal(row[:4], data.hidden(1)[at].astype(np.float32))
        assert set(np.flatnonzero(row[4:12])) == set(data.experts(1)[at].tolist())
        assert set(np.flatnonzero(row[12:])) == (set() if at in (0, 4) else set(data.experts(1)[at - 1].tolist()))


def test_heads_find_what_there_is_to_find_which_one_token_off_is_nothing(tmp_path: Path, folder: Path) -> None:
    model = make(folder, layers=4)
    data = made(tmp_path / "data", [500, 2, 900, 600, 900, 700, 400, 30], d=128, model_hash=fingerprint([model]))
    plan = HeadPlan(width=8, steps=300, batch=256, learning_rate=0.02, validate_every=50, warm_up=10, validation=0.2)
    result = train_heads(data, model, tmp_path / "out.gguf", plan=plan, kind="F32")
    for owner in result.owners:
        assert owner.recall > 0.9 and owner.exact > 0.8 and owner.loss < 0.1, owner
        assert owner.untrained_recall < 0.5 and owner.repeat_recall < 0.5 and owner.chance == 0.25
    assert result.train_tokens + result.validation_tokens == len(data.pairs())


def test_validation_is_apart_from_training(tmp_path: Path) -> None:
    data = made(tmp_path / "several", [30, 20, 50, 25, 40])
    train, validation = split(data, 0.25, 1)
    assert sorted([*train, *validation]) == data.pairs().tolist() and not {*train} & {*validation}
    texts = [range(text.start, text.stop) for text in data.texts()]
    assert all(
        sum(any(t in text for t in part) for part in (train.tolist(), validation.tolist())) == 1 for text in texts
    )
    assert (
        0.25 * 165 <= sum(len(text) for text in texts if any(t in text for t in validation.tolist())) <= 0.25 * 165 + 50
    )
    assert not np.array_equal(split(data, 0.25, 2)[1], validation)

    train, validation = split(made(tmp_path / "one", [100]), 0.1, 1)
    assert train.tolist() == [*range(88)] and validation.tolist() == [*range(89, 99)]
    with pytest.raises(
        TrainingError,
        match="little: 2 tokens are too few to train on some and to validate on others; capture more text",
    ):
        split(made(tmp_path / "little", [2]), 0.1, 1)


def test_texts_of_one_token_are_of_no_use_and_do_no_harm(tmp_path: Path) -> None:
    one = made(tmp_path / "one", [1, 1, 40, 1])
    train, validation = split(one, 0.25, 1)
    assert train[0] == 2 and validation[-1] == 40 and len(validation) == 10
    two = made(tmp_path / "two", [1] * 20 + [10, 12])
    for seed in range(10):
        train, validation = split(two, 0.1, seed)
        assert sorted((len(train), len(validation))) == [9, 11]
    with pytest.raises(TrainingError, match="none: 3 tokens are too few to train on some and to validate on others"):
        split(made(tmp_path / "none", [1, 1, 1]), 0.1, 1)


@pytest.mark.parametrize(("parts", "named"), [(0, 2), (8, 10), (33, 4)])
def test_curves_are_not_hidden_by_their_names(
    parts: int, named: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import pyplot

    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    history = History([3.0, 2.0], [(1, 2.5), (2, 2.0)], {f"layer {n}": [2.6, 2.0 + n] for n in range(parts)})
    write_curves(history, tmp_path / "out", "heads", "Heads", {})
    monkeypatch.undo()
    (axes,) = figures[0].axes
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    pyplot.close(figures[0])
    assert len(axes.lines) == parts + 2 and len(texts) == named and texts[0] == "training"
    assert (
        texts[1:] == ["validation"]
        if not parts
        else texts[-2:] == [f"validation, layer {parts - 1}", "validation, mean"]
    )


# Training heads


@pytest.fixture(scope="module")
def data(folder: Path, model: Path) -> Path:
    out = folder / "data"
    texts = [[(7 * i * i + (3 + k) * i) % 250 + 3 for i in range(40)] for k in range(6)]
    options = ExpertStreaming(kernels="plain", reader="pread")
    with contextlib.closing(
        Llama(str(model), expert_streaming=options, n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False)
    ) as llm:
        capture(llm, texts, out)
    return out


def test_a_sidecar_holds_what_was_trained_how_and_how_well(data: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.sidecar.gguf"
    result = train_heads(data, model, out, plan=QUICK, owners=[2, 0], provenance={"licence": "none"})
    sidecar = Sidecar.read(out)
    assert sidecar.base == BaseModel.open(model).base
    assert sidecar.heads is not None and (sidecar.heads.owners, sidecar.heads.width, sidecar.heads.top_k) == (
        (0, 2),
        16,
        2,
    )
    assert sidecar.provenance["heads"]["plan"]["seed"] == 1 and sidecar.provenance["heads"]["licence"] == "none"
    assert [one["layer"] for one in sidecar.quality["heads"]["owners"]] == [0, 2]
    assert all(owner.kept and owner.lookahead_recall is not None for owner in result.owners)
    curves = json.loads((tmp_path / "m.sidecar.gguf.heads.json").read_text())
    assert len(curves["history"]["train"]) == 12 and [step for step, _ in curves["history"]["validation"]] == [
        5,
        10,
        12,
    ]
    assert sorted(curves["history"]["parts"]) == ["layer 0", "layer 2"]
    assert (tmp_path / "m.sidecar.gguf.heads.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "m.sidecar.gguf.checkpoint").exists()


def test_an_interrupted_training_goes_on_to_the_same_weights(data: Path, model: Path, tmp_path: Path) -> None:
    train_heads(data, model, tmp_path / "whole.gguf", plan=QUICK)
    steps: list[int] = []
    with pytest.raises(
        Interrupted, match=r"stopped after 7 of 12 steps; the same command goes on from .*parts.gguf.checkpoint"
    ):
        train_heads(
            data,
            model,
            tmp_path / "parts.gguf",
            plan=QUICK,
            progress=lambda done, total: steps.append(done),
            should_stop=lambda: steps[-1] == 7,
        )
    assert not (tmp_path / "parts.gguf").exists() and not (tmp_path / "parts.gguf.checkpoint.part").exists()
    train_heads(data, model, tmp_path / "parts.gguf", plan=QUICK, progress=lambda done, total: steps.append(done))
    assert steps == [*range(8), *range(7, 13)]
    whole, parts = (dict(Sidecar.read(tmp_path / name).matrices()) for name in ("whole.gguf", "parts.gguf"))
    assert whole.keys() == parts.keys() and all(np.array_equal(whole[name].data, parts[name].data) for name in whole)
    other = dataclasses.replace(QUICK, seed=2)
    train_heads(data, model, tmp_path / "other.gguf", plan=other)
    assert any(
        not np.array_equal(whole[name].data, matrix.data)
        for name, matrix in Sidecar.read(tmp_path / "other.gguf").matrices()
        if name in whole
    )


def test_heads_do_not_depend_on_which_others_are_trained(data: Path, model: Path, tmp_path: Path) -> None:
    train_heads(data, model, tmp_path / "all.gguf", plan=QUICK, kind="F32", keep=0.0)
    train_heads(data, model, tmp_path / "one.gguf", plan=QUICK, kind="F32", owners=[1])
    everything, one = (dict(Sidecar.read(tmp_path / name).matrices()) for name in ("all.gguf", "one.gguf"))
    assert all(np.abs(matrix.values() - everything[name].values()).max() < 1e-5 for name, matrix in one.items())


def test_where_no_head_finds_more_than_chance_none_is_written(
    data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moestream.train.heads.overlap", lambda predicted, executed: (0.1, 0.0))
    out = tmp_path / "out.gguf"
    with pytest.raises(
        TrainingError, match=r"no head finds more than chance, 2 of 8; capture more text, or name .*\(--owners\)"
    ):
        train_heads(data, model, out, plan=QUICK)
    assert not out.exists() and Path(f"{out}.checkpoint").exists()
    assert train_heads(data, model, out, plan=QUICK, owners=[0, 1, 2]).steps == 12, "the same training, gone on with"


def test_heads_are_not_written_over_the_model(data: Path, model: Path) -> None:
    before = model.read_bytes()
    with pytest.raises(OptionError, match=r"gguf: is read from, as .*; give the output another name"):
        train_heads(data, model, model, plan=QUICK)
    assert model.read_bytes() == before


@pytest.mark.parametrize("keep", [-0.1, 1.1, math.nan])
def test_a_share_to_keep_is_one(keep: float, data: Path, model: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=f"^keep={keep}: give a share of what the best head finds, from 0 to 1$"):
        train_heads(data, model, tmp_path / "out.gguf", plan=QUICK, keep=keep)


def test_training_ends_when_nothing_gets_better(data: Path, model: Path, tmp_path: Path) -> None:
    plan = dataclasses.replace(QUICK, steps=400, learning_rate=0.05, patience=2)
    result = train_heads(data, model, tmp_path / "out.gguf", plan=plan)
    losses = {name: min(part) for name, part in result.history.parts.items()}
    assert result.steps < 400 and result.history.validation[-1][1] > sum(losses.values()) / len(losses)
    for owner in result.owners:  # of each head the weights that did best, here in 8 bits and on all validation tokens
        assert owner.loss == pytest.approx(losses[f"layer {owner.layer}"], rel=0.02)


def test_ctrl_c_leaves_a_checkpoint_that_the_command_goes_on_from(data: Path, model: Path, tmp_path: Path) -> None:
    command = [
        "train",
        "heads",
        "-m",
        model,
        "-d",
        data,
        "-o",
        tmp_path / "out.gguf",
        "--batch",
        16,
        "--validate-every",
        3,
        "-t",
        1,
    ]
    process = subprocess.Popen(
        [*PYTHON, *map(str, [*command, "--steps", 100_000, "--patience", 100_000])], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    told = ""
    for line in process.stderr:
        told += line
        if "after 6 steps: loss" in line:
            process.send_signal(signal.SIGINT)
            break
    told += process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 130
    assert re.search(
        r"moestream: stopped after \d+ of 100000 steps; the same command goes on from .*out.gguf.checkpoint\n", told
    ), told
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.gguf.checkpoint"]

    other = moestream_command(*command, "--steps", 10)
    assert other.returncode == 1
    assert re.search(
        r"out.gguf.checkpoint: the checkpoint is of another training: patience is 100000, now 5, steps is 100000, now 10; give what it was begun with, or remove it to begin anew",
        other.stderr,
    )


def test_the_command_trains_and_tells_what_heads_find(data: Path, model: Path, tmp_path: Path) -> None:
    run = moestream_command(
        "train",
        "heads",
        "-m",
        model,
        "-d",
        data,
        "-o",
        tmp_path / "out.gguf",
        "--steps",
        6,
        "--batch",
        16,
        "--validate-every",
        3,
        "--owners",
        "0-1",
        "-t",
        1,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].split() == [
        "layer",
        "loss",
        "recall",
        "exact",
        "lookahead",
        "exact",
        "repeat",
        "exact",
        "untrained",
        "exact",
    ]
    assert [line.split()[0] for line in lines[1:3]] == ["0", "1"] and re.search(
        r"out.gguf: heads of layers 0, 1; curves: ", run.stdout
    )
    assert run.stderr.splitlines()[0].startswith("moestream: after 3 steps: loss ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"owners": [7]}, r"data: has no data for a head of layer 7; it has them for \[0, 1, 2\]"),
        ({"owners": []}, "owners is empty: name at least one layer, or leave it out for all"),
        ({"kind": "Q5_0"}, "type 'Q5_0': heads are stored as one of F32, F16, Q8_0, Q4_0"),
        (
            {"plan": dataclasses.replace(QUICK, learning_rate=1e30)},
            r"the loss is no number after \d+ steps; train with a lower learning rate than 1e\+30",
        ),
    ],
)
def test_heads_that_cannot_be_trained_are_refused(
    change: dict[str, Any], message: str, data: Path, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(MoestreamError, match=message):
        train_heads(data, model, tmp_path / "out.gguf", **{"plan": QUICK, **change})
    assert not (tmp_path / "out.gguf").exists()


def test_data_of_another_model_is_refused(data: Path, folder: Path, tmp_path: Path) -> None:
    other = make(folder, seed=5)
    with pytest.raises(
        TrainingError, match=r"data: was captured from .*, not from .*gguf; name that model, or capture this one"
    ):
        train_heads(data, other, tmp_path / "out.gguf", plan=QUICK)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps=0: give a number of at least 1"),
        ({"width": 0}, "width=0: give a number of at least 1"),
        ({"validation": 1.0}, "validation=1.0: give a share between 0 and 1"),
        ({"learning_rate": math.nan}, "warm_up and weight_decay must be at least 0, learning_rate more"),
        ({"weight_decay": math.inf}, "warm_up and weight_decay must be at least 0, learning_rate more"),
        ({"seed": -1}, "seed=-1: give a number from 0 to 4294967295"),
        ({"learning_rate": 0.0}, "warm_up and weight_decay must be at least 0, learning_rate more"),
    ],
)
def test_plans_of_heads_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        HeadPlan(**change)


def test_the_learning_rate_rises_and_falls_along_a_cosine() -> None:
    rates = [cosine(step, 110, 10, floor=0.0) for step in range(110)]
    assert (
        rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
        and rates[10] == 1
        and rates[60] == pytest.approx(0.5)
    )
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False)) and rates[-1] < 0.001


# Checkpoints


def test_a_checkpoint_is_believed_only_if_it_is_whole_and_ours(tmp_path: Path) -> None:
    file = tmp_path / "a.checkpoint"
    assert load_checkpoint(file, {"seed": 1}) is None
    save_checkpoint(file, {"seed": 1}, {"weights": torch.arange(5), "done": 3})
    state = load_checkpoint(file, {"seed": 1})
    assert state is not None and state["done"] == 3 and state["weights"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(
        TrainingError,
        match="the checkpoint is of another training: seed is 1, now 2; give what it was begun with, or remove it",
    ):
        load_checkpoint(file, {"seed": 2})
    content = file.read_bytes()
    file.write_bytes(content[:-20] + b"x" + content[-19:])
    with pytest.raises(
        TrainingError, match=r"the checkpoint is damaged \(\d+ bytes, its checksum differs\); remove it to begin anew"
    ):
        load_checkpoint(file, {"seed": 1})
    file.write_bytes(b"something else")
    with pytest.raises(
        TrainingError, match="not a checkpoint of training; name another file, or remove it to begin anew"
    ):
        load_checkpoint(file, {"seed": 1})
    with pytest.raises(TrainingError, match="cannot be written: No such file or directory"):
        save_checkpoint(tmp_path / "none" / "a", {}, {})


# The divergence of phase 3


@pytest.mark.parametrize("top_k", [1, 3, 7, 20])
def test_the_tail_aware_divergence_is_its_sum(top_k: int) -> None:
    draw = np.random.default_rng(top_k)
    student, teacher = (draw.normal(scale=2, size=(4, 7)) for _ in range(2))
    found = tail_aware_divergence(torch.from_numpy(student), torch.from_numpy(teacher), top_k).numpy()
    for i in range(4):
        q, p = (np.exp(one[i]) / np.exp(one[i]).sum() for one in (student, teacher))
        chosen = np.argsort(-p)[:top_k]
        expected = sum(q[v] * math.log(q[v] / p[v]) for v in chosen)
        if top_k < 7:
            q_rest, p_rest = 1 - q[chosen].sum(), 1 - p[chosen].sum()
            expected += q_rest * math.log(q_rest / p_rest)
        assert found[i] == pytest.approx(expected, rel=1e-9)
        full = float((q * np.log(q / p)).sum())
        assert 0 <= found[i] <= full + 1e-12 and (top_k < 7 or found[i] == pytest.approx(full, rel=1e-9))


def test_the_divergence_sees_mass_that_leaves_the_teachers_tokens_and_has_gradients_where_nothing_is_left() -> None:
    teacher = torch.tensor([[9.0, 8.0, 0.0, 0.0, 0.0]])
    moved = torch.tensor([[9.0, 8.0, 0.0, 0.0, 12.0]])
    assert float(tail_aware_divergence(moved, teacher, 2)) > 3
    sure = torch.tensor([[200.0, 199.0, -200.0, -200.0, -200.0]], requires_grad=True)
    loss = tail_aware_divergence(sure, teacher * 20, 2).sum()
    loss.backward()
    assert torch.isfinite(loss) and sure.grad is not None and torch.isfinite(sure.grad).all()
