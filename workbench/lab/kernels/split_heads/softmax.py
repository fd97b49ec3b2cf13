"""Role softmax: S and dS of the own heads, into tensor memory; dQ's way out.

P and dP lie in 16 of a warp's 32 lanes, so a thread takes 16 keys of a head. S^T and dS^T lie with
lane = key, dS with lane = head, so each goes through shared memory to the threads of its lanes.
"""

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Vector, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl import tmem
from flashdsa.dsl.memory import Region
from flashdsa.dsl.smem import VECTOR, load_words, store_float, store_words
from flashdsa.dsl.swizzle import swizzled_64, swizzled_128
from flashdsa.dsl.tmem import arrive_after_tcgen05, wait_then_tcgen05
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm100.bwd import softmax
from flashdsa.kernels.attention.sm100.bwd.load import Context, load_lane, store_lane
from flashdsa.kernels.attention.sm100.core.tile import BF16, PAIR_ROWS
from workbench.lab.kernels.split_heads.load import UNITS, lane_of
from workbench.lab.kernels.split_heads.plan import HEADS

NAMED_BARRIER = 1
OWN = 16
"""Keys of a thread: lanes of a warp below 16 have the first half of the block's."""


def head_of(thread: Any) -> Any:
    """The head, of the CTA's 64, whose scores a thread takes."""
    return thread // WARP_SIZE * OWN + thread % OWN


