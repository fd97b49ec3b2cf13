"""Compiles the indexer over shared keys; shapes are dynamic, what the plan says is not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.hw import BULK_ALIGNMENT, SM90
from flashdsa.kernels.indexer.build import WORD_ALIGNMENT, compact_tensor
from flashdsa.kernels.indexer.sm90.prefill.kernel import (
    launch_prefill,
    launch_scored,
    launch_scores,
)
from flashdsa.kernels.indexer.sm90.prefill.plan import PrefillPlan
from flashdsa.problem import INDEX_HEAD_DIM


def compile_prefill(plan: PrefillPlan) -> Any:
    """A TVM-FFI function (q_index, k_index, k_scale, weights, starts, ends, topk_indices,
    workspace, num_ctas), with scores (..., topk_indices, topk_scores, workspace, num_ctas), or of
    the scores alone (..., ends, scores, num_ctas), on torch's current stream; needs no GPU."""
    queries, keys, starts, scales = (cute.sym_int32() for _ in range(4))
    topk, ctas = cute.sym_int32(), cute.sym_int32()
    element = Float8E4M3FN if plan.is_fp8 else BFloat16
    if plan.scores_only:
        launch = launch_scores
        outputs: tuple[Any, ...] = (compact_tensor(Float32, (queries, keys), WORD_ALIGNMENT),)
    else:
        launch = launch_scored if plan.with_scores else launch_prefill
        best = compact_tensor(Int32, (queries, topk), WORD_ALIGNMENT)
        outputs = (
            *([best] * (1 + plan.with_scores)),
            compact_tensor(Int32, (ctas, plan.workspace_words), BULK_ALIGNMENT),
        )
    return cute.compile(
        launch,
        compact_tensor(element, (queries, plan.num_heads, INDEX_HEAD_DIM), BULK_ALIGNMENT),
        compact_tensor(element, (keys, INDEX_HEAD_DIM), BULK_ALIGNMENT),
        compact_tensor(Float32, (scales,), BULK_ALIGNMENT),
        compact_tensor(Float32, (queries, plan.num_heads), BULK_ALIGNMENT),
        compact_tensor(Int32, (starts,), WORD_ALIGNMENT),
        compact_tensor(Int32, (queries,), WORD_ALIGNMENT),
        *outputs,
        Int32(1),
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {SM90.name}",
    )
