"""The backward of sparse MLA on Hopper GPUs."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.cpu.sparse_mla import sink_backward
from flashdsa.backends.memory import readable
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.mla_bwd_fused import is_far, launch_either, launch_fused
from flashdsa.backends.sm90.mla_bwd_lists import Lists, allocate_lists, capacity_of
from flashdsa.kernels.catalog import MLA_BWD_DKV, MLA_BWD_DQ, MLA_BWD_SCORES
from flashdsa.kernels.sparse_mla.sm90.bwd.dkv.plan import SLICES as DKV_SLICES
from flashdsa.kernels.sparse_mla.sm90.bwd.dkv.plan import WORDS, DkvPlan
from flashdsa.kernels.sparse_mla.sm90.bwd.dq.plan import DqPlan, dq_slices
from flashdsa.kernels.sparse_mla.sm90.bwd.scores.plan import ITEM_BLOCKS, WARP_ROWS, ScoresPlan
from flashdsa.kernels.sparse_mla.sm90.bwd.spool import TILE_KEYS, group_queries, spool_bytes
from flashdsa.kernels.sparse_mla.sm90.fwd.plan import D_QK
from flashdsa.kernels.sparse_mla.sm90.members import members_bits
from flashdsa.operands import MlaBwdOperands

MOST_WORKSPACE_BYTES = 1 << 30
"""Of the spool and the lists of one launch; queries that need more are launched in parts."""

MOST_BUFFERS = 3
MOST_BUFFER_BYTES = 1 << 30
"""Of the deterministic backward's dKVs, each of S_kv rows in fp32; one there is in any case."""

RATIO = {128: 1.2, 64: 1.4}
"""By heads: how much longer than a query's list that of a group of 256 rows may be, on average.
Where it is longer groups of 128 rows are faster; with fewer heads they always are."""


FUSED_RATIO = 1.16
"""The same, where the fused kernel is what is taken beyond it."""
FIRST = 0
"""Number of the large groups, see `kernels.sparse_mla.sm90.choice`."""


