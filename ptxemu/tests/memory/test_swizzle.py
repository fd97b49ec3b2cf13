"""Swizzles: the permutation of bytes that the ISA's tables show."""

import numpy as np
import pytest

from ptxemu.descriptors.swizzle import PERIOD, Swizzle, swizzled

EVERY = list(Swizzle)
BYTES = np.arange(4 * PERIOD, dtype=np.int64)


@pytest.mark.parametrize("swizzle", EVERY)
def test_every_byte_stays_in_its_row_and_gets_a_place_of_its_own(swizzle: Swizzle) -> None:
    placed = swizzled(BYTES, swizzle)
    span = max(swizzle.span, 16)
    assert np.array_equal(np.sort(placed), BYTES)
    assert np.array_equal(placed // span, BYTES // span)


@pytest.mark.parametrize("swizzle", EVERY)
def test_pattern_repeats_with_the_period(swizzle: Swizzle) -> None:
    assert np.array_equal(swizzled(BYTES + PERIOD, swizzle), swizzled(BYTES, swizzle) + PERIOD)


@pytest.mark.parametrize(
    ("swizzle", "chunk", "first_chunk_of_row"),
    [
        (Swizzle.B32, 16, [0, 0, 0, 0, 1, 1, 1, 1]),
        (Swizzle.B64, 16, [0, 0, 1, 1, 2, 2, 3, 3]),
        (Swizzle.B128, 16, [0, 1, 2, 3, 4, 5, 6, 7]),
        (Swizzle.B128_ATOM_32B, 32, [0, 1, 2, 3, 0, 1, 2, 3]),
        (Swizzle.B128_ATOM_64B, 64, [0, 1, 0, 1, 0, 1, 0, 1]),
    ],
)
def test_first_chunk_of_each_row_moves_as_in_the_tables_of_the_isa(
    swizzle: Swizzle, chunk: int, first_chunk_of_row: list[int]
) -> None:
    rows = np.arange(8, dtype=np.int64) * swizzle.span
    assert ((swizzled(rows, swizzle) - rows) // chunk).tolist() == first_chunk_of_row


def test_flip_swaps_the_halves_of_every_chunk_in_odd_rows() -> None:
    atoms = swizzled(BYTES, Swizzle.B128_ATOM_32B)
    flipped = swizzled(BYTES, Swizzle.B128_ATOM_32B_FLIP_8B)
    odd = BYTES // 128 % 2 == 1
    assert np.array_equal(flipped[~odd], atoms[~odd])
    assert np.array_equal(flipped[odd], atoms[odd] ^ 8)


@pytest.mark.parametrize("swizzle", EVERY)
def test_hardware_codes_name_the_swizzle(swizzle: Swizzle) -> None:
    assert Swizzle.of(swizzle.mode, swizzle.atomicity) is swizzle
