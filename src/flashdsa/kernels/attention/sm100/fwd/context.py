"""Context of every role: addresses in both memories, and the rows that it works on."""

from typing import Any, NamedTuple

from cutlass import Int32

from flashdsa.dsl.arena import Arena
from flashdsa.dsl.pipeline import Barriers, PipelineState, rotated_state
from flashdsa.kernels.attention.sm100.fwd.plan import FwdPlan

LEADER = 0
"""Rank of the CTA that issues the MMAs."""


class Context(NamedTuple):
    """One CTA's position in the launch."""

    arena: Arena  # shared memory
    tmem: Int32  # TMEM address of the allocation
    cta_rank: Int32  # in the pair: selects the rows of Q and O, and the half of the keys' dims
    item: Int32  # the pair's 128 rows of Q: a query's, or a group's
    num_slots: Int32  # slots of the item that may be valid
    num_tiles: Int32  # of TILE_KEYS keys, at least 1
    thread: Int32  # in its warpgroup, which is also its TMEM lane

    @property
    def plan(self) -> FwdPlan:
        """The compile-time plan."""
        return self.arena.plan

    def barriers(self, name: str) -> Barriers:
        """A barrier of the plan."""
        return self.arena.barriers(name)

    def keys_at(self, tile: Any) -> PipelineState:
        """State of a tile of keys in its ring. The first tiles leave out the stages that hold Q,
        which are the last of each round."""
        return rotated_state(tile, self.plan.q_stages, self.plan.kv_stages)
