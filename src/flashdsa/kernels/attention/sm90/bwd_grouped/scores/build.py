"""Compilation of the kernel that computes P and dS; shapes are dynamic, the plan's values are
not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, Uint8, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.hw import SM90
from flashdsa.kernels.attention.fake_operands import fake_lists
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.kernel import launch_scores
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.plan import ScoresPlan


def compile_scores(plan: ScoresPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments:

    (q, kv, do, lse, out, indices, topk_length, delta, rows, members, counts, present, named,
    workspace, heads, sm_scale, num_ctas). Optional: (q, kv, do, lse, delta, rows, members, counts,
    present, named, workspace, heads, sm_scale, num_ctas, choice). See `launch_scores`.
    """
    d_qk, d_v = plan.tile.d_qk, plan.tile.d_v
    heads, keys, queries, topk, lengths = (cute.sym_int32() for _ in range(5))
    rows = queries, heads
    blocks, block_bytes = cute.sym_int32(), cute.sym_int32()
    choice = []
    of_rows = [fake_tensor(Float32, rows, 4)]
    before = [
        fake_tensor(BFloat16, (*rows, d_v)),
        fake_tensor(Int32, (queries, topk), 4),
        fake_tensor(Int32, (lengths,), 4),
    ]
    if plan.optional:
        before, choice = [], [fake_tensor(Int32, (1,), 4)]
    return cute.compile(
        launch_scores,
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        fake_tensor(BFloat16, (*rows, d_qk)),
        fake_tensor(BFloat16, (keys, d_qk)),
        fake_tensor(BFloat16, (*rows, d_v)),
        *of_rows,
        *before,
        *of_rows,
        *fake_lists(plan.queries),
        fake_tensor(Uint8, (blocks, block_bytes)),
        Int32(1),
        Float32(1.0),
        Int32(1),
        *choice,
        options=options_for(SM90),
    )
