"""The forward of sparse MLA on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.sparse_mla import write_without_keys
from flashdsa.backends.memory import readable, require_writable
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90 import sparse_mla_decode
from flashdsa.kernels.catalog import SPARSE_MLA_FWD
from flashdsa.kernels.sparse_mla.sm90.fwd.plan import GROUPS, ROWS, FwdPlan
from flashdsa.operands import SparseMlaOperands, SparseMlaOutOperands

UNION_BYTES = 5
"""Of a slot in the groups' lists: a row number and the queries that name it."""
MOST_UNION_BYTES = 256 << 20
"""Of the lists of one launch; queries that need more are launched in parts."""

Launch = Callable[[], None]
"""Writes the results of fixed tensors, on torch's current stream."""


def forward(
    runner: Runner, operands: SparseMlaOperands, *, d_v: int, sm_scale: float, max_logits: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """O (S, H, d_v) in q's dtype, lse and max_logits (S, H) fp32; the latter without an element
    where it is not asked for."""
    q, kv, indices, topk_length, attn_sink = operands
    rows = q.shape[:2]
    out = runner.empty(*rows, d_v, dtype=q.dtype)
    lse = runner.empty(*rows, dtype=torch.float32)
    largest = runner.empty(*(rows if max_logits else (0,)), dtype=torch.float32)
    asked = largest if max_logits else None
    forward_out(
        runner,
        SparseMlaOutOperands(q, kv, indices, out, lse, asked, topk_length, attn_sink),
        sm_scale=sm_scale,
    )
    return out, lse, largest


def forward_out(runner: Runner, operands: SparseMlaOutOperands, *, sm_scale: float) -> None:
    """out (S, H, d_v), lse and, if asked for, max_logits (S, H), written."""
    prepare(runner, operands, sm_scale=sm_scale)()


def prepare(runner: Runner, operands: SparseMlaOutOperands, *, sm_scale: float) -> Launch:
    """`forward_out` of these tensors, to be launched any number of times on one stream.

    Raises:
        ArgumentValueError: `out` has an address that the kernels cannot write 16 bytes to.
    """
    require_writable("out", operands.out)
    if not operands.q.shape[0] or not operands.kv.shape[0]:
        return partial(write_without_keys, operands)
    if operands.max_logits is None and sparse_mla_decode.serves(operands.inputs, runner.num_sms):
        return sparse_mla_decode.prepare(runner, operands, sm_scale)
    num_queries, num_heads, _ = operands.q.shape
    asked = operands.max_logits is not None
    plan = plan_for(num_queries, num_heads, runner.num_sms, asked)
    return prepare_plan(runner, runner.function(SPARSE_MLA_FWD, plan), plan, operands, sm_scale)


def plan_for(num_queries: int, num_heads: int, num_sms: int, max_logits: bool = False) -> FwdPlan:
    """Groups of queries where few heads would leave rows of the MMAs empty.

    A group's list is at most `group` times as long as a query's, and a CTA takes it alone: with so
    many queries groups are never slower, whatever they have in common.
    """
    group = ROWS // num_heads if ROWS % num_heads == 0 else 1
    if group in GROUPS and num_queries > (group - 1) * num_sms:
        return _plan(group, max_logits)
    return _plan(1, max_logits)


@cache
def _plan(group: int, max_logits: bool) -> FwdPlan:
    """A plan checks its barriers, which takes longer than a launch."""
    return FwdPlan(group, max_logits)


def prepare_plan(
    runner: Runner,
    function: Callable[..., Any],
    plan: FwdPlan,
    operands: SparseMlaOutOperands,
    sm_scale: float,
) -> Launch:
    """The compiled function of `plan` on the operands, some of which are copied for it."""
    calls = arguments_of(runner, plan, operands, sm_scale)

    def launch() -> None:
        with runner.launching():
            for arguments in calls:
                function(*arguments)

    return launch


def arguments_of(
    runner: Runner, plan: FwdPlan, operands: SparseMlaOutOperands, sm_scale: float
) -> list[tuple[Any, ...]]:
    """Of each launch. Those of a stream follow each other, so the groups' lists are the same."""
    q, kv, indices, out, lse, max_logits, topk_length, attn_sink = operands
    num_queries, num_heads, _ = q.shape
    q, kv, indices = readable(q), readable(kv), indices.contiguous()
    every = runner.empty(0, dtype=torch.int32)
    lengths = every if topk_length is None else topk_length.contiguous()
    none = runner.empty(0, dtype=torch.float32)
    sink = none if attn_sink is None else attn_sink.to(torch.float32).contiguous()
    if plan.group == 1:
        items = num_queries * -(-num_heads // ROWS)
        num_ctas = min(items, runner.num_sms)
        largest = none if max_logits is None else max_logits.view(-1)
        return [(q, kv, indices, lengths, sink, out, lse, largest, sm_scale, num_ctas)]
    most = plan.group * indices.shape[1]
    groups_at_a_time = max(1, MOST_UNION_BYTES // (UNION_BYTES * most))
    groups_at_a_time = min(groups_at_a_time, -(-num_queries // plan.group))
    rows = runner.empty(groups_at_a_time, most, dtype=torch.int32)
    members = runner.empty(groups_at_a_time, most, dtype=torch.uint8)
    counts = runner.empty(groups_at_a_time, dtype=torch.int32)
    calls: list[tuple[Any, ...]] = []
    for first in range(0, num_queries, plan.group * groups_at_a_time):
        part = slice(first, first + plan.group * groups_at_a_time)
        groups = -(-q[part].shape[0] // plan.group)
        largest = none if max_logits is None else max_logits[part].view(-1)
        of_queries = (q[part], kv, indices[part], lengths[part], sink)
        lists = (rows[:groups], members[:groups], counts[:groups])
        num_ctas = min(groups, runner.num_sms)
        results = (out[part], lse[part], largest)
        calls.append((*of_queries, *results, *lists, sm_scale, num_ctas))
    return calls
