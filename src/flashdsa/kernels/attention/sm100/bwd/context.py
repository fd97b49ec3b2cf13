"""Context of every role: addresses in both memories, and the queries that it works on.

A pair of CTAs takes one item after the other, each a query or a group of them. Items and blocks
have running numbers over all items, which give the phases of barriers.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl import tmem
from flashdsa.dsl.arena import Arena
from flashdsa.dsl.pipeline import Barriers
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm100.bwd.plan import B_TOPK, CLUSTER, BwdPlan


class Turn(NamedTuple):
    """An item that a pair takes, and what it took before."""

    item: Int32  # the query, or the group of them
    items_before: Int32
    blocks_before: Int32  # of those items


class Context(NamedTuple):
    """One CTA's position in the launch, and its item."""

    arena: Arena  # shared memory
    tmem: Int32  # TMEM address of the allocation
    cta_rank: Int32  # in the cluster: which half of the dims
    turn: Turn
    num_slots: Int32  # of the item that may be valid
    num_blocks: Int32  # of B_TOPK keys, at least 1
    thread: Int32  # in its warpgroup, which is also its TMEM lane

    @property
    def plan(self) -> BwdPlan:
        """The compile-time plan."""
        return self.arena.plan

    @property
    def item(self) -> Int32:
        """The query, or the group of them."""
        return self.turn.item

    def number(self, block: Any) -> Any:
        """The running number of a block of the item: its use number in rings and barriers."""
        return self.turn.blocks_before + block

    def barriers(self, name: str) -> Barriers:
        """A barrier of the plan."""
        return self.arena.barriers(name)


def first_turn() -> Turn:
    """The first turn of a pair: the item with the pair's number."""
    block, _, _ = cute.arch.block_idx()
    return Turn(Int32(block // CLUSTER), Int32(0), Int32(0))


def next_turn(ctx: Context) -> Turn:
    """The turn after the item of `ctx`: the item's number grows by the number of pairs."""
    ctas, _, _ = cute.arch.grid_dim()
    turn = ctx.turn
    return Turn(
        turn.item + ctas // CLUSTER, turn.items_before + 1, turn.blocks_before + ctx.num_blocks
    )


@cute.jit
def locate(topk_length: cute.Tensor, indices: cute.Tensor, arena: Arena, turn: Turn) -> Context:
    """This thread's context for an item."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    num_slots = cutlass.min(topk_length[turn.item], Int32(indices.shape[1]))
    return Context(
        arena=arena,
        tmem=arena.pointer("tmem_start", Int32).load(),
        cta_rank=block % CLUSTER,
        turn=turn,
        num_slots=num_slots,
        num_blocks=cutlass.max((num_slots + B_TOPK - 1) // B_TOPK, Int32(1)),
        thread=thread % WARPGROUP_SIZE,
    )


def load_lane(ctx: Context, name: str, columns: int, offset: int = 0) -> Any:
    """This thread's lane of a TMEM region, a Vector of fp32; waits for it."""
    return tmem.load_lane(ctx.tmem, ctx.plan.tmem.column(name) + offset, ctx.thread, columns)


def store_lane(ctx: Context, name: str, words: Any, offset: int = 0) -> None:
    """Store a Vector of words to this thread's lane of a TMEM region; `tmem.wait_stored` waits."""
    tmem.store_lane(ctx.tmem, ctx.plan.tmem.column(name) + offset, ctx.thread, words)
