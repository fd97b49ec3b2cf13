"""Role math: each consumer takes every other tile of the CTA's, and has an O of its own.

**The end**: the consumers exchange halves of O, and each stages half of the dims, as the other
decode does (`shared/combine.py`).
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from flashdsa.dsl import pipeline, ptx, smem, wgmma
from flashdsa.dsl.fragments import F16_KIND, MMA_ROWS, exp2, pack
from flashdsa.dsl.opaque import opaque
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import FP32, ROWS
from flashdsa.kernels.attention.sm90.decode.few_heads import gather, products, softmax
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import CONSUMERS, HEADS, WARPS
from flashdsa.kernels.attention.sm90.decode.shared import combine, context, plan
from flashdsa.kernels.attention.sm90.decode.shared.words import store_pair, store_word

FIRST_MEETING = 1
"""Named barrier of the first consumer; the second one's follows."""
WORDS = 4
"""fp32 that a thread stores at once."""


class Math(NamedTuple):
    """Reads q, k and masks. Writes its p, and results."""

    ctx: context.Context
    output: context.Output
    q: Any  # (S, H, d_qk) bf16
    consumer: Int32  # 0 or 1


class Registers(NamedTuple):
    """Registers of a thread."""

    out: cute.Tensor  # O^T: 8 blocks of 64 dims, HEADS / 2 fp32 each
    heads: softmax.Heads


def meet(ctx: context.Context, consumer: Any) -> None:
    """Sync the four warps of a consumer."""
    cute.arch.barrier(barrier_id=FIRST_MEETING + consumer, number_of_threads=WARPGROUP_SIZE)


def read_units(ctx: context.Context) -> list[Any]:
    """Scales of the lane's heads of Q."""
    count = HEADS // 4
    shared = ctx.memory.row_unit.array(Float32, HEADS)
    first = softmax.first_head(ctx.thread % WARP_SIZE)
    return [shared[first + softmax.offset_of_head(number)] for number in range(count)]


def states_of_tile(role: Math, step: Int32) -> list[pipeline.PipelineState]:
    """States of the consumer's pieces of a step; found again at each use, not kept in registers."""
    pieces = role.ctx.plan.tile_pieces
    first = opaque(step) * pieces
    return [gather.state_of_piece(role.ctx.plan, role.consumer, first + i) for i in range(pieces)]


