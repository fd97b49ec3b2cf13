"""Sparse decode for Hopper, stream-K: a CTA takes stretches of neighbouring items.

A stretch's steps are those of the decode by clusters (`full/kernel.py`). Rows of an item that a CTA
has alone are written from registers. Parts of others go to a workspace, and the CTA that stores an
item's last one merges them (`shared/stream_k.py`).

gather                | consumer0                   | consumer1
--------------------- | --------------------------- | ---------------------------------------
Q, keys of a stretch  | steps of a stretch          | steps of a stretch
Q of the next one     |     after its last scores   |     after its last scores
keys of the next one  | O's low dims: rows, or part | O's high dims: rows, or part
                      |     the last part: merge    |     the last part: merge

Parts of 64 heads in the workspace, in the order of the consumers' registers.

A slot has a line of 16 bytes for each thread of both consumers, of eight of its values, for each
eight of them; then four fp32 a row: the part's maximum and sum, and the scale of each half of O.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, GridConstant, Int32, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl.fragments import THREAD_ROWS, exp2, row_of_thread
from flashdsa.dsl.memory import Memory, initialise_barriers
from flashdsa.dsl.registers import take_registers
from flashdsa.dsl.warp import warpgroup_idx
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.operands import Operands
from flashdsa.kernels.attention.sm90.core import results, softmax, tile
from flashdsa.kernels.attention.sm90.core.consumers import Registers, merge_sums, new_registers
from flashdsa.kernels.attention.sm90.core.gather import load_query, map_query
from flashdsa.kernels.attention.sm90.core.sources import sources_of_plan
from flashdsa.kernels.attention.sm90.decode.full import consumers, expand
from flashdsa.kernels.attention.sm90.decode.full.gather import Before, gather_rows
from flashdsa.kernels.attention.sm90.decode.full.stream_k.plan import StreamKPlan
from flashdsa.kernels.attention.sm90.decode.shared import build, combine, context, gather, stream_k
from flashdsa.kernels.attention.sm90.decode.shared.plan import STATISTICS
from flashdsa.kernels.attention.sm90.decode.shared.words import as_float, bits_of, from_f16


@cute.jit
def gather_stretches(
    memory: Memory, batch: stream_k.Batch, q_map: Any, kv: cute.Tensor, indices: cute.Tensor
) -> None:
    """All four warps: gather every stretch of the CTA. Tensors as in `Gatherer`."""
    before = Before(Int32(0))
    while before.stretches < stream_k.num_stretches(memory):
        ctx = stream_k.take_stretch(memory, batch, before.stretches)
        role = gather.Gatherer(ctx, q_map, kv, indices, batch.sources, batch)
        # Asked for before Q, which waits for the consumers.
        asked = gather.ask_ends(role, ctx.thread % WARP_SIZE)
        load_rows_of_query(role, before)
        if cutlass.const_expr(memory.plan.packed):
            num_tiles = expand.gather_packed_rows(role, before, asked)
        else:
            num_tiles = gather_rows(role, before, asked)
        before = before.after(num_tiles)
    # All rows are asked for: the next launch may begin to take the SMs that are free.
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def load_rows_of_query(role: gather.Gatherer, before: Before) -> None:
    """Load the item's rows of Q; those past the last head become zeros."""
    ctx = role.ctx
    if ctx.thread == 0:
        # q_free, a phase a stretch: both consumers have the last scores of the stretch before, and
        # its extent, which this thread writes next, and have ended the one before that.
        ctx.memory.q_free.wait_for(before.stretches - 1)
        stream_k.store_stretch(ctx, role.batch, before.stretches)
        # q_full: the stretch is stored, too.
        ctx.memory.q_full.arrive_and_expect_tx()
        load_query(ctx, role.q_map, [ctx.head, ctx.query])
    cute.arch.sync_warp()


def at_statistics(slot: Any, ctx: context.Context, h: int) -> Any:
    """Pointer to the statistics of a row of the thread."""
    values = tile.ROWS * ctx.plan.tile.d_v // 2
    return slot + (values + (row_of_thread(ctx.thread) + 8 * h) * STATISTICS)


