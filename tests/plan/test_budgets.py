"""Budgets: what exceeds the architecture, overlaps in time, or has a wrong count is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flashdsa.plan import (
    Arrives,
    Barrier,
    BudgetError,
    LiveRange,
    Role,
    SmemRegion,
    TmemRegion,
    check_arrivals,
    check_barriers,
    check_registers,
    plan_smem,
    plan_tmem,
)

LOADER, WORKER = Role("loader", 32, 40, "loads"), Role("worker", 256, 80, "works")


def test_the_first_region_beyond_shared_memory_is_named() -> None:
    regions = [SmemRegion(name, 60, 16, name) for name in ("a", "b", "c", "d")]
    assert plan_smem(regions, 252).offsets == (0, 64, 128, 192)
    with pytest.raises(BudgetError, match="252 bytes planned, 251 available; d is the first"):
        plan_smem(regions, 251)


def test_the_region_beyond_tensor_memory_is_named() -> None:
    columns = [TmemRegion("a", 0, 100, ""), TmemRegion("b", 100, 29, "")]
    assert plan_tmem(columns, 512).allocated == 256
    with pytest.raises(BudgetError, match=r"b \[100, 129\) ends behind the 128 columns"):
        plan_tmem(columns, 128)


def live(first: int, last: int, holds: str, stage: int | None = None) -> LiveRange:
    """Shorter to write."""
    return LiveRange(first, last, holds, stage)


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        ((), (), True),
        ((live(0, 3, ""),), (), True),
        ((live(0, 3, ""),), (live(4, 6, ""),), False),
        ((live(0, 3, ""),), (live(3, 6, ""),), True),
        ((live(2, 2, ""),), (live(0, 6, ""),), True),
        ((live(5, 1, ""),), (live(2, 4, ""),), False),
        ((live(5, 1, ""),), (live(1, 2, ""),), True),
        ((live(5, 1, ""),), (live(4, 5, ""),), True),
        ((live(5, 1, ""),), (live(6, 0, ""),), True),
        ((live(0, 1, ""), live(4, 4, "")), (live(2, 3, ""), live(5, 6, "")), False),
        ((live(0, 1, ""), live(4, 4, "")), (live(2, 3, ""), live(4, 6, "")), True),
    ],
)
def test_regions_share_memory_only_in_live(
    one: Sequence[LiveRange], other: Sequence[LiveRange], meet: bool
) -> None:
    """Also over the end of the period, and in either order."""
    for first, second in ((one, other), (other, one)):
        smem = [
            SmemRegion("a", 64, 16, "", live=tuple(first)),
            SmemRegion("b", 32, 16, "", "a", tuple(second)),
        ]
        tmem = [
            TmemRegion("a", 0, 64, "", tuple(first)),
            TmemRegion("b", 32, 64, "", tuple(second)),
        ]
        if meet:
            with pytest.raises(BudgetError, match=r"a .*and b .*live at the same time"):
                plan_smem(smem, 64)
            with pytest.raises(BudgetError, match=r"tensor memory: a .*and b "):
                plan_tmem(tmem, 512)
        else:
            assert plan_smem(smem, 64).offsets == (0, 0)
            assert plan_tmem(tmem, 512).allocated == 128


def test_a_region_cannot_hold_two_things_at_once_but_its_pieces_can() -> None:
    both = (live(0, 2, "old"), live(2, 3, "new"))
    with pytest.raises(BudgetError, match=r"a \(old\) \[0, 64\) and a \(new\)"):
        plan_smem([SmemRegion("a", 64, 16, "", live=both)], 64)
    pieces = (live(0, 2, "old", 0), live(2, 3, "new", 1))
    assert plan_smem([SmemRegion("a", 64, 16, "", live=pieces, stages=2)], 64).total == 64


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ((Role("a", 128, 100, ""),), "a has 100 a thread; setmaxnreg takes multiples of 8"),
        ((Role("a", 128, 256, ""),), "from 24 to 255"),
        ((Role("a", 128, 248, ""), Role("b", 256, 160, "")), "72704 planned, 65536.* b takes most"),
    ],
)
def test_registers_beyond_the_file_are_refused(roles: Sequence[Role], message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        check_registers(roles, 65_536)


@pytest.mark.parametrize(
    ("barrier", "message"),
    [
        (
            Barrier("full", 2, LOADER, Arrives.ONE_THREAD, WORKER, 1 << 20, ""),
            "full: 1048576 bytes",
        ),
        (Barrier("full", 2, LOADER, Arrives.COMMIT, WORKER, 64, ""), "a commit of loader"),
        (Barrier("full", 2, Role("x", 32, 40, ""), Arrives.COMMIT, WORKER, 0, ""), "no role .*'x'"),
        (
            Barrier("full", 1, WORKER, Arrives.EVERY_WARP, Role("worker", 128, 80, "works"), 0, ""),
            "no role .*128",
        ),
        (
            Barrier("full", 1, LOADER, Arrives.WARPS_OF_ONE_GROUP, WORKER, 0, ""),
            "of loader cannot arrive: it has 32 threads",
        ),
    ],
)
def test_barriers_that_their_roles_cannot_serve_are_refused(barrier: Barrier, message: str) -> None:
    right = Barrier("right", 2, LOADER, Arrives.ONE_THREAD, WORKER, 64, "")
    check_barriers([right], (LOADER, WORKER))
    with pytest.raises(BudgetError, match=message):
        check_barriers([right, barrier], (LOADER, WORKER))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"full": [8, 8], "free": [264]}, None),
        ({"full": [8, 8], "free": [256]}, r"free: initialised with \[256\].* and loader: 264"),
        ({"full": [8], "free": [264]}, r"full: initialised with \[8\]; a lane of each warp"),
        ({"full": [8, 8]}, r"free: initialised with \[\]"),
        ({"full": [8, 8], "free": [264], "other": [1]}, "other: initialised, but not planned"),
    ],
)
def test_counts_that_do_not_follow_from_the_roles_are_refused(
    counts: dict[str, list[int]], message: str | None
) -> None:
    eight = Role("loader", 8 * 32, 40, "loads")
    barriers = [
        Barrier("full", 2, eight, Arrives.EVERY_WARP, WORKER, 0, ""),
        Barrier(
            "free", 1, WORKER, Arrives.EVERY_THREAD, eight, 0, "",
            also_produced_by=Role("loader", 8, 40, ""),
        ),
    ]  # fmt: skip
    if message is None:
        check_arrivals(barriers, counts)
    else:
        with pytest.raises(BudgetError, match=message):
            check_arrivals(barriers, counts)
