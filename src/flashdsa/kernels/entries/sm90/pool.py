"""An entry's place, its slots, and a softmax over them that a thread goes through once."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute

from flashdsa.dsl.memory import Memory
from flashdsa.dsl.smem import load4, store4
from flashdsa.dsl.warp import neighbours_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.entries.sm90.plan import AT_ONCE, POOLED, ROTATED

LOG2_E = 1.4426950408889634
LEAST = -3.0e38
"""The largest logit of no slot."""


class Operands(NamedTuple):
    """Tensors that both directions read."""

    kv: Any  # (T, width) bf16, rows may lie apart
    gate: Any
    cu_seqlens: Any  # (B + 1,) int32
    ends: Any  # (B,) int32: entries up to each sequence's end; of one sequence no fewer
    ape: Any  # (ratio, width) fp32
    norm_weight: Any  # (d,) fp32
    cos: Any  # (P, 32) fp32
    sin: Any
    state: Any = None  # (B, R, 2, width) bf16
    seen: Any = None  # (B,) int32


def split(arguments: tuple[Any, ...], given: int = 8) -> tuple[Operands, tuple[Any, ...]]:
    """Split a launch's arguments into the operands, of which so many are given, and the rest."""
    return Operands(*arguments[:given]), arguments[given:]


class Place(NamedTuple):
    """An entry's window."""

    row: Int32  # the first token's
    number: Int32  # in the sequence
    real: Boolean  # whether there is such an entry
    before: Boolean  # whether it has the window before, too
    sequence: Int32
    begin: Int32  # the sequence's first row


class Thread(NamedTuple):
    """A thread's place in its CTA."""

    entry: Int32  # of those that the CTA has at a time
    group: Int32
    column: Int32  # the first of its unit
    number: Int32


class Pooled(NamedTuple):
    """Registers (unit,) fp32 of a thread's columns over the slots so far."""

    largest: Any
    total: Any
    weighted: Any


@cute.jit
def this_thread(plan: cutlass.Constexpr) -> Thread:
    """The calling thread."""
    number, _, _ = cute.arch.thread_idx()
    return Thread(
        number // (plan.lanes * plan.groups),
        number // plan.lanes % plan.groups,
        number % plan.lanes * plan.unit,
        number,
    )


@cute.jit
def locate(x: Operands, entry: Int32, plan: cutlass.Constexpr) -> Place:
    """The entry's place; rows are within kv, whatever the offsets hold.

    Without a state an entry is real if its window ends within its sequence: `ends` of one sequence
    may count more.
    """
    count = Int32(x.ends.shape[0])
    low, high = Int32(0), count
    while low < high:
        middle = (low + high) // 2
        if x.ends[middle] <= entry:
            low = middle + 1
        else:
            high = middle
    sequence = cutlass.min(low, count - 1)
    first = Int32(0)
    if sequence > 0:
        first = x.ends[sequence - 1]
    number, begin = entry - first, x.cu_seqlens[sequence]
    row = begin + number * plan.ratio
    before = number > 0
    if const_expr(plan.state):
        # The row that the window's first token would have if this call had brought it.
        seen = cutlass.max(x.seen[sequence], Int32(0))
        earlier = seen // plan.ratio
        number += earlier
        row += earlier * plan.ratio - seen
        before = number > 0
    real = low < count
    if const_expr(not plan.state):
        end = cutlass.min(x.cu_seqlens[sequence + 1], Int32(x.kv.shape[0]))
        real = real & (row >= 0) & (row <= cutlass.max(end, Int32(0)) - plan.ratio)
        before = before & (row >= plan.ratio)
    return Place(row, number, real, before, sequence, begin)


def load_words(x: Any, row: Int32, column: Int32, unit: int) -> Any:
    """A unit of a row as words."""
    return load_at((x.iterator + (Int64(row) * x.stride[0] + column)).toint(), unit)


@cute.jit
def load_token(
    x: Operands, which: cutlass.Constexpr, place: Place, offset: Int32, column: Int32,
    plan: cutlass.Constexpr,
) -> Any:  # fmt: skip
    """A unit of kv (`which` 0) or gate (1), as words, of the token so many after the window's
    first one; of a token of earlier calls from the state."""
    source = x.gate if const_expr(which) else x.kv
    row = place.row + offset
    address = Int64(0)
    if const_expr(not plan.state):
        address = (source.iterator + (Int64(row) * source.stride[0] + column)).toint()
    elif row < place.begin:
        ring = Int32(x.state.shape[1])
        token = place.sequence * ring + (place.number * plan.ratio + offset) % ring
        at = (Int64(token) * 2 + which) * x.state.shape[3] + column
        address = (x.state.iterator + at).toint()
    else:
        row = cutlass.max(cutlass.min(row, Int32(source.shape[0]) - 1), Int32(0))
        address = (source.iterator + (Int64(row) * source.stride[0] + column)).toint()
    return load_at(address, plan.unit)


