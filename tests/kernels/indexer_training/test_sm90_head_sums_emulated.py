"""Hopper's kernels of target, scores and divergence on ptxemu: within the contract, no finding."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

import flashdsa
from flashdsa.backends.emulated.devices import SMALL, Device
from flashdsa.backends.emulated.runner import EmulatedProgress, Emulator, emulation
from flashdsa.backends.sm90 import indexer_training
from flashdsa.kernels.catalog import ATTENTION_TARGET, INDEXER_SCORES
from flashdsa.kernels.indexer_training.sm90.head_sums.plan import TargetPlan
from flashdsa.kernels.indexer_training.sm90.scores.plan import ScoresPlan
from flashdsa.verify import judge_indexer_training as judge
from flashdsa.verify.compare import failures
from flashdsa.verify.draw_rows import invalid_values
from flashdsa.verify.indexer_training_cases import (
    IndexerTrainingCase,
    IndexerTrainingInputs,
    make_indexer_training_inputs,
)
from flashdsa.verify.sparse_mla_cases import SparseMlaCase
from ptxemu import Policy
from tests.kernels.findings import EVERY_FEATURE
from tests.support.cases import INDEXER_TRAINING_CASES
from tests.support.compilations import ptx_of

LATER = pytest.mark.slow
ONE_SM = Device(1, {1: 1})
"""Every query is the same CTA's, one behind the other."""
ALL_AT_ONCE = IndexerTrainingCase(
    SparseMlaCase("every feature", 4, 60, 5, 140, attn_sink="infinite", **EVERY_FEATURE),
    index_heads=13,
)
SEVERAL_STEPS = IndexerTrainingCase(
    SparseMlaCase("several steps", 3, 90, 8, 330, invalid=True, poison=True), index_heads=16
)
CHECKS = {"target": judge.check_target, "scores": judge.check_index_scores}


def run(
    case: IndexerTrainingCase, what: str, policy: Policy | None = None, device: Device = ONE_SM
) -> Emulator:
    """The case's results are judged, and nothing may be found."""
    inputs = make_indexer_training_inputs(case, 0)
    with emulation(device, policy=policy, on_finding="collect") as emulator:
        assert failures(CHECKS[what](inputs, "emulate-sm90")) == []
    assert [str(finding) for finding in emulator.findings] == []
    return emulator


@pytest.mark.parametrize("what", CHECKS)
def test_every_feature(what: str) -> None:
    """Lengths, sinks, gaps, a number of heads that no product has, queries without a valid slot."""
    run(ALL_AT_ONCE, what)


@pytest.mark.parametrize("when", [pytest.param("eager", marks=LATER), "late"])
@pytest.mark.parametrize("what", CHECKS)
def test_it_does_not_matter_when_asynchronous_work_happens(what: str, when: str) -> None:
    run(SEVERAL_STEPS, what, Policy(asynchronous=when, seed=3))


@pytest.mark.parametrize("queries", [pytest.param(2, marks=LATER), 5])
def test_the_last_queries_are_shared_by_all_ctas(queries: int) -> None:
    """Of four: each of two queries by two, the fifth by all, whose tiles are fewer or more."""
    case = SparseMlaCase("shared", queries, 70, 8, 330, invalid=True, topk_length=True)
    (setup,) = run(IndexerTrainingCase(case), "target", device=SMALL).setups
    assert setup.grid[0] == SMALL.num_sms


@pytest.mark.parametrize(("queries", "parts"), [pytest.param(2, 6, marks=LATER), (5, 3)])
def test_the_slots_of_few_queries_are_shared_by_several_ctas(queries: int, parts: int) -> None:
    """Six tiles of a query, some without a slot in use."""
    case = SparseMlaCase("shared", queries, 70, 8, 330, invalid=True, topk_length=True)
    (setup,) = run(IndexerTrainingCase(case), "scores", device=SMALL).setups
    assert setup.grid[0] == queries * parts


