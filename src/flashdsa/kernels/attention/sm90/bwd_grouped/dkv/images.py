"""Role images: P and dS of every tile, from the spool into the ring."""

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.pipeline import RingProducer, state_in_turn
from flashdsa.dsl.tma import load_bytes
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.context import Context, first_tile
from flashdsa.kernels.attention.sm90.bwd_grouped.items import image_of
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import (
    DS_IMAGE,
    IMAGE_BYTES,
    IMAGES,
    P_IMAGE,
)


class Images(NamedTuple):
    """Fills the ring. Signals image_full."""

    ctx: Context
    spool: cute.Tensor  # (row blocks, bytes) uint8


@cute.jit
def load_all(role: Images) -> None:
    """One thread: load the images of the CTA's items, dS and then P of each row block."""
    ctx, plan = role.ctx, role.ctx.plan
    full, free = ctx.barriers("image_full"), ctx.barriers("image_free")
    ring = ctx.arena.bytes("ring")
    number, item_number = Int32(0), ctx.work.first
    while item_number < ctx.work.num_items:
        item = ctx.item(item_number)
        first = item.local * plan.row_blocks
        tile = first_tile(ctx, item)
        sources = [
            image_of(role.spool, first + block, tile, P_IMAGE) for block in range(plan.row_blocks)
        ]
        for _ in cutlass.range(item.tiles, unroll=1):
            slot, announced = free.state(number), full.state(number)
            for part in cutlass.range_constexpr(plan.parts):
                at = state_in_turn(slot, part, plan.parts, plan.slots)
                stage = state_in_turn(announced, part, plan.parts, plan.full_barriers).stage
                image = P_IMAGE if part % IMAGES else DS_IMAGE
                source = sources[part // IMAGES] + image * IMAGE_BYTES
                # image_free: the image that lay in the slot has been read.
                RingProducer(full, free).acquire(at)
                full.arrive_and_expect_tx(None, stage)
                load_bytes(ring + at.stage * IMAGE_BYTES, source, IMAGE_BYTES, full.at(stage))
            tile += 1
            step = Int32(IMAGES * IMAGE_BYTES)
            if tile == item.tiles:
                tile = Int32(0)
                step -= item.tiles * (IMAGES * IMAGE_BYTES)
            sources = [source + step for source in sources]
            number += plan.parts
        item_number += ctx.work.num_ctas
