"""Tiles of rows that slots name, copied from device memory by a warpgroup through a ring.

A tile is 64 rows in chunks [64 rows][64 bf16] with the 128-byte swizzle, one after the other: what
wgmma takes along K. A row of a chunk is eight times 16 bytes, each copied by a lane: a warpgroup
copies 16 rows at once.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.cp_async import COPY_BYTES, arrive_when_copied, copy_units
from flashdsa.dsl.pipeline import PipelineState, RingProducer
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.plan.row_tiles import CHUNK_BYTES, ROW_BYTES, TILE_ROWS

UNITS = ROW_BYTES // COPY_BYTES
ROWS_AT_ONCE = WARPGROUP_SIZE // UNITS
TURNS = TILE_ROWS // ROWS_AT_ONCE
"""Rows of a tile of which a thread copies parts."""


def row_sources(keys: cute.Tensor, rows: list[Int32], unit: Int32) -> list[Any]:
    """Pointers to this thread's 16 bytes, number `unit`, of the first chunk of each row.

    Args:
        keys: (any, width) of two bytes. rows: any numbers; negative ones are not accessed.
    """
    width = keys.shape[1]
    return [keys.iterator + (Int64(row) * width + unit * (COPY_BYTES // 2)) for row in rows]


@cute.jit
def copy_piece(
    ring: RingProducer,
    at: PipelineState,
    to: Int32,
    sources: list[Any],
    rows: list[Int32],
    chunks: cutlass.Constexpr,
) -> PipelineState:
    """Copy this thread's part of neighbouring chunks of a tile into the slot `at`; return the next.

    Args:
        to: shared memory address of this thread's 16 bytes of the ring's first row.
        sources: see `row_sources`. rows: `TURNS` of them; negative ones give zeros.
        chunks: their numbers, a range; a slot has room for that many.
    """
    # The slot's readers are done with what it held before.
    ring.acquire(at)
    for turn in cutlass.range_constexpr(TURNS):
        places = [
            (turn * ROWS_AT_ONCE * ROW_BYTES + i * CHUNK_BYTES, chunk * ROW_BYTES)
            for i, chunk in enumerate(chunks)
        ]
        copy_units(to + at.stage * (len(chunks) * CHUNK_BYTES), sources[turn], rows[turn], places)
    arrive_when_copied(ring.full.at(at.stage))
    return at.advanced()
