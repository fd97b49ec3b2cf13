"""Common work of the lanes of a warp: sums, searches and slots of their own."""

from typing import Any

import cutlass
from cutlass import Int32, cute

from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE

LAST_LANE = WARP_SIZE - 1
COUNT_BITS = 16
"""Bits of a count: two counts share a word, so that one prefix sum sums both."""
COUNT_MASK = (1 << COUNT_BITS) - 1


def warpgroup_idx() -> Int32:
    """Number of the warpgroup in its CTA, as the compiler knows of all its threads."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP_SIZE // WARP_SIZE)


def uniform(value: Int32) -> Int32:
    """The same value, which all lanes have, in a uniform register: a reduction's result is in one,
    and so is what follows from it. All lanes call."""
    return Int32(cute.arch.warp_redux_sync(value, "max"))


def kept(value: Int32, lane: Int32) -> Int32:
    """The same value, which ptxas keeps in a register: it recomputes values that it can compute in
    every iteration of a long loop, and it cannot compute a shuffle. All lanes call."""
    return Int32(cute.arch.shuffle_sync(value, lane))


@cute.jit
def prefix_sum(value: Int32, lane: Int32) -> Int32:
    """Inclusive sum over the lanes up to this one; all lanes call."""
    total = value
    for step in cutlass.range_constexpr(WARP_SIZE.bit_length() - 1):
        other = cute.arch.shuffle_sync_up(total, 1 << step, mask_and_clamp=0)
        if lane >= (1 << step):
            total += other
    return total


@cute.jit
def prefix_sums(counts: list[Int32], lane: Int32) -> list[Int32]:
    """The sum up to this lane of each of an even number of counts, at most 32 a lane; all call."""
    totals = []
    for pair in cutlass.range_constexpr(len(counts) // 2):
        totals.append(counts[2 * pair] | counts[2 * pair + 1] << COUNT_BITS)
    for step in cutlass.range_constexpr(WARP_SIZE.bit_length() - 1):
        below = Int32(1) if lane >= (1 << step) else Int32(0)
        others = [cute.arch.shuffle_sync_up(total, 1 << step, mask_and_clamp=0) for total in totals]
        totals = [total + other * below for total, other in zip(totals, others, strict=True)]
    sums = []
    for total in totals:
        sums += [total & COUNT_MASK, total >> COUNT_BITS]
    return sums


@cute.jit
def neighbours_sum(value: Any, lanes: cutlass.Constexpr) -> Any:
    """Sum over each `lanes` neighbouring lanes, a power of two, in all of them."""
    total = value
    for step in cutlass.range_constexpr(lanes.bit_length() - 1):
        total += cute.arch.shuffle_sync_bfly(total, 1 << step)
    return total


@cute.jit
def sums_over_lanes(values: list[Any], lane: Int32) -> Any:
    """Sums of each of 2, 4, 8 or 16 values over all lanes; lane i has that of value
    i * len(values) // 32."""
    step = WARP_SIZE // 2
    while cutlass.const_expr(len(values) > 1):
        half = len(values) // 2
        is_upper = lane & step != 0
        own = [values[half + i] if is_upper else values[i] for i in range(half)]
        other = [values[i] if is_upper else values[half + i] for i in range(half)]
        values = [own[i] + cute.arch.shuffle_sync_bfly(other[i], step) for i in range(half)]
        step //= 2
    return neighbours_sum(values[0], 2 * step)


@cute.jit
def first_lane_where(condition: cutlass.Boolean) -> Int32:
    """The first lane for which the condition holds; the last lane if it holds for none."""
    mask = cute.arch.vote_ballot_sync(condition)
    return lowest_bit(mask) if mask != 0 else Int32(LAST_LANE)


def lowest_bit(mask: Any) -> Int32:
    """Number of the lowest 1 of 32 bits; -1 if no bit is 1."""
    return Int32(LAST_LANE) - Int32(cute.arch.clz(mask & (Int32(0) - mask)))


@cute.jit
def reserve(counter: Any, count: Int32) -> Int32:
    """The first of `count` slots, the same for all lanes, with one atomic; 0, without one, if
    `count` is 0.

    Args:
        counter: as in `alloc_slot`.
    """
    first = Int32(0)
    if count != 0:
        if cute.arch.lane_idx() == 0:
            first = cute.arch.atomic_add(counter, count, sem="relaxed", scope="cta")
        first = cute.arch.shuffle_sync(first, 0)
    return first


@cute.jit
def alloc_slots(
    counter: Any, wanted: cute.Tensor, slots: cute.Tensor, count: cutlass.Constexpr
) -> None:
    """Same as `alloc_slot`, several a lane, with one atomic a warp for all of them.

    Args:
        wanted: (count,) Int32 registers, not 0 where the lane wants one.
        slots: (count,) Int32 registers, written.
    """
    total = Int32(0)
    for i in cutlass.range_constexpr(count):
        mask = cute.arch.vote_ballot_sync(wanted[i] != 0)
        slots[i] = total + Int32(cute.arch.popc(mask & Int32(cute.arch.lanemask_lt())))
        total += Int32(cute.arch.popc(mask))
    base = reserve(counter, total)
    for i in cutlass.range_constexpr(count):
        slots[i] += base


@cute.jit
def alloc_slot(counter: Any, wanted: cutlass.Boolean) -> Int32:
    """A slot of its own for each lane that wants one, with one atomic a warp; all lanes call.

    Args:
        counter: pointer to the number of slots in use, Int32 in this CTA's shared memory.
    """
    mask = cute.arch.vote_ballot_sync(wanted)
    base = reserve(counter, Int32(cute.arch.popc(mask)))
    return base + Int32(cute.arch.popc(mask & Int32(cute.arch.lanemask_lt())))


@cute.jit
def ones_of(words: cute.Tensor, begin: Int32, end: Int32, lane: Int32) -> Int32:
    """Ones in the words `begin` to `end` - 1, by all lanes of a warp."""
    ones = Int32(0)
    for i in cutlass.range(begin + lane, end, WARP_SIZE, unroll=4):
        ones += Int32(cute.arch.popc(words[i]))
    return Int32(cute.arch.warp_redux_sync(ones, "add"))
