"""The Hopper backward of the index scores on ptxemu: within the contract, no finding."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

import flashdsa
from flashdsa.backends.emulated.devices import Device
from flashdsa.backends.emulated.runner import Emulator, emulation
from flashdsa.backends.sm90 import indexer_bwd
from flashdsa.errors import UnsupportedError
from flashdsa.heuristics.h200 import IndexBackward
from flashdsa.verify.compare import failures
from flashdsa.verify.indexer_training_cases import (
    IndexerTrainingCase,
    IndexerTrainingInputs,
    make_indexer_training_inputs,
)
from flashdsa.verify.judge_indexer_training import check_index_backward, judge_index_backward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase
from ptxemu import Policy
from tests.kernels.findings import EVERY_FEATURE, unexpected

ONE_SM, TWO_SMS = Device(1, {1: 1}), Device(2, {1: 2})


@pytest.fixture(autouse=True)
def every_call_may_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device chooses between groups, however few slots there are."""
    monkeypatch.setattr(IndexBackward, "LEAST_CHOSEN_SLOTS", 0)


def inputs_of(
    queries: int, keys: int, topk: int, heads: int, **features: object
) -> IndexerTrainingInputs:
    case = SparseMlaCase("emulated", queries, keys, 8, topk, **features)
    return make_indexer_training_inputs(IndexerTrainingCase(case, index_heads=heads), 0)


def run(
    inputs: IndexerTrainingInputs,
    policy: Policy | None = None,
    device: Device = TWO_SMS,
    *,
    deterministic: bool = False,
) -> Emulator:
    """The gradients are judged, and nothing may be found."""
    with emulation(device, policy=policy, on_finding="collect") as emulator:
        judged = check_index_backward(inputs, "emulate-sm90", deterministic=deterministic)
        assert failures(judged) == []
    assert unexpected(emulator.findings, in_order=deterministic) == []
    return emulator


@pytest.mark.parametrize("when", [pytest.param("eager", marks=pytest.mark.slow), "late"])
def test_every_feature(when: str) -> None:
    """Groups of two queries, of which one is missing and the last one is in two parts; it does not
    matter when copies happen."""
    inputs = inputs_of(5, 150, 100, 64, **EVERY_FEATURE)
    emulator = run(inputs, Policy(asynchronous=when, seed=3))
    # The choice is two; both groupings have lists and gradients, the smaller one a sum.
    assert len(emulator.setups) == 8


@pytest.mark.parametrize(("named", "taken"), [("the same", 0), ("others", 1)])
def test_large_groups_are_taken_where_queries_have_much_in_common(
    named: str, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratches = []
    empty = Emulator.empty

    def spied(emulator: Emulator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        made = empty(emulator, *shape, dtype=dtype)
        if dtype is torch.int32 and made.numel():
            scratches.append(made)
        return made

    monkeypatch.setattr(Emulator, "empty", spied)
    inputs = inputs_of(4, 300, 70, 64, poison=named == "others", empty_rows=named == "others")
    if named == "the same":
        inputs.indices[:] = inputs.indices[0].clone()
    run(inputs, device=ONE_SM)
    (scratch,) = scratches
    assert int(scratch[0]) == taken


def test_it_is_the_same_every_time_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of two queries and at once, with keys that a query names three times."""
    inputs = inputs_of(3, 40, 90, 64, duplicates=True, invalid=True)
    inputs.indices[0, 5:8] = inputs.indices[0, 5]
    with emulation(TWO_SMS):
        options = {"topk_length": inputs.attention.topk_length, "backend": "emulate-sm90"}
        operands = (*inputs.operands, inputs.grad_scores)
        first = flashdsa.indexer_bwd(*operands, deterministic=True, **options)
    monkeypatch.setattr(indexer_bwd, "MOST_ROW_BYTES", 1)
    with emulation(TWO_SMS, policy=Policy(asynchronous="late", seed=5)) as emulator:
        again = flashdsa.indexer_bwd(*operands, deterministic=True, **options)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert failures(judge_index_backward(inputs, again, "emulate-sm90")) == []
    assert len(emulator.setups) == 2 * 4  # of each part: lists, gradients, what mends them, the sum


def test_bf16_gradients_of_keys_and_nothing_to_do() -> None:
    inputs = inputs_of(1, 60, 40, 64)
    operands = (*inputs.operands, inputs.grad_scores)
    with emulation(TWO_SMS):
        dk = flashdsa.indexer_bwd(*operands, dk_dtype=torch.bfloat16, backend="emulate-sm90")[1]
        assert dk.dtype == torch.bfloat16
        assert torch.equal(
            dk, flashdsa.indexer_bwd(*operands, backend="emulate-sm90")[1].bfloat16()
        )
        for queries, keys in ((2, 0), (0, 9)):
            assert (
                failures(check_index_backward(inputs_of(queries, keys, 32, 64), "emulate-sm90"))
                == []
            )


def test_what_the_kernels_do_not_take_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="num_heads: takes 16, 32, 64; got 20"):
        check_index_backward(inputs_of(1, 40, 32, 20), "emulate-sm90")
