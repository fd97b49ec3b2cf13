"""The Blackwell forward's plan: what fits, what follows from the roles, what is refused."""

from __future__ import annotations

import pytest

from flashdsa.hw import SM100
from flashdsa.kernels.attention.sm100.core.tile import GROUPS, HEADS
from flashdsa.kernels.attention.sm100.fwd.plan import FwdPlan
from flashdsa.kernels.attention.sm100.fwd.products import products_of

PLAN = FwdPlan()


def test_every_budget_is_kept() -> None:
    for group in GROUPS:
        plan = FwdPlan(group=group)
        assert plan.smem.total <= SM100.smem_bytes
        assert plan.tmem.allocated == SM100.tmem_columns
    assert HEADS == (128, 64, 32, 16)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"kv_stages": 6}, "p is the first region beyond"),
        ({"kv_stages": 2}, "kv_stages: expected at least 3; got 2"),
        ({"group": 3}, "group: expected one of"),
        ({"softmax_registers": 256}, "multiples of 8 from 24 to 255|registers: softmax"),
    ],
)
def test_what_the_architecture_does_not_have_is_refused(
    choices: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FwdPlan(**choices)


def test_arrivals_of_both_ctas_are_counted_by_the_first() -> None:
    arrivals = {barrier.name: barrier.arrivals for barrier in PLAN.barriers}
    assert (arrivals["q_stored"], arrivals["s_free"], arrivals["p_ready"]) == (8, 8, 8)
    assert (arrivals["q_read"], arrivals["masks_free"], arrivals["kv_full"]) == (4, 4, 1)
    (kv_full,) = (barrier for barrier in PLAN.barriers if barrier.name == "kv_full")
    assert kv_full.transaction_bytes == 64 * 576 * 2


def test_q_lies_in_whole_stages_of_keys() -> None:
    """It is there before the keys that come last into the first round."""
    assert PLAN.q_stages * PLAN.tile.bytes == 64 * 576 * 2
    assert PLAN.kv_stages > PLAN.q_stages


def test_products_of_a_tile_are_those_of_the_forward() -> None:
    """2 M N K over the pair: every score comes as two halves of its dims."""
    p = products_of(PLAN)
    scores = sum(one.m * one.n * one.k for one in (p.qk, p.qk_rope))
    values = sum(one.m * one.n * one.k for one in p.pv)
    assert scores == 128 * 64 * 576
    assert values == 128 * 64 * 512
    assert {one.cta_group for one in (p.qk, p.qk_rope, *p.pv)} == {2}
    assert {one.data_path for one in (p.qk, p.qk_rope, *p.pv)} == {"B"}


def test_where_scores_and_o_come_to_lie() -> None:
    """Halves of a score in lanes m and m + 64; dims 256 to 511 of O in the upper lanes."""
    p, column = products_of(PLAN), PLAN.tmem.column
    assert p.qk.cell(5, column("s") + 7) == (5, 7)
    assert p.qk.cell(5 + 64, column("s") + 7) == (5, 64 + 7)
    first, second = p.pv
    # N of a product: 128 dims of the first CTA, then 128 of the second
    assert first.cell(5 + 64, column("o")) == (5, 128)
    assert second.cell(5, column("o") + 128) == (5, 0)
