"""Sort lists of rows by their scores, within the lists' memory: a warp a list, in its registers.

A word has the first bits of a score's distance to the best one, and below them the entry's index in
the list, so equal scores keep its order. Batcher's network sorts words of 32 bits, not keys of 64;
if the bits of neighbours are too few to tell, whole keys are compared afterwards.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.fake_tensors import WORD_ALIGNMENT, fake_tensor
from flashdsa.dsl.grids import launch_ctas
from flashdsa.dsl.memory import Memory
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.order.plan import OrderPlan
from flashdsa.kernels.indexer.select.sort_keys import INVALID, LOWEST, MAGNITUDE, key_of

WORST = 0xFFFFFFFF
"""Bits of an entry without a score: NaN, or none at all."""
TOGETHER = 8
"""Pairs of neighbours that a lane loads at the same time."""


@cute.kernel
def order_kernel(rows: cute.Tensor, scores: cute.Tensor, plan: cutlass.Constexpr):
    """One warp; arguments as in `launch_order`."""
    lane, _, _ = cute.arch.thread_idx()
    query, _, _ = cute.arch.block_idx()
    memory = Memory.allocate(plan)
    topk = Int32(rows.shape[1])
    first = Int64(query) * topk
    words = load_words(memory, scores.iterator + first, topk, lane, plan)
    sort_lane(words, plan)
    for level in cutlass.range(WARP_SIZE.bit_length() - 1, unroll=1):
        merge_lanes(words, Int32(1) << level, lane, plan)
    for i in cutlass.range_constexpr(plan.each):
        store_word(memory, lane * plan.each + i, Int32(words[i]), plan)
    cute.arch.sync_warp()
    settle(memory, lane, plan)
    write_rows(memory, rows.iterator + first, topk, lane, plan)


@cute.jit
def load_words(
    memory: Memory, scores: Any, topk: Int32, lane: Int32, plan: cutlass.Constexpr
) -> cute.Tensor:
    """Load this lane's words, one of each 32; write the keys of all entries to shared memory.
    scores: pointer to the list's scores, as words of `select/sort_keys.py`."""
    keys = cute.make_rmem_tensor(plan.each, Int32)
    for i in cutlass.range_constexpr(plan.each):
        index = lane + WARP_SIZE * i
        word = Int32(INVALID)
        if index < topk:
            word = (scores + index).load()
        keys[i] = key_of(word)
    whole = memory.list.array(Int32, plan.width)
    low, high = Int32(MAGNITUDE), Int32(LOWEST)
    for i in cutlass.range_constexpr(plan.each):
        whole[lane + WARP_SIZE * i] = keys[i]
        high = cutlass.max(high, keys[i])
        low = cutlass.min(low, keys[i] if keys[i] > LOWEST else Int32(MAGNITUDE))
    low = cute.arch.warp_redux_sync(low, "min")
    high = cute.arch.warp_redux_sync(high, "max")
    bits = Int32(32) - Int32(cute.arch.clz(high - low))
    shift = Uint32(cutlass.max(bits - (32 - plan.index_bits), Int32(0)))
    words = cute.make_rmem_tensor(plan.each, Uint32)
    for i in cutlass.range_constexpr(plan.each):
        distance = Uint32(high - keys[i]) >> shift
        if keys[i] <= LOWEST:
            distance = Uint32(WORST)
        words[i] = distance << Uint32(plan.index_bits) | Uint32(lane + WARP_SIZE * i)
    return words


def exchange(words: cute.Tensor, low: int, high: int) -> None:
    """Put the lesser word first."""
    one, two = words[low], words[high]
    words[low] = cutlass.min(one, two)
    words[high] = cutlass.max(one, two)


