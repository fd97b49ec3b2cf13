"""Choice of the launches of Hopper's backward of sparse MLA, as data.

A call is launched in parts: queries whose lists are joined together, then heads that a kernel
takes, then queries whose lists have room. Each part sums dKV by additions, by slots (in order), or
by what the device finds to be faster; and the device may take groups of 256 rows of Q instead of
64, where neighbouring queries name mostly the same keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from flashdsa.backends.reasons import Candidate, Choice
from flashdsa.heuristics.h200 import Backward
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import DkvPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.dq.plan import DqPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.plan import ScoresPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import group_queries
from flashdsa.kernels.attention.sm90.bwd_per_item import plan
from flashdsa.kernels.attention.sm90.core.tile import ROWS, Tile

WAVE = 132
"""SMs of an H100 and of an H200. Parts of a call have a multiple of it in row blocks or queries,
where these have room. It does not depend on the device, and so the bits in order do not."""
MOST_JOINT_BYTES, JOINT_SLOT_BYTES = 1 << 30, 13
"""Most bytes of joint lists; of a slot: its id, its row and members in a list, and the row of its
gradient in order. Queries that need more are joined in parts."""
MOST_LIST_BYTES, LIST_SLOT_BYTES = 1 << 28, 10
"""Most bytes of the lists of groups of 64 and of 256 rows; of a slot, which both have with a row
and its members. Queries that need more are launched in parts."""


class Call(NamedTuple):
    """Sizes and options of a call, on which the choice depends.

    Attributes:
        topk: slots of a query, of both sources. num_keys: rows of both sources.
        has_lengths: queries may have fewer slots. joined: lists are joined first, see
            `mla_bwd_joined.py`. ranges: some slots are of ranges, `topk` at most.
    """

    num_queries: int
    num_heads: int
    num_keys: int
    topk: int
    num_sms: int
    tile: Tile = Tile()
    deterministic: bool = False
    has_lengths: bool = False
    joined: bool = False
    ranges: bool = False


class LargeGroups(NamedTuple):
    """Groups of 256 rows, which the device takes if their lists are short.

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

    def __str__(self) -> str:
        return f"groups of {self.queries} ({self.ratio}, {self.most_keys} keys)"

    @property
    def rule(self) -> str:
        """The condition under which the device takes them, for people."""
        return (
            f"groups of {self.queries} queries if the device finds that they share keys: lists at "
            f"most {self.ratio:g} times as long as one query's in the mean, none above "
            f"{self.most_keys} keys"
        )

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
    def queries_at_a_time(self) -> int:
        """Queries whose lists have room."""
        groups = MOST_LIST_BYTES // (LIST_SLOT_BYTES * self.capacity)
        return max(1, groups) * self.queries


class Dkv(Enum):
    """Ways to sum dKV where a part takes no large groups."""

    ADDED = "additions"
    SLOTS = "slots"
    EITHER = "additions or slots"


