"""The end of a query's list: one past its last valid slot, which a warpgroup looks for backwards.

Lists end in invalid slots where a query sees few keys, often without a length that says so. Thread
t looks at the slot t before the last one, and only if that shows its warp no valid slot at the ones
128, 256, ... before. The first look's id may be read long before it is needed: a list that is full
to its end costs no wait.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.hw import WARPGROUP_SIZE

LOOKS = 16
"""Slots of a thread that are read together after the first look."""
WARPS = 4
"""Warps that look, of which each has an end of its own."""


class SlotList(NamedTuple):
    """A query's list, as a thread of the warpgroup sees it."""

    ids: Any  # pointer to the first
    count: Int32  # slots that may be valid
    num_keys: Int32
    thread: Int32  # in its warpgroup


@cute.jit
def look(slots: SlotList, back: Any) -> Int32:
    """The id of the slot `back` before this thread's last one; -1 if there is none."""
    slot = slots.count - 1 - back - slots.thread
    found = Int32(-1)
    if slot >= 0:
        found = (slots.ids + slot).load()
    return found


@cute.jit
def end_of_look(slots: SlotList, found: Int32, back: Any) -> Int32:
    """One past the slot of a look; 0 if its id is not valid."""
    end = Int32(0)
    if found >= 0 and found < slots.num_keys:
        end = slots.count - back - slots.thread
    return end


@cute.jit
def find_end(slots: SlotList, first: Int32) -> Int32:
    """One past the last valid slot that this warp sees, or 0. All lanes call, and get the same.

    The list's end is the most of the four warps' ends.

    Args:
        first: `look(slots, 0)`.
    """
    end = Int32(cute.arch.warp_redux_sync(end_of_look(slots, first, 0), "max"))
    back = Int32(WARPGROUP_SIZE)
    while (end == 0) & (back < slots.count):
        found = [look(slots, back + i * WARPGROUP_SIZE) for i in range(LOOKS)]
        for i in cutlass.range_constexpr(LOOKS):
            end = cutlass.max(end, end_of_look(slots, found[i], back + i * WARPGROUP_SIZE))
        end = Int32(cute.arch.warp_redux_sync(end, "max"))
        back += LOOKS * WARPGROUP_SIZE
    return end
