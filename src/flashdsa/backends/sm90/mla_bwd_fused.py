"""Launches of the fused Hopper backward: 64 rows of Q over one list, no spool."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.mla_bwd_lists import Lists, allocate_lists, capacity_of
from flashdsa.kernels.catalog import MLA_BWD_FUSED
from flashdsa.kernels.sparse_mla.sm90.bwd.fused.plan import FusedPlan
from flashdsa.kernels.sparse_mla.sm90.bwd.spool import BLOCK_ROWS
from flashdsa.operands import MlaBwdOperands

MOST_LIST_BYTES = 1 << 28
"""Of the lists of both kinds of groups; queries that need more are launched in parts."""
LISTS, SLOT_BYTES = 2, 5
"""Of a query: of the group of each kind, a row and its members each."""
SPREAD = 5
"""Tiles by which CTAs begin one behind the other, so that they do not add to the same rows."""
NEAR_ROWS = 12_288
"""Of dKV, that lie in the second-level cache. With more of them CTAs sweep them together."""

Outputs = tuple[Tensor, Tensor, Tensor]
"""delta (S, H) fp32 and dq, written, and dkv fp32, added to."""
LaunchLarge = Callable[[MlaBwdOperands, Outputs, float, Lists, Tensor], None]
"""(operands, outputs, sm_scale, lists, choice)"""
LaunchSmall = Callable[[Runner, MlaBwdOperands, Outputs, float, "Large | None"], None]
"""(runner, operands, outputs, sm_scale, large)"""


class Groups(Protocol):
    """Of the kernels with a spool."""

    @property
    def queries(self) -> int:
        """Of a group."""

    @property
    def capacity(self) -> int:
        """Of a group's list."""

    @property
    def limits(self) -> tuple[float, int]:
        """Up to which length of the lists, in those of a query, they are taken; keys of a list, at
        most."""


class Large(NamedTuple):
    """Groups that are taken instead where their queries have much in common.

    Attributes:
        lists: of them, written. choice: (1,) int32, written.
    """

    groups: Groups
    lists: Lists
    choice: Tensor


@lru_cache
def plan_of(num_heads: int, more: int) -> FusedPlan:
    """Of groups of 64 rows, or of a query of 128 heads."""
    return FusedPlan(max(1, BLOCK_ROWS // num_heads), more)


def launch_fused(
    runner: Runner,
    operands: MlaBwdOperands,
    outputs: Outputs,
    sm_scale: float,
    large: Large | None = None,
) -> None:
    """delta, lists, dQ and dKV of all queries; of `large`, delta, its lists and the choice.

    Args:
        operands: without gaps; topk_length (0,) says that every slot counts, lse has the sinks.
    """
    q, kv, dO, lse, O, indices, lengths, _ = operands
    delta, dq, dkv = outputs
    num_queries, num_heads, _ = q.shape
    plan = plan_of(num_heads, 0 if large is None else large.groups.queries)
    function = runner.function(MLA_BWD_FUSED, plan)
    capacity = capacity_of(plan.queries, indices.shape[1])
    lists = allocate_lists(runner, -(-num_queries // plan.queries), plan.queries, capacity)
    items = -(-num_queries * num_heads // BLOCK_ROWS)
    spread = SPREAD if kv.shape[0] <= NEAR_ROWS else 0
    copy = runner.empty(*kv.shape, dtype=kv.dtype)
    flat = [q.flatten(0, 1), kv, copy, dO.flatten(0, 1), lse.flatten(), O.flatten(0, 1)]
    written = delta.flatten(), *lists, dq.flatten(0, 1), dkv
    scalars = num_heads, sm_scale, spread, min(items, runner.num_sms)
    choice = () if large is None else (*large.lists, large.choice, *large.groups.limits)
    with runner.launching():
        function(*flat, indices, lengths, *written, *scalars, *choice)


def launch_either(
    runner: Runner,
    operands: MlaBwdOperands,
    groups: Groups,
    outputs: Outputs,
    sm_scale: float,
    launches: tuple[LaunchLarge, LaunchSmall],
) -> None:
    """Large groups where they have much in common, else the fused kernel.

    The device chooses, for as many queries at a time as have room for lists.

    Args:
        launches: of kernels that have work where a choice takes the large groups; and of what makes
            delta, the large groups' lists and the choice, and has work where it takes the others.
    """
    launch_large, launch_small = launches
    num_queries = operands.q.shape[0]
    at_a_time = max(1, MOST_LIST_BYTES // (LISTS * SLOT_BYTES * groups.capacity))
    delta, dq, dkv = outputs
    for first in range(0, num_queries, at_a_time * groups.queries):
        part, of_part = operands, outputs
        if num_queries > at_a_time * groups.queries:
            some = slice(first, first + at_a_time * groups.queries)
            q, kv, *of_queries = operands[:7]
            dO, lse, O, indices, lengths = (x[some] for x in of_queries if x is not None)
            part = MlaBwdOperands(q[some], kv, dO, lse, O, indices, lengths)
            of_part = delta[some], dq[some], dkv
        count = -(-part.q.shape[0] // groups.queries)
        large = Large(
            groups,
            allocate_lists(runner, count, groups.queries, groups.capacity),
            runner.empty(1, dtype=torch.int32),
        )
        launch_small(runner, part, of_part, sm_scale, large)
        launch_large(part, of_part, sm_scale, large.lists, large.choice)
