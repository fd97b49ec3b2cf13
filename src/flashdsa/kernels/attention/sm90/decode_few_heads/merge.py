"""The end of a CTA's steps: its consumers exchange halves of O, and each stages half of the dims.

The staged data are those of the other decode (`decode/stage.py`), and are combined likewise
(`decode/combine.py`).
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, cute

from flashdsa.dsl.fragments import F16_KIND, exp2, pack
from flashdsa.dsl.fragments import MMA_ROWS as MMA_ROWS_OF_WARP
from flashdsa.dsl.smem import load_words, store_float
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import FP32
from flashdsa.kernels.attention.sm90.decode.context import meet_consumers
from flashdsa.kernels.attention.sm90.decode.exchange import expect_parts
from flashdsa.kernels.attention.sm90.decode.plan import (
    DIM_GROUPS,
    GROUP_BYTES,
    GROUP_DIMS,
    STAGED_AT,
)
from flashdsa.kernels.attention.sm90.decode.stage import (
    OF_CTA,
    STATISTICS_BYTES,
    staged_rows,
    store_pair,
)
from flashdsa.kernels.attention.sm90.decode_few_heads.consume import Math, Registers
from flashdsa.kernels.attention.sm90.decode_few_heads.plan import CONSUMERS, WARPS
from flashdsa.kernels.attention.sm90.decode_few_heads.products import BLOCKS, MMA_ROWS
from flashdsa.kernels.attention.sm90.decode_few_heads.softmax import (
    first_head,
    first_maximum,
    head_of,
    offset_of_head,
    reduce_keys,
)

HALF_BLOCKS = BLOCKS // CONSUMERS
WORDS = 4


@cute.jit
def stage_share(role: Math, r: Registers) -> None:
    """Stage a consumer's half of the dims of O, of all the CTA's tiles, for the CTAs of the
    cluster."""
    ctx = role.ctx
    publish_sums(role, r)
    # Other CTAs' copies overwrite memory from which threads have read keys and Q.
    cute.arch.fence_proxy("async.shared", space="cta")
    # all_read: nobody reads keys or Q any more; all sums are written.
    meet_consumers(ctx, "all_read")
    # The CTAs of the cluster have initialised their barriers: none has been sent anything before.
    cute.arch.cluster_wait()
    if ctx.num_ctas > 1:
        if role.side == 0:
            expect_parts(role.output)
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
    columns = ctx.plan.columns
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    pitch = columns + 4
    sums = ctx.arena.array("sums", Float32, CONSUMERS * WARPS * pitch)
    base = (role.side * WARPS + warp) * pitch + first_head(lane)
    for number in cutlass.range_constexpr(columns // 4):
        total = reduce_keys(r.heads.total[number], lambda a, b: a + b)
        if lane < 4:
            sums[base + offset_of_head(number)] = total


class Merged(NamedTuple):
    """Merged maxima and sum of a head, of both consumers."""

    tops: list[Any]  # each one's maximum
    top: Any  # the larger one
    total: Any  # the sum against it


def merge_sums(role: Math, number: int) -> Merged:
    """Merge the sums of the lane's head of that number."""
    ctx = role.ctx
    columns, factor = ctx.plan.columns, role.output.scale.factor
    pitch = columns + 4
    sums = ctx.arena.array("sums", Float32, CONSUMERS * WARPS * pitch)
    maxima = ctx.arena.array("maxima", Float32, CONSUMERS * WARPS * columns)
    at = first_head(ctx.thread % WARP_SIZE) + offset_of_head(number)
    offset = offset_of_head(number)
    tops = [maxima[first_maximum(ctx, side, 0) + offset] for side in range(CONSUMERS)]
    top = cute.arch.fmax(*tops)
    total = Float32(0.0)
    for side in range(CONSUMERS):
        of_warps = [sums[(side * WARPS + warp) * pitch + at] for warp in range(WARPS)]
        total = total + sum(of_warps[1:], of_warps[0]) * exp2((tops[side] - top) * factor)
    return Merged(tops, top, total)


