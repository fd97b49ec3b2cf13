"""Launches of Hopper's backward of 64 rows whose dKV has an order: slots replace additions."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.sm90.mla_bwd_lists import WAVE
from flashdsa.backends.sm90.mla_bwd_per_item import (
    Call,
    Inputs,
    Large,
    LaunchSmall,
    Outputs,
    bind_arguments,
)
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import (
    CURSORS,
    KEY_WORDS,
    MOST_PART_GROUPS,
    PAIR,
)
from flashdsa.kernels.attention.sm90.core.tile import ROWS
from flashdsa.kernels.catalog import MLA_BWD_FUSED

MOST_SLOT_BYTES = 1 << 31
"""Most bytes of the rows of a part of the groups; more only if a single group needs more."""


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

    def launch(inputs: Inputs, outputs: Outputs, large: Large | None = None) -> None:
        first = first_arguments(inputs, outputs)
        choice = () if large is None else large.arguments
        function(*first, *scalars, *allocate_slots(), sizes.unit_groups, *choice)

    return launch


def slots_allocator(call: Call, sizes: Sizes) -> Callable[[], tuple[Tensor, ...]]:
    """A function that allocates the slots and the tensors of `Offsets`, of which `named` are 0."""
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
    slots, named, *others = (call.runner.allocator(*shape, dtype=torch.int32) for shape in shapes)
    return lambda: (slots(), named().zero_(), *[allocate() for allocate in others])
