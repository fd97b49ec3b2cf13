"""Small calls of the Hopper forward for workbench/sanitizers/run.py, and what is left out of its mutants."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

from workbench.sanitizers.kernel import KernelCase

if TYPE_CHECKING:
    from flashdsa.kernels.sparse_mla.sm90.fwd.plan import FwdPlan

CTAS = 2
"""So few that each has several work items."""


@dataclass(frozen=True)
class Forward(KernelCase):
    """A launch of the forward, judged against float64.

    Attributes:
        queries: S. topk: slots of each. group: queries that share a work item.
        max_logits: whether the largest logits are asked for.
    """

    catalog_name: ClassVar[str] = "SPARSE_MLA_FWD"
    queries: int = 5
    topk: int = 200
    group: int = 1
    num_keys: int = 90
    max_logits: bool = False

    @property
    def plan(self) -> FwdPlan:
        """What it is compiled for."""
        from flashdsa.kernels.sparse_mla.sm90.fwd.plan import FwdPlan

        return FwdPlan(group=self.group, max_logits=self.max_logits)

    def emulator(self) -> Any:
        """Of so few streaming multiprocessors that each CTA has several work items."""
        from types import MappingProxyType

        from flashdsa.backends.emulated.devices import Device
        from flashdsa.backends.emulated.runner import Emulator

        return Emulator(Device(CTAS, MappingProxyType({1: CTAS})), on_finding="collect")

    def wrong(self, function: Any) -> str:
        """What is wrong with the results on the GPU; "" if nothing is."""
        from flashdsa.backends.gpu.runner import Gpu
        from flashdsa.verify.compare import failures
        from flashdsa.verify.judge_sparse_mla import judge_forward

        gpu = Gpu(0)
        gpu.num_sms = CTAS
        return "; ".join(
            failures(judge_forward(*self._launch(function, gpu, "cuda"), backend="sm90"))
        )

    def _launch(self, function: Any, runner: Any, device: str) -> tuple[Any, ...]:
        """Inputs, O, lse and, if asked for, the largest logits."""
        import torch

        from flashdsa.backends.sm90.sparse_mla import prepare_plan
        from flashdsa.kernels.sparse_mla.sm90.fwd.plan import ROWS
        from flashdsa.operands import SparseMlaOutOperands
        from flashdsa.verify.cases import SparseMlaCase, make_sparse_mla_inputs

        case = SparseMlaCase(
            "sanitized",
            self.queries,
            self.num_keys,
            ROWS // self.group,
            self.topk,
            duplicates=True,
            invalid=True,
            max_logits=self.max_logits,
        )
        inputs = make_sparse_mla_inputs(case, 0, device)
        kv = inputs.kv.view(-1, case.d_qk)
        out = runner.empty(*inputs.q.shape[:2], case.d_v, dtype=torch.bfloat16)
        lse = runner.empty(*inputs.q.shape[:2], dtype=torch.float32)
        largest = torch.full_like(lse, torch.nan) if self.max_logits else None
        operands = SparseMlaOutOperands(inputs.q, kv, inputs.indices, out, lse, largest)
        prepare_plan(runner, function, self.plan, operands, case.d_qk**-0.5)()
        return inputs, *operands.outputs


@contextmanager
def without_wait(function: str, barrier: str) -> Iterator[None]:
    """Leave out a function's waits for an mbarrier.

    Raises:
        LookupError: it has none; the kernel has changed.
    """
    from flashdsa.dsl.pipeline import Barriers

    real = Barriers.wait
    left_out: list[str] = []

    def wait(self: Any, *args: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        callers = []
        while frame is not None:
            callers.append(frame.f_code.co_name)
            frame = frame.f_back
        if self.planned.name == barrier and function in callers:
            left_out.append(barrier)
        else:
            real(self, *args)

    with patch.object(Barriers, "wait", wait):
        yield
    if not left_out:
        raise LookupError(f"{function} does not wait for {barrier}")
