"""Files that fail in the middle of a computation: that call ends in an error, the model lives, the next call works."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import native
from factory import make
from isolation import isolated
from logits import CONTEXT, DECODED, PROMPT
from moestream import ExpertReadError, ExpertStreaming, Llama, ModelError, MoestreamError, describe

READERS = ("uring", "pread", "mmap")
LAYERS, TOPK = 4, 2


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"), experts=32)


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    """A model of its own for each test, to be damaged."""
    copy = tmp_path / "model.gguf"
    copy.write_bytes(original.read_bytes())
    return copy


@contextlib.contextmanager
def loaded(path: Path, reader: Any, **options: Any) -> Iterator[Llama]:
    """The smallest cache, so that nearly every token reads."""
    if reader != "mmap":
        options = {"cache": describe(path).minimum_cache_bytes, **options}
    streaming = ExpertStreaming(reader=reader, kernels="plain", **options)
    with contextlib.closing(Llama(str(path), expert_streaming=streaming, **CONTEXT)) as llm:
        yield llm


def logits(llm: Llama) -> np.ndarray:
    llm.reset()
    llm.eval(PROMPT)
    for token in DECODED:
        llm.eval([token])
    return llm.scores[: llm.n_tokens].copy()


@pytest.fixture(scope="module")
def expected(original: Path) -> np.ndarray:
    with loaded(original, "pread") as llm:
        return logits(llm)


def header_bytes(path: Path) -> int:
    with native.opened(path) as source:
        return source.files[0].data_offset


def expert_at(path: Path, layer: int, matrix: int, expert: int) -> tuple[str, int, int]:
    """(tensor, offset, size) of one matrix of an expert."""
    with native.opened(path) as source:
        m = source.layers[layer].matrices[matrix]
        return native.ffi.string(m.name).decode(), m.offset + expert * m.slice_bytes, m.slice_bytes


def assert_names_an_expert(message: str, path: Path, said: str) -> None:
    """The file, and an expert with the offset that it has there."""
    match = re.fullmatch(
        rf"{re.escape(str(path))}: expert (\d+) of blk\.(\d+)\.(ffn_\w+_exps\.weight) at offset (\d+) \((\d+) bytes\) {said}", message
    )
    assert match, message
    with native.opened(path) as source:
        layer = source.layers[int(match[2])]
        m = next(m for m in layer.matrices[0 : layer.n_matrices] if native.ffi.string(m.name).decode().endswith(match[3]))
        assert int(match[4]) == m.offset + int(match[1]) * m.slice_bytes
        assert int(match[5]) == m.slice_bytes


GONE = r"is gone: the file was truncated while it was in use; restore it and call again"


@pytest.mark.parametrize("reader", READERS)
def test_a_file_truncated_while_in_use_fails_that_call_and_works_again_once_restored(reader: str, path: Path, expected: np.ndarray) -> None:
    content = path.read_bytes()
    with loaded(path, reader) as llm:
        llm.eval(PROMPT)
        os.truncate(path, header_bytes(path))
        messages = []
        for _ in range(2):  # it fails the same way for as long as the file is short
            with pytest.raises(ExpertReadError) as raised:
                llm.eval([DECODED[0]])
            messages.append(str(raised.value))
        assert isinstance(raised.value, (MoestreamError, OSError))
        assert llm.n_tokens == len(PROMPT), "the token that failed counts as decoded"
        path.write_bytes(content)
        for message in messages:
            assert_names_an_expert(message, path, GONE)
        for token in DECODED:  # goes on where it was
            llm.eval([token])
        assert np.array_equal(llm.scores[: llm.n_tokens], expected)
        assert np.array_equal(logits(llm), expected)


@pytest.mark.parametrize("reader", READERS)
def test_a_prompt_fails_as_a_token_does(reader: str, path: Path, expected: np.ndarray) -> None:
    content = path.read_bytes()
    with loaded(path, reader) as llm:
        _, offset, _ = expert_at(path, LAYERS - 1, 0, 0)
        os.truncate(path, offset)
        with pytest.raises(ExpertReadError) as raised:
            logits(llm)
        path.write_bytes(content)
        assert_names_an_expert(str(raised.value), path, GONE)
        assert np.array_equal(logits(llm), expected)


@pytest.mark.parametrize("architecture", ["qwen3next", "lfm2moe"])
def test_a_recurrent_state_is_dropped_and_evaluated_anew(architecture: str, tmp_path: Path) -> None:
    """It cannot be taken back by a token: llama.cpp forgets the sequence, and says so instead of going on wrongly."""
    path = make(tmp_path, architecture, experts=32)
    content = path.read_bytes()
    with loaded(path, "pread") as llm:
        expected = logits(llm)
        llm.reset()
        before = llm("The library is", max_tokens=8, temperature=0.0)["choices"]
        llm.reset()
        llm.eval(llm.tokenize(b"The library is"))
        os.truncate(path, header_bytes(path))
        with pytest.raises(ExpertReadError, match="is gone"):
            llm.eval([DECODED[0]])
        path.write_bytes(content)
        with pytest.raises(RuntimeError, match="^llama_decode returned -1$"):
            llm.eval([DECODED[0]])
        assert llm("The library is", max_tokens=8, temperature=0.0)["choices"] == before
        assert np.array_equal(logits(llm), expected)


@pytest.mark.parametrize("architecture", ["qwen3moe", "qwen3next"])
def test_a_prompt_asked_again_does_not_sample_from_the_call_that_failed(architecture: str, tmp_path: Path) -> None:
    """Stock reuses what it holds of a prompt; when the first token after it failed, that was the whole prompt."""
    isolated(_ask_again, make(tmp_path, architecture, experts=32))


def _ask_again(path: Path) -> None:
    content = path.read_bytes()
    with loaded(path, "pread") as llm:
        expected = llm("The library is", max_tokens=8, temperature=0.0, seed=1)["choices"]
        for token in (5, 200):
            llm.reset()
            llm.eval(llm.tokenize(b"The library is"))
            os.truncate(path, header_bytes(path))
            with pytest.raises(ExpertReadError, match="is gone"):
                llm.eval([token])
            path.write_bytes(content)
            assert llm("The library is", max_tokens=8, temperature=0.0, seed=1)["choices"] == expected


@pytest.mark.parametrize("reader", READERS)
def test_high_level_calls_raise_it_too(reader: str, path: Path) -> None:
    content = path.read_bytes()
    with loaded(path, reader) as llm:
        before = llm("The library is", max_tokens=8, temperature=0.0)["choices"]
        llm.reset()
        os.truncate(path, header_bytes(path))
        with pytest.raises(ExpertReadError, match="is gone"):
            llm("The library is", max_tokens=8, temperature=0.0)
        with pytest.raises(ExpertReadError, match="is gone"):
            list(llm("The library is", max_tokens=8, temperature=0.0, stream=True))
        path.write_bytes(content)
        assert llm("The library is", max_tokens=8, temperature=0.0)["choices"] == before


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_loses_only_its_end_fails_only_where_that_is_needed(reader: str, path: Path, expected: np.ndarray) -> None:
    tensor, offset, size = expert_at(path, LAYERS - 1, 2, 31)
    with loaded(path, reader) as llm:
        os.truncate(path, offset + size - 1)
        try:
            assert np.array_equal(logits(llm), expected)  # that expert was not among them
        except ExpertReadError as error:
            assert f"expert 31 of {tensor} at offset {offset}" in str(error)


def overwritten(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Writes a changed content into the same inode."""
    changed = change(path.read_bytes())
    assert len(changed) == path.stat().st_size
    with path.open("r+b") as file:
        file.write(changed)


