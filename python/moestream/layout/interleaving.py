"""Interleavings: how the fast kernels of a machine want the rows of a matrix stored, and the bytes' checksum.

    table = Interleaving.native(type=2, columns=2048, rows=768)
    if table:
        interleaved = table.apply(plain, 2048, 768)

What an interleaving is, docs/layout.md says under *Forms of a part*.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .._native import check, ffi, lib, text
from ..errors import ModelError, MoestreamError, OptionError

__all__ = ["TARGETS", "Interleaving", "crc32c", "native_target"]

TARGETS = ("plain", "x86-avx2", "x86-avx512", "arm-dotprod", "arm-i8mm")
"""Machines that a file can be laid for."""

Bytes: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[np.uint8]"


class Interleaving:
    """A permutation of the bits in runs of blocks, some of them inverted.

    Made by `native`, `for_target` or `from_table`; it never changes, and any thread may use it. Two are equal if they
    store every matrix alike, whatever their names.

    Attributes:
        name: For people, such as ``"q4_0 8x8"``.
        type: The ggml type it is for.
        rows: How many rows are interleaved with each other.
        bits: u16, the source of each bit of a run; read-only.
        inverted: u8, 1 where the bit is inverted; read-only.
    """

    def __init__(self, pointer: Any) -> None:
        self._pointer = ffi.gc(pointer, lib.ms_permutation_free)
        told = lib.ms_permutation_describe(pointer)
        self.name = text(told.name)
        self.type = int(told.type)
        self.rows = int(told.rows)
        self._block_columns = int(told.block_columns)
        self.bits = np.frombuffer(ffi.buffer(told.bits, 2 * told.n_bits), np.uint16).copy()
        self.inverted = np.frombuffer(ffi.buffer(told.inverted, told.n_bits), np.uint8).copy()
        self.bits.flags.writeable = self.inverted.flags.writeable = False

    @classmethod
    def native(cls, type: int, columns: int, rows: int) -> Interleaving | None:
        """How the running ggml stores a matrix of this type and shape for its fast kernels.

        Returns:
            None where it leaves the rows plain.

        Raises:
            OptionError: No such type or shape.
        """
        return cls._made(OptionError, "interleaving", lib.ms_permutation_native, type, columns, rows)

    @classmethod
    def for_target(cls, target: str, type: int, columns: int, rows: int) -> Interleaving | None:
        """How ggml stores it on a machine of `TARGETS`.

        Returns:
            None where it leaves the rows plain, and for K-quants where this machine's ggml does not store them as that
            one does: their tables can be made only by a ggml that follows them.

        Raises:
            OptionError: No such target, type or shape.
        """
        return cls._made(
            OptionError,
            f"interleaving for {target}",
            lib.ms_permutation_for_target,
            target.encode(),
            type,
            columns,
            rows,
        )

    @classmethod
    def from_table(
        cls,
        name: str,
        type: int,
        rows: int,
        bits: npt.ArrayLike,
        inverted: npt.ArrayLike,
    ) -> Interleaving:
        """An interleaving as a file has it.

        Raises:
            ModelError: The table is no permutation, not of the length that type and rows want, or these are impossible.
        """
        moves, inversions = np.asarray(bits), np.asarray(inverted)
        for array, kind in ((moves, np.uint16), (inversions, np.uint8)):
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise ModelError(f"interleaving {name!r}: bits and inverted must be lists of whole numbers")
            if array.size and not 0 <= array.min() <= array.max() <= np.iinfo(kind).max:
                raise ModelError(f"interleaving {name!r}: numbers outside of {np.dtype(kind).name}")
        if len(moves) != len(inversions):
            raise ModelError(
                f"interleaving {name!r}: {len(moves)} bits, but {len(inversions)} entries that say which are inverted"
            )
        moves, inversions = np.ascontiguousarray(moves, np.uint16), np.ascontiguousarray(inversions, np.uint8)
        made = cls._made(
            ModelError,
            f"interleaving {name!r}",
            lib.ms_permutation_from_table,
            name.encode("utf-8", "surrogateescape"),  # as file names and keys are read: any bytes
            type,
            rows,
            ffi.from_buffer("uint16_t[]", moves),
            ffi.from_buffer("uint8_t[]", inversions),
            len(moves),
        )
        assert made is not None
        return made

    @classmethod
    def _made(cls, error: type[MoestreamError], what: str, call: Any, *args: Any) -> Interleaving | None:
        out = ffi.new("ms_permutation **")
        try:
            check(call, *args, out, error=error)
        except OverflowError as overflow:
            raise error(f"{what}: type, columns or rows are out of range: {overflow}") from overflow
        return cls(out[0]) if out[0] else None

    def apply(
        self, plain: Bytes, columns: int, rows: int, *, out: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[np.uint8]:
        """A matrix with its rows interleaved.

        Args:
            plain: Its bytes, as in a stock GGUF.
            columns: ne[0].
            rows: ne[1].
            out: Where to put the bytes; new memory if None.

        Raises:
            OptionError: The shape does not fit the interleaving, the bytes not the shape, or `out` overlaps `plain`.
        """
        return self._run(lib.ms_permutation_apply, plain, columns, rows, out)

    def invert(
        self, interleaved: Bytes, columns: int, rows: int, *, out: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[np.uint8]:
        """The plain bytes again, of what `apply` gave; arguments and errors as there."""
        return self._run(lib.ms_permutation_invert, interleaved, columns, rows, out)

    def _run(
        self, call: Any, given: Bytes, columns: int, rows: int, out: npt.NDArray[np.uint8] | None
    ) -> npt.NDArray[np.uint8]:
        size_bytes = self._matrix_bytes(columns, rows)
        source = np.frombuffer(given, np.uint8)
        result = np.empty(size_bytes, np.uint8) if out is None else out
        for what, array in (("the matrix", source), ("out", result)):
            if array.nbytes != size_bytes:
                raise OptionError(
                    f"interleaving {self.name!r}: {columns} x {rows} is {size_bytes} bytes, but {what} has {array.nbytes}"
                )
        if np.may_share_memory(source, result):
            raise OptionError(f"interleaving {self.name!r}: out overlaps the matrix")
        call(
            self._pointer,
            ffi.from_buffer("uint8_t[]", source),
            ffi.from_buffer("uint8_t[]", result, require_writable=True),
            columns,
            rows,
        )
        return result

    def _matrix_bytes(self, columns: int, rows: int) -> int:
        if columns < 1 or columns % self._block_columns or rows < 1 or rows % self.rows:
            raise OptionError(
                f"interleaving {self.name!r}: {columns} x {rows} is not a multiple of {self._block_columns} columns and {self.rows} rows"
            )
        return columns // self._block_columns * (rows // self.rows) * (len(self.bits) // 8)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Interleaving):
            return NotImplemented
        return bool(lib.ms_permutation_equal(self._pointer, other._pointer))

    def __hash__(self) -> int:
        return hash((self.type, self.rows, self.bits.tobytes(), self.inverted.tobytes()))

    def __repr__(self) -> str:
        return f"<Interleaving {self.name}>"


def native_target() -> str:
    """Which of `TARGETS` this machine is, as its ggml sees it; ``"plain"`` if none of the others."""
    return text(lib.ms_native_target())


def crc32c(data: Bytes, crc: int = 0) -> int:
    """The CRC-32C (Castagnoli) of bytes that go on from those whose checksum is `crc`."""
    view = ffi.from_buffer("uint8_t[]", data)
    return int(lib.ms_crc32c(crc, view, len(view)))
