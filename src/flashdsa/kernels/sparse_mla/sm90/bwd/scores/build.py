"""Compiles the kernel that computes P and dS; shapes are dynamic, what the plan says is not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, Uint8, Uint16, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from flashdsa.hw import BULK_ALIGNMENT
from flashdsa.kernels.sparse_mla.sm90.bwd.scores.kernel import launch_scores
from flashdsa.kernels.sparse_mla.sm90.bwd.scores.plan import D_QK, D_V, ScoresPlan
from flashdsa.kernels.sparse_mla.sm90.union import members_bits


def _tensor(dtype: Any, shape: tuple[Any, ...], align: int = BULK_ALIGNMENT) -> Any:
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def compile_scores(plan: ScoresPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments:

    (q, kv, do, lse, out, indices, topk_length, delta, rows, members, counts, present, spool, heads,
    sm_scale, num_ctas); see `launch_scores`.
    """
    rows, keys, queries, topk, lengths = (cute.sym_int32() for _ in range(5))
    groups, capacity = cute.sym_int32(), cute.sym_int32()
    spool_bytes = cute.sym_int64()
    member = Uint8 if members_bits(plan.queries) == Uint8.width else Uint16
    return cute.compile(
        launch_scores,
        _tensor(BFloat16, (rows, D_QK)),
        _tensor(BFloat16, (keys, D_QK)),
        _tensor(BFloat16, (rows, D_V)),
        _tensor(Float32, (rows,), 4),
        _tensor(BFloat16, (rows, D_V)),
        _tensor(Int32, (queries, topk), 4),
        _tensor(Int32, (lengths,), 4),
        _tensor(Float32, (rows,), 4),
        _tensor(Int32, (groups, capacity), 4),
        _tensor(member, (groups, capacity), member.width // 8),
        _tensor(Int32, (groups,), 4),
        _tensor(Int32, (groups,), 4),
        _tensor(Uint8, (spool_bytes,)),
        Int32(1),
        Float32(1.0),
        Int32(1),
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi --gpu-arch sm_90a",
    )
