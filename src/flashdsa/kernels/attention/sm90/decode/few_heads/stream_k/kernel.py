"""Sparse decode for Hopper of few heads, stream-K: a CTA takes stretches of some items.

A stretch's steps are those of the kernel by clusters (`few_heads/kernel.py`). After it the
consumers exchange halves of O, and each writes its half of the dims from registers: to the results
if the CTA has the whole item, else to the workspace (`shared/stream_k.py`).

gather                 | math, consumer 0            | math, consumer 1
---------------------- | --------------------------- | ---------------------------
rows of a stretch      | Q; steps of a stretch       | Q; steps of a stretch
rows of the next one   | low dims: rows, or part     | high dims: rows, or part
                       | the last part: merge        | the last part: merge

Parts of few heads in the workspace, in the order of the consumers' registers.

A slot has a line of 16 bytes for each thread of both consumers, of eight of its values, for each
eight of them; then four fp32 a head, of which two are used: the part's maximum and sum.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from flashdsa.dsl import fragments, gmem, ptx, registers
from flashdsa.dsl.memory import Memory, initialise_barriers
from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.warp import warpgroup_idx
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.operands import Operands
from flashdsa.kernels.attention.sm90.core.results import ask_sink, factor_and_lse
from flashdsa.kernels.attention.sm90.core.softmax import LEAST, LOG2_E, Scale, make_scale
from flashdsa.kernels.attention.sm90.core.sources import sources_of_plan
from flashdsa.kernels.attention.sm90.core.tile import ROWS
from flashdsa.kernels.attention.sm90.decode.few_heads import gather, products, softmax
from flashdsa.kernels.attention.sm90.decode.few_heads import math as math_role
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import CONSUMERS, HEADS
from flashdsa.kernels.attention.sm90.decode.few_heads.stream_k.plan import StreamKFewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.shared import build, combine, context, stream_k
from flashdsa.kernels.attention.sm90.decode.shared.gather import Gatherer
from flashdsa.kernels.attention.sm90.decode.shared.plan import GROUP_DIMS, STATISTICS
from flashdsa.kernels.attention.sm90.decode.shared.words import as_float, bits_of


@cute.jit
def gather_stretches(
    memory: Memory, batch: stream_k.Batch, kv: cute.Tensor, indices: cute.Tensor
) -> None:
    """All four warps: gather every stretch of the CTA. Tensors as in `Gatherer`."""
    number, before = Int32(0), Int32(0)
    while number < stream_k.num_stretches(memory):
        role = Gatherer(
            stream_k.take_stretch(memory, batch, number), None, kv, indices, batch.sources
        )
        if role.ctx.thread == 0:
            # extent_free, a phase a stretch: both consumers have read the extent of the stretch
            # before, which this thread writes next, and have ended the one before that.
            memory.extent_free.wait_for(number - 1)
            stream_k.store_stretch(role.ctx, batch, number)
            memory.stretch_full.arrive()
        cute.arch.sync_warp()
        before = gather.gather_tiles(role, before)
        number += 1
    # All rows are asked for: the next launch may begin to take the SMs that are free.
    cute.arch.griddepcontrol_launch_dependents()


class Rows(NamedTuple):
    """A thread's values of O, and of its heads, in registers."""

    out: cute.Tensor  # 4 blocks of 64 dims, HEADS / 2 fp32 each: divided by the sums
    tops: cute.Tensor  # (HEADS / 4,) fp32: maxima
    totals: cute.Tensor  # (HEADS / 4,) fp32: sums against them


def at_statistics(slot: Any, ctx: context.Context, number: int) -> Any:
    """Pointer to the statistics of the lane's head of that number."""
    values = HEADS * ctx.plan.tile.d_v // 2
    head = softmax.first_head(ctx.thread % WARP_SIZE) + softmax.offset_of_head(number)
    return slot + (values + head * STATISTICS)


@cute.jit
def store_part(
    ctx: context.Context,
    rows: Rows,
    workspace: stream_k.Workspace,
    parts: stream_k.Parts,
    consumer: Int32,
) -> None:
    """Store this CTA's part of an item: a consumer's half of O, and the heads' statistics."""
    cta, _, _ = cute.arch.block_idx()
    slot = stream_k.slot_of_part(workspace, parts, cta - parts.first)
    thread = ctx.thread + consumer * WARPGROUP_SIZE
    stream_k.store_values(slot, thread, cute.size(rows.out), lambda i: rows.out[i])
    if consumer == 0 and ctx.thread < 4:
        for number in cutlass.range_constexpr(cute.size(rows.tops)):
            top, total = rows.tops[number], rows.totals[number]
            gmem.store2(at_statistics(slot, ctx, number), bits_of(top), bits_of(total))


