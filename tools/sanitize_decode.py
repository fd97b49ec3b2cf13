"""Small calls of the Hopper decode for tools/sanitize.py."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Decode:
    """A launch of the decode, judged against float64.

    Attributes:
        packed: as `SparseMlaCase` has it. cluster_size: CTAs of an item.
    """

    packed: str = ""
    cluster_size: int = 2
    num_heads: int = 20
    topk: int = 400

    def __call__(self) -> None:
        """Launch once, and judge."""
        import torch

        from flashdsa.backends.gpu.runner import Gpu
        from flashdsa.backends.sm90.sparse_mla_decode import launch, plan_for
        from flashdsa.jit.loader import load
        from flashdsa.kernels.catalog import SPARSE_MLA_DECODE
        from flashdsa.operands import SparseMlaOperands
        from flashdsa.verify.cases import SparseMlaCase, make_sparse_mla_inputs
        from flashdsa.verify.compare import failures
        from flashdsa.verify.judge_sparse_mla import judge_forward

        case = SparseMlaCase(
            "sanitized", 2, 90, self.num_heads, self.topk, packed=self.packed, invalid=True,
            duplicates=True, topk_length=True,
        )  # fmt: skip
        inputs = make_sparse_mla_inputs(case, 0, "cuda")
        operands = SparseMlaOperands(inputs.q, inputs.kv, inputs.indices, inputs.topk_length, None)
        gpu = Gpu(0)
        out = gpu.empty(*inputs.q.shape[:2], case.d_v, dtype=torch.bfloat16)
        lse = gpu.empty(*inputs.q.shape[:2], dtype=torch.float32)
        function = load(SPARSE_MLA_DECODE, plan_for(inputs.kv))
        with gpu.launching():
            launch(gpu, function, self.cluster_size, operands, out, lse, case.d_qk**-0.5)
        wrong = failures(judge_forward(inputs, out, lse, backend="sm90"))
        if wrong:
            sys.exit("; ".join(wrong))
