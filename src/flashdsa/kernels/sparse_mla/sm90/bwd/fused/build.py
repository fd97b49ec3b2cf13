"""Compiles the fused backward; shapes are dynamic, what the plan says is not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.kernels.sparse_mla.sm90.bwd.fake_tensors import fake_lists, fake_tensor
from flashdsa.kernels.sparse_mla.sm90.bwd.fused.kernel import launch_fused, launch_fused_or_choose
from flashdsa.kernels.sparse_mla.sm90.bwd.fused.plan import FusedPlan
from flashdsa.kernels.sparse_mla.sm90.fwd.plan import D_QK, D_V


def compile_fused(plan: FusedPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments:

    (q, kv, copy, do, lse, out, indices, topk_length, delta, rows, members, counts, present, named,
    dq, dkv, heads, sm_scale, spread, num_ctas), or (..., num_ctas, more_rows, more_members,
    more_counts, more_present, more_named, choice, ratio) where plan.more is not 0; see
    `launch_fused` and `launch_fused_or_choose`.
    """
    rows, keys, queries, topk, lengths = (cute.sym_int32() for _ in range(5))
    more = []
    if plan.more:
        more = [*fake_lists(plan.more), fake_tensor(Int32, (1,), 4), Float32(1.0)]
    return cute.compile(
        launch_fused_or_choose if plan.more else launch_fused,
        fake_tensor(BFloat16, (rows, D_QK)),
        fake_tensor(BFloat16, (keys, D_QK)),
        fake_tensor(BFloat16, (keys, D_QK)),
        fake_tensor(BFloat16, (rows, D_V)),
        fake_tensor(Float32, (rows,), 4),
        fake_tensor(BFloat16, (rows, D_V)),
        fake_tensor(Int32, (queries, topk), 4),
        fake_tensor(Int32, (lengths,), 4),
        fake_tensor(Float32, (rows,), 4),
        *fake_lists(plan.queries),
        fake_tensor(BFloat16, (rows, D_QK)),
        fake_tensor(Float32, (keys, D_QK)),
        Int32(64),
        Float32(1.0),
        Int32(0),
        Int32(1),
        *more,
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi --gpu-arch sm_90a",
    )
