"""Compilation of the kernel that writes listed keys as bits; shapes are dynamic."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import WORD_ALIGNMENT, fake_tensor
from flashdsa.hw import SM90
from flashdsa.kernels.indexer.sm90.listed.kernel import launch_listed
from flashdsa.kernels.indexer.sm90.listed.plan import ListedPlan


def compile_listed(plan: ListedPlan) -> Any:
    """A TVM-FFI function (candidates, starts, ends, num_keys, block_bits, bits, counts) on torch's
    current stream; needs no GPU."""
    queries, listed, starts, words = (cute.sym_int32() for _ in range(4))
    return cute.compile(
        launch_listed,
        fake_tensor(Int32, (queries, listed), WORD_ALIGNMENT),
        fake_tensor(Int32, (starts,), WORD_ALIGNMENT),
        fake_tensor(Int32, (queries,), WORD_ALIGNMENT),
        Int32(1),
        Int32(1),
        fake_tensor(Int32, (queries, words), WORD_ALIGNMENT),
        fake_tensor(Int32, (queries,), WORD_ALIGNMENT),
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options_for(SM90),
    )