@pytest.mark.parametrize(
    ("queries", "tiles", "parts"),
    [
        *((1, 32, 32), (100, 32, 5), (264, 32, 2), (276, 32, 3), (473, 32, 1), (653, 32, 2)),
        *((1000, 32, 1), (4096, 32, 1), (653, 4, 1), (9, 1, 1)),
    ],
)
def test_parts_leave_few_sms_idle(queries: int, tiles: int, parts: int) -> None:
    """Of an H200, with four CTAs an SM."""
    assert indexer_training.parts_for(queries, tiles, 4, 132) == parts


def test_all_heads_of_a_model() -> None:
    """128 heads leave room for one tile and a piece."""
    case = SparseMlaCase("128 heads", 2, 70, 128, 65, invalid=True, attn_sink="finite")
    (setup,) = run(IndexerTrainingCase(case), "target").setups
    plan = TargetPlan()
    assert setup.smem == plan.smem.total
    assert (setup.grid[0], setup.block[0]) == (1, plan.threads)


@pytest.mark.parametrize(("heads", "queries"), [(5, 3), pytest.param(128, 2, marks=LATER)])
def test_rows_of_512_columns(heads: int, queries: int) -> None:
    """Entries of DeepSeek-V4: pieces of two chunks of the keys, or of one; several steps."""
    features = {"invalid": True, "topk_length": True, "poison": True}
    topk = 330 if heads < 64 else 65
    case = SparseMlaCase("512", queries, 70, heads, topk, d_qk=512, attn_sink="finite", **features)
    run(IndexerTrainingCase(case), "target")


@pytest.mark.parametrize("scale", [pytest.param(0.0, marks=LATER), -0.05])
def test_any_finite_scale(scale: float) -> None:
    case = SparseMlaCase("scale", 1, 50, 8, 64, sm_scale=scale, invalid=True)
    run(IndexerTrainingCase(case), "target")


def test_large_logits() -> None:
    run(IndexerTrainingCase(SparseMlaCase("1e4", 1, 50, 8, 64, logit_scale=1e4)), "target")


def test_a_head_that_attends_nowhere_adds_nothing() -> None:
    q, kv = torch.ones(1, 2, 576).bfloat16(), torch.ones(3, 576).bfloat16()
    indices = torch.tensor([[0, 2]], dtype=torch.int32)
    lse = torch.tensor([[24.0, torch.inf]])
    with emulation(ONE_SM):
        target = flashdsa.attention_target(q, kv, lse, indices, backend="emulate-sm90")
    torch.testing.assert_close(target, torch.ones(1, 2))


def test_the_plan_of_a_number_of_heads() -> None:
    of_target, of_scores = indexer_training.target_plan, indexer_training.scores_plan
    for width in (576, 512):
        plans = [of_target(heads, width) for heads in (1, 8, 9, 64, 100)]
        assert [plan.num_heads for plan in plans] == [8, 8, 16, 64, 128]
        assert {plan.width for plan in plans} == {width}
    assert [of_scores(heads).num_heads for heads in (1, 16, 33)] == [16, 16, 64]


def test_a_ring_in_which_a_consumer_could_wait_a_round_ahead_is_refused() -> None:
    """ptxemu finds missing waits in the target's kernel with 9 slots."""
    with pytest.raises(ValueError, match="key_slots: 9, but a consumer waits"):
        TargetPlan(key_slots=9)


@pytest.mark.parametrize("plan", [TargetPlan(), ScoresPlan()], ids=["target", "scores"])
def test_the_products_are_those_of_the_design(plan: TargetPlan | ScoresPlan) -> None:
    is_target = isinstance(plan, TargetPlan)
    # The loop of the scores has two tiles of two chunks.
    spec, chunks = (ATTENTION_TARGET, 9) if is_target else (INDEXER_SCORES, 4)
    text = ptx_of(spec, plan)
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+)k16", text)
    assert products == [f"m64n{plan.num_heads}"] * (4 * chunks)


KEYS = 90


