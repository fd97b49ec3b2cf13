"""Small calls of the Hopper decode for workbench/sanitizers/run.py, and of its mutants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.sanitizers.kernel import KernelCase

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Decode(KernelCase):
    """A launch of the decode, judged against float64.

    Attributes:
        packed: as `SparseMlaCase` has it. cluster_size: CTAs of an item.
    """

    catalog_name: ClassVar[str] = "SPARSE_MLA_DECODE"
    packed: str = ""
    cluster_size: int = 2
    num_heads: int = 20
    topk: int = 400

    @property
    def plan(self) -> Any:
        """What it is compiled for."""
        from flashdsa.kernels.sparse_mla.sm90.decode.plan import DecodePlan

        return DecodePlan(packed=bool(self.packed))

    def wrong(self, function: Any) -> str:
        """What is wrong with the results on the GPU; "" if nothing is."""
        from flashdsa.backends.gpu.runner import Gpu
        from flashdsa.verify.compare import failures
        from flashdsa.verify.judge_sparse_mla import judge_forward

        launched = self._launch(function, Gpu(0), "cuda")
        return "; ".join(failures(judge_forward(*launched, backend="sm90")))

    def _launch(self, function: Any, runner: Any, device: str) -> tuple[Any, Tensor, Tensor]:
        """Inputs, O and lse."""
        from flashdsa.backends.sm90.sparse_mla_decode import launch
        from flashdsa.backends.sparse_mla_launches import with_results
        from flashdsa.operands import SparseMlaOperands
        from flashdsa.verify.cases import SparseMlaCase, make_sparse_mla_inputs

        case = SparseMlaCase(
            "sanitized", 2, 90, self.num_heads, self.topk, packed=self.packed, invalid=True,
            duplicates=True, topk_length=True,
        )  # fmt: skip
        inputs = make_sparse_mla_inputs(case, 0, device)
        operands = SparseMlaOperands(inputs.q, inputs.kv, inputs.indices, inputs.topk_length, None)
        into, (out, lse, _) = with_results(runner, operands, case.d_v, False)
        with runner.launching():
            launch(runner, function, self.cluster_size, into, case.d_qk**-0.5)
        return inputs, out, lse


@dataclass(frozen=True)
class FewHeads(Decode):
    """The same of the kernel of at most 32 heads, which takes packed rows only."""

    catalog_name: ClassVar[str] = "SPARSE_MLA_DECODE_FEW_HEADS"
    packed: str = "ue8m0"
    num_heads: int = 13
    topk: int = 700

    @property
    def plan(self) -> Any:
        """What it is compiled for."""
        from flashdsa.kernels.sparse_mla.sm90.few_heads.plan import COLUMNS, FewHeadsPlan

        return FewHeadsPlan(next(columns for columns in COLUMNS if columns >= self.num_heads))
