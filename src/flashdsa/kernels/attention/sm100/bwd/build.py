"""Compilation of the Blackwell backward; shapes are dynamic, the plan's values are not."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.hw import SM100
from flashdsa.kernels.attention.fake_operands import fake_lists
from flashdsa.kernels.attention.sm100.bwd.kernel import launch_backward
from flashdsa.kernels.attention.sm100.bwd.operands import fake_operands
from flashdsa.kernels.attention.sm100.bwd.plan import BwdPlan


def compile_backward(plan: BwdPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments:

    (q, kv, dO, lse, O, indices, topk_length, delta, dq, dkv, sm_scale, pairs), or where it is
    deterministic (..., dkv, slots, order, starts, sm_scale, pairs), or of a group (..., dkv, rows,
    members, counts, present, named, sm_scale, pairs); see `launch_backward`.
    """
    further = []
    if plan.deterministic:
        slots, bounds = cute.sym_int32(), cute.sym_int32()
        further = [
            fake_tensor(Float32, (slots, plan.tile.d_qk)),
            fake_tensor(Int32, (slots,), 4),
            fake_tensor(Int32, (bounds,), 4),
        ]
    elif plan.group > 1:
        further = fake_lists(plan.group)
    return cute.compile(
        launch_backward,
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        *fake_operands(plan.group_heads),
        *further,
        Float32(1.0),
        Int32(1),
        options=options_for(SM100),
    )
