"""Sparse decode for Hopper of packed rows: a CTA takes 64 heads of a query.

gather             | math, consumer 0                  | math, consumer 1
------------------ | --------------------------------- | ---------------------------------
rows of both tiles | Q                                 | Q
                   | S^T = K Q^T of tile 0             | S^T = K Q^T of tile 1
                   | P^T = exp2(S^T) -> shared         |
                   | O^T += V^T P^T of tile 0, low dims| P^T = exp2(S^T) -> shared
the next step's    | the same of tile 1                | O^T += V^T P^T of both, high dims

Keys, and dims, are the rows of the products: K and V^T come from registers, where e4m3 become f16.
Rows stay in shared memory as they come; nobody expands them there.
"""

from typing import Any

import cutlass
from cutlass import GridConstant, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl.memory import initialise_barriers
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.operands import OtherOperands, split, split_more
from flashdsa.kernels.attention.sm90.core.gather import map_query
from flashdsa.kernels.attention.sm90.core.softmax import LOG2_E, make_scale
from flashdsa.kernels.attention.sm90.core.sources import sources_of_plan
from flashdsa.kernels.attention.sm90.core.tile import ROWS
from flashdsa.kernels.attention.sm90.decode.key_rows.dealt import Math
from flashdsa.kernels.attention.sm90.decode.many_heads.gather import gather_steps
from flashdsa.kernels.attention.sm90.decode.many_heads.math import consume
from flashdsa.kernels.attention.sm90.decode.many_heads.plan import ManyHeadsPlan
from flashdsa.kernels.attention.sm90.decode.many_heads.rows import end_item
from flashdsa.kernels.attention.sm90.decode.shared.build import (
    compile_cluster_launch,
    launch_clusters,
)
from flashdsa.kernels.attention.sm90.decode.shared.context import (
    DecodeMemory,
    find_item,
    output_of,
)
from flashdsa.kernels.attention.sm90.decode.shared.gather import Gatherer

GATHER = 0
"""The first warpgroup; the consumers follow."""


@cute.kernel
def many_heads_kernel(
    q_map: GridConstant[tensor_map.TensorMap],
    x: OtherOperands,
    more: Any,
    plan: cutlass.Constexpr,
):
    """One CTA; more: of a joined plan `MoreOperands`, else None."""
    thread, _, _ = cute.arch.thread_idx()
    memory = DecodeMemory.allocate(plan)
    sources = sources_of_plan(plan, x, more)
    initialise_barriers(memory, thread)
    cute.arch.sync_threads()
    # The previous launch, which this one may follow early, has written the ids, or still reads the
    # results.
    cute.arch.griddepcontrol_wait()
    group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP_SIZE // WARP_SIZE)
    if group == GATHER:
        cute.arch.setmaxregister_decrease(plan.gather.registers)
        ctx = find_item(memory, x, sources)
        gather_steps(Gatherer(ctx, None, x.kv, x.indices, sources))
        # All rows are asked for: the next launch may begin to take the SMs that are free.
        cute.arch.griddepcontrol_launch_dependents()
    else:
        cute.arch.setmaxregister_increase(plan.math.registers)
        scale = make_scale(x.sm_scale * LOG2_E)
        ctx = find_item(memory, x, sources)
        consumer = group - GATHER - 1
        r = consume(Math(ctx, output_of(ctx, x, scale), q_map.get_ptr(), consumer))
        # Computed again: values that are used after the steps would be live through them.
        ctx = find_item(memory, x, sources)
        end_item(Math(ctx, output_of(ctx, x, scale), q_map.get_ptr(), consumer), r)


@cute.jit
def launch_many_heads(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Launch on `stream`: a CTA for each 64 heads of a query.

    Args:
        arguments: those of `Operands`, of a joined plan those of `MoreOperands`, and cluster_size:
            1, which the other decodes take.
    """
    x, rest = split(arguments)
    more, (cluster_size,) = split_more(rest, plan.joined)
    items = x.q.shape[0] * ((x.q.shape[1] + ROWS - 1) // ROWS)
    q_map = map_query(x.q)
    kernel = many_heads_kernel(q_map, OtherOperands(*x[1:]), more, plan)
    launch_clusters(kernel, plan, items, cluster_size, stream)


def compile_many_heads(plan: ManyHeadsPlan) -> Any:
    """Compile `launch_many_heads`."""
    return compile_cluster_launch(launch_many_heads, plan)
