"""The Blackwell backward with split heads on ptxemu: the reference design's form."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache

import pytest
from click.testing import CliRunner

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from flashdsa.backends.emulated.runner import compiled
from flashdsa.plan import BudgetError
from flashdsa.verify.compare import failures
from flashdsa.verify.sparse_mla_cases import SparseMlaCase
from ptxemu import Policy
from workbench.__main__ import cli
from workbench.lab import split_heads
from workbench.lab.kernels.split_heads.mma import products_of
from workbench.lab.kernels.split_heads.plan import PARTS, SPLIT_HEADS, HeadsPlan
from workbench.lab.split_heads import judge

PLAN = HeadsPlan()
CASES = [
    # name, S, S_kv, H, topk
    SparseMlaCase("fewer keys than slots", 1, 20, 128, 64, invalid=True, poison=True),
    SparseMlaCase("2048 slots", 1, 1500, 128, 2048, duplicates=True, invalid=True),
]


@pytest.mark.slow
def test_the_command_judges_three_blocks_in_which_every_ring_goes_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(split_heads, "judge", cache(judge))  # one run for both forms
    shown, run = (
        CliRunner().invoke(cli, ["lab", "split-heads", *form]) for form in ([], ["--json"])
    )
    assert (shown.exit_code, run.exit_code) == (0, 0) and "dKV" in shown.output, run.output
    document = json.loads(run.stdout)
    assert [verdict["output"] for verdict in document["verdicts"]] == ["dQ", "dKV"]
    assert (document["passed"], document["findings"], document["grid"][0]) == (True, [], 4)
    assert (document["plan"]["smem"]["total"], PLAN.tmem.allocated) == (222_148, 512)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["eager", "late"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_right_whenever_asynchronous_work_happens(
    case: SparseMlaCase, when: str
) -> None:
    judged = judge(case, Policy(asynchronous=when, seed=3))
    assert (failures(judged.verdicts), judged.findings) == ([], [])


@pytest.mark.slow
def test_the_instructions_that_make_it_the_reference_design() -> None:
    """S^T, dS^T and dS are A in tensor memory; keys and dKV are read in the peer; dQ leaves by bulk
    copies, dKV by bulk reduce-adds, and by nothing else."""
    text = str(compiled(SPLIT_HEADS, PLAN).__ptx__)
    assert set(re.findall(r"cta_group::\d", text)) == {"cta_group::1"}
    products = re.findall(r"tcgen05\.mma(\.ws)?\.cta\S*\s+\[[^]]+\], (\[?)%", text)
    # P and dP; a step of 16 heads of five products of dKV, one of 16 keys of three of dQ
    assert products.count(("", "")) == 36 + 32
    assert products.count((".ws", "[")) == len(products) - 68 == 5 * 4 + 3 * 2
    assert [(product.column, product.columns) for product in products_of(PLAN).dq] == [
        (0, 128), (128, 128), (256, 32),
    ]  # fmt: skip
    assert len(re.findall(r"ld\.shared::cluster\.v4", text)) == 9 + (2 * 64 + 16) // 4
    reduce_add = r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32"
    assert len(re.findall(reduce_add, text)) == PARTS
    assert "cp.async.bulk.global.shared::cta.bulk_group" in text
    assert not re.search(r"\b(red|atom)\.\S*global", text)


def test_a_plan_beyond_the_architecture_is_refused() -> None:
    with pytest.raises(BudgetError, match="rows is the first region beyond"):
        replace(PLAN, index_stages=100)
    with pytest.raises(BudgetError, match="registers: 66560 planned"):
        replace(PLAN, softmax_registers=144)
