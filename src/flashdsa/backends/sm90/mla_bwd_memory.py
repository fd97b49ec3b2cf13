"""Memory of the Hopper backward: its lists of rows; slots that replace additions to dKV."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.mla_bwd_choice import WAVE, Part
from flashdsa.kernels.attention.lists import members_bits
from flashdsa.kernels.attention.sm90.bwd_per_item import plan

MOST_SLOT_BYTES = 1 << 31
"""Most bytes of the rows of a part of the groups; more only if a single group needs more."""


class Sizes(NamedTuple):
    """Sizes of the workspace of a launch.

    Attributes:
        room: keys of a part's lists. unit_groups: groups that are taken together.
        parts: of the groups, at most.
    """

    room: int
    unit_groups: int
    parts: int


@lru_cache
def sizes_of(groups: int, capacity: int, blocks: int, slot_words: int) -> Sizes:
    """Sizes for `groups` groups, whose lists have room for `capacity` keys. `blocks`: row blocks
    of a group, each of which has a row of `slot_words` for each key."""
    of_key = blocks * slot_words * 4
    room = max(capacity, min(MOST_SLOT_BYTES // of_key, groups * capacity))
    # Most keys that a group counts for: see `offsets.split_kernel`.
    most = max(capacity, -(-room // plan.MOST_PART_GROUPS))
    unit_groups = max(1, min(WAVE // blocks, room // most))
    units = -(-groups // unit_groups)
    # A part has room for that many batches of groups of any size; a part and the next batch
    # together count for more keys than the room.
    parts = 1 if groups * most <= room else -(-units // (room // (unit_groups * most)))
    if parts > 1:
        parts = min(parts, groups * most // (room - unit_groups * most + 1) + 1)
    return Sizes(room, unit_groups, parts)


def slots_allocator(runner: Runner, part: Part) -> Callable[[], tuple[Any, ...]]:
    """A function that allocates the arguments of a launch with slots that follow those of
    `Operands`: see `launch_backward`."""
    num_keys, groups, blocks = part.call.num_keys, part.num_groups, part.group_blocks
    slot_words = part.plans[-1].slot_words
    sizes = sizes_of(groups, part.capacity, blocks, slot_words)
    shapes = (
        (sizes.room * blocks, slot_words),
        (num_keys, plan.PAIR),
        (sizes.parts, plan.CURSORS),
        (sizes.parts + 1,),
        (groups * blocks,),
        (num_keys, plan.KEY_WORDS),
        (groups,),
        (sizes.room, plan.PAIR),
        (groups, part.capacity),
    )
    every = [runner.allocator(*shape, dtype=torch.int32) for shape in shapes]
    on_device = part.num_ctas, runner.num_sms
    of_parts = sizes.unit_groups, int(part.is_first)
    return lambda: (*on_device, *[allocate() for allocate in every], *of_parts)


class Lists(NamedTuple):
    """Lists of a grouping's groups, see `workspace.py`, and what the queries of each name, one by
    one."""

    rows: Tensor
    members: Tensor
    counts: Tensor
    present: Tensor
    named: Tensor


def lists_allocator(
    runner: Runner, groups: int, queries: int, capacity: int
) -> Callable[[], Lists]:
    """A function that allocates the lists of `groups` groups, of `queries` queries each."""
    rows = runner.allocator(groups, capacity, dtype=torch.int32)
    members = runner.allocator(groups, capacity, dtype=_member(queries))
    number = runner.allocator(groups, dtype=torch.int32)
    return lambda: Lists(rows(), members(), number(), number(), number())


def lists_bytes(groups: int, queries: int, capacity: int) -> int:
    """Bytes of these lists."""
    word = torch.int32.itemsize
    return groups * (capacity * (word + _member(queries).itemsize) + 3 * word)


def _member(queries: int) -> torch.dtype:
    """The dtype of a row's members."""
    return torch.uint8 if members_bits(queries) == 8 else torch.uint16
