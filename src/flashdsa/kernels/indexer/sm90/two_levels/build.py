"""Compilation of the ranking in two levels; shapes are dynamic, the plan's values are not."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import WORD_ALIGNMENT, fake_tensor
from flashdsa.hw import SM90
from flashdsa.kernels.indexer.build import rows_apart
from flashdsa.kernels.indexer.sm90.two_levels.kernel import launch_level
from flashdsa.kernels.indexer.sm90.two_levels.plan import LevelPlan


def compile_level(plan: LevelPlan) -> Any:
    """A TVM-FFI function (scores, lengths, starts, candidates, block_table, num_pages, block_bits,
    score_bits, ids, num_clusters, cluster_size) on torch's current stream; needs no GPU."""
    rows, starts, width, listed, requests, pages = (cute.sym_int32() for _ in range(6))
    return cute.compile(
        launch_level,
        rows_apart(Float32, rows, width),
        fake_tensor(Int32, (rows,), WORD_ALIGNMENT),
        fake_tensor(Int32, (starts,), WORD_ALIGNMENT),
        rows_apart(Int32, rows, listed),
        rows_apart(Int32, requests, pages),
        *(Int32(1) for _ in range(3)),
        fake_tensor(Int32, (rows, plan.topk), WORD_ALIGNMENT),
        Int32(1),
        Int32(1),
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options_for(SM90),
    )
