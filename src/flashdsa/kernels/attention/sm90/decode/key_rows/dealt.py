"""The stretches of a CTA, as the kernels with keys as rows take them."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.opaque import opaque
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.softmax import Scale
from flashdsa.kernels.attention.sm90.decode.shared.context import (
    Context,
    DecodeMemory,
    Output,
    thread_of_warpgroup,
)
from flashdsa.kernels.attention.sm90.decode.shared.dealing import (
    Batch,
    Parts,
    num_stretches,
    take_stretch,
)
from flashdsa.kernels.attention.sm90.decode.shared.gather import Gatherer
from flashdsa.kernels.attention.sm90.decode.shared.parts import Workspace
from flashdsa.kernels.attention.sm90.decode.shared.stretches import (
    load_parts,
    load_stretch,
    store_stretch,
)


class Math(NamedTuple):
    """Reads q, k and masks. Writes its p, and results."""

    ctx: Context
    output: Output
    q: Any  # (S, H, d_qk) bf16, or of 64 heads its map
    consumer: Int32  # 0 or 1


class Dealt(NamedTuple):
    """Role math of dealt tiles. Writes its p, and results or parts."""

    memory: DecodeMemory
    workspace: Workspace
    q: Any  # (S, H, d_qk) bf16, or of 64 heads its map
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
def gather_stretches(
    memory: DecodeMemory,
    batch: Batch,
    kv: cute.Tensor,
    indices: cute.Tensor,
    gather: cutlass.Constexpr,
) -> None:
    """All four warps: gather every stretch of the CTA.

    Args:
        kv, indices: as in `Gatherer`.
        gather: function of a role and of tiles or steps that the warp had before; it gathers a
            stretch and returns their number after it.
    """
    number, before = Int32(0), Int32(0)
    while number < num_stretches(memory):
        role = Gatherer(take_stretch(memory, batch, number), None, kv, indices, batch.sources)
        if role.ctx.thread == 0:
            # extent_free, a phase a stretch: both consumers have read the extent of the stretch
            # before, which this thread writes next, and have ended the one before that.
            memory.extent_free.wait_for(number - 1)
            store_stretch(role.ctx, batch, number)
            memory.stretch_full.arrive()
        cute.arch.sync_warp()
        before = gather(role, before)
        number += 1
    # All rows are asked for: the next launch may begin to take the SMs that are free.
    cute.arch.griddepcontrol_launch_dependents()
