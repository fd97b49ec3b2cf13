"""Compiles dQ; shapes are dynamic, what the plan says is not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Int32, Uint8, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.kernels.sparse_mla.sm90.bwd.dq.kernel import launch_dq
from flashdsa.kernels.sparse_mla.sm90.bwd.dq.plan import DqPlan
from flashdsa.kernels.sparse_mla.sm90.fwd.plan import D_QK


def compile_dq(plan: DqPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments:

    (spool, ids, counts, kv, dq, group_begin, group_end, choice, number,
    num_ctas), see `launch_dq`.
    """
    blocks, block_bytes, groups, capacity, keys, rows = (cute.sym_int32() for _ in range(6))
    return cute.compile(
        launch_dq,
        fake_tensor(Uint8, (blocks, block_bytes)),
        fake_tensor(Int32, (groups, capacity), 4),
        fake_tensor(Int32, (groups,), 4),
        fake_tensor(BFloat16, (keys, D_QK)),
        fake_tensor(BFloat16, (rows, D_QK)),
        Int32(0),
        Int32(1),
        fake_tensor(Int32, (cute.sym_int32(),), 4),
        Int32(0),
        Int32(1),
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi --gpu-arch sm_90a",
    )
