"""Which kernel serves a forward or decode on Hopper: the choice as a table, and its promises."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf
from typing import Any

import pytest

from flashdsa.backends.emulated.devices import H200
from flashdsa.backends.emulated.runner import Emulator
from flashdsa.backends.sm90 import sparse_mla_ways
from flashdsa.backends.sm90.sparse_mla_ways import Call, choose, invariant_way, ways
from flashdsa.heuristics.h200 import SPARSE_MLA
from flashdsa.kernels.attention.sm90.core.tile import ROWS, Tile
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import HEADS, FewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.full.plan import DecodePlan
from flashdsa.kernels.attention.sm90.decode.shared.plan import CLUSTER_SIZES
from flashdsa.kernels.attention.sm90.fwd.plan import FwdPlan
from flashdsa.kernels.catalog import variants_of
from flashdsa.plan import BudgetError
from flashdsa.row_formats import ROW_FORMATS
from tests.support.subtests import CaseLoop


def call(
    queries: int, heads: int, slots: int, keys: int = 8192, form: str = "", **facts: Any
) -> Call:
    """A call of lists of one source, with lengths if not said otherwise."""
    facts = {"lengths": True, "lacks_lengths": False, **facts}
    d_qk = facts.pop("d_qk", 512 if form not in ("", "v32") else 576)
    lists = (slots, 0)
    return Call(queries, heads, d_qk, lists, lists, keys, ROW_FORMATS.get(form), **facts)


FULL = {"lengths": False, "lacks_lengths": False}
"""No list may be shorter: ranges' calls, or such as the device has looked at."""
LACKS = {"lengths": False, "lacks_lengths": True}
TABLE = [
    # bf16: no more items than SMs
    (call(1, 64, 2048), "mla_decode x 16"),
    (call(8, 128, 2048), "mla_decode x 6"),
    (call(30, 64, 512), "mla_decode x 4"),
    (call(32, 64, 2048), "mla_decode x 3"),
    (call(67, 64, 2048), "mla_decode"),
    (call(1, 64, 128), "mla_decode"),
    (call(132, 32, 2048), "mla_decode"),
    (call(132, 64, 2048, max_logits=True), "mla_fwd"),
    # bf16: more
    (call(4096, 128, 2048), "mla_fwd_drawn"),
    (call(4096, 20, 2048), "mla_fwd_drawn"),
    (call(4096, 4, 2048), "mla_fwd_drawn"),
    (call(133, 64, 128, **FULL), "mla_fwd"),
    (call(140, 64, 2048, **FULL), "mla_decode_stream_k"),
    (call(240, 64, 2048, **FULL), "mla_fwd"),
    (call(812, 64, 2048, **FULL), "mla_decode_stream_k"),
    (call(812, 64, 2048, 65_537, **FULL), "mla_fwd"),  # the second-level cache finds shared rows
    (call(925, 64, 2048, **FULL), "mla_fwd"),
    (call(140, 64, 2048), "mla_fwd_drawn"),
    (call(140, 64, 2048, **LACKS), "mla_used_slots, mla_decode_stream_k"),
    (call(133, 64, 128, **LACKS), "mla_fwd"),
    # groups of queries of few heads
    (call(4096, 32, 2048), "mla_fwd_group2_drawn or mla_fwd_drawn by a sample"),
    (call(4096, 16, 2048), "mla_fwd_group4_drawn or mla_fwd_drawn by a sample"),
    (call(4096, 8, 2048), "mla_fwd_group8_drawn or mla_fwd_drawn by a sample"),
    (call(528, 32, 2048, **FULL), "mla_fwd_group2"),
    (call(860, 16, 2048), "mla_fwd_group4_drawn"),
    (call(300, 8, 2048, **FULL), "mla_decode_stream_k"),  # 38 items of up to 8,192 rows
    (call(266, 16, 2048, 13_383), "mla_fwd_drawn"),
    # lists of groups must not cost more than they save
    (call(266, 32, 256, 1_012_243, **FULL), "mla_fwd"),
    (call(6956, 16, 512, 467_275), "mla_fwd_drawn"),
    (call(1000, 16, 2048, 200_000), "mla_fwd_group4_drawn"),
    # packed rows
    (call(1, 64, 2048, form="v32"), "mla_decode_heads16 x 16"),
    (call(4, 64, 2048, form="v32"), "mla_decode_packed x 16"),
    (call(4, 64, 128, form="v32"), "mla_decode_heads16 x 2"),
    (call(48, 64, 128, form="v32"), "mla_decode_packed"),
    (call(32, 64, 2048, form="v32"), "mla_decode_packed x 3"),
    (call(40, 64, 2048, form="v32"), "mla_decode_stream_k_packed"),
    (call(66, 64, 2048, form="v32"), "mla_decode_packed x 2"),
    (call(132, 64, 2048, form="v32", **FULL), "mla_decode_packed"),
    (call(132, 64, 2048, form="v32"), "mla_decode_stream_k_packed"),
    (call(132, 64, 256, form="v32"), "mla_decode_packed"),
    (call(400, 64, 256, form="v32", **FULL), "mla_decode_stream_k_packed"),
    (call(400, 64, 256, form="v32"), "mla_decode_packed"),
    (call(5280, 128, 2048, form="v32"), "mla_decode_packed"),
    (call(132, 128, 2048, form="v32", **LACKS), "mla_used_slots, mla_decode_stream_k_packed"),
    (call(8, 16, 2048, form="v32"), "mla_decode_heads16 x 8"),
    (call(133, 16, 2048, form="v32"), "mla_decode_stream_k_heads16"),
    (call(32, 32, 2048, form="v4"), "mla_decode_heads16_v4 x 2"),
    # P is stored times each scale of a key, and of these formats 64 dims have one
    (call(8, 16, 2048, form="v41"), "mla_decode_v41 x 8"),
    (call(133, 16, 2048, form="v41_fp4"), "mla_decode_stream_k_v41_fp4"),
    # two sources
    (call(70, 128, 2048, joined=True, d_qk=512, **FULL), "mla_decode_stream_k_512_joined"),
    (call(70, 128, 2048, joined=True, **FULL), "mla_fwd_joined"),
    (call(430, 128, 2048, joined=True, d_qk=512, **FULL), "mla_fwd_512_joined"),
    (call(8, 64, 2048, form="v41", joined=True, extra="v41_fp4"),
     "mla_decode_v41_and_v41_fp4_joined x 8"),
    (call(8, 64, 2048, form="v41_fp4", joined=True, extra="v41"),
     "mla_decode_v41_and_v41_fp4_joined x 8"),
]  # fmt: skip


