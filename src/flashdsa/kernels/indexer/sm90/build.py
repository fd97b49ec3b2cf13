"""Compilation of the indexer's variants; shapes are dynamic, the plan's values are not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import WORD_ALIGNMENT, fake_tensor
from flashdsa.hw import BULK_ALIGNMENT, SM90
from flashdsa.kernels.indexer import build
from flashdsa.kernels.indexer.build import rows_apart
from flashdsa.kernels.indexer.sm90.kernel import indexer_kernel
from flashdsa.kernels.indexer.sm90.logits_kernel import logits_kernel
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan, LogitsPlan
from flashdsa.kernels.indexer.sm90.quantize_kernel import launch_quantize, launch_write
from flashdsa.kernels.indexer.sm90.quantize_plan import QuantizePlan
from flashdsa.kernels.indexer.sm90.topk_kernel import launch_topk
from flashdsa.kernels.indexer.sm90.topk_plan import TopkPlan
from flashdsa.problem import INDEX_HEAD_DIM, PAGE_BYTES


def compile_indexer(plan: IndexerPlan) -> Any:
    """See `kernels.indexer.build.compile_indexer`."""
    return build.compile_indexer(indexer_kernel, plan)


def compile_logits(plan: LogitsPlan) -> Any:
    """See `kernels.indexer.build.compile_logits`."""
    return build.compile_logits(logits_kernel, plan)


def compile_topk(plan: TopkPlan) -> Any:
    """A TVM-FFI function (scores, lengths, positions, num_clusters, cluster_size)."""
    rows, width = (cute.sym_int32() for _ in range(2))
    return cute.compile(
        launch_topk,
        rows_apart(Float32, rows, width),
        fake_tensor(Int32, (rows,), WORD_ALIGNMENT),
        fake_tensor(Int32, (rows, plan.topk), WORD_ALIGNMENT),
        Int32(1),
        Int32(1),
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options_for(SM90),
    )


def compile_quantize(plan: QuantizePlan) -> Any:
    """A TVM-FFI function (keys, slots, cache), or without slots (vectors, fp8, scales)."""
    count, pages = cute.sym_int32(), cute.sym_int32()
    element = BFloat16 if plan.dtype == "bfloat16" else Float32
    vectors = fake_tensor(element, (count, INDEX_HEAD_DIM))
    if plan.slot_bits:
        launch = launch_write
        others = (
            fake_tensor(Int32 if plan.slot_bits == 32 else Int64, (count,), plan.slot_bits // 8),
            make_fake_tensor(
                Uint8,
                (pages, PAGE_BYTES),
                stride=(cute.sym_int64(divisibility=BULK_ALIGNMENT), 1),
                assumed_align=BULK_ALIGNMENT,
            ),
        )
    else:
        launch = launch_quantize
        others = (
            fake_tensor(Uint8, (count, INDEX_HEAD_DIM)),
            fake_tensor(Float32, (count,), WORD_ALIGNMENT),
        )
    return cute.compile(
        launch,
        vectors,
        *others,
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options_for(SM90),
    )