@cute.jit
def take_tile(role: Math, r: Registers, step: Int32, is_first: Boolean) -> None:
    """Take the tile of that step, whose pieces have come. `is_first`: O is 0."""
    ctx = role.ctx
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    # A warp has 16 keys, of one of the pieces, as rows of S^T.
    key = warp % 2 * MMA_ROWS
    states = states_of_tile(role, step)
    stage = states[0].stage
    if warp >= 2:
        stage = states[1].stage
    piece = ctx.memory.k.address() + stage * ctx.plan.piece_bytes
    masks = ctx.memory.masks.array(Int32, ctx.plan.stages)
    q = wgmma.along_k(ctx.memory.q.address())
    keys = piece + (key + lane % 16) * ctx.plan.row_pitch + lane // 16 * 16
    row = piece + (key + lane // 4) * ctx.plan.row_pitch
    s = products.multiply_tile(ctx.plan, q, keys, row)
    scale = role.output.scale
    s = softmax.mask_keys(s, read_units(ctx), scale, masks[stage], key + lane // 4)
    # All four warps are done with P of the tile before when it returns.
    tops, largest = softmax.find_tops(ctx, s, row, role.consumer, meet)
    tops, factors, moved = softmax.move_tops(ctx, r.heads, tops, largest, scale, role.consumer)
    rescale(ctx, r.out, factors, moved, is_first)
    p = softmax.exponentiate(s, r.heads, tops, scale)
    of_consumer = role.consumer * (ctx.plan.parts * ctx.plan.operand_bytes)
    at = ctx.memory.p.address() + of_consumer
    softmax.store_p(ctx, p, row, r.heads, at)
    meet(ctx, role.consumer)
    columns = ctx.memory.k.address() + lane * ctx.plan.row_pitch + warp * 16
    stages = [state.stage * ctx.plan.piece_bytes for state in states_of_tile(role, step)]
    pieces, rope_pieces = [columns + stage for stage in stages], []
    if cutlass.const_expr(ctx.plan.has_value_rope):
        key = lane // 16 * 8 + lane % 8
        place = ctx.plan.form.rope_at + warp * 32 + lane // 8 % 2 * 16
        rope = ctx.memory.k.address() + key * ctx.plan.row_pitch + place
        rope_pieces = [rope + stage for stage in stages]
    products.multiply_values(ctx.plan, r.out, pieces, rope_pieces, wgmma.along_k(at))


@cute.jit
def rescale(
    ctx: context.Context, out: cute.Tensor, factors: list[Any], moved: Any, is_first: Boolean
) -> None:
    """Rescale O, unless it is 0, to maxima and scales that have moved, which is rare. `moved`:
    factor of the dims whose P is times scales."""
    changed = moved != 1.0
    for factor in factors:
        changed = changed | (factor != 1.0)
    if cute.arch.vote_any_sync(changed & (is_first == 0)):
        with_scales = [factor * moved for factor in factors]
        for i in cutlass.range_constexpr(cute.size(out)):
            block, number = i // (HEADS // 2), softmax.head_of(i % (HEADS // 2))
            is_bf16 = cutlass.const_expr(products.is_rope(ctx.plan, block))
            out[i] = out[i] * (factors[number] if is_bf16 else with_scales[number])


@cute.jit
def consume(role: Math) -> Registers:
    """Take every step of the CTA in which this consumer has a tile."""
    ctx = role.ctx
    out = cute.make_rmem_tensor(products.blocks_of(ctx.plan) * HEADS // 2, Float32)
    out.fill(0.0)
    r = Registers(out, softmax.new_heads(ctx, role.consumer))
    if ctx.num_steps > 0:
        gather.load_query(ctx, role.q, role.consumer)
    num_tiles = context.wait_for_extent(ctx)
    take_tiles(role, r, Int32(0), gather.tiles_of_consumer(num_tiles, role.consumer))
    return r


@cute.jit
def take_tiles(role: Math, r: Registers, first: Int32, end: Int32) -> None:
    """Take the consumer's tiles from number `first`, before which O is 0, to `end`."""
    memory = role.ctx.memory
    ring = pipeline.RingConsumer(memory.full, memory.free)
    for tile in cutlass.range(first, end, unroll=1):
        for state in states_of_tile(role, tile):
            ring.wait(state)
        take_tile(role, r, tile, Boolean(tile == first))
        # Bulk copies overwrite memory that threads have read.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if role.ctx.thread % WARP_SIZE == 0:
            for state in states_of_tile(role, tile):
                ring.release(state.stage)


@cute.jit
def stage_share(role: Math, r: Registers) -> None:
    """Stage a consumer's half of O's dims, of all the CTA's tiles, for the cluster."""
    ctx = role.ctx
    publish_sums(role, r)
    # The CTAs of the cluster have initialised their barriers: none was sent anything before. Here
    # for the same reason as in the kernel of 64 heads (full/consumers.py).
    cute.arch.cluster_wait()
    # Other CTAs' copies overwrite memory from which threads have read keys and Q.
    cute.arch.fence_proxy("async.shared", space="cta")
    # all_read: nobody reads keys or Q any more; all sums are written.
    context.meet_consumers(ctx.memory.all_read)
    if ctx.num_ctas > 1 and context.takes_part(ctx):
        if role.consumer == 0:
            combine.expect_parts(role.output)
    half = exchange_halves(role, r, find_factors(role, r))
    stage_dims(role, half)
    if ctx.thread < 4:
        stage_statistics(role)
    # The bulk copies read what threads have staged.
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def publish_sums(role: Math, r: Registers) -> None:
    """Publish each warp's sums."""
    ctx = role.ctx
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    pitch = HEADS + 4
    sums = ctx.memory.sums.array(Float32, CONSUMERS * WARPS * pitch)
    base = (role.consumer * WARPS + warp) * pitch + softmax.first_head(lane)
    for number in cutlass.range_constexpr(HEADS // 4):
        total = softmax.reduce_keys(r.heads.total[number], lambda a, b: a + b)
        if lane < 4:
            sums[base + softmax.offset_of_head(number)] = total


class Merged(NamedTuple):
    """Merged maxima and sum of a head, of both consumers."""

    tops: list[Any]  # each one's maximum
    top: Any  # the larger one
    total: Any  # the sum against it


def merge_sums(role: Math, number: int) -> Merged:
    """Merge the sums of the lane's head of that number."""
    ctx = role.ctx
    factor = role.output.scale.factor
    pitch = HEADS + 4
    sums = ctx.memory.sums.array(Float32, CONSUMERS * WARPS * pitch)
    maxima = ctx.memory.maxima.array(Float32, CONSUMERS * WARPS * HEADS)
    at = softmax.first_head(ctx.thread % WARP_SIZE) + softmax.offset_of_head(number)
    offset = softmax.offset_of_head(number)
    tops = [
        maxima[softmax.first_maximum(ctx, consumer, 0) + offset] for consumer in range(CONSUMERS)
    ]
    top = cute.arch.fmax(*tops)
    total = Float32(0.0)
    for consumer in range(CONSUMERS):
        of_warps = [sums[(consumer * WARPS + warp) * pitch + at] for warp in range(WARPS)]
        total = total + sum(of_warps[1:], of_warps[0]) * exp2((tops[consumer] - top) * factor)
    return Merged(tops, top, total)


class Factors(NamedTuple):
    """Factors of a consumer's O of the lane's heads, before both are added; 0: no key."""

    coded: list[Any]  # of dims whose P is times scales
    bf16: list[Any]  # of the value's bf16 columns; without them no others


@cute.jit
def find_factors(role: Math, r: Registers) -> Factors:
    """The factors of this consumer's O."""
    unit = Float32(0.0) - Float32(r.heads.power[0])
    factors = Factors([], [])
    for number in cutlass.range_constexpr(HEADS // 4):
        merged = merge_sums(role, number)
        mine = merged.tops[1] if role.consumer == 1 else merged.tops[0]
        own = (mine - merged.top) * role.output.scale.factor
        inverse = cute.arch.rcp_approx(merged.total) if merged.total != 0.0 else Float32(0.0)
        factors.coded.append(exp2(own + unit) * inverse)
        if cutlass.const_expr(role.ctx.plan.has_value_rope):
            factors.bf16.append(exp2(own) * inverse)
        # Otherwise the values that all heads read would be in registers at once.
        cute.arch.sync_warp()
    return factors


@cute.jit
def exchange_halves(role: Math, r: Registers, factors: Factors, number: Any = 0) -> list[Any]:
    """Exchange halves; return this consumer's, of both. `number`: of the exchanges before."""
    ctx = role.ctx
    count = HEADS // 2
    half = products.blocks_of(ctx.plan) // CONSUMERS * count
    regions = ((getattr(ctx.memory, name), offset) for name, offset in ctx.plan.halves)
    first, second = (region.address() + offset for region, offset in regions)
    own_at, other_at = first, second
    if role.consumer == 1:
        own_at, other_at = second, first
    mine = []
    to = other_at + ctx.thread * (WORDS * FP32)
    for four in cutlass.range_constexpr(half // WORDS):
        others = []
        for i in cutlass.range_constexpr(WORDS * four, WORDS * four + WORDS):
            head = softmax.head_of(i % count)
            low, high = r.out[i], r.out[half + i]
            if cutlass.const_expr(products.is_rope(ctx.plan, (half + i) // count)):
                low, high = low * factors.coded[head], high * factors.bf16[head]
                mine.append(high if role.consumer == 1 else low)
                others.append(low if role.consumer == 1 else high)
            else:
                factor = factors.coded[head]
                mine.append((high if role.consumer == 1 else low) * factor)
                others.append((low if role.consumer == 1 else high) * factor)
        store_floats(to + four * (WARPGROUP_SIZE * WORDS * FP32), others)
    # halves: the other consumer's part of this one's dims has come.
    context.meet_consumers(ctx.memory.halves, number)
    at = own_at + ctx.thread * (WORDS * FP32)
    results = []
    for four in cutlass.range_constexpr(half // WORDS):
        words = smem.load_words(at + four * (WARPGROUP_SIZE * WORDS * FP32), Float32)
        for word in cutlass.range_constexpr(WORDS):
            results.append(mine[WORDS * four + word] + words[word])
    return results


@cute.jit
def stage_dims(role: Math, half: list[Any]) -> None:
    """Stage this consumer's groups of dims, as f16: a lane has two neighbouring ones of a head, of
    bf16 columns two that are eight apart."""
    ctx = role.ctx
    count = HEADS // 2
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    rows = combine.staged_rows(role.output)
    group = role.consumer * (ctx.plan.dim_groups // CONSUMERS) + 2 * warp
    base = ctx.memory.k.address() + (
        ctx.plan.staged_at + softmax.first_head(lane) * plan.GROUP_BYTES
    )
    pair = lane // 16 * (rows * plan.GROUP_BYTES) + lane // 4 % 4 * 4
    blocks = products.blocks_of(ctx.plan) // CONSUMERS
    for block in cutlass.range_constexpr(blocks):
        to = base + (group + block * (ROWS // plan.GROUP_DIMS)) * (rows * plan.GROUP_BYTES)
        values = half[block * count : (block + 1) * count]
        if cutlass.const_expr(products.is_rope(ctx.plan, blocks + block)):
            if role.consumer == 1:
                stage_apart(values, to + lane // 4 * plan.F16, rows * plan.GROUP_BYTES)
            else:
                stage_heads(values, to + pair)
        else:
            stage_heads(values, to + pair)


def stage_apart(v: list[Any], to: Any, group_bytes: Any) -> None:
    """Same as `stage_heads`, of dims of two neighbouring groups."""
    for column in range(2):
        for odd in range(2):
            word = pack(v[4 * column + odd], v[4 * column + 2 + odd], F16_KIND)
            at = to + (8 * column + odd) * plan.GROUP_BYTES
            ptx.run(
                "{ .reg .b16 low, high; mov.b32 {low, high}, {$r2}; "
                "st.shared.b16 [{$r0}], low; st.shared.b16 [{$r1}], high; }",
                at,
                at + group_bytes,
                word,
            )


def stage_heads(v: list[Any], to: Any) -> None:
    """Stage 16 heads of the lane's dims of a block: accumulators `v` to the lane's address."""
    for column in range(2):
        for odd in range(2):
            word = pack(v[4 * column + odd], v[4 * column + 2 + odd], F16_KIND)
            store_word(to + (8 * column + odd) * plan.GROUP_BYTES, word)


def store_floats(address: Any, values: list[Any]) -> None:
    """Store four fp32 to shared memory."""
    ptx.run("st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", address, *values)


@cute.jit
def stage_statistics(role: Math) -> None:
    """Write this CTA's maxima and sums to its offset among all CTAs'; O has scale 1."""
    ctx = role.ctx
    base = ctx.memory.q.address() + ctx.rank * plan.CTA_STATISTICS_BYTES
    for number in cutlass.range_constexpr(HEADS // 4):
        to = (
            base
            + (softmax.first_head(ctx.thread) + softmax.offset_of_head(number))
            * plan.STATISTICS_BYTES
        )
        if role.consumer == 0:
            merged = merge_sums(role, number)
            store_pair(to, merged.top, merged.total)
        smem.store_float(to + (2 + role.consumer) * FP32, Float32(1.0))
