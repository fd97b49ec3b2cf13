"""A group's slots as the union's kernel knows them, and its shared memory: bits of the rows."""

import math
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute
from cutlass.memory import SmemAllocator

from flashdsa.dsl.smem import VECTOR
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.lists import members_bits

THREADS = 512
WARPS = THREADS // WARP_SIZE
STEP_WORDS = WARPS * WARP_SIZE * VECTOR
"""Words at which the warps look together; a range is of whole steps."""
RANGE_WORDS = 8 * STEP_WORDS
"""Words of shared memory for a range of rows: they leave room for three CTAs on an SM."""
WORD_BITS = 32
FAR_ROWS = 65_536
"""Rows from which on lists that pack have as few bits a row as a group has queries: with a byte a
row, more need several ranges, and each reads every slot again. Neighbouring rows then share words,
so that the bits of lists of neighbours are set one after the other."""
MOST_REPEATS = 1024


class Slots(NamedTuple):
    """Slots that the group's queries name."""

    indices: cute.Tensor  # (S, topk) int32
    topk_length: cute.Tensor  # (S,) int32, or (0,): every slot counts
    num_keys: Int32
    first_query: Int32
    group: cutlass.Constexpr  # queries
    tile: cutlass.Constexpr  # see Lists; 0: not asked for
    lean: cutlass.Constexpr = False  # lengths are loaded at each use: ptxas spilled them once
    packs: cutlass.Constexpr = False  # a row has no more bits in shared memory than it needs

    @property
    def row_bits(self) -> int:
        """Bits of a row in shared memory, a power of two."""
        return needed_bits(self.group) if self.packs else members_bits(self.group)

    @property
    def word_rows(self) -> int:
        return WORD_BITS // self.row_bits

    @property
    def row_mask(self) -> int:
        return (1 << self.row_bits) - 1


def needed_bits(group: int) -> int:
    """Least power of two of bits with one for each query of a group."""
    return 1 << (group - 1).bit_length()


def can_pack(group: int) -> bool:
    """Whether a row of a group needs fewer bits than `members` has."""
    return needed_bits(group) < members_bits(group)


class Shared(NamedTuple):
    """Shared memory."""

    words: cute.Tensor  # (RANGE_WORDS,) Int32: the rows' bits
    counts: cute.Tensor  # (WARPS,) Int32: rows that each warp found
    repeats: cute.Tensor  # (MOST_REPEATS, 2) Int32: row and bits of one that a query names again
    num_repeats: cute.Tensor  # (1,) Int32; no more than MOST_REPEATS of them are kept
    present: Any  # with whole tiles (1,) Int32: queries that name a row
    named: Any  # with whole tiles (2,) Int32, the first of them: rows of all queries, one by one


@cute.jit
def slots_of(indices: cute.Tensor, topk_length: cute.Tensor, query: Int32) -> Int32:
    """Slots of the query that may be valid. indices: (S, topk) int32. topk_length: (S,) int32, or
    (0,): every slot counts."""
    count = Int32(indices.shape[1])
    if topk_length.shape[0] > 0:
        count = cutlass.min(cutlass.max(topk_length[query], Int32(0)), count)
    return count


@cute.jit
def length_of(x: Any, query: Int32) -> Int32:
    """The same of `Slots`; 0 after the last query."""
    count = Int32(0)
    if query < x.indices.shape[0]:
        count = slots_of(x.indices, x.topk_length, query)
    return count


def allocate_shared(tile: int) -> Shared:
    """The kernel's shared memory."""
    allocator = SmemAllocator()

    def words(*shape: int) -> Any:
        pointer = allocator.allocate_array(Int32, math.prod(shape))
        order = tuple(reversed(range(len(shape))))
        return cute.make_tensor(pointer, cute.make_ordered_layout(shape, order=order))

    kept = [words(RANGE_WORDS), words(WARPS), words(MOST_REPEATS, 2), words(1)]
    # Aligned to 16 bytes: the compiler may load neighbouring words at once.
    noted = [words(1), words(2)] if tile > 0 else [None, None]
    return Shared(*kept, *noted)
