"""Launches of Hopper's grouped backward: 256 rows over one list, P and dS in a workspace."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.mla_bwd_lists import WAVE, Lists, capacity_of, lists_bytes
from flashdsa.backends.sm90.mla_bwd_per_item import Inputs, LaunchLarge, Outputs
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

MOST_WORKSPACE_BYTES = 1 << 30
"""Most bytes of the workspace and the lists of one launch; queries that need more are launched
in parts."""

USUAL_BUFFERS, MOST_BUFFERS = 3, 16
"""dKVs of the deterministic backward's chains where lists are long, and most of them."""
HAND_OVER_US, TILE_US, GROUP_US, BYTES_A_US = 4.6, 3.1, 5.0, 3.3e6
"""Measured on an H200: from a group of a chain to the next one; a slice of a group, for each of its
tiles and besides; memory's rate. They reproduce `deterministic=True` over the default's time of 128
heads: topk 256 1.93, 512 1.43, 1,024 1.07."""
MOST_OF_WORK, SHORT_US = 2.5, 50.0
"""Time of the chains and their dKVs, as a multiple of the groups' products and besides, above which
slots replace them. A call by chains, by slots and without order: 9,606, 4,250 and 2,525 us with
996,905 rows and lists of 256; 617, 401 and 273 with 37,782 and 64; 638, 584 and 475 with 55,963
and 256; 2,482, 2,330 and 1,497 with 356,615 and 2,048."""
MOST_BUFFER_BYTES = 1 << 30
"""Most bytes of the deterministic backward's dKVs, each of S_kv rows in fp32; one exists in any
case, the others are touched only where the large groups are taken."""

RATIO = {128: 1.16, 64: 1.16}
"""Longest list of a group of 256 rows, as a multiple of a query's list, in whole tiles, on average,
by heads. The backward of 64 rows is faster with longer lists; with fewer heads it always is."""
ORDERED_RATIO = 1.25
"""The same ratio if additions are in order: the backward of 64 rows then loses more."""
FEW_NAMED = 1
"""Slots of all queries for each row of kv up to which any groups whose lists have room are taken:
the backward of 64 rows copies kv first, of which few rows are named then. Ten calls with 0.1 to 1.0
slots a row took 0.67 to 1.01 of its time, five of short lists with 1.1 to 1.8 0.70 to 1.01 (one
H200), three of full lists with 1.5 to 2.0 1.18 to 1.28 (one H100)."""
LEAST_ROUNDS = 6
"""Items of dKV for each streaming multiprocessor from which on large groups pay in other calls: 3.8
rounds and fewer took 1.26 to 1.51 of the time of 64 rows, 7 the same, 20 and more 0.89 to 0.94 (one
H200, one H100). Calls that cannot take them need no lists of them either: 1.05 to 1.2."""
ORDERED_ROUNDS = 45
"""The same if additions are in order. Of 33 drawn calls slots took 0.78 to 1.05 of the chains' time
up to 44 rounds, 0.97 to 1.40 beyond (one H100)."""
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


