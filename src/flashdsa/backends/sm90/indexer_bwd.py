"""The backward of the index scores on Hopper GPUs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.memory import readable
from flashdsa.backends.runner import Runner
from flashdsa.kernels.catalog import INDEXER_BWD, INDEXER_BWD_SUM
from flashdsa.kernels.indexer_training.sm90.bwd.plan import (
    BLOCKS,
    LARGE_HEADS,
    TILE_KEYS,
    BwdPlan,
    SumPlan,
)
from flashdsa.operands import IndexerBwdOperands
from flashdsa.problem import INDEX_HEAD_DIM

MOST_LIST_BYTES = 1 << 28
"""Of the lists of one launch; queries that need more are launched in parts."""
MOST_ROW_BYTES = 1 << 30
"""Of the deterministic backward's rows of dK, one for each place of the lists."""
RATIO = 1.7
"""How much longer than a query's list that of a larger group may be, on average."""
MOST_SAMPLES = 128
"""Groups by which it is chosen."""
SPREAD = 5
"""Tiles by which CTAs begin one behind the other, so that they do not add to the same rows."""
FP32 = 4


class Lists(NamedTuple):
    """Of a launch's groups: see `kernels.indexer_training.sm90.bwd.context.Lists`."""

    rows: Tensor
    gradients: Tensor
    counts: Tensor
    present: Tensor


class Outputs(NamedTuple):
    """dq (S, H, 128) bf16 and dw (S, H) fp32, written; dk (S_kv, 128) fp32, added to."""

    dq: Tensor
    dk: Tensor
    dw: Tensor


