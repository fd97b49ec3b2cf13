"""Machine code finds the states that NumPy finds, and puts the same in their place."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ptxemu.check.granules import Pieces
from ptxemu.check.scans import MachineScans, NumPyScans
from ptxemu.check.shadow import Page, ShadowRegion
from ptxemu.check.tmem_page import TmemPage

builtins = pytest.importorskip("ptxemu.compiled.builtins")
shadow_code = pytest.importorskip("ptxemu.compiled.shadow_code")
STATES = 6


def some_index(choose: random.Random, page: Page | TmemPage) -> object:
    """A run, pieces that may overlap, pieces that do not, or a rectangle of tensor memory."""
    if isinstance(page, TmemPage):
        lane, column = 32 * choose.randrange(4), 8 * choose.randrange(60)
        starts = np.arange(lane, lane + 32, dtype=np.int64) * 2048 + column * 4
        return page.select(starts, 4 * choose.choice([8, 16, 32]))[0]
    size = 4 * choose.choice([1, 2, 4])
    places = range(0, 4 * len(page.ids) - size, size)
    kind = choose.randrange(3)
    if kind == 0:
        first = choose.randrange(100)
        return slice(first, first + choose.randrange(1, 50))
    starts = choose.choices(places, k=9) if kind == 1 else choose.sample(places, 9)
    inside = np.array(starts, dtype=np.int64) + page.base
    return Pieces(inside, size, page.base, page.shift, are_disjoint=kind == 2)


@pytest.mark.parametrize("seed", range(3))
def test_scans_are_the_same(seed: int) -> None:
    """Two shadows that start alike stay so."""
    choose = random.Random(seed)
    quick, plain = MachineScans(shadow_code), NumPyScans()
    pages = [(Page(512, 4096, 0), Page(512, 4096, 0)), (TmemPage(0), TmemPage(0))]
    for _ in range(60):
        mine, other = choose.choice(pages)
        index = some_index(choose, mine)
        found = quick.states(mine, index, STATES)
        assert found == plain.states(other, index, STATES)
        if choose.random() < 0.3:
            new = [choose.randrange(STATES) for _ in found]
            quick.replace(mine, index, found, new)
            plain.replace(other, index, found, new)
        else:
            number = choose.randrange(STATES)
            quick.fill(mine, index, number)
            plain.fill(other, index, number)
        assert np.array_equal(mine.ids, other.ids)


def test_pieces_in_two_pages_are_told_of() -> None:
    """A guess of the page is checked."""
    region = ShadowRegion("global memory", 10, 0)
    starts = np.array([1000, 1020, 1028, 2000, 2040], dtype=np.int64)
    (page, index), *others = region.guess(starts, 8, distinct=True)
    assert others == []
    assert MachineScans(shadow_code).states(page, index, 1) == []
    assert len(region.select(starts, 8, distinct=True)) > 1


def test_a_refined_page_is_found_again() -> None:
    """Where its numbers are is asked anew."""
    scans, page = MachineScans(shadow_code), Page(0, 64, 0)
    assert scans.states(page, slice(0, 4), 2) == [0]
    page.refine(0)
    scans.fill(page, slice(0, 3), 1)
    assert scans.states(page, slice(0, 4), 2) == [0, 1]


def test_room_grows_with_the_states() -> None:
    """More states than there was room for."""
    scans, page = MachineScans(shadow_code), Page(0, 64, 0)
    scans.states(page, slice(0, 16), 1)
    scans.fill(page, slice(0, 8), 99_999)
    assert scans.states(page, slice(0, 16), 100_000) == [0, 99_999]


def test_builtins_refuse_what_they_do_not_take() -> None:
    """A wrong number of arguments, or no bytes where bytes are to be, is no address."""
    scan = shadow_code.scan_pieces()
    with pytest.raises(TypeError):
        scan(1, 2)
    with pytest.raises(TypeError):
        scan(0, 0, 5, 0, 2, 1, 1, 0)
    with pytest.raises(TypeError):
        scan("0", 0, b"", 0, 2, 1, 1, 0)
