"""The Hopper backwards' plans: what follows from their tile, and tiles that they refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import DkvPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.dq.plan import DqPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.plan import ScoresPlan
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import PerItemPlan
from flashdsa.kernels.attention.sm90.core.tile import WITHOUT_ROPE, Tile


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (partial(DqPlan, slices=6), "slices: 9 chunks; got 6"),
        (partial(DkvPlan, slices=5), "slices: 9 chunks; got 5"),
        (partial(PerItemPlan, tile=Tile(640)), "tile: at most one chunk has no value; got .*640"),
    ],
)
def test_tiles_and_slices_that_do_not_fit_are_refused(
    plan: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan()


@pytest.mark.parametrize(
    ("tile", "order"),
    [(Tile(), (0, 1, 4, 5, 2, 3, 6, 7, 8)), (WITHOUT_ROPE, (0, 1, 4, 5, 2, 3, 6, 7))],
)
def test_chunks_come_as_both_roles_free_them(tile: Tile, order: tuple[int, ...]) -> None:
    plan = PerItemPlan(tile=tile)
    assert plan.order == order
    assert sorted(plan.order) == list(range(plan.tile.chunks))
    assert [*map(len, plan.low_chunks)] == [2, 2]
    assert [*map(len, plan.high_chunks)] == [2, 2, 1][: len(plan.high_chunks)]


def test_registers_go_to_the_role_that_has_more_accumulators() -> None:
    with_rope, without = PerItemPlan(), PerItemPlan(tile=WITHOUT_ROPE)
    assert [role.registers for role in with_rope.roles] == [32, 192, 192, 96]
    assert [role.registers for role in without.roles] == [32, 200, 184, 96]


@pytest.mark.parametrize(("tile", "row"), [(Tile(), 864), (WITHOUT_ROPE, 768)])
def test_a_row_of_the_slots_is_three_eighths_of_fp32(tile: Tile, row: int) -> None:
    assert PerItemPlan(tile=tile).slot_words * 4 == row == tile.d_qk * 4 * 3 // 8


@pytest.mark.parametrize(("tile", "last"), [(Tile(), 192), (WITHOUT_ROPE, 128)])
def test_the_last_slice_has_fewer_dims_and_still_fewer_of_the_value(tile: Tile, last: int) -> None:
    plan = DkvPlan(tile)
    assert plan.last_dims == DqPlan(tile).last_dims == last
    assert (plan.slices - 1) * plan.slice_dims + last == tile.d_qk
    assert (plan.slices - 1) * plan.slice_dims + plan.last_value_dims == tile.d_v


@pytest.mark.parametrize(("tile", "batch", "slots"), [(Tile(), 3, 10), (WITHOUT_ROPE, 2, 12)])
def test_the_ring_of_the_scores_takes_what_q_leaves(tile: Tile, batch: int, slots: int) -> None:
    plan = ScoresPlan(tile)
    assert (plan.batch_chunks, plan.slots) == (batch, slots)