@cute.jit
def store_transposed(ctx: Context, matrix: Region, words: Any) -> None:
    """Store a thread's keys, two a word, to rows of 64 heads a key: neighbouring lanes have
    neighbouring heads, and take one key of two each."""
    odd, head = ctx.thread & 1, head_of(ctx.thread)
    for i in cutlass.range_constexpr(OWN // 2):
        own = Int32(words[i])
        got = Int32(cute.arch.shuffle_sync_bfly(own, 1))
        word = (own & 0xFFFF) | (got << 16)
        if odd == 1:
            word = ((got >> 16) & 0xFFFF) | (own & -0x10000)
        key = lane_of(ctx) // OWN * OWN + 2 * i + odd
        at = swizzled_128(key, head // UNITS) + head % UNITS // 2 * 4
        store_float(matrix.address() + at, word.bitcast(Float32))


@cute.jit
def store_own(ctx: Context, words: Any) -> None:
    """Store a thread's keys of dS to its head's row."""
    for unit in cutlass.range_constexpr(OWN // UNITS):
        at = swizzled_64(head_of(ctx.thread), lane_of(ctx) // OWN * 2 + unit)
        own = [words[VECTOR * unit + i] for i in range(VECTOR)]
        store_words(ctx.memory.ds_rows.address() + at, own)


@cute.jit
def row_to_tmem(ctx: Context, region: cutlass.Constexpr[str], places: Any) -> None:
    """Store 16-byte pieces of the shared memory of that name, at these places, to this thread's
    lane of the region."""
    words = []
    for place in places:
        got = load_words(getattr(ctx.memory, region).address() + place, Int32)
        words += [got[i] for i in range(VECTOR)]
    store_lane(ctx, region, Vector.from_elements(words, Int32))


@cute.jit
def transposed_to_tmem(ctx: Context, region: cutlass.Constexpr[str]) -> None:
    """Store key `lane`'s row of S^T or dS^T to this thread's lane: all four warps store all."""
    row_to_tmem(ctx, region, [swizzled_128(lane_of(ctx), unit) for unit in range(UNITS)])


@cute.jit
def load_scores(ctx: Context, region: cutlass.Constexpr[str]) -> Any:
    """Load this thread's keys of P or dP."""
    column = ctx.plan.tmem.column(region)
    return tmem.load_half_lanes(ctx.tmem, column, ctx.thread, OWN, OWN)


def sync_role() -> None:
    """Wait for all threads of the role."""
    cute.arch.barrier(barrier_id=NAMED_BARRIER, number_of_threads=WARPGROUP_SIZE)


@cute.jit
def softmax_one(role: softmax.Softmax, block: Int32) -> None:
    """Compute S and dS of a block."""
    ctx, memory = role.ctx, role.ctx.memory
    valid = softmax.valid_keys(ctx, block) >> (lane_of(ctx) // OWN * OWN)
    # p_ready of this block: P's MMAs are done, whose columns may be read until s_ready; and all
    # MMAs that were issued before, so that S's and dS's columns may be written.
    wait_then_tcgen05(memory.p_ready, block)
    s = softmax.exponentials(role, load_scores(ctx, "p"), valid, OWN)
    store_transposed(ctx, memory.s, softmax.packed(s))
    # All of S^T is in shared memory, until the next block's: its writers pass the barrier of dS
    # first, which comes after this S^T has been read.
    sync_role()
    tmem.after_sync()
    transposed_to_tmem(ctx, "s")
    tmem.wait_stored()
    arrive_after_tcgen05(memory.s_ready)

    # dp_ready of this block: likewise; dP may be read until ds_ready.
    wait_then_tcgen05(memory.dp_ready, block)
    dp = load_scores(ctx, "dp")
    ds = softmax.packed([s[key] * (dp[key] - role.delta) * role.scale for key in range(OWN)])
    ds = softmax.zero_unless(valid & 0xFFFF != 0, ds, OWN // 2)
    store_transposed(ctx, memory.ds, ds)
    store_own(ctx, ds)
    # All of dS is in shared memory, until the next block's: see above, with the barrier of S.
    sync_role()
    tmem.after_sync()
    transposed_to_tmem(ctx, "ds")
    units = range(ctx.plan.tile.keys * BF16 // 16)
    row_to_tmem(ctx, "ds_rows", [swizzled_64(ctx.thread % HEADS, unit) for unit in units])
    tmem.wait_stored()
    arrive_after_tcgen05(memory.ds_ready)


@cute.jit
def softmax_all(role: softmax.Softmax) -> None:
    """Take every block."""
    for block in cutlass.range(role.ctx.num_blocks, unroll=1):
        softmax_one(role, block)


@cute.jit
def stage_columns(
    ctx: Context, region: cutlass.Constexpr[str], first: cutlass.Constexpr[int], dim: Int32
) -> None:
    """Store COLUMNS columns of a region, from `first` on, to the head's dims from `dim` on."""
    words = load_lane(ctx, region, softmax.COLUMNS, first).to(BFloat16).bitcast(Int32)
    row = ctx.memory.dq.address() + ctx.thread % HEADS * ctx.plan.dq_row_bytes
    for unit in cutlass.range_constexpr(softmax.COLUMNS // UNITS):
        own = [words[VECTOR * unit + i] for i in range(VECTOR)]
        store_words(row + dim * BF16 + unit * 16, own)


@cute.jit
def send_dq(ctx: Context, dq: Any) -> None:
    """Send dQ of the own heads: TMEM -> shared memory -> dq (S * 128, 576) bf16, a bulk copy a
    head."""
    plan, tile = ctx.plan, ctx.plan.tile
    # dq_ready: every MMA is done, so dQ may be read, and where Q and dO lay may be written.
    wait_then_tcgen05(ctx.memory.dq_ready, 0)
    upper, half = ctx.thread // HEADS, plan.part_dims // 2
    for first in cutlass.range_constexpr(0, plan.part_dims, softmax.COLUMNS):
        dim = first // half * plan.part_dims + upper * half + first % half
        stage_columns(ctx, "dq", first, dim)
    stage_columns(ctx, "dq_rope", 0, tile.d_v + upper * tile.own_rope_dims)
    # generic writes above -> the bulk copies read through the async proxy
    cute.arch.fence_proxy("async.shared", space="cta")
    sync_role()
    if lane_of(ctx) < OWN:
        head = head_of(ctx.thread)
        row = Int64(ctx.item) * PAIR_ROWS + ctx.cta_rank * HEADS + head
        prims.cp_async_bulk_global_shared_cta(
            (dq.iterator + row * tile.d_qk).to_llvm_ptr(),
            (ctx.memory.dq.bytes() + head * plan.dq_row_bytes).to_llvm_ptr(),
            tile.d_qk * BF16,
        )
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0)
