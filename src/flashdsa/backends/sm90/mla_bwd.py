"""The backward of sparse MLA on Hopper GPUs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.cpu.sparse_mla import sink_backward
from flashdsa.backends.memory import readable
from flashdsa.backends.runner import Runner
from flashdsa.kernels.catalog import MLA_BWD_DKV, MLA_BWD_DQ, MLA_BWD_SCORES
from flashdsa.kernels.sparse_mla.sm90.bwd.dkv.plan import SLICES as DKV_SLICES
from flashdsa.kernels.sparse_mla.sm90.bwd.dkv.plan import DkvPlan
from flashdsa.kernels.sparse_mla.sm90.bwd.dq.plan import DqPlan
from flashdsa.kernels.sparse_mla.sm90.bwd.scores.plan import ITEM_BLOCKS, WARP_ROWS, ScoresPlan
from flashdsa.kernels.sparse_mla.sm90.bwd.spool import TILE_KEYS, group_queries, spool_bytes
from flashdsa.kernels.sparse_mla.sm90.union import members_bits
from flashdsa.operands import MlaBwdOperands

MOST_WORKSPACE_BYTES = 1 << 30
"""Of the spool and the lists of one launch; queries that need more are launched in parts."""


class Grouping(NamedTuple):
    """How queries share lists.

    Attributes:
        queries: neighbouring ones of a group. row_blocks: of a group, 2 or 4.
        capacity: of a group's list.
    """

    queries: int
    row_blocks: int
    capacity: int

    @property
    def group_bytes(self) -> int:
        """Workspace of a group: its images and its list."""
        of_key = 4 + members_bits(self.queries) // 8
        return spool_bytes(1, self.row_blocks, self.capacity) + of_key * self.capacity

    @property
    def groups_at_a_time(self) -> int:
        """That have room in a launch's workspace."""
        return max(1, MOST_WORKSPACE_BYTES // self.group_bytes)


class Launches(NamedTuple):
    """The compiled functions of a grouping."""

    scores: Any
    dq: Any
    dkv: Any


def backward(
    runner: Runner,
    operands: MlaBwdOperands,
    *,
    sm_scale: float,
    deterministic: bool,
    dkv_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ (S, H, d_qk), dKV (S_kv, d_qk), d_sink (H,), which is empty without a sink.

    Args:
        deterministic: False; there is no such form yet, which the catalog says.
    """
    q, kv, dO, lse, O, indices, topk_length, attn_sink = operands
    num_queries, num_heads, _ = q.shape
    dkv = torch.zeros(kv.shape, dtype=torch.float32, device=q.device)
    sink_size = 0 if attn_sink is None else num_heads
    if not num_queries or not kv.shape[0]:
        d_sink = torch.zeros(sink_size, dtype=torch.float32, device=q.device)
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device), dkv.to(dkv_dtype), d_sink
    dq = runner.empty(*q.shape, dtype=q.dtype)
    delta = runner.empty(*lse.shape, dtype=torch.float32)
    with_sink = (
        lse if attn_sink is None else torch.logaddexp(lse, attn_sink.to(lse.dtype).expand_as(lse))
    )
    every = runner.empty(0, dtype=torch.int32)
    whole = MlaBwdOperands(
        readable(q),
        readable(kv),
        readable(dO),
        with_sink.contiguous(),
        readable(O),
        indices.contiguous(),
        every if topk_length is None else topk_length.contiguous(),
    )
    grouping = grouping_for(num_queries, num_heads, indices.shape[1], runner.num_sms)
    launch(runner, whole, grouping, delta, dq, dkv, sm_scale)
    d_sink = torch.zeros(0, dtype=torch.float32, device=q.device)
    if attn_sink is not None:
        d_sink = sink_backward(lse, attn_sink, delta)[1]
    return dq, dkv.to(dkv_dtype), d_sink


def grouping_for(num_queries: int, num_heads: int, topk: int, num_sms: int) -> Grouping:
    """Groups of 256 rows with 32 heads and more, of 128 with fewer, whose groups are of many
    queries anyway, and with so few queries that they would leave streaming multiprocessors idle.

    Args:
        num_heads: one of spool.HEADS.
    """
    row_blocks = 4 if num_heads >= 32 else 2
    if -(-num_queries // group_queries(num_heads, row_blocks)) * DKV_SLICES < num_sms:
        row_blocks = 2
    queries = group_queries(num_heads, row_blocks)
    return Grouping(queries, row_blocks, -(-queries * topk // TILE_KEYS) * TILE_KEYS)


def functions_for(runner: Runner, grouping: Grouping, num_heads: int) -> Launches:
    """The compiled functions."""
    split = num_heads < WARP_ROWS
    scores = ScoresPlan(grouping.queries, split)
    return Launches(
        runner.function(MLA_BWD_SCORES, scores),
        runner.function(MLA_BWD_DQ, DqPlan(grouping.row_blocks)),
        runner.function(MLA_BWD_DKV, DkvPlan(grouping.row_blocks)),
    )


def launch(
    runner: Runner,
    operands: MlaBwdOperands,
    grouping: Grouping,
    delta: Tensor,
    dq: Tensor,
    dkv: Tensor,
    sm_scale: float,
) -> None:
    """All kernels, on as many queries at a time as have room in the workspace.

    Args:
        operands: without gaps; topk_length (0,) says that every slot counts, lse has the sinks.
        delta: (S, H) fp32 and dq, written. dkv: fp32, added to.
    """
    num_queries, num_heads, _ = operands.q.shape
    functions = functions_for(runner, grouping, num_heads)
    groups_in_all = -(-num_queries // grouping.queries)
    at_a_time = min(grouping.groups_at_a_time, groups_in_all)
    size, capacity = at_a_time, grouping.capacity
    member = torch.uint8 if members_bits(grouping.queries) == 8 else torch.uint16
    rows = runner.empty(size, capacity, dtype=torch.int32)
    members = runner.empty(size, capacity, dtype=member)
    counts = runner.empty(size, dtype=torch.int32)
    present = runner.empty(size, dtype=torch.int32)
    spool = runner.empty(spool_bytes(size, grouping.row_blocks, capacity), dtype=torch.uint8)
    with runner.launching():
        for first in range(0, num_queries, at_a_time * grouping.queries):
            part = slice(first, first + at_a_time * grouping.queries)
            groups = -(-operands.q[part].shape[0] // grouping.queries)
            launch_part(
                runner,
                functions,
                operands_of(operands, part),
                (rows[:groups], members[:groups], counts[:groups], present[:groups], spool),
                grouping,
                (delta[part].flatten(), dq[part].flatten(0, 1), dkv),
                sm_scale,
            )


def operands_of(operands: MlaBwdOperands, part: slice) -> MlaBwdOperands:
    """Of some queries, their heads' rows one after another."""
    q, kv, dO, lse, O, indices, lengths, _ = operands
    assert lengths is not None
    return MlaBwdOperands(
        q[part].flatten(0, 1),
        kv,
        dO[part].flatten(0, 1),
        lse[part].flatten(),
        O[part].flatten(0, 1),
        indices[part],
        lengths[part],
    )


def launch_part(
    runner: Runner,
    functions: Launches,
    operands: MlaBwdOperands,
    workspace: tuple[Tensor, ...],
    grouping: Grouping,
    outputs: tuple[Tensor, ...],
    sm_scale: float,
) -> None:
    """The kernels one after another, on a few queries.

    Args:
        workspace: rows, members, counts and present of the lists, see spool.py, and the spool.
        outputs: delta (S * H,) and dq (S * H, d_qk), written; dkv, added to.
    """
    q, kv, dO, lse, O, indices, lengths, _ = operands
    rows, members, counts, present, spool = workspace
    delta, dq, dkv = outputs
    groups, num_heads = counts.shape[0], q.shape[0] // indices.shape[0]
    num_ctas = min(groups * grouping.row_blocks // ITEM_BLOCKS, runner.num_sms)
    functions.scores(
        q, kv, dO, lse, O, indices, lengths, delta, rows, members, counts, present, spool,
        num_heads, sm_scale, num_ctas,
    )  # fmt: skip
    dq_items = groups * DqPlan(grouping.row_blocks).slices
    functions.dq(spool, rows, counts, kv, dq, 0, groups, min(dq_items, runner.num_sms))
    num_ctas = min(groups * DKV_SLICES, runner.num_sms)
    functions.dkv(spool, rows, counts, present, q, dO, dkv, num_heads, 0, groups, num_ctas)
