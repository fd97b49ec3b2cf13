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
from cutlass import cute

from flashdsa.dsl.memory import initialise_barriers
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.operands import OtherOperands
from flashdsa.kernels.attention.sm90.core.softmax import LOG2_E, make_scale
from flashdsa.kernels.attention.sm90.core.sources import sources_of_plan
from flashdsa.kernels.attention.sm90.decode.few_heads.dealt.gather import gather_stretches
from flashdsa.kernels.attention.sm90.decode.few_heads.dealt.math import Dealt, take_stretches
from flashdsa.kernels.attention.sm90.decode.few_heads.dealt.plan import DealtFewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.shared.build import Decode, compile_dealt_tiles
from flashdsa.kernels.attention.sm90.decode.shared.context import DecodeMemory
from flashdsa.kernels.attention.sm90.decode.shared.dealing import batch_of, deal
from flashdsa.kernels.attention.sm90.decode.shared.parts import Workspace

GATHER = 0
"""The first warpgroup; the consumers follow."""


@cute.kernel
def dealt_few_heads_kernel(
    q: cute.Tensor,
    x: OtherOperands,
    workspace: Workspace,
    more: Any,
    plan: cutlass.Constexpr,
):
    """One CTA; more: of a joined plan `MoreOperands`, else None."""
    thread, _, _ = cute.arch.thread_idx()
    memory = DecodeMemory.allocate(plan)
    sources = sources_of_plan(plan, x, more)
    initialise_barriers(memory, thread)
    # The previous launch, which this one may follow early, has written the lengths and ids, or
    # still reads the results or the workspace.
    cute.arch.griddepcontrol_wait()
    # It ends with a sync of the CTA: the barriers are initialised.
    deal(memory, batch_of(memory, x, sources), thread)
    group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP_SIZE // WARP_SIZE)
    if group == GATHER:
        cute.arch.setmaxregister_decrease(plan.gather.registers)
        batch = batch_of(memory, x, sources)
        gather_stretches(memory, batch, x.kv, x.indices)
    else:
        cute.arch.setmaxregister_increase(plan.math.registers)
        scale = make_scale(x.sm_scale * LOG2_E)
        role = Dealt(memory, workspace, q, x.out, x.lse, x.attn_sink, scale)
        take_stretches(role, group - GATHER - 1)


def compile_dealt(plan: DealtFewHeadsPlan) -> Any:
    """Compile the kernel's launch."""
    return compile_dealt_tiles(Decode(dealt_few_heads_kernel, lambda q: q, plan))
