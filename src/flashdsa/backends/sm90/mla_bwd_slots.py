"""Launches of Hopper's backward of 64 rows where slots replace dKV's additions: in order, and where
additions would take longer."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.sm90.mla_bwd_lists import WAVE
from flashdsa.backends.sm90.mla_bwd_per_item import (
    Call,
    Inputs,
    Large,
    LaunchSlots,
    LaunchSmall,
    Outputs,
    bind_arguments,
    bind_per_item,
)
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import (
    CURSORS,
    KEY_WORDS,
    MOST_PART_GROUPS,
    PAIR,
    WAY,
)
from flashdsa.kernels.attention.sm90.bwd_per_item.slots_time import most_rows, saved_us
from flashdsa.kernels.attention.sm90.core.tile import ROWS
from flashdsa.kernels.catalog import MLA_BWD_FUSED

MOST_SLOT_BYTES = 1 << 31
"""Most bytes of the rows of a part of the groups; more only if a single group needs more."""
LEAST_SAVED_US = 100.0
"""Time that slots may save, from which on the device chooses: its choice and launches without work
take 20 to 50 us."""
LENGTHS = (2, 4, 8, 16)
"""Parts of their slots that lists are taken to have where lengths are given: half, and so on."""


class Sizes(NamedTuple):
    """Sizes of the workspace of a call.

    Attributes:
        room: keys of a part's lists. unit_groups: groups that are taken together.
        parts: of the groups, at most.
    """

    room: int
    unit_groups: int
    parts: int


@lru_cache
def sizes_of(groups: int, capacity: int, blocks: int, slot_words: int) -> Sizes:
    """Sizes for `groups` groups, whose lists have room for `capacity` keys.

    Args:
        blocks: row blocks of a group, each of which has a row of `slot_words` for each key.
    """
    of_key = blocks * slot_words * 4
    room = max(capacity, min(MOST_SLOT_BYTES // of_key, groups * capacity))
    # Most keys that a group counts for: see `offsets.split_kernel`.
    most = max(capacity, -(-room // MOST_PART_GROUPS))
    unit_groups = max(1, min(WAVE // blocks, room // most))
    units = -(-groups // unit_groups)
    # A part has room for that many batches of groups of any size; a part and the next batch
    # together count for more keys than the room.
    parts = 1 if groups * most <= room else -(-units // (room // (unit_groups * most)))
    if parts > 1:
        parts = min(parts, groups * most // (room - unit_groups * most + 1) + 1)
    return Sizes(room, unit_groups, parts)


def bind_slots(call: Call) -> LaunchSmall:
    """Same as `bind_per_item`."""
    runner = call.runner
    plan = call.plan(slots=True)
    function = runner.function(MLA_BWD_FUSED, plan)
    blocks = max(1, call.num_heads // ROWS)
    sizes = sizes_of(call.num_groups, call.capacity, blocks, plan.slot_words)
    first_arguments, allocate_slots = bind_arguments(call), slots_allocator(call, sizes)
    scalars = call.num_ctas, runner.num_sms
    of_parts = sizes.unit_groups, int(call.from_zero)

    def launch(inputs: Inputs, outputs: Outputs, large: Large | None = None) -> None:
        first = first_arguments(inputs, outputs)
        choice = () if large is None else large.arguments
        function(*first, *scalars, *allocate_slots(), *of_parts, *choice)

    return launch


def bind_either_way(call: Call) -> LaunchSmall:
    """Same as `bind_per_item`; the device may choose slots where they may take less time."""
    return bind_per_item(call, bind_given(call) if slots_may_pay(call) else None)


def slots_may_pay(call: Call) -> bool:
    """Whether slots may take much less time than additions: if lists share no more than ids at
    random."""
    if not (call.tickets and call.is_far):
        return False
    groups, blocks = call.num_groups, max(1, call.num_heads // ROWS)
    most = min(call.group_queries * call.topk, call.num_keys)
    wave = max(1, call.num_ctas // blocks)

    def saved(keys: float) -> float:
        rows = most_rows(groups, wave, keys, call.num_keys)
        return float(saved_us(groups * blocks * keys, rows, min(rows, call.num_keys)))

    parts = LENGTHS if call.has_lengths else (1,)
    return any(saved(most / part) >= LEAST_SAVED_US for part in parts)


def bind_given(call: Call) -> LaunchSlots:
    """Bind slots behind a launch whose lists and copy of kv they take; they have work if its
    tickets say so."""
    plan = call.plan(given=True)
    function = call.runner.function(MLA_BWD_FUSED, plan)
    blocks = max(1, call.num_heads // ROWS)
    sizes = sizes_of(call.num_groups, call.capacity, blocks, plan.slot_words)
    allocate_slots, scalars = slots_allocator(call, sizes), (call.num_ctas, call.runner.num_sms)
    of_parts = sizes.unit_groups, int(call.from_zero)

    def launch(first: tuple[Any, ...], tickets: Tensor) -> None:
        way = tickets[WAY : WAY + 1]
        function(*first, *scalars, *allocate_slots(), *of_parts, way)

    return launch


def slots_allocator(call: Call, sizes: Sizes) -> Callable[[], tuple[Tensor, ...]]:
    """A function that allocates the slots and the tensors of `Offsets`."""
    num_keys, num_groups = call.num_keys, call.num_groups
    blocks = max(1, call.num_heads // ROWS)
    shapes = (
        (sizes.room * blocks, call.plan(slots=True).slot_words),
        (num_keys, PAIR),
        (sizes.parts, CURSORS),
        (sizes.parts + 1,),
        (num_groups * blocks,),
        (num_keys, KEY_WORDS),
        (num_groups,),
        (sizes.room, PAIR),
        (num_groups, call.capacity),
    )
    every = [call.runner.allocator(*shape, dtype=torch.int32) for shape in shapes]
    return lambda: (*[allocate() for allocate in every],)
