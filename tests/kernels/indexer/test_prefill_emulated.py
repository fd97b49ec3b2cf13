"""The Hopper kernel over shared keys on ptxemu: rows of its own scores' best, nothing found.

A tile of queries has a CTA, or the CTAs of a cluster share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

import flashdsa
from flashdsa import reference
from flashdsa.backends.emulated.devices import Device
from flashdsa.backends.emulated.runner import Emulator, emulation
from flashdsa.backends.sm90 import prefill
from flashdsa.backends.sm90.prefill_pieces import Piece
from flashdsa.kernels.indexer.sm90.prefill.plan import CHUNK, PrefillPlan
from flashdsa.ops.prefill import TopkPrefillOperands
from flashdsa.plan import BudgetError
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_indexer import check_prefill_scores, check_prefill_selection
from flashdsa.verify.prefill_cases import PrefillCase, PrefillInputs, causal, make_prefill_inputs
from ptxemu import Policy

BF16 = torch.bfloat16
RAGGED = ((0, 0), (5, 5), (3, 1170), (400, 1241), (64, 128), (1, 1240), (7, 700))
BACKEND = "emulate-sm90"
LATER = pytest.mark.slow
Plant = Callable[[PrefillInputs], None]


LOG_KEYS = 720


def device_of(size: int, clusters: int = 1) -> Device:
    """A device that runs so many clusters at once, and that many CTAs alone."""
    return Device(size * clusters, {1: size * clusters, size: clusters})


def choose(runner: Emulator, x: PrefillInputs, size: int, clusters: int, **how: Any) -> Tensor:
    """Ids by so many clusters."""
    ids = x.output_buffer()
    operands = TopkPrefillOperands(
        x.q_index, x.k_index, x.weights, x.ends, ids, x.starts, x.k_scale
    )
    plan = replace(prefill.plan_of(operands.inputs), **how)
    pieces = (Piece(0, len(ids), size * clusters, size),)
    with runner.launching():
        prefill.bind_plan(runner, plan, operands, pieces)(operands)
    return ids


def scores_of(x: PrefillInputs) -> Tensor:
    """The kernel's own scores."""
    return flashdsa.prefill_logits(*x.operands, **x.options, backend=BACKEND)


def assert_exact(
    case: PrefillCase, size: int = 1, clusters: int = 1, plant: Plant | None = None, seed: int = 0
) -> None:
    """Scores within the contract; of them the best, in ascending row; nothing found. CTAs choose in
    segments of a chunk; those that share a tile have a log that is soon cut."""
    x = make_prefill_inputs(case, seed)
    if plant is not None:
        plant(x)
    log_keys = LOG_KEYS if size > 1 and case.topk < LOG_KEYS else 0
    how = {"segment_keys": CHUNK, "log_keys": log_keys}
    with emulation(device_of(size, clusters), policy=Policy(seed=seed)) as runner:
        scores, verdicts = check_prefill_scores(x, BACKEND)
        ids = choose(runner, x, size, clusters, **how)
    assert plant is not None or failures(verdicts) == []
    assert torch.equal(ids, reference.dsa_topk_prefill(scores, x.starts, x.ends, case.topk))
    assert runner.findings == []


def of_ragged(name: str, topk: int, heads: int, *more: Any, **features: Any) -> PrefillCase:
    return PrefillCase(name, RAGGED, topk, heads, *more, **features)


ALWAYS = [
    (of_ragged("ragged", 300, 64, negative_weights=True), 1, 1),
    (of_ragged("ties", 512, 64, plateaus=True, nan_keys=True), 3, 1),
    # A CTA has three tiles of 64 keys or more: of each second one, a warpgroup has no keys.
    (PrefillCase("documents", causal(33, 60), 20, 64), 1, 1),
    (PrefillCase("NaN at the cut", causal(5, 500), 480, 64, nan_keys=True), 3, 1),
    (PrefillCase("no keys for CTAs", causal(5, 100), 20, 64), 8, 1),
    (PrefillCase("most of 128 keys", causal(5, 128), 100, 64), 5, 1),
]
FURTHER = [
    (of_ragged("ragged", 300, 64, negative_weights=True), 3, 1),
    (of_ragged("ragged", 300, 32, negative_weights=True), 1, 1),
    (PrefillCase("clusters", RAGGED * 3, 300, 64), 2, 2),
    (of_ragged("zeros", 512, 32, zero_scores=True), 3, 1),
    (PrefillCase("bf16", RAGGED * 2, 70, 32, BF16), 8, 1),
    *((PrefillCase("topk 1", causal(5, 1300), 1, 64), size, 1) for size in (1, 3)),
    *((PrefillCase("topk 2048", causal(3, 2500), 2048, 64), size, 1) for size in (1, 3)),
]
"""test_small_calls_emulated.py has more, of 16 and 64 heads."""


