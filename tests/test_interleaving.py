"""Interleaved rows: the tables are what ggml does, what they do is what docs/layout.md says, and back is back."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from cffi import FFI

from moestream._native import LIBRARY
from moestream.errors import ModelError, OptionError
from moestream.layout.interleaving import TARGETS, Interleaving, native_target
from native import lib as core

Type = gguf.GGMLQuantizationType
QUANTISED = [t for t in Type if gguf.GGML_QUANT_SIZES[t][0] > 1]
DESCRIBED = [Type.Q4_0, Type.Q8_0, Type.IQ4_NL, Type.MXFP4]  # by ourselves, for any target

ffi = FFI()
ffi.cdef("""
    struct ggml_init_params { size_t mem_size; void *mem_buffer; bool no_alloc; };
    void *ggml_init(struct ggml_init_params params);
    void ggml_free(void *context);
    void *ggml_new_tensor_2d(void *context, int type, int64_t columns, int64_t rows);
    void *ggml_mul_mat(void *context, void *a, void *b);
    void *ggml_get_data(const void *tensor);
    void *ggml_backend_alloc_ctx_tensors_from_buft(void *context, void *buffer_type);
    void *ggml_backend_dev_by_type(int type);
    bool ggml_backend_dev_supports_op(void *device, const void *op);
    void ggml_backend_tensor_set(void *tensor, const void *data, size_t offset, size_t size);
    void ggml_backend_buffer_free(void *buffer);
