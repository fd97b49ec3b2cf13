"""The end of an item: its rows of O, and lse."""

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.fragments import pack
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import BF16, ROWS
from flashdsa.kernels.attention.sm90.decode.key_rows.dealt import Math
from flashdsa.kernels.attention.sm90.decode.key_rows.lanes import (
    first_head,
    head_of,
    offset_of_head,
    reduce_keys,
)
from flashdsa.kernels.attention.sm90.decode.key_rows.plan import CONSUMERS, WARPS
from flashdsa.kernels.attention.sm90.decode.many_heads.math import Registers
from flashdsa.kernels.attention.sm90.decode.many_heads.plan import TOPS_PITCH
from flashdsa.kernels.attention.sm90.decode.many_heads.products import COUNT
from flashdsa.kernels.attention.sm90.decode.many_heads.softmax import (
    LANE_HEADS,
    load_pairs,
    state_of,
)
from flashdsa.kernels.attention.sm90.decode.shared.combine import factor_and_lse, first_row
from flashdsa.kernels.attention.sm90.decode.shared.context import meet_consumers
from flashdsa.kernels.attention.sm90.decode.shared.exchange import rows_of_item
from flashdsa.kernels.attention.sm90.decode.shared.plan import GROUP_BYTES
from flashdsa.kernels.attention.sm90.decode.shared.words import power_of_two, store_word


@cute.jit
def send_rows(role: Math, r: Registers) -> None:
    """Write the item's rows: each consumer stages its dims of them in bf16, where keys were; a
    thread sends a row by a bulk copy."""
    ctx, w = role.ctx, role.output
    store_sums(role, r)
    # all_read: nobody reads keys or Q any more; all sums are stored.
    meet_consumers(ctx.memory.all_read)
    if role.consumer == 0:
        store_factors(role, r)
    # factors_full: the heads' factors are stored.
    meet_consumers(ctx.memory.factors_full)
    stage_dims(role, r)
    # The bulk copies read what threads have staged.
    cute.arch.fence_proxy("async.shared", space="cta")
    # staged: all dims of all rows are.
    meet_consumers(ctx.memory.staged)
    if role.consumer == 0:
        if ctx.thread < rows_of_item(w):
            row = (first_row(w) + ctx.thread) * ctx.plan.tile.d_v
            prims.cp_async_bulk_global_shared_cta(
                (w.out.iterator + row).to_llvm_ptr(),
                (ctx.memory.k.bytes() + ctx.thread * ctx.plan.row_bytes).to_llvm_ptr(),
                ctx.plan.tile.d_v * BF16,
            )
        cute.arch.cp_async_bulk_commit_group()
        # Shared memory must last until it has been read.
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def sums_of(role: Math) -> cute.Tensor:
    """Each warp's sums, where its maxima of a tile were, which the consumer has read."""
    return role.ctx.memory.tops.array(Float32, CONSUMERS * WARPS * TOPS_PITCH)


@cute.jit
def store_sums(role: Math, r: Registers) -> None:
    """Store the warp's sums."""
    warp, lane = role.ctx.thread // WARP_SIZE, role.ctx.thread % WARP_SIZE
    first = (role.consumer * WARPS + warp) * TOPS_PITCH + first_head(lane)
    for number in cutlass.range_constexpr(LANE_HEADS):
        total = reduce_keys(r.heads.totals[number], lambda a, b: a + b)
        if lane < 4:
            sums_of(role)[first + offset_of_head(number)] = total


@cute.jit
def store_factors(role: Math, r: Registers) -> None:
    """A thread a head: store the factor of its O, and write its lse."""
    ctx, w = role.ctx, role.output
    head = ctx.thread
    if head < ROWS:
        total, factor = Float32(0.0), Float32(0.0)
        for warp in cutlass.range_constexpr(CONSUMERS * WARPS):
            total = total + sums_of(role)[warp * TOPS_PITCH + head]
        if head < rows_of_item(w):
            factor, lse = factor_and_lse(w, state_of(ctx)[head], total, ctx.head + head)
            (w.lse.iterator + (first_row(w) + head)).store(lse)
        # Values are times a power of two.
        unit = power_of_two(-r.heads.power[0])
        ctx.memory.row_unit.array(Float32, ROWS)[head] = factor * unit


@cute.jit
def stage_dims(role: Math, r: Registers) -> None:
    """Stage this consumer's dims of the rows in bf16: a lane has two neighbouring ones of a head
    and a block."""
    ctx, plan = role.ctx, role.ctx.plan
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    factors = load_pairs(ctx.memory.row_unit.address(), lane)
    group = role.consumer * (plan.dim_groups // CONSUMERS) + 2 * warp + lane // 16
    to = ctx.memory.k.address() + group * GROUP_BYTES + lane // 4 % 4 * 4
    to = to + first_head(lane) * plan.row_bytes
    for number in cutlass.range_constexpr(LANE_HEADS):
        for block in cutlass.range_constexpr(plan.blocks):
            pair = [r.out[COUNT * block + i] for i in range(COUNT) if head_of(i) == number]
            word = pack(pair[0] * factors[number], pair[1] * factors[number])
            if factors[number] == 0.0:
                word = Int32(0)  # O may be NaN
            at = offset_of_head(number) * plan.row_bytes + block * (ROWS * BF16)
            store_word(to + at, word)