class Grouping(NamedTuple):
    """How queries share lists.

    Attributes:
        queries: neighbouring ones of a group. row_blocks: of a group, 2 or 4.
        topk: slots of a query.
        ratio: 0, or up to which length of the lists this grouping is taken, and beyond it `second`;
            see `kernels.sparse_mla.sm90.choice`.
    """

    queries: int
    row_blocks: int
    topk: int
    ratio: float = 0.0

    @property
    def capacity(self) -> int:
        """Of a group's list: room for all its slots."""
        return capacity_of(self.queries, self.topk)

    @property
    def groupings(self) -> tuple[Grouping, ...]:
        """This one and the second one, of half as many queries a group, if there is."""
        second = Grouping(self.queries // 2, self.row_blocks // 2, self.topk)
        return (self, second) if self.ratio else (self,)

    @property
    def group_bytes(self) -> int:
        """Workspace of a group: its images and its list, and the lists of two of the second."""
        of_key = 4 + members_bits(self.queries) // 8
        lists = len(self.groupings) * of_key * (self.capacity + TILE_KEYS)
        return spool_bytes(1, self.row_blocks, self.capacity) + lists

    @property
    def groups_at_a_time(self) -> int:
        """That have room in a launch's workspace."""
        return max(1, MOST_WORKSPACE_BYTES // self.group_bytes)


class Workspace(NamedTuple):
    """What the launches of a call write to, one after another.

    Attributes:
        choice: (1,) int32: which of two groupings is taken; (0,): there is one.
        lists: of the grouping and of the second one, if there is.
        order: of each grouping (groups, words) int32, of the deterministic backward: see
            `kernels.sparse_mla.sm90.bwd.dkv.order`.
    """

    spool: Tensor
    choice: Tensor
    lists: tuple[Lists, ...]
    order: tuple[Tensor, ...]


class Part(NamedTuple):
    """Some of the queries, their heads' rows one after another.

    Attributes:
        operands: q (S * H, d_qk), dO and O (S * H, d_v), lse (S * H,).
        delta: (S * H,) and dq (S * H, d_qk), written. dkv: all of it, added to.
        lists: of each grouping, written. first: number of the first query.
    """

    operands: MlaBwdOperands
    delta: Tensor
    dq: Tensor
    dkv: Tensor
    lists: tuple[Lists, ...]
    first: int

    @property
    def heads(self) -> int:
        """Of a query."""
        return self.operands.q.shape[0] // self.operands.indices.shape[0]


def backward(
    runner: Runner,
    operands: MlaBwdOperands,
    *,
    sm_scale: float,
    deterministic: bool,
    dkv_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ (S, H, d_qk), dKV (S_kv, d_qk), d_sink (H,), which is empty without a sink."""
    q, kv, dO, lse, O, indices, topk_length, attn_sink = operands
    num_queries, num_heads, _ = q.shape
    buffers = buffers_for(kv.shape[0]) if deterministic else 1
    shape = (buffers, *kv.shape) if deterministic else kv.shape
    dkv = torch.zeros(shape, dtype=torch.float32, device=q.device)
    sink_size = 0 if attn_sink is None else num_heads
    if not num_queries or not kv.shape[0]:
        d_sink = torch.zeros(sink_size, dtype=torch.float32, device=q.device)
        dkv = dkv.view(-1, kv.shape[1])[: kv.shape[0]]
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
    if deterministic or is_far(num_heads, kv.shape[0]):
        launch(runner, whole, grouping, delta, dq, dkv, sm_scale)
    elif grouping.ratio:
        grouping = grouping._replace(ratio=FUSED_RATIO)

        def launch_large(*part: Any) -> None:
            launch_chosen(runner, grouping, sm_scale, *part)

        launch_either(runner, whole, grouping, (delta, dq, dkv), sm_scale, launch_large)
    else:
        launch_fused(runner, whole, (delta, dq, dkv), sm_scale)
    d_sink = torch.zeros(0, dtype=torch.float32, device=q.device)
    if attn_sink is not None:
        d_sink = sink_backward(lse, attn_sink, delta)[1]
    if deterministic:
        dkv = dkv.sum(0) if buffers > 1 else dkv[0]
    return dq, dkv.to(dkv_dtype), d_sink


def buffers_for(num_keys: int) -> int:
    """dKVs that the deterministic backward adds to: so many groups may go over the same keys at a
    time. The bits depend on it, so it depends on nothing else."""
    return max(1, min(MOST_BUFFERS, MOST_BUFFER_BYTES // (4 * D_QK * max(1, num_keys))))


def grouping_for(num_queries: int, num_heads: int, topk: int, num_sms: int) -> Grouping:
    """Groups of 256 rows with 64 heads and more, where queries have much in common, else of 128.

    With fewer heads a group of 128 rows has many queries anyway. And with few queries larger groups
    would leave streaming multiprocessors idle.

    Args:
        num_heads: one of spool.HEADS.
    """
    queries = group_queries(num_heads, 4)
    ratio = RATIO.get(num_heads, 0.0)
    if ratio and -(-num_queries // queries) * DKV_SLICES >= num_sms:
        return Grouping(queries, 4, topk, ratio)
    return Grouping(group_queries(num_heads, 2), 2, topk)


@lru_cache
def plans_of(
    grouping: Grouping, num_heads: int, deterministic: bool = False
) -> tuple[ScoresPlan, list[DqPlan], list[DkvPlan]]:
    """Of P and dS, and of dQ and dKV by each grouping."""
    fewer = grouping.groupings[1].queries if grouping.ratio else 0
    row_blocks = [one.row_blocks for one in grouping.groupings]
    return (
        ScoresPlan(grouping.queries, num_heads < WARP_ROWS, fewer),
        [DqPlan(blocks) for blocks in row_blocks],
        [DkvPlan(blocks, ordered=deterministic) for blocks in row_blocks],
    )


def allocate(
    runner: Runner, grouping: Grouping, groups: int, deterministic: bool = False
) -> Workspace:
    """Room for so many groups at a time."""
    every = [
        allocate_lists(runner, groups * grouping.queries // one.queries, one.queries, one.capacity)
        for one in grouping.groupings
    ]
    order = [
        runner.empty(lists.counts.shape[0], DKV_SLICES * WORDS, dtype=torch.int32)
        for lists in every
        if deterministic
    ]
    spool = spool_bytes(groups, grouping.row_blocks, grouping.capacity)
    return Workspace(
        runner.empty(spool, dtype=torch.uint8),
        runner.empty(len(every) - 1, dtype=torch.int32),
        tuple(every),
        tuple(order),
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
        delta: (S, H) fp32 and dq, written.
        dkv: fp32, added to: (S_kv, d_qk); deterministic: (buffers, S_kv, d_qk).
    """
    deterministic = dkv.ndim > operands.kv.ndim
    num_queries, num_heads, _ = operands.q.shape
    at_a_time = min(grouping.groups_at_a_time, -(-num_queries // grouping.queries))
    of_scores, *of_products = plans_of(grouping, num_heads, deterministic)
    scores = runner.function(MLA_BWD_SCORES, of_scores)
    products = [
        (runner.function(MLA_BWD_DQ, dq_plan), runner.function(MLA_BWD_DKV, dkv_plan))
        for dq_plan, dkv_plan in zip(*of_products, strict=True)
    ]
    workspace = allocate(runner, grouping, at_a_time, deterministic)
    with runner.launching():
        for first in range(0, num_queries, at_a_time * grouping.queries):
            queries = slice(first, first + at_a_time * grouping.queries)
            part = part_of(operands, (delta, dq, dkv), queries, workspace, grouping)
            launch_scores(scores, part, workspace, grouping, sm_scale, runner.num_sms)
            for number, functions in enumerate(products):
                launch_products(functions, part, workspace, grouping, number, runner.num_sms)


def launch_chosen(
    runner: Runner,
    grouping: Grouping,
    sm_scale: float,
    operands: MlaBwdOperands,
    outputs: tuple[Tensor, Tensor, Tensor],
    lists: Lists,
    choice: Tensor,
) -> None:
    """The kernels with a spool, of delta and lists that are there, where `choice` takes them.

    Args:
        outputs: delta, dq and dkv, as for `launch`. lists: of all groups of the operands' queries.
    """
    num_heads = operands.q.shape[1]
    one = grouping._replace(ratio=0.0)
    groups = lists.counts.shape[0]
    list_bytes = sum(x.nbytes for x in lists)
    at_a_time = max(1, (MOST_WORKSPACE_BYTES - list_bytes) // one.group_bytes)
    scores_plan, (dq_plan,), (dkv_plan,) = plans_of(one, num_heads)
    scores = runner.function(MLA_BWD_SCORES, replace(scores_plan, optional=True))
    products = runner.function(MLA_BWD_DQ, dq_plan), runner.function(MLA_BWD_DKV, dkv_plan)
    size = spool_bytes(min(at_a_time, groups), one.row_blocks, one.capacity)
    spool = runner.empty(size, dtype=torch.uint8)
    with runner.launching():
        for first in range(0, groups, at_a_time):
            of_part = Lists(*(x[first : first + at_a_time] for x in lists))
            workspace = Workspace(spool, choice, (of_part,), ())
            queries = slice(first * one.queries, (first + at_a_time) * one.queries)
            part = part_of(operands, outputs, queries, workspace, one)
            q, kv, dO, lse, *_ = part.operands
            items = of_part.counts.shape[0] * one.row_blocks // ITEM_BLOCKS
            scalars = num_heads, sm_scale, min(items, runner.num_sms), choice
            scores(q, kv, dO, lse, part.delta, *of_part, spool, *scalars)
            launch_products(products, part, workspace, one, FIRST, runner.num_sms)


def part_of(
    operands: MlaBwdOperands,
    outputs: tuple[Tensor, Tensor, Tensor],
    queries: slice,
    workspace: Workspace,
    grouping: Grouping,
) -> Part:
    """Some of the queries; outputs: delta, dq and dkv of all."""
    q, kv, dO, lse, O, indices, lengths, _ = operands
    delta, dq, dkv = outputs
    assert lengths is not None
    rows = MlaBwdOperands(
        q[queries].flatten(0, 1),
        kv,
        dO[queries].flatten(0, 1),
        lse[queries].flatten(),
        O[queries].flatten(0, 1),
        indices[queries],
        lengths[queries],
    )
    count = rows.indices.shape[0]
    lists = tuple(
        of_one.of(-(-count // one.queries))
        for of_one, one in zip(workspace.lists, grouping.groupings, strict=True)
    )
    of_part = delta[queries].flatten(), dq[queries].flatten(0, 1), dkv
    return Part(rows, *of_part, lists, queries.start)


def launch_scores(
    function: Any,
    part: Part,
    workspace: Workspace,
    grouping: Grouping,
    sm_scale: float,
    num_sms: int,
) -> None:
    """delta, the lists, the choice, and P and dS of the grouping that is taken."""
    first, *second = part.lists
    items = first.counts.shape[0] * grouping.row_blocks // ITEM_BLOCKS
    of_second = (*second[0], workspace.choice, grouping.ratio) if second else ()
    q, kv, dO, lse, O, indices, lengths, _ = part.operands
    operands = q, kv, dO, lse, O, indices, lengths
    scalars = part.heads, sm_scale, min(items, num_sms)
    function(*operands, part.delta, *first, workspace.spool, *scalars, *of_second)


def launch_products(
    functions: tuple[Any, Any],
    part: Part,
    workspace: Workspace,
    grouping: Grouping,
    number: int,
    num_sms: int,
) -> None:
    """dQ and dKV by the grouping of that number; nothing where it is not taken.

    Args:
        functions: dQ's and dKV's.
    """
    compute_dq, compute_dkv = functions
    q, kv, dO, *_ = part.operands
    rows, _, counts, present, _ = part.lists[number]
    groups = counts.shape[0]
    taken = 0, groups, workspace.choice, number
    num_ctas = min(groups * dq_slices(grouping.groupings[number].row_blocks), num_sms)
    compute_dq(workspace.spool, rows, counts, kv, part.dq, *taken, num_ctas)
    num_ctas = min(groups * DKV_SLICES, num_sms)
    of_rows = counts, present, q, dO, part.dkv, part.heads
    in_order: tuple[Any, ...] = ()
    if workspace.order:
        words = workspace.order[number].zero_()
        in_order = words, part.first // grouping.groupings[number].queries
    compute_dkv(workspace.spool, rows, *of_rows, *taken, num_ctas, *in_order)
