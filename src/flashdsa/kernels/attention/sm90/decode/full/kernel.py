"""Sparse decode for Hopper: a cluster takes 64 heads of a query, each CTA a stretch of its slots.

Steps of two tiles of 64 keys, as in the forward (`fwd/kernel.py`); at the end the CTAs exchange
their O over distributed shared memory and each writes a share of the dims (`shared/combine.py`).
A CTA that has an item to itself has a plan of its own and writes the rows: code that is not there
is not fetched.

gather                | consumer0                   | consumer1
--------------------- | --------------------------- | ---------------------------------------
Q, both tiles         | (packed rows: Q to f16)     | (packed rows: Q to f16)
(packed rows: bytes,  | S0 = Q K0^T                 |
 then f16)            | P0 = exp2(S0) -> shared     | S1 = Q K1^T
                      | O += P0 V0, low dims        | O += P0 V0, high dims, meanwhile
the next step's tiles |                             |     P1 = exp2(S1) -> shared
                      | O += P1 V1, low dims        | O += P1 V1, high dims
                      |     then S0                 |
"""

from typing import Any

import cutlass
from cutlass import GridConstant, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl.memory import Memory, initialise_barriers
from flashdsa.dsl.registers import take_registers
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.operands import Operands
from flashdsa.kernels.attention.sm90.core.gather import map_query
from flashdsa.kernels.attention.sm90.core.softmax import LOG2_E, make_scale
from flashdsa.kernels.attention.sm90.core.sources import sources_of_plan
from flashdsa.kernels.attention.sm90.decode.full import consumers, expand
from flashdsa.kernels.attention.sm90.decode.full.gather import NOTHING, gather_rows
from flashdsa.kernels.attention.sm90.decode.full.plan import DecodePlan
from flashdsa.kernels.attention.sm90.decode.shared import build, combine, context
from flashdsa.kernels.attention.sm90.decode.shared import gather as gathering

GATHER, CONSUMER0, CONSUMER1 = range(3)
"""Warpgroups, in the plan's order of roles."""


@cute.kernel
def decode_kernel(
    q_map: GridConstant[tensor_map.TensorMap], x: Operands, more: Any, plan: cutlass.Constexpr
):
    """One CTA; more: of a joined plan `MoreOperands`, else None."""
    thread, _, _ = cute.arch.thread_idx()
    memory = Memory.allocate(plan)
    sources = sources_of_plan(plan, x, more)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    group = warp // (WARPGROUP_SIZE // WARP_SIZE)
    initialise_barriers(memory, thread)
    # The previous launch, which this one may follow early, has written the lengths and ids, or
    # still reads the results.
    cute.arch.griddepcontrol_wait()
    item = context.find_item(memory, x, sources)
    if thread == 0:
        # Before the rows, which take as long: the first products need both.
        consumers.load_item_query(item, q_map.get_ptr())
    if warp == 1:
        context.store_item(item)
    asked = gathering.ask_ends(
        gathering.early_gatherer(item, group == GATHER, x, sources), thread % WARP_SIZE
    )
    cute.arch.sync_threads()
    if cutlass.const_expr(not plan.single_cta):
        cute.arch.cluster_arrive_relaxed()
    # Each role loads its own coordinates: values shared by all would be live in every role.
    if group == GATHER:
        take_registers(plan, "gather")
        ctx = context.load_item(memory)
        gather(gathering.Gatherer(ctx, None, x.kv, x.indices, sources), asked)
    else:
        scale = make_scale(x.sm_scale * LOG2_E)
        if group == CONSUMER0:
            take_registers(plan, "consumer0")
            ctx = context.load_item(memory)
            consumers.consume0(context.output_of(ctx, x, scale))
        else:
            take_registers(plan, "consumer1")
            ctx = context.load_item(memory)
            consumers.consume1(context.output_of(ctx, x, scale))
        if cutlass.const_expr(not plan.single_cta):
            ctx = context.load_item(memory)
            combine.write_share(context.output_of(ctx, x, scale), group - CONSUMER0)


@cute.jit
def gather(role: gathering.Gatherer, asked: gathering.Asked) -> None:
    """Gather every step of the CTA; `asked`: result of `ask_ends`."""
    if cutlass.const_expr(role.ctx.plan.packed):
        expand.gather_packed_rows(role, NOTHING, asked)
    else:
        gather_rows(role, NOTHING, asked)
    # All rows are asked for: the next launch may begin to take the SMs that are free.
    cute.arch.griddepcontrol_launch_dependents()


def compile_decode(plan: DecodePlan) -> Any:
    """Compile the kernel's launch."""
    return build.compile_clusters(build.Decode(decode_kernel, map_query, plan))
