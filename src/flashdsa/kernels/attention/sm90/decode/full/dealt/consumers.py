"""Roles consumer0 and consumer1: every stretch of the CTA, then its rows, or a part of them."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.consumers import Registers, merge_sums, new_registers
from flashdsa.kernels.attention.sm90.core.results import (
    ask_sinks,
    factors_of_rows,
    staged_after_p,
    store_rows,
)
from flashdsa.kernels.attention.sm90.core.softmax import Scale, restart
from flashdsa.kernels.attention.sm90.decode.full.dealt.merge import merge_parts, store_part
from flashdsa.kernels.attention.sm90.decode.full.gather import Before
from flashdsa.kernels.attention.sm90.decode.full.steps import take_tiles0, take_tiles1
from flashdsa.kernels.attention.sm90.decode.shared.combine import rows_of_thread
from flashdsa.kernels.attention.sm90.decode.shared.context import (
    Context,
    DecodeMemory,
    Output,
    meet_consumers,
    thread_of_warpgroup,
)
from flashdsa.kernels.attention.sm90.decode.shared.dealing import num_stretches, parts_before
from flashdsa.kernels.attention.sm90.decode.shared.parts import Workspace, draw_ticket
from flashdsa.kernels.attention.sm90.decode.shared.query import convert_query
from flashdsa.kernels.attention.sm90.decode.shared.stretches import (
    any_stretch,
    load_parts,
    load_stretch,
)


class Consumer(NamedTuple):
    """Reads q, its tile, half of the other tile, and the other's P. Writes its P, and results."""

    memory: DecodeMemory
    workspace: Workspace
    out: cute.Tensor  # (S, H, 512) bf16
    lse: cute.Tensor  # (S, H) fp32
    attn_sink: cute.Tensor  # (H,) fp32, or (0,): none
    scale: Scale

    def stretch(self, number: Any) -> Context:
        """The CTA's stretch of that number, which was stored before its Q was asked for."""
        return load_stretch(self.memory, number, thread_of_warpgroup())


@cute.jit
def consume0(role: Consumer) -> None:
    """Take every stretch of the CTA, the low half of O's dims."""
    r = new_registers(role.memory.plan.tile)
    before, ctx = Before(Int32(0)), any_stretch(role.memory, thread_of_warpgroup())
    while before.stretches < num_stretches(role.memory):
        num_tiles = begin_stretch(ctx, r, before.stretches, 0)
        take_tiles0(ctx, r, role.scale, before, num_tiles)
        end_stretch(role, r, before.stretches, 0)
        before = before.after(num_tiles)


@cute.jit
def consume1(role: Consumer) -> None:
    """Likewise, the high half."""
    r = new_registers(role.memory.plan.tile)
    before, ctx = Before(Int32(0)), any_stretch(role.memory, thread_of_warpgroup())
    while before.stretches < num_stretches(role.memory):
        num_tiles = begin_stretch(ctx, r, before.stretches, 1)
        take_tiles1(ctx, r, role.scale, before, num_tiles)
        end_stretch(role, r, before.stretches, 1)
        before = before.after(num_tiles)


@cute.jit
def begin_stretch(ctx: Context, r: Registers, number: Int32, consumer: cutlass.Constexpr) -> Int32:
    """Forget the stretch before; wait for Q, in the form that the products take. Return the tiles
    up to those of the last step with a valid slot."""
    restart(r.rows)
    r.out.fill(0.0)
    ctx.memory.q_full.wait_for(number)
    if cutlass.const_expr(ctx.plan.packed):
        convert_query(ctx, consumer, number)
    else:
        # What one consumer did in the stretch before, the other one has seen: its sums, and that it
        # awaited all scores. q_converted is that of packed rows.
        meet_consumers(ctx.memory.q_converted, number)
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
    parts = load_parts(ctx.memory, number)
    if parts.count > 1:
        store_part(ctx, r, sums, role.workspace, parts, consumer)
        stored = parts_before(ctx, number)
        is_complete = draw_ticket(ctx, role.workspace, parts, stored, consumer)
        if is_complete:
            sums = merge_parts(ctx, r, role.scale, role.workspace, parts, consumer)
    if is_complete:
        output = Output(ctx, role.out, role.lse, role.attn_sink, role.scale)
        write_rows(output, r, sums, number, consumer)


@cute.jit
def write_rows(
    w: Output, r: Registers, sums: list[Float32], number: Int32, consumer: cutlass.Constexpr
) -> None:
    """Write a consumer's half of the item's rows, divided by their sums; consumer 0 writes lse.

    Args:
        number: of the stretch.
    """
    item = rows_of_thread(w)
    factors = factors_of_rows(w, r.rows, sums, item, ask_sinks(w, item), consumer)
    staged = staged_after_p(w.ctx, number, consumer)
    store_rows(w.ctx, w.out, r.out, factors, item, consumer, staged, 0)
