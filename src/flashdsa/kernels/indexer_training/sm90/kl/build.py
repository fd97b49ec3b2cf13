"""Compilation of the divergence and its gradient; shapes are dynamic."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.hw import SM90
from flashdsa.kernels.indexer_training.sm90.kl.kernel import launch_kl, launch_kl_bwd
from flashdsa.kernels.indexer_training.sm90.kl.plan import KlPlan


def compile_kl(plan: KlPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments: (scores, target,
    out), or of the gradient (scores, target, grad_kl, out)."""
    rows, topk = cute.sym_int32(), cute.sym_int32()
    matrix = fake_tensor(Float32, (rows, topk), 4)
    vector = fake_tensor(Float32, (rows,), 4)
    others = [vector, matrix] if plan.gradient else [vector]
    return cute.compile(
        launch_kl_bwd if plan.gradient else launch_kl,
        matrix,
        matrix,
        *others,
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options_for(SM90),
    )
