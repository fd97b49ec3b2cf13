"""Small calls of the Hopper backward of the index scores for workbench/sanitizers/run.py."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from workbench.sanitizers.backward import replace_function

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class IndexBackward:
    """A backward, judged against float64: the choice, the lists, the gradients.

    Attributes:
        alike: queries name the same keys, so that the larger groups are chosen. ordered: the
            deterministic form. ctas: so few that each has several work items.
    """

    num_heads: int = 64
    queries: int = 5
    topk: int = 100
    alike: bool = False
    ordered: bool = False
    ctas: int = 3

    def compile(self) -> Any:
        """The function of the small groups, which a control leaves something out of."""
        from flashdsa.jit.loader import compile_plan

        return compile_plan(*self._mutated())

    def _mutated(self) -> tuple[Any, Any]:
        """The specification and the plan."""
        from flashdsa.kernels.catalog import INDEXER_BWD
        from flashdsa.kernels.indexer_training.sm90.bwd.plan import BLOCKS, BwdPlan

        return INDEXER_BWD, BwdPlan(self.num_heads, min(BLOCKS), self.ordered)

    def __call__(self) -> None:
        """Launch once, and judge."""
        wrong = self.wrong(None)
        if wrong:
            sys.exit(wrong)

    def emulated(self, function: Any) -> list[Any]:
        """ptxemu's findings."""
        from flashdsa.backends.emulated.devices import Device
        from flashdsa.backends.emulated.runner import Emulator

        device = Device(self.ctas, MappingProxyType({1: self.ctas}))
        emulator = Emulator(device, on_finding="collect")
        self._gradients(function, emulator, "cpu")
        return emulator.findings

    def wrong(self, function: Any) -> str:
        """What is wrong with the gradients on the GPU; "" if nothing is.

        Args:
            function: of the small groups; None: as installed.
        """
        from flashdsa.backends.gpu.runner import Gpu
        from flashdsa.verify.compare import failures
        from flashdsa.verify.judge_indexer_training import judge_index_backward

        gpu = Gpu(0)
        gpu.num_sms = self.ctas
        inputs, found = self._gradients(function, gpu, "cuda")
        return "; ".join(failures(judge_index_backward(inputs, found, "sm90")))

    def _gradients(self, function: Any, runner: Any, device: str) -> tuple[Any, tuple[Tensor, ...]]:
        """Inputs, and what the launches gave, both on the CPU: a sanitizer makes every launch of
        torch take long, and the reference has hundreds."""
        import torch

        from flashdsa.backends.sm90.indexer_bwd import backward
        from flashdsa.operands import IndexerBwdOperands
        from flashdsa.verify.cases import (
            IndexerTrainingCase,
            SparseMlaCase,
            make_indexer_training_inputs,
        )

        case = SparseMlaCase(
            "sanitized", self.queries, 260, 8, self.topk, invalid=True, duplicates=self.ordered
        )
        inputs = make_indexer_training_inputs(
            IndexerTrainingCase(case, index_heads=self.num_heads), 0
        )
        if self.alike:
            inputs.indices.copy_(inputs.indices[:1].expand_as(inputs.indices).clone())
        if function is not None:
            replace_function(runner, self._mutated(), function)
        on_device = (x.to(device) for x in (*inputs.operands, inputs.grad_scores))
        operands = IndexerBwdOperands(*on_device)
        found = backward(runner, operands, deterministic=self.ordered, dk_dtype=torch.float32)
        return inputs, tuple(x.cpu() for x in found)
