"""Role load: half of a block's keys from device memory, the other half from the peer.

The MMAs are .cta_group::1, which read B in their own CTA alone, so P already needs all keys: the
peer's rows come before it, all dims of them, and not after dP half of the dims.
"""

from typing import Any

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.cluster import peer_address
from flashdsa.dsl.gather4 import gather4
from flashdsa.dsl.smem import store_words
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm100.bwd import load
from flashdsa.kernels.attention.sm100.bwd.load import Context
from flashdsa.kernels.attention.sm100.core.tile import BOX_DIMS
from flashdsa.plan.row_tiles import ROW_BYTES

UNITS = 8
"""16-byte pieces of a row of a box."""


def lane_of(ctx: Any) -> Any:
    """The lane of this thread's warp."""
    return ctx.thread % WARP_SIZE


def peer_of(ctx: Any) -> Any:
    """The rank of the other CTA."""
    return ctx.cta_rank ^ 1


def load_words_at_peer(address: Any, dtype: Any) -> Any:
    """Load 16 bytes of another CTA's shared memory as four words; `dtype`: Int32 or Float32.

    Args:
        address: shared::cluster, a multiple of 16; see `peer_address`.
    """
    return cute.arch.inline_ptx(
        "ld.shared::cluster.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[dtype] * 4,
        read_only_args=[address],
    )


@cute.jit
def load_all(role: load.Loader) -> None:
    """All warps: load every block."""
    for block in cutlass.range(role.ctx.num_blocks, unroll=1):
        load_halves(role, block)


@cute.jit
def load_halves(role: load.Loader, block: Int32) -> None:
    """Publish the rows that a block names; bring both halves of its keys."""
    ctx, memory = role.ctx, role.ctx.memory
    row = load.publish_row(role, block)
    # kv_free of the block before: dQ, the last MMA that reads its keys, is done. kv_peer_read of
    # the block before: the peer's warps have read the own keys. Both pass for the first block.
    memory.kv_free.wait_round(block - 1)
    memory.kv_peer_read.wait_round(block - 1)
    # generic reads by the peer, before the wait -> the gather writes through the async proxy
    cute.arch.fence_proxy("async.shared", space="cta")
    gather_own(role, row)
    if ctx.thread == 0:
        # kv_full of this block, by the bytes of the own gather: the peer may read them now.
        memory.kv_full.wait_round(block)
        memory.kv_peer_full.arrive_at_peer(peer_of(ctx))
    cute.arch.sync_warp()
    refill(ctx, block)


@cute.jit
def gather_own(role: load.Loader, row: Int32) -> None:
    """Gather the own half of a block's keys, a quarter of them a warp; `row`: of key `lane`."""
    ctx, plan, full = role.ctx, role.ctx.plan, role.ctx.memory.kv_full
    # The phase of kv_full ends only after this arrival, whichever warp's rows come first.
    if ctx.thread == 0:
        full.arrive_and_expect_tx()
    cute.arch.sync_warp()
    first = ctx.cta_rank * plan.own_keys + ctx.thread // WARP_SIZE * load.ROWS_A_GATHER
    four = [cute.arch.shuffle_sync(row, first + i) for i in range(load.ROWS_A_GATHER)]
    if lane_of(ctx) == 0:
        at = ctx.memory.kv.address() + first * ROW_BYTES
        for box in cutlass.range_constexpr(plan.boxes):
            to = at + box * plan.tile.box_bytes
            gather4(to, role.kv_map, Int32(box * BOX_DIMS), four, full.at())
    cute.arch.sync_warp()


@cute.jit
def refill(ctx: Context, block: Int32) -> None:
    """Read the peer's half of the keys into registers, and store it to the other half of kv."""
    plan, memory, peer = ctx.plan, ctx.memory, peer_of(ctx)
    # kv_peer_full of this block, by a thread of the peer: its gather has come. It stays until
    # kv_peer_read.
    memory.kv_peer_full.wait_round(block)
    row = peer * plan.own_keys + ctx.thread // UNITS
    at = memory.kv.address() + swizzled_128(row, ctx.thread % UNITS)
    there = peer_address(at, peer)
    words = [
        load_words_at_peer(there + box * plan.tile.box_bytes, Int32) for box in range(plan.boxes)
    ]
    cute.arch.sync_warp()
    if lane_of(ctx) == 0:
        memory.kv_peer_read.arrive_at_peer(peer)
    for box in cutlass.range_constexpr(plan.boxes):
        store_words(at + box * plan.tile.box_bytes, words[box])
    # generic writes above -> tcgen05.mma reads through the async proxy
    cute.arch.fence_proxy("async.shared", space="cta")
    memory.kv_peer_ready.arrive()
