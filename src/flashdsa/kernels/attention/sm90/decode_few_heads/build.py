"""Compilation of the Hopper decode of few heads; shapes are dynamic, the plan's values are not."""

from __future__ import annotations

from typing import Any

from flashdsa.kernels.attention.sm90.decode.build import compile_launch
from flashdsa.kernels.attention.sm90.decode_few_heads.kernel import launch_few_heads
from flashdsa.kernels.attention.sm90.decode_few_heads.plan import FewHeadsPlan


def compile_few_heads(plan: FewHeadsPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments: those of
    `Operands`, cluster_size; see `launch_few_heads`."""
    return compile_launch(launch_few_heads, plan, packed=True)
