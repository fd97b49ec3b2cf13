"""Role score: each of two warpgroups has 64 rows of Q and dO, and makes P and dS of their tiles.

Q is in shared memory and dO in registers. P and dS go straight to the spool: a quad has 8 keys of 4
neighbouring rows once the warp has transposed its accumulators, which are of rows in the order of
`row_of`. dS is made from P in fp32. The two warpgroups run on their own; the second one starts when
the first has issued a tile's products, so that one's softmax runs during the other's products.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.cp_async import COPY_BYTES, copy_units
from flashdsa.dsl.gmem import store2
from flashdsa.dsl.pipeline import PipelineState, advanced
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.dsl.warp_matrix import pack_bf16, transpose_8x8
from flashdsa.dsl.wgmma import along_k
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.context import Context, release, tiles_of
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.plan import (
    BATCH_CHUNKS,
    BF16,
    BLOCK_BYTES,
    CHUNK,
    CHUNK_BYTES,
    CHUNKS,
    D_QK,
    D_V,
    ITEM_BLOCKS,
    V_CHUNKS,
    WARP_ROWS,
)
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.products import (
    A_WORDS,
    MMA_K,
    OF_TILE,
    STEPS,
    multiply_chunk,
)
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import IMAGE_BYTES, P_IMAGE, image_offset
from flashdsa.kernels.attention.sm90.core.tile import ROWS, TILE_KEYS

LOG2_E = 1.4426950408889634
SECOND_STARTS, Q_READY = 1, 2
"""Named barriers; Q_READY is the first of two, one for each warpgroup."""
UNITS = CHUNK * BF16 // COPY_BYTES
KEY_BLOCKS = TILE_KEYS // 8
"""Matrices of 8 keys in a tile."""


class Scorer(NamedTuple):
    """Reads k; writes q and the spool. Signals k_free."""

    ctx: Context
    q: cute.Tensor  # (S * H, 576) bf16
    do: cute.Tensor  # (S * H, 512) bf16
    lse: cute.Tensor  # (S * H,) fp32, natural, sinks in it
    delta: cute.Tensor  # (S * H,) fp32
    spool: cute.Tensor  # (row blocks, bytes) uint8
    heads: Int32
    sm_scale: Float32
    block_of_item: Int32  # this warpgroup's, 0 or 1


class Rows(NamedTuple):
    """This thread's values of its two rows, and the destination of its part of a tile."""

    do: cute.Tensor  # (128,) Int32: wgmma's A of all columns
    lse_log2: list[Float32]
    scaled_delta: list[Float32]  # delta * sm_scale
    members: Any  # pointer to this lane's first entry in the group's list
    member: Int32  # the query of the warp's first row
    images: Any  # pointer to this thread's part of the first tile's P


def row_of(mma_row: Any) -> Any:
    """The row of the block that is row `mma_row` of the MMA, so that each quad has four
    neighbours."""
    of_half = mma_row % 8
    return mma_row // WARP_ROWS * WARP_ROWS + of_half // 2 * 4 + mma_row // 8 % 2 * 2 + of_half % 2


