"""Q and dO of an item's 64 rows into shared memory, by the warps of role right."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.cp_async import COPY_BYTES, arrive_when_copied, copy_units
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.sparse_mla.sm90.bwd.fused.context import Context
from flashdsa.kernels.sparse_mla.sm90.bwd.fused.plan import (
    HALF_BYTES,
    HALF_ROWS,
    ROPE_PLACE,
    ROWS_CHUNK_BYTES,
    V_CHUNKS,
)
from flashdsa.kernels.sparse_mla.sm90.bwd.spool import BLOCK_ROWS
from flashdsa.kernels.sparse_mla.sm90.fwd.plan import BF16, CHUNK, D_QK, D_V

UNITS = CHUNK * BF16 // COPY_BYTES
ROWS_AT_ONCE = WARPGROUP_SIZE // UNITS
TURNS = BLOCK_ROWS // ROWS_AT_ONCE


class Rows(NamedTuple):
    """Fills rows. Signals rows_full."""

    ctx: Context
    q: cute.Tensor  # (S * H, 576) bf16
    do: cute.Tensor  # (S * H, 512) bf16


@cute.jit
def copy_rows(role: Rows, item: Int32) -> None:
    """This thread's copies of an item; zeros of a query that names no key, or is not there."""
    ctx = role.ctx
    present = ctx.lists.present[ctx.group_of(item)]
    unit, own = ctx.thread % UNITS, ctx.thread // UNITS
    to = ctx.arena.address("rows") + swizzled_128(own, unit)
    for turn in cutlass.range_constexpr(TURNS):
        in_block = turn * ROWS_AT_ONCE + own
        none = ((present >> (in_block * ctx.plan.queries // BLOCK_ROWS)) & 1) - 1
        row = Int64(item) * BLOCK_ROWS + in_block
        half, line = divmod(turn * ROWS_AT_ONCE, HALF_ROWS)
        first = 2 * half * HALF_BYTES + line * CHUNK * BF16
        places = [
            (first + chunk * ROWS_CHUNK_BYTES, chunk * CHUNK * BF16) for chunk in range(V_CHUNKS)
        ]
        rope = ROPE_PLACE + half * HALF_BYTES + line * CHUNK * BF16, D_V * BF16
        copy_units(to, unit_of(role.q, row, unit, D_QK), none, [*places, rope])
        copy_units(to + HALF_BYTES, unit_of(role.do, row, unit, D_V), none, places)
    arrive_when_copied(ctx.barriers("rows_full").at())


def unit_of(of: cute.Tensor, row: Any, unit: Any, dims: int) -> Any:
    """Pointer to a row's 16 bytes of that number."""
    return of.iterator + (row * dims + unit * (COPY_BYTES // BF16))
