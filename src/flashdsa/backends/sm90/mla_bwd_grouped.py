"""Launches of Hopper's grouped backward: 256 rows over one list, P and dS in a workspace."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.mla_bwd_lists import Lists, capacity_of
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import WORDS, DkvPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.dq.plan import DqPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.plan import ITEM_BLOCKS, ScoresPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import (
    ROW_BLOCKS,
    block_bytes,
    group_queries,
)
from flashdsa.kernels.attention.sm90.core.tile import Tile
from flashdsa.kernels.catalog import MLA_BWD_DKV, MLA_BWD_DQ, MLA_BWD_SCORES

if TYPE_CHECKING:
    from flashdsa.ops.attention_backward import MlaBwdOperands

MOST_WORKSPACE_BYTES = 1 << 30
"""Most bytes of the workspace and the lists of one launch; queries that need more are launched
in parts."""

MOST_BUFFERS = 3
MOST_BUFFER_BYTES = 1 << 30
"""Most bytes of the deterministic backward's dKVs, each of S_kv rows in fp32; one exists in any
case."""

RATIO = {128: 1.16, 64: 1.16}
"""Longest list of a group of 256 rows, as a multiple of a query's list, on average, by heads. The
backward of 64 rows is faster with longer lists; with fewer heads it always is."""
ORDERED_RATIO = 1.25
"""The same ratio if additions are in order: the backward of 64 rows then loses more."""
MOST_LENGTH = 1.5
"""The same of a single list. The workspace has room for that much; if one list is longer the
backward of 64 rows is taken."""
MOST_RANGE_KEYS = 6144
"""The same in keys, where ranges give the slots: they may be as many as a source's rows, and are
hardly ever."""
FIRST = 0
"""Number of the large groups, see `kernels.attention.choice`."""


class Grouping(NamedTuple):
    """Sharing of lists by queries.

    Attributes:
        queries: neighbouring ones of a group. topk: slots of a query.
        ratio, most_length: longest lists on average, and longest single list, in slots of a query,
            with which they are taken; see `kernels.attention.choice`.
        tile: of keys.
    """

    queries: int
    topk: int
    ratio: float
    most_length: float
    tile: Tile

    @property
    def capacity(self) -> int:
        """Capacity of a group's list: room for all its slots."""
        return capacity_of(self.queries, self.topk)

    @property
    def most_keys(self) -> int:
        """Most keys of a list that the workspace has room for; groups with longer ones are not
        taken."""
        return min(self.capacity, capacity_of(1, math.ceil(self.most_length * self.topk)))

    @property
    def limits(self) -> tuple[float, int]:
        """See `kernels.attention.choice.launch_choice`."""
        return self.ratio, self.most_keys

    @property
    def bytes_of_group(self) -> int:
        """Bytes of a group in the workspace."""
        return ROW_BLOCKS * block_bytes(self.tile, self.most_keys)


class Part(NamedTuple):
    """Some of the groups, their heads' rows one after another.

    Attributes:
        operands: q (S * H, d_qk), dO (S * H, d_v), lse (S * H,).
        delta: (S * H,). dq: (S * H, d_qk), written. dkv: all of it, added to.
        lists: of the groups. first: number of the first one. heads: of a query.
    """

    operands: MlaBwdOperands
    delta: Tensor
    dq: Tensor
    dkv: Tensor
    lists: Lists
    first: int
    heads: int


