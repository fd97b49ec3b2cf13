"""CTAs of a cluster share a tile of queries: the same rows as one CTA finds, on ptxemu."""

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
from flashdsa.verify.prefill_cases import PrefillCase, PrefillInputs, causal, make_prefill_inputs
from ptxemu import Policy

BF16 = torch.bfloat16
RAGGED = ((0, 0), (5, 5), (3, 1570), (400, 1641), (64, 128), (1, 1640), (7, 1100))
BACKEND = "emulate-sm90"
LATER = pytest.mark.slow


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
    case: PrefillCase,
    size: int,
    clusters: int = 1,
    plant: Callable[[PrefillInputs], None] | None = None,
    seed: int = 0,
    **how: Any,
) -> None:
    """The best of the kernel's own scores, in ascending row; nothing found."""
    x = make_prefill_inputs(case, seed)
    if plant is not None:
        plant(x)
    with emulation(device_of(size, clusters), policy=Policy(seed=seed)) as runner:
        scores = scores_of(x)
        ids = choose(runner, x, size, clusters, **how)
    assert torch.equal(ids, reference.dsa_topk_prefill(scores, x.starts, x.ends, case.topk))
    assert runner.findings == []


@pytest.mark.parametrize(
    ("case", "size", "clusters"),
    [
        (PrefillCase("ragged", RAGGED, 300, 64, negative_weights=True), 3, 1),
        pytest.param(PrefillCase("16", RAGGED, 300, 64, negative_weights=True), 16, 1, marks=LATER),
        pytest.param(PrefillCase("clusters", RAGGED * 3, 300, 64), 2, 2, marks=LATER),
        pytest.param(PrefillCase("ties", RAGGED, 512, 64, plateaus=True, nan_keys=True), 3, 1),
        pytest.param(PrefillCase("ties", RAGGED, 512, 16, plateaus=True), 8, 1, marks=LATER),
        pytest.param(PrefillCase("equal", RAGGED, 512, 64, zero_scores=True), 2, 1, marks=LATER),
        pytest.param(PrefillCase("equal", RAGGED, 512, 32, zero_scores=True), 3, 1, marks=LATER),
        pytest.param(PrefillCase("bf16", RAGGED, 300, 64, BF16, nan_keys=True), 3, 1, marks=LATER),
        pytest.param(PrefillCase("bf16", RAGGED * 2, 70, 32, BF16), 8, 1, marks=LATER),
        pytest.param(PrefillCase("bf16", RAGGED, 70, 16, BF16, plateaus=True), 5, 1, marks=LATER),
        pytest.param(PrefillCase("topk 1", causal(5, 1300), 1, 64), 3, 1, marks=LATER),
        pytest.param(PrefillCase("topk 2048", causal(3, 2500), 2048, 64), 3, 1, marks=LATER),
        pytest.param(PrefillCase("NaN at the cut", causal(5, 500), 480, 64, nan_keys=True), 3, 1),
        pytest.param(PrefillCase("no keys for CTAs", causal(5, 100), 20, 64), 8, 1),
        (PrefillCase("most of 128 keys", causal(5, 128), 100, 64), 5, 1),
    ],
    ids=lambda x: f"{x.name}-{x.num_heads}" if isinstance(x, PrefillCase) else str(x),
)
def test_rows_are_those_of_the_best_of_its_own_scores(
    case: PrefillCase, size: int, clusters: int
) -> None:
    assert_exact(case, size, clusters)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "plateaus", "size"), [(64, False, 2), (64, True, 2), (32, False, 3), (16, True, 3)]
)
def test_a_stretch_of_several_segments(heads: int, plateaus: bool, size: int) -> None:
    """Logs are cut, by bounds or by an exact search, whose entries are the only ones that count."""
    case = PrefillCase("segments", causal(5, 2600 * size), 300, heads, plateaus=plateaus)
    assert_exact(case, size, segment_keys=CHUNK, log_keys=350)


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
def test_windows_that_tell_little(plant: Callable[[PrefillInputs], None], topk: int) -> None:
    case = PrefillCase("planted", causal(4, 1500), topk, 64, negative_weights=True)
    assert_exact(case, 3, plant=plant)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("plateaus", [False, True])
def test_whoever_runs_next(seed: int, plateaus: bool) -> None:
    """Several tiles, so that messages of one follow those of another."""
    case = PrefillCase("turns", RAGGED * 3, 300, 64, plateaus=plateaus)
    assert_exact(case, 3, seed=seed)


@pytest.mark.parametrize("size", [2, pytest.param(5, marks=LATER)])
def test_rows_are_the_same_whoever_runs_next(size: int) -> None:
    """From logs that are cut and segments, however keys are shared, whoever runs next."""
    x = make_prefill_inputs(PrefillCase("scores", (*causal(4, 5200), (9, 200)), 300, 64), 0)
    with emulation(device_of(1)):
        scores = scores_of(x)
    ids = reference.dsa_topk_prefill(scores, x.starts, x.ends, 300)
    for seed in range(2):
        with emulation(device_of(size), policy=Policy(seed=seed)) as runner:
            found = choose(runner, x, size, 1, segment_keys=CHUNK, log_keys=350)
        assert torch.equal(found, ids) and runner.findings == []


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


def test_plans_refuse_what_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="shared: scores that are not ranked"):
        PrefillPlan(64, scores_only=True, shared=True)
    with pytest.raises(BudgetError, match="registers"):
        PrefillPlan(shared=True, score_registers=248)
