"""Entries of packed sequences: a thread pools a unit of columns, an entry's threads finish it.

Gradients of entries of many slots take two launches: what each column needs, then the slots. The
first one pools like the forward and writes five numbers a column of an entry. In the second one a
CTA has a slice of the columns, and a thread the same slots of each entry: the gradient of the
position bias stays in its registers.
"""

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, const_expr, cute
from cutlass.cute.runtime import make_fake_tensor

from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.fake_tensors import WORD_ALIGNMENT, fake_tensor
from flashdsa.dsl.grids import launch_ctas
from flashdsa.dsl.memory import Memory
from flashdsa.hw import BULK_ALIGNMENT, SM90
from flashdsa.kernels.entries.sm90 import backward, pool
from flashdsa.kernels.entries.sm90.plan import NUMBERS, ROTATED, ROW_ALIGNMENT, SLICE, CompressPlan


@cute.kernel
def compress_kernel_numbers(
    x: pool.Operands, grad: cute.Tensor, eps: Float32, numbers: cute.Tensor, d_kv: cute.Tensor,
    d_gate: cute.Tensor, plan: cutlass.Constexpr,
):  # fmt: skip
    """One CTA of the grid, an entry's; arguments as in `launch_numbers`."""
    entry, _, _ = cute.arch.block_idx()
    memory = Memory.allocate(plan)
    thread = pool.this_thread(plan)
    backward.clear_unpooled(x, d_kv, d_gate, thread, plan)
    place = pool.locate(x, entry, plan)
    pooled = pool.pool(x, place, thread, plan)
    pool.merge_groups(memory, pooled, thread, plan)
    inverse = [Float32(1.0) / pooled.total[i] for i in range(plan.unit)]
    e = [pooled.weighted[i] * inverse[i] for i in range(plan.unit)]
    weight = cute.make_rmem_tensor(plan.unit, Float32)
    for i in cutlass.range_constexpr(plan.unit):
        weight[i] = Float32(0.0)
    de = backward.entry_gradient(x, memory, grad, entry, eps, e, place, thread, weight, plan)
    if thread.group == 0:
        largest = [pooled.largest[i] for i in range(plan.unit)]
        of_weight = [weight[i] for i in range(plan.unit)]
        row = entry * NUMBERS
        for values in (largest, inverse, e, de, of_weight):
            pool.store_numbers(numbers, row, thread.column, values)
            row += 1


