"""Entries of packed sequences: a thread pools a unit of columns, an entry's threads finish it."""

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, const_expr, cute
from cutlass.cute.runtime import make_fake_tensor

from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.fake_tensors import WORD_ALIGNMENT, fake_tensor
from flashdsa.hw import BULK_ALIGNMENT, SM90
from flashdsa.kernels.entries.sm90.backward import launch_compress_bwd
from flashdsa.kernels.entries.sm90.plan import ROTATED, ROW_ALIGNMENT, CompressPlan
from flashdsa.kernels.entries.sm90.pool import (
    EntryMemory,
    Operands,
    load_numbers,
    locate,
    merge_groups,
    pool,
    store_unit,
    sum_columns,
    this_thread,
    turn,
)
from flashdsa.kernels.entries.sm90.sliced import launch_numbers, launch_slots


@cute.kernel
def compress_kernel(x: Operands, eps: Float32, entries: cute.Tensor, plan: cutlass.Constexpr):
    """One CTA of the grid; arguments as in `launch_compress`."""
    cta, _, _ = cute.arch.block_idx()
    memory = EntryMemory.allocate(plan)
    thread = this_thread(plan)
    entry = cta * plan.entries + thread.entry
    place = locate(x, entry, plan)
    pooled = pool(x, place, thread, plan)
    if const_expr(plan.groups > 1):
        merge_groups(memory, pooled, thread, plan)
    e = [pooled.weighted[i] / pooled.total[i] for i in range(plan.unit)]
    if const_expr(plan.finished):
        squares = Float32(0.0)
        for i in cutlass.range_constexpr(plan.unit):
            squares += e[i] * e[i]
        mean = sum_columns(memory, squares, 0, thread, plan) * Float32(1 / plan.d)
        factor = cute.math.rsqrt(mean + eps)
        weight = load_numbers(x.norm_weight, Int32(0), thread.column, plan.unit)
        e = [e[i] * factor * weight[i] for i in range(plan.unit)]
        e = turn(x, e, place, thread, False, plan)
    if (thread.group == 0) & (entry < entries.shape[0]):
        kept = [e[i] if place.real else Float32(0.0) for i in range(plan.unit)]
        store_unit(entries, entry, thread.column, kept)


@cute.jit
def launch_compress(
    plan: cutlass.Constexpr,
    stream: Any,
    kv: cute.Tensor,
    gate: cute.Tensor,
    cu_seqlens: cute.Tensor,
    ends: cute.Tensor,
    ape: Any,
    norm_weight: Any,
    cos: Any,
    sin: Any,
    state: Any,
    seen: Any,
    eps: Float32,
    entries: cute.Tensor,
):
    """Write `entries` (E, d) bf16, E at least 1, those after the last one 0, on `stream`.

    Args:
        kv, gate: (T, width) bf16, T at least `ratio`, or 1 with a state.
        cu_seqlens: (B + 1,) int32.
        ends: (B,) int32, entries up to each sequence's end.
        ape: (ratio, width) fp32, or None. norm_weight: (1, d), cos, sin: (P, 32) fp32, or None.
        state: (B, R, 2, width) bf16, and seen: (B,) int32, or None.
    """
    x = Operands(kv, gate, cu_seqlens, ends, ape, norm_weight, cos, sin, state, seen)
    ctas = (entries.shape[0] + plan.entries - 1) // plan.entries
    compress_kernel(x, eps, entries, plan).launch(
        grid=[ctas, 1, 1], block=[plan.threads, 1, 1], stream=stream
    )


def compile_compress(plan: CompressPlan) -> Any:
    """Compile `launch_compress`, or the gradient's launch in `backward.py` or `sliced.py`."""
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
    return compile_launch(
        SM90,
        launch,
        plan,
        kv,
        gate,
        fake_tensor(Int32, (cute.sym_int32(),), WORD_ALIGNMENT),
        fake_tensor(Int32, (cute.sym_int32(),), WORD_ALIGNMENT),
        fake_tensor(Float32, (plan.ratio, width)) if plan.ape else None,
        *finish,
        *([] if plan.gradient else kept),
        *more,
    )