def load_at(address: Any, unit: int) -> Any:
    """A unit as words; it is read once, so it takes no place in the L1."""
    count = unit // 2
    words = ", ".join(f"{{$w{i}}}" for i in range(count))
    return cute.arch.inline_ptx(
        f"ld.global.nc.L1::no_allocate.L2::128B.v{count}.b32 {{{words}}}, [{{$r0}}];",
        write_only_types=[Uint32] * count,
        read_only_args=[address],
    )


def widened(words: Any) -> list[Any]:
    """A unit's numbers, exactly, as fp32."""
    values = []
    for word in words:
        values.append((word << 16).bitcast(Float32))
        values.append((word & Uint32(0xFFFF0000)).bitcast(Float32))
    return values


@cute.jit
def load_numbers(x: Any, row: Int32, column: Int32, count: cutlass.Constexpr) -> list[Float32]:
    """Neighbouring fp32 of a row: 2, 4 or 8, from a multiple of as many, or of 4, on."""
    values = []
    step = const_expr(min(count, 4))
    for first in cutlass.range_constexpr(0, count, step):
        at = x.iterator + (Int64(row) * x.stride[0] + (column + first))
        some = cute.make_tensor(at.align(4 * step), cute.make_layout(step)).load()
        values += [some[i] for i in range(step)]
    return values


