"""Compilation of the kernel that computes the sinks' gradient; shapes are dynamic."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.hw import SM90
from flashdsa.kernels.attention.sm90.sink.kernel import launch_sink
from flashdsa.kernels.attention.sm90.sink.plan import SinkPlan


def compile_sink(plan: SinkPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments: lse, sink, delta,
    d_sink; see `launch_sink`."""
    del plan
    queries, heads = cute.sym_int32(), cute.sym_int32()
    of_queries = fake_tensor(Float32, (queries, heads), 4)
    of_heads = fake_tensor(Float32, (heads,), 4)
    return cute.compile(
        launch_sink,
        of_queries,
        of_heads,
        of_queries,
        of_heads,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options_for(SM90),
    )