def grouping_for(
    num_queries: int,
    num_heads: int,
    topk: int,
    num_sms: int,
    *,
    deterministic: bool,
    tile: Tile,
    ranges: bool = False,
) -> Grouping | None:
    """Choose groups of 256 rows; None if they never pay.

    A group of 64 rows has many queries anyway if heads are few. Large groups would leave streaming
    multiprocessors idle if queries are few.

    Args:
        num_heads: one of HEADS. ranges: slots are of ranges, `topk` at most.
    """
    queries = group_queries(num_heads)
    if (
        num_heads not in RATIO
        or -(-num_queries // queries) * plans_of(queries, deterministic, tile)[2].slices < num_sms
    ):
        return None
    ratio = max(ORDERED_RATIO, RATIO[num_heads]) if deterministic else RATIO[num_heads]
    most_length = min(MOST_LENGTH, MOST_RANGE_KEYS / topk) if ranges else MOST_LENGTH
    return Grouping(queries, topk, ratio, most_length, tile)


def buffers_for(num_keys: int, d_qk: int) -> int:
    """dKVs that the deterministic backward adds to: that many groups may go over the same keys at a
    time. The bits depend on it, so it depends on the size of kv alone."""
    return max(1, min(MOST_BUFFERS, MOST_BUFFER_BYTES // (4 * d_qk * max(1, num_keys))))


@lru_cache
def plans_of(queries: int, deterministic: bool, tile: Tile) -> tuple[ScoresPlan, DqPlan, DkvPlan]:
    """Plans of groups of `queries` queries: P and dS, dQ, dKV. A plan checks itself when it is
    made, which takes longer than a launch."""
    scores = ScoresPlan(queries, optional=True, tile=tile)
    return scores, DqPlan(tile), DkvPlan(tile, ordered=deterministic)


def bind_large(
    runner: Runner, grouping: Grouping, *, deterministic: bool
) -> Callable[[MlaBwdOperands, tuple[Tensor, Tensor, Tensor], float, Lists, Tensor], None]:
    """Bind a launch of dQ and dKV from existing delta and lists, if `choice` takes the large
    groups.

    Its arguments:
        operands: without gaps; lse has the sinks.
        outputs: delta (S, H), dq, written, and dkv fp32, added to: (S_kv, d_qk); deterministic:
            (buffers, S_kv, d_qk).
        sm_scale. lists: of all groups of the operands' queries. choice: (1,) int32.
    """
    scores, dq, dkv = plans_of(grouping.queries, deterministic, grouping.tile)
    functions = (
        runner.function(MLA_BWD_SCORES, scores),
        runner.function(MLA_BWD_DQ, dq),
        runner.function(MLA_BWD_DKV, dkv),
    )
    slices = dq.slices, dkv.slices
    num_sms, bytes_of_group = runner.num_sms, grouping.bytes_of_group
    group_bytes = block_bytes(grouping.tile, grouping.most_keys)

    def launch(
        operands: MlaBwdOperands,
        outputs: tuple[Tensor, Tensor, Tensor],
        sm_scale: float,
        lists: Lists,
        choice: Tensor,
    ) -> None:
        groups = lists.counts.shape[0]
        room = MOST_WORKSPACE_BYTES - sum(x.nbytes for x in lists)
        at_a_time = max(1, room // bytes_of_group)
        if at_a_time > num_sms:
            # A multiple of num_sms groups is whole waves of all three kernels.
            at_a_time -= at_a_time % num_sms
        at_a_time = min(groups, at_a_time)
        workspace = runner.empty(at_a_time * ROW_BLOCKS, group_bytes, dtype=torch.uint8)
        words = None
        if deterministic:
            words = runner.empty(at_a_time, dkv.slices * WORDS, dtype=torch.int32)
        for first in range(0, groups, at_a_time):
            part = part_of(operands, outputs, grouping, lists, slice(first, first + at_a_time))
            scratch = workspace, choice, words
            launch_part(functions, slices, part, scratch, sm_scale, num_sms)

    return launch


def part_of(
    operands: MlaBwdOperands,
    outputs: tuple[Tensor, Tensor, Tensor],
    grouping: Grouping,
    lists: Lists,
    groups: slice,
) -> Part:
    """The groups of that number; arguments as for `bind_large`'s."""
    q, kv, dO, lse, O, indices, lengths = operands[:7]
    delta, dq, dkv = outputs
    if groups.start or groups.stop < lists.counts.shape[0]:
        queries = slice(groups.start * grouping.queries, groups.stop * grouping.queries)
        q, dO, lse, delta, dq = (x[queries] for x in (q, dO, lse, delta, dq))
        assert lengths is not None
        indices, lengths = indices[queries], lengths[queries]
        lists = Lists(*(x[groups] for x in lists))
    flat_q, flat_dO, flat_dq = (x.flatten(0, 1) for x in (q, dO, dq))
    rows = type(operands)(flat_q, kv, flat_dO, lse.flatten(), O, indices, lengths)
    return Part(rows, delta.flatten(), flat_dq, dkv, lists, groups.start, q.shape[1])


def launch_part(
    functions: tuple[Any, Any, Any],
    slices: tuple[int, int],
    part: Part,
    scratch: tuple[Tensor, Tensor, Tensor | None],
    sm_scale: float,
    num_sms: int,
) -> None:
    """Launch P and dS, dQ and dKV of a part.

    Args:
        functions: of these three. slices: of a group's dQ and dKV. scratch: the workspace, the
            choice, and of the deterministic backward (groups, words) int32: see
            `kernels.attention.sm90.bwd_grouped.dkv.add`.
    """
    compute_scores, compute_dq, compute_dkv = functions
    workspace, choice, words = scratch
    q, kv, dO, lse, _, indices, lengths = part.operands[:7]
    rows, _, counts, present, _ = part.lists
    groups = counts.shape[0]
    scalars = part.heads, sm_scale, min(groups * ROW_BLOCKS // ITEM_BLOCKS, num_sms), choice
    compute_scores(q, kv, dO, lse, part.delta, *part.lists, workspace, *scalars)
    taken = 0, groups, choice, FIRST
    dq_slices, dkv_slices = slices
    num_ctas = min(groups * dq_slices, num_sms)
    of_queries = q, kv, dO, lse, indices, lengths, part.delta, part.dq, part.heads, sm_scale
    compute_dq(workspace, rows, counts, *of_queries, *taken, num_ctas)
    num_ctas = min(groups * dkv_slices, num_sms)
    in_order = () if words is None else (words[:groups].zero_(), part.first)
    of_rows = counts, present, q, dO, part.dkv, part.heads
    compute_dkv(workspace, rows, *of_rows, *taken, num_ctas, *in_order)
