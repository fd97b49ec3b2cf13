"""Compiles the Blackwell forward; shapes are dynamic, what the plan says is not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, Uint8, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from flashdsa.hw import BULK_ALIGNMENT
from flashdsa.kernels.sparse_mla.sm100.fwd.kernel import launch_forward, launch_grouped_forward
from flashdsa.kernels.sparse_mla.sm100.fwd.plan import D_QK, D_V, FwdPlan


def _tensor(dtype: Any, shape: tuple[Any, ...], align: int = BULK_ALIGNMENT) -> Any:
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def compile_forward(plan: FwdPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments:

    (q, kv, indices, topk_length, attn_sink, out, lse, max_logits, sm_scale), or of a group
    (..., max_logits, rows, members, counts, sm_scale); see `launch_forward` and
    `launch_grouped_forward`.
    """
    queries, keys, topk, lengths, sinks, maxima = (cute.sym_int32() for _ in range(6))
    lists = []
    if plan.group > 1:
        groups, most = cute.sym_int32(), cute.sym_int32()
        lists = [
            _tensor(Int32, (groups, most), 4),
            _tensor(Uint8, (groups, most), 1),
            _tensor(Int32, (groups,), 4),
        ]
    return cute.compile(
        launch_grouped_forward if plan.group > 1 else launch_forward,
        _tensor(BFloat16, (queries, plan.group_heads, D_QK)),
        _tensor(BFloat16, (keys, D_QK)),
        _tensor(Int32, (queries, topk), 4),
        _tensor(Int32, (lengths,), 4),
        _tensor(Float32, (sinks,), 4),
        _tensor(BFloat16, (queries, plan.group_heads, D_V)),
        _tensor(Float32, (queries, plan.group_heads), 4),
        _tensor(Float32, (maxima,), 4),
        *lists,
        Float32(1.0),
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi --gpu-arch sm_100a",
    )
