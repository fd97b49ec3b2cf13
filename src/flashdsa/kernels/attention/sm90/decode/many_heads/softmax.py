"""The step from S^T to P^T of 64 heads: logits against common maxima, and the sums.

A lane has two keys of the warp's 16, and 16 heads. Maxima are common to both consumers, as both
add the tiles of both to their O; they are updated where a logit is far above them, which is rare
after the first tile. Values are times a power of two, which keeps them within f16 and follows the
largest scale likewise.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from flashdsa.dsl.fragments import F16_KIND, THREAD_ROWS, exp2, pack
from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.smem import load_words
from flashdsa.dsl.warp_matrix import store_matrices
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.softmax import NO_KEY, Scale
from flashdsa.kernels.attention.sm90.core.tile import FP32, ROWS, TILES
from flashdsa.kernels.attention.sm90.decode.key_rows.lanes import (
    first_head,
    head_of,
    offset_of_head,
    reduce_keys,
)
from flashdsa.kernels.attention.sm90.decode.key_rows.plan import CONSUMERS, WARPS
from flashdsa.kernels.attention.sm90.decode.many_heads.plan import MOVES, STATE, TOPS_PITCH
from flashdsa.kernels.attention.sm90.decode.shared.context import Context
from flashdsa.kernels.attention.sm90.decode.shared.words import BIAS, bits_of, power_of_two
from flashdsa.plan.row_tiles import ROW_BYTES

FIRST_MEETING = 1
"""Named barrier of the first consumer; the second one's follows."""
LANE_HEADS = ROWS // 4
"""Heads of a lane."""
MOST_LOG2 = 7
"""log2 of a bound of scales times their power of two: e4m3 times these are f16."""
MOST_POWER = 60
"""Largest exponent of a power of two for scales."""
LEAST_LOGIT = -1.0e30
"""Minimum of a maximum: it can be subtracted from a logit of minus infinity."""
SEEN = ROWS
"""Place in `maxima`, behind them: 1 if there are any."""
MOVED, POWER = ROWS, ROWS + 1
"""Places in a tile's `moves`, behind its factors: 1 if there are any, and the power's exponent."""


class Heads(NamedTuple):
    """Values of the lane's heads, in registers. Their maxima are in shared memory."""

    totals: cute.Tensor  # (LANE_HEADS,) fp32: sums over the lane's keys of the consumer's tiles
    power: cute.Tensor  # (1,) Int32: exponent of the power of two that values are times


class Place(NamedTuple):
    """A lane's keys of a tile."""

    row: Int32  # address of the first one
    key: Int32  # number of the first one in its piece
    mask: Int32  # of its piece
    powers: list[Any]  # exponents of the powers of two that S^T of each key is times


def meet(consumer: Any) -> None:
    """Sync the warps of a consumer."""
    cute.arch.barrier(barrier_id=FIRST_MEETING + consumer, number_of_threads=WARPGROUP_SIZE)


