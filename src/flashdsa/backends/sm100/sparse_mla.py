"""The forward of sparse MLA on Blackwell GPUs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.memory import readable
from flashdsa.backends.runner import Runner
from flashdsa.kernels.catalog import SPARSE_MLA_FWD_SM100
from flashdsa.kernels.sparse_mla.sm100.fwd.plan import PAIR_ROWS, FwdPlan
from flashdsa.operands import SparseMlaOperands

UNION_BYTES = 5
"""Of a slot in the groups' lists: a row number and the queries that name it."""
MOST_UNION_BYTES = 256 << 20
"""Of the lists of one launch; queries that need more are launched in parts."""


def forward(
    runner: Runner, operands: SparseMlaOperands, *, d_v: int, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """O (S, H, d_v) in q's dtype and lse (S, H) fp32."""
    q, kv = operands.q, operands.kv
    num_queries, num_heads, _ = q.shape
    out = runner.empty(num_queries, num_heads, d_v, dtype=q.dtype)
    lse = runner.empty(num_queries, num_heads, dtype=torch.float32)
    if not num_queries or not kv.shape[0]:
        return out.zero_(), lse.fill_(math.inf)
    plan = FwdPlan(group=PAIR_ROWS // num_heads)
    function = runner.function(SPARSE_MLA_FWD_SM100, plan)
    with runner.launching():
        launch(runner, function, plan, operands, out, lse, sm_scale)
    return out, lse


def launch(
    runner: Runner,
    function: Any,
    plan: FwdPlan,
    operands: SparseMlaOperands,
    out: Tensor,
    lse: Tensor,
    sm_scale: float,
) -> None:
    """The compiled function of `plan` on the operands, some of which are copied for it.

    Args:
        out, lse: written, without gaps.
    """
    q, kv, indices, topk_length, attn_sink = operands
    num_queries, topk = indices.shape
    q, kv, indices = readable(q), readable(kv), indices.contiguous()
    every = runner.empty(0, dtype=torch.int32)
    lengths = every if topk_length is None else topk_length.contiguous()
    sink = runner.empty(0, dtype=torch.float32)
    if attn_sink is not None:
        sink = attn_sink.to(torch.float32).contiguous()
    if plan.group == 1:
        function(q, kv, indices, lengths, sink, out, lse, sm_scale)
        return
    most = plan.group * topk
    groups_at_a_time = max(1, MOST_UNION_BYTES // max(1, UNION_BYTES * most))
    for first in range(0, num_queries, plan.group * groups_at_a_time):
        part = slice(first, first + plan.group * groups_at_a_time)
        groups = -(-q[part].shape[0] // plan.group)
        function(
            q[part],
            kv,
            indices[part],
            lengths[part],
            sink,
            out[part],
            lse[part],
            runner.empty(groups, most, dtype=torch.int32),
            runner.empty(groups, most, dtype=torch.uint8),
            runner.empty(groups, dtype=torch.int32),
            sm_scale,
        )
