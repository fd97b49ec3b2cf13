"""Compilation of dKV; shapes are dynamic, the plan's values are not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, Uint8, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.hw import SM90
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.kernel import launch_dkv
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import WORDS, DkvPlan


def compile_dkv(plan: DkvPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments:

    (workspace, ids, counts, present, q, do, dkv, heads, group_begin, group_end, choice, number,
    num_ctas); in order (..., num_ctas, words, first, more, is_last). See `launch_dkv`.
    """
    d_qk, d_v = plan.tile.d_qk, plan.tile.d_v
    blocks, block_bytes, groups, capacity, keys = (cute.sym_int32() for _ in range(5))
    rows = cute.sym_int32(), cute.sym_int32()
    order = []
    if plan.ordered:
        words = fake_tensor(Int32, (cute.sym_int32(), plan.slices * WORDS))
        more = fake_tensor(Float32, (cute.sym_int32(), keys, d_qk))
        order = [words, Int32(0), more, Int32(1)]
    return cute.compile(
        launch_dkv,
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        fake_tensor(Uint8, (blocks, block_bytes)),
        fake_tensor(Int32, (groups, capacity), 4),
        fake_tensor(Int32, (groups,), 4),
        fake_tensor(Int32, (groups,), 4),
        fake_tensor(BFloat16, (*rows, d_qk)),
        fake_tensor(BFloat16, (*rows, d_v)),
        fake_tensor(Float32, (keys, d_qk)),
        Int32(128),
        Int32(0),
        Int32(1),
        fake_tensor(Int32, (cute.sym_int32(),), 4),
        Int32(0),
        Int32(1),
        *order,
        options=options_for(SM90),
    )
