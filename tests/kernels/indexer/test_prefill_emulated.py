"""The Hopper kernel over shared keys on ptxemu: rows of its own scores' best, nothing found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdsa
from flashdsa import reference
from flashdsa.backends.emulated.devices import SMALL
from flashdsa.backends.emulated.runner import emulation
from flashdsa.backends.sm90 import prefill
from flashdsa.kernels.indexer.sm90.prefill.plan import CHUNK, PrefillPlan
from flashdsa.ops.prefill import TopkPrefillOperands
from flashdsa.plan import BudgetError
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_indexer import check_prefill_scores, check_prefill_selection
from flashdsa.verify.prefill_cases import PrefillCase, causal, make_prefill_inputs
from ptxemu import Policy

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
RAGGED = ((0, 0), (5, 5), (3, 1570), (400, 1641), (64, 128), (1, 1640), (7, 1100))
BACKEND = "emulate-sm90"
ONE_SM = replace(SMALL, num_sms=1)
LATER = pytest.mark.slow


def assert_exact(case: PrefillCase, seed: int = 0, log_keys: int = 0) -> None:
    """Scores within the contract; of them the best, in ascending row, chosen in two segments."""
    x = make_prefill_inputs(case, seed)
    with emulation(ONE_SM, policy=Policy(seed=seed)) as runner:
        scores, verdicts = check_prefill_scores(x, BACKEND)
        assert failures(verdicts) == []
        ids = x.output_buffer()
        operands = TopkPrefillOperands(
            x.q_index, x.k_index, x.weights, x.ends, ids, x.starts, x.k_scale
        )
        plan = prefill.plan_of(operands.inputs)
        short = replace(plan, segment_keys=CHUNK, log_keys=log_keys)
        with runner.launching():
            prefill.bind_plan(runner, short, operands)(operands)
    assert torch.equal(ids, reference.dsa_topk_prefill(scores, x.starts, x.ends, case.topk))
    assert runner.findings == []


@pytest.mark.parametrize(
    "case",
    [
        PrefillCase("ragged", RAGGED, 300, 64, negative_weights=True),
        pytest.param(PrefillCase("ragged", RAGGED, 300, 32, negative_weights=True), marks=LATER),
        pytest.param(
            PrefillCase("ties", RAGGED, 512, 64, plateaus=True, nan_keys=True), marks=LATER
        ),
        pytest.param(PrefillCase("ties", RAGGED, 512, 16, plateaus=True), marks=LATER),
        pytest.param(PrefillCase("zeros", RAGGED, 512, 32, zero_scores=True), marks=LATER),
        pytest.param(PrefillCase("bf16", RAGGED, 300, 64, BF16, nan_keys=True), marks=LATER),
        pytest.param(PrefillCase("bf16", RAGGED, 70, 16, BF16, plateaus=True), marks=LATER),
        pytest.param(PrefillCase("topk 1", causal(5, 1300), 1, 64), marks=LATER),
        pytest.param(PrefillCase("topk 2048", causal(3, 2500), 2048, 64), marks=LATER),
    ],
    ids=lambda case: f"{case.name}-{case.num_heads}",
)
def test_rows_are_those_of_the_best_of_its_own_scores(case: PrefillCase) -> None:
    assert_exact(case)


@pytest.mark.parametrize("num_heads", [64, pytest.param(16, marks=LATER)])
def test_tiles_of_64_keys_whose_warpgroup_is_the_second(num_heads: int) -> None:
    """A CTA has three such tiles or more: of each second one, the first warpgroup has no keys."""
    assert_exact(PrefillCase("documents", causal(33, 60), 20, num_heads))


@pytest.mark.parametrize(
    "case",
    [
        PrefillCase("sorted", ((0, 0), (3, 300), (200, 700)), 100, 16, sorted=True),
        pytest.param(
            PrefillCase("ties", RAGGED, 512, 64, plateaus=True, nan_keys=True, sorted=True),
            marks=LATER,
        ),
        pytest.param(PrefillCase("bf16", RAGGED, 300, 32, BF16, sorted=True), marks=LATER),
        pytest.param(PrefillCase("few", causal(2, 3000), 60, 32, sorted=True), marks=LATER),
    ],
    ids=lambda case: f"{case.name}-{case.num_heads}",
)
def test_rows_in_the_order_of_scores(case: PrefillCase) -> None:
    x = make_prefill_inputs(case, 0)
    with emulation(ONE_SM) as runner:
        scores = flashdsa.prefill_logits(*x.operands, **x.options, backend=BACKEND)
        verdicts = check_prefill_selection(x, scores, BACKEND)
    assert failures(verdicts) == [] and runner.findings == []


@pytest.mark.slow
@pytest.mark.parametrize("plateaus", [False, True])
def test_a_full_log_is_cut(plateaus: bool) -> None:
    """Three segments of random scores leave more than 350 of the first two that may be among the
    best 300; of equal ones an exact search chooses."""
    case = PrefillCase("full log", causal(2, 2500), 300, 64, plateaus=plateaus)
    assert_exact(case, log_keys=350)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_whoever_runs_next(seed: int) -> None:
    assert_exact(PrefillCase("turns", RAGGED, 300, 64, plateaus=True), seed)


@pytest.mark.slow
def test_scores_have_the_bits_of_the_paged_indexer_s() -> None:
    """Keys in pages that follow each other, 64 heads."""
    x = make_prefill_inputs(PrefillCase("pages", causal(3, 256), 64), 0)
    assert x.k_scale is not None
    keys, scales = x.k_index[:256].view(torch.uint8), x.k_scale[:256].clone()
    cache = torch.cat([keys.reshape(4, 8192), scales.view(torch.uint8).view(4, 256)], dim=1)
    table = torch.arange(4, dtype=torch.int32).repeat(3, 1)
    with emulation(ONE_SM):
        paged = flashdsa.indexer_logits(
            x.q_index, cache.view(4, 64, 1, 132), x.weights, x.ends, table, 256, backend=BACKEND
        )
        shared = flashdsa.prefill_logits(*x.operands, **x.options, backend=BACKEND)
    assert torch.equal(paged, shared[:, :256])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("num_heads", [16, 32, 64])
def test_the_workspace_stays_below_64_mb(num_heads: int, dtype: str) -> None:
    plan = PrefillPlan(num_heads, dtype)
    assert 132 * plan.workspace_words * 4 <= 64 * 10**6


def test_plans_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="num_heads: expected 16, 32 or 64; got 8"):
        PrefillPlan(8)
    with pytest.raises(ValueError, match="dtype: expected one of"):
        PrefillPlan(64, "float16")
    with pytest.raises(ValueError, match="segment_keys: 100 is no multiple"):
        PrefillPlan(64, segment_keys=100)
    with pytest.raises(BudgetError, match="registers"):
        PrefillPlan(score_registers=248)
