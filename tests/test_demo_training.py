"""Training of the demo models: what is computed, that it goes on where it was, and what it says when it cannot."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
gguf = pytest.importorskip("gguf")

from demo_model import baselines, checkpoint, grouped, head, training  # noqa: E402
from demo_model.config import KINDS, ModelConfig  # noqa: E402
from demo_model.model import DemoModel, q4_0  # noqa: E402
from demo_model.optimiser import orthogonal  # noqa: E402
from demo_model.stream import Batches, windows  # noqa: E402

TINY = dict(
    vocab_size=96,
    n_layers=2,
    d_model=32,
    n_heads=2,
    n_kv_heads=1,
    head_dim=16,
    n_experts=6,
    top_k=2,
    d_expert=32,
    context=16,
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plan(kind: str = "smallthinker", **changes) -> training.Plan:
    return training.Plan(
        ModelConfig(kind, **TINY), **{"steps": 12, "batch": 2, "threads": 1, "validate_every": 4, **changes}
    )


def tokens(count: int = 2000) -> np.ndarray:
    """A stream with something to learn: each token mostly follows from the one before."""
    random = np.random.default_rng(0)
    noise = random.integers(1, 96, count)
    out = np.empty(count, np.uint16)
    out[0] = 1
    for i in range(1, count):
        out[i] = noise[i] if noise[i] % 4 == 0 else (out[i - 1] * 7 + 3) % 95 + 1
    return out


# Parts


@pytest.mark.parametrize("counts", [[5, 0, 70, 1, 200, 3], [0, 0, 0, 0, 0, 64], [64, 65, 63, 129, 1025, 1]])
def test_grouped_products_are_those_of_each_expert_alone(counts: list[int]) -> None:
    random = torch.Generator().manual_seed(0)
    pairs = torch.repeat_interleave(torch.arange(6), torch.tensor(counts))
    if len(pairs) % 2:
        pairs = pairs[:-1]
    experts = pairs[torch.randperm(len(pairs), generator=random)].view(-1, 2)
    x = torch.randn(len(experts), 8, generator=random, requires_grad=True)
    first = torch.randn(6, 4, 8, generator=random, requires_grad=True)
    second = torch.randn(6, 8, 4, generator=random, requires_grad=True)
    weights = torch.rand(len(experts), 2, generator=random, requires_grad=True)
    seed = torch.randn(len(experts), 8, generator=random)

    groups = grouped.group_by_expert(experts, 6)
    rows = grouped.grouped_linear(grouped.dispatch(x, groups), first, groups) * groups.weights(weights)[:, None]
    ours = grouped.collect(grouped.grouped_linear(rows, second, groups), groups)
    one_by_one = torch.einsum("toi,ti->to", second[experts[:, 0]] @ first[experts[:, 0]], x) * weights[:, :1]
    one_by_one = (
        one_by_one + torch.einsum("toi,ti->to", second[experts[:, 1]] @ first[experts[:, 1]], x) * weights[:, 1:]
    )

    torch.testing.assert_close(ours, one_by_one, rtol=1e-4, atol=1e-4)
    inputs = (x, first, second, weights)
    for mine, theirs in zip(
        torch.autograd.grad(ours, inputs, seed), torch.autograd.grad(one_by_one, inputs, seed), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    assert groups.counts.tolist() == torch.bincount(experts.flatten(), minlength=6).tolist()


def test_groups_are_padded_to_few_sizes_and_little() -> None:
    counts = torch.arange(0, 9000)
    padded = grouped._padded(counts)
    assert (padded >= counts).all() and padded[0] == 0
    assert len(set(padded.tolist())) < 40
    assert ((padded - counts)[600:].float() / counts[600:]).max() <= 0.25


def test_the_loss_and_its_gradients_are_those_of_cross_entropy() -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(700, 16, generator=random, requires_grad=True)
    matrix = torch.randn(50, 16, generator=random, requires_grad=True)
    targets = torch.randint(0, 50, (700,), generator=random)
    ours = head.next_token_loss(hidden, matrix, targets, torch.float32)
    theirs = torch.nn.functional.cross_entropy(hidden @ matrix.T, targets)
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(
        torch.autograd.grad(3 * ours, (hidden, matrix)), torch.autograd.grad(3 * theirs, (hidden, matrix)), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_weights_are_rounded_as_ggml_rounds_them() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * 0.03
    weight[0, :32] = 0
    packed = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_0)
    theirs = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_0)
    np.testing.assert_array_equal(q4_0(weight).numpy(), theirs)


def test_rounded_weights_pass_gradients_to_the_weights() -> None:
    model = DemoModel(ModelConfig("smallthinker", **TINY))
    batch = torch.from_numpy(windows(tokens(100), 16))
    plain = model.loss(batch[:, :-1], batch[:, 1:], torch.float32)[0]
    model.set_quantised(True)
    rounded = model.loss(batch[:, :-1], batch[:, 1:], torch.float32)[0]
    rounded.backward()
    assert rounded != plain
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("shape", [(3, 24, 40), (40, 24), (32, 32)])
def test_muon_steps_are_nearly_orthogonal(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrix).float())
    assert 0.4 < values.min() and values.max() < 1.5


def test_batches_cover_every_epoch_once_and_differ_between_epochs() -> None:
    stream = np.arange(16 * 9 + 1, dtype=np.uint16)
    batches = Batches(stream, 16, 4, seed=3)
    assert batches.windows_per_epoch == 8
    first = [int(row[0]) for step in (0, 1) for row in batches.at(step)]
    second = [int(row[0]) for step in (2, 3) for row in batches.at(step)]
    assert len({start // 16 for start in first}) == 8 and first != second
    again = Batches(stream, 16, 4, seed=3)
    np.testing.assert_array_equal(again.at(3), batches.at(3))
    assert not np.array_equal(Batches(stream, 16, 4, seed=4).at(0), again.at(0))
    with pytest.raises(ValueError, match="too few"):
        Batches(stream[:40], 16, 4, seed=3)


def test_baselines_are_those_of_counting() -> None:
    train = np.array([1, 2, 1, 2, 1, 3], np.uint16)
    validation = np.array([1, 2, 3, 1], np.uint16)
    unigram = (np.array([0, 3, 2, 1]) + 1) / 10
    # After 1 came 2, 2, 3: three times, two successors. After 2 came 1 twice. After 3 came nothing.
    expected = [(2 + 2 * unigram[2]) / 5, (0 + 1 * unigram[3]) / 3, unigram[1]]
    measured = baselines.measure(train, validation, 4)
    assert measured["bigram"] == pytest.approx(-np.log(expected).mean())
    assert measured["unigram"] == pytest.approx(-np.log(unigram[[2, 3, 1]]).mean())


# Training


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_and_says_what_it_has_learnt(kind: str, tmp_path: Path) -> None:
    held_out = windows(tokens(2400)[2000:], 16)
    reports = []
    model, history = training.train(plan(kind, steps=60), tokens(), held_out, tmp_path / "c", on_report=reports.append)
    assert len(history.train) == 60 and [step for step, _ in history.validation][-1] == 60 and len(reports) == 15
    assert history.validation[-1][1] < history.validation[0][1] - 0.3
    assert training.mean_loss(model, held_out[:48]) == pytest.approx(history.validation[-1][1], abs=0.05)


def test_an_interrupted_training_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    held_out = windows(tokens(300), 16)
    whole, _ = training.train(plan(), tokens(), held_out, tmp_path / "whole")

    def interrupt(history: training.History) -> None:
        if len(history.train) == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(training.Interrupted, match=r"9 of 12 steps|8 of 12 steps"):
        training.train(plan(), tokens(), held_out, tmp_path / "parts", on_report=interrupt)
    resumed, history = training.train(plan(), tokens(), held_out, tmp_path / "parts")
    assert len(history.train) == 12
    for (name, mine), theirs in zip(resumed.state_dict().items(), whole.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


def test_a_checkpoint_of_other_options_or_text_is_refused(tmp_path: Path) -> None:
    held_out = windows(tokens(300), 16)
    training.train(plan(steps=2), tokens(), held_out, tmp_path / "c")
    with pytest.raises(checkpoint.CheckpointError, match="seed is 1, now 2"):
        training.train(plan(steps=2, seed=2), tokens(), held_out, tmp_path / "c")
    with pytest.raises(checkpoint.CheckpointError, match="of another text"):
        training.train(plan(steps=2), tokens()[1:], held_out, tmp_path / "c")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "other"])
def test_a_damaged_checkpoint_is_refused(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "c"
    checkpoint.save(file, {"done": 3, "weights": torch.arange(1000.0)})
    assert checkpoint.load(file)["done"] == 3
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        content = content[:-100]
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
    else:
        content = bytearray(b"PK" + bytes(content))
    file.write_bytes(content)
    with pytest.raises(checkpoint.CheckpointError, match=f"{file}.*remove it"):
        checkpoint.load(file)


def test_a_full_disk_leaves_the_checkpoint_from_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c"
    checkpoint.save(file, {"done": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(checkpoint.CheckpointError, match="No space left.*is as it was"):
        checkpoint.save(file, {"done": 2})
    assert checkpoint.load(file)["done"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    history = training.History([5.0, 4.0, 3.5], [(3, 3.6)], 1.0)
    training.draw_losses({"smallthinker": history}, {"bigram": 4.5}, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
