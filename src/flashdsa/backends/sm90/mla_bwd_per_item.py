"""Launches of Hopper's backward of 64 rows of Q at a time, over one list."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.mla_bwd_lists import Lists, capacity_of, lists_allocator
from flashdsa.backends.sparse_mla_launches import counters_of
from flashdsa.kernels.attention.lists import SAMPLED_WORDS, SHORT_SLOTS
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import (
    SLOTS_MAY_PAY,
    PerItemPlan,
    num_tickets,
)
from flashdsa.kernels.attention.sm90.core.tile import ROWS, Tile
from flashdsa.kernels.catalog import MLA_BWD_FUSED

MOST_LIST_BYTES = 1 << 28
"""Most bytes of the lists of both kinds of groups; queries that need more are launched in parts."""
LISTS, SLOT_BYTES = 2, 5
"""Lists that hold a query's slot, one of each kind of group; bytes of a slot in a list: a row and
its members."""
SPREAD = 5
"""Tiles from the first tile of a CTA to the next CTA's, so that they do not add to the same
rows."""
PACED_ROWS = {8: 57_344, 16: 57_344, 32: 28_672, 64: 28_672, 128: 28_672}
"""Rows of dKV above which CTAs keep pace, by heads."""
NEAR_ROWS = 12_288
"""Rows of dKV that the second-level cache holds. CTAs sweep them together if they are more."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""q (S, H, d_qk), rows of keys, dO (S, H, d_v), lse (S, H) with the sinks, O, indices (S, topk) and
topk_length, (0,): every slot counts; without gaps."""
Outputs = tuple[Tensor, Tensor, Tensor]
"""delta (S, H) fp32 and dq, written, and dkv (S_kv, d_qk) fp32, added to."""
Launch = Callable[[Inputs, Outputs], None]
LaunchLarge = Callable[[Inputs, Outputs, Lists, Tensor], None]
"""(inputs, outputs, lists of all groups, choice (1,) int32)"""
LaunchSlots = Callable[[tuple[Any, ...], Tensor], None]
"""(the arguments of `Operands` of a launch before, and its tickets)"""


class LaunchSmall(Protocol):
    """Launch what writes delta of all queries, and their lists, dQ and dKV. It makes the choice of
    `large` in any case, its lists if a sample says so, and the rest only if these groups are not
    taken.
    """

    def __call__(self, inputs: Inputs, outputs: Outputs, large: Large | None = None) -> None: ...


class Groups(Protocol):
    """Groups of the grouped backward."""

    @property
    def queries(self) -> int:
        """Queries of a group."""

    @property
    def capacity(self) -> int:
        """Capacity of a group's list."""

    @property
    def limits(self) -> tuple[float, int]:
        """Longest lists with which they are taken, in lists of a query; most keys of a list."""


