"""The forward of sparse MLA on Hopper GPUs: launches of the way that `sparse_mla_ways` chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends import sparse_mla_launches
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.sparse_mla_ways import (
    DecodeKernel,
    StreamK,
    Way,
    call_of,
    choose,
    compiled_plan,
    explain,
    invariant_way,
)
from flashdsa.backends.sm90.used_slots import with_used_slots
from flashdsa.backends.sparse_mla_launches import Form, Inputs, Launches, Write
from flashdsa.kernels import catalog
from flashdsa.kernels.attention.sm90.core.tile import ROWS
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import FewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.few_heads.stream_k.plan import StreamKFewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.full.plan import DecodePlan
from flashdsa.kernels.attention.sm90.decode.full.stream_k.plan import StreamKPlan
from flashdsa.kernels.attention.sm90.decode.shared.plan import CTA_SLOTS
from flashdsa.kernels.attention.sm90.fwd.plan import FwdPlan
from flashdsa.plan.kernel_spec import KernelSpec

if TYPE_CHECKING:
    from flashdsa.ops.attention import SparseMlaOperands

DECODES: Mapping[type[DecodeKernel], KernelSpec] = {
    DecodePlan: catalog.SPARSE_MLA_DECODE,
    StreamKPlan: catalog.SPARSE_MLA_DECODE_STREAM_K,
    FewHeadsPlan: catalog.SPARSE_MLA_DECODE_FEW_HEADS,
    StreamKFewHeadsPlan: catalog.SPARSE_MLA_DECODE_STREAM_K_FEW_HEADS,
}
"""The catalog's rows of the decode's plans."""


def choose_write(
    runner: Runner,
    operands: SparseMlaOperands,
    sm_scale: float,
    max_logits: bool,
    index_block: int = 1,
    batch_invariant: bool = False,
    kv_format: str | None = None,
) -> Write:
    """Same as `sparse_mla_launches.Choose`."""
    call = call_of(operands, max_logits, index_block, kv_format)
    way = invariant_way(runner, call) if batch_invariant else choose(runner, call)
    runner.explain(partial(explain, runner, call, way, invariant=batch_invariant))
    return bind_way(runner, way, operands, sm_scale, index_block)


bind = partial(sparse_mla_launches.bind, choose_write)
bind_out = partial(sparse_mla_launches.bind_out, choose_write)


def bind_way(
    runner: Runner, way: Way, operands: SparseMlaOperands, sm_scale: float, index_block: int = 1
) -> Write:
    """Bind the launches of a way."""
    if isinstance(way.plan, FwdPlan):
        plans = [plan for plan in (way.plan, way.instead) if plan is not None]
        forms = (form_of(runner, plan, operands) for plan in plans)
        write: Write = Launches(runner, operands, sm_scale, *forms, index_block=index_block)
    else:
        write = bind_decode(runner, way.plan, way.cluster_size, operands, sm_scale, index_block)
    return with_used_slots(runner, write, operands, index_block) if way.finds_ends else write


def form_of(runner: Runner, plan: FwdPlan, operands: SparseMlaOperands) -> Form:
    """A plan's kernel for operands of these heads."""
    num_heads, num_sms = operands.q.shape[1], runner.num_sms
    blocks = -(-num_heads // ROWS) if plan.group == 1 else 1

    def num_ctas(queries: int) -> tuple[int, ...]:
        """CTAs of a launch: one for each item, at most one an SM; and the SMs, where it samples."""
        ctas = min(-(-queries // plan.group) * blocks, num_sms)
        return (ctas, num_sms) if plan.samples else (ctas,)

    function = runner.function(catalog.SPARSE_MLA_FWD, plan)
    return Form(function, plan.group, num_ctas, plan.drawn, plan.joined)


def bind_decode(
    runner: Runner,
    plan: DecodeKernel,
    cluster_size: int,
    operands: SparseMlaOperands,
    sm_scale: float,
    index_block: int = 1,
) -> Write:
    """Bind the one launch of a decode. `cluster_size`: CTAs of an item, of stream-K tiles any; one
    takes the plan of a CTA alone."""
    plan = compiled_plan(plan, cluster_size)
    function = runner.function(DECODES[type(plan)], plan)
    pages = plan.form if plan.paged else None
    inputs = Inputs(runner, operands, sm_scale, index_block, pages)
    arguments = inputs.joined if plan.joined else inputs
    if isinstance(plan, StreamK):
        return _bind_stream_k(runner, plan, function, arguments)
    return lambda operands: function(*arguments(operands), cluster_size)


def _bind_stream_k(
    runner: Runner,
    plan: StreamK,
    function: Callable[..., Any],
    inputs: Callable[..., tuple[Any, ...]],
) -> Write:
    """Bind the launch of stream-K tiles: a CTA an SM, each with its slots of a workspace."""
    num_sms = runner.num_sms

    def allocate(runner: Runner) -> tuple[Tensor]:
        return (runner.empty(CTA_SLOTS * num_sms, plan.slot_words, dtype=torch.int32),)

    # Keys of the indexer's workspaces are positive.
    workspace = partial(runner.workspace, -plan.slot_words, allocate, num_sms)
    return lambda operands: function(*inputs(operands), *workspace(), num_sms)
