"""The CTA's allocation of tensor memory, and the roles that use it."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl import tmem
from flashdsa.dsl.arena import Arena
from flashdsa.dsl.static import Static
from flashdsa.kernels.indexer.score_batch import PageSource
from flashdsa.kernels.indexer.sm100.mma import MmaContext, issue_tiles
from flashdsa.kernels.indexer.sm100.score import SCORING, make_scorer
from flashdsa.kernels.indexer.smem_views import input_buffers_in


@cute.jit
def allocate_tmem(arena: Arena, warp: Int32, plan: cutlass.Constexpr) -> None:
    """Allocate tensor memory. All warps call, and all threads of the CTA sync before any of them
    uses it."""
    if warp == plan.mma_warp:
        tmem.allocate(arena.pointer("tmem_start", Int32), plan.tmem.allocated)
    tmem.before_sync()


@cute.jit
def run_mma(arena: Arena, plan: cutlass.Constexpr) -> None:
    """The issuing warp: issue all products, then give tensor memory back."""
    address = arena.pointer("tmem_start", Int32).load()
    inputs = input_buffers_in(arena, plan, arena.consumer)
    ring = arena.producer("score_full", "score_empty")
    issue_tiles(MmaContext(inputs, arena, address, ring), plan)
    tmem.free(address, plan.tmem.allocated)


def page_source(arena: Arena, thread: Int32, plan: Any) -> PageSource:
    """Return the consumer's source of page scores."""
    address = arena.pointer("tmem_start", Int32).load()
    scales = arena.array("scales", Float32, plan.ring_stages * plan.stage_tokens)
    ring = arena.consumer("score_full", "score_empty")
    return PageSource(make_scorer(address, scales, ring, thread, plan), Static(SCORING))
