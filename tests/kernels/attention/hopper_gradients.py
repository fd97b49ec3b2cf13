"""Gradients of Hopper's backward on ptxemu, judged."""

from __future__ import annotations

from torch import Tensor

import flashdsa
from flashdsa.backends.emulated.devices import SMALL, Device
from flashdsa.backends.emulated.runner import emulation
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import forward_results, judge_backward
from flashdsa.verify.sparse_mla_cases import SparseMlaInputs
from ptxemu import Policy
from tests.kernels.findings import unexpected


def hopper_gradients(
    inputs: SparseMlaInputs,
    device: Device = SMALL,
    policy: Policy | None = None,
    *,
    deterministic: bool = False,
    in_order: bool = False,
) -> tuple[Tensor, ...]:
    """dQ and dKV, within the contract; ptxemu finds nothing.

    Args:
        in_order: additions in any order are found, too; they are if `deterministic`.
    """
    O, lse = forward_results(inputs)
    with emulation(device, policy=policy) as emulator:
        gradients = flashdsa.mla_bwd(
            *(inputs.q, inputs.kv, inputs.do, lse, O, inputs.indices),
            topk_length=inputs.topk_length,
            deterministic=deterministic,
            backend="emulate-sm90",
        )
    named = dict(zip(("dQ", "dKV"), gradients, strict=True))
    assert failures(judge_backward(inputs, O, lse, named, bf16_operands=True)) == []
    assert unexpected(emulator.findings, in_order=in_order or deterministic) == []
    return gradients
