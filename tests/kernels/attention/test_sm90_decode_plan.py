"""Which calls the Hopper decode takes, and how many CTAs share an item."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from flashdsa.backends.emulated.devices import H200
from flashdsa.backends.emulated.runner import Emulator
from flashdsa.backends.sm90.sparse_mla import time_of_items
from flashdsa.backends.sm90.sparse_mla_decode import (
    Dealt,
    ManyItems,
    Plan,
    choose,
    cluster_size_for,
    dealing_pays,
    serves,
    tiles_of,
    time_of_dealing,
)
from flashdsa.kernels.attention.sm90.core.tile import ROWS, Tile
from flashdsa.kernels.attention.sm90.decode.few_heads.dealt.plan import DealtFewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import HEADS, FewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.full.dealt.plan import DealtPlan
from flashdsa.kernels.attention.sm90.decode.full.plan import DecodePlan
from flashdsa.kernels.attention.sm90.decode.shared.plan import CLUSTER_SIZES
from flashdsa.ops.attention import SparseMlaOperands
from flashdsa.plan import BudgetError
from flashdsa.row_formats import ROW_FORMATS, V32, RowFormat
from tests.support.subtests import CaseLoop

CLUSTERS = [
    (1, 2048, 16),
    (7, 2048, 16),
    (8, 2048, 8),
    (16, 2048, 6),
    (17, 2048, 6),
    (32, 2048, 3),
    (64, 2048, 2),
    (66, 2048, 2),
    (67, 2048, 1),
    (1000, 2048, 1),
    (1, 1, 1),
    (1, 129, 3),
    (20, 2048, 5),
    (1, 128 * 17, 16),
    (30, 512, 4),
]


def chosen(
    packed: bool,
    queries: int,
    heads: int,
    topk: int,
    tile: Tile = Tile(),
    form: RowFormat = V32,
    varied: bool = False,
) -> tuple[Plan, int]:
    """The kernel and CTAs of an item on an H200."""
    plan = DecodePlan(packed=packed, form=form, tile=tile)
    return choose(Emulator(), plan, queries, heads, tiles_of(topk), varied=varied)


def test_all_clusters_run_at_once_with_the_fewest_tiles(subtests: CaseLoop) -> None:
    for items, topk, size in CLUSTERS:
        with subtests.test(f"{items=}, {topk=}"):
            assert cluster_size_for(H200.clusters, items, topk) == size


def test_where_the_driver_knows_no_clusters_a_cta_is_alone() -> None:
    assert cluster_size_for({1: 132}, 1, 2048) == 1


@pytest.mark.parametrize(("most", "size"), [(None, 16), (16, 16), (13, 8), (8, 8), (1, 1)])
@pytest.mark.parametrize("heads", [16, 64])
def test_clusters_are_as_large_as_the_environment_allows(
    heads: int, most: int | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASHDSA_MAX_CLUSTER", raising=False)
    if most is not None:
        monkeypatch.setenv("FLASHDSA_MAX_CLUSTER", str(most))
    for packed in (True, False):
        assert chosen(packed, 1, heads, 2048)[1] == size


def test_few_queries_and_packed_rows_are_its_own(subtests: CaseLoop) -> None:
    for queries, heads, packed, taken in [
        (132, 64, False, True),
        (133, 64, False, False),
        (67, 128, False, False),
        (9999, 8, True, True),
    ]:
        with subtests.test(f"{queries} x {heads}, {packed=}"):
            q = torch.empty(queries, heads, 576, dtype=torch.bfloat16, device="meta")
            kv = torch.empty(9, 656, dtype=torch.uint8) if packed else torch.empty(9, 576)
            operands = SparseMlaOperands(
                q, kv, torch.empty(queries, 4, dtype=torch.int32, device="meta")
            )
            assert serves(operands, 132) == taken


def test_tiles_are_dealt_where_that_takes_less_time(subtests: CaseLoop) -> None:
    """Whole waves, and clusters of which all run at once, keep the function that they had. bf16
    rows are not dealt within the SMs: 72 items of 2,048 slots took 62.0 us in place of 60.0."""
    for queries, heads, topk, packed, dealt in [
        (32, 64, 2048, True, False),
        (39, 64, 2048, True, False),
        (40, 64, 2048, True, True),
        (40, 64, 2048, False, False),
        (66, 64, 2048, True, False),
        (67, 64, 2048, True, True),
        (67, 64, 2048, False, False),
        (132, 64, 2048, True, False),
        (132, 64, 2048, False, False),
        (132, 64, 256, True, False),
        (133, 64, 2048, True, True),
        (40, 128, 2048, True, True),
        (64, 128, 2048, True, False),
        (66, 128, 2048, True, False),
        (67, 128, 2048, True, True),
        (100, 128, 2048, True, True),
        (132, 128, 2048, True, False),
        (199, 128, 2048, True, True),
        (132 * 40, 128, 2048, True, False),
        (70, 64, 24, True, False),
        (133, 64, 512, True, True),
    ]:
        with subtests.test(f"{queries} x {heads}, {topk=}, {packed=}"):
            plan, size = chosen(packed, queries, heads, topk)
            assert isinstance(plan, Dealt) == dealt
            assert plan.packed == packed
            assert size == 1 or not dealt


@pytest.mark.parametrize(
    ("queries", "heads", "plan"),
    [
        (8, 16, FewHeadsPlan),
        (132, 16, FewHeadsPlan),
        (133, 16, DealtFewHeadsPlan),
        (200, 8, DealtFewHeadsPlan),
        (32, 32, FewHeadsPlan),
        (133, 32, DealtPlan),
        (2, 64, FewHeadsPlan),
        (4, 64, DecodePlan),
    ],
)
def test_who_takes_few_heads_of_long_lists(queries: int, heads: int, plan: type) -> None:
    """Items of 16 heads as long as their CTAs run at once; then those of 64."""
    assert type(chosen(True, queries, heads, 2048)[0]) is plan


@pytest.mark.parametrize("heads", [64, 128])
def test_short_lists_of_few_queries_are_taken_by_16_heads(heads: int) -> None:
    """They take 7 us in place of 10."""
    for queries in (1, 4, 8):
        plan, size = chosen(True, queries, heads, 128)
        assert type(plan) is FewHeadsPlan
        assert size == 2
    assert type(chosen(True, 48, heads, 128)[0]) is DecodePlan


@pytest.mark.parametrize("name", ["v32_no_rope", "v4", "v41", "v41_fp4"])
def test_few_heads_have_few_scales_a_row(name: str) -> None:
    """P is stored times each scale of a key, and 64 dims have one: other formats take the kernel of
    64 heads."""
    form, tile = ROW_FORMATS[name], Tile(512)
    for queries, heads in ((8, 16), (32, 32)):
        plan = chosen(True, queries, heads, 2048, tile, form)[0]
        assert plan.form == form and plan.tile == tile
        assert isinstance(plan, FewHeadsPlan) == (form.num_scales < 8)
    plan = chosen(True, 133, 16, 2048, tile, form)[0]
    assert isinstance(plan, DealtFewHeadsPlan) == (form.num_scales < 8)


OF_ONE_SOURCE = DealtPlan(tile=Tile(512))
JOINED = DealtPlan(joined=True, tile=Tile(512))


@pytest.mark.parametrize(
    ("items", "tiles", "dealt"),
    [
        (133, 2, False),
        (140, 32, True),
        (200, 32, True),
        (240, 32, False),
        (264, 6, False),
        (397, 16, True),
        (660, 32, False),
        (812, 32, True),
        (925, 32, False),
    ],
)
def test_which_bf16_rows_of_more_items_than_sms_are_dealt(
    items: int, tiles: int, dealt: bool
) -> None:
    by_forward = time_of_items(items, 64, tiles * 64, 132)
    call = ManyItems(items, 64, 8192, tiles, tiles, by_forward)
    assert dealing_pays(132, OF_ONE_SOURCE, call) == dealt


@pytest.mark.parametrize(("queries", "topk"), [(857, 128), (660, 2048)])
def test_what_the_forward_overlaps_is_not_dealt(queries: int, topk: int) -> None:
    call = ManyItems(queries, 64, 8192, topk // 64, topk // 64, math.inf)
    assert dealing_pays(132, OF_ONE_SOURCE, call)
    by_forward = time_of_items(queries, 64, topk, 132)
    assert not dealing_pays(132, OF_ONE_SOURCE, call._replace(by_forward=by_forward))
    assert not dealing_pays(132, OF_ONE_SOURCE, call._replace(num_queries=859))


def test_far_rows_are_dealt_where_that_saves_much_or_queries_share_few() -> None:
    """The forward's neighbours find shared rows in the second-level cache."""
    call = ManyItems(812, 64, 65_536, 32, 32, time_of_items(812, 64, 2048, 132))
    assert dealing_pays(132, OF_ONE_SOURCE, call)
    assert not dealing_pays(132, OF_ONE_SOURCE, call._replace(num_keys=65_537))
    assert dealing_pays(132, OF_ONE_SOURCE, call._replace(num_keys=812 * 2048))
    much = call._replace(num_keys=65_537, by_forward=1.2 * call.by_forward)
    assert dealing_pays(132, OF_ONE_SOURCE, much)


