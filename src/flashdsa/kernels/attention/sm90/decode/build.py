"""Compilation of the Hopper decode; shapes are dynamic, the plan's values are not."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.kernels.attention.fake_operands import fake_operands
from flashdsa.kernels.attention.sm90.decode.kernel import launch_decode
from flashdsa.kernels.attention.sm90.decode.plan import DecodePlan


def compile_decode(plan: DecodePlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments: those of
    `Operands`, cluster_size; see `launch_decode`."""
    return compile_launch(launch_decode, plan, packed=plan.packed)


def compile_launch(launch: Any, plan: Any, *, packed: bool) -> Any:
    """Compile a decode's launch with these arguments."""
    return cute.compile(
        launch,
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        *fake_operands(packed=packed),
        Int32(1),
        options="--enable-tvm-ffi --gpu-arch sm_90a",
    )
