"""Role mma: one thread of the pair's first CTA issues every MMA, for both CTAs.

Tile i, in the order of issue: Q K^T of tile i+1 | P V of tile i
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.pipeline import RingConsumer
from flashdsa.dsl.static import Static
from flashdsa.dsl.tmem import after_sync, wait_for_tmem, wait_then_tcgen05
from flashdsa.dsl.umma_issue import commit_to_pair, issue
from flashdsa.kernels.attention.sm100.fwd.load import Context
from flashdsa.kernels.attention.sm100.fwd.plan import BOX_BYTES, P_STAGES
from flashdsa.kernels.attention.sm100.fwd.products import Products


class Issuer(NamedTuple):
    """Waits for operands and for accumulators that were read; commits to barriers of both CTAs."""

    ctx: Context
    static: Static

    @property
    def products(self) -> Products:
        """Descriptors and columns, known when the kernel is compiled."""
        return self.static.value

    @property
    def keys(self) -> RingConsumer:
        """Tiles of keys, in the states of `Context.keys_at`."""
        return RingConsumer(self.ctx.memory.kv_full, self.ctx.memory.kv_free)


@cute.jit
def issue_scores(role: Issuer, tile: Int32) -> None:
    """Issue Q K^T of a tile."""
    ctx = role.ctx
    at = ctx.keys_at(tile)
    # kv_full: both CTAs' gathers have filled the tile's stage; it stays until kv_free, which is
    # committed after P V.
    role.keys.wait(at)
    after_sync()
    offset = at.stage * ctx.plan.tile.bytes
    issue(role.products.qk, ctx.memory.base, ctx.tmem, True, 0, offset)
    issue(role.products.qk_rope, ctx.memory.base, ctx.tmem, False, 0, offset)
    commit_to_pair(ctx.memory.s_ready)


@cute.jit
def issue_values(role: Issuer, tile: Int32) -> None:
    """Issue P V of a tile, added to O."""
    ctx = role.ctx
    at = ctx.keys_at(tile)
    p_offset = tile % P_STAGES * BOX_BYTES
    kv_offset = at.stage * ctx.plan.tile.bytes
    for product in role.products.pv:
        issue(product, ctx.memory.base, ctx.tmem, tile == 0, p_offset, kv_offset)
    if tile + role.keys.stages < ctx.num_tiles:
        # Only if a tile comes into the stage: an arrival that nobody waits for might come to a CTA
        # that has ended.
        commit_to_pair(role.keys.empty, at.stage)
    commit_to_pair(ctx.memory.p_free, tile % P_STAGES)


@cute.jit
def issue_all(role: Issuer) -> None:
    """One thread: issue every tile of the item."""
    ctx = role.ctx
    # q_stored, its only time: every warp of both CTAs has stored its lanes of Q.
    wait_for_tmem(ctx.memory.q_stored, 0)
    issue_scores(role, Int32(0))
    for tile in cutlass.range(ctx.num_tiles, unroll=1):
        if tile + 1 < ctx.num_tiles:
            # s_free, time i: both CTAs have read the scores that the next ones overwrite.
            wait_for_tmem(ctx.memory.s_free, tile)
            issue_scores(role, tile + 1)
        # p_ready, time i: P of both CTAs is in shared memory until p_free; O is against its maxima.
        wait_then_tcgen05(ctx.memory.p_ready, tile)
        issue_values(role, tile)
