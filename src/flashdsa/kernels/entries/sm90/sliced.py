"""Gradients of entries of many slots, in two launches: what each column needs, then the slots.

The first one pools like the forward and writes five numbers a column of an entry. In the second one
a CTA has a slice of the columns, and a thread the same slots of each entry: the gradient of the
position bias stays in its registers.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.kernels.entries.sm90.backward import clear_unpooled, entry_gradient
from flashdsa.kernels.entries.sm90.plan import NUMBERS, SLICE
from flashdsa.kernels.entries.sm90.pool import (
    EntryMemory,
    Operands,
    Place,
    load_numbers,
    load_slots,
    locate,
    merge_groups,
    pool,
    power,
    store_numbers,
    store_unit,
    this_thread,
)


@cute.kernel
def compress_kernel_numbers(
    x: Operands, grad: cute.Tensor, eps: Float32, numbers: cute.Tensor, d_kv: cute.Tensor,
    d_gate: cute.Tensor, plan: cutlass.Constexpr,
):  # fmt: skip
    """One CTA of the grid, an entry's; arguments as in `launch_numbers`."""
    entry, _, _ = cute.arch.block_idx()
    memory = EntryMemory.allocate(plan)
    thread = this_thread(plan)
    clear_unpooled(x, d_kv, d_gate, thread, plan)
    place = locate(x, entry, plan)
    pooled = pool(x, place, thread, plan)
    merge_groups(memory, pooled, thread, plan)
    inverse = [Float32(1.0) / pooled.total[i] for i in range(plan.unit)]
    e = [pooled.weighted[i] * inverse[i] for i in range(plan.unit)]
    weight = cute.make_rmem_tensor(plan.unit, Float32)
    for i in cutlass.range_constexpr(plan.unit):
        weight[i] = Float32(0.0)
    de = entry_gradient(x, memory, grad, entry, eps, e, place, thread, weight, plan)
    if thread.group == 0:
        largest = [pooled.largest[i] for i in range(plan.unit)]
        of_weight = [weight[i] for i in range(plan.unit)]
        row = entry * NUMBERS
        for values in (largest, inverse, e, de, of_weight):
            store_numbers(numbers, row, thread.column, values)
            row += 1


@cute.kernel
def compress_kernel_slots(
    x: Operands, numbers: cute.Tensor, d_kv: cute.Tensor, d_gate: cute.Tensor, d_ape: cute.Tensor,
    plan: cutlass.Constexpr,
):  # fmt: skip
    """One CTA of the grid; arguments as in `launch_slots`."""
    piece, stripe, _ = cute.arch.block_idx()
    _, stripes, _ = cute.arch.grid_dim()
    number, _, _ = cute.arch.thread_idx()
    lanes = cutlass.const_expr(SLICE // plan.unit)
    each = cutlass.const_expr(plan.slots * lanes // plan.threads)
    column = piece * SLICE + number % lanes * plan.unit
    slot = number // lanes * each
    sums = cute.make_rmem_tensor(each * plan.unit, Float32)
    for i in cutlass.range_constexpr(each * plan.unit):
        sums[i] = Float32(0.0)
    count = Int32(numbers.shape[0]) // NUMBERS
    for entry in cutlass.range(stripe, count, stripes, unroll=1):
        place = locate(x, entry, plan)
        if place.real:
            add_entry(x, numbers, entry, place, slot, column, sums, d_kv, d_gate, plan)
    for s in cutlass.range_constexpr(each):
        values = [sums[s * plan.unit + i] for i in range(plan.unit)]
        store_numbers(d_ape, stripe * plan.slots + slot + s, column, values)


@cute.jit
def add_entry(
    x: Operands, numbers: cute.Tensor, entry: Int32, place: Place, slot: Int32, column: Int32,
    sums: cute.Tensor, d_kv: cute.Tensor, d_gate: cute.Tensor, plan: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Write the gradients of an entry's slots from `slot` on; add those of the gates to `sums`."""
    unit = plan.unit
    count = cutlass.const_expr(plan.slots * SLICE // unit // plan.threads)
    values, logits = load_slots(x, place, slot, slot, column, count, plan)
    first = entry * NUMBERS
    largest = load_numbers(numbers, first, column, unit)
    inverse = load_numbers(numbers, first + 1, column, unit)
    e = load_numbers(numbers, first + 2, column, unit)
    de = load_numbers(numbers, first + 3, column, unit)
    for s in cutlass.range_constexpr(count):
        of_kv = [power(logits[s][i] - largest[i]) * inverse[i] * de[i] for i in range(unit)]
        of_gate = [of_kv[i] * (values[s][i] - e[i]) for i in range(unit)]
        store_unit(d_kv, place.row + slot + s, column, of_kv)
        store_unit(d_gate, place.row + slot + s, column, of_gate)
        for i in cutlass.range_constexpr(unit):
            sums[s * unit + i] = sums[s * unit + i] + of_gate[i]


@cute.jit
def launch_numbers(
    plan: cutlass.Constexpr,
    stream: Any,
    kv: cute.Tensor,
    gate: cute.Tensor,
    cu_seqlens: cute.Tensor,
    ends: cute.Tensor,
    ape: cute.Tensor,
    norm_weight: cute.Tensor,
    cos: cute.Tensor,
    sin: cute.Tensor,
    eps: Float32,
    grad: cute.Tensor,
    numbers: cute.Tensor,
    d_kv: cute.Tensor,
    d_gate: cute.Tensor,
):
    """Write `numbers` (E * NUMBERS, d) fp32 on `stream`: of each column of an entry its largest
    logit, 1 over the sum of its weights, what is pooled, the gradient of that, and what the entry
    adds to the gradient of the norm's weight, which is 0 without an entry. And set to 0 what no
    entry pools.

    Args: as for `launch_compress_bwd`.
    """
    x = Operands(kv, gate, cu_seqlens, ends, ape, norm_weight, cos, sin)
    compress_kernel_numbers(x, grad, eps, numbers, d_kv, d_gate, plan).launch(
        grid=[grad.shape[0], 1, 1], block=[plan.threads, 1, 1], stream=stream
    )


@cute.jit
def launch_slots(
    plan: cutlass.Constexpr,
    stream: Any,
    kv: cute.Tensor,
    gate: cute.Tensor,
    cu_seqlens: cute.Tensor,
    ends: cute.Tensor,
    ape: cute.Tensor,
    norm_weight: cute.Tensor,
    cos: cute.Tensor,
    sin: cute.Tensor,
    numbers: cute.Tensor,
    d_kv: cute.Tensor,
    d_gate: cute.Tensor,
    d_ape: cute.Tensor,
    stripes: Int32,
):
    """Write the gradients of kv and gate, and parts of that of `ape`, on `stream`.

    Args:
        numbers: of `launch_numbers`. d_ape: (stripes * ratio, d) fp32, sums of every entry that is
            a stripe's. Others as for `launch_compress_bwd`.
    """
    x = Operands(kv, gate, cu_seqlens, ends, ape, norm_weight, cos, sin)
    compress_kernel_slots(x, numbers, d_kv, d_gate, d_ape, plan).launch(
        grid=[plan.d // SLICE, stripes, 1], block=[plan.threads, 1, 1], stream=stream
    )
