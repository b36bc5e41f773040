"""The checksum of records is CRC-32C, by whatever way this machine computes it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from laid_reader import crc32c as definition
from moestream.layout.interleaving import crc32c
from native import ffi, lib

STRETCH = 2048  # three of these are summed at a time
CHECKED_SIZES = [*range(40), 255, 4096, 3 * STRETCH - 1, 3 * STRETCH, 3 * STRETCH + 9, 6 * STRETCH + 7, 100_001]


def portable(data: bytes | memoryview, crc: int = 0) -> int:
    return lib.ms_crc32c_portable(crc, ffi.from_buffer(data), len(data))


@pytest.mark.parametrize("compute", [crc32c, portable])
@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
    ids=["nothing", "digits", "zeros", "ones", "ascending"],
)  # the last three are RFC 3720's, B.4
def test_known_values(compute, data: bytes, crc: int) -> None:
    assert compute(data) == crc


@pytest.mark.parametrize("size", CHECKED_SIZES)
def test_both_ways_follow_the_definition_wherever_the_bytes_begin(size: int) -> None:
    data = random.Random(size).randbytes(size + 8)
    for begin in range(8):
        here = memoryview(data)[begin : begin + size]
        assert crc32c(here) == portable(here)
    assert crc32c(data[:size]) == definition(data[:size])


@pytest.mark.parametrize("compute", [crc32c, portable])
def test_a_checksum_goes_on_from_that_of_what_came_before(compute) -> None:
    data = random.Random(0).randbytes(5 * STRETCH)
    for cut in (0, 1, 7, 8, STRETCH, 3 * STRETCH + 3, len(data)):
        assert compute(data[cut:], compute(data[:cut])) == compute(data)


def test_one_changed_bit_changes_it() -> None:
    data = bytearray(random.Random(1).randbytes(3 * STRETCH))
    before = crc32c(data)
    for bit in (0, STRETCH * 8 + 5, len(data) * 8 - 1):
        data[bit // 8] ^= 1 << bit % 8
        assert crc32c(data) != before
        data[bit // 8] ^= 1 << bit % 8
    assert crc32c(data) == before


def test_it_takes_any_buffer() -> None:
    values = np.arange(100, dtype=np.float32)
    assert crc32c(values.view(np.uint8)) == crc32c(values.tobytes()) == crc32c(memoryview(values.tobytes()))


def test_the_instruction_is_used_where_the_cpu_has_it() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    expected = "sse4.2" if "sse4_2" in flags else "arm crc" if "crc32" in flags else "tables"
    assert ffi.string(lib.ms_crc32c_way()).decode() == expected
