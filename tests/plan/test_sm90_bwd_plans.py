"""The Hopper backwards' plans: what follows from their tile, and tiles that they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import DkvPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.dq.plan import DqPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.plan import ScoresPlan
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import PerItemPlan
from flashdsa.kernels.attention.sm90.core.tile import Tile


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (ScoresPlan, "tile: batches are of 3 chunks; got 8"),
        (DqPlan, "slices: 8 chunks; got 3"),
        (DkvPlan, "slices: 8 chunks; got 3"),
        (PerItemPlan, "tile: one chunk has no value; got .*d_qk=512"),
    ],
)
def test_keys_without_rope_columns_are_refused(plan: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(tile=Tile(512, 512))


def test_chunks_come_as_both_roles_free_them() -> None:
    plan = PerItemPlan()
    assert plan.order == (0, 1, 4, 5, 2, 3, 6, 7, 8)
    assert sorted(plan.order) == list(range(plan.tile.chunks))
    assert [*map(len, plan.low_chunks)] == [2, 2] and [*map(len, plan.high_chunks)] == [2, 2, 1]


def test_a_row_of_the_slots_is_three_eighths_of_fp32() -> None:
    assert PerItemPlan().slot_words * 4 == 864 == 576 * 4 * 3 // 8


def test_slices_of_dims_are_whole_and_the_last_has_fewer_of_the_value() -> None:
    plan = DkvPlan()
    assert plan.slices * plan.slice_dims == plan.tile.d_qk
    assert (plan.slices - 1) * plan.slice_dims + plan.last_value_dims == plan.tile.d_v
