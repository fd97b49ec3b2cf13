"""Compiled functions of the indexer's single operations: scores, top-k, quantisation."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from flashdsa.errors import UnsupportedError
from flashdsa.jit.functions import function_named
from flashdsa.kernels.indexer.sm90.logits_plan import LogitsPlan
from flashdsa.kernels.indexer.sm90.plan import NUM_HEADS, TOPK
from flashdsa.kernels.indexer.sm90.quantize_plan import QuantizePlan
from flashdsa.kernels.indexer.sm90.topk_plan import TopkPlan

Part = LogitsPlan | TopkPlan | QuantizePlan


@lru_cache
def part_function(plan: Part) -> Any:
    """The plan's function; compiles it if need be, once a user and version.

    Raises:
        UnsupportedError: it must be compiled and nvidia-cutlass-dsl is not installed.
    """
    return function_named(plan.name, lambda: compile_part(plan))


def compile_part(plan: Part) -> Any:
    """Compile with CuTe DSL; seconds."""
    try:
        from flashdsa.kernels.indexer.sm90 import build
    except ImportError as error:
        raise UnsupportedError(
            "compiling kernels needs CuTe DSL: pip install 'flashdsa[cuda]'; "
            f"or install a wheel that carries them ({error})"
        ) from error
    return build.compile_part(plan)


def part_variants() -> dict[str, Callable[[], Any]]:
    """Exported name -> what compiles it, for Hopper's shared object."""
    plans: list[Part] = [LogitsPlan(num_heads=num_heads) for num_heads in NUM_HEADS]
    plans += [TopkPlan(topk=topk, sorted=by_score) for topk in TOPK for by_score in (False, True)]
    plans += [
        QuantizePlan(dtype, slot_bits)
        for dtype in ("bfloat16", "float32")
        for slot_bits in (0, 32, 64)
    ]
    return {plan.name: partial(compile_part, plan) for plan in plans}