def test_what_may_not_be_dealt() -> None:
    """Two sources of rows with RoPE; so many slots, at most, that the kernel cannot count shares of
    them; more turns than dealing gains from; a query of more items than SMs."""
    assert time_of_dealing(0, 132, 5, 133, 32) == math.inf
    call = ManyItems(70, 128, 8192, 32, 32, time_of_items(70, 128, 2048, 132))
    assert dealing_pays(132, JOINED, call)
    for plan, other in (
        (replace(JOINED, tile=Tile()), call),
        (JOINED, call._replace(most_tiles=1 << 20)),
        (JOINED, call._replace(num_queries=430)),
    ):
        assert not dealing_pays(132, plan, other)


def test_lists_that_may_be_shorter_are_dealt_if_they_are_long() -> None:
    """Whole items of a full wave take no longer if no list is shorter; short lists stay whole."""
    for queries, topk, full, varied in (
        (132, 2048, False, True),
        (132, 512, False, False),
        (400, 256, True, False),
    ):
        for varies, dealt in ((False, full), (True, varied)):
            plan, _ = chosen(True, queries, 64, topk, varied=varies)
            assert isinstance(plan, Dealt) == dealt


def test_what_a_cluster_sends_fits_into_a_tile(subtests: CaseLoop) -> None:
    for size, d_qk in product(CLUSTER_SIZES, (512, 576)):
        with subtests.test(f"{size=}, {d_qk=}"):
            plan = DecodePlan(tile=Tile(d_qk))
            largest = -(-plan.dim_groups // size)
            assert size * ROWS * largest * 16 <= plan.staged_at
            assert plan.staged_at + ROWS * 512 * 2 <= plan.buffers[1].bytes


def test_halves_of_few_heads_lie_between_what_comes_and_what_is_staged(subtests: CaseLoop) -> None:
    """Other CTAs send while a CTA's consumers still add up their halves."""
    for size, form in product(CLUSTER_SIZES, FewHeadsPlan.formats):
        with subtests.test(f"{size=}, {form.name}"):
            plan = FewHeadsPlan(form)
            (region, offset), _ = plan.halves
            assert region == "k"
            assert size * -(-plan.dim_groups // size) * HEADS * 16 <= offset
            assert offset + 128 * (4 * HEADS // 2) * 4 <= plan.staged_at
            k = next(region for region in plan.buffers if region.name == "k")
            assert plan.staged_at + HEADS * 512 * 2 <= k.bytes


@pytest.mark.parametrize("registers", [240, 216])
def test_plans_are_held_against_the_architecture(registers: int) -> None:
    """216 would fit into the SM, not into what the CTA has at its launch."""
    with pytest.raises(BudgetError, match="registers"):
        DecodePlan(consumer0_registers=registers)
