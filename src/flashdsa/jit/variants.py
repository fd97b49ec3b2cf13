"""Every kernel that the shared object of an architecture carries, by exported name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from flashdsa.jit.backward import backward_name, compile_backward
from flashdsa.jit.functions import compile_plan, indexer_name
from flashdsa.jit.parts import part_variants
from flashdsa.kernels.indexer.sm90.plan import NUM_HEADS, TOPK, IndexerPlan
from flashdsa.kernels.sparse_mla.sm100.bwd.plan import BwdPlan


def sm90_variants() -> dict[str, Callable[[], Any]]:
    """Exported name -> what compiles it, for Hopper."""
    kinds: tuple[dict[str, bool], ...] = (
        {},
        {"dealt": True},
        {"teams": True},
        {"sorted": True, "dealt": True},
    )
    plans = [
        IndexerPlan(num_heads, topk, **kind)
        for num_heads, topk, kind in product(NUM_HEADS, TOPK, kinds)
    ]
    return {indexer_name(plan): partial(compile_plan, plan) for plan in plans} | part_variants()


def sm100_variants() -> dict[str, Callable[[], Any]]:
    """Exported name -> what compiles it, for Blackwell: shapes are dynamic, so there are two."""
    return {
        backward_name(deterministic): partial(compile_backward, BwdPlan(), deterministic)
        for deterministic in (False, True)
    }


VARIANTS = {"sm90": sm90_variants, "sm100": sm100_variants}
"""By architecture, which is the object's name."""
