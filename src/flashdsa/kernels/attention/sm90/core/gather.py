"""Copies of keys and Q into shared memory: halves of a tile, a row of a chunk by eight lanes."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl.cp_async import COPY_BYTES, arrive_when_copied, copy_units
from flashdsa.dsl.pipeline import Barriers, PipelineState, RingProducer
from flashdsa.dsl.row_tiles import ROWS_AT_ONCE, UNITS
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.dsl.tma import load_box
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.context import StepContext
from flashdsa.kernels.attention.sm90.core.tile import BF16, CHUNK, ROWS, Tile
from flashdsa.plan.row_tiles import ROW_BYTES


class Half(NamedTuple):
    """A half of a tile of a step."""

    tile: int
    high: bool
    slices: tuple[int, ...]


def halves_of_step(tile: Tile) -> tuple[Half, ...]:
    """The halves in the order in which the consumers free them."""
    low, high = (False, tile.low_slices), (True, tile.high_slices)
    return Half(0, *low), Half(0, *high), Half(1, *high), Half(1, *low)


class Copies(NamedTuple):
    """This thread's part of each copy: 16 bytes of a row of a chunk."""

    to: Int32  # address in the first chunk of tile 0
    row: Int32  # of the rows that the role copies by one instruction
    unit: Int32  # of the 16-byte units of a row of a chunk


def copies_of_thread(ctx: StepContext) -> Copies:
    """The thread's part."""
    unit, row = ctx.thread % UNITS, ctx.thread // UNITS
    return Copies(ctx.memory.k.address() + swizzled_128(row, unit), row, unit)


def turns_of(tile: Tile) -> int:
    """Instructions by which the role copies a chunk."""
    return tile.keys // ROWS_AT_ONCE


def row_of_turn(slots: list[Int32], turn: int, number: Any) -> Any:
    """The kv row of which this thread copies 16 bytes: that of number `number` of a turn's keys.
    `slots`: the lane's: lane, lane + 32, ..."""
    return cute.arch.shuffle_sync(
        slots[turn * ROWS_AT_ONCE // WARP_SIZE], turn * ROWS_AT_ONCE % WARP_SIZE + number
    )


def tile_full(ctx: StepContext, tile: int) -> Barriers:
    """The barrier that says that slices of a tile have come."""
    return ctx.memory.k1_full if tile else ctx.memory.k0_full


def acquire(ctx: StepContext, half: Half, phase: Any) -> None:
    """Wait until the consumer has read the half in the step before, and with it the masks."""
    memory = ctx.memory
    free = memory.high_free if half.high else memory.low_free
    RingProducer(tile_full(ctx, half.tile), free).acquire(PipelineState(Int32(half.tile), phase))


@cute.jit
def copy_half(
    ctx: StepContext, first: Any, rows: list[Int32], copies: Copies, half: cutlass.Constexpr
) -> None:
    """Copy this thread's part of a half; each slice is announced when it has come. `first`: pointer
    to the first row of the tile's source, (rows, d_qk) bf16, or a function that gives it and the
    row of a source for a joint row. `rows`: one a turn of both tiles. `half`: number of the half in
    `halves_of_step`."""
    geometry = ctx.plan.tile
    tile, _, slices = halves_of_step(geometry)[half]
    turns = turns_of(geometry)
    for slice_ in slices:
        chunks = geometry.chunks_of(slice_)
        for turn in cutlass.range_constexpr(turns):
            row = rows[tile * turns + turn]
            origin, of_source = first(row) if callable(first) else (first, row)
            at = tile * geometry.bytes + turn * ROWS_AT_ONCE * ROW_BYTES
            copy_units(
                copies.to,
                origin + (Int64(of_source) * geometry.d_qk + copies.unit * (COPY_BYTES // BF16)),
                row,
                [(at + chunk * geometry.chunk_bytes, chunk * ROW_BYTES) for chunk in chunks],
            )
        arrive_when_copied(tile_full(ctx, tile).at(slice_))


def map_query(q: cute.Tensor) -> Any:
    """Tensor map of Q, (S, H, d_qk) or (rows, d_qk): a box is 64 rows of all chunks."""
    *outer, rows, d_qk = q.shape
    *outer_strides, pitch, _ = q.stride
    shape = *outer, d_qk // CHUNK, rows, CHUNK
    stride = *outer_strides, CHUNK, pitch, 1
    box = *(1 for _ in outer), d_qk // CHUNK, ROWS, CHUNK
    return tensor_map.create_tensor_map_tiled_from_view(
        cute.make_tensor(q.iterator, cute.make_layout(shape, stride=stride)),
        box_dims=box,
        stride_order=tuple(reversed(range(len(box)))),
        swizzle=tensor_map.TensorMapSwizzle.s128b,
    )


def load_query(ctx: StepContext, q_map: Any, coordinates: list[Any]) -> None:
    """One thread, after it has announced Q's bytes: load an item's rows; those past the last one
    become zeros. One instruction: nine take 750 clocks to issue. `q_map`: result of `map_query`.
    `coordinates`: of the first row, the row's number first."""
    row, *outer = coordinates
    load_box(ctx.memory.q.bytes(), q_map, [0, row, 0, *outer], ctx.memory.q_full.at())