@cute.jit
def store_part(
    ctx: context.Context,
    r: Registers,
    sums: list[Float32],
    workspace: stream_k.Workspace,
    parts: stream_k.Parts,
    consumer: cutlass.Constexpr,
) -> None:
    """Store this CTA's part of an item: a consumer's half of O, and what the merge must know."""
    cta, _, _ = cute.arch.block_idx()
    slot = stream_k.slot_of_part(workspace, parts, cta - parts.first)
    thread = ctx.thread + consumer * WARPGROUP_SIZE
    factors, units = consumers.normalise(ctx, r.out, sums)
    softmax.multiply_rows(r.out, factors)
    stream_k.store_values(slot, thread, cute.size(r.out), lambda i: r.out[i])
    if ctx.thread % 4 == 0:
        for h in cutlass.range_constexpr(THREAD_ROWS):
            to = at_statistics(slot, ctx, h)
            if cutlass.const_expr(consumer == 0):
                to.store(bits_of(r.rows.out_max[h]))
                (to + 1).store(bits_of(sums[h]))
            (to + (2 + consumer)).store(bits_of(units[h]))


@cute.jit
def merge_parts(
    ctx: context.Context,
    r: Registers,
    scale: softmax.Scale,
    workspace: stream_k.Workspace,
    parts: stream_k.Parts,
    consumer: cutlass.Constexpr,
) -> list[Float32]:
    """Add up all parts of an item in their order, a consumer's half of O, against their largest
    maxima; return the rows' sums. draw_ticket: every part is stored."""
    thread = ctx.thread + consumer * WARPGROUP_SIZE
    r.rows.out_max.fill(softmax.LEAST)
    for number in cutlass.range(parts.count, unroll=1):
        slot = stream_k.slot_of_part(workspace, parts, number)
        for h in cutlass.range_constexpr(THREAD_ROWS):
            top = stream_k.load_values(at_statistics(slot, ctx, h))[0]
            r.rows.out_max[h] = cute.arch.fmax(r.rows.out_max[h], as_float(top))
    r.out.fill(0.0)
    sums = [Float32(0.0) for _ in range(THREAD_ROWS)]
    for number in cutlass.range(parts.count, unroll=1):
        slot = stream_k.slot_of_part(workspace, parts, number)
        weights = []
        for h in cutlass.range_constexpr(THREAD_ROWS):
            of_row = [as_float(word) for word in stream_k.load_values(at_statistics(slot, ctx, h))]
            weight = of_row[1] * exp2((of_row[0] - r.rows.out_max[h]) * scale.factor)
            sums[h] = sums[h] + weight
            weights.append(weight * of_row[2 + consumer])
        for line in cutlass.range_constexpr(cute.size(r.out) // stream_k.LINE_VALUES):
            words = stream_k.load_values(stream_k.at_line(slot, thread, line))
            for i in cutlass.range_constexpr(stream_k.LINE_WORDS):
                weight = weights[i % THREAD_ROWS]
                # 0 times a part without a key may be NaN.
                word = words[i] if weight != 0.0 else Int32(0)
                at = stream_k.LINE_VALUES * line + 2 * i
                low, high = from_f16(word)
                r.out[at] = r.out[at] + weight * low
                r.out[at + 1] = r.out[at + 1] + weight * high
    return sums


class Consumer(NamedTuple):
    """Reads q, its tile, half of the other tile, and the other's P. Writes its P, and results."""

    memory: Memory
    workspace: stream_k.Workspace
    x: Operands
    scale: softmax.Scale

    def stretch(self, number: Any) -> context.Context:
        """The CTA's stretch of that number, which was stored before its Q was asked for."""
        return stream_k.load_stretch(self.memory, number, context.thread_of_warpgroup())


@cute.jit
def consume(role: Consumer, consumer: cutlass.Constexpr) -> None:
    """Take every stretch of the CTA: consumer 0 the low half of O's dims, consumer 1 the other."""
    r = new_registers(role.memory.plan.tile)
    before, ctx = Before(Int32(0)), stream_k.any_stretch(role.memory, context.thread_of_warpgroup())
    while before.stretches < stream_k.num_stretches(role.memory):
        num_tiles = begin_stretch(ctx, r, before.stretches, consumer)
        (consumers.take_tiles0, consumers.take_tiles1)[consumer](
            ctx, r, role.scale, before, num_tiles
        )
        end_stretch(role, r, before.stretches, consumer)
        before = before.after(num_tiles)


@cute.jit
def begin_stretch(
    ctx: context.Context, r: Registers, number: Int32, consumer: cutlass.Constexpr
) -> Int32:
    """Forget the stretch before; wait for Q, in the form that the products take. Return the tiles
    up to those of the last step with a valid slot."""
    softmax.restart(r.rows)
    r.out.fill(0.0)
    ctx.memory.q_full.wait_for(number)
    if cutlass.const_expr(ctx.plan.packed):
        consumers.convert_query(ctx, consumer, number)
    else:
        # What one consumer did in the stretch before, the other one has seen: its sums, and that it
        # awaited all scores. q_converted is that of packed rows.
        context.meet_consumers(ctx.memory.q_converted, number)
    ctx.memory.extent_full.wait_for(number)
    num_tiles = Int32(0)
    if ctx.thread % WARP_SIZE == 0:
        # The lane that arrives in `free_query` reads the extent, for its warp.
        num_tiles = Int32(ctx.memory.extent.array(Int32, 1)[0])
    return cute.arch.make_warp_uniform(num_tiles)


@cute.jit
def end_stretch(role: Consumer, r: Registers, number: Int32, consumer: cutlass.Constexpr) -> None:
    """Write a consumer's half of the item's rows, if the stretch is all of it; else store a part,
    and write the rows if it is the last part that is stored."""
    ctx = role.stretch(number)
    sums = merge_sums(ctx, r.rows, role.scale, number, consumer)
    is_complete = Boolean(True)
    parts = stream_k.load_parts(ctx.memory, number)
    if parts.count > 1:
        store_part(ctx, r, sums, role.workspace, parts, consumer)
        stored = stream_k.parts_before(ctx, number)
        is_complete = stream_k.draw_ticket(ctx, role.workspace, parts, stored, consumer)
        if is_complete:
            sums = merge_parts(ctx, r, role.scale, role.workspace, parts, consumer)
    if is_complete:
        output = context.output_of(ctx, role.x, role.scale)
        write_rows(output, r, sums, number, consumer)


@cute.jit
def write_rows(
    w: context.Output, r: Registers, sums: list[Float32], number: Int32, consumer: cutlass.Constexpr
) -> None:
    """Write a consumer's half of the item's rows, divided by their sums; consumer 0 writes lse.
    `number`: of the stretch."""
    item = combine.rows_of_thread(w)
    factors = results.factors_of_rows(w, r.rows, sums, item, results.ask_sinks(w, item), consumer)
    staged = results.staged_after_p(w.ctx, number, consumer)
    results.store_rows(w.ctx, w.out, r.out, factors, item, consumer, staged, 0)


GATHER, CONSUMER0, CONSUMER1 = range(3)
"""Warpgroups, in the plan's order of roles."""


@cute.kernel
def stream_k_kernel(
    q_map: GridConstant[tensor_map.TensorMap],
    x: Operands,
    workspace: stream_k.Workspace,
    more: Any,
    plan: cutlass.Constexpr,
):
    """One CTA; more: of a joined plan `MoreOperands`, else None."""
    thread, _, _ = cute.arch.thread_idx()
    memory = Memory.allocate(plan)
    initialise_barriers(memory, thread)
    # The previous launch, which this one may follow early, has written the lengths and ids, or
    # still reads the results or the workspace.
    cute.arch.griddepcontrol_wait()
    sources = sources_of_plan(plan, x, more)
    # It ends with a sync of the CTA: the barriers are initialised.
    stream_k.divide(memory, stream_k.batch_of(memory, x, sources), thread)
    group = warpgroup_idx()
    # Each role computes its own coordinates: values shared by all would be live in every role.
    if group == GATHER:
        take_registers(plan, "gather")
        batch = stream_k.batch_of(memory, x, sources)
        gather_stretches(memory, batch, q_map.get_ptr(), x.kv, x.indices)
    elif group == CONSUMER0:
        take_registers(plan, "consumer0")
        scale = softmax.make_scale(x.sm_scale * softmax.LOG2_E)
        consume(Consumer(memory, workspace, x, scale), 0)
    else:
        take_registers(plan, "consumer1")
        scale = softmax.make_scale(x.sm_scale * softmax.LOG2_E)
        consume(Consumer(memory, workspace, x, scale), 1)


def compile_stream_k(plan: StreamKPlan) -> Any:
    """Compile the kernel's launch."""
    return build.compile_stream_k_tiles(build.Decode(stream_k_kernel, map_query, plan))
