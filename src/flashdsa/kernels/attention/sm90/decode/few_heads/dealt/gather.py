"""Role gather: the rows of all stretches of the CTA."""

from cutlass import Int32, cute

from flashdsa.kernels.attention.sm90.decode.few_heads.gather import gather_tiles
from flashdsa.kernels.attention.sm90.decode.shared.context import DecodeMemory
from flashdsa.kernels.attention.sm90.decode.shared.dealing import Batch, num_stretches, take_stretch
from flashdsa.kernels.attention.sm90.decode.shared.gather import Gatherer
from flashdsa.kernels.attention.sm90.decode.shared.stretches import store_stretch


@cute.jit
def gather_stretches(
    memory: DecodeMemory,
    batch: Batch,
    kv: cute.Tensor,
    indices: cute.Tensor,
) -> None:
    """All four warps: gather every stretch of the CTA. Tensors as in `Gatherer`."""
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
        before = gather_tiles(role, before)
        number += 1
    # All rows are asked for: the next launch may begin to take the SMs that are free.
    cute.arch.griddepcontrol_launch_dependents()
