"""Compilation of the indexer over shared keys; shapes are dynamic, the plan's values are not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import WORD_ALIGNMENT, fake_tensor
from flashdsa.hw import SM90
from flashdsa.kernels.indexer.sm90.prefill.kernel import launch_prefill
from flashdsa.kernels.indexer.sm90.prefill.plan import PrefillPlan
from flashdsa.problem import INDEX_HEAD_DIM


def compile_prefill(plan: PrefillPlan) -> Any:
    """A TVM-FFI function (q_index, k_index, k_scale, weights, starts, ends, topk_indices,
    workspace, num_ctas), with scores (..., topk_indices, topk_scores, workspace, num_ctas), among
    listed keys (..., ends, listed, counts, topk_indices, ...), or of the scores alone (..., ends,
    scores, num_ctas), on torch's current stream; with a cluster_size at last if CTAs share tiles.
    Needs no GPU. See `launch_prefill`."""
    queries, keys, starts, scales = (cute.sym_int32() for _ in range(4))
    topk, ctas = cute.sym_int32(), cute.sym_int32()
    element = Float8E4M3FN if plan.is_fp8 else BFloat16
    if plan.scores_only:
        outputs: tuple[Any, ...] = (fake_tensor(Float32, (queries, keys), WORD_ALIGNMENT),)
    else:
        best = fake_tensor(Int32, (queries, topk), WORD_ALIGNMENT)
        bits = fake_tensor(Int32, (queries, cute.sym_int32()), WORD_ALIGNMENT)
        counts = fake_tensor(Int32, (queries,), WORD_ALIGNMENT)
        outputs = (
            *((bits, counts) if plan.among else ()),
            *([best] * (1 + plan.with_scores)),
            fake_tensor(Int32, (ctas, plan.workspace_words)),
        )
    return cute.compile(
        launch_prefill,
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        fake_tensor(element, (queries, plan.num_heads, INDEX_HEAD_DIM)),
        fake_tensor(element, (keys, INDEX_HEAD_DIM)),
        fake_tensor(Float32, (scales,)),
        fake_tensor(Float32, (queries, plan.num_heads)),
        fake_tensor(Int32, (starts,), WORD_ALIGNMENT),
        fake_tensor(Int32, (queries,), WORD_ALIGNMENT),
        *outputs,
        *([Int32(1)] * (1 + plan.shared)),
        options=options_for(SM90),
    )
