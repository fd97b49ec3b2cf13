"""Two consumers that share every step: each computes S and P of a tile, and half of O's dims.

Consumer 0 has tile 0 and the low half of the dims, consumer 1 tile 1 and the high half. Each adds
both tiles to its half of O: its own P comes from registers, the other one's from shared memory.

The wgmmas are S = Q K^T and O += P V. Every operand is made of chunks [64 rows][64 columns] with
the 128-byte swizzle. A row's columns are along K of the product where it is a row of Q, K or P. V's
columns are along N, and the keys along K.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.fragments import BF16_KIND, MMA_K, THREAD_ROWS, exp2, quad_reduce, row_of_thread
from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.pipeline import arrive_warp
from flashdsa.dsl.wgmma import along_k, along_n, descriptor_behind, low_word_behind, mma_async
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core import softmax
from flashdsa.kernels.attention.sm90.core import tile as tiles
from flashdsa.kernels.attention.sm90.core.context import StepContext
from flashdsa.plan.row_tiles import ROW_BYTES


def multiply_scores(
    tile: tiles.Tile, s: Any, q: Any, k: Any, slice_: int, clear: bool, kind: str = BF16_KIND
) -> None:
    """Issue S += Q K^T over the columns of a slice; with `clear` S = Q K^T. `kind`: of Q and K."""
    warpgroup.fence()
    q, k = opaque(q), opaque(k)
    for chunk in tile.chunks_of(slice_):
        for step in range(tiles.CHUNK // MMA_K):
            column = step * MMA_K * tiles.BF16
            accumulate = not clear or (chunk, step) != (tile.chunks_of(slice_)[0], 0)
            a = descriptor_behind(q, chunk * tiles.Q_CHUNK_BYTES + column)
            b = descriptor_behind(k, chunk * tile.chunk_bytes + column)
            _multiply(tile.keys, kind, s, a, b, accumulate, (0, 0))


def multiply_own(
    tile: tiles.Tile, out: Any, p: Any, v: Any, kind: str = BF16_KIND, adds: Any = True
) -> None:
    """Issue O += P V as one group; P from this thread's registers. `adds`: else O = P V."""
    warpgroup.fence()
    v = opaque(v)
    for step in range(tile.keys // MMA_K):
        a = [p[4 * step + i] for i in range(4)]
        b = descriptor_behind(v, step * MMA_K * ROW_BYTES)
        _multiply(tile.half_dims, kind, out, a, b, True if step else adds, (1,))
    warpgroup.commit_group()


def multiply_others(
    tile: tiles.Tile, out: Any, p: Any, v: Any, kind: str = BF16_KIND, adds: Any = True
) -> None:
    """Issue O += P V as one group; P from shared memory. `adds`: else O = P V."""
    warpgroup.fence()
    p, v = opaque(p), opaque(v)
    for step in range(tile.keys // MMA_K):
        a = descriptor_behind(p, step * MMA_K * tiles.BF16)
        b = descriptor_behind(v, step * MMA_K * ROW_BYTES)
        _multiply(tile.half_dims, kind, out, a, b, True if step else adds, (0, 1))
    warpgroup.commit_group()


def _multiply(
    columns: int, kind: str, d: Any, a: Any, b: Any, accumulate: Any, transposes: tuple[int, ...]
) -> None:
    count = columns // 2
    values = mma_async(
        f"wgmma.mma_async.sync.aligned.m{tiles.ROWS}n{columns}k{MMA_K}.f32.{kind}.{kind}",
        [d[i] for i in range(count)],
        a,
        b,
        accumulate=accumulate,
        transposes=transposes,
    )
    for i in range(count):
        d[i] = values[i]


SCORES_DONE, P_FREE = 1, 2
"""Named barriers; 0 is the CTA's."""


class Registers(NamedTuple):
    """Registers of a consumer's thread."""

    s: cute.Tensor  # S of the consumer's tile, keys / 2 fp32
    p: cute.Tensor  # P of it, words of two 16-bit numbers
    out: cute.Tensor  # the consumer's half of O's dims, half_dims / 2 fp32
    rows: softmax.Rows


def new_registers(tile: tiles.Tile, with_largest: bool = False) -> Registers:
    """Registers before the first key. O is undefined: an item's first product does not read it."""
    s = cute.make_rmem_tensor(tile.keys // 2, Float32)
    p = cute.make_rmem_tensor(tile.keys // 4, Int32)
    out = cute.make_rmem_tensor(tile.half_dims // 2, Float32)
    return Registers(s, p, out, softmax.new_rows(with_largest))


def values_of(ctx: StepContext, tile: int, consumer: int) -> Any:
    """Descriptor of a tile's V, of the consumer's half of the dims."""
    geometry = ctx.plan.tile
    offset = tile * geometry.bytes + consumer * geometry.half_chunks * geometry.chunk_bytes
    return along_n(ctx.memory.k.address() + offset)


def p_address(ctx: StepContext, tile: int) -> Any:
    """Address of a tile's P."""
    region, offset = ctx.plan.tile.p0 if tile == 0 else ("p", 0)
    return getattr(ctx.memory, region).address() + offset


def p_of(ctx: StepContext, tile: int) -> Any:
    """Descriptor of a tile's P."""
    return along_k(p_address(ctx, tile))


@cute.jit
def issue_scores(
    ctx: StepContext, s: cute.Tensor, step: Int32, is_needed: Any, slices: cutlass.Constexpr
) -> None:
    """Consumer 0: issue slices of S of its tile as one group. A step that is not needed gives
    numbers that nobody uses: a branch around wgmmas would make ptxas wait for each of them."""
    q, k = along_k(ctx.memory.q.address()), along_k(ctx.memory.k.address())
    if is_needed:
        for slice_ in slices:
            # k0_full: the slice has been copied by threads; the fence shows it to wgmma.
            ctx.memory.k0_full.wait(ctx.phase(step), slice_)
    cute.arch.fence_proxy("async.shared", space="cta")
    for slice_ in slices:
        multiply_scores(ctx.plan.tile, s, q, k, slice_, slice_ == 0, ctx.kind_of_slice(slice_))
    warpgroup.commit_group()


@cute.jit
def compute_next_scores(ctx: StepContext, s: cute.Tensor, step: Int32, is_needed: Any) -> None:
    """Consumer 0, during its product with P of tile 1: free its low half; S of the next step."""
    tile = ctx.plan.tile
    issue_scores(ctx, s, step, is_needed, tile.low_slices)
    warpgroup.wait_group(1)
    arrive_warp(ctx.memory.low_free, 1, ctx.thread)
    issue_scores(ctx, s, step, is_needed, tile.high_slices)
    warpgroup.wait_group(0)


@cute.jit
def finish_scores(ctx: StepContext, step: Int32, consumer: cutlass.Constexpr) -> None:
    """Wait for the masks of the consumer's tile, whose S is computed. Consumer 0 announces that all
    of the step's is, so that consumer 1 may compute its own."""
    if cutlass.const_expr(consumer == 0):
        cute.arch.barrier_arrive(barrier_id=SCORES_DONE, number_of_threads=2 * WARPGROUP_SIZE)
    ctx.memory.masks_full.wait(ctx.phase(step), consumer)


def wait_for_scores() -> None:
    """Consumer 1: wait for consumer 0's scores, whose softmax runs while it computes its own."""
    cute.arch.barrier(barrier_id=SCORES_DONE, number_of_threads=2 * WARPGROUP_SIZE)


@cute.jit
def compute_scores(ctx: StepContext, s: cute.Tensor, step: Int32) -> None:
    """Consumer 1: compute S of its tile, first of the high half, which was freed first."""
    tile = ctx.plan.tile
    q, k = along_k(ctx.memory.q.address()), along_k(ctx.memory.k.address() + tile.bytes)
    for slices in (tile.high_slices, tile.low_slices):
        for slice_ in slices:
            # k1_full: the slice has been copied by threads; the fence shows it to wgmma.
            ctx.memory.k1_full.wait(ctx.phase(step), slice_)
        cute.arch.fence_proxy("async.shared", space="cta")
        for slice_ in slices:
            is_first = slice_ == tile.high_slices[0]
            multiply_scores(tile, s, q, k, slice_, is_first, ctx.kind_of_slice(slice_))
    warpgroup.commit_group()
    warpgroup.wait_group(0)


@cute.jit
def compute_scores_in_loop(
    ctx: StepContext, s: cute.Tensor, step: Int32, consumer: cutlass.Constexpr
) -> None:
    """Compute S of the consumer's tile, first of the half that was freed first, RoPE's columns at
    last. Code that runs once costs most, as it is fetched: one code serves both halves."""
    tile = ctx.plan.tile
    q, k = along_k(ctx.memory.q.address()), along_k(ctx.memory.k.address() + consumer * tile.bytes)
    full = (ctx.memory.k0_full, ctx.memory.k1_full)[consumer]
    count, rope = len(tile.low_slices), tile.value_chunks // tiles.SLICE_CHUNKS
    s.fill(0.0)
    for number in cutlass.range(2, unroll=1):
        first = (number ^ consumer) * count
        for i in cutlass.range_constexpr(count):
            # full: the slice has been copied by threads; the fence shows it to wgmma.
            full.wait(ctx.phase(step), first + i)
        cute.arch.fence_proxy("async.shared", space="cta")
        of_q = low_word_behind(q, first * (tiles.SLICE_CHUNKS * tiles.Q_CHUNK_BYTES))
        of_k = low_word_behind(k, first * (tiles.SLICE_CHUNKS * tile.chunk_bytes))
        for i in cutlass.range_constexpr(count):
            multiply_scores(tile, s, of_q, of_k, i, False, ctx.kind)
    if cutlass.const_expr(tile.has_rope):
        full.wait(ctx.phase(step), rope)
        cute.arch.fence_proxy("async.shared", space="cta")
        multiply_scores(tile, s, q, k, rope, False, ctx.kind_of_slice(rope))
    warpgroup.commit_group()
    warpgroup.wait_group(0)


@cute.jit
def add_tile0(
    ctx: StepContext, r: Registers, scale: softmax.Scale, v: Int32, adds: Any = True
) -> None:
    """Consumer 0, after S: compute P, publish it, add its product, and free the tile's low half.
    `v`: descriptor of the tile's values. `adds`: 0 if O has no product yet; it is not read then."""
    softmax.mask_scores(ctx, r.s, scale, 0)
    softmax.exponentiate(r.s, r.p, r.rows, scale, ctx.plan.lazy_log2, ctx.kind)
    if cutlass.const_expr(ctx.plan.tile.has_rope):
        # P overwrites columns of the tile's keys: all four warps have their scores.
        cute.arch.barrier(barrier_id=P_FREE, number_of_threads=WARPGROUP_SIZE)
    # Consumer 1 had read P of the step before when it freed the high half, whose keys came since.
    softmax.store_p(ctx, r.p, r.rows, p_address(ctx, 0), 0)
    ctx.memory.p0_full.arrive()
    softmax.rescale_to_own(r.out, r.rows, scale)
    multiply_own(ctx.plan.tile, r.out, r.p, v, ctx.kind, adds)
    warpgroup.wait_group(0)
    arrive_warp(ctx.memory.low_free, 0, ctx.thread)


@cute.jit
def add_tile1(ctx: StepContext, r: Registers, scale: softmax.Scale, v: Int32) -> None:
    """Consumer 1, while the product with P of tile 0 runs: compute P, publish it, add its product,
    and free both tiles' high halves. `v`: descriptor of the tile's values."""
    softmax.mask_scores(ctx, r.s, scale, 1)
    softmax.exponentiate(r.s, r.p, r.rows, scale, ctx.plan.lazy_log2, ctx.kind)
    # P of the step before: the other consumer was done with it before p0_full of this one.
    softmax.store_p(ctx, r.p, r.rows, p_address(ctx, 1), 1)
    ctx.memory.p1_full.arrive()
    warpgroup.wait_group(0)
    arrive_warp(ctx.memory.high_free, 0, ctx.thread)
    softmax.rescale_to_own(r.out, r.rows, scale)
    multiply_own(ctx.plan.tile, r.out, r.p, v, ctx.kind)
    warpgroup.wait_group(0)
    arrive_warp(ctx.memory.high_free, 1, ctx.thread)


@cute.jit
def issue_others(
    ctx: StepContext,
    r: Registers,
    scale: softmax.Scale,
    tile: cutlass.Constexpr,
    p: Int32,
    v: Int32,
    adds: Any = True,
) -> None:
    """Issue the product with the other consumer's P, which has come, against its maxima. `tile`:
    the other consumer's. `p`, `v`: descriptors of its P and values. `adds`: 0 if O has no product
    yet; it is not read then."""
    softmax.rescale_to_others(ctx, r.out, r.rows, scale, tile)
    multiply_others(ctx.plan.tile, r.out, p, v, ctx.kind, adds)


@cute.jit
def merge_sums(
    ctx: StepContext,
    rows: softmax.Rows,
    scale: softmax.Scale,
    items: Int32,
    consumer: cutlass.Constexpr,
) -> list[Float32]:
    """The rows' sums over both tiles, against O's maxima. `items`: that the CTA ended before."""
    full = (ctx.memory.sums0_full, ctx.memory.sums1_full)
    shared = ctx.memory.row_sum.array(Float32, 2 * 2 * tiles.ROWS)
    row = row_of_thread(ctx.thread)
    own = [quad_reduce(rows.row_sum[h], lambda a, b: a + b) for h in range(THREAD_ROWS)]
    # The other consumer read the previous item's sums before its P of this item, and this one has
    # waited for that P.
    if ctx.thread % 4 == 0:
        for h in cutlass.range_constexpr(THREAD_ROWS):
            shared[(consumer * 2) * tiles.ROWS + row + 8 * h] = own[h]
            shared[(consumer * 2 + 1) * tiles.ROWS + row + 8 * h] = rows.row_max[h]
            if cutlass.const_expr(consumer == 1 and rows.largest is not None):
                ctx.memory.largest.array(Float32, tiles.ROWS)[row + 8 * h] = rows.largest[h]
    full[consumer].arrive()
    full[1 - consumer].wait_for(items)
    sums = []
    for h in cutlass.range_constexpr(THREAD_ROWS):
        others = shared[(1 - consumer) * 2 * tiles.ROWS + row + 8 * h]
        others_max = shared[((1 - consumer) * 2 + 1) * tiles.ROWS + row + 8 * h]
        sums.append(
            own[h] * exp2((rows.row_max[h] - rows.out_max[h]) * scale.factor)
            + others * exp2((others_max - rows.out_max[h]) * scale.factor)
        )
    return sums
