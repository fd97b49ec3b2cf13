"""Rows that no slot names."""

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.smem import store_words

UNIT = 16
"""Bytes of a store."""


@cute.jit
def clear_row(to: Int32, pitch: cutlass.Constexpr) -> None:
    """Write zeros over a row: 0 times its old bytes may be NaN."""
    for unit in cutlass.range(pitch // UNIT, unroll=1):
        store_words(to + unit * UNIT, [Int32(0)] * 4)
