"""Compilation of the backward with split heads; shapes are dynamic."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.hw import SM100
from flashdsa.kernels.attention.sm100.bwd.heads.kernel import launch_heads
from flashdsa.kernels.attention.sm100.bwd.heads.plan import HeadsPlan
from flashdsa.kernels.attention.sm100.bwd.operands import fake_operands
from flashdsa.kernels.attention.sm100.core.tile import PAIR_ROWS


def compile_heads(plan: HeadsPlan) -> Any:
    """A TVM-FFI function as `compile_backward` gives for 128 heads; needs no GPU."""
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        launch_heads,
        plan,
        stream,
        *fake_operands(PAIR_ROWS),
        Float32(1.0),
        Int32(1),
        options=options_for(SM100),
    )
