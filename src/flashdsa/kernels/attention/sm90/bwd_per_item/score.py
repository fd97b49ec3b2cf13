"""Role score: S, dP, P and dS of each tile, and the left dims of dQ.

Keys are M and rows are N: S^T and dP^T of 32 rows are one product of the keys with those rows of Q
and of dO, which lie one after the other. P and dS go to shared memory as images [key][row].
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.fragments import MMA_K, MMA_ROWS
from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.pipeline import arrive_warp
from flashdsa.dsl.smem import load_words, store_float
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.dsl.warp_matrix import pack_bf16
from flashdsa.dsl.wgmma import along_k, along_n, descriptor_behind, mma_async
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.bwd_per_item.context import Context, tile_behind, tiles_of
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import (
    HALF_BYTES,
    HALF_ROWS,
    LEFT_CHUNKS,
    ORDER,
    ROPE_PLACE,
    ROWS_CHUNK_BYTES,
    V_CHUNKS,
)
from flashdsa.kernels.attention.sm90.bwd_per_item.store import store_dq
from flashdsa.kernels.attention.sm90.core.backward import multiply
from flashdsa.kernels.attention.sm90.core.tile import BF16, CHUNK, CHUNK_BYTES, ROWS, TILE_KEYS

LOG2_E = 1.4426950408889634
STATISTICS_READY = 1
"""Named barrier of the role."""
STEPS = CHUNK // MMA_K
OF_HALF = HALF_ROWS // 2
"""fp32 of S, and of dP, in a thread."""
PRODUCTS = 2
PRODUCT_CHUNKS = LEFT_CHUNKS // PRODUCTS
"""Chunks of dQ of a product, each a group of wgmmas."""
STEP_BYTES = MMA_K * CHUNK * BF16
"""Bytes from 16 keys of an image or a chunk to the next 16."""
HALVES = 2


class Scorer(NamedTuple):
    """Reads k and rows; writes p, ds, statistics, dQ.

    Signals scores_full, k_free_left, rows_free.
    """

    ctx: Context
    lse: cute.Tensor  # (S * H,) fp32, natural, sinks in it
    delta: cute.Tensor  # (S * H,) fp32
    dq: cute.Tensor  # (S * H, 576) bf16
    sm_scale: Float32


@cute.jit
def write_statistics(role: Scorer, item: Int32) -> None:
    """Write the statistics of rows 2 i and 2 i + 1: lse / ln 2 of both, then delta * sm_scale of
    both."""
    ctx = role.ctx
    if ctx.thread < ROWS:
        row = cutlass.min(item * ROWS + ctx.thread, role.lse.shape[0] - 1)
        to = ctx.arena.address("statistics") + (ctx.thread // 2 * 16 + ctx.thread % 2 * 4)
        store_float(to, role.lse[row] * Float32(LOG2_E))
        store_float(to + 8, role.delta[row] * role.sm_scale)
    cute.arch.barrier(barrier_id=STATISTICS_READY, number_of_threads=WARPGROUP_SIZE)


@cute.jit
def issue_half(role: Scorer, acc: cute.Tensor, number: Int32, half: cutlass.Constexpr) -> None:
    """Issue S^T and dP^T of 32 rows as one group: acc has 16 fp32 of the one and then of the
    other."""
    ctx = role.ctx
    keys = opaque(along_k(ctx.arena.address("k")))
    rows = opaque(along_k(ctx.arena.address("rows")))
    for chunk in ORDER:
        if cutlass.const_expr(half == 0):
            # k_full: the chunk has been copied by threads; the fence shows it to wgmma.
            ctx.barriers("k_full").wait_round(number, chunk)
            cute.arch.fence_proxy("async.shared", space="cta")
        has_v = chunk < V_CHUNKS
        place = chunk * ROWS_CHUNK_BYTES + 2 * half * HALF_BYTES
        if cutlass.const_expr(not has_v):
            place = ROPE_PLACE + half * HALF_BYTES
        # It follows a wait, and precedes a product of another shape.
        warpgroup.fence()
        for step in cutlass.range_constexpr(STEPS):
            offset = step * MMA_K * BF16
            _multiply(
                acc,
                2 * HALF_ROWS if has_v else HALF_ROWS,
                descriptor_behind(keys, chunk * CHUNK_BYTES + offset),
                descriptor_behind(rows, place + offset),
                (chunk, step) != (ORDER[0], 0),
            )
    warpgroup.commit_group()


def _multiply(acc: Any, columns: int, a: Any, b: Any, accumulate: bool) -> None:
    opcode = f"wgmma.mma_async.sync.aligned.m64n{columns}k{MMA_K}.f32.bf16.bf16"
    count = columns // 2
    values = mma_async(
        opcode, [acc[i] for i in range(count)], a, b, accumulate=accumulate, transposes=(0, 0)
    )
    for i in range(count):
        acc[i] = values[i]


@cute.jit
def make_scores(
    role: Scorer, acc: cute.Tensor, members: list[Int32], half: cutlass.Constexpr
) -> tuple[list[Any], list[Any]]:
    """Compute P and dS of 32 rows, two bf16 a word; exact zeros if a query does not name the
    key."""
    ctx = role.ctx
    scale_log2 = role.sm_scale * Float32(LOG2_E)
    statistics = ctx.arena.address("statistics") + ctx.thread % 4 * 16
    p_words, ds_words = [], []
    for block in cutlass.range_constexpr(HALF_ROWS // 8):
        row = half * HALF_ROWS + 8 * block
        query = row * ctx.plan.queries // ROWS
        of_rows = load_words(statistics + row // 2 * 16, Float32)
        for key in cutlass.range_constexpr(2):
            # A selection: values of keys that are not named may be NaN.
            mine = (members[key] >> query) & 1 == 1
            p, ds = [], []
            for i in cutlass.range_constexpr(2):
                place = 4 * block + 2 * key + i
                exponent = acc[place] * scale_log2 - of_rows[i]
                p_value = cute.math.exp2(exponent, fastmath=True)
                ds_value = p_value * (acc[OF_HALF + place] * role.sm_scale - of_rows[2 + i])
                p.append(p_value if mine else Float32(0.0))
                ds.append(ds_value if mine else Float32(0.0))
            p_words.append(pack_bf16(*p))
            ds_words.append(pack_bf16(*ds))
    return p_words, ds_words


@cute.jit
def store_image(image: Int32, words: list[Any], thread: Int32, half: cutlass.Constexpr) -> None:
    """Store 32 rows of an image: four matrices of 8 keys by 8 rows for each 16 rows."""
    lane = thread % WARP_SIZE
    key = thread // WARP_SIZE * MMA_ROWS + lane % 16
    for i in cutlass.range_constexpr(2):
        unit = 4 * half + 2 * i + lane // 16
        cute.arch.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[image + swizzled_128(key, unit), *words[4 * i : 4 * i + 4]],
        )


@cute.jit
def add_dq(role: Scorer, accs: Any) -> None:
    """Add dS K to dQ, dims 0-255; free the chunks."""
    ctx = role.ctx
    ds, keys = ctx.arena.address("ds"), ctx.arena.address("k")
    free = ctx.barriers("k_free_left")
    warpgroup.fence()
    for product in cutlass.range_constexpr(PRODUCTS):
        multiply(
            accs[product],
            PRODUCT_CHUNKS * CHUNK,
            (along_n(ds), STEP_BYTES),
            (along_n(keys + product * PRODUCT_CHUNKS * CHUNK_BYTES), STEP_BYTES),
            transposed=True,
            clear=False,
        )
        warpgroup.commit_group()
    for product in cutlass.range_constexpr(PRODUCTS):
        warpgroup.wait_group(PRODUCTS - 1 - product)
        for chunk in cutlass.range_constexpr(PRODUCT_CHUNKS):
            arrive_warp(free, product * PRODUCT_CHUNKS + chunk, ctx.thread)


@cute.jit
def read_members(role: Scorer, line: cute.Pointer, tile: Int32) -> list[Int32]:
    """Read which queries name this thread's two keys of a tile."""
    first = line + tile * TILE_KEYS
    return [Int32((first + 8 * h).load()) for h in range(2)]