def inputs_of(
    topk: int, ends: list[int], holes: list[range], lengths: list[int] | None = None
) -> IndexerTrainingInputs:
    """Lists, one a query, whose last valid slot is `ends` less one; `holes` are invalid slots."""
    case = IndexerTrainingCase(SparseMlaCase("ends", len(ends), KEYS, 8, topk), index_heads=16)
    inputs = make_indexer_training_inputs(case, 0)
    slot = torch.arange(topk)
    bad = torch.tensor(invalid_values(KEYS))[slot % 6]
    valid = slot < torch.tensor(ends)[:, None]
    for hole in holes:
        # A list's last valid slot stays.
        valid[:, hole] &= torch.isin(slot[hole], torch.tensor(ends) - 1)
    drawn = torch.randint(KEYS, valid.shape, generator=torch.Generator().manual_seed(1))
    indices = torch.where(valid, drawn, bad).int()
    given = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    attention = replace(inputs.attention, indices=indices, topk_length=given)
    return replace(inputs, attention=attention)


def instructions_of(what: str, inputs: IndexerTrainingInputs, device: Device = ONE_SM) -> int:
    """Judge every element of the results, which were poison; the warps' instructions."""
    reports: list[EmulatedProgress] = []
    with emulation(device, on_finding="collect", on_progress=reports.append) as emulator:
        assert failures(CHECKS[what](inputs, "emulate-sm90")) == []
    assert [str(finding) for finding in emulator.findings] == []
    return reports[-1].warp_instructions if reports else 0


@pytest.mark.parametrize("what", CHECKS)
def test_every_end(what: str) -> None:
    """Ends beside those of tiles and of the first look, which begins at 202; an empty list."""
    ends = [330, 0, 329, 203, 202, 201, 130, 129, 128, 65, 64, 63, 1, 330]
    instructions_of(what, inputs_of(330, ends, []))


@pytest.mark.parametrize("what", CHECKS)
def test_holes_are_no_ends(what: str) -> None:
    """Tiles without a valid slot before the last one, and an empty first look beside valid ids."""
    ends = [330, 329, 300, 202, 70]
    instructions_of(what, inputs_of(330, ends, [range(0, 64), range(66, 199), range(203, 299)]))


@pytest.mark.parametrize("what", CHECKS)
def test_lengths_beside_invalid_slots(what: str) -> None:
    """The first of both ends counts: valid ids after a length do not."""
    ends = [330, 330, 40, 140, 330, 150]
    instructions_of(what, inputs_of(330, ends, [range(100, 120)], [200, 0, 330, 70, 999, 151]))


@pytest.mark.parametrize("queries", [pytest.param(2, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("what", CHECKS)
def test_several_ctas_of_a_query_agree(what: str, queries: int) -> None:
    """Some of them have no tile before the end."""
    instructions_of(what, inputs_of(330, [70, 200, 5, 0, 330][:queries], []), SMALL)


@pytest.mark.parametrize("what", CHECKS)
def test_long_lists_that_end_early_cost_little(what: str) -> None:
    """After the first look each warp looks twice at up to 2,048 slots."""
    short, full = (instructions_of(what, inputs_of(2400, [end, 3, end], [])) for end in (60, 2400))
    assert short < full / 3


NAMES = ("rows without a valid slot", "logits to 1e4", "every feature")
"""The second has targets below the least normal fp32 number."""


@pytest.mark.parametrize("check", [judge.check_kl, judge.check_kl_backward])
def test_rows_are_within_the_contract(check) -> None:
    for case in INDEXER_TRAINING_CASES:
        if case.name in NAMES:
            inputs = make_indexer_training_inputs(case, 0)
            with emulation(SMALL, on_finding="collect") as emulator:
                assert failures(check(inputs, "emulate-sm90")) == []
            assert [str(finding) for finding in emulator.findings] == []


def test_more_rows_than_warps_of_a_cta_and_more_slots_than_a_warp_reads_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(9, 300, generator=generator, requires_grad=True)
    target = torch.rand(9, 300, generator=generator) * 1e-38
    with emulation(SMALL):
        kl = flashdsa.indexer_kl(scores, target, backend="emulate-sm90")
        kl.sum().backward()
    assert scores.grad is not None
    expected = scores.detach().requires_grad_()
    flashdsa.indexer_kl(expected, target, backend="cpu").sum().backward()
    torch.testing.assert_close(kl, flashdsa.indexer_kl(scores, target, backend="cpu"))
    torch.testing.assert_close(scores.grad, expected.grad)
