"""Launches of Hopper's grouped backward: 256 rows over one list, P and dS in a workspace."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.mla_bwd_choice import LargeGroups, Part, large_plans
from flashdsa.backends.sm90.mla_bwd_memory import Lists, lists_allocator, lists_bytes
from flashdsa.backends.sm90.mla_bwd_per_item import Inputs, Launch, LaunchPerItem, Outputs
from flashdsa.backends.sparse_mla_launches import counters_of
from flashdsa.kernels.attention.lists import SAMPLED_WORDS
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.plan import ITEM_BLOCKS
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import ROW_BLOCKS, block_bytes
from flashdsa.kernels.catalog import MLA_BWD_DKV, MLA_BWD_DQ, MLA_BWD_SCORES

MOST_WORKSPACE_BYTES = 1 << 30
"""Most bytes of the workspace and the lists of one launch; queries that need more are launched
in parts."""
FIRST = 0
"""Number of the large groups, see `kernels.attention.choice`."""

LaunchLarge = Callable[[Inputs, Outputs, Lists, Tensor], None]
"""(inputs, outputs, lists of all groups, choice (1,) int32)"""


def bind_choice(
    runner: Runner, part: Part, large: LargeGroups, sm_scale: float, launch_small: LaunchPerItem
) -> Launch:
    """Bind large groups where they have much in common, as the device finds, else
    `launch_small`."""
    num_groups = -(-len(part.queries) // large.queries)
    limits = large.ratio, large.most_keys
    launch_large = bind_large(runner, large, (part.kernel_heads, sm_scale), num_groups)
    allocate_lists = lists_allocator(runner, num_groups, large.queries, large.capacity)
    allocate_choice = runner.allocator(1, dtype=torch.int32)
    allocate_sampled = runner.allocator(SAMPLED_WORDS, dtype=torch.int32)
    give_counters = counters_of(runner)

    def launch(inputs: Inputs, outputs: Outputs) -> None:
        lists, choice, sampled = allocate_lists(), allocate_choice(), allocate_sampled()
        launch_small(
            inputs, outputs, (*lists, choice, *limits, sampled, *give_counters(), large.queries)
        )
        launch_large(inputs, outputs, lists, choice)

    return launch


def bind_large(
    runner: Runner, large: LargeGroups, of_rows: tuple[int, float], num_groups: int
) -> LaunchLarge:
    """Bind a launch of dQ and dKV from existing delta and lists, if `choice` takes the large
    groups. `of_rows`: heads of a query, and sm_scale. `num_groups`: of all lists."""
    scores, dq, dkv = large_plans(large.tile)
    compute_scores = runner.function(MLA_BWD_SCORES, scores)
    compute_dq = runner.function(MLA_BWD_DQ, dq)
    compute_dkv = runner.function(MLA_BWD_DKV, dkv)
    num_sms, queries = runner.num_sms, large.queries
    group_bytes = block_bytes(large.tile, large.most_keys)
    room = MOST_WORKSPACE_BYTES - lists_bytes(num_groups, queries, large.capacity)
    at_a_time = max(1, room // (ROW_BLOCKS * group_bytes))
    if at_a_time > num_sms:
        # A multiple of num_sms groups is whole waves of all three kernels.
        at_a_time -= at_a_time % num_sms
    at_a_time = min(num_groups, at_a_time)
    allocate = runner.allocator(at_a_time * ROW_BLOCKS, group_bytes, dtype=torch.uint8)
    firsts = range(0, num_groups, at_a_time)

    def launch(inputs: Inputs, outputs: Outputs, lists: Lists, choice: Tensor) -> None:
        workspace = allocate()
        for first in firsts:
            groups = min(at_a_time, num_groups - first)
            part, to, of_part = inputs, outputs, lists
            if groups < num_groups:
                part, to, of_part = part_of(inputs, outputs, lists, (first, groups), queries)
            q, kv, dO, lse, _, indices, lengths = part
            delta, dq_part, dkv_sum = to
            rows, _, counts, present, _ = of_part
            num_ctas = min(groups * ROW_BLOCKS // ITEM_BLOCKS, num_sms)
            scalars = queries, *of_rows, num_ctas, choice
            compute_scores(q, kv, dO, lse, delta, *of_part, workspace, *scalars)
            taken = 0, groups, choice, FIRST
            of_queries = q, kv, dO, lse, indices, lengths, delta, dq_part, *of_rows
            num_ctas = min(groups * dq.slices, num_sms)
            compute_dq(workspace, rows, counts, *of_queries, *taken, num_ctas)
            of_sums = counts, present, q, dO, dkv_sum, of_rows[0]
            num_ctas = min(groups * dkv.slices, num_sms)
            compute_dkv(workspace, rows, *of_sums, *taken, num_ctas)

    return launch


def part_of(
    inputs: Inputs, outputs: Outputs, lists: Lists, groups: tuple[int, int], queries: int
) -> tuple[Inputs, Outputs, Lists]:
    """Those of some groups, of `queries` queries each. `groups`: number of the first one, and how
    many."""
    q, kv, dO, lse, O, indices, lengths = inputs
    delta, dq, dkv = outputs
    first, count = groups
    some = slice(first * queries, (first + count) * queries)
    of_lists = indices[some], lengths[some]
    part = q[some], kv, dO[some], lse[some], O, *of_lists
    of_groups = Lists(*(x[first : first + count] for x in lists))
    return part, (delta[some], dq[some], dkv), of_groups
