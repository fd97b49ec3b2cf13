"""Small calls of the Hopper indexer over shared keys for workbench/sanitizers/run.py, and of its mutants."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

from workbench.sanitizers.kernel import KernelCase

if TYPE_CHECKING:
    from torch import Tensor

    from flashdsa.kernels.indexer.sm90.prefill.plan import PrefillPlan

QUERIES = 20


@dataclass(frozen=True)
class Prefill(KernelCase):
    """A launch of the kernel, whose rows must be the best of its own scores.

    Attributes:
        keys: that the last query sees; from 12,289 on with 16 heads they take several segments.
        plateaus: most keys are equal.
    """

    catalog_name: ClassVar[str] = "PREFILL"
    keys: int = 700
    num_heads: int = 64
    topk: int = 300
    dtype: str = "float8_e4m3fn"
    plateaus: bool = False

    @property
    def plan(self) -> PrefillPlan:
        """What it is compiled for."""
        from flashdsa.kernels.indexer.sm90.prefill.plan import PrefillPlan

        return PrefillPlan(self.num_heads, self.dtype)

    def wrong(self, function: Any) -> str:
        """What is wrong with the rows on the GPU; "" if nothing is."""
        from flashdsa import prefill_logits, reference
        from flashdsa.backends.gpu.runner import Gpu

        inputs, ids = self._launch(function, Gpu(0), "cuda")
        scores = prefill_logits(*inputs.operands, **inputs.options, backend="sm90")
        starts = None if inputs.starts is None else inputs.starts.cpu()
        best = reference.dsa_topk_prefill(scores.cpu(), starts, inputs.ends.cpu(), self.topk)
        rows = int((ids.cpu() != best).any(1).sum())
        return f"{rows} of {QUERIES} queries have not the best rows" if rows else ""

    def _launch(self, function: Any, runner: Any, device: str) -> tuple[Any, Tensor]:
        """Inputs and rows."""
        import torch

        from flashdsa.backends.sm90.prefill import launch
        from flashdsa.operands import TopkPrefillOperands
        from flashdsa.verify.prefill_cases import PrefillCase, causal, make_prefill_inputs

        case = PrefillCase(
            "sanitized", causal(QUERIES, self.keys), self.topk, self.num_heads,
            getattr(torch, self.dtype), plateaus=self.plateaus,
        )  # fmt: skip
        x = make_prefill_inputs(case, 0, device)
        ids = x.output_buffer()
        operands = TopkPrefillOperands(
            x.q_index, x.k_index, x.weights, x.ends, ids, x.starts, x.k_scale
        )
        with patch.object(type(runner), "function", return_value=function):
            launch(runner, self.plan, operands)
        return x, ids


def prefill_by_score() -> None:
    """The operation as users call it, in the order of scores: rows of several segments, 16
    heads; one query sees fewer keys than it wants."""
    import torch

    import flashdsa
    from flashdsa import reference
    from flashdsa.verify.prefill_cases import PrefillCase, causal, make_prefill_inputs

    ranges = ((0, 200), *causal(QUERIES, 12400))
    x = make_prefill_inputs(PrefillCase("sanitized", ranges, 300, 16, sorted=True), 0, "cuda")
    ids = x.output_buffer()
    flashdsa.dsa_topk_prefill(*x.operands, ids, sorted=True, backend="sm90", **x.options)
    scores = flashdsa.prefill_logits(*x.operands, backend="sm90", **x.options).cpu()
    starts = None if x.starts is None else x.starts.cpu()
    best = reference.dsa_topk_prefill(scores, starts, x.ends.cpu(), 300, sorted=True)
    if not torch.equal(ids.cpu(), best):
        sys.exit("by score: not the best rows in their order")
