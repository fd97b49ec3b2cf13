"""Compiles the Hopper decode; shapes are dynamic, what the plan says is not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, Uint8, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from flashdsa.hw import BULK_ALIGNMENT
from flashdsa.kernels.sparse_mla.sm90.decode.kernel import launch_decode
from flashdsa.kernels.sparse_mla.sm90.decode.plan import DecodePlan
from flashdsa.kernels.sparse_mla.sm90.fwd.plan import D_QK, D_V
from flashdsa.problem import KV_ROW_BYTES


def _tensor(dtype: Any, shape: tuple[Any, ...], align: int = BULK_ALIGNMENT) -> Any:
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def compile_decode(plan: DecodePlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments:

    (q, kv, indices, topk_length, attn_sink, out, lse, sm_scale, cluster_size); see `launch_decode`.
    """
    return compile_launch(launch_decode, plan)


def compile_launch(launch: Any, plan: Any) -> Any:
    """A decode's launch with these arguments; `plan.packed` says what kv's rows are."""
    queries, heads, keys, topk, lengths, sinks = (cute.sym_int32() for _ in range(6))
    row = (Uint8, (keys, KV_ROW_BYTES)) if plan.packed else (BFloat16, (keys, D_QK))
    return cute.compile(
        launch,
        _tensor(BFloat16, (queries, heads, D_QK)),
        _tensor(*row),
        _tensor(Int32, (queries, topk), 4),
        _tensor(Int32, (lengths,), 4),
        _tensor(Float32, (sinks,), 4),
        _tensor(BFloat16, (queries, heads, D_V)),
        _tensor(Float32, (queries, heads), 4),
        Float32(1.0),
        Int32(1),
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi --gpu-arch sm_90a",
    )
