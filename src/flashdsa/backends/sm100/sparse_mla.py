"""The forward of sparse MLA on Blackwell GPUs."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

from flashdsa.backends import sparse_mla_launches
from flashdsa.backends.memory import aligned
from flashdsa.backends.runner import Runner
from flashdsa.backends.sparse_mla_launches import Form, Launches, Write
from flashdsa.kernels.attention.sm100.core.tile import PAIR_ROWS
from flashdsa.kernels.attention.sm100.fwd.plan import FwdPlan
from flashdsa.kernels.catalog import SPARSE_MLA_FWD_SM100

if TYPE_CHECKING:
    from torch import Tensor

    from flashdsa.ops.attention import SparseMlaOperands, SparseMlaOutOperands


def choose(runner: Runner, operands: SparseMlaOperands, sm_scale: float, max_logits: bool) -> Write:
    """Same as `sparse_mla_launches.Choose`; one plan serves calls with max_logits and without."""
    return bind_plan(runner, _plan(PAIR_ROWS // operands.q.shape[1]), operands, sm_scale)


bind = partial(sparse_mla_launches.bind, choose)
bind_out = partial(sparse_mla_launches.bind_out, choose)


@cache
def _plan(group: int) -> FwdPlan:
    """A plan checks its barriers, which takes longer than a launch."""
    return FwdPlan(group=group)


def write_apart(
    runner: Runner, operands: SparseMlaOutOperands, kv_rope: Tensor, sm_scale: float
) -> None:
    """Write the results of a call whose keys' RoPE columns are a tensor of their own.

    Args:
        operands: contiguous; q (S, 16, 576) and kv (S_kv, 512), of at least one query and key.
        kv_rope: (S_kv, 64) bf16, contiguous.
    """
    plan = _plan_of_keys_apart(PAIR_ROWS // operands.q.shape[1])
    function = runner.function(SPARSE_MLA_FWD_SM100, plan)
    form = Form(function, plan.group, last=lambda _: (aligned(kv_rope),))
    with runner.launching():
        Launches(runner, operands.inputs, sm_scale, form)(operands)


@cache
def _plan_of_keys_apart(group: int) -> FwdPlan:
    return FwdPlan(group, kv_apart=True)


def bind_plan(runner: Runner, plan: FwdPlan, operands: SparseMlaOperands, sm_scale: float) -> Write:
    """Bind the launches of a plan's kernel."""
    function = runner.function(SPARSE_MLA_FWD_SM100, plan)
    return Launches(runner, operands, sm_scale, Form(function, plan.group))
