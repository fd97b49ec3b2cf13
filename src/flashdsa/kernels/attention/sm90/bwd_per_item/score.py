"""Roles score and high: S, dP, P and dS of each tile, and dQ, each role its dims.

Keys are M and rows are N: S^T and dP^T of 32 rows are one product of the keys with those rows of Q
and of dO, which lie one after the other. P and dS go to shared memory as matrices [key][row]. Role
high brings Q and dO of each item, too.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl import ptx, smem, warp_matrix, wgmma
from flashdsa.dsl.fragments import BLOCK_DIMS, MMA_K, MMA_ROWS, THREAD_ROWS, pack
from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.pipeline import Barriers, arrive_warp
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.bwd_per_item import context, load, tickets
from flashdsa.kernels.attention.sm90.bwd_per_item import plan as sizes
from flashdsa.kernels.attention.sm90.core.backward import PAIR_DIMS, multiply
from flashdsa.kernels.attention.sm90.core.softmax import LOG2_E
from flashdsa.kernels.attention.sm90.core.tile import BF16, CHUNK, ROWS
from flashdsa.plan.row_tiles import ROW_BYTES

STEPS = CHUNK // MMA_K
OF_HALF = sizes.HALF_ROWS // 2
"""fp32 of S, and of dP, in a thread."""
STEP_BYTES = MMA_K * ROW_BYTES
"""Bytes from 16 keys of a matrix or a chunk to the next 16."""
HALVES = 2


def make_accs(groups: tuple[range, ...]) -> list[cute.Tensor]:
    """This thread's part of dQ, an accumulator for each group of chunks."""
    return [cute.make_rmem_tensor(len(chunks) * CHUNK // 2, Float32) for chunks in groups]


@cute.jit
def add_dq(ctx: context.Context, accs: Any, groups: cutlass.Constexpr, free: Barriers) -> None:
    """Add dS K to dQ, each group of chunks to its accumulator; free the chunks."""
    ds, keys = ctx.memory.ds.address(), ctx.memory.k.address()
    warpgroup.fence()
    for acc, chunks in zip(accs, groups, strict=True):
        multiply(
            acc,
            len(chunks) * CHUNK,
            (wgmma.along_n(ds), STEP_BYTES),
            (wgmma.along_n(keys + chunks[0] * ctx.plan.tile.chunk_bytes), STEP_BYTES),
            transposed=True,
            clear=False,
        )
        warpgroup.commit_group()
    for product, chunks in enumerate(groups):
        warpgroup.wait_group(len(groups) - 1 - product)
        for chunk in chunks:
            arrive_warp(free, chunk - groups[0][0], ctx.thread)


@cute.jit
def store_dq(
    ctx: context.Context, dq: cute.Tensor, acc: Any, item: Int32, chunks: cutlass.Constexpr
) -> None:
    """Store chunks of dQ in bf16, 16 bytes a lane. Rows past the last one are not written. A lane
    has four neighbouring dims of each 16, see `core/backward.py`. Two lanes exchange, so that one
    has eight of the first 16, and the other eight of the next. `dq`: (S * H, 576) bf16. `acc`: this
    thread's part of the chunks, fp32."""
    thread, lane = ctx.thread, ctx.thread % WARP_SIZE
    odd = lane % 2 == 1
    dim = lane % 2 * PAIR_DIMS + lane % 4 // 2 * 8
    first = Int64(item) * ROWS + (thread // WARP_SIZE * MMA_ROWS + lane // 4)
    for h in cutlass.range_constexpr(THREAD_ROWS):
        row = first + 8 * h
        at = dq.iterator + (row * ctx.plan.tile.d_qk + dim)
        present = row < dq.shape[0]
        for block in cutlass.range_constexpr(len(chunks) * CHUNK // BLOCK_DIMS):
            values = [acc[16 * block + 2 * h + 4 * i + e] for i in range(4) for e in range(2)]
            left, right = (
                [pack(values[4 * p + 2 * i], values[4 * p + 2 * i + 1]) for i in range(2)]
                for p in range(2)
            )
            got = [cute.arch.shuffle_sync_bfly(left[i] if odd else right[i], 1) for i in range(2)]
            words = [got[i] if odd else left[i] for i in range(2)]
            words += [right[i] if odd else got[i] for i in range(2)]
            if present:
                ptx.run(
                    "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    at + (chunks[0] * CHUNK + block * BLOCK_DIMS),
                    *words,
                )


class Scorer(NamedTuple):
    """Reads k, rows and statistics; writes p, ds, dQ. Signals scores_full, k_free_low."""

    ctx: context.Context
    dq: cute.Tensor  # (S * H, 576) bf16
    sm_scale: Float32


@cute.jit
def issue_half(
    role: Scorer, acc: cute.Tensor, numbers: tuple[Int32, Int32], half: cutlass.Constexpr
) -> None:
    """Issue S^T and dP^T of 32 rows as one group: acc has 16 fp32 of the one and then of the other.
    `numbers`: of the CTA's tile, and of its item with keys."""
    ctx = role.ctx
    keys = opaque(wgmma.along_k(ctx.memory.k.address()))
    rows = opaque(wgmma.along_k(ctx.memory.rows.address()))
    plan = ctx.plan
    for chunk in plan.order:
        if cutlass.const_expr(half == 0):
            # rows_full, k_full: both chunks have been copied by threads; the fence shows them to
            # wgmma.
            ctx.memory.rows_full.wait_round(numbers[1], chunk)
            ctx.memory.k_full.wait_round(numbers[0], chunk)
            cute.arch.fence_proxy("async.shared", space="cta")
        has_v = chunk < plan.tile.value_chunks
        place = chunk * sizes.ROWS_CHUNK_BYTES + 2 * half * sizes.HALF_BYTES
        if cutlass.const_expr(not has_v):
            place = plan.rope_at + half * sizes.HALF_BYTES
        # It follows a wait, and precedes a product of another shape.
        warpgroup.fence()
        for step in cutlass.range_constexpr(STEPS):
            offset = step * MMA_K * BF16
            wgmma.multiply_bf16(
                acc,
                2 * sizes.HALF_ROWS if has_v else sizes.HALF_ROWS,
                wgmma.descriptor_behind(keys, chunk * plan.tile.chunk_bytes + offset),
                wgmma.descriptor_behind(rows, place + offset),
                accumulate=(chunk, step) != (plan.order[0], 0),
                transposes=(0, 0),
            )
    warpgroup.commit_group()


@cute.jit
def make_scores(
    role: Scorer, acc: cute.Tensor, members: list[Int32], half: cutlass.Constexpr
) -> tuple[list[Any], list[Any]]:
    """P and dS of 32 rows, two bf16 a word; exact zeros if a query does not name the key."""
    ctx = role.ctx
    scale_log2 = role.sm_scale * Float32(LOG2_E)
    statistics = ctx.memory.statistics.address() + ctx.thread % 4 * 16
    p_words, ds_words = [], []
    for block in cutlass.range_constexpr(sizes.HALF_ROWS // 8):
        row = half * sizes.HALF_ROWS + 8 * block
        query = row * ctx.plan.queries // ROWS
        of_rows = smem.load_words(statistics + row // 2 * 16, Float32)
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
            p_words.append(warp_matrix.pack_bf16(*p))
            ds_words.append(warp_matrix.pack_bf16(*ds))
    return p_words, ds_words


@cute.jit
def store_matrix(matrix: Int32, words: list[Any], thread: Int32, half: cutlass.Constexpr) -> None:
    """Store 32 rows of a matrix: four matrices of 8 keys by 8 rows for each 16 rows."""
    lane = thread % WARP_SIZE
    key = thread // WARP_SIZE * MMA_ROWS + lane % 16
    for i in cutlass.range_constexpr(2):
        unit = 4 * half + 2 * i + lane // 16
        warp_matrix.store_matrices(matrix + swizzled_128(key, unit), words[4 * i : 4 * i + 4])


@cute.jit
def read_members(role: Scorer, line: cute.Pointer, tile: Int32) -> list[Int32]:
    """Read which queries name this thread's two keys of a tile."""
    first = line + tile * role.ctx.plan.tile.keys
    return [Int32((first + 8 * h).load()) for h in range(2)]


@cute.jit
def score_tile(
    role: Scorer, acc: cute.Tensor, members: list[Int32], numbers: tuple[Int32, Int32]
) -> None:
    """Compute P and dS of a tile; numbers as for `issue_half`."""
    ctx, (number, item) = role.ctx, numbers
    for half in cutlass.range_constexpr(HALVES):
        issue_half(role, acc, numbers, half)
        warpgroup.wait_group(0)
        if cutlass.const_expr(half == 0):
            # statistics_full: lse and delta of the item's rows, until its last P and dS are there.
            ctx.memory.statistics_full.wait_round(item)
        p, ds = make_scores(role, acc, members, half)
        if cutlass.const_expr(half == 0):
            # scores_free: the other roles have read P and dS of the tile before, and so has this
            # one.
            ctx.memory.scores_free.wait_round(number - 1)
        store_matrix(ctx.memory.p.address(), p, ctx.thread, half)
        store_matrix(ctx.memory.ds.address(), ds, ctx.thread, half)
    # Written through the generic proxy -> wgmma reads dS through the asynchronous one.
    cute.arch.fence_proxy("async.shared", space="cta")
    # Each thread for itself: it has read the statistics, too, which role high may write again.
    ctx.memory.scores_full.arrive(0)
    ctx.memory.scores_full.wait_round(number)


@cute.jit
def score_all(role: Scorer) -> None:
    """Score every tile of the CTA's items."""
    ctx = role.ctx
    scores = cute.make_rmem_tensor(2 * OF_HALF, Float32)
    accs = make_accs(ctx.plan.low_chunks)
    lane = ctx.thread % WARP_SIZE
    own = ctx.thread // WARP_SIZE * MMA_ROWS + lane // 4
    number, items = Int32(0), Int32(0)
    if cutlass.const_expr(ctx.plan.tickets):
        item, drawn = tickets.item_at(ctx, ctx.cta), Int32(0)
        while item >= 0:
            number, items = score_item(role, scores, accs, item, own, (number, items))
            item = tickets.next_item(ctx, drawn)
            drawn += 1
    else:
        for position in cutlass.range(ctx.cta, ctx.num_items, ctx.num_ctas, unroll=1):
            item = context.item_by_turns(ctx, position)
            number, items = score_item(role, scores, accs, item, own, (number, items))


@cute.jit
def score_item(
    role: Scorer,
    scores: cute.Tensor,
    accs: Any,
    item: Int32,
    own: Int32,
    numbers: tuple[Int32, Int32],
) -> tuple[Int32, Int32]:
    """Score every tile of an item, and store its dims of dQ. `own`: the first of this thread's keys
    of a tile. `numbers`: tiles of the CTA, and items with keys, before this one; returned after it.
    """
    ctx = role.ctx
    number, items = numbers
    tiles = context.tiles_of(ctx, item)
    line = ctx.line_of(ctx.lists.members, item) + Int64(own)
    tile = tiles.first
    for acc in accs:
        acc.fill(0.0)
    if tiles.count > 0:
        items += 1
    for _ in cutlass.range(tiles.count, unroll=1):
        members = read_members(role, line, tile)
        score_tile(role, scores, members, (number, items - 1))
        add_dq(ctx, accs, ctx.plan.low_chunks, ctx.memory.k_free_low)
        tile = context.tile_after(tile, tiles.count)
        number += 1
    for dq, chunks in zip(accs, ctx.plan.low_chunks, strict=True):
        store_dq(ctx, role.dq, dq, item, chunks)
    return number, items


class High(NamedTuple):
    """Reads k and ds; writes what `Rows` does, and dQ. Signals k_free_high, scores_free, too."""

    rows: load.Rows
    dq: cute.Tensor  # (S * H, 576) bf16


@cute.jit
def high_all(role: High) -> None:
    """Take every tile of the CTA's items."""
    ctx = role.rows.ctx
    accs = make_accs(ctx.plan.high_chunks)
    number, items = Int32(0), Int32(0)
    if cutlass.const_expr(ctx.plan.tickets):
        item, drawn = tickets.item_at(ctx, ctx.cta), Int32(0)
        while item >= 0:
            number, items = high_item(role, accs, item, (number, items))
            item = tickets.next_item(ctx, drawn)
            drawn += 1
    else:
        for position in cutlass.range(ctx.cta, ctx.num_items, ctx.num_ctas, unroll=1):
            item = context.item_by_turns(ctx, position)
            number, items = high_item(role, accs, item, (number, items))


@cute.jit
def high_item(
    role: High, accs: Any, item: Int32, numbers: tuple[Int32, Int32]
) -> tuple[Int32, Int32]:
    """Take every tile of an item, and store its dims of dQ; numbers: as for `score_item`."""
    ctx = role.rows.ctx
    number, items = numbers
    tiles = context.tiles_of(ctx, item)
    if tiles.count > 0:
        load.copy_rows(role.rows, item, items)
        items += 1
    for acc in accs:
        acc.fill(0.0)
    for _ in cutlass.range(tiles.count, unroll=1):
        ctx.memory.scores_full.wait_round(number)
        # The keys have been copied by threads; the fence shows them to wgmma.
        cute.arch.fence_proxy("async.shared", space="cta")
        add_dq(ctx, accs, ctx.plan.high_chunks, ctx.memory.k_free_high)
        arrive_warp(ctx.memory.scores_free, 0, ctx.thread)
        number += 1
    for dq, chunks in zip(accs, ctx.plan.high_chunks, strict=True):
        store_dq(ctx, role.dq, dq, item, chunks)
    return number, items
