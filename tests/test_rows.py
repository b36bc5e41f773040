"""Products with rows: dots have ggml's bits, sums are the same on every instruction set, with one token or many."""

from __future__ import annotations

import errno
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from cffi import FFI

from moestream._native import LIBRARY
from native import ffi as core_ffi
from native import lib as core

Type = gguf.GGMLQuantizationType
Array = npt.NDArray[Any]

ffi = FFI()
ffi.cdef("""
    struct traits_cpu {
        void (*from_float)(const float *x, void *y, int64_t n);
        void (*vec_dot)(int n, float *s, size_t bs, const void *x, size_t bx, const void *y, size_t by, int nrc);
        int vec_dot_type;
        int64_t nrows;
    };
    const struct traits_cpu *ggml_get_type_traits_cpu(int type);
    struct traits {
        const char *type_name;
        int64_t blck_size, blck_size_interleave;
        size_t type_size;
        bool is_quantized;
        void (*to_float)(const void *x, float *y, int64_t n);
    };
    const struct traits *ggml_get_type_traits(int type);
    size_t ggml_quantize_chunk(int type, const float *x, void *y, int64_t start, int64_t rows, int64_t columns, const float *imatrix);
""")
ggml: Any = ffi.dlopen(str(LIBRARY))

SETS = core_ffi.string(core.ms_rows_available()).decode().split()
WITH_DOTS = [t for t in Type if t.value < 40 and ggml.ggml_get_type_traits_cpu(t).vec_dot]
WITH_DOTS = [t for t in WITH_DOTS if t not in (Type.Q8_1, Type.Q8_K)]  # of activations alone
OWN = [Type.Q4_0, Type.Q8_0]
SLOW_TO_QUANTISE = [Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S]


@pytest.fixture(autouse=True)
def best_set_afterwards() -> Iterator[None]:
    yield
    use(SETS[0])


def use(name: str) -> None:
    assert core.ms_rows_use(name.encode()) == 0


