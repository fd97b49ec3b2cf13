"""Launches of the fused Hopper backward whose dKV has an order: slots in place of additions."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.mla_bwd_fused import Large, Outputs
from flashdsa.backends.sm90.mla_bwd_lists import allocate_lists, capacity_of
from flashdsa.kernels.catalog import MLA_BWD_FUSED
from flashdsa.kernels.sparse_mla.sm90.bwd.fused.plan import FusedPlan
from flashdsa.kernels.sparse_mla.sm90.bwd.slots.plan import (
    CURSORS,
    KEY_WORDS,
    MOST_PART_GROUPS,
    PAIR,
    ROW_WORDS,
    WORD_BITS,
)
from flashdsa.kernels.sparse_mla.sm90.bwd.spool import BLOCK_ROWS
from flashdsa.operands import MlaBwdOperands

MOST_SLOT_BYTES = 1 << 31
"""Of the rows of a part of the groups; more only where a single group needs more."""
WAVE = 132
"""Row blocks that a part has a multiple of, where so many have room: an H100's and an H200's SMs.
It does not depend on the device, and so the bits do not."""


FAR_ROWS = 65_536
"""Of dKV, beyond which additions to rows that no one else adds to at the time take longest."""


class Sizes(NamedTuple):
    """Of the workspace of a call.

    Attributes:
        room: keys of a part's lists. unit_groups: groups that are taken together.
        parts: of the groups, at most. words: of 32 groups, for the groups of a part.
    """

    room: int
    unit_groups: int
    parts: int
    words: int


def is_far(num_heads: int, num_keys: int) -> bool:
    """Whether slots are faster than additions to so many rows of dKV."""
    return num_heads >= BLOCK_ROWS and num_keys > FAR_ROWS


@lru_cache
def sizes_of(groups: int, capacity: int, blocks: int) -> Sizes:
    """For so many groups, whose lists have room for `capacity` keys.

    Args:
        blocks: row blocks of a group, each of which has a row for each key.
    """
    of_key = blocks * ROW_WORDS * 4
    room = max(capacity, min(MOST_SLOT_BYTES // of_key, groups * capacity))
    # What a group counts for, at most: see `places.split_kernel`.
    most = max(capacity, -(-room // MOST_PART_GROUPS))
    unit_groups = max(1, min(WAVE // blocks, room // most))
    parts = 1
    if groups * most > room:
        closed = groups * most // (room - unit_groups * most + 1)
        parts = min(-(-groups // unit_groups), closed + 1)
    words = -(-min(groups, MOST_PART_GROUPS) // WORD_BITS)
    return Sizes(room, unit_groups, parts, words)


@lru_cache
def plan_of(num_heads: int, more: int) -> FusedPlan:
    """Of groups of 64 rows, or of a query of 128 heads."""
    return FusedPlan(max(1, BLOCK_ROWS // num_heads), more, slots=True)


def launch_slots(
    runner: Runner,
    operands: MlaBwdOperands,
    outputs: Outputs,
    sm_scale: float,
    large: Large | None = None,
) -> None:
    """delta, lists, dQ and dKV of all queries; of `large`, delta, its lists and the choice.

    Args:
        operands: without gaps; topk_length (0,) says that every slot counts, lse has the sinks.
        outputs: of several dKVs the first one is added to.
    """
    q, kv, dO, lse, O, indices, lengths, _ = operands
    delta, dq, dkv = outputs
    num_queries, num_heads, _ = q.shape
    plan = plan_of(num_heads, 0 if large is None else large.groups.queries)
    function = runner.function(MLA_BWD_FUSED, plan)
    capacity = capacity_of(plan.queries, indices.shape[1])
    groups = -(-num_queries // plan.queries)
    lists = allocate_lists(runner, groups, plan.queries, capacity)
    items = -(-num_queries * num_heads // BLOCK_ROWS)
    blocks = max(1, num_heads // BLOCK_ROWS)
    sizes = sizes_of(groups, capacity, blocks)
    copy = runner.empty(*kv.shape, dtype=kv.dtype)
    flat = [q.flatten(0, 1), kv, copy, dO.flatten(0, 1), lse.flatten(), O.flatten(0, 1)]
    first = dkv[0] if dkv.ndim > kv.ndim else dkv
    written = delta.flatten(), *lists, dq.flatten(0, 1), first
    scalars = num_heads, sm_scale, min(items, runner.num_sms), runner.num_sms
    slots = allocate_slots(runner, sizes, kv, lists.rows, blocks)
    choice = () if large is None else (*large.lists, large.choice, *large.groups.limits)
    with runner.launching():
        function(*flat, indices, lengths, *written, *scalars, *slots, sizes.unit_groups, *choice)


def allocate_slots(
    runner: Runner, sizes: Sizes, kv: Tensor, rows: Tensor, blocks: int
) -> tuple[Tensor, ...]:
    """The slots and what `Places` names."""
    num_keys = kv.shape[0]
    count = num_keys * sizes.words * PAIR
    zeros = torch.zeros(count + CURSORS * sizes.parts, dtype=torch.int32, device=kv.device)
    return (
        runner.empty(sizes.room * blocks, ROW_WORDS, dtype=torch.int32),
        zeros[:count].view(num_keys, sizes.words, PAIR),
        zeros[count:].view(sizes.parts, CURSORS),
        runner.empty(sizes.parts + 1, dtype=torch.int32),
        runner.empty(num_keys, KEY_WORDS, dtype=torch.int32),
        runner.empty(rows.shape[0], dtype=torch.int32),
        runner.empty(sizes.room, dtype=torch.int32),
        runner.empty(*rows.shape, dtype=torch.int32),
    )
