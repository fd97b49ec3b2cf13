"""Compilation of the kernel that joins the lists of a backward's queries; shapes are dynamic."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Int32, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.hw import SM90
from flashdsa.kernels.attention.sm90.join.kernel import launch_compact
from flashdsa.kernels.attention.sm90.join.plan import JoinPlan


def compile_join(plan: JoinPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments: kv, indices,
    topk_length, those of `MoreOperands`, ids, lengths; see `launch_compact`."""
    del plan
    queries, d_qk = cute.sym_int32(), cute.sym_int32()

    def of_source() -> list[Any]:
        """Rows, the list, its lengths and its ends."""
        per_query = [fake_tensor(Int32, (cute.sym_int32(),), 4) for _ in range(2)]
        slots = fake_tensor(Int32, (queries, cute.sym_int32()), 4)
        return [fake_tensor(BFloat16, (cute.sym_int32(), d_qk)), slots, *per_query]

    return cute.compile(
        launch_compact,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        *of_source(),
        *of_source(),
        Int32(0),
        fake_tensor(Int32, (queries, cute.sym_int32()), 4),
        fake_tensor(Int32, (queries,), 4),
        options=options_for(SM90),
    )
