"""TMEM: accumulator layouts and the shapes of ld, st and cp, against the ISA's figures."""

from __future__ import annotations

import numpy as np
import pytest
from tests.accumulator_index import accumulator_index

from ptxemu.memory.tmem import (
    COPY_SHAPES,
    DataPath,
    accumulator_blocks,
    data_path,
    fragment,
    scale_blocks,
    split_address,
)


def test_addresses_are_lane_and_column() -> None:
    assert split_address(0x0020_0101) == (32, 257)


@pytest.mark.parametrize(
    ("m", "group", "ws", "path", "element", "cell"),
    [
        (256, 2, False, DataPath.A, (127, 63), (127, 63)),
        (128, 2, False, DataPath.B, (5, 40), (69, 8)),
        (128, 1, False, DataPath.D, (127, 63), (127, 63)),
        (128, 1, True, DataPath.D, (3, 63), (3, 63)),
        (64, 1, True, DataPath.E, (63, 31), (63, 31)),
        (64, 1, True, DataPath.E, (63, 32), (127, 0)),
        (64, 1, False, DataPath.F, (15, 3), (15, 3)),
        (64, 1, False, DataPath.F, (16, 3), (32, 3)),
        (64, 1, False, DataPath.F, (63, 63), (111, 63)),
        (32, 1, True, DataPath.G, (31, 15), (31, 15)),
        (32, 1, True, DataPath.G, (1, 48), (97, 0)),
    ],
)
def test_accumulator_layouts(
    m: int, group: int, ws: bool, path: DataPath, element: tuple[int, int], cell: tuple[int, int]
) -> None:
    assert data_path(m, group, ws) is path
    lanes, columns = accumulator_index(path, 64)
    assert (lanes[element], columns[element]) == cell
    assert lanes.shape == (m // group, 64)
    cells = {(int(a), int(b)) for a, b in zip(lanes.flat, columns.flat, strict=True)}
    assert len(cells) == lanes.size


def test_there_is_no_layout_for_other_shapes() -> None:
    assert data_path(256, 1, False) is None
    assert data_path(64, 2, False) is None


def test_half_of_the_lanes_are_left_out_only_by_layout_f() -> None:
    assert [p for p in DataPath if p.half_lanes] == [DataPath.F]
    assert [b.lane for b in accumulator_blocks(DataPath.F, 8)] == [0, 32, 64, 96]


def _figure(shape: str) -> np.ndarray:
    """thread and register of every cell of .x1, as the figures of "tcgen05.ld" draw them: an array
    (lanes, columns) of (thread, register)."""
    height = 32 if shape == "32x32b" else 16
    width = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 1}[shape]
    drawn = np.full((height, width, 2), -1)
    for lane in range(height):
        for column in range(width):
            thread, register = {
                "32x32b": (lane, 0),
                # rows 0-7: threads 0, 2 of each quad; rows 8-15: threads 1, 3
                "16x64b": (4 * (lane % 8) + 2 * column + lane // 8, 0),
                # a quad holds a row of 4 columns; r0 rows 0-7, r1 rows 8-15
                "16x128b": (4 * (lane % 8) + column, lane // 8),
                # a thread holds 2 neighbouring columns in r0, r1 and, 8 rows below, in r2, r3
                "16x256b": (4 * (lane % 8) + column // 2, column % 2 + 2 * (lane // 8)),
                "16x32bx2": (lane, 0),
            }[shape]
            drawn[lane, column] = thread, register
    return drawn


@pytest.mark.parametrize("shape", ["32x32b", "16x64b", "16x128b", "16x256b"])
@pytest.mark.parametrize("repeat", [1, 2, 8])
def test_fragments_are_the_figures_of_the_isa(shape: str, repeat: int) -> None:
    drawn = _figure(shape)
    registers_of_one = int(drawn[..., 1].max()) + 1
    cells = fragment(shape, repeat)
    assert cells.lanes.shape == (registers_of_one * repeat, 32)
    for copy in range(repeat):
        for lane, column in np.ndindex(*drawn.shape[:2]):
            thread, register = drawn[lane, column]
            r = register + copy * registers_of_one
            assert cells.lanes[r, thread] == lane
            assert cells.columns[r, thread] == column + copy * drawn.shape[1]


def test_16x32bx2_splits_the_halves_of_the_warp() -> None:
    cells = fragment("16x32bx2", 2, split=64)
    assert cells.lanes[1].tolist() == [*range(16), *range(16)]
    assert cells.columns[1].tolist() == [1] * 16 + [65] * 16
    assert [(r.column, r.columns) for r in cells.rectangles] == [(0, 2), (64, 2)]


@pytest.mark.parametrize("shape", ["32x32b", "16x64b", "16x128b", "16x256b"])
def test_packed_registers_are_pairs_of_neighbouring_columns(shape: str) -> None:
    plain, packed = fragment(shape, 2), fragment(shape, 2, True)
    assert np.array_equal(packed.columns, 2 * plain.columns)
    assert np.array_equal(packed.lanes, plain.lanes)
    assert packed.rectangles[0].columns == 2 * plain.rectangles[0].columns


@pytest.mark.parametrize("shape", ["32x32b", "16x64b", "16x128b", "16x256b"])
def test_rectangles_are_the_cells(shape: str) -> None:
    cells = fragment(shape, 4)
    (part,) = cells.rectangles
    assert len(set(zip(cells.lanes.flat, cells.columns.flat, strict=True))) == (
        part.lanes * part.columns
    )
    assert cells.lanes.max() == part.lanes - 1
    assert cells.columns.max() == part.columns - 1


@pytest.mark.parametrize(
    ("shape", "row", "lanes"),
    [
        (("128x256b", ""), 100, [100]),
        (("4x256b", ""), 3, [96]),
        (("64x128b", "warpx2::02_13"), 40, [40, 104]),
        (("64x128b", "warpx2::01_23"), 5, [5, 37]),
        (("64x128b", "warpx2::01_23"), 40, [72, 104]),
        (("32x128b", "warpx4"), 7, [7, 39, 71, 103]),
    ],
)
def test_copies_go_to_these_lanes(shape: tuple[str, str], row: int, lanes: list[int]) -> None:
    assert sorted(COPY_SHAPES[shape].lanes[:, row].tolist()) == lanes


def test_scale_factors_of_data_path_b_have_two_halves() -> None:
    assert [b.lanes for b in scale_blocks(128, False)] == [(0, 32, 64, 96)]
    low, high = scale_blocks(256, True)
    assert (low.row, low.count, low.lanes) == (0, 128, (0, 32))
    assert (high.row, high.count, high.lanes) == (128, 128, (64, 96))
