"""Compiles the Hopper forward; shapes are dynamic, what the plan says is not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, Uint8, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from flashdsa.hw import BULK_ALIGNMENT
from flashdsa.kernels.sparse_mla.sm90.fwd.kernel import launch_forward, launch_grouped_forward
from flashdsa.kernels.sparse_mla.sm90.fwd.plan import D_QK, D_V, FwdPlan


def _tensor(dtype: Any, shape: tuple[Any, ...], align: int = BULK_ALIGNMENT) -> Any:
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def compile_forward(plan: FwdPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments:

    (q, kv, indices, topk_length, attn_sink, out, lse, max_logits, sm_scale, num_ctas), or of a
    group (..., max_logits, rows, members, counts, sm_scale, num_ctas); see `launch_forward` and
    `launch_grouped_forward`.
    """
    queries, heads, keys, topk, lengths, sinks, maxima = (cute.sym_int32() for _ in range(7))
    lists = []
    if plan.group > 1:
        heads = plan.group_heads
        groups, most = cute.sym_int32(), cute.sym_int32()
        lists = [
            _tensor(Int32, (groups, most), 4),
            _tensor(Uint8, (groups, most), 1),
            _tensor(Int32, (groups,), 4),
        ]
    return cute.compile(
        launch_grouped_forward if plan.group > 1 else launch_forward,
        _tensor(BFloat16, (queries, heads, D_QK)),
        _tensor(BFloat16, (keys, D_QK)),
        _tensor(Int32, (queries, topk), 4),
        _tensor(Int32, (lengths,), 4),
        _tensor(Float32, (sinks,), 4),
        _tensor(BFloat16, (queries, heads, D_V)),
        _tensor(Float32, (queries, heads), 4),
        _tensor(Float32, (maxima,), 4),
        *lists,
        Float32(1.0),
        Int32(1),
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi --gpu-arch sm_90a",
    )