@pytest.mark.parametrize("reader", READERS)
def test_a_file_overwritten_by_another_model_is_noticed(reader: str, path: Path, expected: np.ndarray) -> None:
    content = path.read_bytes()
    with loaded(path, reader) as llm:
        llm.eval(PROMPT)
        overwritten(path, lambda model: model.replace(b"synthetic qwen3moe", b"another model, yes"))
        with pytest.raises(ExpertReadError) as raised:
            llm.eval([DECODED[0]])
        assert str(raised.value) == (f"{path}: was overwritten by another file while it was in use; close the model and load it again")
        overwritten(path, lambda _: content)
        assert np.array_equal(logits(llm), expected)


@pytest.mark.parametrize("reader", READERS)
def test_a_file_touched_but_the_same_is_forgiven(reader: str, path: Path, expected: np.ndarray) -> None:
    with loaded(path, reader) as llm:
        llm.eval(PROMPT)
        overwritten(path, lambda model: model)
        os.utime(path)
        assert np.array_equal(logits(llm), expected)


@pytest.mark.parametrize("reader", READERS)
def test_a_file_replaced_by_rename_is_read_on_from_the_old_one(reader: str, path: Path, tmp_path: Path, expected: np.ndarray) -> None:
    new = tmp_path / "new.gguf"
    new.write_bytes(bytes(path.stat().st_size))
    with loaded(path, reader) as llm:
        llm.eval(PROMPT)
        new.rename(path)
        assert np.array_equal(logits(llm), expected)
        path.unlink()
        assert np.array_equal(logits(llm), expected)


