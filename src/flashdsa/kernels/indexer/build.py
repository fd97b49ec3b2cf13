"""Compilation of the kernels that every architecture has: the fused indexer and the scores alone.

Shapes are dynamic; the plan's values are not.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float8E4M3FN, Float32, Int32, Uint8, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import WORD_ALIGNMENT, fake_tensor
from flashdsa.kernels.indexer.launch import launch_indexer, launch_logits, launch_splits
from flashdsa.problem import INDEX_HEAD_DIM, PAGE_SIZE


def rows_apart(dtype: Any, rows: Any, width: Any) -> Any:
    """A fake matrix whose rows may have any distance."""
    return make_fake_tensor(
        dtype, (rows, width), stride=(cute.sym_int64(), 1), assumed_align=WORD_ALIGNMENT
    )


def compile_indexer(kernel: Any, plan: Any) -> Any:
    """A TVM-FFI function (q, cache, weights, seq_lens, block_table, topk_indices, num_clusters,
    cluster_size) on torch's current stream; needs no GPU. A plan with splits takes (...,
    topk_indices, arrivals, slots, num_clusters, cluster_size, num_splits)."""
    rows, requests, pages, table, counters, slots = (cute.sym_int32() for _ in range(6))
    workspace = (
        fake_tensor(Int32, (counters,), WORD_ALIGNMENT),
        fake_tensor(Int32, (slots, plan.slot_words)),
    )
    return cute.compile(
        launch_splits if plan.splits else launch_indexer,
        kernel,
        fake_tensor(Float8E4M3FN, (rows, plan.num_heads, INDEX_HEAD_DIM)),
        fake_tensor(Uint8, (pages, PAGE_SIZE, 1, plan.token_bytes)),
        fake_tensor(Float32, (rows, plan.num_heads)),
        fake_tensor(Int32, (rows,), WORD_ALIGNMENT),
        rows_apart(Int32, requests, table),
        fake_tensor(Int32, (rows, plan.topk), WORD_ALIGNMENT),
        *(workspace if plan.splits else ()),
        *(Int32(1) for _ in range(3 if plan.splits else 2)),
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options_for(plan.arch),
    )


def compile_logits(kernel: Any, plan: Any) -> Any:
    """A TVM-FFI function (q, cache, weights, seq_lens, block_table, scores, num_ctas)."""
    rows, pages, table, width = (cute.sym_int32() for _ in range(4))
    return cute.compile(
        launch_logits,
        kernel,
        fake_tensor(Float8E4M3FN, (rows, plan.num_heads, INDEX_HEAD_DIM)),
        fake_tensor(Uint8, (pages, PAGE_SIZE, 1, plan.token_bytes)),
        fake_tensor(Float32, (rows, plan.num_heads)),
        fake_tensor(Int32, (rows,), WORD_ALIGNMENT),
        rows_apart(Int32, rows, table),
        fake_tensor(Float32, (rows, width), WORD_ALIGNMENT),
        Int32(1),
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options_for(plan.arch),
    )