@cute.jit
def any_of_consumer(ctx: Context, condition: Boolean, step: Int32, consumer: Int32) -> Boolean:
    """Whether any thread of a consumer has the condition; syncs them.

    A barrier that reduces is as fast, and ptxas makes 6 KB more code with it.
    """
    # Votes of the step before may still be read: two steps have their own.
    place = (consumer * TILES + (step & 1)) * WARPS
    found = cute.arch.vote_any_sync(condition)
    votes = ctx.memory.votes.array(Int32, CONSUMERS * TILES * WARPS)
    if ctx.thread % WARP_SIZE == 0:
        votes[place + ctx.thread // WARP_SIZE] = Int32(found)
    meet(consumer)
    words = load_words(ctx.memory.votes.address() + place * 4, Int32)
    return Boolean((words[0] | words[1] | words[2] | words[3]) != 0)


def new_heads() -> Heads:
    """Heads without a key."""
    totals = cute.make_rmem_tensor(LANE_HEADS, Float32)
    heads = Heads(totals, cute.make_rmem_tensor(1, Int32))
    restart(heads)
    return heads


def restart(heads: Heads) -> None:
    """Forget all keys."""
    heads.totals.fill(0.0)
    heads.power.fill(MOST_POWER)


def state_of(ctx: Context) -> cute.Tensor:
    """Maxima of all heads, and whether there are any."""
    return ctx.memory.maxima.array(Float32, STATE)


def moves_of(ctx: Context, tile: Any) -> cute.Tensor:
    """Moves before a tile of a step."""
    return ctx.memory.moves.array(Float32, MOVES, tile)


def load_pairs(address: Any, lane: Any) -> list[Any]:
    """Load an fp32 of each of the lane's heads, of those of all heads at an address."""
    values: list[Any] = []
    for pair in range(LANE_HEADS // 2):
        values += cute.arch.inline_ptx(
            "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
            write_only_types=[Float32, Float32],
            read_only_args=[address + (first_head(lane) * FP32 + pair * 32)],
        )
    return values


def power_for(scales: list[Any]) -> Any:
    """Exponent of the power of two that takes the largest of a key's scales below the bound."""
    largest = scales[0]
    for value in scales[1:]:
        largest = cute.arch.fmax(largest, value)
    exponent = ((bits_of(largest) >> 23) & 255) - BIAS
    return cutlass.min(MOST_LOG2 - 1 - exponent, Int32(MOST_POWER))


@cute.jit
def factors_of_heads(ctx: Context, scale: Scale) -> list[Any]:
    """Factors of the lane's heads from S^T to logits in base 2."""
    factor = scale.factor
    if scale.negative:
        factor = -scale.factor
    units = load_pairs(ctx.memory.row_unit.address(), ctx.thread % WARP_SIZE)
    return [unit * factor for unit in units]


@cute.jit
def subtract_tops(s: cute.Tensor, place: Place, factors: list[Any], tops: list[Any]) -> Float32:
    """Make logits in base 2 of S^T, less their heads' maxima; return the largest one.

    Args:
        factors, tops: of the lane's heads.
    """
    units = [power_of_two(-power) for power in place.powers]
    largest = [Float32(NO_KEY) for _ in range(4)]
    for i in cutlass.range_constexpr(cute.size(s)):
        number, h = head_of(i), i // 2 % THREAD_ROWS
        s[i] = s[i] * units[h] * factors[number] - tops[number]
        largest[i % 4] = cute.arch.fmax(largest[i % 4], s[i])
    low, high = (cute.arch.fmax(largest[i], largest[i + 1]) for i in (0, 2))
    return cute.arch.fmax(low, high)


@cute.jit
def mask_keys(s: cute.Tensor, place: Place) -> None:
    """Set logits of keys that are not valid to NO_KEY."""
    if place.mask != -1:
        # Or bits of the lane's keys would be computed once, and spill.
        key = opaque(place.key)
        for h in cutlass.range_constexpr(THREAD_ROWS):
            valid = (place.mask >> (key + 8 * h)) & 1
            for i in cutlass.range_constexpr(cute.size(s)):
                if cutlass.const_expr(i // 2 % THREAD_ROWS == h):
                    s[i] = s[i] if valid != 0 else Float32(NO_KEY)


@cute.jit
def update_maxima(
    ctx: Context,
    s: cute.Tensor,
    heads: Heads,
    tops: list[Any],
    power: Int32,
    is_first: Boolean,
    consumer: Int32,
) -> None:
    """A consumer: move the maxima that a logit of its tile is far above, and the power of two if a
    scale is too large; rescale its sums and logits, and store the factors of O.

    Args:
        tops: maxima of the lane's heads. power: exponent for the scales of the lane's keys.
        is_first: there are no maxima yet.
    """
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    shared = ctx.memory.tops.array(Float32, CONSUMERS * WARPS * TOPS_PITCH)
    of_first = consumer * WARPS * TOPS_PITCH
    mine = of_first + warp * TOPS_PITCH
    for number in cutlass.range_constexpr(LANE_HEADS):
        of_head = [i for i in range(cute.size(s)) if head_of(i) == number]
        top = reduce_keys(cute.arch.fmax(s[of_head[0]], s[of_head[1]]), cute.arch.fmax)
        if lane < 4:
            shared[mine + first_head(lane) + offset_of_head(number)] = top
    power = reduce_keys(power, cutlass.min)
    if lane == 0:
        shared[mine + ROWS] = Float32(power)
    # All of the consumer have read the maxima before, and all have stored their tile's.
    meet(consumer)
    power = heads.power[0]
    for other in cutlass.range_constexpr(WARPS):
        power = cutlass.min(power, Int32(shared[of_first + other * TOPS_PITCH + ROWS]))
    moved = exp2(Float32(power - heads.power[0]))
    heads.power[0] = power
    state, moves = state_of(ctx), moves_of(ctx, consumer)
    for number in cutlass.range_constexpr(LANE_HEADS):
        head = first_head(lane) + offset_of_head(number)
        above = Float32(NO_KEY)
        for other in cutlass.range_constexpr(WARPS):
            above = cute.arch.fmax(above, shared[of_first + other * TOPS_PITCH + head])
        factor = Float32(1.0)
        if is_first:
            above = cute.arch.fmax(above, Float32(LEAST_LOGIT))
        else:
            if above <= ctx.plan.lazy_log2:
                above = Float32(0.0)
            factor = exp2(-above)
        heads.totals[number] = heads.totals[number] * factor
        for i in cutlass.range_constexpr(cute.size(s)):
            if cutlass.const_expr(head_of(i) == number):
                s[i] = s[i] - above
        if ctx.thread < 4:
            state[head] = tops[number] + above
            moves[head] = factor * moved
    if ctx.thread == 0:
        state[SEEN] = Float32(1.0)
        moves[POWER] = Float32(power)
    meet(consumer)


@cute.jit
def adopt_moves(ctx: Context, heads: Heads, tile: cutlass.Constexpr) -> None:
    """Rescale this consumer's sums, and take the power of two, if the other one has moved maxima
    before its tile."""
    moves = moves_of(ctx, tile)
    if moves[MOVED] != 0.0:
        power = Int32(moves[POWER])
        back = exp2(Float32(heads.power[0] - power))
        heads.power[0] = power
        factors = load_pairs(address_of_moves(ctx, tile), ctx.thread % WARP_SIZE)
        for number in cutlass.range_constexpr(LANE_HEADS):
            heads.totals[number] = heads.totals[number] * (factors[number] * back)


def address_of_moves(ctx: Context, tile: Any) -> Any:
    """Address of the factors of O before a tile."""
    return ctx.memory.moves.address() + tile * (MOVES * FP32)


@cute.jit
def exponentiate(s: cute.Tensor, totals: cute.Tensor) -> list[Any]:
    """Compute P, and add it to the sums."""
    p = []
    for i in cutlass.range_constexpr(cute.size(s)):
        value = exp2(s[i])
        totals[head_of(i)] = totals[head_of(i)] + value
        p.append(value)
    return p


@cute.jit
def store_p(thread: Int32, p: list[Any], to: Any) -> None:
    """Store P^T to shared memory; its rows are heads."""
    warp, lane = thread // WARP_SIZE, thread % WARP_SIZE
    head = lane // 16 * 8 + lane % 8
    unit = (2 * warp + lane // 8 % 2) ^ (lane % 8)
    at = to + head * ROW_BYTES + unit * 16
    words = [pack(p[2 * j], p[2 * j + 1], F16_KIND) for j in range(len(p) // 2)]
    for four in cutlass.range_constexpr(len(words) // 4):
        store_matrices(at + four * 16 * ROW_BYTES, words[4 * four : 4 * four + 4], transposed=True)
