"""Where every element of an accumulator lies in TMEM, one by one."""

import numpy as np
from numpy.typing import NDArray

from ptxemu.memory.tmem import DataPath, accumulator_blocks

Index = NDArray[np.int64]


def accumulator_index(path: DataPath, n: int) -> tuple[Index, Index]:
    """Lane and column (rows, n) of every element of one CTA's D."""
    blocks = accumulator_blocks(path, n)
    rows = max(block.row + block.count for block in blocks)
    lanes, columns = np.zeros((rows, n), np.int64), np.zeros((rows, n), np.int64)
    for b in blocks:
        where = np.s_[b.row : b.row + b.count, b.n : b.n + b.width]
        lanes[where] = b.lane + np.arange(b.count)[:, None]
        columns[where] = np.arange(b.width)
    return lanes, columns
