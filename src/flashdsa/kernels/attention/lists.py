"""Lists of the kv rows that groups of neighbouring queries name. Nothing here imports CuTe DSL."""

from __future__ import annotations

from typing import Any, NamedTuple

UNORDERED_SHIFT = 16
MOST_UNORDERED = (1 << 15) - 1
"""Count of unordered rows that stands for all rows of the list."""
SAMPLED_CHOICE, SAMPLED_ROWS, SAMPLED_SLOTS = range(3)
"""Words of a sample of groups: its choice, rows that the groups name, slots that name them."""
SAMPLED_WORDS = 3


class Lists(NamedTuple):
    """A list for each group, the union of what its queries name; see `union.py`.

    The first counts[g] numbers are the list: 0 <= row < S_kv. In whole tiles the rest, up to the
    next multiple of a tile, are copies of rows of the list that no query names; numbers after it
    must not be read. A group without a row has count 0.

    present: bit i says that query i of the group names any row. Q, and dO, of one that does not, or
    that is past the last query, may hold anything, NaN too: products over rows take them for zeros.
    Bits UNORDERED_SHIFT and up say how many of the list's last rows may be less than or equal to
    one before, all where it is MOST_UNORDERED. The others ascend.
    """

    rows: Any  # (groups, capacity) int32; capacity is at least group * topk
    members: Any  # (groups, capacity) uint8 or uint16: bit i: query i of the group names it
    counts: Any  # (groups,) int32
    present: Any = None  # with whole tiles (groups,) int32
    named: Any = None  # with whole tiles (groups,) int32: rows of all queries, one by one


def members_bits(group: int) -> int:
    """Bits of a row's entry in `members`, one for each of the group's queries, 16 at most."""
    return 8 if group <= 8 else 16
