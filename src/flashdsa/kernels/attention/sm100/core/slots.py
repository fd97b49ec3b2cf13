"""Rows of kv that slots of an item name."""

from typing import Any

from cutlass import Int32, Int64, cute


@cute.jit
def read_row(slots: Any, item: Int32, slot: Int32, num_slots: Int32, num_rows: Int32) -> Int32:
    """The row of kv that a slot of an item names; -1 where it is not valid. `slots`: (items, any)
    int32. `num_slots`: of the item that may be valid. `num_rows`: S_kv."""
    row = Int32(-1)
    if slot < num_slots:
        row = (slots.iterator + Int64(item) * slots.shape[1] + slot).load()
    if row >= num_rows:
        row = Int32(-1)
    if row < 0:
        row = Int32(-1)
    return row
