"""Gradients of entries: a thread has a unit of columns of all slots of an entry in registers.

Each token's columns belong to one entry at most, so nothing is added up in memory but the gradients
of the position bias and of the norm's weight: each thread sums those of its slots and columns over
the entries that it has one after another, and each CTA writes its sums.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute

from flashdsa.dsl.grids import launch_ctas, place_in_grid
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.smem import load4, store4
from flashdsa.kernels.entries.sm90 import pool


@cute.jit
def load_entry(
    x: pool.Operands, place: pool.Place, thread: pool.Thread, kv: cute.Tensor, p: cute.Tensor,
    plan: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Fill registers: kv (slots * unit / 2,) words, and p (slots * unit,), the logits. A slot
    without a token has kv 0 and a logit of -inf."""
    for i in cutlass.range_constexpr(plan.slots * (plan.unit // 2)):
        kv[i] = Uint32(0)
    for i in cutlass.range_constexpr(plan.slots * plan.unit):
        p[i] = Float32(-float("inf"))
    if const_expr(plan.overlap):
        if place.real & place.before:
            load_half(x, place.row - plan.ratio, thread.column, 0, kv, p, plan)
    if place.real:
        first = const_expr(plan.slots - plan.ratio)
        column = thread.column + (plan.d if const_expr(plan.overlap) else 0)
        load_half(x, place.row, column, first, kv, p, plan)


@cute.jit
def load_half(
    x: pool.Operands, row: Int32, column: Int32, first: cutlass.Constexpr, kv: cute.Tensor,
    p: cute.Tensor, plan: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Fill the registers of `ratio` slots from slot `first` on, whose tokens begin at `row`."""
    words = [pool.load_words(x.kv, row + s, column, plan.unit) for s in range(plan.ratio)]
    gates = [pool.load_words(x.gate, row + s, column, plan.unit) for s in range(plan.ratio)]
    for s in cutlass.range_constexpr(plan.ratio):
        logit = pool.widened(gates[s])
        if const_expr(plan.ape):
            bias = pool.load_numbers(x.ape, Int32(s), column, plan.unit)
            logit = [logit[i] + bias[i] for i in range(plan.unit)]
        for i in cutlass.range_constexpr(plan.unit // 2):
            kv[(first + s) * (plan.unit // 2) + i] = words[s][i]
        for i in cutlass.range_constexpr(plan.unit):
            p[(first + s) * plan.unit + i] = logit[i]


@cute.jit
def weigh(kv: cute.Tensor, p: cute.Tensor, plan: cutlass.Constexpr) -> list[Float32]:
    """Turn the logits in `p` into weights, and return the entry that they pool."""
    entry = []
    for i in cutlass.range_constexpr(plan.unit):
        top = Float32(pool.LEAST)
        for s in cutlass.range_constexpr(plan.slots):
            top = cute.arch.fmax(top, p[s * plan.unit + i])
        total, weighted = Float32(0.0), Float32(0.0)
        for s in cutlass.range_constexpr(plan.slots):
            weight = pool.power(p[s * plan.unit + i] - top)
            p[s * plan.unit + i] = weight
            total += weight
            weighted += weight * value_of(kv, s, i, plan.unit)
        inverse = Float32(1.0) / total
        for s in cutlass.range_constexpr(plan.slots):
            p[s * plan.unit + i] = p[s * plan.unit + i] * inverse
        entry.append(weighted * inverse)
    return entry


def value_of(kv: cute.Tensor, slot: int, column: int, unit: int) -> Any:
    """kv of a slot and a column of the unit, as fp32."""
    word = kv[(slot * unit + column) // 2]
    return (word & Uint32(0xFFFF0000) if column % 2 else word << 16).bitcast(Float32)


@cute.jit
def entry_gradient(
    x: pool.Operands, memory: Memory, grad: cute.Tensor, entry: Int32, eps: Float32,
    e: list[Float32], place: pool.Place, thread: pool.Thread, d_weight: cute.Tensor,
    plan: cutlass.Constexpr,
) -> list[Float32]:  # fmt: skip
    """The gradient of what is pooled; adds to that of the norm's weight, in registers. All threads
    call."""
    given = cute.make_rmem_tensor(plan.unit, Float32)
    for i in cutlass.range_constexpr(plan.unit):
        given[i] = Float32(0.0)
    if place.real:
        loaded = pool.widened(pool.load_words(grad, entry, thread.column, plan.unit))
        for i in cutlass.range_constexpr(plan.unit):
            given[i] = loaded[i]
    de = [given[i] for i in range(plan.unit)]
    if const_expr(plan.finished):
        dn = pool.turn(x, de, place, thread, True, plan)
        weight = pool.load_numbers(x.norm_weight, Int32(0), thread.column, plan.unit)
        squares, through = Float32(0.0), Float32(0.0)
        for i in cutlass.range_constexpr(plan.unit):
            squares += e[i] * e[i]
            through += dn[i] * weight[i] * e[i]
        share = Float32(1 / plan.d)
        mean = pool.sum_columns(memory, squares, 0, thread, plan) * share
        factor = cute.math.rsqrt(mean + eps)
        through = pool.sum_columns(memory, through, 1, thread, plan) * share * factor * factor
        if place.real:
            for i in cutlass.range_constexpr(plan.unit):
                d_weight[i] = d_weight[i] + dn[i] * (e[i] * factor)
        de = [factor * (dn[i] * weight[i] - e[i] * through) for i in range(plan.unit)]
    return de


@cute.jit
def write_slots(
    memory: Memory, kv: cute.Tensor, p: cute.Tensor, e: list[Float32], de: list[Float32],
    place: pool.Place, thread: pool.Thread, d_kv: cute.Tensor, d_gate: cute.Tensor,
    plan: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Write an entry's gradients of kv and gate; add the latter to this thread's sums."""
    for s in cutlass.range_constexpr(plan.slots):
        of_kv = [p[s * plan.unit + i] * de[i] for i in range(plan.unit)]
        of_gate = [of_kv[i] * (value_of(kv, s, i, plan.unit) - e[i]) for i in range(plan.unit)]
        own = const_expr(s >= plan.slots - plan.ratio)
        row = place.row + (s - (plan.slots - plan.ratio))
        column = thread.column + (plan.d if const_expr(plan.overlap and own) else 0)
        there = place.real
        if const_expr(not own):
            there = place.real & place.before
        if there:
            pool.store_unit(d_kv, row, column, of_kv)
            pool.store_unit(d_gate, row, column, of_gate)
            if const_expr(plan.ape):
                add_to_sums(memory, s, of_gate, thread, plan)


@cute.jit
def add_to_sums(
    memory: Memory, slot: cutlass.Constexpr, values: list[Float32], thread: pool.Thread,
    plan: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Add a unit to this thread's sums of a slot, which nobody else reads before the end."""
    held = memory.d_ape.array(Float32, plan.threads * plan.unit * plan.slots)
    four = cute.make_rmem_tensor(4, Float32)
    for half in cutlass.range_constexpr(plan.unit // 4):
        place = (slot * (plan.unit // 4) + half) * plan.threads + thread.number
        before = load4(held, place)
        for i in cutlass.range_constexpr(4):
            four[i] = before[i] + values[4 * half + i]
        store4(held, place, four.load())


@cute.jit
def clear_sums(memory: Memory, thread: pool.Thread, plan: cutlass.Constexpr) -> None:
    """Set this thread's sums to 0."""
    held = memory.d_ape.array(Float32, plan.threads * plan.unit * plan.slots)
    four = cute.make_rmem_tensor(4, Float32)
    for i in cutlass.range_constexpr(4):
        four[i] = Float32(0.0)
    for part in cutlass.range_constexpr(plan.slots * plan.unit // 4):
        store4(held, part * plan.threads + thread.number, four.load())


@cute.jit
def write_sums(
    memory: Memory, thread: pool.Thread, cta: Int32, parts: cute.Tensor, plan: cutlass.Constexpr
) -> None:
    """Write the CTA's sums over its entries to its part (ratio, width); all threads call."""
    held = memory.d_ape.array(Float32, plan.threads * plan.unit * plan.slots)
    # Every thread's sums are complete; nobody changes them any more.
    cute.arch.sync_threads()
    first = thread.number % plan.lanes
    four = cute.make_rmem_tensor(4, Float32)
    for part in cutlass.range_constexpr(plan.slots * plan.unit // 4):
        slot = const_expr(part * 4 // plan.unit)
        if thread.entry == part % plan.entries:
            for i in cutlass.range_constexpr(4):
                four[i] = Float32(0.0)
            for entry in cutlass.range_constexpr(plan.entries):
                other = load4(held, part * plan.threads + first + entry * plan.lanes)
                for i in cutlass.range_constexpr(4):
                    four[i] = four[i] + other[i]
            own = const_expr(plan.overlap and slot >= plan.ratio)
            row = const_expr(slot - plan.ratio if own else slot)
            column = thread.column + (plan.d if own else 0) + part * 4 % plan.unit
            at = parts.iterator + (Int64(cta) * plan.ratio + row) * parts.stride[1] + column
            target = cute.make_tensor(at.align(16), cute.make_layout(4))
            target.store(four.load())


@cute.jit
def clear_unpooled(
    x: pool.Operands,
    d_kv: cute.Tensor,
    d_gate: cute.Tensor,
    thread: pool.Thread,
    plan: cutlass.Constexpr,
) -> None:
    """Set to 0 what no entry pools: each sequence's tokens of an incomplete window by one CTA, and
    with overlap the first columns of its last complete one; rows of no sequence by all CTAs."""
    _, cta, ctas = place_in_grid()
    tokens = Int32(d_kv.shape[0])
    # One loop over both kinds of padding, one row at a time: others took more registers.
    before = cutlass.max(cutlass.min(x.cu_seqlens[0], tokens), Int32(0))
    behind = cutlass.max(x.cu_seqlens[x.ends.shape[0]], before)
    for number in cutlass.range(cta, before + tokens - behind, ctas, unroll=1):
        row = number if number < before else number - before + behind
        clear(d_kv, d_gate, row, row + 1, const_expr(d_kv.shape[1]), thread, plan)
    for sequence in cutlass.range(cta, Int32(x.ends.shape[0]), ctas, unroll=1):
        begin = cutlass.max(x.cu_seqlens[sequence], Int32(0))
        end = cutlass.min(x.cu_seqlens[sequence + 1], tokens)
        complete = end - (end - begin) % plan.ratio
        if begin < end:
            clear(d_kv, d_gate, complete, end, const_expr(d_kv.shape[1]), thread, plan)
            if const_expr(plan.overlap):
                if begin < complete:
                    last = complete - plan.ratio
                    clear(d_kv, d_gate, last, complete, plan.d, thread, plan)


@cute.jit
def clear(
    d_kv: cute.Tensor, d_gate: cute.Tensor, first: Int32, end: Int32, columns: cutlass.Constexpr,
    thread: pool.Thread, plan: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Set the first columns of rows to 0; all threads call."""
    zeros = [Float32(0.0) for _ in range(plan.unit)]
    units = const_expr(columns // plan.unit)
    for item in cutlass.range(thread.number, (end - first) * units, plan.threads, unroll=1):
        row, column = first + item // units, item % units * plan.unit
        pool.store_unit(d_kv, row, column, zeros)
        pool.store_unit(d_gate, row, column, zeros)


@cute.kernel
def compress_kernel_bwd(
    x: pool.Operands, grad: cute.Tensor, eps: Float32, d_kv: cute.Tensor, d_gate: cute.Tensor,
    d_ape: Any, d_weight: Any, plan: cutlass.Constexpr,
):  # fmt: skip
    """One CTA of the grid; arguments as in `launch_compress_bwd`."""
    _, cta, ctas = place_in_grid()
    memory = Memory.allocate(plan)
    thread = pool.this_thread(plan)
    count = Int32(grad.shape[0])
    weight = cute.make_rmem_tensor(plan.unit, Float32)
    for i in cutlass.range_constexpr(plan.unit):
        weight[i] = Float32(0.0)
    clear_unpooled(x, d_kv, d_gate, thread, plan)
    if const_expr(plan.ape):
        clear_sums(memory, thread, plan)
    kv = cute.make_rmem_tensor(plan.slots * (plan.unit // 2), Uint32)
    p = cute.make_rmem_tensor(plan.slots * plan.unit, Float32)
    for first in cutlass.range(cta * plan.entries, count, ctas * plan.entries, unroll=1):
        entry = first + thread.entry
        found = pool.locate(x, entry, plan)
        place = found._replace(real=found.real & (entry < count))
        load_entry(x, place, thread, kv, p, plan)
        e = weigh(kv, p, plan)
        de = entry_gradient(x, memory, grad, entry, eps, e, place, thread, weight, plan)
        write_slots(memory, kv, p, e, de, place, thread, d_kv, d_gate, plan)
    if const_expr(plan.ape):
        write_sums(memory, thread, cta, d_ape, plan)
    if const_expr(plan.finished):
        row = cta * plan.entries + thread.entry
        at = d_weight.iterator + (Int64(row) * plan.d + thread.column)
        target = cute.make_tensor(at.align(4 * plan.unit), cute.make_layout(plan.unit))
        cute.autovec_copy(weight, target)


@cute.jit
def launch_compress_bwd(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Write the gradients on `stream`.

    Args:
        arguments: those of `Operands` without a state, as for `launch_compress`, and its eps. Then
            grad: (E, d) bf16. d_kv, d_gate: (T, width) bf16, written.
            d_ape: (ctas, ratio, width) fp32, sums of each CTA, written; None without `ape`.
            d_weight: (ctas * plan.entries, d) fp32, likewise of each of its entries in turn; None.
            ctas: of the grid.
    """
    x, (eps, grad, d_kv, d_gate, d_ape, d_weight, ctas) = pool.split(arguments)
    made = compress_kernel_bwd(x, grad, eps, d_kv, d_gate, d_ape, d_weight, plan)
    launch_ctas(made, ctas, plan.threads, stream)
