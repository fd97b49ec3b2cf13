"""dKV += dS^T Q + P^T dO from the workspace: a CTA takes a slice of the dims of a group at a time.

Q and dO of the group's rows stay in shared memory for all of the list's tiles of 64 keys.

rows                | matrices           | multiply, even tiles      | odd tiles
------------------- | ------------------ | ------------------------- | --------------------------
Q and dO, in parts  | dS, P of tile 0    |                           |
                    | dS, P of tile 1    | products of tile 0        |
                    | dS, P of tile 2    | additions to dKV          | products of tile 1
                    | ...                | products of tile 2        | additions to dKV
next item's parts   |                    | last tile frees the parts | ...
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Uint8, cute

from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.dsl.grids import follow_grid
from flashdsa.dsl.memory import initialise_barriers
from flashdsa.hw import SM90, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.mend import flat
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.load import (
    DkvMemory,
    Matrices,
    Rows,
    copy_all,
    load_matrices,
)
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.multiply import Multiply, multiply_all
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import ROW_WARPS, DkvPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.items import Groups, locate


@cute.kernel
def dkv_kernel(
    workspace: cute.Tensor,
    ids: cute.Tensor,
    counts: cute.Tensor,
    present: cute.Tensor,
    q: cute.Tensor,
    do: cute.Tensor,
    dkv: cute.Tensor,
    heads: Int32,
    groups: Groups,
    plan: cutlass.Constexpr,
):
    """One CTA; arguments as in `launch_dkv`."""
    thread, _, _ = cute.arch.thread_idx()
    memory = DkvMemory.allocate(plan)
    initialise_barriers(memory, thread)
    cute.arch.sync_threads()
    follow_grid()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    group = warp // (WARPGROUP_SIZE // WARP_SIZE)
    # Each role computes its own coordinates: values shared by all would be live in every role.
    if group == 0:
        cute.arch.setmaxregister_decrease(plan.rows.registers)
        ctx = locate(memory, ids, counts, groups)
        if warp == 0:
            if thread == 0:
                load_matrices(Matrices(ctx, workspace))
        elif warp <= ROW_WARPS:
            copy_all(Rows(ctx, q, do, present, heads))
    else:
        cute.arch.setmaxregister_increase(plan.multiply.registers)
        ctx = locate(memory, ids, counts, groups)
        multiply_all(Multiply(ctx, dkv, group - 1))


class Operands(NamedTuple):
    """Arguments of every launch, in order; see workspace.py."""

    workspace: cute.Tensor  # (row blocks, bytes) uint8: of the groups of the launch
    ids: cute.Tensor  # (groups, capacity) int32
    counts: cute.Tensor  # (groups,) int32
    present: cute.Tensor  # (groups,) int32
    q: cute.Tensor  # (S, H, 576) bf16
    do: cute.Tensor  # (S, H, 512) bf16
    dkv: cute.Tensor  # (S_kv, 576) fp32, added to
    heads: Int32  # H, one of HEADS


@cute.jit
def launch_dkv(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Launch on `stream`.

    Args:
        arguments: those of `Operands`, those of `Groups`, and
            num_ctas: at most the work items, plan.slices a group; best as many as run at once.
    """
    last = len(Operands._fields)
    *before, num_ctas = arguments
    given, groups = Operands(*before[:last]), Groups(*before[last:])
    # The kernel sees the heads' rows one after another.
    x = given._replace(q=flat(given.q, plan.tile.d_qk), do=flat(given.do, plan.tile.d_v))
    dkv_kernel(*x, groups, plan).launch(
        grid=[num_ctas, 1, 1],
        block=[plan.threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
        use_pdl=True,
    )


def compile_dkv(plan: DkvPlan) -> Any:
    """Compile `launch_dkv`."""
    d_qk, d_v = plan.tile.d_qk, plan.tile.d_v
    blocks, block_bytes, groups, capacity, keys = (cute.sym_int32() for _ in range(5))
    rows = cute.sym_int32(), cute.sym_int32()
    return compile_launch(
        SM90,
        launch_dkv,
        plan,
        fake_tensor(Uint8, (blocks, block_bytes)),
        fake_tensor(Int32, (groups, capacity), 4),
        fake_tensor(Int32, (groups,), 4),
        fake_tensor(Int32, (groups,), 4),
        fake_tensor(BFloat16, (*rows, d_qk)),
        fake_tensor(BFloat16, (*rows, d_v)),
        fake_tensor(Float32, (keys, d_qk)),
        Int32(128),
        Int32(0),
        Int32(1),
        fake_tensor(Int32, (cute.sym_int32(),), 4),
        Int32(0),
        Int32(1),
    )
