"""Compilation of the kernels that sum over heads; shapes are dynamic, the plan's values are not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.hw import SM90
from flashdsa.kernels.indexer_training.sm90.head_sums.kernel import launch_head_sums
from flashdsa.kernels.indexer_training.sm90.head_sums.plan import TargetPlan


def compile_head_sums(plan: TargetPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments:

    (q, keys, indices, topk_length, lse, attn_sink, out, sm_scale, num_ctas), see
    `launch_head_sums`.
    """
    queries, heads, keys, topk, lengths, sinks = (cute.sym_int32() for _ in range(6))
    return cute.compile(
        launch_head_sums,
        fake_tensor(BFloat16, (queries, heads, plan.width)),
        fake_tensor(BFloat16, (keys, plan.width)),
        fake_tensor(Int32, (queries, topk), 4),
        fake_tensor(Int32, (lengths,), 4),
        fake_tensor(Float32, (queries, heads), 4),
        fake_tensor(Float32, (sinks,), 4),
        fake_tensor(Float32, (queries, topk), 4),
        Float32(1.0),
        Int32(1),
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options_for(SM90),
    )
