"""The forward of sparse MLA on Blackwell GPUs."""

from __future__ import annotations

from functools import cache, partial

from flashdsa.backends import sparse_mla_launches
from flashdsa.backends.runner import Runner
from flashdsa.backends.sparse_mla_launches import Arguments, Kernel, bind_arguments
from flashdsa.kernels.attention.sm100.core.tile import PAIR_ROWS
from flashdsa.kernels.attention.sm100.fwd.plan import FwdPlan
from flashdsa.kernels.catalog import SPARSE_MLA_FWD_SM100
from flashdsa.operands import SparseMlaOperands


def choose(
    runner: Runner, operands: SparseMlaOperands, sm_scale: float, max_logits: bool
) -> Kernel:
    """Same as `sparse_mla_launches.Choose`; one plan serves calls with max_logits and without."""
    plan = _plan(PAIR_ROWS // operands.q.shape[1])
    arguments = arguments_for(runner, plan, operands, sm_scale)
    return Kernel(runner.function(SPARSE_MLA_FWD_SM100, plan), arguments)


forward = partial(sparse_mla_launches.forward, choose)
forward_out = partial(sparse_mla_launches.forward_out, choose)
prepare = partial(sparse_mla_launches.prepare, choose)
bind = partial(sparse_mla_launches.bind, choose)
bind_out = partial(sparse_mla_launches.bind_out, choose)


@cache
def _plan(group: int) -> FwdPlan:
    """A plan checks its barriers, which takes longer than a launch."""
    return FwdPlan(group=group)


def arguments_for(
    runner: Runner, plan: FwdPlan, operands: SparseMlaOperands, sm_scale: float
) -> Arguments:
    """Arguments of the compiled function of `plan`."""
    return bind_arguments(runner, plan.group, operands, sm_scale, lambda queries: ())


prepare_plan = partial(sparse_mla_launches.prepare_plan, arguments_for)