@cute.jit
def load_q(role: Scorer, first_row: Int32, to: Int32) -> None:
    """Load this warpgroup's 64 rows of Q; those past the last one are copies of it."""
    last = role.q.shape[0] - 1
    for turn in cutlass.range_constexpr(ROWS * UNITS // WARPGROUP_SIZE):
        place = turn * WARPGROUP_SIZE + role.ctx.thread
        mma_row, unit = place // UNITS, place % UNITS
        row = cutlass.min(first_row + row_of(mma_row), last)
        source = role.q.iterator + (Int64(row) * D_QK + unit * (COPY_BYTES // BF16))
        chunks = [(chunk * CHUNK_BYTES, chunk * CHUNK * BF16) for chunk in range(CHUNKS)]
        copy_units(to + swizzled_128(mma_row, unit), source, Int32(0), chunks)
    cute.arch.cp_async_commit_group()


@cute.jit
def load_do(role: Scorer, do: cute.Tensor, rows: list[Int32]) -> None:
    """Load dO of this thread's two rows, as wgmma takes A from registers."""
    lane = role.ctx.thread % WARP_SIZE
    sources = [
        cute.recast_ptr(role.do.iterator + (Int64(row) * D_V + lane % 4 * 2), dtype=Int32)
        for row in rows
    ]
    for step in cutlass.range_constexpr(V_CHUNKS * STEPS):
        for i in cutlass.range_constexpr(A_WORDS):
            words = (step * MMA_K + i // 2 * 8) * BF16 // 4
            do[A_WORDS * step + i] = (sources[i % 2] + words).load()


@cute.jit
def start_item(role: Scorer, item: Int32, do: cute.Tensor) -> Rows:
    """Load Q to shared memory, the rest to registers; return when all of the warpgroup has."""
    ctx = role.ctx
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    block = item * ITEM_BLOCKS + role.block_of_item
    own = Q_READY + role.block_of_item
    # The warpgroup's products with the item before are done, in all four warps.
    cute.arch.barrier(barrier_id=own, number_of_threads=WARPGROUP_SIZE)
    load_q(role, block * ROWS, ctx.arena.address("q") + role.block_of_item * BLOCK_BYTES)
    last = role.q.shape[0] - 1
    mma_row = warp * WARP_ROWS + lane // 4
    rows = [cutlass.min(block * ROWS + row_of(mma_row + 8 * half), last) for half in range(2)]
    load_do(role, do, rows)
    lse = [role.lse[row] * Float32(LOG2_E) for row in rows]
    delta = [role.delta[row] * role.sm_scale for row in rows]
    group = ctx.group_of(item)
    capacity = ctx.lists.rows.shape[1]
    in_group = block % ctx.row_blocks * ROWS + warp * WARP_ROWS
    members = ctx.lists.members.iterator + (Int64(group) * capacity + lane)
    # Row row_of(16 w + 4 c) of the block, where quads' lane c has its four rows.
    unit = 2 * warp + lane % 4 // 2
    images = role.spool.iterator + (
        image_offset(Int64(block), 0, role.spool.shape[1], P_IMAGE)
        + swizzled_128(lane // 4, unit)
        + lane % 2 * 8
    )
    cute.arch.cp_async_wait_group(0)
    # cp.async wrote Q through the generic proxy -> wgmma reads it through the asynchronous one.
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=own, number_of_threads=WARPGROUP_SIZE)
    return Rows(do, lse, delta, members, in_group // role.heads, images)


@cute.jit
def read_members(role: Scorer, rows: Rows, tile: Int32) -> list[Int32]:
    """Bit k of word h: this thread's query names key 32 h + k of the tile."""
    lane = role.ctx.thread % WARP_SIZE
    found = []
    for word in cutlass.range_constexpr(TILE_KEYS // WARP_SIZE):
        bits = Int32((rows.members + (tile * TILE_KEYS + word * WARP_SIZE)).load())
        named = Int32(cute.arch.vote_ballot_sync((bits >> rows.member) & 1 == 1))
        if cutlass.const_expr(role.ctx.plan.split_warps):
            # Rows row_of(0-3) are of the warp's first 8 rows in both halves, and so on.
            second = Int32(cute.arch.vote_ballot_sync((bits >> (rows.member + 1)) & 1 == 1))
            named = second if lane >= WARP_SIZE // 2 else named
        found.append(named)
    return found


@cute.jit
def issue_products(
    role: Scorer, s: cute.Tensor, dp: cute.Tensor, do: cute.Tensor, at: PipelineState
) -> None:
    """Issue S and dP of a tile, a group of wgmmas a batch; free the chunks of all but the last
    one."""
    ctx = role.ctx
    ring = ctx.arena.consumer("k_full", "k_free")
    q = along_k(ctx.arena.address("q") + role.block_of_item * BLOCK_BYTES)
    keys = ctx.arena.address("k")
    for batch in cutlass.range_constexpr(CHUNKS // BATCH_CHUNKS):
        chunks = range(batch * BATCH_CHUNKS, (batch + 1) * BATCH_CHUNKS)
        places = [advanced(at, chunk, ctx.plan.slots) for chunk in chunks]
        for place in places:
            # k_full: the chunk has been copied by threads; the fence shows it to wgmma.
            ring.wait(place)
        cute.arch.fence_proxy("async.shared", space="cta")
        warpgroup.fence()
        for chunk, place in zip(chunks, places, strict=True):
            k = along_k(keys + place.stage * CHUNK_BYTES)
            multiply_chunk(s, dp, q, do, k, chunk)
        warpgroup.commit_group()
        if cutlass.const_expr(batch > 0):
            warpgroup.wait_group(1)
            release_batch(ctx, at, batch - 1)


@cute.jit
def release_batch(ctx: Context, at: PipelineState, batch: cutlass.Constexpr) -> None:
    """Arrive: this warp has read a batch's chunks."""
    cute.arch.sync_warp()
    for chunk in cutlass.range_constexpr(batch * BATCH_CHUNKS, (batch + 1) * BATCH_CHUNKS):
        release(ctx, "k_free", advanced(at, chunk, ctx.plan.slots).stage)


def let_second_start(role: Scorer, number: Int32) -> None:
    """The first warpgroup, once: arrive without a branch, as wgmmas are under way."""
    cute.arch.inline_ptx(
        "{ .reg .pred first; setp.eq.b32 first, {$r0}, 0; "
        f"@first bar.arrive {SECOND_STARTS}, {ITEM_BLOCKS * WARPGROUP_SIZE}; }}",
        read_only_args=[number | role.block_of_item],
    )


@cute.jit
def write_tile(
    role: Scorer, rows: Rows, s: cute.Tensor, dp: cute.Tensor, named: list[Int32], tile: Int32
) -> None:
    """Write P and dS of the tile to the spool; exact zeros where a key is not named."""
    lane = role.ctx.thread % WARP_SIZE
    scale = role.sm_scale
    scale_log2 = scale * Float32(LOG2_E)
    masks = [word >> (lane % 4 * 2) for word in named]
    images = cute.recast_ptr(rows.images + Int64(tile) * (2 * IMAGE_BYTES), dtype=Int32)
    for block in cutlass.range_constexpr(KEY_BLOCKS):
        mask = masks[block // 4] >> (block % 4 * 8)
        words = []
        for half in cutlass.range_constexpr(2):
            p, ds = [], []
            for i in cutlass.range_constexpr(2):
                place = 4 * block + 2 * half + i
                exponent = s[place] * scale_log2 - rows.lse_log2[half]
                p_value = cute.math.exp2(exponent, fastmath=True)
                ds_value = p_value * (dp[place] * scale - rows.scaled_delta[half])
                # A selection: values of keys that are not named may be NaN.
                mine = (mask >> i) & 1 == 1
                p.append(p_value if mine else Float32(0.0))
                ds.append(ds_value if mine else Float32(0.0))
            words.append((transpose_8x8(pack_bf16(*p)), transpose_8x8(pack_bf16(*ds))))
        to = images + block * 8 * (ROWS * BF16) // 4
        store2(to, words[0][0], words[1][0])
        store2(to + IMAGE_BYTES // 4, words[0][1], words[1][1])


@cute.jit
def score_all(role: Scorer) -> None:
    """All four warps of a warpgroup: score every tile of its row blocks."""
    ctx = role.ctx
    s = cute.make_rmem_tensor(OF_TILE, Float32)
    dp = cute.make_rmem_tensor(OF_TILE, Float32)
    do = cute.make_rmem_tensor(V_CHUNKS * STEPS * A_WORDS, Int32)
    at = PipelineState(Int32(0), Int32(0))
    number = Int32(0)
    for item in cutlass.range(ctx.first_item, ctx.num_items, ctx.num_ctas, unroll=1):
        rows = start_item(role, item, do)
        for tile in cutlass.range(tiles_of(ctx, ctx.group_of(item)), unroll=1):
            if number == 0 and role.block_of_item == 1:
                cute.arch.barrier(
                    barrier_id=SECOND_STARTS, number_of_threads=ITEM_BLOCKS * WARPGROUP_SIZE
                )
            named = read_members(role, rows, tile)
            issue_products(role, s, dp, do, at)
            let_second_start(role, number)
            warpgroup.wait_group(0)
            release_batch(ctx, at, CHUNKS // BATCH_CHUNKS - 1)
            write_tile(role, rows, s, dp, named, tile)
            at = advanced(at, CHUNKS, ctx.plan.slots)
            number += 1
