"""Compiles the Blackwell backward; shapes are dynamic, what the plan says is not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from flashdsa.hw import BULK_ALIGNMENT
from flashdsa.kernels.sparse_mla.sm100.bwd.kernel import (
    launch_backward,
    launch_deterministic_backward,
)
from flashdsa.kernels.sparse_mla.sm100.bwd.plan import B_H, D_QK, D_V, BwdPlan


def _tensor(dtype: Any, shape: tuple[Any, ...], align: int = BULK_ALIGNMENT) -> Any:
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def compile_backward(plan: BwdPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments:

    (q, kv, dO, lse, O, indices, topk_length, delta, dq, dkv, sm_scale), or where it is
    deterministic (..., dkv, slots, order, starts, sm_scale); see `launch_backward` and
    `launch_deterministic_backward`.
    """
    rows, queries, keys, topk = (cute.sym_int32() for _ in range(4))
    of_slots = []
    if plan.deterministic:
        slots, bounds = cute.sym_int32(), cute.sym_int32()
        of_slots = [
            _tensor(Float32, (slots, D_QK)),
            _tensor(Int32, (slots,), 4),
            _tensor(Int32, (bounds,), 4),
        ]
    return cute.compile(
        launch_deterministic_backward if plan.deterministic else launch_backward,
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
        *of_slots,
        Float32(1.0),
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi --gpu-arch sm_100a",
    )
