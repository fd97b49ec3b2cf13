"""A launch of a Blackwell backward on ptxemu, judged; and what its launch and PTX say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flashdsa.backends.emulated.runner import Emulator, compiled
from flashdsa.backends.sm100.mla_bwd import run
from flashdsa.ops.attention_backward import MlaBwdOperands
from flashdsa.plan.kernel_spec import KernelSpec
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import forward_results, judge_backward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from ptxemu import Policy
from tests.kernels.findings import unexpected


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """torch.empty gives NaN: an element that a kernel leaves unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def launch(
    case: SparseMlaCase,
    kernel: KernelSpec,
    plan: Any,
    policy: Policy | None = None,
    pairs: int = 74,
) -> Emulator:
    """The case on the emulator; its gradients are judged, and nothing may be found."""
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    O, lse = forward_results(inputs)
    operands = MlaBwdOperands(
        inputs.q, inputs.kv.view(-1, case.d_qk), inputs.do, lse, O, inputs.indices
    )
    result = Emulator(policy=policy, on_finding="collect")
    function = result.function(kernel, plan)
    with result.launching(), poisoned_outputs():
        dQ, dKV, *_ = run(
            function,
            operands,
            sm_scale=case.d_qk**-0.5,
            deterministic=False,
            dkv_dtype=torch.float32,
            pairs=pairs,
        )
    gradients = {"dQ": dQ, "dKV": dKV}
    assert failures(judge_backward(inputs, O, lse, gradients)) == []
    assert unexpected(result.findings) == []
    return result


def ptx(kernel: KernelSpec, plan: Any) -> str:
    """The text of every function that is compiled with the plan's."""
    return str(compiled(kernel, plan).__ptx__).rstrip("\0")


def assert_launched_as_planned(emulator: Emulator, text: str, plan: Any) -> None:
    """The last launch has the plan's memory and threads; its PTX the barriers' arrivals and the
    roles' registers."""
    setup = emulator.setups[-1]
    assert setup.smem == plan.smem.total
    assert (setup.block[0], setup.cluster[0]) == (plan.threads, 2)
    constants = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", text))
    initialised = re.findall(r"mbarrier\.init\.shared\.b64\s+\[[^]]+\],\s*(%?\w+);", text)
    counts = Counter(int(constants.get(count, count)) for count in initialised)
    wanted: Counter[int] = Counter()
    for barrier in plan.barriers:
        wanted[barrier.arrivals] += barrier.stages
    assert counts == wanted
    registers = {int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", text)}
    assert registers == {role.registers for role in plan.roles}
