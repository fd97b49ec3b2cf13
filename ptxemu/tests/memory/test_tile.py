"""Tiles and swizzles: which elements of a box are inside, and where rows land."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxemu.descriptors.swizzle import PERIOD, Swizzle, swizzled
from ptxemu.descriptors.tensor_map import TensorMap
from ptxemu.memory.tile import box_shape, clip, landing

# Tiles: which elements of a box are inside the tensor, and where rows land in shared memory.

ADDRESS = 0x1000


@st.composite
def boxes(draw: st.DrawFn) -> tuple[TensorMap, tuple[int, ...]]:
    rank = draw(st.integers(1, 4))

    def each(low: int, high: int, count: int = rank) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=count, max_size=count)))

    made = TensorMap(
        ADDRESS,
        "u16",
        each(1, 12),
        tuple(16 * stride for stride in each(0, 40, rank - 1)),
        (8, *each(1, 5, rank - 1)),
        each(1, 4),
    )
    return made, each(-7, 14)


@given(boxes())
def test_tile_is_the_elements_of_the_box_inside_the_tensor(
    case: tuple[TensorMap, tuple[int, ...]],
) -> None:
    made, at = case
    steps = (1, *made.element_strides[1:])
    expected = {}
    for index in itertools.product(*(range(n) for n in made.landed)):
        where = [c + i * s for c, i, s in zip(at, index, steps, strict=True)]
        if all(0 <= w < n for w, n in zip(where, made.dims, strict=True)):
            byte = 2 * where[0] + sum(w * s for w, s in zip(where[1:], made.strides, strict=True))
            expected[index[::-1]] = ADDRESS + byte
    tile = clip(made, at)
    if tile is None:
        assert not expected
        return
    found = {}
    rows = list(itertools.product(*(range(s.start, s.stop) for s in tile.within[:-1])))
    first = tile.within[-1].start // 2
    for row, start in zip(rows, tile.row_starts().tolist(), strict=True):
        for k in range(tile.row_bytes // 2):
            found[(*row, first + k)] = start + 2 * k
    assert found == expected
    assert tile.start == min(expected.values())
    assert tile.extent == max(expected.values()) + 2 - tile.start
    if len(set(expected.values())) < len(expected):
        assert tile.may_overlap
    if tile.is_contiguous:
        assert tile.extent == 2 * len(expected)
    assert box_shape(made) == (*made.landed[:0:-1], 16)


@given(
    st.sampled_from(list(Swizzle)),
    st.integers(1, 8),
    st.integers(1, 20),
    st.integers(0, 7).map(lambda n: 128 * n),
)
def test_rows_land_where_the_swizzle_puts_their_bytes(
    swizzle: Swizzle, chunks: int, rows: int, phase: int
) -> None:
    span = 0 if swizzle is Swizzle.NONE else swizzle.span
    row_bytes = min(16 * chunks, span or 128)
    pitch = max(row_bytes, span)
    where = landing(row_bytes, rows, pitch, swizzle, phase)
    linear = phase + np.arange(rows)[:, None] * pitch + np.arange(row_bytes)
    placed = swizzled(linear.reshape(-1).astype(np.int64), swizzle)
    units = where.units[:, None] * where.unit + np.arange(where.unit)
    assert np.array_equal(units.reshape(-1), placed)
    pieces = where.starts[:, None] + np.arange(where.size)
    assert np.array_equal(np.sort(pieces.reshape(-1)), np.sort(placed))
    assert where.end == placed.max() + 1
    assert where.is_linear == (swizzle is Swizzle.NONE)


def test_full_swizzled_rows_are_one_piece() -> None:
    where = landing(128, 16, 128, Swizzle.B128, 0)
    assert (where.starts.tolist(), where.size) == ([0], 2048)
    assert PERIOD % 128 == 0


# Swizzles: the permutation of bytes that the ISA's tables show.

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