""")
ggml: Any = ffi.dlopen(str(LIBRARY))


def ids(value: Any) -> str | None:
    return value.name if isinstance(value, Type) else None


def arbitrary(type: int, block_columns: int, rows: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    size_bytes = gguf.GGML_QUANT_SIZES[Type(type)][1] * block_columns * rows
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


def columns_of(type: int, block_columns: int) -> int:
    return gguf.GGML_QUANT_SIZES[Type(type)][0] * block_columns


def stored_by_ggml(type: int, columns: int, rows: int, plain: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8] | None:
    """What ggml makes of a matrix in its CPU_REPACK buffers; None if it does not multiply with such a one there."""
    buffer_type = ffi.cast("void *", int(core_pointer(core.ms_repack_buffer_type())))
    if not buffer_type:
        return None
    context = ggml.ggml_init({"mem_size": 1 << 16, "mem_buffer": ffi.NULL, "no_alloc": True})
    other = ggml.ggml_init({"mem_size": 1 << 16, "mem_buffer": ffi.NULL, "no_alloc": True})
    weight = ggml.ggml_new_tensor_2d(context, type, columns, rows)
    buffer = ggml.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type)
    try:
        product = ggml.ggml_mul_mat(other, weight, ggml.ggml_new_tensor_2d(other, Type.F32, columns, 1))
        if not ggml.ggml_backend_dev_supports_op(ggml.ggml_backend_dev_by_type(0), product):
            return None
        ggml.ggml_backend_tensor_set(weight, ffi.from_buffer(plain), 0, plain.nbytes)
        return np.frombuffer(ffi.buffer(ggml.ggml_get_data(weight), plain.nbytes), np.uint8).copy()
    finally:
        ggml.ggml_backend_buffer_free(buffer)
        ggml.ggml_free(other)
        ggml.ggml_free(context)


def core_pointer(pointer: Any) -> int:
    return int(FFI().cast("uintptr_t", pointer))


def as_the_document_says(
    table: Interleaving, plain: npt.NDArray[np.uint8], block_columns: int
) -> npt.NDArray[np.uint8]:
    """docs/layout.md, "Forms of a part", read as it stands."""
    block = len(table.bits) // 8 // table.rows
    runs = plain.reshape(-1, table.rows, block_columns, block).swapaxes(1, 2)  # group, block column, row, byte
    bits = np.unpackbits(runs.reshape(-1, table.rows * block), axis=1, bitorder="little")
    return np.packbits(bits[:, table.bits] ^ table.inverted, axis=1, bitorder="little").reshape(-1)


# ---------------------------------------------------------------- against ggml


@pytest.mark.parametrize("rows", [32, 36, 6], ids="rows{}".format)
@pytest.mark.parametrize("type", QUANTISED, ids=ids)
def test_the_native_table_stores_what_ggml_stores(type: Type, rows: int) -> None:
    columns, plain = columns_of(type, 5), arbitrary(type, 5, rows)
    expected = stored_by_ggml(type, columns, rows, plain)
    table = Interleaving.native(type, columns, rows)
    assert (table is None) == (expected is None)
    if table:
        assert table.type == type
        assert np.array_equal(table.apply(plain, columns, rows), expected)
        assert np.array_equal(table.invert(expected, columns, rows), plain)


def test_a_table_does_not_depend_on_the_shape() -> None:
    tables = [Interleaving.native(Type.Q4_0, columns, rows) for columns, rows in ((32, 16), (4096, 1 << 20))]
    assert tables[0] == tables[1]


@pytest.mark.skipif(
    not native_target().startswith("x86-avx"), reason="this machine's ggml has none of x86's interleavings"
)
def test_what_x86_interleaves_has_these_names() -> None:
    found = {Type(t): table for t in QUANTISED if (table := Interleaving.native(t, columns_of(t, 1), 64))}
    names = {"q4_0 8x8", "q4_K 8x8", "iq4_nl 8x8", "mxfp4 8x8"} | (
        {"q2_K 8x8"} if native_target() == "x86-avx512" else set()
    )
    assert {table.name for table in found.values()} == names
    assert {table.rows for table in found.values()} == {8}


@pytest.mark.skipif(
    not native_target().startswith("x86-avx"), reason="only on x86 can ours be compared here; see tools/check_arm"
)
@pytest.mark.parametrize("type", [Type.Q4_0, Type.IQ4_NL, Type.MXFP4], ids=ids)
def test_our_description_is_the_table_discovered(type: Type) -> None:
    other = (
        "x86-avx2" if native_target() == "x86-avx512" else "x86-avx512"
    )  # the machine's own would be the discovered one
    described = Interleaving.for_target(other, type, columns_of(type, 2), 16)
    assert described is not None
    assert described == Interleaving.native(type, columns_of(type, 2), 16)


# ---------------------------------------------------------------- targets


def test_the_machine_is_one_of_the_targets() -> None:
    assert native_target() in TARGETS


@pytest.mark.parametrize("type", QUANTISED, ids=ids)
def test_for_its_own_target_a_machine_gives_the_native_table(type: Type) -> None:
    shape = (type, columns_of(type, 2), 32)
    native = Interleaving.native(*shape)
    assert Interleaving.for_target(native_target(), *shape) == (None if native_target() == "plain" else native)


@pytest.mark.parametrize("type", QUANTISED, ids=ids)
@pytest.mark.parametrize("target", TARGETS)
def test_back_is_back(target: str, type: Type) -> None:
    for block_columns, rows in ((1, 8), (3, 40)):
        columns, plain = columns_of(type, block_columns), arbitrary(type, block_columns, rows)
        table = Interleaving.for_target(target, type, columns, rows)
        if table is None:
            assert target == "plain" or type not in DESCRIBED or (type == Type.Q8_0 and target.startswith("x86"))
            continue
        interleaved = table.apply(plain, columns, rows)
        assert not np.array_equal(interleaved, plain)
        assert np.array_equal(interleaved, as_the_document_says(table, plain, block_columns))
        assert np.array_equal(table.invert(interleaved, columns, rows), plain)


@pytest.mark.parametrize(
    ("target", "type", "name"),
    [
        ("x86-avx2", Type.Q4_0, "q4_0 8x8"),
        ("x86-avx512", Type.MXFP4, "mxfp4 8x8"),
        ("arm-dotprod", Type.Q4_0, "q4_0 4x4"),
        ("arm-dotprod", Type.Q8_0, "q8_0 4x4"),
        ("arm-i8mm", Type.Q4_0, "q4_0 4x8"),
        ("arm-i8mm", Type.Q8_0, "q8_0 4x8"),
        ("arm-i8mm", Type.IQ4_NL, "iq4_nl 4x4"),
        ("arm-i8mm", Type.MXFP4, "mxfp4 4x4"),
    ],
    ids=ids,
)
def test_what_targets_interleave(target: str, type: Type, name: str) -> None:
    table = Interleaving.for_target(target, type, 64, 16)
    assert table is not None
    assert (table.name, table.rows) == (name, int(name.split()[1][0]))
    assert Interleaving.for_target(target, type, 64, 18) is None  # rows that no kernel takes


@pytest.mark.skipif(not native_target().startswith("x86-avx"), reason="needs a machine whose Q4_K is i8mm's")
def test_other_types_only_where_this_machine_has_the_same() -> None:
    here = Interleaving.native(Type.Q4_K, 512, 16)
    assert here is not None and Interleaving.for_target("arm-i8mm", Type.Q4_K, 512, 16) == here
    assert Interleaving.for_target("arm-dotprod", Type.Q4_K, 512, 16) is None
    assert Interleaving.for_target("arm-i8mm", Type.Q6_K, 512, 16) is None
    assert Interleaving.for_target("x86-avx2", Type.Q2_K, 512, 16) == (
        Interleaving.native(Type.Q2_K, 512, 16) if native_target() == "x86-avx2" else None
    )


# ---------------------------------------------------------------- any table


def random_table(kind: str, n_bits: int, seed: int) -> npt.NDArray[np.uint16]:
    rng = np.random.default_rng(seed)
    if kind == "bits":
        return rng.permutation(n_bits).astype(np.uint16)
    order = rng.permutation(n_bits // 8)
    if kind == "stretches":  # of any length, over the ends of blocks too
        cuts = np.sort(rng.choice(n_bits // 8, 9, replace=False))
        order = np.concatenate(rng.permutation(np.array([*np.split(np.arange(n_bits // 8), cuts)], dtype=object)))
    bits = (order.astype(int)[:, None] * 8 + np.arange(8)).reshape(-1)
    if kind == "mixed":  # half of the bytes are put together from the bits of the others of that half
        half = rng.choice(n_bits // 8, n_bits // 16, replace=False)[:, None] * 8 + np.arange(8)
        bits[half.reshape(-1)] = rng.permutation(bits[half.reshape(-1)])
    return bits.astype(np.uint16)


@pytest.mark.parametrize("rows", [1, 4, 16], ids="rows{}".format)
@pytest.mark.parametrize("type", [Type.Q4_0, Type.MXFP4, Type.Q6_K], ids=ids)
@pytest.mark.parametrize("kind", ["bits", "bytes", "stretches", "mixed"])
def test_any_permutation_does_what_the_document_says(kind: str, type: Type, rows: int) -> None:
    n_bits = 8 * gguf.GGML_QUANT_SIZES[type][1] * rows
    for seed in range(3):
        inverted = np.random.default_rng(seed).integers(0, 2, n_bits, dtype=np.uint8)
        table = Interleaving.from_table("random", type, rows, random_table(kind, n_bits, seed), inverted)
        columns, plain = columns_of(type, 3), arbitrary(type, 3, 2 * rows, seed)
        interleaved = table.apply(plain, columns, 2 * rows)
        assert np.array_equal(interleaved, as_the_document_says(table, plain, 3))
        assert np.array_equal(table.invert(interleaved, columns, 2 * rows), plain)


def identity(**changed: Any) -> Interleaving:
    n_bits = 8 * 18 * 4
    table = {"name": "id", "type": 2, "rows": 4, "bits": np.arange(n_bits), "inverted": np.zeros(n_bits, int)} | changed
    return Interleaving.from_table(**table)


def test_a_name_may_be_any_bytes_as_a_damaged_file_has_them() -> None:
    assert identity(name=b"q4_0 \x80".decode("utf-8", "surrogateescape")).name == "q4_0 \ufffd"


def test_a_table_is_read_back_as_it_was_given_and_does_not_change() -> None:
    bits = random_table("bits", 576, 0)
    table = identity(bits=bits, name="q4_0 é")
    assert (table.name, table.type, table.rows) == ("q4_0 é", 2, 4)
    assert np.array_equal(table.bits, bits) and not table.inverted.any()
    with pytest.raises(ValueError, match="read-only"):
        table.bits[0] = 1


def test_tables_are_equal_if_they_store_alike() -> None:
    assert identity(name="a") == identity(name="b")
    assert hash(identity(name="a")) == hash(identity(name="b"))
    assert identity() != identity(bits=np.arange(576)[::-1].copy())
    assert identity() != identity(inverted=[0] * 575 + [1])
    assert identity() != identity(type=Type.IQ4_NL)  # blocks of the same size
    assert identity() != "id"


# ---------------------------------------------------------------- what is refused


def swapped(index: int, value: int, n: int = 576) -> list[int]:
    return [*range(index), value, *range(index + 1, n)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bits": swapped(7, 8)}, "interleaving 'id': not a permutation, bits[8] is the second 8"),
        ({"bits": swapped(7, 576)}, "interleaving 'id': bits[7] is 576, outside of the 576 bits of a run"),
        ({"bits": swapped(7, 70_000)}, "interleaving 'id': numbers outside of uint16"),
        ({"bits": swapped(7, -1)}, "interleaving 'id': numbers outside of uint16"),
        ({"bits": swapped(7, 2**70)}, "bits and inverted must be lists of whole numbers"),
        ({"inverted": [2] + [0] * 575}, "interleaving 'id': inverted[0] is 2, must be 0 or 1"),
        ({"inverted": [0.0] * 576}, "bits and inverted must be lists of whole numbers"),
        ({"inverted": [0] * 575}, "interleaving 'id': 576 bits, but 575 entries that say which are inverted"),
        ({"rows": 8}, "interleaving 'id': a table of 576 bits, but 8 blocks of q4_0 have 1152"),
        ({"rows": 0}, "interleaving 'id': 0 rows, must be 1 to 64"),
        ({"rows": 65}, "interleaving 'id': 65 rows, must be 1 to 64"),
        ({"rows": 2**32 - 1}, "interleaving 'id': type, columns or rows are out of range"),
        ({"type": Type.F16}, "interleaving 'id': type 1 is no quantised type of this ggml"),
        ({"type": 4}, "interleaving 'id': type 4 is no quantised type of this ggml"),
        ({"type": 1000}, "interleaving 'id': type 1000 is no quantised type of this ggml"),
        ({"type": -1}, "interleaving 'id': type -1 is no quantised type of this ggml"),
        ({"bits": [], "inverted": []}, "bits and inverted must be lists of whole numbers"),
        (
            {
                "bits": np.zeros(107_520, np.uint16),
                "inverted": np.zeros(107_520, np.uint8),
                "rows": 64,
                "type": Type.Q6_K,
            },
            "a table of 107520 bits, but 64 blocks of q6_K have 107520 (at most 65536 can be named)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_table_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        identity(**changed)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda: Interleaving.for_target("x86", 2, 32, 8),
            "no target 'x86': plain, x86-avx2, x86-avx512, arm-dotprod or arm-i8mm",
        ),
        (lambda: Interleaving.native(4, 32, 8), "type 4 is none of this ggml"),
        (lambda: Interleaving.native(99, 32, 8), "type 99 is none of this ggml"),
        (lambda: Interleaving.native(2, 33, 8), "a matrix of 33 columns: not a multiple of the block of q4_0, 32"),
        (lambda: Interleaving.native(2, 0, 8), "a matrix of 0 x 8: columns and rows must be at least 1"),
        (lambda: Interleaving.native(2, 32, -8), "a matrix of 32 x -8: columns and rows must be at least 1"),
        (lambda: Interleaving.native(2, 1 << 40, 1 << 40), "a matrix of 1099511627776 x 1099511627776: too large"),
        (lambda: Interleaving.for_target("plain", 2, 1 << 61, 2), "a matrix of 2305843009213693952 x 2: too large"),
        (lambda: Interleaving.native(2, 1 << 64, 8), "type, columns or rows are out of range"),
        (lambda: identity().apply(bytes(72), 64, 4), "interleaving 'id': 64 x 4 is 144 bytes, but the matrix has 72"),
        (lambda: identity().invert(bytes(72), 64, 4), "interleaving 'id': 64 x 4 is 144 bytes, but the matrix has 72"),
        (lambda: identity().apply(b"", 32, 4), "interleaving 'id': 32 x 4 is 72 bytes, but the matrix has 0"),
        (
            lambda: identity().apply(bytes(72), 32, 4, out=np.empty(71, np.uint8)),
            "interleaving 'id': 32 x 4 is 72 bytes, but out has 71",
        ),
        (
            lambda: identity().apply(bytes(72), 31, 4),
            "interleaving 'id': 31 x 4 is not a multiple of 32 columns and 4 rows",
        ),
        (
            lambda: identity().apply(bytes(72), 32, 6),
            "interleaving 'id': 32 x 6 is not a multiple of 32 columns and 4 rows",
        ),
        (lambda: identity().apply(b"", 0, 4), "interleaving 'id': 0 x 4 is not a multiple of 32 columns and 4 rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_impossible_is_refused(ask: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        ask()


@pytest.mark.parametrize("run", ["apply", "invert"])
def test_bytes_are_taken_and_put_where_they_are(run: str) -> None:
    matrix = np.arange(144, dtype=np.uint8)
    out = np.zeros(144, np.uint8)
    assert getattr(identity(), run)(memoryview(matrix), 64, 4, out=out) is out
    assert out.any()
    with pytest.raises(OptionError, match="interleaving 'id': out overlaps the matrix"):
        getattr(identity(), run)(matrix, 64, 4, out=matrix)
    both = np.arange(288, dtype=np.uint8)
    with pytest.raises(OptionError, match="interleaving 'id': out overlaps the matrix"):
        getattr(identity(), run)(both[:144], 64, 4, out=both[100:244])
