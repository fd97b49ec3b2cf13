"""Small calls of the Hopper backward for workbench/sanitizers/run.py."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Backward:
    """A backward, judged against float64: delta, lists, scores, dQ, dKV and what is between them.

    Attributes:
        num_heads: 64 and more have two kinds of groups; the device chooses. alike: queries name the
            same keys, so that the large groups are chosen.
        ordered: the deterministic form. ctas: so few that each has several work items.
        mutant: the name of the kernel of which a control leaves something out; see `compile`.
    """

    num_heads: int = 128
    queries: int = 3
    topk: int = 100
    alike: bool = False
    ordered: bool = False
    ctas: int = 2
    mutant: str = ""

    def compile(self) -> Any:
        """The function of the kernel that is mutated."""
        from flashdsa.jit.loader import compile_plan

        return compile_plan(*self._mutated())

    def _mutated(self) -> tuple[Any, Any]:
        """The specification and the plan that the call takes of the kernel."""
        from flashdsa.backends.sm90.mla_bwd_fused import plan_of
        from flashdsa.backends.sm90.mla_bwd_spool import grouping_for, plans_of
        from flashdsa.kernels.catalog import (
            MLA_BWD_DKV,
            MLA_BWD_DQ,
            MLA_BWD_FUSED,
            MLA_BWD_SCORES,
        )

        shape = self.queries, self.num_heads, self.topk, self.ctas
        grouping = grouping_for(*shape, deterministic=self.ordered)
        if self.mutant == MLA_BWD_FUSED.name:
            more = 0 if grouping is None else grouping.queries
            return MLA_BWD_FUSED, plan_of(self.num_heads, more, self.ordered)
        specs = MLA_BWD_SCORES, MLA_BWD_DQ, MLA_BWD_DKV
        assert grouping is not None, "so many heads and queries have no large groups"
        plans = plans_of(grouping.queries, self.ordered)
        return next(one for one in zip(specs, plans, strict=True) if one[0].name == self.mutant)

    def __call__(self) -> None:
        """Launch once, and judge."""
        wrong = self.wrong(None)
        if wrong:
            sys.exit(wrong)

    def emulated(self, function: Any) -> list[Any]:
        """ptxemu's findings."""
        from types import MappingProxyType

        from flashdsa.backends.emulated.devices import Device
        from flashdsa.backends.emulated.runner import Emulator

        emulator = Emulator(
            Device(self.ctas, MappingProxyType({1: self.ctas})), on_finding="collect"
        )
        self._gradients(function, emulator, "cpu")
        return emulator.findings

    def wrong(self, function: Any) -> str:
        """What is wrong with the gradients on the GPU; "" if nothing is.

        Args:
            function: of the kernel `mutant`; None: as installed.
        """
        from flashdsa.backends.gpu.runner import Gpu
        from flashdsa.verify.compare import failures
        from flashdsa.verify.judge_sparse_mla import judge_backward

        gpu = Gpu(0)
        gpu.num_sms = self.ctas
        return "; ".join(
            failures(judge_backward(*self._gradients(function, gpu, "cuda"), bf16_operands=True))
        )

    def _gradients(
        self, function: Any, runner: Any, device: str
    ) -> tuple[Any, Tensor, Tensor, dict[str, Tensor]]:
        """Inputs, O, lse and what the launches gave."""
        import torch

        from flashdsa.backends.sm90.mla_bwd import backward
        from flashdsa.operands import MlaBwdOperands
        from flashdsa.verify.cases import SparseMlaCase, make_sparse_mla_inputs
        from flashdsa.verify.judge_sparse_mla import forward_results

        case = SparseMlaCase(
            "sanitized",
            self.queries,
            260,
            self.num_heads,
            self.topk,
            invalid=True,
            duplicates=self.ordered,
            topk_length=not self.alike,
        )
        inputs = make_sparse_mla_inputs(case, 0, device)
        if self.alike:
            inputs.indices.copy_(inputs.indices[:1].expand_as(inputs.indices).clone())
        O, lse = forward_results(inputs)
        if function is not None:
            replace_function(runner, self._mutated(), function)
        operands = MlaBwdOperands(
            inputs.q, inputs.kv, inputs.do, lse, O, inputs.indices, inputs.topk_length
        )
        dq, dkv, _ = backward(
            runner,
            operands,
            sm_scale=case.d_qk**-0.5,
            deterministic=self.ordered,
            dkv_dtype=torch.float32,
        )
        return inputs, O, lse, {"dQ": dq, "dKV": dkv}


def replace_function(runner: Any, kernel: tuple[Any, Any], function: Any) -> None:
    """Let the runner take `function` for the kernel, a specification and a plan."""
    real = runner.function
    runner.function = lambda spec, plan: function if (spec, plan) == kernel else real(spec, plan)
