"""Which compiled forward a call takes on Hopper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashdsa.backends.sm90.sparse_mla import groups_for, plan_for
from flashdsa.kernels.attention.sm90.core.tile import WITHOUT_ROPE
from flashdsa.kernels.attention.sm90.fwd.plan import FwdPlan
from flashdsa.kernels.catalog import SPARSE_MLA_FWD
from flashdsa.plan import BudgetError


@pytest.mark.parametrize(
    ("queries", "heads", "groups"),
    [
        (4096, 128, (1,)),
        (4096, 32, (2, 1)),
        (4096, 16, (4, 1)),
        (4096, 8, (8, 1)),
        (4096, 4, (1,)),  # a mask has a bit for no more than eight queries
        (4096, 20, (1,)),
        (132, 32, (1,)),  # every query has a streaming multiprocessor of its own
        (133, 32, (1,)),  # a part of a wave is dealt out
        (500, 32, (2, 1)),
        (528, 32, (2,)),
        (528, 16, (4,)),
        (300, 8, (1,)),  # 38 items of up to 8,192 rows
        (860, 16, (4,)),
        (1100, 16, (4, 1)),  # long enough for a sample
    ],
)
def test_queries_are_grouped_and_long_calls_sampled(
    queries: int, heads: int, groups: tuple[int, ...]
) -> None:
    assert groups_for(queries, heads, 2048, 8192, 132) == groups


def test_lists_of_groups_must_not_cost_more_than_they_save() -> None:
    """Draws of the bench in which groups took 0.27, 0.54, 0.86 and 0.77 of FlashMLA's speed."""
    assert groups_for(266, 32, 256, 1_012_243, 132) == (1,)
    assert groups_for(925, 32, 512, 718_600, 132) == (1,)
    assert groups_for(6956, 16, 512, 467_275, 132) == (1,)
    assert groups_for(265, 32, 256, 49_681, 132) == (1,)
    # Over many rows only if a sample says so.
    assert groups_for(4096, 16, 2048, 467_275, 132) == (4, 1)
    assert groups_for(1000, 16, 2048, 200_000, 132) == (4, 1)
    assert groups_for(1000, 16, 2048, 200_000, 132, varied=True) == (4,)
    # One of 67 items of 8,192 slots would take longer than all queries on 132 SMs.
    assert groups_for(266, 16, 2048, 13_383, 132, varied=True) == (1,)
    # 166 items of 24 steps in two rounds took 1.4 of the time of queries one by one.
    assert groups_for(662, 16, 768, 86_738, 132) == (1,)


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


def test_plans_are_held_against_the_architecture() -> None:
    with pytest.raises(BudgetError, match="registers"):
        FwdPlan(consumer_registers=240)
    with pytest.raises(ValueError, match="group: expected one of"):
        FwdPlan(group=3)
