"""The forward of sparse MLA on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import Tensor

from flashdsa.backends.cpu.sparse_mla import write_without_keys
from flashdsa.backends.memory import require_writable
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90 import sparse_mla_decode
from flashdsa.backends.sparse_mla_launches import Launch, arguments_of, launches, with_results
from flashdsa.kernels.catalog import SPARSE_MLA_FWD
from flashdsa.kernels.sparse_mla.sm90.fwd.plan import GROUPS, ROWS, FwdPlan
from flashdsa.operands import SparseMlaOperands, SparseMlaOutOperands


def forward(
    runner: Runner, operands: SparseMlaOperands, *, d_v: int, sm_scale: float, max_logits: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """O (S, H, d_v) in q's dtype, lse and max_logits (S, H) fp32; the latter without an element
    where it is not asked for."""
    into, results = with_results(runner, operands, d_v, max_logits)
    forward_out(runner, into, sm_scale=sm_scale)
    return results


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
    num_heads = operands.q.shape[1]

    def num_ctas(queries: int) -> tuple[int]:
        """Of a launch: as many as have an item, at most one an SM."""
        groups = -(-queries // plan.group)
        items = groups * -(-num_heads // ROWS) if plan.group == 1 else groups
        return (min(items, runner.num_sms),)

    calls = arguments_of(runner, plan.group, operands, sm_scale, num_ctas)
    return launches(runner, function, calls)
