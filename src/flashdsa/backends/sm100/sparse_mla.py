"""The forward of sparse MLA on Blackwell GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.sparse_mla import write_without_keys
from flashdsa.backends.memory import readable, require_writable
from flashdsa.backends.runner import Runner
from flashdsa.kernels.catalog import SPARSE_MLA_FWD_SM100
from flashdsa.kernels.sparse_mla.sm100.fwd.plan import PAIR_ROWS, FwdPlan
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
        ArgumentValueError: `out` has an address that the kernel cannot write 16 bytes to.
    """
    require_writable("out", operands.out)
    if not operands.q.shape[0] or not operands.kv.shape[0]:
        return partial(write_without_keys, operands)
    plan = _plan(PAIR_ROWS // operands.q.shape[1])
    function = runner.function(SPARSE_MLA_FWD_SM100, plan)
    return prepare_plan(runner, function, plan, operands, sm_scale)


@cache
def _plan(group: int) -> FwdPlan:
    """A plan checks its barriers, which takes longer than a launch."""
    return FwdPlan(group=group)


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
    num_queries = q.shape[0]
    q, kv, indices = readable(q), readable(kv), indices.contiguous()
    every = runner.empty(0, dtype=torch.int32)
    lengths = every if topk_length is None else topk_length.contiguous()
    none = runner.empty(0, dtype=torch.float32)
    sink = none if attn_sink is None else attn_sink.to(torch.float32).contiguous()
    if plan.group == 1:
        largest = none if max_logits is None else max_logits.view(-1)
        return [(q, kv, indices, lengths, sink, out, lse, largest, sm_scale)]
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
        calls.append((*of_queries, out[part], lse[part], largest, *lists, sm_scale))
    return calls
