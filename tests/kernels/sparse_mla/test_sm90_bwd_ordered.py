"""The deterministic Hopper backward on ptxemu: the same bits in any order of CTAs and warps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

import flashdsa
from flashdsa.backends.emulated.devices import SMALL, Device
from flashdsa.backends.emulated.runner import emulation
from flashdsa.backends.sm90 import mla_bwd
from flashdsa.verify.cases import SparseMlaCase, make_sparse_mla_inputs
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import forward_results, judge_backward
from ptxemu import Policy

ONE_SM = Device(1, {1: 1})
DEVICES_AND_ORDERS = [
    (SMALL, Policy()),
    (SMALL, Policy(asynchronous="random", seed=3)),
    (ONE_SM, Policy(asynchronous="late", seed=5)),
]


def gradients_of(case: SparseMlaCase, *, deterministic: bool = True) -> list[tuple[Tensor, ...]]:
    """On each device in its order; all are within the contract, and ptxemu finds nothing."""
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    O, lse = forward_results(inputs)
    operands = (inputs.q, inputs.kv, inputs.do, lse, O, inputs.indices)
    every = []
    for device, policy in DEVICES_AND_ORDERS:
        with emulation(device, policy=policy):
            gradients = flashdsa.mla_bwd(
                *operands,
                topk_length=inputs.topk_length,
                deterministic=deterministic,
                backend="emulate-sm90",
            )
        named = dict(zip(("dQ", "dKV"), gradients, strict=True))
        assert failures(judge_backward(inputs, O, lse, named, bf16_operands=True)) == []
        every.append(gradients)
    return every


def are_equal(every: list[tuple[Tensor, ...]]) -> bool:
    """Whether all have the same bits."""
    return all(torch.equal(a, b) for one in every[1:] for a, b in zip(one, every[0], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("buffers", [1, 3])
def test_bits_do_not_depend_on_what_runs_first(
    buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five groups of eight queries, in one chain and in three; some have rows out of order."""
    monkeypatch.setattr(mla_bwd, "MOST_BUFFERS", buffers)
    case = SparseMlaCase("ordered", 37, 90, 16, 24, topk_length=True, invalid=True)
    assert are_equal(gradients_of(case))


@pytest.mark.slow
def test_without_it_they_do() -> None:
    """Or the test above would show nothing."""
    case = SparseMlaCase("ordered", 37, 90, 16, 24, topk_length=True, invalid=True)
    assert not are_equal(gradients_of(case, deterministic=False))


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "queries"), [(8, 40), (32, 13), (64, 9), (128, 6)])
def test_lists_with_rows_out_of_order(
    heads: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 8 heads they are so many that all slots of a group are its list."""
    monkeypatch.setattr(mla_bwd, "MOST_BUFFERS", 2)
    case = SparseMlaCase("repeats", queries, 60, heads, 90, duplicates=True, empty_rows=True)
    assert are_equal(gradients_of(case))


@pytest.mark.parametrize(
    ("num_keys", "buffers"), [(0, 3), (8192, 3), (155_344, 3), (155_345, 2), (1 << 20, 1)]
)
def test_buffers_are_bounded_and_follow_the_keys_alone(num_keys: int, buffers: int) -> None:
    assert mla_bwd.buffers_for(num_keys) == buffers
