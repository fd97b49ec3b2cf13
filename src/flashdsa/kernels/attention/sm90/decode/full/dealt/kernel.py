"""Sparse decode for Hopper, tiles dealt out: a CTA takes stretches of neighbouring items.

A stretch's steps are those of the decode by clusters (`full/kernel.py`). Rows of an item that a CTA
has alone are written from registers. Parts of others go to a workspace, and the CTA that stores an
item's last one merges them (`shared/parts.py`).

gather                | consumer0                   | consumer1
--------------------- | --------------------------- | ---------------------------------------
Q, keys of a stretch  | steps of a stretch          | steps of a stretch
Q of the next one     |     after its last scores   |     after its last scores
keys of the next one  | O's low dims: rows, or part | O's high dims: rows, or part
                      |     the last part: merge    |     the last part: merge
"""

from typing import Any

import cutlass
from cutlass import GridConstant, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl.memory import initialise_barriers
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.operands import OtherOperands
from flashdsa.kernels.attention.sm90.core.gather import map_query
from flashdsa.kernels.attention.sm90.core.softmax import LOG2_E, make_scale
from flashdsa.kernels.attention.sm90.core.sources import sources_of_plan
from flashdsa.kernels.attention.sm90.decode.full.dealt.consumers import Consumer, consume0, consume1
from flashdsa.kernels.attention.sm90.decode.full.dealt.gather import gather_stretches
from flashdsa.kernels.attention.sm90.decode.full.dealt.plan import DealtPlan
from flashdsa.kernels.attention.sm90.decode.shared.build import Decode, compile_dealt_tiles
from flashdsa.kernels.attention.sm90.decode.shared.context import DecodeMemory
from flashdsa.kernels.attention.sm90.decode.shared.dealing import batch_of, deal
from flashdsa.kernels.attention.sm90.decode.shared.parts import Workspace

GATHER, CONSUMER0, CONSUMER1 = range(3)
"""Warpgroups, in the plan's order of roles."""


@cute.kernel
def dealt_kernel(
    q_map: GridConstant[tensor_map.TensorMap],
    x: OtherOperands,
    workspace: Workspace,
    more: Any,
    plan: cutlass.Constexpr,
):
    """One CTA; more: of a joined plan `MoreOperands`, else None."""
    thread, _, _ = cute.arch.thread_idx()
    memory = DecodeMemory.allocate(plan)
    initialise_barriers(memory, thread)
    # The previous launch, which this one may follow early, has written the lengths and ids, or
    # still reads the results or the workspace.
    cute.arch.griddepcontrol_wait()
    sources = sources_of_plan(plan, x, more)
    # It ends with a sync of the CTA: the barriers are initialised.
    deal(memory, batch_of(memory, x, sources), thread)
    group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // (WARPGROUP_SIZE // WARP_SIZE)
    # Each role computes its own coordinates: values shared by all would be live in every role.
    if group == GATHER:
        cute.arch.setmaxregister_decrease(plan.gather.registers)
        batch = batch_of(memory, x, sources)
        gather_stretches(memory, batch, q_map.get_ptr(), x.kv, x.indices)
    elif group == CONSUMER0:
        cute.arch.setmaxregister_increase(plan.consumer0.registers)
        scale = make_scale(x.sm_scale * LOG2_E)
        consume0(Consumer(memory, workspace, x.out, x.lse, x.attn_sink, scale))
    else:
        cute.arch.setmaxregister_increase(plan.consumer1.registers)
        scale = make_scale(x.sm_scale * LOG2_E)
        consume1(Consumer(memory, workspace, x.out, x.lse, x.attn_sink, scale))


def compile_dealt(plan: DealtPlan) -> Any:
    """Compile the kernel's launch."""
    return compile_dealt_tiles(Decode(dealt_kernel, map_query, plan))
