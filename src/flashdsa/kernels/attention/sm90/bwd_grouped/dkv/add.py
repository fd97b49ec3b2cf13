"""Additions to dKV from a warpgroup's accumulators, 16 bytes each: in any order, or in a chain.

In a chain the bits are the same every time. Lists are in order of the keys. A group adds to a key
after the previous group: a word in device memory says for each item up to which key it and all
previous ones have added. So groups follow each other through the keys, a few tiles apart.

One chain of all groups would be too slow: some forty run at the same time, and then a group may be
no more than 0.8 tiles later than the previous one. So there are a few dKVs, added up after the
kernel (`buffers.py`), and group g is in the chain of dKV g % buffers.

Who has added cannot say so at once: a release waits until additions have landed, some microseconds.
So a warp of its own does (role publish). The others count for it, in shared memory.

A list's last rows are out of order where queries name keys again. Such a list's group says nothing
before it is done, waits for the whole previous group before these rows, and adds them one by one.

CTAs wait for others with lower items: all must be resident, so the launch is cooperative.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from flashdsa.dsl.gmem import add4_if, add_release, load_acquire, store_release
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.lists import MOST_UNORDERED, UNORDERED_SHIFT
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.load import Context
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import WARPGROUPS, WORDS
from flashdsa.kernels.attention.sm90.bwd_grouped.items import Item
from flashdsa.kernels.attention.sm90.core.backward import PAIR_DIMS, four_dims

KEYS = 2
"""Rows of the tile in a thread, 8 apart."""
LINE_DIMS = 2 * PAIR_DIMS
"""Dims of a line: 128 bytes of dKV, which eight lanes add in one piece; pieces of 64 bytes take the
kernel 9 % longer."""
GROUP_WARPS = WARPGROUP_SIZE // WARP_SIZE
ADDED = 0
"""Index of an item's word ADDED: the groups up to its one have added to all lower keys."""
TURN = 1
"""Index of its word TURN: parts of tiles that have been added, if the list has rows out of
order."""
DONE = 2**31 - 1
"""More than any key."""
NAP_NS = 100
"""Nanoseconds between two looks at a counter."""


