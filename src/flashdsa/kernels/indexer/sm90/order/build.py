"""Compilation of the kernel that orders lists by score; shapes are dynamic, the plan's values are
not."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import WORD_ALIGNMENT, fake_tensor
from flashdsa.hw import SM90
from flashdsa.kernels.indexer.sm90.order.kernel import launch_order
from flashdsa.kernels.indexer.sm90.order.plan import OrderPlan


def compile_order(plan: OrderPlan) -> Any:
    """A TVM-FFI function (rows, scores) on torch's current stream; needs no GPU."""
    lists = fake_tensor(Int32, (cute.sym_int32(), cute.sym_int32()), WORD_ALIGNMENT)
    return cute.compile(
        launch_order,
        lists,
        lists,
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options_for(SM90),
    )
