"""The step from S^T to P^T: a consumer's maxima of a tile, its sums, and the factors of O^T.

A lane has two keys of the warp's 16 and a fourth of the heads. The maxima are those of all four
warps, as all their keys add to the same O. P is multiplied by each of a key's scales, and by a
power of two that keeps the products in the range of f16.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.fragments import F16_KIND, THREAD_ROWS, exp2, pack
from flashdsa.dsl.warp_matrix import store_matrices
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.softmax import LEAST, NO_KEY, Scale
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import CONSUMERS, HEADS, WARPS
from flashdsa.kernels.attention.sm90.decode.few_heads.products import load_scales
from flashdsa.kernels.attention.sm90.decode.shared.context import Context
from flashdsa.kernels.attention.sm90.decode.shared.words import BIAS, bits_of, power_of_two
from flashdsa.plan.row_tiles import ROW_BYTES

LANE_HEADS = 2
"""Neighbouring heads of a lane in each 8 columns."""


def head_of(i: int) -> int:
    """Number among the lane's heads of its accumulator i of a block of S^T or O^T."""
    return i // 4 * LANE_HEADS + i % LANE_HEADS


def first_head(lane: Any) -> Any:
    """The lane's first head; the others are 1, 8, 9, 16, ... heads later."""
    return lane % 4 * LANE_HEADS


def offset_of_head(number: int) -> int:
    """Heads from the lane's first one to that of a number."""
    return number // LANE_HEADS * 8 + number % LANE_HEADS


def reduce_keys(value: Any, combine: Any) -> Any:
    """Reduce over the lanes that have the same heads; all of them get the result."""
    for offset in (4, 8, 16):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset))
    return value


MOST_LOG2 = 7
"""log2 of a bound: the largest scale < 2^7 after scaling; P <= 2^8, below the largest f16."""
FIRST_POWER = 100


class Heads(NamedTuple):
    """Values of the lane's heads, in registers. Shared memory has their maxima, for each warp."""

    total: cute.Tensor  # (HEADS / 4,) fp32: over the lane's keys
    power: cute.Tensor  # (1,) Int32: O is scaled by 2^power, but for bf16 columns


@cute.jit
def new_heads(ctx: Context, consumer: Int32) -> Heads:
    """Heads without a key."""
    count = HEADS // 4
    total = cute.make_rmem_tensor(count, Float32)
    power = cute.make_rmem_tensor(1, Int32)
    total.fill(0.0)
    power.fill(FIRST_POWER)
    store_maxima(ctx, consumer, [Float32(LEAST)] * count)
    return Heads(total, power)


def first_maximum(ctx: Context, consumer: Any, warp: Any) -> Any:
    """Index of a warp's maximum of the lane's first head: a score that sums and O are against."""
    return (consumer * WARPS + warp) * HEADS + first_head(ctx.thread % WARP_SIZE)


