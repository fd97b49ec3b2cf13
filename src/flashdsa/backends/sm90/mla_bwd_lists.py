"""Memory for the lists of the Hopper backward's groups of queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.runner import Runner
from flashdsa.kernels.attention.lists import members_bits
from flashdsa.kernels.attention.sm90.core.tile import Tile

WAVE = 132
"""SMs of an H100 and of an H200. Parts of a call have a multiple of so many row blocks or queries,
where that many have room. It does not depend on the device, and so the bits in order do not."""


class Lists(NamedTuple):
    """Lists of a grouping's groups, see `workspace.py`, and what the queries of each name, one by
    one."""

    rows: Tensor
    members: Tensor
    counts: Tensor
    present: Tensor
    named: Tensor


def capacity_of(queries: int, topk: int) -> int:
    """Capacity of a group's list: room for all its slots, in whole tiles."""
    return -(-queries * topk // Tile().keys) * Tile().keys


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
