"""The pieces in shared memory: a ring for each consumer, which the two warps of its tiles fill.

Piece n of a consumer is in stage n % stages of its ring. It releases both pieces of a tile, so no
warp is a round before the other one, whichever of them had a stage before.
"""

from typing import Any

from flashdsa.dsl.pipeline import PipelineState, state_of_part
from flashdsa.kernels.attention.sm90.decode_few_heads.plan import CONSUMERS, FewHeadsPlan


def tiles_of_consumer(num_tiles: Any, side: Any) -> Any:
    """Tiles of a consumer, of the CTA's `num_tiles`."""
    return (num_tiles + (CONSUMERS - 1) - side) // CONSUMERS


def state_of_piece(plan: FewHeadsPlan, side: Any, number: Any) -> PipelineState:
    """Stage, among those of both rings, and phase of a consumer's piece of that number."""
    return state_of_part(number, side, plan.stages // CONSUMERS)