@pytest.mark.parametrize(
    ("case", "size", "clusters"),
    [*ALWAYS, *(pytest.param(*one, marks=LATER) for one in FURTHER)],
    ids=lambda x: f"{x.name}-{x.num_heads}" if isinstance(x, PrefillCase) else str(x),
)
def test_rows_are_those_of_the_best_of_its_own_scores(
    case: PrefillCase, size: int, clusters: int
) -> None:
    assert_exact(case, size, clusters)


@pytest.mark.parametrize(
    "case",
    [
        PrefillCase("sorted", ((0, 0), (3, 300), (200, 700)), 100, 16, sorted=True),
        pytest.param(
            of_ragged("ties", 512, 64, plateaus=True, nan_keys=True, sorted=True), marks=LATER
        ),
        pytest.param(of_ragged("bf16", 300, 32, BF16, sorted=True), marks=LATER),
        pytest.param(PrefillCase("few", causal(2, 3000), 60, 32, sorted=True), marks=LATER),
    ],
    ids=lambda case: f"{case.name}-{case.num_heads}",
)
def test_rows_in_the_order_of_scores(case: PrefillCase) -> None:
    x = make_prefill_inputs(case, 0)
    with emulation(device_of(1)) as runner:
        verdicts = check_prefill_selection(x, scores_of(x), BACKEND)
    assert failures(verdicts) == [] and runner.findings == []


def widen(x: PrefillInputs) -> None:
    """The first sample's scores are so large that all others fall into a few bins."""
    assert x.k_scale is not None
    x.k_scale[:64] *= 4096


def be_infinite(x: PrefillInputs) -> None:
    """Three of four keys score inf, -inf, or NaN where the sum is 0."""
    assert x.k_scale is not None
    x.k_scale.copy_(torch.where(torch.arange(len(x.k_scale)) % 4 > 0, torch.inf, x.k_scale))


@pytest.mark.parametrize("plant", [pytest.param(widen, marks=LATER), be_infinite])
@pytest.mark.parametrize("topk", [pytest.param(100, marks=LATER), 700])
def test_windows_that_tell_little(plant: Plant, topk: int) -> None:
    case = PrefillCase("planted", causal(4, 1500), topk, 64, negative_weights=True)
    assert_exact(case, 3, plant=plant)


@pytest.mark.parametrize("size", [2, pytest.param(5, marks=LATER)])
def test_logs_that_are_cut_and_segments(size: int) -> None:
    """However keys are shared, in another order of warps."""
    case = PrefillCase("scores", (*causal(2, 4200), (9, 200)), 690, 64)
    assert_exact(case, size, seed=1)


@LATER
def test_tiles_beyond_a_wave_are_a_second_launch() -> None:
    """Two CTAs take two tiles, then a pair of them the third."""
    case = PrefillCase("waves", causal(9, 3900), 40, 64)
    x = make_prefill_inputs(case, 0)
    ids = x.output_buffer()
    with emulation(Device(2, {1: 2, 2: 1})) as runner:
        scores = scores_of(x)
        runner.setups.clear()
        flashdsa.dsa_topk_prefill(*x.operands, ids, **x.options, backend=BACKEND)
        clusters = [(setup.cluster or (1,))[0] for setup in runner.setups]
    assert clusters == [1, 2]
    best = reference.dsa_topk_prefill(scores, x.starts, x.ends, case.topk)
    assert torch.equal(ids, best) and runner.findings == []


@LATER
def test_scores_have_the_bits_of_the_paged_indexer_s() -> None:
    """Keys in pages that follow each other, 64 heads."""
    x = make_prefill_inputs(PrefillCase("pages", causal(3, 256), 64), 0)
    assert x.k_scale is not None
    keys, scales = x.k_index[:256].view(torch.uint8), x.k_scale[:256].clone()
    cache = torch.cat([keys.reshape(4, 8192), scales.view(torch.uint8).view(4, 256)], dim=1)
    table = torch.arange(4, dtype=torch.int32).repeat(3, 1)
    with emulation(device_of(1)):
        paged = flashdsa.indexer_logits(
            x.q_index, cache.view(4, 64, 1, 132), x.weights, x.ends, table, 256, backend=BACKEND
        )
        shared = scores_of(x)
    assert torch.equal(paged, shared[:, :256])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("num_heads", [16, 32, 64])
def test_the_workspace_stays_below_64_mb(num_heads: int, dtype: str) -> None:
    plan = PrefillPlan(num_heads, dtype)
    assert 132 * plan.workspace_words * 4 <= 64 * 10**6


@pytest.mark.parametrize(
    ("choices", "error", "message"),
    [
        ({"num_heads": 8}, ValueError, "num_heads: expected 16, 32 or 64; got 8"),
        ({"dtype": "float16"}, ValueError, "dtype: expected one of"),
        ({"segment_keys": 100}, ValueError, "segment_keys: 100 is no multiple"),
        ({"scores_only": True, "shared": True}, ValueError, "shared: scores that are not ranked"),
        ({"score_registers": 248}, BudgetError, "registers"),
        ({"score_registers": 248, "shared": True}, BudgetError, "registers"),
    ],
)
def test_plans_refuse_what_cannot_be(
    choices: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        PrefillPlan(**choices)
