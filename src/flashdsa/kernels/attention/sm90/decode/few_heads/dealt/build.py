"""Compilation of the dealt Hopper decode of few heads; shapes are dynamic."""

from __future__ import annotations

from typing import Any

from flashdsa.kernels.attention.sm90.decode.few_heads.dealt.kernel import launch_dealt
from flashdsa.kernels.attention.sm90.decode.few_heads.dealt.plan import DealtFewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.shared.build import compile_dealt_launch


def compile_dealt(plan: DealtFewHeadsPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments: those of
    `Operands`, counters, slots, num_ctas; see `launch_dealt`."""
    return compile_dealt_launch(launch_dealt, plan)
