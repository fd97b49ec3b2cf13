"""Memory for the lists of the Hopper backward's groups of queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.runner import Runner
from flashdsa.kernels.attention.lists import members_bits


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
