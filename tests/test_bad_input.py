"""What cannot work is refused before anything is loaded, and the sentence says what is wrong and what to do."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

import moestream
import native
from factory import lora, make
from isolation import isolated
from logits import CONTEXT
from moestream import (
    CacheTooSmallError,
    ExpertStreaming,
    Llama,
    ModelError,
    MoestreamError,
    OptionError,
    convert,
    describe,
)


def load(path: object, **options: Any) -> None:
    """Loads and closes a streamed model."""
    Llama(path, **{"expert_streaming": True, **CONTEXT, **options}).close()  # type: ignore[arg-type]


def refusal(path: object) -> str:
    """The sentence that both describe and Llama refuse a model with, without its path."""
    with pytest.raises(ModelError) as described:
        describe(path)  # type: ignore[arg-type]
    with pytest.raises(ModelError) as loaded:
        load(path)
    assert str(loaded.value) == str(described.value)
    assert str(path) in str(loaded.value)
    return str(loaded.value).split(": ", 1)[1]


# Files


def test_a_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.gguf") == "No such file or directory; check the path"


def test_a_directory(tmp_path: Path) -> None:
    said = "is a directory; name the .gguf file in it (of a split model the first shard, ...-00001-of-...)"
    assert refusal(tmp_path) == said


def test_a_device() -> None:
    assert refusal("/dev/null").startswith("not a regular file")


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    assert refusal(path) == "not a GGUF file: it has only 0 bytes; download it again"


def test_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("# A model\n\nSee the weights beside this.\n")
    said = "not a GGUF file: it starts with '# A ' where 'GGUF' should stand; convert the model to GGUF first"
    assert refusal(path) == said


def test_a_binary_file_is_shown_without_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"\x1b[2J" + bytes(100))
    assert "starts with '.[2J'" in refusal(path)


def test_a_magic_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0")
    assert refusal(path).startswith("the GGUF header is damaged: ")


def _denied(path: Path, user: int) -> str:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    try:
        describe(path)
    except ModelError as error:
        return str(error)
    return "readable"


def test_no_permission(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "secret.gguf"
    path.write_bytes(model.read_bytes())
    path.chmod(0)
    said = f"{path}: Permission denied; you lack the permission to read it"
    if os.getuid() == 0:  # modes do not stop root: be someone else
        assert isolated(_denied, path, 65534) == said
    else:
        assert f"{path}: {refusal(path)}" == said


@pytest.mark.parametrize("missing", [1, 5, "expert"])
def test_a_truncated_file_names_the_tensor(missing: int | str, folder: Path) -> None:
    path = make(folder, truncate=missing)
    end = path.stat().st_size
    said = refusal(path)
    match = re.fullmatch(
        r"truncated: tensor (blk\.\d\.ffn_\w+_exps\.weight) is at bytes (\d+) to (\d+), but the file ends at (\d+); download it again",
        said,
    )
    assert match, said
    assert (int(match[3]) - end, int(match[4])) == (_slice_bytes(folder) if missing == "expert" else missing, end)


def _slice_bytes(folder: Path) -> int:
    return describe(make(folder)).moe_layers[-1].matrices[-1].slice_bytes


def test_a_truncated_shard_is_named(folder: Path, tmp_path: Path) -> None:
    first, *others = _copied(make(folder, split=3), tmp_path)
    with others[-1].open("r+b") as file:
        file.truncate(others[-1].stat().st_size - 100)
    with pytest.raises(ModelError, match=r"-00003-of-00003\.gguf: truncated: tensor .* is at bytes"):
        describe(first)


def _copied(first: Path, folder: Path) -> list[Path]:
    shards = sorted(first.parent.glob(first.name.replace("-00001-of-", "-0000?-of-")))
    for shard in shards:
        (folder / shard.name).write_bytes(shard.read_bytes())
    return [folder / shard.name for shard in shards]


def test_the_other_byte_order_says_how_to_convert(folder: Path) -> None:
    said = refusal(make(folder, big_endian=True))
    assert said.startswith("a GGUF of the other byte order")
    assert said.endswith("convert a copy of it with: gguf-convert-endian FILE little")


def test_another_shard_than_the_first(folder: Path) -> None:
    path = str(make(folder, split=3)).replace("-00001-", "-00002-")
    said = "is shard 2 of 3; give the first one, ...-00001-of-00003.gguf, and the rest is found beside it"
    assert refusal(path) == said


@pytest.mark.parametrize("missing", [2, 3])
def test_a_missing_shard_is_named(missing: int, folder: Path, tmp_path: Path) -> None:
    shards = _copied(make(folder, split=3), tmp_path)
    shards[missing - 1].unlink()
    with pytest.raises(ModelError) as raised:
        load(shards[0])
    assert str(raised.value) == (f"{shards[missing - 1]}: shard {missing} of 3 is missing; download it into the same folder")


def test_a_first_shard_by_another_name(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(make(folder, split=3).read_bytes())
    said = "the first of 3 shards must be named like NAME-00001-of-00003.gguf for the others to be found; rename it"
    assert refusal(path) == said


def test_shards_of_two_models(folder: Path, tmp_path: Path) -> None:
    first, second, third = _copied(make(folder, split=3), tmp_path)
    third.write_bytes(second.read_bytes())
    with pytest.raises(ModelError, match="is in an earlier shard too; the shards do not belong together"):
        describe(first)


def test_an_architecture_that_llama_cpp_does_not_know(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "future.gguf"
    path.write_bytes(model.read_bytes().replace(b"qwen3moe", b"qwen9moe"))
    assert describe(path).architecture == "qwen9moe"
    with pytest.raises(ModelError) as raised:
        load(path)
    assert str(raised.value) == f"{path}: llama.cpp cannot load it: unknown model architecture: 'qwen9moe'"


def test_a_tensor_that_llama_cpp_misses(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "incomplete.gguf"
    path.write_bytes(model.read_bytes().replace(b"blk.1.attn_q.weight", b"blk.1.attn_z.weight"))
    with pytest.raises(ModelError, match=r"llama.cpp cannot load it: .*blk\.1\.attn_q\.weight"):
        load(path)


def test_a_dense_model(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "dense.gguf"
    path.write_bytes(re.sub(rb"_exps\.weight", rb"_dens.weight", model.read_bytes()))
    said = "a dense model (qwen3moe) without experts, so there is nothing to stream; load it with expert_streaming=False"
    assert refusal(path).startswith(said)


def test_a_file_without_architecture(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "strange.gguf"
    path.write_bytes(model.read_bytes().replace(b"general.architecture", b"general.architektur_"))
    assert refusal(path) == "the header has no general.architecture; it is not a language model"


def test_experts_without_their_number_per_token(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "strange.gguf"
    path.write_bytes(model.read_bytes().replace(b".expert_used_count", b".expert_used_kount"))
    said = "has experts but no qwen3moe.expert_used_count, so how many a token takes is unknown"
    assert refusal(path) == said


def test_layers_whose_matrices_disagree_on_the_number_of_experts(model: Path, tmp_path: Path) -> None:
    content = bytearray(model.read_bytes())
    name = b"blk.1.ffn_up_exps.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions and two of them
    assert content[at] == 8
    content[at - 8 : at + 8] = content[at : at + 8] + content[at - 8 : at]  # rows and experts change places
    path = tmp_path / "strange.gguf"
    path.write_bytes(content)
    assert refusal(path) == "tensor blk.1.ffn_up_exps.weight holds 96 experts, blk.1.ffn_gate_exps.weight holds 8"


@pytest.mark.parametrize(
    ("key", "damaged"),
    [
        (b"general.name", b"\0eneral.name"),  # as a C string it is empty
        (b"qwen3moe.context_length", b"qwen3moe.block_count\0th"),  # as a C string it is there twice
    ],
)
def test_a_key_with_a_zero_byte(key: bytes, damaged: bytes, model: Path, tmp_path: Path) -> None:
    """ggml reads such a key, and aborted the process when it was copied."""
    assert len(damaged) == len(key)
    path = tmp_path / "strange.gguf"
    path.write_bytes(model.read_bytes().replace(key, damaged))
    said = isolated(_described, path)
    assert re.search(r"header is damaged: key \d+ \(.*\) holds a zero byte; download or convert the model again$", said)


def _described(path: Path) -> str:
    os.environ["GGML_NO_BACKTRACE"] = "1"
    try:
        describe(path)
    except MoestreamError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _damage(header: bytearray, rng: random.Random) -> None:
    """Changes a few bytes of a header, where it hurts: lengths, types, counts, names."""
    values = (0, 1, 2**32, 2**60, 2**63 - 1, 2**63, 2**64 - 1)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.choice((rng.randrange(4, len(header)), rng.randrange(4, 300), rng.randrange(len(header) - 3000, len(header))))
        match rng.randrange(5):
            case 0:
                header[at] ^= 1 << rng.randrange(8)
            case 1:
                header[at] = rng.randrange(256)
            case 2:
                header[at : at + 8] = rng.choice(values).to_bytes(8, "little")
            case 3:
                header[at : at + 4] = rng.randrange(14).to_bytes(4, "little")
            case 4:
                del header[at : at + rng.randint(1, 9)]


def describe_damaged(path: Path, header_bytes: int, seeds: range, folder: Path) -> list[str]:
    """What describing damaged copies ended in, other than a description or a ModelError."""
    os.environ["GGML_NO_BACKTRACE"] = "1"
    content = path.read_bytes()
    copy = folder / path.name
    wrong = []
    refused = 0
    for seed in seeds:
        (folder / "seed").write_text(str(seed))  # of a crash
        header = bytearray(content[:header_bytes])
        _damage(header, random.Random(seed))
        copy.write_bytes(header)
        os.truncate(copy, len(content) - header_bytes + len(header))
        try:
            describe(copy)
        except ModelError as error:
            refused += 1
            if str(copy) not in str(error):
                wrong.append(f"seed {seed}: {error}")
        except BaseException as error:
            wrong.append(f"seed {seed}: {error!r}")
    if not len(seeds) / 2 < refused < len(seeds):
        wrong.append(f"{refused} of {len(seeds)} refused")
    return wrong


@pytest.mark.parametrize(("architecture", "is_laid"), [("qwen3moe", False), ("gpt-oss", False), ("qwen3moe", True)])
def test_a_damaged_header_is_an_error_and_never_a_crash(architecture: str, is_laid: bool, folder: Path, tmp_path: Path) -> None:
    path = make(folder, architecture)
    if is_laid:
        (tmp_path / "laid").mkdir()
        path = convert(path, tmp_path / "laid" / "laid.gguf", progress=False).paths[0]
    with native.opened(path) as source:
        header_bytes = source.files[0].data_offset
    try:
        wrong = isolated(describe_damaged, path, header_bytes, range(600), tmp_path)
    except AssertionError as error:
        raise AssertionError(f"seed {(tmp_path / 'seed').read_text()}: {error}") from None
    assert wrong == []


# LoRA adapters


@pytest.mark.parametrize("kind", ["missing", "text", "model", "damaged", "of another model"])
def test_a_lora_that_is_none(kind: str, model: Path, folder: Path, tmp_path: Path) -> None:
    isolated(_refuses_lora, kind, model, folder, tmp_path)


def _refuses_lora(kind: str, model: Path, folder: Path, scratch: Path) -> None:
    path = scratch / "lora.gguf"
    if kind == "text":
        path.write_text("no adapter, " * 10)
    elif kind == "model":
        path = model
    elif kind == "damaged":
        path.write_bytes(lora(model).read_bytes()[:-1000])
    elif kind == "of another model":
        path = lora(make(folder, d=256, heads=8))
    with pytest.raises(ModelError) as raised:
        load(model, lora_path=str(path))
    assert str(path) in str(raised.value)
    assert "LoRA" in str(raised.value)
    load(model, lora_path=str(lora(model)))


# Options


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    *(
        (
            {"cache": cache},
            f"cache={cache!r}: size {cache!r}: expected a number and a unit without blanks, such as '3GiB', '512MiB' or '2G'; or 'auto'",
        )
        for cache in ("3GB ", " 3GB", "3 GiB", "-1", "+1", "1e9", "GiB", "", "Auto", "0x10", "3GiBs", "3,5GiB", "inf", "nan", "٣GiB")
    ),
    *(
        ({"cache": cache}, f"cache={cache!r}: size {cache!r}: must be more than zero bytes; or 'auto'")
        for cache in (0, "0", -1, "0GiB", "0.0001")
    ),
    *(
        ({"cache": cache}, f"cache={cache!r}: size {cache!r}: expected bytes as a number or a size such as '3GiB'; or 'auto'")
        for cache in (True, False, None, 1.5, [1], b"3GiB")
    ),
    *(
        ({"kernels": kernels}, f"kernels={kernels!r}: expected one of 'auto', 'plain', 'interleaved'")
        for kernels in ("repacked", "PLAIN", "", None, True)
    ),
    *(
        ({"reader": reader}, f"reader={reader!r}: expected one of 'auto', 'uring', 'pread', 'mmap'")
        for reader in ("io_uring", "Auto", "", None, 1)
    ),
    *(
        ({"policy": policy}, f"policy={policy!r}: expected one of 'lru', 'lfu', 'lrfu'")
        for policy in ("belady", "LRU", "", None, True)
    ),
    *(({"direct": direct}, f"direct={direct!r}: expected True, False or 'auto'") for direct in ("yes", 1, 0, None)),
    *(({"verify": verify}, f"verify={verify!r}: expected True or False") for verify in ("auto", 1, None)),
    (
        {"reader": "mmap", "direct": True},
        "reader='mmap' goes through the page cache by its nature; leave out direct=True or use another reader",
    ),
    (
        {"reader": "mmap", "cache": "3GiB"},
        "reader='mmap' leaves caching to the kernel, so cache= would have no effect; leave it out or use another reader",
    ),
    (
        {"reader": "mmap", "policy": "lru"},
        "reader='mmap' leaves caching to the kernel, so policy= would have no effect; leave it out or use another reader",
    ),
]


@pytest.mark.parametrize(("options", "said"), BAD_OPTIONS, ids=[str(options) for options, _ in BAD_OPTIONS])
def test_an_option_that_is_none_is_refused_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as raised:
        ExpertStreaming(**options)
    assert str(raised.value) == said
    assert isinstance(raised.value, ValueError)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="'cahce'"):
        ExpertStreaming(cahce="3GiB")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        ExpertStreaming("3GiB")  # type: ignore[misc]


def test_an_unknown_keyword_is_refused_by_name(model: Path) -> None:
    for streaming in (True, False):
        with pytest.raises(OptionError) as raised:
            load(model, expert_streaming=streaming, expert_cache="3GiB")
        assert str(raised.value) == "unknown keyword 'expert_cache'; see help(moestream.Llama)"


@pytest.mark.parametrize("streaming", ["yes", 1, None, {"cache": "3GiB"}])
def test_streaming_is_yes_no_or_options(streaming: Any, model: Path) -> None:
    with pytest.raises(OptionError) as raised:
        load(model, expert_streaming=streaming)
    assert str(raised.value) == f"expert_streaming={streaming!r}: expected True, False or ExpertStreaming(...)"


def test_locking_in_memory_what_is_to_stay_on_disk_is_refused(model: Path) -> None:
    with pytest.raises(OptionError, match="^use_mlock=True would lock the whole model in memory"):
        load(model, use_mlock=True)


def test_load_progress_needs_streaming(model: Path) -> None:
    with pytest.raises(OptionError, match="^load_progress= reports on a streamed model; it needs expert_streaming$"):
        load(model, expert_streaming=False, load_progress=print)


# Caches


def test_a_cache_under_one_tokens_experts_is_refused_with_the_minimum(model: Path) -> None:
    minimum = describe(model).minimum_cache_bytes
    load(model, expert_streaming=ExpertStreaming(cache=minimum))
    with pytest.raises(CacheTooSmallError) as raised:
        load(model, expert_streaming=ExpertStreaming(cache=minimum - 1))
    assert str(raised.value) == (
        f"cache={minimum - 1}: 180.00 KiB cannot hold the experts of one token; the smallest cache for {model.name} is "
        f"{minimum} bytes (180.00 KiB: 4 layers x 2 experts)"
    )
    assert isinstance(raised.value, OptionError)


def test_a_cache_larger_than_memory_is_refused(model: Path) -> None:
    total = psutil.virtual_memory().total
    with pytest.raises(OptionError) as raised:
        load(model, expert_streaming=ExpertStreaming(cache=total + 1))
    shown = moestream.memory.format_size(total)
    assert str(raised.value) == (f"cache={total + 1}: {shown} is more than this machine's {shown} of memory; use cache='auto'")


def test_a_cache_larger_than_what_is_free_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moestream._engine.available_bytes", lambda: 400_000)
    with pytest.raises(OptionError) as raised:
        load(model, expert_streaming=ExpertStreaming(cache="500K"))
    assert str(raised.value) == (
        "cache='500K': 488.28 KiB of experts and 174.50 KiB of dense weights do not fit in the 390.62 KiB of memory available; "
        "use a smaller cache, or cache='auto'"
    )


def test_a_model_that_cannot_fit_is_refused_before_it_is_loaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moestream._engine.available_bytes", lambda: 300_000)
    loaded: list[float] = []
    with pytest.raises(OptionError) as raised:
        load(model, load_progress=loaded.append)
    assert str(raised.value) == (
        f"{model}: needs at least 354.50 KiB of memory (174.50 KiB of dense weights, 180.00 KiB of experts), but 292.97 KiB is available; "
        "free some, or take a smaller model"
    )
    assert loaded == []


def test_a_cache_that_holds_more_than_all_is_no_larger_than_all(model: Path) -> None:
    llm = Llama(str(model), expert_streaming=ExpertStreaming(cache="64MiB"), **CONTEXT)
    stats = llm.expert_stats()
    llm.close()
    assert stats.cache_bytes == describe(model).maximum_cache_bytes
    assert stats.slots_total == 4 * 8
