"""The backward of the index scores on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.memory import aligned, lie_densely
from flashdsa.backends.reasons import Candidate, Choice
from flashdsa.backends.runner import Runner
from flashdsa.heuristics.h200 import IndexBackward
from flashdsa.kernels.catalog import INDEXER_BWD, INDEXER_BWD_SUM
from flashdsa.kernels.indexer_training.sm90.bwd import plan as sizes
from flashdsa.problem import INDEX_HEAD_DIM

if TYPE_CHECKING:
    from flashdsa.ops.indexer_training import IndexerBwdOperands

MOST_LIST_BYTES = 1 << 28
"""Most bytes of the lists of one launch; queries that need more are launched in parts."""
MOST_ROW_BYTES = 1 << 30
"""Most bytes of the deterministic backward's rows of dK, one for each entry of the lists."""


Gradients = tuple[Tensor, Tensor, Tensor]
"""dq_index, dk_index and d_weights."""


class Outputs(NamedTuple):
    """dq (S, H, 128) bf16, dw (S, H) and dk (S_kv, 128) fp32, written."""

    dq: Tensor
    dk: Tensor
    dw: Tensor


def bind(
    runner: Runner, operands: IndexerBwdOperands, *, deterministic: bool, dk_dtype: torch.dtype
) -> Callable[[IndexerBwdOperands], Gradients]:
    """dq_index (S, H, 128), dk_index (S_kv, 128) in `dk_dtype`, d_weights (S, H)."""
    q, k, weights = operands[:3]
    if not q.shape[0] or not k.shape[0]:
        return partial(without_keys, dk_dtype=dk_dtype)
    launch = bind_in_order(runner, operands) if deterministic else bind_groups(runner, operands)
    every = runner.empty(0, dtype=torch.int32)
    dense = lie_densely(operands) and weights.dtype is torch.float32
    kind = type(operands)
    empty_dq = runner.allocator(*q.shape, dtype=q.dtype)
    empty_dk = runner.allocator(*k.shape, dtype=torch.float32)
    empty_dw = runner.allocator(*weights.shape, dtype=torch.float32)

    def serve(operands: IndexerBwdOperands) -> Gradients:
        q, k, weights, indices, grad_scores, topk_length = operands
        lengths = every if topk_length is None else topk_length
        of_heads = weights
        if not dense:
            q, k = q.contiguous(), k.contiguous()
            of_heads, indices = weights.float().contiguous(), indices.contiguous()
            grad_scores, lengths = grad_scores.contiguous(), lengths.contiguous()
        dq, dk, dw = empty_dq(), empty_dk(), empty_dw()
        whole = kind(aligned(q), aligned(k), of_heads, indices, grad_scores, lengths)
        launch(whole, Outputs(dq, dk, dw))
        if dk_dtype is not torch.float32:
            dk = dk.to(dk_dtype)
        return dq, dk, dw if dense else dw.to(weights.dtype)

    return runner.on_device(serve)


def without_keys(operands: IndexerBwdOperands, dk_dtype: torch.dtype) -> Gradients:
    """Zero gradients of a call without keys or without queries."""
    q, k, weights = operands[:3]
    return torch.zeros_like(q), torch.zeros_like(k, dtype=dk_dtype), torch.zeros_like(weights)


Launch = Callable[["IndexerBwdOperands", Outputs], None]
"""Launch on operands without gaps, on the current device; topk_length (0,): every slot counts."""


def plan_for(num_heads: int, num_queries: int, topk: int, num_sms: int) -> sizes.BwdPlan:
    """Plan of the larger groups, which the device may choose, or of the smaller ones if heads,
    queries or slots are few."""
    if why_small_groups(num_heads, num_queries, topk, num_sms):
        return sizes.BwdPlan(num_heads, min(sizes.BLOCKS))
    return sizes.BwdPlan(num_heads)


