"""What a laid file is: docs/layout.md, rule by rule, read by a reader that knows nothing else."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from factory import MERGED_GATE_UP, make
from laid_reader import LaidFile, crc32c, rewritten, stock_experts, tensor_bytes
from moestream import ModelError, convert, verify
from moestream.layout import gguf_file
from moestream.layout.gguf_file import I32, STRING, U8, U16, U32, U64, open_gguf, open_shards, pair
from moestream.layout.interleaving import TARGETS
from moestream.layout.source import open_source


@pytest.fixture(scope="module")
def stock(folder: Path) -> Path:
    return make(folder, "qwen3moe", experts=5, alignment=64)


@pytest.fixture(scope="module")
def laid(folder: Path, stock: Path) -> Path:
    convert(stock, folder / "laid.gguf", target="x86-avx2")
    return folder / "laid.gguf"


MODELS: list[dict[str, Any]] = [
    {"arch": "qwen3moe"},
    {"arch": "qwen3moe", "expert_types": {"down": "Q8_0", (1, "up"): "Q4_1"}, "order": "shuffled"},
    {"arch": "qwen3moe", "type": "Q4_K", "expert_types": {"down": "Q6_K"}},
    {"arch": "gpt-oss"},
    {"arch": "qwen2moe", "experts": 3},
    {"arch": MERGED_GATE_UP[0], "merged_gate_up": True},
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(map(str, model.values())).replace(" ", ""))
def test_a_reader_of_the_document_finds_every_experts_bytes(
    model: dict[str, Any], target: str, folder: Path, tmp_path: Path
) -> None:
    source = make(folder, **model)
    convert(source, tmp_path / "laid.gguf", target=target)
    found = LaidFile(tmp_path / "laid.gguf")
    experts = stock_experts(source)
    assert sorted(experts) == sorted(found["part.tensor"])
    for name, slices in experts.items():
        block = int(name.split(".")[1])
        for expert in {block % len(slices), len(slices) - 1}:
            assert found.plain(block, expert, name) == slices[expert], f"{name}, expert {expert}"


@pytest.mark.parametrize("target", ["x86-avx2", "arm-i8mm"])
def test_interleaved_parts_are_not_plain_ones(target: str, stock: Path, tmp_path: Path) -> None:
    convert(stock, tmp_path / "laid.gguf", target=target)
    found = LaidFile(tmp_path / "laid.gguf")
    assert found["target"] == target
    assert set(found["part.form"]) == {1}
    stored, _ = found.stored(0, 0, "blk.0.ffn_up_exps.weight")
    assert stored.tobytes() != stock_experts(stock)["blk.0.ffn_up_exps.weight"][0]


def test_merged_gate_and_up_are_one_part(folder: Path, tmp_path: Path) -> None:
    source = make(folder, MERGED_GATE_UP[0], merged_gate_up=True)
    convert(source, tmp_path / "laid.gguf", target="plain")
    found = LaidFile(tmp_path / "laid.gguf")
    for block, parts in found.layers.items():
        assert [part[0] for part in parts] == [f"blk.{block}.ffn_{name}_exps.weight" for name in ("gate_up", "down")]


def test_the_container(laid: Path, stock: Path) -> None:
    found = LaidFile(laid)
    reader = found.readers[0]
    assert reader.fields["GGUF.version"].contents() == 3
    assert reader.fields["general.architecture"].contents() == "moestream"
    assert reader.fields["general.alignment"].contents() == 4096
    assert found["version"] == 1
    assert found["architecture"] == "qwen3moe"
    assert found["source.name"] == stock.name
    assert found["source.alignment"] == 64
    assert found["source.tensors"] == [tensor.name for tensor in gguf.GGUFReader(stock).tensors]
    header = stock.read_bytes()[: gguf.GGUFReader(stock).data_offset]
    assert found["source.sha256"] == hashlib.sha256(header).hexdigest()
    assert re.fullmatch(r"moestream \d+\.\d+\.\d+", found["tool"])


def test_records_are_aligned_padded_with_zeros_and_have_checksums(laid: Path) -> None:
    found = LaidFile(laid)
    checksums = iter(found["checksums"])
    for block, parts in found.layers.items():
        records = found.records(block)
        tensor = found.tensors[f"moestream.blk.{block}.experts"]
        assert tensor.tensor_type.name == "I8"
        assert records.shape == (5, int(tensor.shape[0]))
        assert records.shape[1] % 4096 == 0 and tensor.data_offset % 4096 == 0
        free = np.ones(records.shape[1], dtype=bool)
        end = 0
        for part in parts:
            assert part[4] % 64 == 0 and 0 <= part[4] - end < 64
            end = part[4] + part[5]
            free[part[4] : end] = False
        assert records.shape[1] - end < 4096
        assert not records[:, free].any()
        for record in records:
            assert crc32c(record.tobytes()) == next(checksums)
    assert next(checksums, None) is None


def test_the_dense_part_comes_first_and_is_as_it_was(laid: Path, stock: Path) -> None:
    before, after = tensor_bytes(stock), tensor_bytes(laid)
    dense = [name for name in before if "_exps.weight" not in name]
    assert list(after) == dense + [f"moestream.blk.{block}.experts" for block in range(4)]
    for name in dense:
        assert after[name] == before[name]


def test_other_keys_are_carried_over_byte_for_byte(laid: Path, stock: Path) -> None:
    before, after = ([(key.name, file.pair(key)) for key in file.keys] for file in map(open_gguf, (stock, laid)))
    changed = ("general.architecture", "general.alignment")
    assert [key for key, _ in after if not key.startswith("moestream.")] == [key for key, _ in before]
    for key, value in before:
        assert (dict(after)[key] == value) == (key not in changed)


def test_biases_and_scales_stay_outside_of_the_records(folder: Path, tmp_path: Path) -> None:
    source = make(folder, "gpt-oss")
    convert(source, tmp_path / "laid.gguf")
    before, after = tensor_bytes(source), tensor_bytes(tmp_path / "laid.gguf")
    biases = [name for name in before if name.endswith("_exps.bias")]
    assert biases
    assert all(after[name] == before[name] for name in biases)


# What breaks a rule is refused, and the sentence says which


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as refused:
        open_source(path)
    said = str(refused.value)
    assert said.startswith(f"{path}: "), said
    with pytest.raises(ModelError):
        verify(path)
    return said.removeprefix(f"{path}: ")


def damage(laid: Path, tmp_path: Path, name: str, change: Callable[[Any], Any]) -> Path:
    """The file with the value of one key changed."""
    file = open_gguf(laid)
    key = file.key(name)
    assert key is not None
    value = file.value(key)
    if isinstance(value, np.ndarray):
        value = value.copy()
    return rewritten(laid, tmp_path / "damaged.gguf", {name: pair(name, key.type, change(value))})


def at(index: int, value: Any) -> Callable[[Any], Any]:
    """Changes one entry of an array."""

    def change(values: Any) -> Any:
        values[index] = value
        return values

    return change


DOWN = "blk.0.ffn_down_exps.weight"
DAMAGES = [
    ("layer.block", at(0, 1), "moestream.layer.block is empty or not ascending"),
    ("layer.block", at(3, 7), "moestream.layer.block has 7, but there is no tensor moestream.blk.7.experts"),
    ("layer.block", lambda v: v[:3], "moestream.layer.parts has 4 entries, layer.block 3"),
    ("layer.parts", at(0, 4), "moestream.part.tensor has 12 entries, but moestream.layer.parts sums up to 13"),
    ("layer.parts", lambda v: np.array([0, 6, 3, 3]), "moestream.layer.parts is 0 for block 0"),
    ("part.tensor", at(0, "blk.1.ffn_gate_exps.weight"), "moestream.part.tensor 'blk.1.ffn_gate_exps.weight' is no matrix of the experts of block 0"),
    ("part.tensor", at(0, "blk.0.ffn_gate_shexp.weight"), "moestream.part.tensor 'blk.0.ffn_gate_shexp.weight' is no matrix of the experts of block 0"),
    ("part.tensor", at(0, DOWN), f"moestream.part.tensor has {DOWN} twice"),
    ("part.tensor", lambda v: v[1:], "moestream.part.tensor has 11 entries, but moestream.layer.parts sums up to 12"),
    ("part.type", at(2, 99), f"moestream.part.type of {DOWN} is 99, which ggml does not know"),
    ("part.type", at(2, 14), f"moestream.part.type of {DOWN}: rows of 96 values cannot be Q6_K"),
    ("part.columns", at(2, 128), f"moestream.part.bytes of {DOWN} is 6912, and Q4_0 takes 9216"),
    ("part.columns", at(2, 2**63), f"moestream.part.columns and rows of {DOWN} are 9223372036854775808 and 128"),
    ("part.rows", at(2, 0), f"moestream.part.columns and rows of {DOWN} are 96 and 0"),
    ("part.offset", at(1, 6913), "moestream.part.offset of blk.0.ffn_up_exps.weight is 6913: before 6912, or not a multiple of 64"),
    ("part.offset", at(1, 64), "moestream.part.offset of blk.0.ffn_up_exps.weight is 64: before 6912, or not a multiple of 64"),
    ("part.offset", at(2, 2**40), f"moestream.part.bytes of {DOWN}: it ends at 1099511634688 of a record of 24576"),
    ("part.bytes", at(2, 6911), f"moestream.part.bytes of {DOWN} is 6911, and Q4_0 takes 6912"),
    ("part.form", at(2, 2), f"moestream.part.form of {DOWN} is 2, and there are 1 interleavings"),
    ("part.form", at(2, -2), f"moestream.part.form of {DOWN} is -2, and there are 1 interleavings"),
    ("part.form", at(1, -1), "moestream.part.form of blk.0.ffn_up_exps.weight: only ffn_down_exps can be neuron-major"),
    ("checksums", lambda v: v[1:], "moestream.checksums: there are 19 for 20 records"),
    ("source.sha256", lambda v: "x" + v[1:], "moestream.source.sha256 is '"),
    ("source.alignment", lambda v: 48, "moestream.source.alignment is 48, not a power of two"),
    ("source.tensors", lambda v: v[1:], "moestream.source.tensors lacks "),
    ("source.tensors", lambda v: [*v, "ghost"], "moestream.source.tensors has 'ghost', which is neither in the file nor in the records"),
    ("source.tensors", lambda v: [*v, v[0]], "moestream.source.tensors has a name twice"),
    ("interleaving.1.rows", lambda v: 4, "moestream.interleaving.1.bits has 1152 entries for 4 rows of Q4_0"),
    ("interleaving.1.rows", lambda v: 0, "moestream.interleaving.1.bits has 1152 entries for 0 rows of Q4_0"),
    ("interleaving.1.type", lambda v: 77, "moestream.interleaving.1.type is 77, which ggml does not know"),
    ("interleaving.1.type", lambda v: 20, "moestream.part.form of blk.0.ffn_gate_exps.weight: interleaving 1 is not for Q4_0"),
    ("interleaving.1.bits", at(0, 5), "moestream.interleaving.1.bits is no permutation"),
    ("interleaving.1.inverted", at(3, 2), "moestream.interleaving.1.inverted has a 2"),
    ("interleaving.1.inverted", lambda v: v[1:], "moestream.interleaving.1.inverted has 1151 entries, bits 1152"),
]  # fmt: skip


@pytest.mark.parametrize("name, change, said", DAMAGES, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(DAMAGES)])
def test_a_table_that_breaks_a_rule(
    name: str, change: Callable[[Any], Any], said: str, laid: Path, tmp_path: Path
) -> None:
    found = refusal(damage(laid, tmp_path, "moestream." + name, change))
    assert found.startswith(f"damaged laid file: {said}"), found
    assert found.endswith("; convert the model again")


def test_a_type_that_is_read_otherwise_is_seen(laid: Path, tmp_path: Path) -> None:
    """Rows that are no multiple of those that are interleaved."""
    name = "moestream.interleaving.1."
    bits = pair(name + "bits", U16, list(range(8 * 64 * 18)))
    path = rewritten(
        laid,
        tmp_path / "damaged.gguf",
        {
            name + "rows": pair(name + "rows", U32, 64),
            name + "bits": bits,
            name + "inverted": pair(name + "inverted", U8, [0] * 9216),
        },
    )
    said = "moestream.part.rows of blk.0.ffn_gate_exps.weight is 96, not a multiple of the 64 of interleaving 1"
    assert said in refusal(path)


@pytest.mark.parametrize("name", ["version", "tool", "part.form", "checksums", "interleaving.1.bits"])
def test_a_key_that_is_missing(name: str, laid: Path, tmp_path: Path) -> None:
    path = rewritten(laid, tmp_path / "damaged.gguf", {"moestream." + name: None})
    assert refusal(path) == f"damaged laid file: moestream.{name}: missing; convert the model again"


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("version", pair("moestream.version", U64, 1), "u64"),
        ("checksums", pair("moestream.checksums", I32, [1, 2]), "[i32]"),
        ("tool", pair("moestream.tool", STRING, ["a"]), "[string]"),
        ("part.tensor", pair("moestream.part.tensor", STRING, "a"), "string"),
    ],
)
def test_a_key_of_another_type(name: str, value: bytes, said: str, laid: Path, tmp_path: Path) -> None:
    path = rewritten(laid, tmp_path / "damaged.gguf", {"moestream." + name: value})
    assert f"moestream.{name} is {said};" in refusal(path)


def test_a_later_version(laid: Path, tmp_path: Path) -> None:
    path = damage(laid, tmp_path, "moestream.version", lambda version: 2)
    said = "a laid file of version 2, and this moestream reads version 1: update moestream, or convert the model again"
    assert refusal(path) == said


@pytest.mark.parametrize("name", ["moestream.new", "moestream.interleaving.1.new", "moestream.interleaving.0.name"])
def test_an_unknown_key(name: str, laid: Path, tmp_path: Path) -> None:
    path = rewritten(laid, tmp_path / "damaged.gguf", {name: pair(name, U32, 1)})
    assert f"{name}: unknown key" in refusal(path)


def test_interleavings_that_are_not_numbered_in_a_row(laid: Path, tmp_path: Path) -> None:
    name = "moestream.interleaving.3.name"
    path = rewritten(laid, tmp_path / "damaged.gguf", {name: pair(name, STRING, "x")})
    assert "moestream.interleaving.3: they are not numbered 1, 2, ..." in refusal(path)


def test_records_of_another_type(laid: Path, tmp_path: Path) -> None:
    name = "moestream.blk.0.experts"
    path = rewritten(laid, tmp_path / "damaged.gguf", tensors={name: ((24576 // 4, 5), 0)})
    assert f"{name} is 6144x5 F32, not two dimensions of I8" in refusal(path)


def test_records_that_are_no_multiple_of_a_page(laid: Path, tmp_path: Path) -> None:
    name = "moestream.blk.0.experts"
    path = rewritten(laid, tmp_path / "damaged.gguf", tensors={name: ((24000, 5), 24)})
    assert f"{name}: a record has 24000 bytes, not a multiple of 4096" in refusal(path)


def test_a_tensor_that_parts_stand_for_is_there_too(laid: Path, tmp_path: Path) -> None:
    path = rewritten(laid, tmp_path / "damaged.gguf", rename={"output_norm.weight": DOWN})
    assert f"moestream.part.tensor has {DOWN}, which is a tensor of the file too" in refusal(path)


def test_an_alignment_under_a_page(laid: Path, tmp_path: Path) -> None:
    path = rewritten(laid, tmp_path / "damaged.gguf", {"general.alignment": pair("general.alignment", U32, 64)})
    assert "general.alignment of damaged.gguf is 64, less than 4096" in refusal(path)


def test_shards(stock: Path, tmp_path: Path) -> None:
    convert(stock, tmp_path / "laid.gguf", split_max_bytes=300_000)
    paths = sorted(tmp_path.glob("laid-*.gguf"))
    assert len(paths) > 2
    keys = [[key.name for key in open_gguf(path).keys] for path in paths]
    assert keys[0][-3:] == ["split.no", "split.count", "split.tensors.count"]
    for number, names in enumerate(keys[1:], 1):
        assert names == ["general.alignment", "split.no", "split.count", "split.tensors.count"]
        assert open_gguf(paths[number]).integer("split.no", 0) == number
    names = [tensor.name for tensor in open_shards(open_gguf(paths[0])).tensors]
    assert len(set(names)) == len(names) == open_gguf(paths[0]).integer("split.tensors.count", 0)
    assert all(path.stat().st_size <= 330_000 for path in paths)

    extra = paths[1].with_name("x.gguf")
    rewritten(paths[1], extra, {"general.name": pair("general.name", STRING, "x")})
    extra.replace(paths[1])
    assert f"general.name: only the first shard may have it, but {paths[1].name} has it too" in refusal(paths[0])
    paths[1].unlink()
    with pytest.raises(ModelError, match=re.escape(f"{paths[1]}: shard 2 of {len(paths)} is missing")):
        open_source(paths[0])
    with pytest.raises(ModelError, match=r"is shard 3 of 3; give the first one, \.\.\.-00001-of-00003\.gguf"):
        open_source(paths[2])


# Headers


def test_tensors_that_overlap(stock: Path, tmp_path: Path) -> None:
    file = open_gguf(stock)
    infos = [(tensor.name, tensor.ne, tensor.type, 0) for tensor in file.tensors[:2]]
    path = tmp_path / "overlap.gguf"
    path.write_bytes(gguf_file.header_bytes([file.pair(key) for key in file.keys], infos, 64) + bytes(1 << 20))
    with pytest.raises(ModelError, match=f"tensors {file.tensors[0].name} and {file.tensors[1].name} overlap at byte"):
        open_gguf(path)


@pytest.mark.parametrize(
    "at, value, said",
    [
        (8, 2**60, "1152921504606846976 tensors and "),
        (16, 2**60, "tensors and 1152921504606846976 keys are more than "),
        (24, 2**50, "the name of key 0 at byte 24 is 1125899906842624 bytes long"),
    ],
)
def test_absurd_counts_are_refused_before_anything_is_made_of_them(
    at: int, value: int, said: str, laid: Path, tmp_path: Path
) -> None:
    data = bytearray(laid.read_bytes())
    data[at : at + 8] = value.to_bytes(8, "little")
    path = tmp_path / "absurd.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=re.escape(said)):
        open_gguf(path)


def test_a_truncated_laid_file_names_the_tensor(laid: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(laid.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"truncated: tensor moestream\.blk\.3\.experts is at bytes \d+ to \d+"):
        open_source(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(
        st.tuples(st.floats(0, 1), st.sampled_from([1, 4, 8]), st.integers(0, 2**64 - 1)), min_size=1, max_size=4
    ),
    cut=st.one_of(st.none(), st.floats(0, 1)),
)
def test_a_damaged_header_is_an_error_and_never_a_crash(
    changes: list[tuple[float, int, int]], cut: float | None, laid: Path, tmp_path: Path
) -> None:
    """Any bytes of the header changed, the file cut anywhere: it opens and is of sound tables, or says what is wrong."""
    data = bytearray(laid.read_bytes())
    end = open_gguf(laid).data_offset
    for where, size, value in changes:
        begin = int(where * (end - 8))
        data[begin : begin + size] = value.to_bytes(8, "little")[:size]
    path = tmp_path / "fuzzed.gguf"
    path.write_bytes(data if cut is None else data[: int(cut * len(data))])
    try:
        source = open_gguf(path)
        if source.architecture == "moestream":
            open_source(path)
    except ModelError as error:
        assert str(path) in str(error)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_tables_are_an_error_and_never_a_crash(data: st.DataObject, laid: Path, tmp_path: Path) -> None:
    """Sound GGUFs whose tables lie."""
    file = open_gguf(laid)
    keys = [key for key in file.keys if key.name.startswith("moestream.")]
    changed = {}
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3, unique=True)):
        value = file.value(key)
        if key.type == STRING:
            text = st.text(max_size=20)
            changed[key.name] = pair(
                key.name, STRING, data.draw(text if key.count is None else st.lists(text, max_size=12))
            )
            continue
        kinds = {U8: (0, 255), U16: (0, 65535), U32: (0, 2**32 - 1), U64: (0, 2**64 - 1), I32: (-(2**31), 2**31 - 1)}
        number = st.integers(*kinds[key.type])
        if key.count is None:
            changed[key.name] = pair(key.name, key.type, data.draw(number))
            continue
        numbers = value.copy()
        for _ in range(data.draw(st.integers(1, 3))):
            numbers[data.draw(st.integers(0, len(numbers) - 1))] = data.draw(number)
        changed[key.name] = pair(key.name, key.type, numbers)
    path = rewritten(laid, tmp_path / "fuzzed.gguf", changed)
    try:
        verify(path, progress=False)
    except ModelError as error:
        assert str(path) in str(error)