def test_who_serves_what(subtests: CaseLoop) -> None:
    for one, served_by in TABLE:
        with subtests.test(f"{one.queries} x {one.heads}, {sum(one.slots)} of {one.keys}"):
            assert str(choose(Emulator(), one)) == served_by


def test_every_way_of_a_call_is_compiled(subtests: CaseLoop) -> None:
    names = variants_of("sm90").keys()
    for one, _ in TABLE:
        for way in ways(Emulator(), one):
            plan, single_cta = way.plan, way.cluster_size == 1
            if type(plan) is DecodePlan:
                plan = replace(plan, single_cta=single_cta)
            with subtests.test(f"{way}"):
                assert plan.name in names
                assert way.instead is None or way.instead.name in names


def test_a_query_of_more_items_than_sms_or_slots_takes_no_stream_k() -> None:
    """Nor are so many slots that the kernel cannot count shares of them."""
    many = call(5, 133 * 64, 2048, form="v32")
    assert [time for way, time in ways(Emulator(), many).items() if "stream-K" in way.kind] == [inf]
    long = call(70, 128, 2048, joined=True, d_qk=512, **FULL)._replace(most_slots=(1 << 26, 0))
    assert not any("stream-K" in way.kind for way in ways(Emulator(), long))


@pytest.mark.parametrize(("most", "size"), [(None, 16), (16, 16), (13, 8), (8, 8), (1, 1)])
@pytest.mark.parametrize("form", ["", "v32"])
def test_clusters_are_as_large_as_the_environment_allows(
    form: str, most: int | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASHDSA_MAX_CLUSTER", raising=False)
    if most is not None:
        monkeypatch.setenv("FLASHDSA_MAX_CLUSTER", str(most))
    for heads in (16, 64):
        assert choose(Emulator(), call(1, heads, 2048, form=form)).cluster_size == size


def test_clusters_run_at_once_with_the_fewest_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for items, topk, size in [
        (7, 2048, 16), (8, 2048, 8), (17, 2048, 6), (64, 2048, 2), (66, 2048, 2), (1, 129, 3),
        (20, 2048, 5), (1, 128 * 17, 16),
    ]:  # fmt: skip
        assert choose(Emulator(), call(items, 64, topk)).cluster_size == size
    monkeypatch.setattr(sparse_mla_ways, "capacity_of", lambda *_: {1: H200.num_sms})
    assert choose(Emulator(), call(1, 64, 2048)).cluster_size == 1


def test_bits_that_do_not_depend_on_others_have_one_way_a_number_of_heads() -> None:
    for heads, form, name in [
        (64, "", "mla_fwd"), (16, "", "mla_fwd"),
        (64, "v32", "mla_used_slots, mla_decode_packed x 4"),
        (16, "v32", "mla_used_slots, mla_decode_heads16 x 4"),
    ]:  # fmt: skip
        for queries, topk in product((1, 67, 1000), (64, 2048)):
            one = call(queries, heads, topk, form=form)
            assert str(invariant_way(Emulator(), one)) == name


def test_constants_of_another_gpu_change_the_choice() -> None:
    one = call(140, 64, 2048, **FULL)
    slow = replace(SPARSE_MLA, stream_k_code=1000.0)
    found = ways(Emulator(), one, slow)
    assert min(found, key=found.__getitem__).plan == FwdPlan()


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
    with pytest.raises(BudgetError, match="registers"):
        FwdPlan(consumer_registers=240)
    with pytest.raises(ValueError, match="group: expected one of"):
        FwdPlan(group=3)
