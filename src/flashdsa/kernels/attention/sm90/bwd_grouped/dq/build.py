"""Compilation of dQ; shapes are dynamic, the plan's values are not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, Uint8, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.hw import SM90
from flashdsa.kernels.attention.sm90.bwd_grouped.dq.kernel import Operands, launch_dq
from flashdsa.kernels.attention.sm90.bwd_grouped.dq.plan import DqPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.items import Groups


def compile_dq(plan: DqPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments: those of
    `Operands`, those of `Groups`, num_ctas; see `launch_dq`.
    """
    blocks, block_bytes, groups, capacity, keys = (cute.sym_int32() for _ in range(5))
    queries, heads, topk, lengths = (cute.sym_int32() for _ in range(4))
    rows = queries, heads
    d_qk, d_v = plan.tile.d_qk, plan.tile.d_v
    of_rows = fake_tensor(BFloat16, (*rows, d_qk))
    number = fake_tensor(Float32, rows, 4)
    operands = Operands(
        workspace=fake_tensor(Uint8, (blocks, block_bytes)),
        ids=fake_tensor(Int32, (groups, capacity), 4),
        counts=fake_tensor(Int32, (groups,), 4),
        q=of_rows,
        kv=fake_tensor(BFloat16, (keys, d_qk)),
        do=fake_tensor(BFloat16, (*rows, d_v)),
        lse=number,
        indices=fake_tensor(Int32, (queries, topk), 4),
        topk_length=fake_tensor(Int32, (lengths,), 4),
        delta=number,
        dq=of_rows,
        heads=Int32(1),
        sm_scale=Float32(1.0),
    )
    choice = fake_tensor(Int32, (cute.sym_int32(),), 4)
    return cute.compile(
        launch_dq,
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        *operands,
        *Groups(Int32(0), Int32(1), choice, Int32(0)),
        Int32(1),
        options=options_for(SM90),
    )
