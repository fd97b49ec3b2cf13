"""Compilation of the Hopper forward; shapes are dynamic, the plan's values are not."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.hw import SM90
from flashdsa.kernels.attention.fake_operands import (
    fake_lists,
    fake_max_logits,
    fake_more,
    fake_operands,
)
from flashdsa.kernels.attention.operands import Operands
from flashdsa.kernels.attention.sm90.fwd.kernel import launch_forward
from flashdsa.kernels.attention.sm90.fwd.plan import FwdPlan


def fake_draws() -> list[Any]:
    """Order, counters and choice of items that are drawn."""
    numbers = [fake_tensor(Int32, (cute.sym_int32(),), 4) for _ in range(2)]
    return [fake_tensor(Int32, (cute.sym_int32(), 2), 8), *numbers]


def fake_joined(operands: Operands) -> list[Any]:
    """Joint lists of the operands' queries."""
    queries = operands.indices.shape[0]
    ids = fake_tensor(Int32, (queries, cute.sym_int32()), 4)
    return [ids, fake_tensor(Int32, (queries,), 4), Int32(0)]


def compile_forward(plan: FwdPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments: those of
    `Operands`, max_logits, num_ctas, of a joined plan those of `MoreOperands`, of a group rows,
    members and counts, of both those of `JoinedIds`, and where items are drawn order, counters and
    choice; see `launch_forward`."""
    grouped = plan.group > 1
    heads = plan.group_heads if grouped else None
    operands = fake_operands(heads, d_qk=plan.tile.d_qk, d_v=plan.tile.d_v)
    return cute.compile(
        launch_forward,
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        *operands,
        fake_max_logits(),
        Int32(1),
        *(fake_more(operands) if plan.joined else ()),
        *(fake_lists(plan.group)[:3] if grouped else ()),
        *(fake_joined(operands) if grouped and plan.joined else ()),
        *(fake_draws() if plan.drawn else ()),
        options=options_for(SM90),
    )
