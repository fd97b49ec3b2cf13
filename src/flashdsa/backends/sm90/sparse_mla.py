"""The forward of sparse MLA on Hopper GPUs."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

from flashdsa.backends import sparse_mla_launches
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90 import sparse_mla_decode
from flashdsa.backends.sparse_mla_launches import Launches, Write
from flashdsa.kernels.attention.sm90.core.tile import ROWS
from flashdsa.kernels.attention.sm90.decode.full.dealt.plan import DealtPlan
from flashdsa.kernels.attention.sm90.fwd.plan import GROUPS, FwdPlan
from flashdsa.kernels.catalog import SPARSE_MLA_FWD

if TYPE_CHECKING:
    from flashdsa.ops.attention import SparseMlaOperands


def choose(runner: Runner, operands: SparseMlaOperands, sm_scale: float, max_logits: bool) -> Write:
    """Same as `sparse_mla_launches.Choose`: the decode, or the forward."""
    if not max_logits and sparse_mla_decode.serves(operands, runner.num_sms):
        return sparse_mla_decode.choose_kernel(runner, operands, sm_scale)
    num_queries, num_heads, _ = operands.q.shape
    plan = plan_for(num_queries, num_heads, runner.num_sms, max_logits)
    topk = operands.indices.shape[1]
    if plan == _plan(1) and sparse_mla_decode.beats_the_forward(
        runner, num_queries, num_heads, topk
    ):
        return sparse_mla_decode.bind_plan(runner, DealtPlan(), 1, operands, sm_scale)
    return bind_plan(runner, plan, operands, sm_scale)


bind = partial(sparse_mla_launches.bind, choose)
bind_out = partial(sparse_mla_launches.bind_out, choose)


def plan_for(num_queries: int, num_heads: int, num_sms: int, max_logits: bool = False) -> FwdPlan:
    """Choose groups of queries if few heads would leave rows of the MMAs empty.

    A group's list is at most `group` times as long as a query's, and a CTA takes it alone: with
    that many queries groups are never slower, whatever they have in common.
    """
    group = ROWS // num_heads if ROWS % num_heads == 0 else 1
    if group in GROUPS and num_queries > (group - 1) * num_sms:
        return _plan(group, max_logits)
    return _plan(1, max_logits)


@cache
def _plan(group: int, max_logits: bool = False) -> FwdPlan:
    """A plan checks its barriers, which takes longer than a launch."""
    return FwdPlan(group, max_logits)


def bind_plan(runner: Runner, plan: FwdPlan, operands: SparseMlaOperands, sm_scale: float) -> Write:
    """Bind the launches of a plan's kernel."""
    num_heads, num_sms = operands.q.shape[1], runner.num_sms

    def num_ctas(queries: int) -> tuple[int]:
        """CTAs of a launch: one for each item, at most one an SM."""
        groups = -(-queries // plan.group)
        items = groups * -(-num_heads // ROWS) if plan.group == 1 else groups
        return (min(items, num_sms),)

    function = runner.function(SPARSE_MLA_FWD, plan)
    return Launches(runner, function, operands, sm_scale, plan.group, num_ctas)
