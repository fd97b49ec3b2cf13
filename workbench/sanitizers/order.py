"""A small call of the kernel that puts lists in the order of their scores, for a control of
workbench/sanitizers/run.py. Its warps do not wait for each other, but a warp's lanes do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

from workbench.sanitizers.kernel import KernelCase

if TYPE_CHECKING:
    from torch import Tensor

    from flashdsa.kernels.indexer.sm90.order.plan import OrderPlan


@dataclass(frozen=True)
class Order(KernelCase):
    """Two full lists.

    Attributes:
        topk: entries of a list.
    """

    catalog_name: ClassVar[str] = "PREFILL_ORDER"
    topk: int = 300

    @property
    def plan(self) -> OrderPlan:
        """What it is compiled for."""
        from flashdsa.kernels.indexer.sm90.order.plan import OrderPlan

        return OrderPlan(512)

    def wrong(self, function: Any) -> str:
        """What is wrong with the rows on the GPU; "" if nothing is."""
        from flashdsa.backends.gpu.runner import Gpu

        scores, rows = self._launch(function, Gpu(0), "cuda")
        best = scores.sort(dim=1, descending=True, stable=True).indices.int()
        wrong = int((rows.cpu() != best.cpu()).any(1).sum())
        return f"{wrong} of {len(rows)} lists are not in order" if wrong else ""

    def _launch(self, function: Any, runner: Any, device: str) -> tuple[Tensor, Tensor]:
        """Scores, and the places of the best."""
        import torch

        draw = torch.Generator().manual_seed(0)
        scores = torch.randn(2, self.topk, generator=draw).to(device)
        rows = torch.arange(self.topk, dtype=torch.int32, device=device).repeat(2, 1)
        with runner.launching():
            function(rows, scores.view(torch.int32))
        return scores, rows


@contextmanager
def lanes_do_not_wait() -> Iterator[None]:
    """Compile without the barriers of a warp's lanes."""
    from cutlass import cute

    with patch.object(cute.arch, "sync_warp", lambda *_, **__: None):
        yield
