"""Compiles the kernels that sum over heads; shapes are dynamic, what the plan says is not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from flashdsa.hw import BULK_ALIGNMENT
from flashdsa.kernels.indexer_training.sm90.head_sums.kernel import launch_head_sums
from flashdsa.kernels.indexer_training.sm90.head_sums.plan import TargetPlan


def _tensor(dtype: Any, shape: tuple[Any, ...], align: int = 4) -> Any:
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def compile_head_sums(plan: TargetPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments:

    (q, keys, indices, topk_length, lse, attn_sink, out, sm_scale, num_ctas), see
    `launch_head_sums`.
    """
    queries, heads, keys, topk, lengths, sinks = (cute.sym_int32() for _ in range(6))
    return cute.compile(
        launch_head_sums,
        _tensor(BFloat16, (queries, heads, plan.width), BULK_ALIGNMENT),
        _tensor(BFloat16, (keys, plan.width), BULK_ALIGNMENT),
        _tensor(Int32, (queries, topk)),
        _tensor(Int32, (lengths,)),
        _tensor(Float32, (queries, heads)),
        _tensor(Float32, (sinks,)),
        _tensor(Float32, (queries, topk)),
        Float32(1.0),
        Int32(1),
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi --gpu-arch sm_90a",
    )
