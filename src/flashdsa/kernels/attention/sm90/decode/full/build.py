"""Compilation of the Hopper decode; shapes are dynamic, the plan's values are not."""

from __future__ import annotations

from typing import Any

from flashdsa.kernels.attention.sm90.decode.full.kernel import launch_decode
from flashdsa.kernels.attention.sm90.decode.full.plan import DecodePlan
from flashdsa.kernels.attention.sm90.decode.shared.build import compile_launch


def compile_decode(plan: DecodePlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments: those of
    `Operands`, cluster_size; see `launch_decode`."""
    return compile_launch(launch_decode, plan)
