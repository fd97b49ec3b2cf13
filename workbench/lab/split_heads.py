"""The Blackwell backward with heads split over a pair of CTAs: run on ptxemu and judged."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flashdsa.backends.emulated.runner import Emulator
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm100.mla_bwd import run
from flashdsa.ops.attention_backward import MlaBwdOperands
from flashdsa.verify.compare import Comparison
from flashdsa.verify.judge_sparse_mla import forward_results, judge_backward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, SparseMlaInputs, make_sparse_mla_inputs
from ptxemu import Policy
from ptxemu.launch_setup import LaunchSetup
from workbench.lab.kernels.split_heads.plan import SPLIT_HEADS

ORDER_OF_SUMS = "unordered-float-additions"
"""The finding that is expected: the kernel adds to dKV as its parts come."""


class Judged(NamedTuple):
    """Verdicts on dQ and dKV against float64; ptxemu's other findings; the backward's launch."""

    verdicts: list[Comparison]
    findings: list[str]
    setup: LaunchSetup


def judge_on(runner: Runner, inputs: SparseMlaInputs) -> list[Comparison]:
    """Judge dQ and dKV of a runner, a GPU or ptxemu."""
    O, lse = forward_results(inputs)
    operands = MlaBwdOperands(inputs.q, inputs.kv, inputs.do, lse, O, inputs.indices)
    options: dict[str, Any] = {"deterministic": False, "dkv_dtype": torch.float32, "pairs": 1}
    function = runner.function(SPLIT_HEADS, SPLIT_HEADS.plans[0])
    serve = runner.on_device(lambda x: run(function, x, sm_scale=576**-0.5, **options))
    gradients = dict(zip(("dQ", "dKV"), serve(operands), strict=False))
    return judge_backward(inputs, O, lse, gradients)


def judge(case: SparseMlaCase, policy: Policy | None = None, seed: int = 0) -> Judged:
    """Judge a case of 128 heads on ptxemu."""
    emulator = Emulator(policy=policy, on_finding="collect")
    verdicts = judge_on(emulator, make_sparse_mla_inputs(case, seed, "cpu"))
    findings = [str(one) for one in emulator.findings if one.code != ORDER_OF_SUMS]
    return Judged(verdicts, findings, emulator.setups[-1])
