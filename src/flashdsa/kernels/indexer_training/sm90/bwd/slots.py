"""A group's slots as the lists' kernel knows them, and the bits of keys that it keeps.

Key i of a block of 1,024 keys is a bit of the block's word i % 32, so that neighbouring keys are in
different banks of shared memory. A key's list index is the number of bits before its own.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from flashdsa.dsl import smem
from flashdsa.dsl.smem import VECTOR
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer_training.sm90.bwd.plan import RANGE_KEYS, BwdPlan

WORD_KEYS = 32
BLOCK_KEYS = WORD_KEYS * WARP_SIZE
RANGE_WORDS = RANGE_KEYS // WORD_KEYS


class Slots(NamedTuple):
    """Slots that the group's queries name."""

    indices: cute.Tensor  # (S, topk) int32
    gradients: cute.Tensor  # (S, topk) fp32
    topk_length: cute.Tensor  # (S,) int32, or (0,): every slot counts
    num_keys: Int32
    first_query: Int32
    thread: Int32
    plan: cutlass.Constexpr


class Shared(NamedTuple):
    """Shared memory."""

    table: cute.Tensor  # (queries * table_places,) bits of fp32: of each query table_places
    listed: cute.Tensor  # (table_places,) int32: keys of the table's entries
    bits: cute.Tensor  # (RANGE_WORDS,) int32: of the keys of a range
    before: cute.Tensor  # (RANGE_WORDS,) int32: bits of the range before each word's
    counts: cute.Tensor  # (warps,) int32: bits in the words that each warp counts
    notes: cute.Tensor  # (3,) int32: queries that name a key; whether any repeats; gradients


PRESENT, REPEATED, NAMED = range(3)


class Range(NamedTuple):
    """Keys whose bits are in shared memory: from `base` to `end`, exclusive."""

    base: Int32
    end: Int32

    @property
    def words(self) -> Any:
        """Words of the range's bits, whole blocks."""
        return (self.end - self.base + (BLOCK_KEYS - 1)) // BLOCK_KEYS * WARP_SIZE


def allocate_shared(plan: BwdPlan) -> Shared:
    """The kernel's shared memory."""
    allocator = SmemAllocator()

    def words(count: int) -> Any:
        pointer = allocator.allocate_array(Int32, count)
        return cute.make_tensor(pointer, cute.make_layout(count))

    places, warps = plan.table_places, plan.list_threads // WARP_SIZE
    sizes = (plan.queries * places, places, RANGE_WORDS, RANGE_WORDS, warps, 3)
    return Shared(*(words(n) for n in sizes))


@cute.jit
def clear(x: Slots, words: cute.Tensor, first: Int32, end: Int32) -> None:
    """Clear the words from `first` to `end` at least, multiples of 4. All threads call."""
    begin, threads = first // VECTOR + x.thread, x.plan.list_threads
    smem.clear(words, begin, end // VECTOR, threads)


@cute.jit
def read_slots(x: Slots, start: Int32, turns: cutlass.Constexpr) -> list[list[tuple[Int32, Int32]]]:
    """Read `turns` slots of this thread, the first after `start`, for each query of the group: the
    key, and the bits of its gradient."""
    slots = []
    for turn in cutlass.range_constexpr(turns):
        slot = cutlass.min(
            start + turn * x.plan.list_threads + x.thread, Int32(x.indices.shape[1]) - 1
        )
        members = []
        for member in cutlass.range_constexpr(x.plan.queries):
            query = cutlass.min(x.first_query + member, Int32(x.indices.shape[0]) - 1)
            line = Int64(query) * x.indices.shape[1] + slot
            row = (x.indices.iterator + line).load()
            members.append((row, (x.gradients.iterator + line).load().bitcast(Int32)))
        slots.append(members)
    return slots


@cute.jit
def is_listed(x: Slots, keys: Range, row: Int32, gradient: Int32, counts: Boolean) -> Boolean:
    """Whether a slot gives a gradient to a key of the range. `counts`: whether it is one of the
    query's valid ones."""
    return counts and row >= keys.base and row < keys.end and gradient << 1 != 0


@cute.jit
def word_of(keys: Range, row: Int32) -> tuple[Int32, Int32]:
    """(the word of the key's bit, the bit's number)."""
    key = row - keys.base
    return key // BLOCK_KEYS * WARP_SIZE + key % WARP_SIZE, key // WARP_SIZE % WORD_KEYS


@cute.jit
def place_of(shared: Shared, keys: Range, row: Int32) -> Int32:
    """Index of a key whose bit is set: bits of the range before its own."""
    word, bit = word_of(keys, row)
    below = shared.bits[word] & ((Int32(1) << bit) - 1)
    return shared.before[word] + Int32(cute.arch.popc(below))
