"""The Blackwell backward with split heads on ptxemu: the reference design's form."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from flashdsa.backends.emulated.runner import Emulator, emulation
from flashdsa.backends.sm100 import mla_bwd as backend
from flashdsa.kernels.attention.sm100.bwd.heads.plan import PARTS, HeadsPlan
from flashdsa.kernels.attention.sm100.bwd.heads.products import products_of
from flashdsa.kernels.attention.sm100.core.tile import CLUSTER, PairTile
from flashdsa.kernels.catalog import MLA_BWD_HEADS
from flashdsa.plan import BudgetError
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import check_backward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from ptxemu import Policy
from tests.kernels.assembled import assert_it_assembles_without_spills
from tests.kernels.attention import blackwell_backward
from tests.kernels.features import EVERY_FEATURE

PLAN = HeadsPlan()
HEADS = 128
CASES = [
    # name, S, S_kv, H, topk
    SparseMlaCase("32 slots: one block", 1, 50, HEADS, 32),
    SparseMlaCase("64 slots: either CTA owns a block", 1, 40, HEADS, 64, duplicates=True),
    SparseMlaCase("fewer keys than slots", 1, 20, HEADS, 64, invalid=True, poison=True),
    SparseMlaCase("one key", 1, 1, HEADS, 32, duplicates=True, cancels=True),
    SparseMlaCase("2048 slots", 1, 1500, HEADS, 2048, duplicates=True, invalid=True),
]


def launch(case: SparseMlaCase, policy: Policy | None = None) -> Emulator:
    """The case on the emulator; its gradients are judged, and nothing may be found."""
    return blackwell_backward.launch(case, MLA_BWD_HEADS, PLAN, policy)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_within_the_contract_and_nothing_is_found(case: SparseMlaCase) -> None:
    launch(case)


@pytest.mark.parametrize("when", [pytest.param("eager", marks=pytest.mark.slow), "late"])
def test_it_does_not_matter_when_asynchronous_work_happens(when: str) -> None:
    """Three blocks: every ring and every barrier goes round."""
    case = SparseMlaCase("two queries", 2, 90, HEADS, 96, duplicates=True)
    result = launch(case, Policy(asynchronous=when, seed=3))
    assert result.setups[-1].grid[0] == 2 * CLUSTER


@pytest.mark.slow
def test_the_public_operation_could_take_it_with_every_feature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend, "MLA_BWD", MLA_BWD_HEADS)
    monkeypatch.setattr(backend, "PLANS", {(HEADS, False): PLAN})
    case = SparseMlaCase("every feature", 3, 60, HEADS, 40, attn_sink="infinite", **EVERY_FEATURE)
    with emulation() as emulator:
        inputs = make_sparse_mla_inputs(case, 0, "cpu")
        assert failures(check_backward(inputs, "emulate-sm100")) == []
    assert "heads_kernel" in emulator.setups[-1].kernel


def test_the_launch_is_what_the_plan_says() -> None:
    text = blackwell_backward.ptx(MLA_BWD_HEADS, PLAN)
    blackwell_backward.assert_launched_as_planned(launch(CASES[0]), text, PLAN)


def test_the_instructions_that_make_it_the_reference_design() -> None:
    """S^T, dS^T and dS are A in tensor memory; keys and dKV are read in the peer; dQ leaves by bulk
    copies, dKV by bulk reduce-adds, and by nothing else."""
    text = blackwell_backward.ptx(MLA_BWD_HEADS, PLAN)
    assert set(re.findall(r"cta_group::\d", text)) == {"cta_group::1"}
    products = re.findall(r"tcgen05\.mma(\.ws)?\.cta\S*\s+\[[^]]+\], (\[?)%", text)
    # P and dP; a step of 16 heads of five products of dKV, one of 16 keys of three of dQ
    assert products.count(("", "")) == 36 + 32
    assert products.count((".ws", "[")) == len(products) - 68 == 5 * 4 + 3 * 2
    assert len(re.findall(r"ld\.shared::cluster\.v4", text)) == 9 + (2 * 64 + 16) // 4
    reduce_add = r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32"
    assert len(re.findall(reduce_add, text)) == PARTS
    assert "cp.async.bulk.global.shared::cta.bulk_group" in text
    assert not re.search(r"\b(red|atom)\.\S*global", text)


def test_dq_is_three_products_of_128_128_and_32_columns() -> None:
    dq = products_of(PLAN).dq
    assert [product.columns for product in dq] == [128, 128, 32]
    assert [product.column for product in dq] == [0, 128, 256]
    assert sum(product.n for product in dq) == 576


def test_every_budget_is_kept() -> None:
    assert (PLAN.smem.total, PLAN.tmem.allocated) == (222_148, 512)
    used = [(region.column, region.columns) for region in PLAN.tmem.regions]
    assert [start + size for start, size in used] == [start for start, _ in used[1:]] + [512]
    with pytest.raises(BudgetError, match="rows is the first region beyond"):
        replace(PLAN, index_stages=100)
    with pytest.raises(BudgetError, match="registers: 66560 planned"):
        replace(PLAN, softmax_registers=144)
    with pytest.raises(ValueError, match="expected one a lane, 32; got 64"):
        replace(PLAN, tile=PairTile(64))


def test_the_newest_assembler_takes_it_and_nothing_is_spilled(tmp_path: Path) -> None:
    text = blackwell_backward.ptx(MLA_BWD_HEADS, PLAN)
    assert_it_assembles_without_spills(text, tmp_path, "sm_100a", 2)
