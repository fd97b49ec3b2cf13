"""The CTA's allocation of tensor memory, and the roles that use it."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.arena import Arena
from flashdsa.dsl.static import Static
from flashdsa.kernels.indexer.score_batch import PageSource
from flashdsa.kernels.indexer.sm100.mma import MmaContext, issue_tiles
from flashdsa.kernels.indexer.sm100.score import SCORING, make_scorer
from flashdsa.kernels.indexer.smem_views import input_buffers_in


@cute.jit
def allocate_tmem(arena: Arena, warp: Int32, plan: cutlass.Constexpr) -> None:
    """All warps call, and all threads of the CTA sync before any of them uses it."""
    if warp == plan.mma_warp:
        start = arena.pointer("tmem_start", Int32)
        prims.tcgen05_alloc(start.to_llvm_ptr(), plan.tmem.allocated, group="cta_1")
        prims.tcgen05_relinquish_alloc_permit(group="cta_1")
    prims.tcgen05_fence("before_thread_sync")


@cute.jit
def run_mma(arena: Arena, plan: cutlass.Constexpr) -> None:
    """The issuing warp: all products, then tensor memory is given back."""
    tmem = arena.pointer("tmem_start", Int32).load()
    inputs = input_buffers_in(arena, plan, arena.consumer)
    issue_tiles(MmaContext(inputs, arena, tmem, arena.producer("score_full", "score_empty")), plan)
    prims.tcgen05_dealloc(prims.make_tmem_ptr(tmem, Int32), plan.tmem.allocated, group="cta_1")


def page_source(arena: Arena, thread: Int32, plan: Any) -> PageSource:
    """What a consumer scores pages with."""
    tmem = arena.pointer("tmem_start", Int32).load()
    scales = arena.array("scales", Float32, plan.ring_stages * plan.stage_tokens)
    ring = arena.consumer("score_full", "score_empty")
    return PageSource(make_scorer(tmem, scales, ring, thread, plan), Static(SCORING))