@cute.kernel
def compress_kernel_slots(
    x: pool.Operands, numbers: cute.Tensor, d_kv: cute.Tensor, d_gate: cute.Tensor,
    d_ape: cute.Tensor, plan: cutlass.Constexpr,
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
        place = pool.locate(x, entry, plan)
        if place.real:
            add_entry(x, numbers, entry, place, slot, column, sums, d_kv, d_gate, plan)
    for s in cutlass.range_constexpr(each):
        values = [sums[s * plan.unit + i] for i in range(plan.unit)]
        pool.store_numbers(d_ape, stripe * plan.slots + slot + s, column, values)


@cute.jit
def add_entry(
    x: pool.Operands, numbers: cute.Tensor, entry: Int32, place: pool.Place, slot: Int32,
    column: Int32, sums: cute.Tensor, d_kv: cute.Tensor, d_gate: cute.Tensor,
    plan: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Write the gradients of an entry's slots from `slot` on; add those of the gates to `sums`."""
    unit = plan.unit
    count = cutlass.const_expr(plan.slots * SLICE // unit // plan.threads)
    values, logits = pool.load_slots(x, place, slot, slot, column, count, plan)
    first = entry * NUMBERS
    largest = pool.load_numbers(numbers, first, column, unit)
    inverse = pool.load_numbers(numbers, first + 1, column, unit)
    e = pool.load_numbers(numbers, first + 2, column, unit)
    de = pool.load_numbers(numbers, first + 3, column, unit)
    for s in cutlass.range_constexpr(count):
        of_kv = [pool.power(logits[s][i] - largest[i]) * inverse[i] * de[i] for i in range(unit)]
        of_gate = [of_kv[i] * (values[s][i] - e[i]) for i in range(unit)]
        pool.store_unit(d_kv, place.row + slot + s, column, of_kv)
        pool.store_unit(d_gate, place.row + slot + s, column, of_gate)
        for i in cutlass.range_constexpr(unit):
            sums[s * unit + i] = sums[s * unit + i] + of_gate[i]


@cute.jit
def launch_numbers(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Write `numbers` (E * NUMBERS, d) fp32 on `stream`: of each column of an entry its largest
    logit, 1 over the sum of its weights, what is pooled, the gradient of that, and what the entry
    adds to the gradient of the norm's weight, which is 0 without an entry. And set to 0 what no
    entry pools.

    `arguments`: those of `Operands`, eps, grad, numbers, d_kv, d_gate, as for
    `launch_compress_bwd`.
    """
    x, (eps, grad, numbers, d_kv, d_gate) = pool.split(arguments)
    made = compress_kernel_numbers(x, grad, eps, numbers, d_kv, d_gate, plan)
    launch_ctas(made, grad.shape[0], plan.threads, stream)


@cute.jit
def launch_slots(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Write the gradients of kv and gate, and parts of that of `ape`, on `stream`.

    Args:
        arguments: those of `Operands`, as for `launch_compress_bwd`. Then
            numbers: of `launch_numbers`. d_kv, d_gate: as for `launch_compress_bwd`.
            d_ape: (stripes * ratio, d) fp32, sums of every entry that is a stripe's.
            stripes: of the entries, each a CTA's.
    """
    x, (numbers, d_kv, d_gate, d_ape, stripes) = pool.split(arguments)
    made = compress_kernel_slots(x, numbers, d_kv, d_gate, d_ape, plan)
    launch_ctas(made, (plan.d // SLICE, stripes), plan.threads, stream)


@cute.kernel
def compress_kernel(x: pool.Operands, eps: Float32, entries: cute.Tensor, plan: cutlass.Constexpr):
    """One CTA of the grid; arguments as in `launch_compress`."""
    cta, _, _ = cute.arch.block_idx()
    memory = Memory.allocate(plan)
    thread = pool.this_thread(plan)
    entry = cta * plan.entries + thread.entry
    place = pool.locate(x, entry, plan)
    pooled = pool.pool(x, place, thread, plan)
    if const_expr(plan.groups > 1):
        pool.merge_groups(memory, pooled, thread, plan)
    e = [pooled.weighted[i] / pooled.total[i] for i in range(plan.unit)]
    if const_expr(plan.finished):
        squares = Float32(0.0)
        for i in cutlass.range_constexpr(plan.unit):
            squares += e[i] * e[i]
        mean = pool.sum_columns(memory, squares, 0, thread, plan) * Float32(1 / plan.d)
        factor = cute.math.rsqrt(mean + eps)
        weight = pool.load_numbers(x.norm_weight, Int32(0), thread.column, plan.unit)
        e = [e[i] * factor * weight[i] for i in range(plan.unit)]
        e = pool.turn(x, e, place, thread, False, plan)
    if (thread.group == 0) & (entry < entries.shape[0]):
        kept = [e[i] if place.real else Float32(0.0) for i in range(plan.unit)]
        pool.store_unit(entries, entry, thread.column, kept)


@cute.jit
def launch_compress(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Write entries on `stream`.

    Args:
        arguments: those of `Operands`: T is at least `ratio`, or 1 with a state; ape, norm_weight
            (1, d), cos and sin, and state and seen may be None. Then
            eps: of the norm.
            entries: (E, d) bf16, E at least 1, written, those after the last one 0.
    """
    x, (eps, entries) = pool.split(arguments, len(pool.Operands._fields))
    ctas = (entries.shape[0] + plan.entries - 1) // plan.entries
    launch_ctas(compress_kernel(x, eps, entries, plan), ctas, plan.threads, stream)


def compile_compress(plan: CompressPlan) -> Any:
    """Compile `launch_compress`, or a launch of the gradient."""
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
        launch = backward.launch_compress_bwd
        parts = fake_tensor(Float32, (cute.sym_int32(), plan.ratio, width)) if plan.ape else None
        more += [*of_tokens, parts, sums if plan.finished else None, Int32(0)]
    elif plan.sliced:
        launch, more = launch_slots, [numbers, *of_tokens, sums, Int32(0)]
    elif plan.gradient:
        launch = launch_numbers
        more += [numbers, *of_tokens]
    sequences, ends = (fake_tensor(Int32, (cute.sym_int32(),), WORD_ALIGNMENT) for _ in range(2))
    ape = fake_tensor(Float32, (plan.ratio, width)) if plan.ape else None
    x = kv, gate, sequences, ends, ape, *finish, *([] if plan.gradient else kept)
    return compile_launch(SM90, launch, plan, *x, *more)
