"""Compilation of a decode's launch."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.hw import SM90
from flashdsa.kernels.attention.fake_operands import fake_operands
from flashdsa.kernels.attention.sm90.decode.shared.plan import ClusterPlan


def compile_launch(launch: Any, plan: ClusterPlan) -> Any:
    """Compile a decode's launch with a plan."""
    return cute.compile(
        launch,
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        *fake_operands(packed=plan.packed, d_qk=plan.tile.d_qk, d_v=plan.tile.d_v),
        Int32(1),
        options=options_for(SM90),
    )
