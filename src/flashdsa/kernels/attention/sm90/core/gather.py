"""Copy halves of a tile of keys into shared memory, a row's chunk by eight lanes."""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.cp_async import COPY_BYTES, arrive_when_copied, copy_units
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import (
    BF16,
    CHUNK,
    CHUNK_BYTES,
    CHUNKS,
    D_QK,
    LEFT_PIECES,
    PIECE_CHUNKS,
    RIGHT_PIECES,
    STEP_KEYS,
    TILE_BYTES,
    TILE_KEYS,
)

UNITS = CHUNK * BF16 // COPY_BYTES
"""Copies of a row of a chunk, each by a lane."""
ROWS_AT_ONCE = WARPGROUP_SIZE // UNITS
"""Rows of which the role copies a chunk by one instruction."""
TURNS = TILE_KEYS // ROWS_AT_ONCE
SLOTS_A_LANE = STEP_KEYS // WARP_SIZE
HALVES = (
    (0, "left_free", LEFT_PIECES),
    (0, "right_free", RIGHT_PIECES),
    (1, "right_free", RIGHT_PIECES),
    (1, "left_free", LEFT_PIECES),
)
"""Tile, barrier and pieces of each half, in the order in which the consumers free them."""


@cute.jit
def copy_half(
    role: Any, rows: list[Int32], to: Int32, unit: Int32, half: cutlass.Constexpr
) -> None:
    """Copy this thread's part of a half; each piece is announced when it has come."""
    tile, _, pieces = HALVES[half]
    for piece in pieces:
        chunks = range(piece * PIECE_CHUNKS, min((piece + 1) * PIECE_CHUNKS, CHUNKS))
        for turn in cutlass.range_constexpr(TURNS):
            row = rows[tile * TURNS + turn]
            at = tile * TILE_BYTES + turn * ROWS_AT_ONCE * CHUNK * BF16
            copy_units(
                to,
                role.kv.iterator + (Int64(row) * D_QK + unit * (COPY_BYTES // BF16)),
                row,
                [(at + chunk * CHUNK_BYTES, chunk * CHUNK * BF16) for chunk in chunks],
            )
        arrive_when_copied(role.ctx.barriers(f"k{tile}_full").at(piece))
