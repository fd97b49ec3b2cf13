"""Sparse decode for Hopper of few heads: a cluster takes a query, each CTA a stretch of its slots.

gather                 | math, consumer 0            | math, consumer 1
---------------------- | --------------------------- | ---------------------------
rows of 32 keys a warp | Q                           | Q
                       | S^T = K Q^T of tile 0       | S^T = K Q^T of tile 1
                       | P^T = exp2(S^T) -> shared   | P^T = exp2(S^T) -> shared
the next step's rows   | O^T += V^T P^T              | O^T += V^T P^T

Keys, and dims, are the rows of the products, as there are few heads; K and V^T come from registers,
so that e4m3 become f16 on the way. The consumers add up their O at the end, and the
CTAs theirs as in the other decode.
"""

from typing import Any

import cutlass
from cutlass import cute

from flashdsa.dsl.memory import Memory, initialise_barriers
from flashdsa.dsl.registers import take_registers
from flashdsa.dsl.warp import warpgroup_idx
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.operands import Operands
from flashdsa.kernels.attention.sm90.core.softmax import LOG2_E, make_scale
from flashdsa.kernels.attention.sm90.core.sources import sources_of_plan
from flashdsa.kernels.attention.sm90.decode.few_heads.gather import ask_first, gather_pieces
from flashdsa.kernels.attention.sm90.decode.few_heads.math import Math, consume, stage_share
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import FewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.shared import build, combine, context, gather

GATHER = 0
"""The first warpgroup; the consumers follow."""


@cute.kernel
def few_heads_kernel(q: cute.Tensor, x: Operands, more: Any, plan: cutlass.Constexpr):
    """One CTA; more: of a joined plan `MoreOperands`, else None."""
    thread, _, _ = cute.arch.thread_idx()
    memory = Memory.allocate(plan)
    sources = sources_of_plan(plan, x, more)
    group = warpgroup_idx()
    initialise_barriers(memory, thread - WARPGROUP_SIZE)
    # The previous launch, which this one may follow early, has written the lengths and ids, or
    # still reads the results.
    cute.arch.griddepcontrol_wait()
    item = context.find_item(memory, x, sources)
    if thread < WARP_SIZE:
        context.store_item(item)
    asked = ask_first(gather.early_gatherer(item, group == GATHER, x, sources))
    cute.arch.sync_threads()
    cute.arch.cluster_arrive_relaxed()
    if group == GATHER:
        take_registers(plan, "gather")
        ctx = context.load_item(memory)
        gather_pieces(gather.Gatherer(ctx, None, x.kv, x.indices, sources), asked)
        # All rows are asked for: the next launch may begin to take the SMs that are free.
        cute.arch.griddepcontrol_launch_dependents()
    else:
        take_registers(plan, "math")
        scale = make_scale(x.sm_scale * LOG2_E)
        ctx = context.load_item(memory)
        consumer = group - GATHER - 1
        r = consume(Math(ctx, context.output_of(ctx, x, scale), q, consumer))
        # Loaded again: values that are used after the steps would be live through them.
        ctx = context.load_item(memory)
        output = context.output_of(ctx, x, scale)
        stage_share(Math(ctx, output, q, consumer), r)
        combine.write_share(output, consumer)


def compile_few_heads(plan: FewHeadsPlan) -> Any:
    """Compile the kernel's launch."""
    return build.compile_clusters(build.Decode(few_heads_kernel, lambda q: q, plan))
