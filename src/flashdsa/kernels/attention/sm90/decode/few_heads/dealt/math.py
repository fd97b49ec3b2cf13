"""Role math: both consumers take every stretch of the CTA, then write its rows, or a part."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from flashdsa.dsl.fragments import pack
from flashdsa.dsl.gmem import store1
from flashdsa.dsl.opaque import opaque
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.results import ask_sink, factor_and_lse
from flashdsa.kernels.attention.sm90.core.softmax import Scale
from flashdsa.kernels.attention.sm90.core.tile import ROWS
from flashdsa.kernels.attention.sm90.decode.few_heads.dealt.merge import (
    Rows,
    merge_parts,
    store_part,
)
from flashdsa.kernels.attention.sm90.decode.few_heads.gather import tiles_of_consumer
from flashdsa.kernels.attention.sm90.decode.few_heads.lanes import (
    first_head,
    head_of,
    offset_of_head,
)
from flashdsa.kernels.attention.sm90.decode.few_heads.math import (
    Math,
    Registers,
    exchange_halves,
    find_factors,
    merge_sums,
    publish_sums,
    take_tiles,
)
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import CONSUMERS, HEADS
from flashdsa.kernels.attention.sm90.decode.few_heads.products import blocks_of, is_rope
from flashdsa.kernels.attention.sm90.decode.few_heads.query import load_query
from flashdsa.kernels.attention.sm90.decode.few_heads.softmax import new_heads
from flashdsa.kernels.attention.sm90.decode.shared.combine import first_row
from flashdsa.kernels.attention.sm90.decode.shared.context import (
    DecodeMemory,
    Output,
    meet_consumers,
    thread_of_warpgroup,
)
from flashdsa.kernels.attention.sm90.decode.shared.dealing import Parts, num_stretches, parts_before
from flashdsa.kernels.attention.sm90.decode.shared.exchange import rows_of_item
from flashdsa.kernels.attention.sm90.decode.shared.parts import Workspace, draw_ticket
from flashdsa.kernels.attention.sm90.decode.shared.plan import GROUP_DIMS
from flashdsa.kernels.attention.sm90.decode.shared.stretches import load_parts, load_stretch


class Dealt(NamedTuple):
    """Role math of dealt tiles. Writes its p, and results or parts."""

    memory: DecodeMemory
    workspace: Workspace
    q: Any  # (S, H, d_qk) bf16
    out: cute.Tensor  # (S, H, 512) bf16
    lse: cute.Tensor  # (S, H) fp32
    attn_sink: cute.Tensor  # (H,) fp32, or (0,): none
    scale: Scale

    def math(self, number: Any, consumer: Any) -> Math:
        """The CTA's stretch of that number, as the steps take it; its slots are the gather's."""
        # Or what depends on the thread alone would be computed once, and spill.
        ctx = load_stretch(self.memory, number, opaque(thread_of_warpgroup()))
        output = Output(ctx, self.out, self.lse, self.attn_sink, self.scale)
        return Math(ctx, output, self.q, consumer)

    def parts(self, number: Any) -> Parts:
        """Parts of the item of that stretch."""
        return load_parts(self.memory, number)


@cute.jit
def take_extent(memory: DecodeMemory, number: Int32) -> Int32:
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
def take_stretches(role: Dealt, consumer: Int32) -> None:
    """Both consumers, one code: take every stretch of the CTA."""
    memory = role.memory
    out = cute.make_rmem_tensor(blocks_of(memory.plan) * HEADS // 2, Float32)
    number, tiles = Int32(0), Int32(0)
    while number < num_stretches(memory):
        # stretch_read, a phase a stretch: maxima, and Q, which halves overwrote, may be written.
        memory.stretch_read.wait_for(number - 1)
        # stretch_full: the stretch is stored.
        memory.stretch_full.wait_for(number)
        math = role.math(number, consumer)
        load_query(math.ctx, role.q, consumer, number)
        num_tiles = take_extent(memory, number)
        out.fill(0.0)
        r = Registers(out, new_heads(math.ctx, consumer))
        end = tiles + tiles_of_consumer(num_tiles, consumer)
        take_tiles(math, r, tiles, end)
        end_stretch(role, r, number, consumer)
        number, tiles = number + 1, end


@cute.jit
def end_stretch(role: Dealt, r: Registers, number: Int32, consumer: Int32) -> None:
    """Write a consumer's half of the item's dims, if the stretch is all of it; else store a part,
    and write the rows if it is the last part that is stored."""
    math = role.math(number, consumer)
    ctx = math.ctx
    publish_sums(math, r)
    # all_read: nobody reads Q or P any more, which halves overwrite; all sums are written.
    meet_consumers(ctx.memory.all_read, number)
    rows = merge_consumers(math, r, number)
    is_complete = Boolean(True)
    parts = role.parts(number)
    if parts.count > 1:
        store_part(ctx, rows, role.workspace, parts, math.consumer)
        stored = parts_before(ctx, number)
        is_complete = draw_ticket(ctx, role.workspace, parts, stored, math.consumer)
        if is_complete:
            merge_parts(math, rows, role.workspace, parts)
    if is_complete:
        write_rows(math, rows)


@cute.jit
def merge_consumers(role: Math, r: Registers, number: Int32) -> Rows:
    """This consumer's half of the dims, of both consumers' tiles, divided by the heads' sums."""
    heads = HEADS // 4
    rows = Rows(
        cute.make_rmem_tensor(cute.size(r.out) // CONSUMERS, Float32),
        cute.make_rmem_tensor(heads, Float32),
        cute.make_rmem_tensor(heads, Float32),
    )
    half = exchange_halves(role, r, find_factors(role, r), number)
    for i in cutlass.range_constexpr(len(half)):
        rows.out[i] = half[i]
    for i in cutlass.range_constexpr(heads):
        # Otherwise the values that all heads read would be in registers at once.
        cute.arch.sync_warp()
        merged = merge_sums(role, i)
        rows.tops[i], rows.totals[i] = merged.top, merged.total
    role.ctx.memory.stretch_read.arrive()
    return rows


@cute.jit
def write_rows(role: Math, rows: Rows) -> None:
    """Write a consumer's half of the item's dims: a lane has two neighbouring ones of a head, four
    lanes 16 bytes. Consumer 0 writes lse."""
    ctx, w = role.ctx, role.output
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    dims, blocks = ctx.plan.tile.d_v, blocks_of(ctx.plan) // CONSUMERS
    group = role.consumer * (ctx.plan.dim_groups // CONSUMERS) + 2 * warp + lane // 16
    dim = group * GROUP_DIMS + lane // 4 % 4 * 2
    count = HEADS // 2
    heads = [first_head(lane) + offset_of_head(number) for number in range(HEADS // 4)]
    num_heads = rows_of_item(w)
    asked = [ask_sink(w.attn_sink, ctx.head + head, head < num_heads) for head in heads]
    for number in cutlass.range_constexpr(HEADS // 4):
        head = heads[number]
        if head < num_heads:
            total = rows.totals[number]
            top = rows.tops[number] * w.scale.factor
            factor, lse = factor_and_lse(w.attn_sink, asked[number], top, total)
            row = first_row(w) + head
            if role.consumer == 0 and ctx.thread < 4:
                (w.lse.iterator + row).store(lse)
            # O is divided by the sum without the sink.
            factor = factor * total
            to = w.out.iterator + (Int64(row) * dims + dim)
            for block in cutlass.range_constexpr(blocks):
                of_head = [i for i in range(count) if head_of(i) == number]
                pair = [rows.out[block * count + i] for i in of_head]
                word = pack(pair[0] * factor, pair[1] * factor)
                if factor == 0.0:
                    word = Int32(0)  # O may be NaN
                at = to + block * ROWS
                if cutlass.const_expr(is_rope(ctx.plan, blocks + block)):
                    if role.consumer == 1:
                        # Dims of bf16 columns are eight apart.
                        store_apart(at + (lane // 4 - lane // 16 * 8 - lane // 4 % 4 * 2), word)
                    else:
                        store1(at, word)
                else:
                    store1(at, word)


def store_apart(pointer: Any, word: Any) -> None:
    """Store two bf16, the second one eight further on."""
    cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r1}; "
        "st.global.b16 [{$r0}], low; st.global.b16 [{$r0} + 16], high; }",
        read_only_args=[pointer, word],
    )
