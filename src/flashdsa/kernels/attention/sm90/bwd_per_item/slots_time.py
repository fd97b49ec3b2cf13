"""Time that rows of the slots save over additions to dKV. Nothing here imports CuTe DSL."""

from __future__ import annotations

import math
from typing import Any

FAR_US = 1.25e-3
"""Microseconds of a row that comes from memory to be added to."""
SLOT_US = 0.3e-3
"""The same of a row of the slots, written and read, beyond an addition to a row in the cache."""
SUM_US = 0.85e-3
"""The same of a row of dKV that slots are summed to."""
LAUNCHES_US = 100.0
"""The slots' launches, and the least that is worth them."""


def saved_us(additions: Any, rows: Any, sums: Any) -> Any:
    """Microseconds that slots save; less than 0 where they take longer.

    The constants are rounded from a fit to 119 drawn calls over 28,685 to 1,018,067 rows, each
    timed by both ways on an H100, less 8 % of the time by additions. Of these it takes 21, and none
    that takes longer: 0.64 to 0.99 of the time by additions, 0.81 in the mean.

    Args:
        additions: rows that are added. rows: that come from memory to be added to, each once for
            items that run at the same time. sums: rows of dKV that are named, at most.
    """
    return FAR_US * rows - SLOT_US * additions - SUM_US * sums - LAUNCHES_US


def most_rows(groups: int, wave: int, keys: float, num_keys: int) -> float:
    """Rows that come from memory if lists share no more than they must on average.

    Args:
        groups: of the launch; wave: of them that run at the same time. keys: of a list.
    """
    of_wave = num_keys * -math.expm1(-min(wave, groups) * keys / num_keys)
    return groups / min(wave, groups) * of_wave
