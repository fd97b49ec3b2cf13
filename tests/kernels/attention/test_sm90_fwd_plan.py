"""Which compiled forward a call takes on Hopper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashdsa.backends.sm90.sparse_mla import group_for, is_long, plan_for
from flashdsa.kernels.attention.sm90.core.tile import WITHOUT_ROPE
from flashdsa.kernels.attention.sm90.fwd.plan import FwdPlan
from flashdsa.kernels.catalog import SPARSE_MLA_FWD
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


@pytest.mark.parametrize(
    ("group", "queries", "heads", "drawn"),
    [(1, 132, 64, False), (1, 133, 64, True), (1, 66, 128, False), (1, 67, 128, True),
     (4, 528, 16, False), (4, 529, 16, True)],
)  # fmt: skip
def test_items_are_drawn_if_lengths_are_given_and_sms_have_several(
    group: int, queries: int, heads: int, drawn: bool
) -> None:
    assert plan_for(group, queries, heads, 132, varied=True).drawn == drawn
    assert not plan_for(group, queries, heads, 132).drawn


@pytest.mark.parametrize(
    ("group", "max_logits", "varied", "plan"),
    [(1, False, False, FwdPlan()), (1, False, True, FwdPlan(drawn=True)),
     (1, True, False, FwdPlan(1, True, True)), (4, False, False, FwdPlan(4, True, True))],
)  # fmt: skip
def test_rare_choices_have_one_plan_without_rope_columns(
    group: int, max_logits: bool, varied: bool, plan: FwdPlan
) -> None:
    chosen = plan_for(group, 4096, 64 // group, 132, max_logits, WITHOUT_ROPE, varied=varied)
    assert chosen == replace(plan, tile=WITHOUT_ROPE)
    assert chosen in SPARSE_MLA_FWD.plans


def test_groups_are_sampled_where_that_is_small_beside_the_call() -> None:
    """Seven items of 16 steps on an SM take 0.44 ms, six take 0.38."""
    assert is_long(793, 2048, 132) and not is_long(792, 2048, 132)
    assert is_long(7920, 128, 132) and not is_long(4096, 128, 132)


def test_plans_are_held_against_the_architecture() -> None:
    with pytest.raises(BudgetError, match="registers"):
        FwdPlan(consumer_registers=240)
    with pytest.raises(ValueError, match="group: expected one of"):
        FwdPlan(group=3)