@pytest.mark.parametrize("reader", READERS)
def test_a_file_truncated_while_it_is_loaded_fails_there_and_loads_once_restored(reader: str, path: Path, expected: np.ndarray) -> None:
    content = path.read_bytes()
    begin = header_bytes(path)

    def truncate(share: float) -> None:
        os.truncate(path, begin)

    with pytest.raises(ModelError) as raised:
        Llama(str(path), expert_streaming=ExpertStreaming(reader=reader), load_progress=truncate, **CONTEXT)  # type: ignore[arg-type]
    match = re.fullmatch(rf"{re.escape(str(path))}: reading (\d+) bytes at offset (\d+): the file ends before them", str(raised.value))
    assert match and begin <= int(match[2]) < len(content), str(raised.value)
    path.write_bytes(content)
    with loaded(path, reader) as llm:
        assert np.array_equal(logits(llm), expected)


# Damaged weights


def damage(path: Path, layer: int, matrix: int) -> None:
    """Makes a scale of every expert of a layer infinite, so that whichever is chosen is a damaged one."""
    with path.open("r+b") as file:
        for expert in range(32):
            _, offset, size = expert_at(path, layer, matrix, expert)
            file.seek(offset + size // 18 // 2 * 18)  # Q4_0: blocks of 18 bytes that begin with an F16 scale
            file.write(b"\x00\x7c")


@pytest.mark.parametrize("reader, kernels", [*((r, "plain") for r in READERS), ("uring", "interleaved"), ("pread", "interleaved")])
def test_verifying_finds_a_damaged_expert_and_names_it(reader: Any, kernels: str, path: Path) -> None:
    damage(path, 2, 1)
    streaming = ExpertStreaming(reader=reader, kernels=kernels, verify=True)  # type: ignore[arg-type]
    with contextlib.closing(Llama(str(path), expert_streaming=streaming, **CONTEXT)) as llm:
        for _ in range(2):
            with pytest.raises(ExpertReadError) as raised:
                llm.eval([5])
            said = r"holds no valid weights \(NaN or infinite scales\); the file is damaged, download it again"
            assert_names_an_expert(str(raised.value), path, said)
            assert " of blk.2.ffn_down_exps.weight at " in str(raised.value)


@pytest.mark.parametrize("reader", READERS)
def test_without_verifying_damaged_weights_are_computed_with(reader: str, path: Path) -> None:
    damage(path, 2, 1)
    with loaded(path, reader) as llm:
        llm.eval([5])
        assert llm.n_tokens == 1


@pytest.mark.parametrize("reader", READERS)
def test_verifying_changes_no_bit(reader: str, path: Path, expected: np.ndarray) -> None:
    with loaded(path, reader, verify=True) as llm:
        assert np.array_equal(logits(llm), expected)


# Shards


@pytest.mark.parametrize("reader", READERS)
def test_the_shard_that_fails_is_named(reader: str, tmp_path: Path) -> None:
    first = make(tmp_path, split=3, experts=32)
    shards = sorted(tmp_path.glob("*.gguf"))
    with loaded(first, reader) as llm:
        content = shards[2].read_bytes()
        os.truncate(shards[2], 4096)
        with pytest.raises(ExpertReadError) as raised:
            llm.eval(PROMPT)
        assert str(raised.value).startswith(f"{shards[2]}: expert ")
        shards[2].write_bytes(content)
        llm.eval(PROMPT)