@cute.jit
def sort_lane(words: cute.Tensor, plan: cutlass.Constexpr) -> None:
    """Sort the lane's words in ascending order."""
    for level in cutlass.range_constexpr(1, plan.each.bit_length()):
        run = 1 << level
        for i in cutlass.range_constexpr(plan.each):
            if cutlass.const_expr(i < i ^ (run - 1)):
                exchange(words, i, i ^ (run - 1))
        merge_lane(words, run // 4, plan)


@cute.jit
def merge_lane(words: cute.Tensor, distance: cutlass.Constexpr, plan: cutlass.Constexpr) -> None:
    """Exchange words `distance` apart, then half as far, to neighbours."""
    for halved in cutlass.range_constexpr(distance.bit_length()):
        apart = distance >> halved
        for i in cutlass.range_constexpr(plan.each):
            if cutlass.const_expr(not i & apart):
                exchange(words, i, i + apart)


@cute.jit
def merge_lanes(words: cute.Tensor, run: Int32, lane: Int32, plan: cutlass.Constexpr) -> None:
    """Merge two neighbouring runs of `run` lanes, each in order, into one: the first with the
    second backwards, then as a lane does with its own words."""
    last, mask = plan.each - 1, 2 * run - 1
    first = (lane & run) == 0
    for i in cutlass.range_constexpr(plan.each // 2):
        other = cute.arch.shuffle_sync_bfly(words[last - i], mask)
        mirrored = cute.arch.shuffle_sync_bfly(words[i], mask)
        words[i] = kept(words[i], other, first)
        words[last - i] = kept(words[last - i], mirrored, first)
    apart = run >> 1
    while apart > 0:
        first = (lane & apart) == 0
        for i in cutlass.range_constexpr(plan.each):
            words[i] = kept(words[i], cute.arch.shuffle_sync_bfly(words[i], apart), first)
        apart = apart >> 1
    merge_lane(words, plan.each // 2, plan)


@cute.jit
def kept(own: Uint32, other: Uint32, first: cutlass.Boolean) -> Uint32:
    """The lesser one in the first of two lanes, else the greater."""
    return cutlass.min(own, other) if first else cutlass.max(own, other)


def store_word(memory: Memory, index: Int32, word: Int32, plan: Any) -> None:
    """Store an entry of the sorted list; those that lanes store together lie in different banks."""
    words = memory.words.array(Int32, plan.width + WARP_SIZE)
    words[index + index // plan.each] = word


def load_word(memory: Memory, index: Int32, plan: Any) -> Int32:
    """An entry of the sorted list."""
    return Int32(memory.words.array(Int32, plan.width + WARP_SIZE)[index + index // plan.each])


@cute.jit
def settle(memory: Memory, lane: Int32, plan: cutlass.Constexpr) -> None:
    """Order neighbours whose words differ only in their indices by their keys, until all are in
    order."""
    moved = Int32(1)
    while moved != 0:
        mine = Int32(0)
        for odd in cutlass.range_constexpr(2):
            for turn in cutlass.range(plan.each // 2 // TOGETHER, unroll=1):
                mine = mine | settle_pairs(memory, turn, odd, lane, plan)
            cute.arch.sync_warp()  # the others' pairs overlap
        moved = Int32(cute.arch.warp_redux_sync(mine, "max"))


@cute.jit
def settle_pairs(
    memory: Memory, turn: Int32, odd: cutlass.Constexpr, lane: Int32, plan: cutlass.Constexpr
) -> Int32:
    """Order some of this lane's pairs; return whether any pair was exchanged."""
    keys = memory.list.array(Int32, plan.width)
    indices, ones, twos = [], [], []
    for i in cutlass.range_constexpr(TOGETHER):
        index = 2 * ((turn * TOGETHER + i) * WARP_SIZE + lane) + odd
        indices.append(index)
        ones.append(load_word(memory, index, plan))
        twos.append(load_word(memory, cutlass.min(index + 1, plan.width - 1), plan))
    mine = Int32(0)
    for i in cutlass.range_constexpr(TOGETHER):
        one, two = ones[i], twos[i]
        if Uint32(one ^ two) < Uint32(plan.width):
            if keys[one & (plan.width - 1)] < keys[two & (plan.width - 1)]:
                store_word(memory, indices[i], two, plan)
                store_word(memory, indices[i] + 1, one, plan)
                mine = Int32(1)
    return mine


@cute.jit
def write_rows(
    memory: Memory, rows: Any, topk: Int32, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Write the list in its new order. Starts synced. rows: pointer to the list, read and then
    written."""
    old = memory.list.array(Int32, plan.width)
    for i in cutlass.range_constexpr(plan.each):
        index = lane + WARP_SIZE * i
        row = Int32(-1)
        if index < topk:
            row = (rows + index).load()
        old[index] = row
    cute.arch.sync_warp()  # all rows have been read
    for i in cutlass.range_constexpr(plan.each):
        index = lane + WARP_SIZE * i
        if index < topk:
            (rows + index).store(old[load_word(memory, index, plan) & (plan.width - 1)])


@cute.jit
def launch_order(plan: cutlass.Constexpr, stream: Any, rows: cute.Tensor, scores: cute.Tensor):
    """Launch on `stream`.

    Args:
        rows: (S, topk) int32, at most plan.width each: put in descending order of score, of equal
            scores in the order that they have.
        scores: (S, topk) int32, words of `select/sort_keys.py`: bits of fp32, or NAN, or INVALID.
    """
    launch_ctas(order_kernel(rows, scores, plan), rows.shape[0], WARP_SIZE, stream)


def compile_order(plan: OrderPlan) -> Any:
    """Compile `launch_order`."""
    lists = fake_tensor(Int32, (cute.sym_int32(), cute.sym_int32()), WORD_ALIGNMENT)
    return compile_launch(plan.arch, launch_order, plan, lists, lists)