def backward(
    runner: Runner,
    operands: IndexerBwdOperands,
    *,
    deterministic: bool,
    dk_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq_index (S, H, 128), dk_index (S_kv, 128) in `dk_dtype`, d_weights (S, H)."""
    q, k, weights, indices, grad_scores, topk_length = operands
    dk = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
    if not q.shape[0] or not k.shape[0]:
        dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        dw = torch.zeros(weights.shape, dtype=weights.dtype, device=q.device)
        return dq, dk.to(dk_dtype), dw
    outputs = Outputs(
        runner.empty(*q.shape, dtype=q.dtype),
        dk,
        runner.empty(*weights.shape, dtype=torch.float32),
    )
    whole = IndexerBwdOperands(
        readable(q),
        readable(k),
        weights.float().contiguous(),
        indices.contiguous(),
        grad_scores.contiguous(),
        runner.empty(0, dtype=torch.int32) if topk_length is None else topk_length.contiguous(),
    )
    if deterministic:
        launch_in_order(runner, whole, outputs)
    else:
        launch(runner, whole, outputs)
    return outputs.dq, dk.to(dk_dtype), outputs.dw.to(weights.dtype)


@lru_cache
def plans_of(num_heads: int, num_queries: int, num_sms: int) -> tuple[BwdPlan, ...]:
    """Of the larger groups, if the device may choose them, and of the smaller ones."""
    large, small = BLOCKS
    if num_heads >= LARGE_HEADS:
        chosen = BwdPlan(num_heads, large)
        if -(-num_queries // chosen.queries) >= num_sms:
            return chosen, BwdPlan(num_heads, small)
    return (BwdPlan(num_heads, small),)


def launch(runner: Runner, operands: IndexerBwdOperands, outputs: Outputs) -> None:
    """The larger groups or the smaller ones, as the device chooses; without a choice the smaller
    ones where there are few heads or queries.

    Args:
        operands: without gaps; topk_length (0,) says that every slot counts. outputs: of all.
    """
    num_queries, num_heads, _ = operands.q_index.shape
    plans = plans_of(num_heads, num_queries, runner.num_sms)
    choice = runner.empty(len(plans) - 1, dtype=torch.int32)
    functions = [runner.function(INDEXER_BWD, plan) for plan in plans]
    widest = plans[0]
    capacity = capacity_of(widest, operands.indices.shape[1])
    at_a_time = max(1, MOST_LIST_BYTES // list_bytes(widest, capacity)) * widest.queries
    with runner.launching():
        for first in range(0, num_queries, at_a_time):
            some = slice(first, first + at_a_time)
            for function, plan in zip(functions, plans, strict=True):
                launch_part(runner, function, plan, operands, outputs, some, choice)


def launch_part(
    runner: Runner,
    function: Any,
    plan: BwdPlan,
    operands: IndexerBwdOperands,
    outputs: Outputs,
    some: slice,
    choice: Tensor,
) -> None:
    """A plan's kernels for some of the queries."""
    indices = operands.indices[some]
    groups = -(-indices.shape[0] // plan.queries)
    lists = allocate_lists(runner, plan, groups, indices.shape[1])
    chosen: tuple[Any, ...] = ()
    if plan.chosen:
        step = -(-groups // MOST_SAMPLES)
        counts = (runner.empty(-(-groups // step), dtype=torch.int32) for _ in range(2))
        chosen = *counts, step, RATIO
    to = outputs.dq[some].flatten(0, 1), outputs.dk, outputs.dw[some].flatten()
    scalars = SPREAD, min(groups, runner.num_sms)
    function(*part_of(operands, some), *lists, *to, choice, *scalars, *chosen)


def launch_in_order(runner: Runner, operands: IndexerBwdOperands, outputs: Outputs) -> None:
    """The same bits every time: a row of dK for each place of the lists, added in their order.

    On as many queries at a time as have room for those rows. The bits do not depend on how many.
    """
    num_queries, num_heads, _ = operands.q_index.shape
    num_keys, topk = operands.k_index.shape[0], operands.indices.shape[1]
    plan = BwdPlan(num_heads, min(BLOCKS), ordered=True)
    function, add = runner.function(INDEXER_BWD, plan), runner.function(INDEXER_BWD_SUM, SumPlan())
    capacity = capacity_of(plan, topk)
    row_bytes = capacity * INDEX_HEAD_DIM * FP32
    groups_at_a_time = max(1, MOST_ROW_BYTES // row_bytes)
    groups_at_a_time = min(groups_at_a_time, -(-num_queries // plan.queries))
    places = runner.empty(groups_at_a_time * capacity, INDEX_HEAD_DIM, dtype=torch.float32)
    choice = runner.empty(0, dtype=torch.int32)
    with runner.launching():
        for first in range(0, num_queries, groups_at_a_time * plan.queries):
            some = slice(first, first + groups_at_a_time * plan.queries)
            groups = -(-operands.indices[some].shape[0] // plan.queries)
            lists = allocate_lists(runner, plan, groups, topk)
            rows = places[: groups * capacity]
            to = outputs.dq[some].flatten(0, 1), rows, outputs.dw[some].flatten()
            scalars = 0, min(groups, runner.num_sms)
            function(*part_of(operands, some), *lists, *to, choice, *scalars)
            add(rows, *place_order(lists, num_keys), outputs.dk)


def place_order(lists: Lists, num_keys: int) -> tuple[Tensor, Tensor]:
    """(order, starts) int32: key k has the places order[starts[k]:starts[k + 1]], ascending."""
    number = torch.arange(lists.rows.shape[1], device=lists.rows.device)
    listed = number < lists.counts[:, None]
    of_place = torch.where(listed, lists.rows, num_keys).flatten()
    keys, order = torch.sort(of_place, stable=True)
    every_key = torch.arange(num_keys + 1, dtype=keys.dtype, device=keys.device)
    return order.int(), torch.searchsorted(keys, every_key, out_int32=True)


def part_of(operands: IndexerBwdOperands, some: slice) -> tuple[Tensor, ...]:
    """The kernel's inputs of some of the queries."""
    q, k, weights, indices, grad_scores, lengths = operands
    assert lengths is not None
    of_queries = indices[some], grad_scores[some], lengths[some]
    return q[some].flatten(0, 1), k, weights[some].flatten(), *of_queries


def capacity_of(plan: BwdPlan, topk: int) -> int:
    """Of a group's list: room for all its slots, in whole tiles."""
    return -(-plan.queries * topk // TILE_KEYS) * TILE_KEYS


def list_bytes(plan: BwdPlan, capacity: int) -> int:
    """Of a group."""
    return capacity * FP32 * (1 + plan.queries)


def allocate_lists(runner: Runner, plan: BwdPlan, groups: int, topk: int) -> Lists:
    """Of so many groups."""
    capacity = capacity_of(plan, topk)
    return Lists(
        runner.empty(groups, capacity, dtype=torch.int32),
        runner.empty(groups * plan.queries, capacity, dtype=torch.float32),
        *(runner.empty(groups, dtype=torch.int32) for _ in range(2)),
    )
