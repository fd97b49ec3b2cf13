"""Compilation of the Blackwell forward; shapes are dynamic, the plan's values are not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.hw import SM100
from flashdsa.kernels.attention.fake_operands import (
    fake_lists,
    fake_max_logits,
    fake_operands,
)
from flashdsa.kernels.attention.sm100.fwd.kernel import launch_forward
from flashdsa.kernels.attention.sm100.fwd.plan import FwdPlan


def compile_forward(plan: FwdPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments: those of
    `Operands`, max_logits, of keys that lie apart their RoPE columns, and of a group rows, members
    and counts; see `launch_forward`."""
    operands = fake_operands(plan.group_heads)
    apart: tuple[Any, ...] = ()
    if plan.kv_apart:
        keys, tile = operands.kv.shape[0], plan.tile
        operands = operands._replace(kv=fake_tensor(BFloat16, (keys, tile.d_v)))
        apart = (fake_tensor(BFloat16, (keys, tile.d_qk - tile.d_v)),)
    return cute.compile(
        launch_forward,
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        *operands,
        fake_max_logits(),
        *apart,
        *(fake_lists(plan.group)[:3] if plan.group > 1 else ()),
        options=options_for(SM100),
    )
