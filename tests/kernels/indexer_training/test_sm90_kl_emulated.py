"""The Hopper kernels of the divergence on ptxemu: within the contract, without a finding."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

import flashdsa
from flashdsa.backends.emulated.devices import SMALL
from flashdsa.backends.emulated.runner import emulation
from flashdsa.verify import judge_indexer_training as judge
from flashdsa.verify.compare import failures
from flashdsa.verify.indexer_training_cases import make_indexer_training_inputs
from tests.support.cases import INDEXER_TRAINING_CASES

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