class Large(NamedTuple):
    """Groups that are taken instead if their queries have much in common.

    Attributes:
        lists: of them, written, but where a sample says that they are not taken. choice: (1,)
            int32, written. limits: see `Groups`. sampled: (3,) int32, written. counters: int32.
    """

    lists: Lists
    choice: Tensor
    limits: tuple[float, int]
    sampled: Tensor
    counters: Any

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Those of `launch_backward`."""
        return *self.lists, self.choice, *self.limits, self.sampled, self.counters


class Call(NamedTuple):
    """The sizes of a call, or of a part of its queries.

    Attributes:
        large: groups that the device may choose instead; None: no choice.
        has_lengths: topk_length is given, so that items may differ.
        tile: of keys. from_zero: nothing has been added to dKV.
    """

    runner: Runner
    num_queries: int
    num_heads: int
    num_keys: int
    topk: int
    sm_scale: float
    large: Groups | None
    has_lengths: bool
    tile: Tile = Tile()
    from_zero: bool = False

    @property
    def group_queries(self) -> int:
        """Queries of a group: of 64 rows, or of a query of 128 heads."""
        return max(1, ROWS // self.num_heads)

    @property
    def num_groups(self) -> int:
        """Groups of `group_queries` queries."""
        return -(-self.num_queries // self.group_queries)

    @property
    def capacity(self) -> int:
        """Capacity of a group's list."""
        return capacity_of(self.group_queries, self.topk)

    @property
    def row_blocks(self) -> int:
        """Items: blocks of 64 rows of Q."""
        return -(-self.num_queries * self.num_heads // ROWS)

    @property
    def num_ctas(self) -> int:
        """CTAs: at most one an item."""
        return min(self.row_blocks, self.runner.num_sms)

    @property
    def tickets(self) -> bool:
        """Whether CTAs draw their items. By turns one that has longer ones than others would be the
        last, and none waits for others. Without RoPE columns all are drawn: one plan serves both.
        """
        more = self.row_blocks > self.num_ctas
        return (more and (self.has_lengths or self.is_far)) or not self.tile.has_rope

    @property
    def is_far(self) -> bool:
        """Whether dKV has many more rows than the second-level cache."""
        return self.num_keys > PACED_ROWS[self.num_heads]

    def plan(self, *, slots: bool = False, given: bool = False) -> PerItemPlan:
        """Plan of the kernel."""
        if given:
            return plan_of(self.num_heads, 0, True, False, False, self.tile, given=True)
        more = 0 if self.large is None else self.large.queries
        short = more > 0 and self.topk <= SHORT_SLOTS and self.tile.has_rope
        kind = (True, False, False) if slots else (False, self.tickets, short)
        return plan_of(self.num_heads, more, *kind, self.tile)

    def tickets_allocator(self, far: int) -> Callable[[], tuple[Any, ...]]:
        """A function that allocates the tickets, if there are any: the last arguments of
        `launch_backward`, `far` one of them."""
        if not self.tickets:
            return tuple
        allocate = self.runner.allocator(num_tickets(self.num_groups), dtype=torch.int32)
        return lambda: (allocate(), far)


@lru_cache
def plan_of(
    num_heads: int,
    more: int,
    slots: bool,
    tickets: bool,
    short: bool,
    tile: Tile,
    *,
    given: bool = False,
) -> PerItemPlan:
    """Plan of groups of 64 rows, or of a query of 128 heads. A plan checks its barriers, which
    takes longer than a launch."""
    return PerItemPlan(max(1, ROWS // num_heads), more, slots, tickets, short, given, tile)


def bind_per_item(call: Call, launch_slots: LaunchSlots | None = None) -> LaunchSmall:
    """Bind the launches of calls of these sizes.

    Args:
        launch_slots: what the device may choose for dKV's additions; None: no choice.
    """
    function = call.runner.function(MLA_BWD_FUSED, call.plan())
    spread = SPREAD if call.num_keys <= NEAR_ROWS else 0
    first_arguments = bind_arguments(call)
    far = int(call.is_far) if launch_slots is None else SLOTS_MAY_PAY
    scalars, allocate_tickets = (spread, call.num_ctas), call.tickets_allocator(far)

    def launch(inputs: Inputs, outputs: Outputs, large: Large | None = None) -> None:
        first = first_arguments(inputs, outputs)
        choice = () if large is None else large.arguments
        tickets = allocate_tickets()
        function(*first, *scalars, *choice, *tickets)
        if launch_slots is not None:
            launch_slots(first, tickets[0])

    return launch


def bind_arguments(call: Call) -> Callable[[Inputs, Outputs], tuple[Any, ...]]:
    """The arguments of every launch, see `Operands` in its kernel.py."""
    runner, num_heads, sm_scale = call.runner, call.num_heads, call.sm_scale
    allocate_copy = runner.allocator(call.num_keys, call.tile.d_qk, dtype=torch.bfloat16)
    allocate_lists = lists_allocator(runner, call.num_groups, call.group_queries, call.capacity)

    def arguments_of(inputs: Inputs, outputs: Outputs) -> tuple[Any, ...]:
        q, kv, *rest = inputs
        delta, dq, dkv = outputs
        of_launch = delta, *allocate_lists(), dq, dkv, num_heads, sm_scale
        return (q, kv, allocate_copy(), *rest, *of_launch)

    return arguments_of


def bind_either(
    call: Call,
    bind_large: Callable[[int], LaunchLarge],
    bind_small: Callable[[Call], LaunchSmall],
) -> Launch:
    """Bind large groups where they have much in common, else 64 rows at a time.

    The device chooses for each part of the queries whose lists have room.

    Args:
        bind_large: of a number of large groups, whose kernels have work where a choice takes them.
        bind_small: of what makes delta, the large groups' lists and the choice, and has work where
            it takes the others.
    """
    groups, num_queries = call.large, call.num_queries
    assert groups is not None
    groups_at_a_time = max(1, MOST_LIST_BYTES // (LISTS * SLOT_BYTES * groups.capacity))
    at_a_time = groups_at_a_time * groups.queries
    if num_queries <= at_a_time:
        return bind_choice(call, groups, bind_large, bind_small(call))
    launches: list[tuple[slice, Launch]] = []
    for first in range(0, num_queries, at_a_time):
        some = slice(first, min(first + at_a_time, num_queries))
        begins = call.from_zero and first == 0
        part = call._replace(num_queries=some.stop - some.start, from_zero=begins)
        launches.append((some, bind_choice(part, groups, bind_large, bind_small(part))))

    def launch(inputs: Inputs, outputs: Outputs) -> None:
        q, kv, dO, lse, O, indices, lengths = inputs
        delta, dq, dkv = outputs
        for some, launch_part in launches:
            of_lists = dO[some], lse[some], O[some], indices[some], lengths[some]
            launch_part((q[some], kv, *of_lists), (delta[some], dq[some], dkv))

    return launch


def bind_choice(
    call: Call,
    groups: Groups,
    bind_large: Callable[[int], LaunchLarge],
    launch_small: LaunchSmall,
) -> Launch:
    """Bind a launch on queries whose lists have room together; arguments as for `bind_either`."""
    runner, limits = call.runner, groups.limits
    num_groups = -(-call.num_queries // groups.queries)
    launch_large = bind_large(num_groups)
    allocate_lists = lists_allocator(runner, num_groups, groups.queries, groups.capacity)
    allocate_choice = runner.allocator(1, dtype=torch.int32)
    allocate_sampled = runner.allocator(SAMPLED_WORDS, dtype=torch.int32)
    give_counters = counters_of(runner)

    def launch(inputs: Inputs, outputs: Outputs) -> None:
        lists, choice, sampled = allocate_lists(), allocate_choice(), allocate_sampled()
        (counters,) = give_counters()
        launch_small(inputs, outputs, Large(lists, choice, limits, sampled, counters))
        launch_large(inputs, outputs, lists, choice)

    return launch
