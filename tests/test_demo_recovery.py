"""tools/train_demo_heads: what it trains on, what it refuses, and how the card tells of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs PyTorch, of the extra train")
pytest.importorskip("transformers", minversion="5.0", reason="needs transformers, of the extra train")

from demo_model import recovery  # noqa: E402
from demo_model.release import Data, ReleaseError  # noqa: E402
from factory import make  # noqa: E402
from moestream.sidecar import BaseModel, Sidecar  # noqa: E402
from moestream.train import HeadArrays  # noqa: E402
from moestream.train.curves import History  # noqa: E402
from moestream.train.head_arrays import packed  # noqa: E402

TOOL = Path(__file__).resolve().parent.parent / "tools" / "train_demo_heads"


def data(documents: list[list[int]]) -> tuple[Data, np.ndarray]:
    train = np.array([token for document in documents for token in document], np.uint16)
    starts = np.cumsum([0, *map(len, documents)])
    return Data(train, np.arange(2000, dtype=np.uint16), np.array([0, 2000]), {}), starts


def test_training_texts_are_documents_each_once_and_long_ones_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "DOCUMENT_TOKENS", 100)
    documents = [list(range(100 * i, 100 * i + n)) for i, n in enumerate((40, 500, 31, 64))]
    found = recovery.training_texts(*data([*documents, documents[0], documents[3]]))
    assert sorted(found) == [documents[0], documents[1][:100], documents[3]]
    monkeypatch.setattr(recovery, "CAPTURED_TOKENS", 10)
    assert len(recovery.training_texts(*data(documents))) == 1


def test_validation_windows_are_those_of_the_figures() -> None:
    found = recovery.validation_windows(data([[1] * 40])[0])
    assert found.shape == (3, 257) and found[:, 0].tolist() == [0, 512, 1024]


def test_without_the_demo_model_it_says_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="has no qwen3moe yet; run tools/train_demo_model --work .* first"):
        recovery.train(data([[1] * 40])[0], tmp_path, 1)
    run = subprocess.run([sys.executable, TOOL, "--threads", "0"], capture_output=True, text=True)
    assert run.returncode == 2 and "error: --threads must be 1 or more" in run.stderr


def test_a_sidecar_of_another_model_does_not_ship(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "demo-qwen3moe.gguf").symlink_to(make(tmp_path, "qwen3moe", seed=4))
    head = HeadArrays(0, *(np.ones(shape, np.float32) for shape in ((8, 144), (32, 144), (8, 32))))
    base = BaseModel.open(make(tmp_path, "qwen3moe")).base
    Sidecar(base, heads=packed([head], top_k=2)).write(tmp_path / "qwen3moe.sidecar.gguf")
    with pytest.raises(ReleaseError, match=r"is for .*; run tools/train_demo_model --work .* --ship first"):
        recovery.ship(tmp_path, package)
    assert [path.name for path in package.iterdir()] == ["demo-qwen3moe.gguf"]


def test_the_picture_has_the_losses_of_all_phases(tmp_path: Path) -> None:
    (tmp_path / "heads").mkdir()
    for phase in recovery.PHASES:
        history = History([3.0, 2.0, 1.5], [(0, 3.1), (3, 1.6)])
        kept = json.dumps({"history": history.as_dict()})
        (tmp_path / "heads" / f"{phase}.sidecar.gguf.{phase}.json").write_text(kept)
    recovery.draw(tmp_path)
    assert (tmp_path / "qwen3moe-sidecar.png").read_bytes().startswith(b"\x89PNG")
