"""Compilation of the kernel for rows that need no scores; shapes are dynamic."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import WORD_ALIGNMENT, fake_tensor
from flashdsa.hw import SM90
from flashdsa.kernels.indexer.build import rows_apart
from flashdsa.kernels.indexer.sm90.unscored.kernel import launch_unscored
from flashdsa.kernels.indexer.sm90.unscored.plan import UnscoredPlan


def compile_unscored(plan: UnscoredPlan) -> Any:
    """A TVM-FFI function (seq_lens, block_table, topk_indices, num_pages) on torch's current
    stream; needs no GPU."""
    rows, requests, table, topk = (cute.sym_int32() for _ in range(4))
    return cute.compile(
        launch_unscored,
        fake_tensor(Int32, (rows,), WORD_ALIGNMENT),
        rows_apart(Int32, requests, table),
        fake_tensor(Int32, (rows, topk), WORD_ALIGNMENT),
        Int32(1),
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options_for(SM90),
    )
