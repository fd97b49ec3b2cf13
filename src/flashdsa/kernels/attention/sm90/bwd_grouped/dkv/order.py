"""Order in which groups add to dKV, if the bits must be the same every time.

Lists are in order of the keys. A group adds to a key after the previous group: a word in device
memory says for each item up to which key it and all previous ones have added. So groups follow each
other through the keys, a few tiles apart.

One chain of all groups would be too slow: some forty run at the same time, and then a group may be
no more than 0.8 tiles later than the previous one. So dKV has a few buffers, added up after the
kernel, and group g is in the chain of buffer g % buffers.

Who has added cannot say so at once: a release waits until additions have landed, some microseconds.
So a warp of its own does (role publish). The others count for it, in shared memory.

A list's last rows are out of order where queries name keys again. Such a list's group says nothing
before it is done, waits for the whole previous group before these rows, and adds them one by one.

CTAs wait for others with lower items: all must be resident, so the launch is cooperative.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from flashdsa.dsl.gmem import add_release, load_acquire
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.add import add_row_by_row, add_tile
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import SLICE_DIMS, SLICES, WORDS
from flashdsa.kernels.attention.sm90.bwd_grouped.items import Item
from flashdsa.kernels.attention.sm90.core.tile import D_QK, TILE_KEYS
from flashdsa.kernels.attention.union.memory import MOST_UNORDERED, UNORDERED_SHIFT

GROUP_WARPS = WARPGROUP_SIZE // WARP_SIZE
ADDED = 0
"""Index of an item's word ADDED: the groups up to its one have added to all lower keys."""
TURN = 1
"""Index of its word TURN: parts of tiles that have been added, if the list has rows out of
order."""
DONE = 2**31 - 1
"""More than any key."""


class Order(NamedTuple):
    """Order of a launch."""

    words: cute.Tensor  # (groups, SLICES * WORDS) int32, 0
    present: cute.Tensor  # (groups,) int32
    first: Int32  # number in the call of the launch's first group
    buffers: Int32  # dKVs


class Place(NamedTuple):
    """Position of an item in its chain."""

    words: Any  # pointer to the item's words
    before: Any  # pointer to those of the previous group, or the item's
    is_first: Boolean  # the launch has no previous group
    dkv: Any  # pointer to the buffer's first element of the item's dims
    ordered: Int32  # of the list's rows, which the others follow
    has_unordered: Boolean


@cute.jit
def place_of(order: Order, dkv: cute.Tensor, item: Item) -> Place:
    """The item's position in its chain; dkv: (buffers, S_kv, 576) fp32."""
    words = order.words.iterator + (Int64(item.local) * SLICES + item.slice) * WORDS
    is_first = item.local < order.buffers
    distance = Int32(0) if is_first else order.buffers
    before = words - Int64(distance) * (SLICES * WORDS)
    buffer = Int64((order.first + item.local) % order.buffers)
    rows = dkv.iterator + (buffer * dkv.shape[1] * D_QK + item.slice * SLICE_DIMS)
    unordered = (order.present.iterator + item.group).load() >> UNORDERED_SHIFT
    ordered = item.count - unordered
    if unordered == MOST_UNORDERED:
        ordered = Int32(0)
    return Place(words, before, is_first, rows, ordered, unordered > 0)


@cute.jit
def ask(place: Place) -> Int32:
    """Key up to which the previous groups have added."""
    key = Int32(DONE)
    if not place.is_first:
        key = load_acquire(place.before + ADDED)
    return key


@cute.jit
def wait_for_key(place: Place, key: Int32) -> None:
    """Wait until the previous groups have added to `key`."""
    while ask(place) <= key:
        pass
    cute.arch.sync_warp()


@cute.jit
def wait_for_turn(place: Place, turn: Int32) -> None:
    """Wait until `turn` parts of the item's tiles have been added."""
    added = load_acquire(place.words + TURN)
    while added < turn:
        added = load_acquire(place.words + TURN)
    cute.arch.sync_warp()


@cute.jit
def add_in_order(place: Place, acc: Any, keys: list[Int32], tile: Int32, warp: Int32) -> None:
    """Add the warp's part of a tile when it is its turn.

    Args:
        keys: rows of dKV of this thread. warp: in its warpgroup.
    """
    if (tile + 1) * TILE_KEYS <= place.ordered or not place.has_unordered:
        last = cute.arch.warp_redux_sync(cutlass.max(keys[0], keys[1]), "max")
        wait_for_key(place, last)
        add_tile(place.dkv, acc, keys)
    else:
        wait_for_key(place, Int32(DONE - 1))
        wait_for_turn(place, tile * GROUP_WARPS + warp)
        add_row_by_row(place.dkv, acc, keys)
    if place.has_unordered:
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            add_release(place.words + TURN, Int32(1))
