"""The shadow of tensor memory knows of each cell what a shadow of single cells knows."""

import random

import numpy as np
import pytest

from ptxemu.check.tmem_page import COLUMNS, ROWS, TmemPage


def pieces(choose):
    """Starts and bytes of an access: most are rectangles, some of lanes apart or of any cells."""
    kind = choose.randrange(8)
    if kind == 0:
        cells = sorted(choose.sample(range(ROWS * COLUMNS), 5))
        return np.array(cells, np.int64) * 4, 4
    fine = choose.random() < 0.2
    columns = choose.choice([1, 2, 4] if fine else [8, 16, 64, 512])
    column = choose.randrange(0, COLUMNS - columns + 1, 1 if fine else 8)
    if kind == 1:
        lanes = [lane for lane in range(64) if lane % 32 < 16]
    else:
        count = choose.choice([1, 16] if fine else [32, 64, 128])
        first = choose.randrange(0, ROWS - count + 1, 1 if fine else count)
        lanes = list(range(first, first + count))
    return np.array(lanes, np.int64) * 2048 + column * 4, 4 * columns


@pytest.mark.parametrize("seed", range(12))
def test_cells_have_the_states_that_accesses_gave_them(seed):
    choose = random.Random(seed)
    page, cells = TmemPage(0), np.zeros(ROWS * COLUMNS, np.int32)
    for number in range(1, 40):
        starts, size = pieces(choose)
        mine = ((starts >> 2)[:, None] + np.arange(size >> 2)).reshape(-1)
        before, first = [], {}
        for index in page.select(starts, size):
            ids, index = page.located(index)
            old = ids[index].copy()
            before += old.reshape(-1).tolist()
            for state in set(old.reshape(-1).tolist()) - set(first):
                first[state] = page.address(index, int(np.argmax(old == state)))
            ids[index] = number
        assert set(before) == set(cells[mine].tolist())
        assert first == {s: 4 * int(mine[np.argmax(cells[mine] == s)]) for s in set(before)}
        cells[mine] = number
    whole = {page.address(slice(0, len(page.ids)), k): n for k, n in enumerate(page.ids.tolist())}
    assert all(cells[address // 4] == number for address, number in whole.items())