@cute.jit
def score_tile(role: Scorer, acc: cute.Tensor, members: list[Int32], number: Int32) -> None:
    """Compute P and dS of the CTA's tile of that number."""
    ctx = role.ctx
    for half in cutlass.range_constexpr(HALVES):
        issue_half(role, acc, number, half)
        warpgroup.wait_group(0)
        p, ds = make_scores(role, acc, members, half)
        if cutlass.const_expr(half == 0):
            # scores_free: the other roles have read P and dS of the tile before, and so has this
            # one.
            ctx.barriers("scores_free").wait_round(number - 1)
        store_image(ctx.arena.address("p"), p, ctx.thread, half)
        store_image(ctx.arena.address("ds"), ds, ctx.thread, half)
    # Written through the generic proxy -> wgmma reads dS through the asynchronous one.
    cute.arch.fence_proxy("async.shared", space="cta")
    arrive_warp(ctx.barriers("scores_full"), 0, ctx.thread)
    ctx.barriers("scores_full").wait_round(number)


@cute.jit
def score_all(role: Scorer) -> None:
    """Score every tile of the CTA's items."""
    ctx = role.ctx
    acc = cute.make_rmem_tensor(2 * OF_HALF, Float32)
    accs = [cute.make_rmem_tensor(PRODUCT_CHUNKS * CHUNK // 2, Float32) for _ in range(PRODUCTS)]
    lane = ctx.thread % WARP_SIZE
    own = ctx.thread // WARP_SIZE * MMA_ROWS + lane // 4
    number, items = Int32(0), Int32(0)
    for item in cutlass.range(ctx.cta, ctx.num_items, ctx.num_ctas, unroll=1):
        tiles = tiles_of(ctx, item)
        line = ctx.line_of(ctx.lists.members, item) + Int64(own)
        tile = tiles.first
        for product in cutlass.range_constexpr(PRODUCTS):
            accs[product].fill(0.0)
        if tiles.count > 0:
            write_statistics(role, item)
            ctx.barriers("rows_full").wait_round(items)
            # Q and dO have been copied by threads; the fence shows them to wgmma.
            cute.arch.fence_proxy("async.shared", space="cta")
            items += 1
        for _ in cutlass.range(tiles.count, unroll=1):
            members = read_members(role, line, tile)
            score_tile(role, acc, members, number)
            add_dq(role, accs)
            tile = tile_behind(tile, tiles.count)
            number += 1
        if tiles.count > 0:
            arrive_warp(ctx.barriers("rows_free"), 0, ctx.thread)
        for product in cutlass.range_constexpr(PRODUCTS):
            dims = PRODUCT_CHUNKS * CHUNK
            store_dq(role.dq, accs[product], item, ctx.thread, product * dims, dims)
