"""Heads of a lane of S^T and O^T: two neighbouring ones of each eight columns."""

from typing import Any

from cutlass import cute

LANE_HEADS = 2
"""Neighbouring heads of a lane in each 8 columns."""


def head_of(i: int) -> int:
    """Number among the lane's heads of its accumulator i of a block of S^T or O^T."""
    return i // 4 * LANE_HEADS + i % LANE_HEADS


def first_head(lane: Any) -> Any:
    """The lane's first head; the others are 1, 8, 9, 16, ... heads later."""
    return lane % 4 * LANE_HEADS


def offset_of_head(number: int) -> int:
    """Heads from the lane's first one to that of a number."""
    return number // LANE_HEADS * 8 + number % LANE_HEADS


def reduce_keys(value: Any, combine: Any) -> Any:
    """Reduce over the lanes that have the same heads; all of them get the result."""
    for offset in (4, 8, 16):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset))
    return value
