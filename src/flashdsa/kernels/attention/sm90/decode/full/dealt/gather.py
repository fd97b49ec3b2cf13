"""Role gather: the rows of all stretches of the CTA, and Q of each."""

from typing import Any

import cutlass
from cutlass import Int32, cute

from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.gather import load_query
from flashdsa.kernels.attention.sm90.decode.full.expand import gather_packed_rows
from flashdsa.kernels.attention.sm90.decode.full.gather import Before, gather_rows
from flashdsa.kernels.attention.sm90.decode.shared.context import DecodeMemory
from flashdsa.kernels.attention.sm90.decode.shared.dealing import Batch, num_stretches, take_stretch
from flashdsa.kernels.attention.sm90.decode.shared.gather import Gatherer, ask_ends
from flashdsa.kernels.attention.sm90.decode.shared.stretches import store_stretch


@cute.jit
def gather_stretches(
    memory: DecodeMemory, batch: Batch, q_map: Any, kv: cute.Tensor, indices: cute.Tensor
) -> None:
    """All four warps: gather every stretch of the CTA. Tensors as in `Gatherer`."""
    before = Before(Int32(0))
    while before.stretches < num_stretches(memory):
        ctx = take_stretch(memory, batch, before.stretches)
        role = Gatherer(ctx, q_map, kv, indices, batch.sources, batch)
        # Asked for before Q, which waits for the consumers.
        asked = ask_ends(role, ctx.thread % WARP_SIZE)
        load_rows_of_query(role, before)
        if cutlass.const_expr(memory.plan.packed):
            num_tiles = gather_packed_rows(role, before, asked)
        else:
            num_tiles = gather_rows(role, before, asked)
        before = before.after(num_tiles)
    # All rows are asked for: the next launch may begin to take the SMs that are free.
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def load_rows_of_query(role: Gatherer, before: Before) -> None:
    """Load the item's rows of Q; those past the last head become zeros."""
    ctx = role.ctx
    if ctx.thread == 0:
        # q_free, a phase a stretch: both consumers have the last scores of the stretch before, and
        # its extent, which this thread writes next, and have ended the one before that.
        ctx.memory.q_free.wait_for(before.stretches - 1)
        store_stretch(ctx, role.batch, before.stretches)
        # q_full: the stretch is stored, too.
        ctx.memory.q_full.arrive_and_expect_tx()
        load_query(ctx, role.q_map, [ctx.head, ctx.query])
    cute.arch.sync_warp()
