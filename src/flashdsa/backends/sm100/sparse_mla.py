"""The forward of sparse MLA on Blackwell GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import Tensor

from flashdsa.backends.cpu.sparse_mla import write_without_keys
from flashdsa.backends.memory import require_writable
from flashdsa.backends.runner import Runner
from flashdsa.backends.sparse_mla_launches import Launch, arguments_of, launches, with_results
from flashdsa.kernels.catalog import SPARSE_MLA_FWD_SM100
from flashdsa.kernels.sparse_mla.sm100.fwd.plan import PAIR_ROWS, FwdPlan
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
    calls = arguments_of(runner, plan.group, operands, sm_scale, lambda queries: ())
    return launches(runner, function, calls)
