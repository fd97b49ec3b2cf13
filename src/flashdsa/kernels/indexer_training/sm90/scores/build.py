"""Compilation of the kernel of the scores; shapes are dynamic, the plan's values are not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.hw import SM90
from flashdsa.kernels.indexer_training.sm90.scores.kernel import launch_scores
from flashdsa.kernels.indexer_training.sm90.scores.plan import ScoresPlan
from flashdsa.problem import INDEX_HEAD_DIM


def compile_scores(plan: ScoresPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments:

    (q, keys, indices, topk_length, weights, out, parts), see `launch_scores`.
    """
    queries, heads, keys, topk, lengths = (cute.sym_int32() for _ in range(5))
    return cute.compile(
        launch_scores,
        fake_tensor(BFloat16, (queries, heads, INDEX_HEAD_DIM)),
        fake_tensor(BFloat16, (keys, INDEX_HEAD_DIM)),
        fake_tensor(Int32, (queries, topk), 4),
        fake_tensor(Int32, (lengths,), 4),
        fake_tensor(Float32, (queries, heads), 4),
        fake_tensor(Float32, (queries, topk), 4),
        Int32(1),
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options_for(SM90),
    )