def grouping_for(
    num_queries: int,
    num_heads: int,
    topk: int,
    num_sms: int,
    *,
    num_keys: int,
    deterministic: bool,
    tile: Tile,
    ranges: bool = False,
) -> Grouping | None:
    """Choose groups of 256 rows; None if they never pay.

    A group of 64 rows has many queries anyway if heads are few. Large groups take long to begin and
    to end if queries are few; in order chains must pay, too.

    Args:
        num_heads: one of HEADS. ranges: slots are of ranges, `topk` at most.
    """
    if num_heads not in RATIO:
        return None
    queries = group_queries(num_heads)
    num_groups = -(-num_queries // queries)
    is_few_named = not deterministic and num_queries * topk <= FEW_NAMED * num_keys
    least_rounds = ORDERED_ROUNDS if deterministic else 1 if is_few_named else LEAST_ROUNDS
    num_items = num_groups * plans_of(queries, deterministic, tile)[2].slices
    if num_items < least_rounds * num_sms:
        return None
    if deterministic and not chains_pay(num_keys, tile.d_qk, num_groups, topk):
        return None
    ratio = RATIO[num_heads]
    if deterministic:
        ratio = max(ORDERED_RATIO, ratio)
    elif is_few_named:
        ratio = float(queries)  # which no list exceeds
    most_length = min(MOST_LENGTH, MOST_RANGE_KEYS / topk) if ranges else MOST_LENGTH
    return Grouping(queries, topk, ratio, most_length, tile)


def buffers_for(num_keys: int, d_qk: int, num_groups: int, topk: int) -> int:
    """dKVs that the deterministic backward adds to, a chain of groups each.

    Groups of a chain follow each other, so short lists need more chains; a pass zeroes each dKV and
    one adds it up. The bits depend on the number, so it depends on the call's sizes alone.
    """
    row_bytes = 4 * d_qk * max(1, num_keys)
    most = max(1, min(MOST_BUFFERS, MOST_BUFFER_BYTES // row_bytes))
    time_of = partial(time_of_chains, num_keys, d_qk, num_groups, topk)
    return min(range(min(USUAL_BUFFERS, most), most + 1), key=time_of)


def time_of_chains(num_keys: int, d_qk: int, num_groups: int, topk: int, buffers: int) -> float:
    """Microseconds of dKV by so many chains, and of the dKVs of their own."""
    chain = num_groups / buffers * HAND_OVER_US
    passes = buffers * 2 * 4 * d_qk * max(1, num_keys) / BYTES_A_US
    return max(time_of_products(num_groups, topk), chain) + passes


def time_of_products(num_groups: int, topk: int) -> float:
    """Microseconds of dKV of groups whose additions have no order."""
    tiles = -(-topk // Tile().keys)
    return num_groups * DkvPlan.slices / WAVE * (TILE_US * tiles + GROUP_US)


def chains_pay(num_keys: int, d_qk: int, num_groups: int, topk: int) -> bool:
    """Whether chains take less time than slots: kv with many rows has few of them, in which groups
    of short lists wait for each other."""
    sizes = num_keys, d_qk, num_groups, topk
    most = MOST_OF_WORK * time_of_products(num_groups, topk) + SHORT_US
    return time_of_chains(*sizes, buffers_for(*sizes)) <= most


@lru_cache
def plans_of(queries: int, deterministic: bool, tile: Tile) -> tuple[ScoresPlan, DqPlan, DkvPlan]:
    """Plans of groups of `queries` queries: P and dS, dQ, dKV. A plan checks itself when it is
    made, which takes longer than a launch."""
    scores = ScoresPlan(queries, optional=True, tile=tile)
    return scores, DqPlan(tile), DkvPlan(tile, ordered=deterministic)


def bind_large(
    runner: Runner,
    grouping: Grouping,
    of_rows: tuple[int, float],
    num_keys: int,
    num_groups: int,
    *,
    deterministic: bool,
) -> LaunchLarge:
    """Bind a launch of dQ and dKV from existing delta and lists, if `choice` takes the large
    groups.

    Args:
        of_rows: heads of a query, and sm_scale. num_groups: of all lists.
    """
    scores, dq, dkv = plans_of(grouping.queries, deterministic, grouping.tile)
    compute_scores = runner.function(MLA_BWD_SCORES, scores)
    compute_dq = runner.function(MLA_BWD_DQ, dq)
    compute_dkv = runner.function(MLA_BWD_DKV, dkv)
    num_sms, queries = runner.num_sms, grouping.queries
    room = MOST_WORKSPACE_BYTES - lists_bytes(num_groups, queries, grouping.capacity)
    at_a_time = max(1, room // grouping.bytes_of_group)
    if at_a_time > num_sms:
        # A multiple of num_sms groups is whole waves of all three kernels.
        at_a_time -= at_a_time % num_sms
    at_a_time = min(num_groups, at_a_time)
    group_bytes = block_bytes(grouping.tile, grouping.most_keys)
    allocate = runner.allocator(at_a_time * ROW_BLOCKS, group_bytes, dtype=torch.uint8)
    words_of = runner.allocator(at_a_time, dkv.slices * WORDS, dtype=torch.int32)
    more = buffers_for(num_keys, grouping.tile.d_qk, num_groups, grouping.topk) - 1
    more_of = runner.allocator(more, num_keys, grouping.tile.d_qk, dtype=torch.float32)
    firsts = range(0, num_groups, at_a_time)

    def launch(inputs: Inputs, outputs: Outputs, lists: Lists, choice: Tensor) -> None:
        workspace = allocate()
        words, further = (words_of(), more_of()) if deterministic else (None, None)
        for first in firsts:
            groups = min(at_a_time, num_groups - first)
            part, to, of_part = inputs, outputs, lists
            if groups < num_groups:
                part, to, of_part = part_of(inputs, outputs, lists, (first, groups), queries)
            q, kv, dO, lse, _, indices, lengths = part
            delta, dq_part, dkv_sum = to
            rows, _, counts, present, _ = of_part
            num_ctas = min(groups * ROW_BLOCKS // ITEM_BLOCKS, num_sms)
            scalars = *of_rows, num_ctas, choice
            compute_scores(q, kv, dO, lse, delta, *of_part, workspace, *scalars)
            taken = 0, groups, choice, FIRST
            of_queries = q, kv, dO, lse, indices, lengths, delta, dq_part, *of_rows
            num_ctas = min(groups * dq.slices, num_sms)
            compute_dq(workspace, rows, counts, *of_queries, *taken, num_ctas)
            in_order: tuple[Any, ...] = ()
            if words is not None:
                is_last = int(first + groups == num_groups)
                in_order = words[:groups].zero_(), first, further, is_last
            of_sums = counts, present, q, dO, dkv_sum, of_rows[0]
            num_ctas = min(groups * dkv.slices, num_sms)
            compute_dkv(workspace, rows, *of_sums, *taken, num_ctas, *in_order)

    return launch


def part_of(
    inputs: Inputs, outputs: Outputs, lists: Lists, groups: tuple[int, int], queries: int
) -> tuple[Inputs, Outputs, Lists]:
    """Those of some groups, of `queries` queries each.

    Args:
        groups: number of the first one, and how many.
    """
    q, kv, dO, lse, O, indices, lengths = inputs
    delta, dq, dkv = outputs
    first, count = groups
    some = slice(first * queries, (first + count) * queries)
    of_lists = indices[some], lengths[some]
    part = q[some], kv, dO[some], lse[some], O, *of_lists
    of_groups = Lists(*(x[first : first + count] for x in lists))
    return part, (delta[some], dq[some], dkv), of_groups
