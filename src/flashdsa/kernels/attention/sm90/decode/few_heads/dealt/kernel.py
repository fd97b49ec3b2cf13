"""Sparse decode for Hopper of few heads, tiles dealt out: a CTA takes stretches of some items.

A stretch's steps are those of the kernel by clusters (`few_heads/kernel.py`). After it the
consumers exchange halves of O, and each writes its half of the dims from registers: to the results
if the CTA has the whole item, else to the workspace (`shared/parts.py`).

gather                 | math, consumer 0            | math, consumer 1
---------------------- | --------------------------- | ---------------------------
rows of a stretch      | Q; steps of a stretch       | Q; steps of a stretch
rows of the next one   | low dims: rows, or part     | high dims: rows, or part
                       | the last part: merge        | the last part: merge
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.memory import initialise_barriers
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.operands import split
from flashdsa.kernels.attention.sm90.core.softmax import LOG2_E, make_scale
from flashdsa.kernels.attention.sm90.decode.few_heads.dealt.math import (
    Dealt,
    take_stretches,
)
from flashdsa.kernels.attention.sm90.decode.few_heads.dealt.plan import (
    DealtFewHeadsPlan,
)
from flashdsa.kernels.attention.sm90.decode.few_heads.gather import (
    gather_pieces,
    tiles_of_consumer,
)
from flashdsa.kernels.attention.sm90.decode.shared.build import compile_dealt_launch
from flashdsa.kernels.attention.sm90.decode.shared.context import DecodeMemory
from flashdsa.kernels.attention.sm90.decode.shared.dealing import (
    Batch,
    batch_of,
    deal,
    num_stretches,
    take_stretch,
)
from flashdsa.kernels.attention.sm90.decode.shared.gather import Gatherer
from flashdsa.kernels.attention.sm90.decode.shared.parts import Workspace

GATHER = 0
"""The first warpgroup; the consumers follow."""


@cute.kernel
def dealt_few_heads_kernel(
    q: cute.Tensor,
    kv: cute.Tensor,
    indices: cute.Tensor,
    topk_length: cute.Tensor,
    attn_sink: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    sm_scale: Float32,
    workspace: Workspace,
    plan: cutlass.Constexpr,
):
    """One CTA; arguments as in `Operands` (`operands.py`)."""
    thread, _, _ = cute.arch.thread_idx()
    memory = DecodeMemory.allocate(plan)
    initialise_barriers(memory, thread)
    # The previous launch, which this one may follow early, has written the lengths and ids, or
    # still reads the results or the workspace.
    cute.arch.griddepcontrol_wait()
    # It ends with a sync of the CTA: the barriers are initialised.
    deal(memory, batch_of(memory, lse, indices, topk_length), thread)
    group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP_SIZE // WARP_SIZE)
    if group == GATHER:
        cute.arch.setmaxregister_decrease(plan.gather.registers)
        gather_stretches(memory, batch_of(memory, lse, indices, topk_length), kv, indices)
    else:
        cute.arch.setmaxregister_increase(plan.math.registers)
        scale = make_scale(sm_scale * LOG2_E)
        batch = batch_of(memory, lse, indices, topk_length)
        role = Dealt(memory, batch, workspace, q, out, lse, attn_sink, scale)
        take_stretches(role, group - GATHER - 1)


@cute.jit
def gather_stretches(
    memory: DecodeMemory, batch: Batch, kv: cute.Tensor, indices: cute.Tensor
) -> None:
    """All four warps: gather every stretch of the CTA. Tensors as in `Gatherer`."""
    number, tiles = Int32(0), Int32(0)
    while number < num_stretches(memory):
        role = Gatherer(take_stretch(memory, batch, number), None, kv, indices)
        thread = role.ctx.thread
        if thread == 0:
            # extent_free, a phase a stretch: both consumers have read the extent of the stretch
            # before, which this thread writes next.
            memory.extent_free.wait_for(number - 1)
        cute.arch.sync_warp()
        num_tiles = gather_pieces(role, tiles)
        consumer = cute.arch.make_warp_uniform(thread // WARP_SIZE) // memory.plan.tile_pieces
        tiles += tiles_of_consumer(num_tiles, consumer)
        number += 1
    # All rows are asked for: the next launch may begin to take the SMs that are free.
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def launch_dealt(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Launch on `stream`.

    Args:
        arguments: those of `Operands`, and
            counters: (CTAs,) int32, 0 before and after the launch.
            slots: (2 CTAs, plan.slot_words) int32.
            num_ctas: best one an SM.
    """
    x, (counters, slots, num_ctas) = split(arguments)
    dealt_few_heads_kernel(*x, Workspace(counters, slots), plan).launch(
        grid=[num_ctas, 1, 1],
        block=[plan.threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=True,
    )


def compile_dealt(plan: DealtFewHeadsPlan) -> Any:
    """Compile `launch_dealt`."""
    return compile_dealt_launch(launch_dealt, plan)