@cute.jit
def add_tile(
    dkv: Any, acc: Any, keys: list[Int32], dims: cutlass.Constexpr, plan: cutlass.Constexpr
) -> None:
    """Add this thread's accumulators to dKV of the rows `keys`; a negative key has no row.

    Args:
        dkv: pointer to the first row's first dim of the slice. dims: of the slice.

    The four lanes of a row have 64 bytes of two lines each time. They exchange with the four lanes
    of the next row, so that all eight have 128 bytes of one row, and then of the other.
    """
    lane = cute.arch.lane_idx()
    is_next = lane // 4 % 2 == 1
    dim = lane // 4 % 2 * PAIR_DIMS + lane % 4 * 4
    for h in cutlass.range_constexpr(KEYS):
        others = cute.arch.shuffle_sync_bfly(keys[h], 4)
        key, next_key = (others if is_next else keys[h]), (keys[h] if is_next else others)
        row = dkv + (Int64(key) * plan.tile.d_qk + dim)
        next_row = dkv + (Int64(next_key) * plan.tile.d_qk + dim)
        for line in cutlass.range_constexpr(dims // LINE_DIMS):
            left = four_dims(acc, 2 * line, h)
            right = four_dims(acc, 2 * line + 1, h)
            got = [
                cute.arch.shuffle_sync_bfly(left[i] if is_next else right[i], 4) for i in range(4)
            ]
            of_row = [got[i] if is_next else left[i] for i in range(4)]
            of_next = [right[i] if is_next else got[i] for i in range(4)]
            add4_if(key, row + line * LINE_DIMS, of_row)
            add4_if(next_key, next_row + line * LINE_DIMS, of_next)


@cute.jit
def add_row_by_row(
    dkv: Any, acc: Any, keys: list[Int32], dims: cutlass.Constexpr, plan: cutlass.Constexpr
) -> None:
    """Same as `add_tile`, a row after the other: several may be of the same key."""
    lane = cute.arch.lane_idx()
    for h in cutlass.range_constexpr(KEYS):
        row = dkv + (Int64(keys[h]) * plan.tile.d_qk + lane % 4 * 4)
        for quad in cutlass.range(WARP_SIZE // 4, unroll=1):
            # The others' additions, which are to other rows or come later.
            key = keys[h] if lane // 4 == quad else Int32(-1)
            for pair in cutlass.range_constexpr(dims // PAIR_DIMS):
                add4_if(key, row + pair * PAIR_DIMS, four_dims(acc, pair, h))
            cute.arch.sync_warp()


class Order(NamedTuple):
    """Order of a launch."""

    words: cute.Tensor  # (groups, plan.slices * WORDS) int32, 0
    present: cute.Tensor  # (groups,) int32
    first: Int32  # number in the call of the launch's first group
    more: cute.Tensor  # (buffers - 1, S_kv, 576) fp32: the dKVs of all chains but the first one


class Position(NamedTuple):
    """Position of an item in its chain."""

    words: Any  # pointer to the item's words
    before: Any  # pointer to those of the previous group, or the item's
    is_first: Boolean  # the launch has no previous group
    dkv: Any  # pointer to the buffer's first element of the item's dims
    ordered: Int32  # of the list's rows, which the others follow
    has_unordered: Boolean


@cute.jit
def position_of(order: Order, dkv: cute.Tensor, item: Item, plan: cutlass.Constexpr) -> Position:
    """The item's position in its chain; dkv: (S_kv, 576) fp32, of the first chain."""
    more = order.more
    buffers = Int32(more.shape[0]) + 1
    words = order.words.iterator + (Int64(item.local) * plan.slices + item.slice) * WORDS
    is_first = item.local < buffers
    distance = Int32(0) if is_first else buffers
    before = words - Int64(distance) * (plan.slices * WORDS)
    buffer = (order.first + item.local) % buffers
    behind = (more.iterator.toint() - dkv.iterator.toint()) // (Float32.width // 8)
    behind += Int64(buffer - 1) * more.shape[1] * plan.tile.d_qk
    rows = dkv.iterator + ((Int64(0) if buffer == 0 else behind) + item.slice * plan.slice_dims)
    unordered = (order.present.iterator + item.group).load() >> UNORDERED_SHIFT
    ordered = item.count - unordered
    if unordered == MOST_UNORDERED:
        ordered = Int32(0)
    return Position(words, before, is_first, rows, ordered, unordered > 0)


@cute.jit
def ask(position: Position) -> Int32:
    """Key up to which the previous groups have added."""
    key = Int32(DONE)
    if not position.is_first:
        key = load_acquire(position.before + ADDED)
    return key


@cute.jit
def wait_for_key(position: Position, key: Int32) -> None:
    """Wait until the previous groups have added to `key`."""
    while ask(position) <= key:
        pass
    cute.arch.sync_warp()


@cute.jit
def wait_for_turn(position: Position, turn: Int32) -> None:
    """Wait until `turn` parts of the item's tiles have been added."""
    added = load_acquire(position.words + TURN)
    while added < turn:
        added = load_acquire(position.words + TURN)
    cute.arch.sync_warp()


@cute.jit
def add_in_order(
    position: Position,
    acc: Any,
    keys: list[Int32],
    turn: tuple[Int32, Int32],
    dims: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> None:
    """Add the warp's part of a tile when it is its turn.

    Args:
        keys: rows of dKV of this thread. turn: the tile, and the warp in its warpgroup. dims: of
            the slice.
    """
    tile, warp = turn
    if (tile + 1) * plan.tile.keys <= position.ordered or not position.has_unordered:
        last = cute.arch.warp_redux_sync(cutlass.max(keys[0], keys[1]), "max")
        wait_for_key(position, last)
        add_tile(position.dkv, acc, keys, dims, plan)
    else:
        wait_for_key(position, Int32(DONE - 1))
        wait_for_turn(position, tile * GROUP_WARPS + warp)
        add_row_by_row(position.dkv, acc, keys, dims, plan)
    if position.has_unordered:
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            add_release(position.words + TURN, Int32(1))


class Publish(NamedTuple):
    """Reads the counts of the warps that multiply; writes the items' words."""

    ctx: Context
    order: Order
    dkv: cute.Tensor  # (S_kv, 576) fp32


@cute.jit
def count_tile(counter: Any) -> None:
    """Count: a warp that multiplies has added its part of one more tile."""
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.atomic_add(counter, Int32(1), sem="release", scope="cta")


@cute.jit
def wait_for_tile(role: Publish, number: Int32) -> None:
    """Wait until tile `number` of the CTA has been added by the warpgroup whose turn it is."""
    lane = cute.arch.lane_idx()
    if lane < GROUP_WARPS:
        counters = role.ctx.memory.added.pointer(Int32)
        counter = counters + (number % WARPGROUPS * GROUP_WARPS + lane)
        # An atomic operation that changes nothing: racecheck takes a load for a race.
        while (
            cute.arch.atomic_or(counter, Int32(0), sem="acquire", scope="cta")
            <= number // WARPGROUPS
        ):
            cute.arch.inline_ptx(f"nanosleep.u32 {NAP_NS};")
    # Each lane's observations become visible to the lane that publishes them.
    cute.arch.sync_warp()


@cute.jit
def say(position: Position, key: Int32) -> None:
    """Publish: all groups up to this one have added to keys below `key`."""
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        store_release(position.words + ADDED, key)


@cute.jit
def first_key(role: Publish, item: Item, tile: Int32) -> Int32:
    """First key of a tile that may not exist."""
    key = Int32(DONE)
    if tile < item.tiles:
        key = (role.ctx.lists.row(item.group) + tile * role.ctx.plan.tile.keys).load()
    return key


@cute.jit
def publish_all(role: Publish) -> None:
    """One warp: publish every tile of the CTA's items."""
    ctx = role.ctx
    number, item_number = Int32(0), ctx.work.first
    while item_number < ctx.work.num_items:
        item = ctx.item(item_number)
        position = position_of(role.order, role.dkv, item, ctx.plan)
        for tile in cutlass.range(item.tiles, unroll=1):
            upto = first_key(role, item, tile + 1)
            wait_for_tile(role, number)
            if not position.has_unordered:
                say(position, cutlass.min(ask(position), upto))
            number += 1
        wait_for_key(position, Int32(DONE - 1))
        say(position, Int32(DONE))
        item_number += ctx.work.num_ctas
