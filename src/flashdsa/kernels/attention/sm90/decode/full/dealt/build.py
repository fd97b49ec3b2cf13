"""Compilation of the dealt Hopper decode; shapes are dynamic, the plan's values are not."""

from __future__ import annotations

from typing import Any

from flashdsa.kernels.attention.sm90.decode.full.dealt.kernel import launch_dealt
from flashdsa.kernels.attention.sm90.decode.full.dealt.plan import DealtPlan
from flashdsa.kernels.attention.sm90.decode.shared.build import compile_dealt_launch


def compile_dealt(plan: DealtPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments: those of
    `Operands`, of a joined plan those of `MoreOperands`, counters, slots, num_ctas; see
    `launch_dealt`."""
    return compile_dealt_launch(launch_dealt, plan)