@cute.jit
def find_factors(role: Math, r: Registers) -> list[Any]:
    """Factors of this consumer's O of the lane's heads, before both are added: 0 of a head without
    a key."""
    unit = Float32(0.0) - Float32(r.heads.power[0])
    factors = []
    for number in cutlass.range_constexpr(role.ctx.plan.columns // 4):
        merged = merge_sums(role, number)
        mine = merged.tops[1] if role.side == 1 else merged.tops[0]
        own = exp2((mine - merged.top) * role.output.scale.factor + unit)
        inverse = cute.arch.rcp_approx(merged.total) if merged.total != 0.0 else Float32(0.0)
        factors.append(own * inverse)
        # Otherwise the values that all heads read would be in registers at once.
        cute.arch.sync_warp()
    return factors


@cute.jit
def exchange_halves(role: Math, r: Registers, factors: list[Any]) -> list[Any]:
    """Exchange halves; return this consumer's half of the dims, of both consumers."""
    ctx = role.ctx
    columns = ctx.plan.columns
    count = columns // 2
    half = HALF_BLOCKS * count
    first, second = (ctx.arena.address(name) + offset for name, offset in ctx.plan.halves)
    own_at, other_at = first, second
    if role.side == 1:
        own_at, other_at = second, first
    mine = []
    to = other_at + ctx.thread * (WORDS * FP32)
    for four in cutlass.range_constexpr(half // WORDS):
        others = []
        for i in cutlass.range_constexpr(WORDS * four, WORDS * four + WORDS):
            factor = factors[head_of(i % count)]
            low, high = r.out[i], r.out[half + i]
            mine.append((high if role.side == 1 else low) * factor)
            others.append((low if role.side == 1 else high) * factor)
        store_floats(to + four * (WARPGROUP_SIZE * WORDS * FP32), others)
    # halves: the other consumer's part of this one's dims has come.
    meet_consumers(ctx, "halves")
    at = own_at + ctx.thread * (WORDS * FP32)
    results = []
    for four in cutlass.range_constexpr(half // WORDS):
        words = load_words(at + four * (WARPGROUP_SIZE * WORDS * FP32), Float32)
        for word in cutlass.range_constexpr(WORDS):
            results.append(mine[WORDS * four + word] + words[word])
    return results


@cute.jit
def stage_dims(role: Math, half: list[Any]) -> None:
    """Stage this consumer's groups of dims, as f16: a lane has two neighbouring ones of a head."""
    ctx = role.ctx
    count = ctx.plan.columns // 2
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    rows = staged_rows(role.output)
    group = role.side * (DIM_GROUPS // CONSUMERS) + 2 * warp + lane // 16
    base = ctx.arena.address("k") + STAGED_AT
    base = base + (lane // 4 % 4 * 4 + first_head(lane) * GROUP_BYTES)
    for block in cutlass.range_constexpr(HALF_BLOCKS):
        to = base + (group + block * (MMA_ROWS // GROUP_DIMS)) * (rows * GROUP_BYTES)
        for heads in cutlass.range_constexpr(ctx.plan.columns // MMA_ROWS_OF_WARP):
            if heads * MMA_ROWS_OF_WARP < rows:
                first = block * count + 8 * heads
                at = to + heads * (MMA_ROWS_OF_WARP * GROUP_BYTES)
                stage_heads(half[first : first + 8], at)


def stage_heads(v: list[Any], to: Any) -> None:
    """Stage 16 heads of the lane's dims of a block: accumulators `v` to the lane's address."""
    for column in range(2):
        for odd in range(2):
            word = pack(v[4 * column + odd], v[4 * column + 2 + odd], F16_KIND)
            store_word(to + (8 * column + odd) * GROUP_BYTES, word)


def store_word(address: Any, word: Any) -> None:
    """Store a word to shared memory."""
    cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, word])


def store_floats(address: Any, values: list[Any]) -> None:
    """Store four fp32 to shared memory."""
    cute.arch.inline_ptx(
        "st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *values],
    )


@cute.jit
def stage_statistics(role: Math) -> None:
    """Write this CTA's maxima and sums, by four lanes, to its offset among all CTAs'. O has scale
    1."""
    ctx = role.ctx
    base = ctx.arena.address("q") + ctx.rank * OF_CTA
    for number in cutlass.range_constexpr(ctx.plan.columns // 4):
        to = base + (first_head(ctx.thread) + offset_of_head(number)) * STATISTICS_BYTES
        if role.side == 0:
            merged = merge_sums(role, number)
            store_pair(to, merged.top, merged.total)
        store_float(to + (2 + role.side) * FP32, Float32(1.0))
