"""Role publish: it publishes to other SMs up to which key the CTA's items have been added."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.gmem import store_release
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.context import Context
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.order import (
    ADDED,
    DONE,
    GROUP_WARPS,
    Order,
    Place,
    ask,
    place_of,
    wait_for_key,
)
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import WARPGROUPS
from flashdsa.kernels.attention.sm90.bwd_grouped.items import Item
from flashdsa.kernels.attention.sm90.core.tile import TILE_KEYS

NAP_NS = 100
"""Nanoseconds between two looks at a counter."""


class Publish(NamedTuple):
    """Reads the counts of the warps that multiply; writes the items' words."""

    ctx: Context
    order: Order
    dkv: cute.Tensor  # (buffers, S_kv, 576) fp32


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
        counters = role.ctx.arena.pointer("added", Int32)
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
def say(place: Place, key: Int32) -> None:
    """Publish: all groups up to this one have added to keys below `key`."""
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        store_release(place.words + ADDED, key)


@cute.jit
def first_key(role: Publish, item: Item, tile: Int32) -> Int32:
    """First key of a tile that may not exist."""
    key = Int32(DONE)
    if tile < item.tiles:
        key = (role.ctx.lists.row(item.group) + tile * TILE_KEYS).load()
    return key


@cute.jit
def publish_all(role: Publish) -> None:
    """One warp: publish every tile of the CTA's items."""
    ctx = role.ctx
    number, item_number = Int32(0), ctx.work.first
    while item_number < ctx.work.num_items:
        item = ctx.item(item_number)
        place = place_of(role.order, role.dkv, item)
        for tile in cutlass.range(item.tiles, unroll=1):
            upto = first_key(role, item, tile + 1)
            wait_for_tile(role, number)
            if not place.has_unordered:
                say(place, cutlass.min(ask(place), upto))
            number += 1
        wait_for_key(place, Int32(DONE - 1))
        say(place, Int32(DONE))
        item_number += ctx.work.num_ctas
