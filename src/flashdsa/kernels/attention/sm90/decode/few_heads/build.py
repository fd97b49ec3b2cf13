"""Compilation of the Hopper decode of few heads; shapes are dynamic, the plan's values are not."""

from __future__ import annotations

from typing import Any

from flashdsa.kernels.attention.sm90.decode.few_heads.kernel import launch_few_heads
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import FewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.shared.build import compile_launch


def compile_few_heads(plan: FewHeadsPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments: those of
    `Operands`, cluster_size; see `launch_few_heads`."""
    return compile_launch(launch_few_heads, plan)