def values(rows: int, columns: int, seed: int = 0) -> Array:
    """Rows of very different magnitudes, some with a stretch of zeros that is a block of 32."""
    random = np.random.default_rng(seed)
    found = random.standard_normal((rows, columns)) * 10.0 ** random.integers(-4, 4, (rows, 1))
    for row in range(0, rows, 3):
        at = random.integers(0, columns // 32) * 32
        found[row, at : at + 32] = 0
    return np.ascontiguousarray(found, np.float32)


def pointer(array: Array, kind: str = "uint8_t *") -> Any:
    return ffi.cast(kind, array.ctypes.data)


def any_bytes(type: Type, rows: int, columns: int) -> Array:
    """Blocks of which all is arbitrary but the scale, where it comes first: that is a number."""
    block, size = gguf.GGML_QUANT_SIZES[type]
    blocks = np.random.default_rng(2).integers(0, 256, (rows * (columns // block), size), dtype=np.uint8)
    blocks[:, 1] &= 0xBB
    return blocks.reshape(rows, -1)


def quantised(type: Type, rows: Array) -> Array:
    if type in SLOW_TO_QUANTISE:
        return any_bytes(type, *rows.shape)
    block, size = gguf.GGML_QUANT_SIZES[type]
    out = np.zeros((len(rows), rows.shape[1] // block * size), np.uint8)
    imatrix = np.ones(rows.shape[1], np.float32)
    n = ggml.ggml_quantize_chunk(
        type, pointer(rows, "float *"), pointer(out), 0, *rows.shape, pointer(imatrix, "float *")
    )
    assert n == out.nbytes
    return out


def activations_of(type: Type, rows: Array) -> Array:
    """As the vec_dot of `type` wants them."""
    wanted = Type(ggml.ggml_get_type_traits_cpu(type).vec_dot_type)
    if wanted == Type.F32:
        return rows.view(np.uint8)
    block, size = gguf.GGML_QUANT_SIZES[wanted]
    out = np.zeros((len(rows), rows.shape[1] // block * size), np.uint8)
    for row, into in zip(rows, out, strict=True):
        ggml.ggml_get_type_traits_cpu(wanted).from_float(pointer(row, "float *"), pointer(into), len(row))
    return out


def decoded(type: Type, matrix: Array, columns: int) -> Array:
    if type == Type.F32:
        return matrix.view(np.float32)
    out = np.empty((len(matrix), columns), np.float32)
    for row, into in zip(matrix, out, strict=True):
        ggml.ggml_get_type_traits(type).to_float(pointer(row), pointer(into, "float *"), columns)
    return out


def bits(array: Array) -> list[int]:
    return np.ascontiguousarray(array).view(np.uint32).ravel().tolist()


def cast(kind: str, array: Array | None) -> Any:
    return core_ffi.NULL if array is None else core_ffi.cast(kind, array.ctypes.data)


# ---------------------------------------------------------------- dots


def dots(
    type: Type, columns: int, matrix: Array, rows: Array | None, first: int, n: int, activations: Array
) -> tuple[Array, Array]:
    """The dots, and the floats around them that must not be written: out has a gap behind each activation's."""
    out = np.full((len(activations), n + 3), 7, np.float32)
    core.ms_rows_dot(
        type,
        columns,
        cast("uint8_t *", matrix),
        cast("int32_t *", rows),
        first,
        n,
        cast("uint8_t *", activations),
        activations.shape[1],
        len(activations),
        cast("float *", out),
        out.shape[1],
    )
    return out[:, :n], out[:, n:]


def dots_of_ggml(type: Type, columns: int, rows: Array, activations: Array) -> Array:
    out = np.empty((len(activations), len(rows)), np.float32)
    vec_dot = ggml.ggml_get_type_traits_cpu(type).vec_dot
    for a, activation in enumerate(activations):
        for r, row in enumerate(rows):
            vec_dot(columns, pointer(out[a, r:], "float *"), 0, pointer(row), 0, pointer(activation), 0, 1)
    return out


@pytest.mark.parametrize("type", WITH_DOTS, ids=lambda type: type.name)
@pytest.mark.parametrize("name", SETS)
def test_dots_have_the_bits_of_ggml(name: str, type: Type) -> None:
    use(name)
    for columns in (32, 96, 768, 2048) if gguf.GGML_QUANT_SIZES[type][0] <= 32 else (256, 2048):
        matrix, activations = quantised(type, values(21, columns)), activations_of(type, values(9, columns, 1))
        chosen = np.array([20, 0, 3, 3, 19, 7, 1, 2, 4, 18, 17], np.int32)
        for rows, first, n in (
            (None, 0, 21),
            (None, 2, 8),
            (None, 20, 1),
            (None, 5, 0),
            (chosen, 0, 11),
            (chosen, 0, 1),
        ):
            wanted = matrix[first : first + n] if rows is None else matrix[rows[:n]]
            for many in (1, 2, 3, 4, 5, 9):
                found, around = dots(type, columns, matrix, rows, first, n, activations[:many])
                assert bits(found) == bits(dots_of_ggml(type, columns, wanted, activations[:many]))
                assert (around == 7).all()


@pytest.mark.parametrize("type", OWN, ids=lambda type: type.name)
@pytest.mark.parametrize("name", SETS)
def test_dots_of_any_bytes_have_the_bits_of_ggml(name: str, type: Type) -> None:
    use(name)
    matrix, activations = any_bytes(type, 16, 768), activations_of(type, values(4, 768, 3))
    found, _ = dots(type, 768, matrix, None, 0, 16, activations)
    assert bits(found) == bits(dots_of_ggml(type, 768, matrix, activations))


def test_our_own_dots_are_used_here() -> None:
    own = {"avx512vnni", "avx512", "avx2", "neon-dotprod"}
    for name in SETS:
        use(name)
        expected = f"{name}: q4_0, q8_0" if name in own else f"{name}: ggml's dots"
        assert core_ffi.string(core.ms_rows_kernels()).decode() == expected
    if platform.machine() == "x86_64":
        flags = Path("/proc/cpuinfo").read_text().split()
        assert ("avx2" in SETS) == ("avx2" in flags)
        assert ("avx512vnni" in SETS) == ("avx512_vnni" in flags)
    assert SETS[-1] == "portable"


def test_an_unknown_instruction_set_is_refused() -> None:
    assert core.ms_rows_use(b"mmx") == -errno.ENOTSUP
    assert core_ffi.string(core.ms_rows_kernels()).decode().startswith(f"{SETS[0]}:")


# ---------------------------------------------------------------- weighted sums


def added(type: Type, matrix: Array, columns: int, rows: Array, x: Array, y: Array, begin: int, end: int) -> Array:
    """A copy of y with the sum added, at an address that is no multiple of 8."""
    out = np.empty(columns + 1, np.float32)[1:]
    out[:] = y
    core.ms_rows_add(
        type,
        cast("uint8_t *", matrix),
        columns,
        cast("int32_t *", rows),
        cast("float *", x),
        len(rows),
        begin,
        end,
        cast("float *", out),
    )
    return out


def as_defined(w: Array, x: Array, y: Array) -> Array:
    """y = fma(x, w, y), row after row: the product of two floats is exact in double precision."""
    for row, factor in zip(w, x, strict=True):
        y = (np.float64(factor) * row.astype(np.float64) + y.astype(np.float64)).astype(np.float32)
    return y


SUMMED = [t for t in WITH_DOTS if t not in SLOW_TO_QUANTISE]


@pytest.mark.parametrize("type", SUMMED, ids=lambda type: type.name)
@pytest.mark.parametrize("name", SETS)
def test_sums_are_what_is_defined(name: str, type: Type) -> None:
    use(name)
    block = max(32, gguf.GGML_QUANT_SIZES[type][0])
    columns = 9 * block
    matrix = quantised(type, values(40, columns))
    w, random = decoded(type, matrix, columns), np.random.default_rng(1)
    y = random.standard_normal(columns).astype(np.float32)
    for n in (0, 1, 2, 4, 7, 8, 9, 13, 37):
        rows, x = random.permutation(40)[:n].astype(np.int32), random.standard_normal(n).astype(np.float32)
        for begin, end in ((0, columns), (block, 6 * block), (columns - block, columns), (block, block)):
            found = added(type, matrix, columns, rows, x, y, begin, end)
            expected = y.copy()
            expected[begin:end] = as_defined(w[rows, begin:end], x, y[begin:end])
            assert bits(found) == bits(expected)


def added_for_tokens(type: Type, matrix: Array, columns: int, x: Array, y: Array, begin: int, end: int) -> Array:
    out = y.copy()
    core.ms_rows_add_tokens(
        type,
        cast("uint8_t *", matrix),
        columns,
        x.shape[1],
        cast("float *", x),
        x.shape[1],
        len(x),
        begin,
        end,
        cast("float *", out),
        out.shape[1],
    )
    return out


@pytest.mark.parametrize("type", [*OWN, Type.F32, Type.F16, Type.Q4_1, Type.Q6_K], ids=lambda type: type.name)
@pytest.mark.parametrize("name", SETS)
def test_many_tokens_get_what_one_gets(name: str, type: Type) -> None:
    use(name)
    columns = 3 * 256 if type == Type.Q6_K else 672
    matrix, random = quantised(type, values(70, columns)), np.random.default_rng(1)
    begin, end = gguf.GGML_QUANT_SIZES[type][0], columns
    for tokens in (1, 5, 15, 16, 66):
        x = random.standard_normal((tokens, 70)).astype(np.float32) * (random.random((tokens, 70)) < 0.3)
        y = random.standard_normal((tokens, columns)).astype(np.float32)
        found = added_for_tokens(type, matrix, columns, x, y, begin, end)
        for t in range(tokens):
            rows = np.flatnonzero(x[t]).astype(np.int32)
            assert bits(found[t]) == bits(added(type, matrix, columns, rows, x[t, rows], y[t], begin, end))


@pytest.mark.parametrize("name", SETS)
def test_rows_that_no_token_wants_are_not_looked_at(name: str) -> None:
    use(name)
    matrix = quantised(Type.Q8_0, values(40, 256))
    matrix[7].view(np.uint16)[::17] = 0x7C00  # scales that are infinite: 0 times one is not a number
    x = np.ones((3, 40), np.float32)
    x[:, 7] = 0
    assert np.isfinite(added_for_tokens(Type.Q8_0, matrix, 256, x, np.zeros((3, 256), np.float32), 0, 256)).all()
    x[1, 7] = 1
    found = added_for_tokens(Type.Q8_0, matrix, 256, x, np.zeros((3, 256), np.float32), 0, 256)
    assert np.isfinite(found[[0, 2]]).all() and not np.isfinite(found[1]).all()