@cute.jit
def store_maxima(ctx: Context, consumer: Int32, values: list[Any]) -> None:
    """Store the warp's maxima, which are equal in all four warps."""
    maxima = ctx.memory.maxima.array(Float32, CONSUMERS * WARPS * HEADS)
    first = first_maximum(ctx, consumer, ctx.thread // WARP_SIZE)
    if ctx.thread % WARP_SIZE < 4:
        for number in cutlass.range_constexpr(HEADS // 4):
            maxima[first + offset_of_head(number)] = values[number]
    cute.arch.sync_warp()


@cute.jit
def mask_keys(s: list[Any], units: list[Any], scale: Scale, word: Int32, key: Int32) -> list[Any]:
    """Scores of Q as it was given, NO_KEY for keys that are not valid; the scale's sign. `units`:
    scales of the lane's heads. `word`: the piece's mask. `key`: the lane's first in it."""
    sign = Float32(-1.0) if scale.negative else Float32(1.0)
    valid = [(word >> (key + 8 * h)) & 1 for h in range(THREAD_ROWS)]
    masked = []
    for i in cutlass.range_constexpr(len(s)):
        value = s[i] * (units[head_of(i)] * sign)
        masked.append(value if valid[i // 2 % THREAD_ROWS] != 0 else Float32(NO_KEY))
    return masked


@cute.jit
def find_tops(
    ctx: Context, s: list[Any], row: Int32, consumer: Int32, meet: cutlass.Constexpr
) -> tuple[list[Any], Any]:
    """The tile's maxima of the lane's heads, and its largest scale, over the consumer's warps.
    `row`: the address of the lane's first key. `meet`: makes the consumer's warps wait for each
    other."""
    pitch = HEADS + 4
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    shared = ctx.memory.tops.array(Float32, 2 * WARPS * pitch)
    mine = (consumer * WARPS + warp) * pitch
    tops = []
    for number in cutlass.range_constexpr(HEADS // 4):
        of_head = [value for i, value in enumerate(s) if head_of(i) == number]
        tops.append(reduce_keys(cute.arch.fmax(of_head[0], of_head[1]), cute.arch.fmax))
    largest = Float32(0.0)
    for of_key in load_scales(ctx.plan, row):
        for value in of_key:
            largest = cute.arch.fmax(largest, value)
    largest = reduce_keys(largest, cute.arch.fmax)
    if lane < 4:
        for number in cutlass.range_constexpr(HEADS // 4):
            shared[mine + first_head(lane) + offset_of_head(number)] = tops[number]
        shared[mine + HEADS] = largest
    meet(ctx, consumer)
    for number in cutlass.range_constexpr(HEADS // 4):
        tops[number] = Float32(NO_KEY)
    largest = Float32(0.0)
    for other in cutlass.range_constexpr(WARPS):
        at = (consumer * WARPS + other) * pitch
        for number in cutlass.range_constexpr(HEADS // 4):
            value = shared[at + first_head(lane) + offset_of_head(number)]
            tops[number] = cute.arch.fmax(tops[number], value)
        largest = cute.arch.fmax(largest, shared[at + HEADS])
    return tops, largest


@cute.jit
def move_tops(
    ctx: Context, heads: Heads, tops: list[Any], largest: Any, scale: Scale, consumer: Int32
) -> tuple[list[Any], list[Any], Any]:
    """Update the maxima that have grown, and rescale the sums.

    Returns:
        The maxima, the factors of O, and one more of the dims whose P is times scales.
    """
    maxima = ctx.memory.maxima.array(Float32, CONSUMERS * WARPS * HEADS)
    first = first_maximum(ctx, consumer, ctx.thread // WARP_SIZE)
    exponent = ((bits_of(largest) >> 23) & 255) - BIAS
    power = heads.power[0]
    if exponent + 1 + power > MOST_LOG2:
        power = MOST_LOG2 - 1 - exponent
    moved = exp2(Float32(power - heads.power[0]))
    heads.power[0] = power
    factors, taken = [], []
    for number in cutlass.range_constexpr(len(tops)):
        old = maxima[first + offset_of_head(number)]
        new = tops[number] if (tops[number] - old) * scale.factor > ctx.plan.lazy_log2 else old
        factor = exp2((old - new) * scale.factor)
        heads.total[number] = heads.total[number] * factor
        factors.append(factor)
        taken.append(new)
    cute.arch.sync_warp()
    store_maxima(ctx, consumer, taken)
    return taken, factors, moved


@cute.jit
def exponentiate(s: list[Any], heads: Heads, tops: list[Any], scale: Scale) -> list[Any]:
    """Compute P against these maxima, and add it to the sums."""
    p = []
    for i in cutlass.range_constexpr(len(s)):
        number = head_of(i)
        value = exp2((s[i] - tops[number]) * scale.factor)
        heads.total[number] = heads.total[number] + value
        p.append(value)
    return p


@cute.jit
def store_p(ctx: Context, p: list[Any], row: Int32, heads: Heads, to: Any) -> None:
    """Store P^T to shared memory: its rows are heads, for each group times the keys' scales; then
    as it is, for bf16 columns of the value. `row`: the address of the lane's first key. `to`: an
    address."""
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    head = lane // 16 * 8 + lane % 8
    unit = (2 * warp + lane // 8 % 2) ^ (lane % 8)
    at = to + head * ROW_BYTES + unit * 16
    unit_of_scales = power_of_two(heads.power[0])
    scales = load_scales(ctx.plan, row)
    for part in cutlass.range_constexpr(ctx.plan.parts):
        values = p
        if cutlass.const_expr(part < ctx.plan.form.num_scales):
            factors = [scales[h][part] * unit_of_scales for h in range(THREAD_ROWS)]
            values = [value * factors[i // 2 % THREAD_ROWS] for i, value in enumerate(p)]
        words = [pack(values[2 * j], values[2 * j + 1], F16_KIND) for j in range(len(p) // 2)]
        for four in cutlass.range_constexpr(len(words) // 4):
            place = at + (part * ctx.plan.operand_bytes + four * 16 * ROW_BYTES)
            store_matrices(place, words[4 * four : 4 * four + 4], transposed=True)
    # The products read P through the asynchronous proxy.
    cute.arch.fence_proxy("async.shared", space="cta")