@cute.jit
def merge_parts(
    role: math_role.Math, rows: Rows, workspace: stream_k.Workspace, parts: stream_k.Parts
) -> None:
    """Add up all parts of an item in their order, a consumer's half of O, against their largest
    maxima; divided by the sums. draw_ticket: every part is stored."""
    ctx, factor = role.ctx, role.output.scale.factor
    heads = cute.size(rows.tops)
    thread = ctx.thread + role.consumer * WARPGROUP_SIZE
    rows.tops.fill(LEAST)
    rows.totals.fill(0.0)
    for part in cutlass.range(parts.count, unroll=1):
        slot = stream_k.slot_of_part(workspace, parts, part)
        for number in cutlass.range_constexpr(heads):
            top, _ = gmem.load2(at_statistics(slot, ctx, number))
            rows.tops[number] = cute.arch.fmax(rows.tops[number], as_float(top))
    rows.out.fill(0.0)
    for part in cutlass.range(parts.count, unroll=1):
        slot = stream_k.slot_of_part(workspace, parts, part)
        weights = []
        for number in cutlass.range_constexpr(heads):
            top, total = gmem.load2(at_statistics(slot, ctx, number))
            weight = as_float(total) * fragments.exp2((as_float(top) - rows.tops[number]) * factor)
            rows.totals[number] = rows.totals[number] + weight
            weights.append(weight)
        every = [weights[softmax.head_of(i % (HEADS // 2))] for i in range(cute.size(rows.out))]
        stream_k.add_values(slot, thread, rows.out, every)
    inverses = []
    for number in cutlass.range_constexpr(heads):
        total = rows.totals[number]
        inverses.append(cute.arch.rcp_approx(total) if total != 0.0 else Float32(0.0))
    for i in cutlass.range_constexpr(cute.size(rows.out)):
        rows.out[i] = rows.out[i] * inverses[softmax.head_of(i % (HEADS // 2))]


class StreamK(NamedTuple):
    """Role math of stream-K tiles. Writes its p, and results or parts."""

    memory: Memory
    workspace: stream_k.Workspace
    q: Any  # (S, H, d_qk) bf16
    x: Operands
    scale: Scale

    def math(self, number: Any, consumer: Any) -> math_role.Math:
        """The CTA's stretch of that number, as the steps take it; its slots are the gather's."""
        # Or what depends on the thread alone would be computed once, and spill.
        ctx = stream_k.load_stretch(self.memory, number, opaque(context.thread_of_warpgroup()))
        output = context.output_of(ctx, self.x, self.scale)
        return math_role.Math(ctx, output, self.q, consumer)

    def parts(self, number: Any) -> stream_k.Parts:
        return stream_k.load_parts(self.memory, number)


@cute.jit
def take_extent(memory: Memory, number: Int32) -> Int32:
    """The stretch's tiles up to those of the last step with a valid slot."""
    memory.extent_full.wait_for(number)
    thread, _, _ = cute.arch.thread_idx()
    num_tiles = Int32(0)
    if thread % WARP_SIZE == 0:
        num_tiles = Int32(memory.extent.array(Int32, 1)[0])
        # The lane that arrives has read the extent, for its warp.
        memory.extent_free.arrive()
    return cute.arch.make_warp_uniform(num_tiles)


@cute.jit
def take_stretches(role: StreamK, consumer: Int32) -> None:
    """Both consumers, one code: take every stretch of the CTA."""
    memory = role.memory
    out = cute.make_rmem_tensor(products.blocks_of(memory.plan) * HEADS // 2, Float32)
    number, tiles = Int32(0), Int32(0)
    while number < stream_k.num_stretches(memory):
        # stretch_read, a phase a stretch: maxima, and Q, which halves overwrote, may be written.
        memory.stretch_read.wait_for(number - 1)
        # stretch_full: the stretch is stored.
        memory.stretch_full.wait_for(number)
        math = role.math(number, consumer)
        gather.load_query(math.ctx, role.q, consumer, number)
        num_tiles = take_extent(memory, number)
        out.fill(0.0)
        r = math_role.Registers(out, softmax.new_heads(math.ctx, consumer))
        end = tiles + gather.tiles_of_consumer(num_tiles, consumer)
        math_role.take_tiles(math, r, tiles, end)
        end_stretch(role, r, number, consumer)
        number, tiles = number + 1, end


@cute.jit
def end_stretch(role: StreamK, r: math_role.Registers, number: Int32, consumer: Int32) -> None:
    """Write a consumer's half of the item's dims, if the stretch is all of it; else store a part,
    and write the rows if it is the last part that is stored."""
    math = role.math(number, consumer)
    ctx = math.ctx
    math_role.publish_sums(math, r)
    # all_read: nobody reads Q or P any more, which halves overwrite; all sums are written.
    context.meet_consumers(ctx.memory.all_read, number)
    rows = merge_consumers(math, r, number)
    is_complete = Boolean(True)
    parts = role.parts(number)
    if parts.count > 1:
        store_part(ctx, rows, role.workspace, parts, math.consumer)
        stored = stream_k.parts_before(ctx, number)
        is_complete = stream_k.draw_ticket(ctx, role.workspace, parts, stored, math.consumer)
        if is_complete:
            merge_parts(math, rows, role.workspace, parts)
    if is_complete:
        write_rows(math, rows)


@cute.jit
def merge_consumers(role: math_role.Math, r: math_role.Registers, number: Int32) -> Rows:
    """This consumer's half of the dims, of both consumers' tiles, divided by the heads' sums."""
    heads = HEADS // 4
    rows = Rows(
        cute.make_rmem_tensor(cute.size(r.out) // CONSUMERS, Float32),
        cute.make_rmem_tensor(heads, Float32),
        cute.make_rmem_tensor(heads, Float32),
    )
    half = math_role.exchange_halves(role, r, math_role.find_factors(role, r), number)
    for i in cutlass.range_constexpr(len(half)):
        rows.out[i] = half[i]
    for i in cutlass.range_constexpr(heads):
        # Otherwise the values that all heads read would be in registers at once.
        cute.arch.sync_warp()
        merged = math_role.merge_sums(role, i)
        rows.tops[i], rows.totals[i] = merged.top, merged.total
    role.ctx.memory.stretch_read.arrive()
    return rows


@cute.jit
def write_rows(role: math_role.Math, rows: Rows) -> None:
    """Write a consumer's half of the item's dims: a lane has two neighbouring ones of a head, four
    lanes 16 bytes. Consumer 0 writes lse."""
    ctx, w = role.ctx, role.output
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    dims, blocks = ctx.plan.tile.d_v, products.blocks_of(ctx.plan) // CONSUMERS
    group = role.consumer * (ctx.plan.dim_groups // CONSUMERS) + 2 * warp + lane // 16
    dim = group * GROUP_DIMS + lane // 4 % 4 * 2
    count = HEADS // 2
    heads = [
        softmax.first_head(lane) + softmax.offset_of_head(number) for number in range(HEADS // 4)
    ]
    num_heads = combine.rows_of_item(w)
    asked = [ask_sink(w.attn_sink, ctx.head + head, head < num_heads) for head in heads]
    for number in cutlass.range_constexpr(HEADS // 4):
        head = heads[number]
        if head < num_heads:
            total = rows.totals[number]
            top = rows.tops[number] * w.scale.factor
            factor, lse = factor_and_lse(w.attn_sink, asked[number], top, total)
            row = combine.first_row(w) + head
            if role.consumer == 0 and ctx.thread < 4:
                (w.lse.iterator + row).store(lse)
            # O is divided by the sum without the sink.
            factor = factor * total
            to = w.out.iterator + (Int64(row) * dims + dim)
            for block in cutlass.range_constexpr(blocks):
                of_head = [i for i in range(count) if softmax.head_of(i) == number]
                pair = [rows.out[block * count + i] for i in of_head]
                word = fragments.pack(pair[0] * factor, pair[1] * factor)
                if factor == 0.0:
                    word = Int32(0)  # O may be NaN
                at = to + block * ROWS
                if cutlass.const_expr(products.is_rope(ctx.plan, blocks + block)):
                    if role.consumer == 1:
                        # Dims of bf16 columns are eight apart.
                        store_apart(at + (lane // 4 - lane // 16 * 8 - lane // 4 % 4 * 2), word)
                    else:
                        gmem.store1(at, word)
                else:
                    gmem.store1(at, word)


def store_apart(pointer: Any, word: Any) -> None:
    """Store two bf16, the second one eight further on."""
    ptx.run(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r1}; "
        "st.global.b16 [{$r0}], low; st.global.b16 [{$r0} + 16], high; }",
        pointer,
        word,
    )


GATHER = 0
"""The first warpgroup; the consumers follow."""


@cute.kernel
def stream_k_few_heads_kernel(
    q: cute.Tensor, x: Operands, workspace: stream_k.Workspace, more: Any, plan: cutlass.Constexpr
):
    """One CTA; more: of a joined plan `MoreOperands`, else None."""
    thread, _, _ = cute.arch.thread_idx()
    memory = Memory.allocate(plan)
    sources = sources_of_plan(plan, x, more)
    initialise_barriers(memory, thread)
    # The previous launch, which this one may follow early, has written the lengths and ids, or
    # still reads the results or the workspace.
    cute.arch.griddepcontrol_wait()
    # It ends with a sync of the CTA: the barriers are initialised.
    stream_k.divide(memory, stream_k.batch_of(memory, x, sources), thread)
    group = warpgroup_idx()
    if group == GATHER:
        registers.take_registers(plan, "gather")
        batch = stream_k.batch_of(memory, x, sources)
        gather_stretches(memory, batch, x.kv, x.indices)
    else:
        registers.take_registers(plan, "math")
        scale = make_scale(x.sm_scale * LOG2_E)
        role = StreamK(memory, workspace, q, x, scale)
        take_stretches(role, group - GATHER - 1)


def compile_stream_k_few_heads(plan: StreamKFewHeadsPlan) -> Any:
    """Compile the kernel's launch."""
    return build.compile_stream_k_tiles(build.Decode(stream_k_few_heads_kernel, lambda q: q, plan))
