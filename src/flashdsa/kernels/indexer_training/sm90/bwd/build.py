"""Compilation of the backward of the index scores; shapes are dynamic, the plan's values are
not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.hw import SM90
from flashdsa.kernels.attention.ordered_sum import launch_ordered_sum
from flashdsa.kernels.indexer_training.sm90.bwd.kernel import launch_backward, launch_chosen
from flashdsa.kernels.indexer_training.sm90.bwd.plan import BwdPlan, SumPlan
from flashdsa.problem import INDEX_HEAD_DIM


def compile_backward(plan: BwdPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments:

    (q, k, weights, indices, grad_scores, topk_length, scratch, dq, dk, dw, spread, most_ctas,
    clears), and ratio if plan.chosen; see `launch_backward` and `launch_chosen`.
    """
    keys, queries, topk, lengths, places, words = (cute.sym_int32() for _ in range(6))
    of_query = (queries, plan.num_heads, INDEX_HEAD_DIM)
    return cute.compile(
        launch_chosen if plan.chosen else launch_backward,
        fake_tensor(BFloat16, of_query),
        fake_tensor(BFloat16, (keys, INDEX_HEAD_DIM)),
        fake_tensor(Float32, (queries, plan.num_heads), 4),
        fake_tensor(Int32, (queries, topk), 4),
        fake_tensor(Float32, (queries, topk), 4),
        fake_tensor(Int32, (lengths,), 4),
        fake_tensor(Int32, (words,)),
        fake_tensor(BFloat16, of_query),
        fake_tensor(Float32, (places if plan.ordered else keys, INDEX_HEAD_DIM)),
        fake_tensor(Float32, (queries, plan.num_heads), 4),
        Int32(0),
        Int32(1),
        Int32(1),
        *([Float32(1.0)] if plan.chosen else []),
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options_for(SM90),
    )


def compile_sum(plan: SumPlan) -> Any:
    """A TVM-FFI function (slots, order, starts, dk): see `launch_ordered_sum`."""
    del plan
    places, starts, keys = (cute.sym_int32() for _ in range(3))
    return cute.compile(
        launch_ordered_sum,
        fake_tensor(Float32, (places, INDEX_HEAD_DIM)),
        fake_tensor(Int32, (places,), 4),
        fake_tensor(Int32, (starts,), 4),
        fake_tensor(Float32, (keys, INDEX_HEAD_DIM)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options_for(SM90),
    )
