"""Compiles the Blackwell backward; shapes are dynamic, what the plan says is not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from flashdsa.kernels.sparse_mla.sm100.bwd.kernel import launch_backward
from flashdsa.kernels.sparse_mla.sm100.bwd.plan import B_H, D_QK, D_V, BwdPlan

TMA_ALIGNMENT = 16
"""Bytes, of every address that a bulk copy or TMA takes."""


def _tensor(dtype: Any, shape: tuple[Any, ...], align: int = TMA_ALIGNMENT) -> Any:
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def compile_backward(plan: BwdPlan) -> Any:
    """A TVM-FFI function (q, kv, dO, lse, O, indices, topk_length, delta, dq, dkv, sm_scale) on
    torch's current stream; needs no GPU."""
    rows, queries, keys, topk = (cute.sym_int32() for _ in range(4))
    return cute.compile(
        launch_backward,
        _tensor(BFloat16, (rows, D_QK)),
        _tensor(BFloat16, (keys, D_QK)),
        _tensor(BFloat16, (rows, D_V)),
        _tensor(Float32, (queries, B_H), 4),
        _tensor(BFloat16, (rows, D_V)),
        _tensor(Int32, (queries, topk), 4),
        _tensor(Int32, (queries,), 4),
        _tensor(Float32, (queries, B_H), 4),
        _tensor(BFloat16, (rows, D_QK)),
        _tensor(Float32, (keys, D_QK)),
        Float32(1.0),
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi --gpu-arch sm_100a",
    )