class Part(NamedTuple):
    """Launches of some queries and heads of a call.

    Attributes:
        joint: queries whose lists are joined together, if they are.
        kernel_heads: heads of the kernels, one of HEADS: those that the part lacks are padding.
        large: groups that the device may take instead; None: it does not choose.
        is_first: nothing has been added to dKV.
        tickets: CTAs draw their items, see `bwd_per_item/tickets.py`.
    """

    call: Call
    joint: range
    queries: range
    heads: range
    kernel_heads: int
    large: LargeGroups | None = None
    is_first: bool = False
    tickets: bool = False
    dkv: Dkv = Dkv.SLOTS

    @property
    def group_queries(self) -> int:
        """Queries of a group: of 64 rows, or of a query of 128 heads."""
        return max(1, ROWS // self.kernel_heads)

    @property
    def num_groups(self) -> int:
        """Groups of `group_queries` queries."""
        return -(-len(self.queries) // self.group_queries)

    @property
    def group_blocks(self) -> int:
        """Row blocks of a group."""
        return max(1, self.kernel_heads // ROWS)

    @property
    def capacity(self) -> int:
        """Capacity of a group's list."""
        return capacity_of(self.group_queries, self.call.topk)

    @property
    def row_blocks(self) -> int:
        """Items: blocks of 64 rows of Q."""
        return -(-len(self.queries) * self.kernel_heads // ROWS)

    @property
    def num_ctas(self) -> int:
        """CTAs: at most one an item."""
        return min(self.row_blocks, self.call.num_sms)

    @property
    def is_far(self) -> bool:
        """Whether dKV has many more rows than the second-level cache."""
        return self.call.num_keys > Backward.PACED_ROWS[self.kernel_heads]

    @property
    def spread(self) -> int:
        """Tiles from the first tile of a CTA to the next CTA's."""
        return Backward.SPREAD if self.call.num_keys <= Backward.NEAR_ROWS else 0

    @property
    def plans(self) -> tuple[plan.PerItemPlan, ...]:
        """Plans of the kernels of 64 rows: the first one makes lists and choices, the second one is
        launched after it where the device may choose slots."""
        of_kernel = self.group_queries, self.call.tile
        first = per_item_plan(*of_kernel, slots=self.dkv is Dkv.SLOTS, tickets=self.tickets)
        if self.dkv is not Dkv.EITHER:
            return (first,)
        return first, per_item_plan(*of_kernel, slots=True)

    @property
    def kernels(self) -> str:
        """Names of the launches; the device takes one side of an "or"."""
        small = " or ".join(plan.name for plan in self.plans)
        if self.large is None:
            return small
        return " + ".join(one.name for one in large_plans(self.large.tile)) + f", or {small}"

    @property
    def rule(self) -> str:
        """The rules that decide how the part is computed, for people."""
        why_not = why_no_large_groups(self.call, len(self.joint), self.kernel_heads)
        groups = f"no groups of 256 rows: {why_not}" if self.large is None else self.large.rule
        dkv = {
            Dkv.ADDED: "dKV by atomic additions",
            Dkv.SLOTS: "dKV by slots, added up in their order: deterministic",
            Dkv.EITHER: "dKV by additions, or by slots if the device finds that they save time",
        }[self.dkv]
        if self.tickets:
            dkv += "; CTAs draw their items, as some may take longer"
        if self.is_far:
            dkv += "; dKV has more rows than the second-level cache holds"
        return f"{groups}; {'' if self.large is None else 'else '}{dkv}"

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal of parts that differ only in their queries."""
        small = self.kernel_heads, self.large, self.tickets, self.dkv
        return self.heads.start, self.heads.stop, *small

    def __str__(self) -> str:
        queries, joint, heads = (
            f"{x.start}:{x.stop}" for x in (self.queries, self.joint, self.heads)
        )
        together = f" of {joint} joined" * self.call.joined
        padded = f" as {self.kernel_heads}" * (len(self.heads) < self.kernel_heads)
        large = "" if self.large is None else f"{self.large}, else "
        small = self.dkv.value + " by tickets" * self.tickets
        return f"queries {queries}{together}, heads {heads}{padded}: {large}{small}"


def choose(call: Call) -> tuple[Part, ...]:
    """The parts of a call, in their order; none if it has no queries or no keys."""
    parts: list[Part] = []
    if not call.num_keys:
        return ()
    every = range(call.num_queries)
    for joint in in_parts(every, joint_queries(call.topk) if call.joined else len(every)):
        spread = len(joint) if call.topk >= Backward.LEAST_SPREAD else 1
        for heads, kernel_heads in head_parts(call.num_heads, spread):
            large = large_groups(call, len(joint), kernel_heads)
            at_a_time = len(joint) if large is None else large.queries_at_a_time
            for queries in in_parts(joint, at_a_time):
                part = Part(call, joint, queries, heads, kernel_heads, large, not parts)
                if not call.deterministic:
                    varied = call.has_lengths or part.is_far
                    # By turns the CTA with a longer item than others would be the last, and none
                    # waits for others. Without RoPE columns all are drawn: one plan serves both.
                    drawn = (varied and part.row_blocks > part.num_ctas) or not call.tile.has_rope
                    may_pay = drawn and part.is_far and slots_may_pay(part)
                    dkv = Dkv.EITHER if may_pay else Dkv.ADDED
                    part = part._replace(tickets=drawn, dkv=dkv)
                parts.append(part)
    return tuple(parts)


def explain(parts: Iterable[Part]) -> Choice:
    """Say why the parts of a call are computed as they are; parts alike that follow each other are
    one line."""
    rows = []
    for _, same in groupby(parts, key=lambda part: part.alike):
        first, *others = same
        last = others[-1] if others else first
        heads = f"heads {first.heads.start} to {first.heads.stop - 1}"
        if len(first.heads) < first.kernel_heads:
            heads += f", padded to {first.kernel_heads}"
        which = f"queries {first.queries.start} to {last.queries.stop - 1}, {heads}"
        if others:
            which += f", {1 + len(others)} parts, of {len(first.queries)} queries the first"
        if first.call.joined:
            which += "; each query's lists are joined first"
        rows.append(Candidate(first.kernels, which, first.rule))
    return Choice("parts of the call, one after another", tuple(rows))


def capacity_of(queries: int, topk: int) -> int:
    """Capacity of a group's list: room for all its slots, in whole tiles."""
    return -(-queries * topk // Tile().keys) * Tile().keys


def in_parts(queries: range, at_a_time: int) -> list[range]:
    """Some of the queries after the others."""
    firsts = range(queries.start, queries.stop, max(1, at_a_time))
    return [range(first, min(first + at_a_time, queries.stop)) for first in firsts]


def joint_queries(topk: int) -> int:
    """Queries of a part whose joint lists of at most `topk` slots have room: a range may be as long
    as its source."""
    queries = max(1, MOST_JOINT_BYTES // (JOINT_SLOT_BYTES * max(1, topk)))
    return queries - queries % WAVE if queries > WAVE else queries


def head_parts(num_heads: int, spread: int = 1) -> list[tuple[range, int]]:
    """Heads of each part, and the number of heads in its kernel: the rest is padding. `spread`:
    queries that are spread over as many groups as run at once: the more heads a kernel has, the
    fewer queries has a group; 1: heads are padded only where they must be."""
    parts = []
    for heads in in_parts(range(num_heads), max(plan.HEADS)):
        padded = min(n for n in plan.HEADS if n >= len(heads))
        while padded < ROWS and spread > 1 and spread * 2 * padded <= WAVE * ROWS:
            padded *= 2
        parts.append((heads, padded))
    return parts


def large_groups(call: Call, num_queries: int, num_heads: int) -> LargeGroups | None:
    """Groups of 256 rows; None if they never pay, or additions must be in order.

    A group of 64 rows has many queries anyway if heads are few. Large groups take long to begin and
    to end if queries are few.

    Args:
        num_heads: one of HEADS.
    """
    if why_no_large_groups(call, num_queries, num_heads):
        return None
    queries = group_queries(num_heads)
    # No list is longer than those of all its queries together.
    ratio = Backward.RATIO[num_heads]
    if are_few_named(call, num_queries):
        ratio = float(queries)
    most_length = Backward.MOST_LENGTH
    if call.ranges:
        most_length = min(Backward.MOST_LENGTH, Backward.MOST_RANGE_KEYS / call.topk)
    return LargeGroups(queries, call.topk, ratio, most_length, call.tile)


def are_few_named(call: Call, num_queries: int) -> bool:
    """Whether the slots of these queries are few for the rows of kv."""
    return num_queries * call.topk <= Backward.FEW_NAMED * call.num_keys


def why_no_large_groups(call: Call, num_queries: int, num_heads: int) -> str:
    """Say what speaks against groups of 256 rows; "": nothing. Arguments as of `large_groups`."""
    if call.deterministic:
        return "their sums have no fixed order"
    if num_heads not in Backward.RATIO:
        return f"they pay for {' or '.join(map(str, sorted(Backward.RATIO)))} heads only"
    num_items = -(-num_queries // group_queries(num_heads)) * DkvPlan.slices
    rounds = 1 if are_few_named(call, num_queries) else Backward.LEAST_ROUNDS
    least = rounds * call.num_sms
    return f"{num_items} items of dKV, fewer than {least}" if num_items < least else ""


def slots_may_pay(part: Part) -> bool:
    """Whether slots may take much less time than additions: if lists share no more than ids at
    random."""
    call, groups, blocks = part.call, part.num_groups, part.group_blocks
    most = min(part.group_queries * call.topk, call.num_keys)
    wave = max(1, part.num_ctas // blocks)

    def saved(keys: float) -> float:
        rows = plan.most_rows(groups, wave, keys, call.num_keys)
        return float(plan.saved_us(groups * blocks * keys, rows, min(rows, call.num_keys)))

    parts = Backward.LENGTHS if call.has_lengths else (1,)
    return any(saved(most / part) >= Backward.LEAST_SAVED_US for part in parts)


@lru_cache
def per_item_plan(
    queries: int, tile: Tile, *, slots: bool = False, tickets: bool = False
) -> plan.PerItemPlan:
    """Plan of groups of 64 rows, or of a query of 128 heads. A plan checks its barriers, which
    takes longer than a launch."""
    return plan.PerItemPlan(queries, slots, tickets, tile)


@lru_cache
def large_plans(tile: Tile) -> tuple[ScoresPlan, DqPlan, DkvPlan]:
    """Plans of groups of 256 rows: P and dS, dQ, dKV."""
    return ScoresPlan(tile), DqPlan(tile), DkvPlan(tile)
