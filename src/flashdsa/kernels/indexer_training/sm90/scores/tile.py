"""Scores of a tile of 64 keys, whose rows go from device memory straight into registers.

Keys are rows of the products and heads are columns: a lane has two keys, g and g + 8 of its warp's
16, and of each a quarter of the columns and of the heads.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.experimental import primitives as prims

from flashdsa.dsl.smem import shared_pointer
from flashdsa.dsl.warp import neighbours_sum
from flashdsa.dsl.wgmma import along_k, descriptor_behind, mma_async
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer_training.sm90.scores.plan import BF16, FP32, TILE_KEYS
from flashdsa.kernels.indexer_training.sm90.scores.query import (
    QUAD,
    UNIT_BYTES,
    UNITS,
    load_unit,
)
from flashdsa.plan.row_tiles import ROW_BYTES
from flashdsa.problem import INDEX_HEAD_DIM

WARP_KEYS = 16
HEADS_APART = 8
"""Columns of a product from a lane's two to its next two."""
HALF = 8
"""Keys between the two of a lane."""
LOADS = UNITS // QUAD
"""16-byte pieces of a row that a lane reads."""
WORDS = 2 * LOADS * 4
"""Words of a lane's two rows."""
MMA_BYTES = 32
"""Bytes of a row of Q that one wgmma multiplies: 16 columns."""


class Stretch(NamedTuple):
    """A CTA's slots of a query."""

    indices: cute.Tensor  # (S, topk) int32
    keys: cute.Tensor  # (S_kv, 128) bf16
    query: Int32
    slots: Int32  # of the query, that may be valid
    thread: Int32

    @property
    def first_key(self) -> Int32:
        """This lane's first key of a tile."""
        return self.thread // WARP_SIZE * WARP_KEYS + self.thread % WARP_SIZE // QUAD


@cute.jit
def read_slots(ctx: Stretch, tile: Int32) -> list[Int32]:
    """Read the slots of this lane's two keys; -1 after the last one in use.

    The values are not used here: their first use waits until they have come.
    """
    first = tile * TILE_KEYS + ctx.first_key
    line = ctx.indices.iterator + Int64(ctx.query) * ctx.indices.shape[1]
    slots = []
    for half in cutlass.range_constexpr(2):
        slot = Int32(-1)
        if first + half * HALF < ctx.slots:
            slot = (line + (first + half * HALF)).load()
        slots.append(slot)
    return slots


@cute.jit
def rows_of(ctx: Stretch, slots: list[Int32]) -> list[Int32]:
    """Rows of the two keys; -1 where a slot is not valid."""
    keys = Uint32(ctx.keys.shape[0])
    rows = []
    for half in cutlass.range_constexpr(2):
        slot = slots[half]
        rows.append(slot if Uint32(slot) < keys else Int32(-1))
    return rows


@cute.jit
def load_keys(ctx: Stretch, rows: list[Int32], words: cute.Tensor) -> None:
    """Load this lane's words of its two keys; where a slot is not valid those of row 0."""
    for half in cutlass.range_constexpr(2):
        row = cutlass.max(rows[half], Int32(0))
        first = ctx.keys.iterator + (
            Int64(row) * INDEX_HEAD_DIM + ctx.thread % QUAD * (UNIT_BYTES // BF16)
        )
        for number in cutlass.range_constexpr(LOADS):
            unit = load_unit(first + number * (QUAD * UNIT_BYTES // BF16))
            for word in cutlass.range_constexpr(4):
                words[(half * LOADS + number) * 4 + word] = unit[word]


def multiply(acc: Any, words: Any, q: Any, num_heads: int) -> None:
    """Compute acc = K Q^T of the tile, as one group of wgmmas; wait for it.

    Args:
        acc: num_heads / 2 fp32. words: of `load_keys`. q: shared memory address of `store_query`'s.
    """
    warpgroup.fence()
    for number in range(LOADS):
        low = along_k(q + number // 2 * (num_heads * ROW_BYTES))
        for step in range(2):
            first, second = (
                [words[(half * LOADS + number) * 4 + 2 * step + i] for i in range(2)]
                for half in range(2)
            )
            values = mma_async(
                f"wgmma.mma_async.sync.aligned.m64n{num_heads}k16.f32.bf16.bf16",
                [acc[i] for i in range(num_heads // 2)],
                [first[0], second[0], first[1], second[1]],
                descriptor_behind(low, (number % 2 * 2 + step) * MMA_BYTES),
                accumulate=(number, step) != (0, 0),
                transposes=(0,),
            )
            for i in range(num_heads // 2):
                acc[i] = values[i]
    warpgroup.commit_group()
    warpgroup.wait_group(0)


@cute.jit
def sum_heads(acc: cute.Tensor, weights: Int32, num_heads: cutlass.Constexpr) -> list[Float32]:
    """sum weights relu(acc) over every head, for this lane's two keys; in all lanes of the quad.

    Args:
        weights: shared memory address of those of this lane's first two heads.
    """
    # Each key has two sums: each waits for the one before for half as long.
    sums = [[Float32(0.0), Float32(0.0)] for _ in range(2)]
    for eight in cutlass.range_constexpr(num_heads // HEADS_APART):
        two = prims.load_ext(
            shared_pointer(weights + eight * (HEADS_APART * FP32)), dtype=Float32, count=2
        )
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(2):
                positive = cute.arch.fmax(acc[4 * eight + 2 * half + i], Float32(0.0))
                sums[half][i] = positive * two[i] + sums[half][i]
    return [neighbours_sum(one[0] + one[1], QUAD) for one in sums]


@cute.jit
def write_scores(
    ctx: Stretch, out: cute.Tensor, tile: Int32, rows: list[Int32], sums: list[Float32]
) -> None:
    """Write a tile's scores: two lanes of each quad write one each."""
    lane = ctx.thread % QUAD
    slot = tile * TILE_KEYS + ctx.first_key + lane * HALF
    if lane < 2 and slot < ctx.indices.shape[1]:
        # A selection: values that are not valid may be NaN.
        row = rows[1] if lane == 1 else rows[0]
        score = sums[1] if lane == 1 else sums[0]
        score = score if row >= 0 else -Float32(float("inf"))
        (out.iterator + (Int64(ctx.query) * ctx.indices.shape[1] + slot)).store(score)