def why_small_groups(num_heads: int, num_queries: int, topk: int, num_sms: int) -> str:
    """Say what speaks against larger groups; "": nothing."""
    if num_heads < sizes.LARGE_HEADS:
        return f"fewer than {sizes.LARGE_HEADS} heads"
    if num_queries * topk < IndexBackward.LEAST_CHOSEN_SLOTS:
        return f"{num_queries * topk} slots, fewer than {IndexBackward.LEAST_CHOSEN_SLOTS}"
    groups = -(-num_queries // sizes.BwdPlan(num_heads).queries)
    return f"{groups} larger groups, fewer than {num_sms} SMs" if groups < num_sms else ""


def explain(plan: sizes.BwdPlan, compiled: sizes.BwdPlan, why_small: str) -> Choice:
    """Say why groups have so many queries. `compiled`: the function's plan."""
    rule = (
        f"smaller groups: {why_small}"
        if why_small
        else "larger groups if the device finds lists at most "
        f"{IndexBackward.RATIO} times as long as one query's in the mean, else smaller ones"
    )
    kind = f"groups of {plan.queries} queries"
    return Choice("groups of queries", (Candidate(compiled.name, kind, rule),))


def bind_groups(runner: Runner, operands: IndexerBwdOperands) -> Launch:
    """Bind the larger groups or the smaller ones, as the device chooses."""
    num_queries, num_heads, _ = operands.q_index.shape
    topk = operands.indices.shape[1]
    plan = plan_for(num_heads, num_queries, topk, runner.num_sms)
    compiled, ratio = plan, tuple[float, ...]()
    if num_heads >= sizes.LARGE_HEADS:
        compiled, ratio = sizes.BwdPlan(num_heads), (IndexBackward.RATIO * plan.chosen,)
    why_small = why_small_groups(num_heads, num_queries, topk, runner.num_sms)
    runner.explain(partial(explain, plan, compiled, why_small))
    function = runner.function(INDEXER_BWD, compiled)
    at_a_time = max(1, MOST_LIST_BYTES // plan.list_bytes(topk)) * plan.queries
    words = plan.scratch_words(min(num_queries, at_a_time), topk)
    spread = IndexBackward.SPREAD if operands.k_index.shape[0] <= IndexBackward.NEAR_KEYS else 0
    groups = -(-min(num_queries, at_a_time) // plan.queries)
    clears = operands.k_index.shape[0] <= IndexBackward.MOST_CLEARED * groups
    empty_scratch = runner.allocator(words, dtype=torch.int32)

    def launch(operands: IndexerBwdOperands, outputs: Outputs) -> None:
        scratch = empty_scratch()
        if not clears:
            outputs.dk.zero_()
        clears_now = int(clears)
        for part, to in in_parts(operands, outputs, at_a_time):
            function(*part, scratch, *to, spread, runner.num_sms, clears_now, *ratio)
            clears_now = 0

    return launch


def bind_in_order(runner: Runner, operands: IndexerBwdOperands) -> Launch:
    """Bind a backward that gives the same bits every time: a row of dK for each entry of the lists,
    added in their order.

    It takes as many queries at a time as have room for those rows. The bits do not depend on how
    many.
    """
    num_queries, num_heads, _ = operands.q_index.shape
    num_keys, topk = operands.k_index.shape[0], operands.indices.shape[1]
    plan = sizes.BwdPlan(num_heads, min(sizes.BLOCKS), ordered=True)
    function, add = (
        runner.function(INDEXER_BWD, plan),
        runner.function(INDEXER_BWD_SUM, INDEXER_BWD_SUM.plan),
    )
    capacity = plan.capacity(topk)
    groups_at_a_time = max(1, MOST_ROW_BYTES // (capacity * INDEX_HEAD_DIM * sizes.FP32))
    groups_at_a_time = min(groups_at_a_time, -(-num_queries // plan.queries))
    at_a_time, num_sms = groups_at_a_time * plan.queries, runner.num_sms
    num_places = groups_at_a_time * capacity
    empty_places = runner.allocator(num_places, INDEX_HEAD_DIM, dtype=torch.float32)
    empty_scratch = runner.allocator(plan.scratch_words(at_a_time, topk), dtype=torch.int32)

    def launch(operands: IndexerBwdOperands, outputs: Outputs) -> None:
        places, scratch = empty_places(), empty_scratch()
        outputs.dk.zero_()
        for part, to in in_parts(operands, outputs, at_a_time):
            groups = -(-len(to.dq) // plan.queries)
            rows = places[: groups * capacity]
            function(*part, scratch, to.dq, rows, to.dw, 0, num_sms, 0)
            add(rows, *place_order(plan, scratch, groups, topk, num_keys), outputs.dk)

    return launch


def place_order(
    plan: sizes.BwdPlan, scratch: Tensor, groups: int, topk: int, num_keys: int
) -> tuple[Tensor, Tensor]:
    """(order, starts) int32: key k has the entries order[starts[k]:starts[k + 1]], ascending.
    `scratch`: of a launch for `groups` groups."""
    capacity = plan.capacity(topk)
    listed, counts = plan.lists_in(scratch, groups, topk)
    number = torch.arange(capacity, device=scratch.device)
    of_place = torch.where(number < counts[:, None], listed, num_keys).flatten()
    keys, order = torch.sort(of_place, stable=True)
    every_key = torch.arange(num_keys + 1, dtype=keys.dtype, device=keys.device)
    return order.int(), torch.searchsorted(keys, every_key, out_int32=True)


def in_parts(
    operands: IndexerBwdOperands, outputs: Outputs, at_a_time: int
) -> Iterator[tuple[tuple[Tensor | None, ...], Outputs]]:
    """Operands and outputs of `at_a_time` queries at a time."""
    q, k, weights, indices, grad_scores, lengths = operands
    if len(q) <= at_a_time:
        yield operands, outputs
        return
    assert lengths is not None
    for first in range(0, len(q), at_a_time):
        some = slice(first, first + at_a_time)
        part = q[some], k, weights[some], indices[some], grad_scores[some], lengths[some]
        yield part, Outputs(outputs.dq[some], outputs.dk, outputs.dw[some])