@cute.jit
def store_numbers(x: Any, row: Int32, column: Int32, values: list[Float32]) -> None:
    """Store neighbouring fp32 of a row, a multiple of 4 from a multiple of 4 on."""
    four = cute.make_rmem_tensor(4, Float32)
    for part in cutlass.range_constexpr(len(values) // 4):
        for i in cutlass.range_constexpr(4):
            four[i] = values[4 * part + i]
        at = x.iterator + (Int64(row) * x.stride[0] + (column + 4 * part))
        cute.make_tensor(at.align(16), cute.make_layout(4)).store(four.load())


@cute.jit
def store_unit(x: Any, row: Int32, column: Int32, values: list[Float32]) -> None:
    """Round a unit to bf16 and store it."""
    unit = const_expr(len(values))
    registers = cute.make_rmem_tensor(unit, Float32)
    for i in cutlass.range_constexpr(unit):
        registers[i] = values[i]
    rounded = cute.make_rmem_tensor(unit, x.element_type)
    rounded.store(registers.load().to(x.element_type))
    at = x.iterator + (Int64(row) * x.stride[0] + column)
    cute.autovec_copy(rounded, cute.make_tensor(at.align(2 * unit), cute.make_layout(unit)))


def power(value: Any) -> Any:
    """e^value."""
    return cute.math.exp2(value * Float32(LOG2_E), fastmath=True)


@cute.jit
def new_pool(unit: cutlass.Constexpr) -> Pooled:
    """No slot yet."""
    pooled = Pooled(*[cute.make_rmem_tensor(unit, Float32) for _ in range(POOLED)])
    for i in cutlass.range_constexpr(unit):
        pooled.largest[i] = Float32(LEAST)
        pooled.total[i] = Float32(0.0)
        pooled.weighted[i] = Float32(0.0)
    return pooled


@cute.jit
def load_slots(
    x: Operands, place: Place, offset: Int32, slot: Int32, column: Int32,
    count: cutlass.Constexpr, plan: cutlass.Constexpr,
) -> tuple[list[Any], list[Any]]:  # fmt: skip
    """kv and logits of `count` slots, lists of units. `offset`: of the first slot's token from the
    window's first. `slot`: its row of `ape`. `column`: in kv."""
    values = [load_token(x, 0, place, offset + s, column, plan) for s in range(count)]
    logits = [load_token(x, 1, place, offset + s, column, plan) for s in range(count)]
    values, logits = ([widened(words) for words in part] for part in (values, logits))
    if const_expr(plan.ape):
        for s in cutlass.range_constexpr(count):
            bias = load_numbers(x.ape, slot + s, column, plan.unit)
            logits[s] = [logits[s][i] + bias[i] for i in range(plan.unit)]
    return values, logits


@cute.jit
def add_slots(pooled: Pooled, values: list[Any], logits: list[Any]) -> None:
    """Go on with these slots."""
    for i in cutlass.range_constexpr(len(values[0])):
        top = pooled.largest[i]
        for logit in logits:
            top = cute.arch.fmax(top, logit[i])
        scale = power(pooled.largest[i] - top)
        total, weighted = pooled.total[i] * scale, pooled.weighted[i] * scale
        for value, logit in zip(values, logits, strict=True):
            p = power(logit[i] - top)
            total += p
            weighted += p * value[i]
        pooled.largest[i] = top
        pooled.total[i] = total
        pooled.weighted[i] = weighted


@cute.jit
def pool_part(
    x: Operands, pooled: Pooled, place: Place, offset: Int32, slot: Int32, column: Int32,
    count: cutlass.Constexpr, plan: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Go on with `count` neighbouring slots, some at a time."""
    step = const_expr(min(count, AT_ONCE))
    for first in cutlass.range(0, count, step, unroll=1):
        values, logits = load_slots(x, place, offset + first, slot + first, column, step, plan)
        add_slots(pooled, values, logits)


@cute.jit
def pool(x: Operands, place: Place, thread: Thread, plan: cutlass.Constexpr) -> Pooled:
    """Pool this thread's slots of an entry."""
    pooled = new_pool(plan.unit)
    if place.real:
        if const_expr(plan.overlap):
            if place.before:
                offset = Int32(-plan.ratio)
                pool_part(x, pooled, place, offset, Int32(0), thread.column, plan.ratio, plan)
            own = thread.column + plan.d
            pool_part(x, pooled, place, Int32(0), Int32(0), own, plan.ratio, plan)
        else:
            first = thread.group * (plan.ratio // plan.groups)
            count = const_expr(plan.ratio // plan.groups)
            pool_part(x, pooled, place, first, first, thread.column, count, plan)
    return pooled


@cute.jit
def merge_groups(memory: Memory, pooled: Pooled, thread: Thread, plan: cutlass.Constexpr) -> None:
    """Merge what the groups of an entry have pooled, in their order, in the first group's
    registers; all threads call."""
    held = memory.merged.array(Float32, plan.threads * plan.unit * POOLED)
    quarters = const_expr(plan.unit * POOLED // 4)
    numbers = [x[i] for x in pooled for i in range(plan.unit)]
    four = cute.make_rmem_tensor(4, Float32)
    for part in cutlass.range_constexpr(quarters):
        for i in cutlass.range_constexpr(4):
            four[i] = numbers[4 * part + i]
        store4(held, part * plan.threads + thread.number, four.load())
    # Every thread has stored its numbers; nobody stores again.
    cute.arch.sync_threads()
    if thread.group == 0:
        for group in cutlass.range(1, plan.groups, unroll=1):
            other = thread.number + group * plan.lanes
            words = [load4(held, part * plan.threads + other) for part in range(quarters)]
            found = [word[i] for word in words for i in range(4)]
            for i in cutlass.range_constexpr(plan.unit):
                top = cute.arch.fmax(pooled.largest[i], found[i])
                mine, theirs = power(pooled.largest[i] - top), power(found[i] - top)
                pooled.largest[i] = top
                pooled.total[i] = pooled.total[i] * mine + found[plan.unit + i] * theirs
                pooled.weighted[i] = pooled.weighted[i] * mine + found[2 * plan.unit + i] * theirs


@cute.jit
def sum_columns(
    memory: Memory, value: Float32, which: cutlass.Constexpr, thread: Thread,
    plan: cutlass.Constexpr,
) -> Float32:  # fmt: skip
    """Sum of a number of each of an entry's threads, in all of them; all threads call. `which`: 0
    or 1, the half of the region that it uses: a barrier lies between two calls of one."""
    total = neighbours_sum(value, min(plan.lanes, WARP_SIZE))
    if const_expr(plan.lanes > WARP_SIZE):
        warps = const_expr(plan.threads // WARP_SIZE)
        sums = memory.sums.array(Float32, warps, which)
        warp = thread.number // WARP_SIZE
        if thread.number % WARP_SIZE == 0:
            sums[warp] = total
        # The warps' sums are there. They are not overwritten before the next barrier but one.
        cute.arch.sync_threads()
        each = const_expr(plan.lanes // WARP_SIZE)
        first = warp - warp % each
        total = sums[first]
        for other in cutlass.range_constexpr(1, each):
            total += sums[first + other]
    return total


@cute.jit
def turn(
    x: Operands, values: list[Float32], place: Place, thread: Thread, back: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> list[Float32]:  # fmt: skip
    """Turn the pairs of a thread's columns by the entry's position, or `back`; the first columns
    stay as they are."""
    turned = cute.make_rmem_tensor(plan.unit, Float32)
    for i in cutlass.range_constexpr(plan.unit):
        turned[i] = values[i]
    first = const_expr(plan.d - ROTATED)
    if thread.column >= first:
        position = place.number * plan.ratio
        position = cutlass.max(cutlass.min(position, Int32(x.cos.shape[0]) - 1), Int32(0))
        half = (thread.column - first) // 2
        cos = load_numbers(x.cos, position, half, plan.unit // 2)
        sin = load_numbers(x.sin, position, half, plan.unit // 2)
        for pair in cutlass.range_constexpr(plan.unit // 2):
            a, b = values[2 * pair], values[2 * pair + 1]
            s = -sin[pair] if const_expr(back) else sin[pair]
            turned[2 * pair] = a * cos[pair] - b * s
            turned[2 * pair + 1] = a * s + b * cos[pair]
    return [turned[i] for i in range(plan.unit)]
