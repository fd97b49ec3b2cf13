"""Which compiled forward a call takes on Hopper."""

from __future__ import annotations

import pytest

from flashdsa.backends.sm90.sparse_mla import group_for
from flashdsa.kernels.attention.sm90.fwd.plan import FwdPlan
from flashdsa.plan import BudgetError


@pytest.mark.parametrize(
    ("queries", "heads", "group"),
    [
        (4096, 128, 1),
        (4096, 64, 1),
        (4096, 32, 2),
        (4096, 16, 4),
        (4096, 8, 8),
        (4096, 4, 1),  # a mask has a bit for no more than eight queries
        (4096, 20, 1),
        (132, 32, 1),  # every query has a streaming multiprocessor of its own
        (133, 32, 2),
        (132 * 7, 8, 1),
        (132 * 7 + 1, 8, 8),
    ],
)
def test_queries_are_grouped_where_that_cannot_lose(queries: int, heads: int, group: int) -> None:
    assert group_for(queries, heads, 2048, 8192, 132) == group


def test_unions_of_few_slots_among_many_rows_cost_more_than_they_save() -> None:
    """Draws of the bench in which groups took 0.27, 0.54 and 0.86 of FlashMLA's speed."""
    assert group_for(266, 32, 256, 1_012_243, 132) == 1
    assert group_for(925, 32, 512, 718_600, 132) == 1
    assert group_for(6956, 16, 512, 467_275, 132) == 1
    assert group_for(4096, 16, 2048, 467_275, 132) == 4


def test_plans_are_held_against_the_architecture() -> None:
    with pytest.raises(BudgetError, match="registers"):
        FwdPlan(consumer_registers=240)
    with pytest.raises(ValueError, match="group: expected one of"):
        FwdPlan(group=3)
