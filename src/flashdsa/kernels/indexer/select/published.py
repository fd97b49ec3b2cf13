"""Device memory in which the CTAs of split rows meet: slots with entries, and counters, which are 0
between launches; see tiles.py.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, const_expr, cute

from flashdsa.dsl import gmem
from flashdsa.dsl.gmem import load2, store2, store4
from flashdsa.dsl.warp import alloc_slots
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer import sizes
from flashdsa.kernels.indexer.select.lists import key_at, position_at
from flashdsa.kernels.indexer.select.sort_keys import SIGN, Part, accepts, signed
from flashdsa.kernels.indexer.select.threshold import Threshold
from flashdsa.kernels.indexer.smem_views import Scratch, Selecting, consumer_sync

PUBLISHED_TOGETHER = 4
"""Entries of a thread that it publishes with one atomic of its warp."""
CHUNKS_TOGETHER = 8
"""Chunks, of WARP_SIZE entries each, that a warp loads before it uses the first."""


class Published(NamedTuple):
    """Device memory of one launch at a time. Counters are 0 between launches."""

    arrivals: Any  # (B,) int32: CTAs of the row that have published
    headers: Any  # (CTAs, SLOT_HEADER_WORDS) int32
    entries: Any  # (CTAs, words) int32: keys and positions, by turns


class Header(NamedTuple):
    """Summary of the entries in a CTA's slot; keys are `signed` words."""

    count: Int32
    top: Int32  # the best key
    floor: Int32  # a key that `topk` entries of the cluster have at least
    first: Int32  # position of the CTA's part


def published_in(arrivals: cute.Tensor, slots: cute.Tensor, plan: Any) -> Published:
    """The counters, and the parts of (slots, slot_words) int32: all headers lie before all entries,
    as a warp reads the headers of many slots at once."""
    count, places, tensors = slots.shape[0], slots.iterator, []
    for words in (sizes.SLOT_HEADER_WORDS, sizes.ENTRY_WORDS * plan.most_published):
        layout = cute.make_layout((count, words), stride=(words, 1))
        tensors.append(cute.make_tensor(places, layout))
        places += count * words
    return Published(arrivals, *tensors)


@cute.jit
def entry_of(s: Selecting, number: Int32, index: Int32) -> Any:
    """Pointer to an entry of a CTA's slot."""
    words = const_expr(sizes.ENTRY_WORDS * s.plan.most_published)
    return s.published.entries.iterator + Int64(number) * words + sizes.ENTRY_WORDS * index


def header_of(s: Selecting, number: Int32) -> Any:
    """Pointer to the header of a slot."""
    return s.published.headers.iterator + sizes.SLOT_HEADER_WORDS * number


@cute.jit
def load_header(s: Selecting, number: Int32) -> Header:
    """A header that was published."""
    return Header(*gmem.load4(header_of(s, number)))


@cute.jit
def load_entry(s: Selecting, number: Int32, index: Int32) -> tuple[Int32, Int32]:
    """An entry that was published in a slot."""
    return load2(entry_of(s, number, index))


def chunks_of(entries: Int32) -> Int32:
    """Loads of a warp for `entries` entries."""
    return (entries + WARP_SIZE - 1) // WARP_SIZE


@cute.jit
def publish(
    s: Selecting, number: Int32, part: Part, threshold: Threshold, floor: Uint32, first: Int32
) -> None:
    """Write the part's entries as good as the threshold into a slot; one thread, the first, writes
    the header after a sync of all. Starts synced. floor, first: see `Header`."""
    select, thread, plan = s.select, s.thread, s.plan
    if thread == 0:
        select.scratch[Scratch.COUNT] = Int32(0)
        select.scratch[Scratch.TOP] = Int32(SIGN)
    # All consumers: the counts begin at 0.
    consumer_sync(plan)
    top = Int32(SIGN)
    block = PUBLISHED_TOGETHER * plan.consumer_threads
    for begin in cutlass.range(0, part.entries, block, unroll=1):
        keys, positions, wins, indices = (
            cute.make_rmem_tensor(PUBLISHED_TOGETHER, Int32) for _ in range(4)
        )
        for i in cutlass.range_constexpr(PUBLISHED_TOGETHER):
            index = begin + thread + i * plan.consumer_threads
            keys[i], positions[i], wins[i] = Int32(0), Int32(0), Int32(0)
            if index < part.entries:
                key = key_at(select, index)
                position = position_at(select, index)
                keys[i], positions[i] = Int32(key), Int32(position)
                wins[i] = Int32(accepts(key, position, threshold.key, threshold.position))
        alloc_slots(select.scratch.iterator + Scratch.COUNT, wins, indices, PUBLISHED_TOGETHER)
        for i in cutlass.range_constexpr(PUBLISHED_TOGETHER):
            if wins[i] != 0:
                store2(entry_of(s, number, indices[i]), keys[i], positions[i])
                top = cutlass.max(top, signed(Uint32(keys[i])))
    top = cute.arch.warp_redux_sync(top, "max")
    if thread % WARP_SIZE == 0:
        cute.arch.atomic_max(select.scratch.iterator + Scratch.TOP, top, sem="relaxed", scope="cta")
    # All consumers: the slot's entries are written, and counted.
    consumer_sync(plan)
    if thread == 0:
        scratch = select.scratch
        header = Header(scratch[Scratch.COUNT], scratch[Scratch.TOP], signed(floor), first)
        store4(header_of(s, number), header)
