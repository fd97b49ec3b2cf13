"""Entries of packed sequences: a thread pools a unit of columns, an entry's threads finish it."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute

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
    plan: cutlass.Constexpr,
    stream: Any,
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
