"""Compiles the kernel of the scores; shapes are dynamic, what the plan says is not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from flashdsa.hw import BULK_ALIGNMENT
from flashdsa.kernels.indexer_training.sm90.scores.kernel import launch_scores
from flashdsa.kernels.indexer_training.sm90.scores.plan import ScoresPlan
from flashdsa.problem import INDEX_HEAD_DIM


def _tensor(dtype: Any, shape: tuple[Any, ...], align: int = 4) -> Any:
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def compile_scores(plan: ScoresPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments:

    (q, keys, indices, topk_length, weights, out, parts), see `launch_scores`.
    """
    queries, heads, keys, topk, lengths = (cute.sym_int32() for _ in range(5))
    return cute.compile(
        launch_scores,
        _tensor(BFloat16, (queries, heads, INDEX_HEAD_DIM), BULK_ALIGNMENT),
        _tensor(BFloat16, (keys, INDEX_HEAD_DIM), BULK_ALIGNMENT),
        _tensor(Int32, (queries, topk)),
        _tensor(Int32, (lengths,)),
        _tensor(Float32, (queries, heads)),
        _tensor(Float32, (queries, topk)),
        Int32(1),
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi --gpu-arch sm_90a",
    )
