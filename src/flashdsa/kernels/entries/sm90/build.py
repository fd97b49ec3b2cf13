"""Compilation of the kernels of compressed entries; shapes are dynamic, plans are not."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import WORD_ALIGNMENT, fake_tensor
from flashdsa.hw import BULK_ALIGNMENT, SM90
from flashdsa.kernels.entries.sm90.backward import launch_compress_bwd
from flashdsa.kernels.entries.sm90.kernel import launch_compress
from flashdsa.kernels.entries.sm90.plan import ROTATED, ROW_ALIGNMENT, CompressPlan
from flashdsa.kernels.entries.sm90.sliced import launch_numbers, launch_slots


def compile_compress(plan: CompressPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments are those of
    `launch_compress`, or of the gradient those of the launch in `backward.py` or `sliced.py`."""
    width = plan.d * (1 + plan.overlap)
    tokens = cute.sym_int32()
    kv, gate = (
        make_fake_tensor(
            BFloat16,
            (tokens, width),
            stride=(cute.sym_int64(divisibility=ROW_ALIGNMENT), 1),
            assumed_align=BULK_ALIGNMENT,
        )
        for _ in range(2)
    )
    table = fake_tensor(Float32, (cute.sym_int32(), ROTATED // 2))
    finish = [fake_tensor(Float32, (1, plan.d)), table, table] if plan.finished else [None] * 3
    entries = fake_tensor(BFloat16, (cute.sym_int32(), plan.d))
    of_tokens = [fake_tensor(BFloat16, (tokens, width)) for _ in range(2)]
    numbers, sums = (fake_tensor(Float32, (cute.sym_int32(), plan.d)) for _ in range(2))
    launch: Any = launch_compress
    state = fake_tensor(BFloat16, (cute.sym_int32(), cute.sym_int32(), 2, width))
    seen = fake_tensor(Int32, (cute.sym_int32(),), WORD_ALIGNMENT)
    kept = [state, seen] if plan.state else [None, None]
    more: list[Any] = [Float32(0.0), entries]
    if plan.whole:
        launch = launch_compress_bwd
        parts = fake_tensor(Float32, (cute.sym_int32(), plan.ratio, width)) if plan.ape else None
        more += [*of_tokens, parts, sums if plan.finished else None, Int32(0)]
    elif plan.sliced:
        launch, more = launch_slots, [numbers, *of_tokens, sums, Int32(0)]
    elif plan.gradient:
        launch = launch_numbers
        more += [numbers, *of_tokens]
    return cute.compile(
        launch,
        kv,
        gate,
        fake_tensor(Int32, (cute.sym_int32(),), WORD_ALIGNMENT),
        fake_tensor(Int32, (cute.sym_int32(),), WORD_ALIGNMENT),
        fake_tensor(Float32, (plan.ratio, width)) if plan.ape else None,
        *finish,
        *([] if plan.gradient else kept),
        *more,
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options_for(SM90),
    )
