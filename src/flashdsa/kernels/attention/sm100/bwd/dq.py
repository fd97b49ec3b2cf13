"""The end of an item: dQ from TMEM to global memory, 32 bytes of a row at a time a thread.

Thread = lane = row. No part of dQ passes through shared memory, into which the next item's Q and dO
come meanwhile.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Int32, Int64, cute

from flashdsa.dsl.gmem import store8
from flashdsa.dsl.tmem import wait_then_tcgen05
from flashdsa.kernels.attention.sm100.bwd.context import Context, load_lane
from flashdsa.kernels.attention.sm100.bwd.plan import B_H, D_QK, D_V

COLUMNS = 32
"""Columns that are read at once: fp32, which become 16 words of bf16."""
WORDS = 8
"""Words of a store, a whole sector of the second-level cache."""


class DqWriter(NamedTuple):
    """Reads dq and dq_rope once dq_ready says that every MMA of dQ is done."""

    ctx: Context
    dq: Any  # (S * H, 576) bf16, device memory


@cute.jit
def write_columns(
    role: DqWriter, region: cutlass.Constexpr[str], first: cutlass.Constexpr[int], dim: Int32
) -> None:
    """Write COLUMNS columns of a region, from `first` on, to the row's dims from `dim` on."""
    ctx = role.ctx
    words = load_lane(ctx, region, COLUMNS, first).to(BFloat16).bitcast(Int32)
    row = Int64(ctx.item) * B_H + ctx.thread
    at = role.dq.iterator + row * D_QK + dim
    # The last group has no rows after its last query.
    if row < role.dq.shape[0]:
        for word in cutlass.range_constexpr(0, COLUMNS // 2, WORDS):
            store8(at + 2 * word, [words[word + i] for i in range(WORDS)])


@cute.jit
def write_dq(role: DqWriter) -> None:
    """Write all of a row's dims of this CTA."""
    ctx, plan = role.ctx, role.ctx.plan
    # dq_ready, of this item: its last MMA of dQ is done, so dQ may be read until ds_ready of the
    # next item's first block.
    wait_then_tcgen05(ctx.barriers("dq_ready"), ctx.turn.items_before)
    for first in cutlass.range_constexpr(0, plan.dims, COLUMNS):
        write_columns(role, "dq", first, ctx.cta_rank * plan.dims + first)
    for first in cutlass.range_constexpr(0, plan.own_rope_dims, COLUMNS):
        write_columns(role, "dq_rope", first, D_V + ctx.cta_rank * plan.own_rope_dims + first)
