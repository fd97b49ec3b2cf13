"""Launches of the fused Hopper backward: 64 rows of Q over one list, no spool."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.mla_bwd_lists import allocate_lists, capacity_of
from flashdsa.kernels.catalog import MLA_BWD_FUSED
from flashdsa.kernels.sparse_mla.sm90.bwd.fused.plan import FusedPlan
from flashdsa.kernels.sparse_mla.sm90.bwd.spool import BLOCK_ROWS
from flashdsa.operands import MlaBwdOperands

MOST_HEADS = 32
SPREAD = 5
"""Tiles by which CTAs begin one behind the other, so that they do not add to the same rows."""
NEAR_ROWS = 12_288
"""Of dKV, that lie in the second-level cache. With more of them CTAs sweep them together."""


def is_fused(num_heads: int) -> bool:
    """Whether the fused kernel serves so many heads."""
    return num_heads <= MOST_HEADS


@lru_cache
def plan_of(num_heads: int) -> FusedPlan:
    """Of groups of 64 rows, or of a query of 128 heads."""
    return FusedPlan(max(1, BLOCK_ROWS // num_heads))


def launch_fused(
    runner: Runner,
    operands: MlaBwdOperands,
    delta: Tensor,
    dq: Tensor,
    dkv: Tensor,
    sm_scale: float,
) -> None:
    """delta, lists, dQ and dKV of all queries.

    Args:
        operands: without gaps; topk_length (0,) says that every slot counts, lse has the sinks.
        delta: (S, H) fp32 and dq, written. dkv: fp32, added to.
    """
    q, kv, dO, lse, O, indices, lengths, _ = operands
    num_queries, num_heads, _ = q.shape
    plan = plan_of(num_heads)
    function = runner.function(MLA_BWD_FUSED, plan)
    groups = -(-num_queries // plan.queries)
    lists = allocate_lists(
        runner, groups, plan.queries, capacity_of(plan.queries, indices.shape[1])
    )
    items = -(-num_queries * num_heads // BLOCK_ROWS)
    spread = SPREAD if kv.shape[0] <= NEAR_ROWS else 0
    flat = [q.flatten(0, 1), kv, dO.flatten(0, 1), lse.flatten(), O.flatten(0, 1)]
    scalars = num_heads, sm_scale, spread, min(items, runner.num_sms)
    with runner.launching():
        function(*flat, indices, lengths, delta.flatten(), *lists, dq.flatten(0, 1), dkv, *scalars)
