"""Clocks of a warp for one gather4, bulk add, release or st.async, on a Blackwell SM.

Four warps issue few operations, then many, in rounds that end when all are done; the difference
is the cost of an operation, without latencies. An operation of `st.async` is 512 bytes, and both
CTAs of a pair send: four of them over their clocks are the bytes a clock of an SM.
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import BFloat16, Float32, GridConstant, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.experimental import primitives as prims
from cutlass.experimental.cuda import tensor_map
from cutlass.memory import SmemAllocator

from flashdsa.dsl.cluster import peer_address, store_async
from flashdsa.dsl.gather4 import gather4
from flashdsa.dsl.pipeline import arrive_at_peer_for_shared
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE

WARPS = WARPGROUP_SIZE // WARP_SIZE
ROUNDS = 32
FEW, MANY = 4, 16
"""Operations of a warp in a round."""
DIMS = 64
ROW_BYTES = DIMS * 2
OPERATION_BYTES = 4 * ROW_BYTES
ADDED = OPERATION_BYTES // 4
"""fp32 of a bulk add: as many bytes as a gather4 of a box."""
VECTOR_BYTES = OPERATION_BYTES // WARP_SIZE
"""That a lane sends at once."""
KINDS = ("gather4", "bulk add", "release", "st.async")


@cute.jit
def issue(
    kind: cutlass.Constexpr[str],
    operations: cutlass.Constexpr[int],
    kv: Any,
    sums: cute.Tensor,
    buffer: Any,
    barrier: Any,
    first: Int32,
) -> None:
    """Issue a round of this warp's operations, a lane each; the release's are of one lane, those
    of st.async of all."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    warp, lane = thread // WARP_SIZE, thread % WARP_SIZE
    number = warp * operations + lane
    at = buffer + number * OPERATION_BYTES
    if cutlass.const_expr(kind == "release"):
        if lane == 0:
            for _ in cutlass.range_constexpr(operations):
                arrive_at_peer_for_shared(barrier, 0)
    elif cutlass.const_expr(kind == "st.async"):
        peer = 1 - cta % 2
        for one in cutlass.range_constexpr(operations):
            to = buffer + (warp * operations + one) * OPERATION_BYTES + lane * VECTOR_BYTES
            words = [Int32(0)] * (VECTOR_BYTES // 4)
            store_async(
                peer_address(Int32(to.toint()), peer),
                words,
                peer_address(Int32(barrier.toint()), peer),
            )
    elif lane < operations:
        row = first + number * 4
        if cutlass.const_expr(kind == "gather4"):
            rows = [row, row + 1, row + 2, row + 3]
            gather4(Int32(at.toint()), kv, Int32(0), rows, barrier)
        else:
            prims.cp_reduce_async_bulk_global_shared_cta(
                (sums.iterator + Int64(row) * (ADDED // 4)).to_llvm_ptr(),
                at.to_llvm_ptr(),
                OPERATION_BYTES,
                op=prims.CpReduceOp.ADD,
                type=prims.CpReduceType.F32,
            )


@cute.kernel
def issue_kernel(
    kv_map: GridConstant[tensor_map.TensorMap],
    clocks: cute.Tensor,
    sums: cute.Tensor,
    kind: cutlass.Constexpr,
    operations: cutlass.Constexpr,
):
    """Count the clocks of ROUNDS in each CTA."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    memory = SmemAllocator()
    buffer = memory.allocate(WARPS * MANY * OPERATION_BYTES, 1024)
    barrier = memory.allocate(Int64, 8)
    words = cute.recast_ptr(buffer, dtype=Float32)
    for i in cutlass.range(WARPS * MANY * OPERATION_BYTES // 4 // WARPGROUP_SIZE, unroll=1):
        (words + i * WARPGROUP_SIZE + thread).store(Float32(0.0))
    arrivals = 1
    if cutlass.const_expr(kind == "release"):
        arrivals = WARPS * operations
    if thread == 0:
        cute.arch.mbarrier_init(barrier, arrivals)
    cute.arch.mbarrier_init_fence()
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    begin = Int32(cute.arch.clock())
    for number in cutlass.range(ROUNDS, unroll=1):
        if cutlass.const_expr(kind in ("gather4", "st.async")):  # noqa: SIM102 - when compiled
            if thread == 0:
                total = WARPS * operations * OPERATION_BYTES
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, total)
        cute.arch.sync_warp()
        if cutlass.const_expr(kind == "st.async"):
            # The peer has waited for the last round: its barrier is in this one's phase.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        rows = Int32(clocks.shape[0]) * (WARPS * MANY * 4)  # that the CTAs go round: some for each
        first = (cta * ROUNDS + number) * (WARPS * MANY * 4) % rows
        issue(kind, operations, kv_map.get_ptr(), sums, buffer, barrier, first)
        if cutlass.const_expr(kind == "bulk add"):
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)
        else:
            cute.arch.mbarrier_wait(barrier, number & 1)
        cute.arch.sync_threads()
    end = Int32(cute.arch.clock())
    if thread == 0:
        clocks[cta] = end - begin


@cute.jit
def launch_issue(
    kv: cute.Tensor,
    clocks: cute.Tensor,
    sums: cute.Tensor,
    kind: cutlass.Constexpr,
    operations: cutlass.Constexpr,
    stream: Any,
) -> None:
    """One CTA for each of `clocks`, an even number of them.

    Args:
        kv: (rows, 64) bf16. sums: (rows * 32,) fp32, added to.
    """
    kv_map = tensor_map.create_tensor_map_tiled_from_view(
        kv, box_dims=(1, DIMS), swizzle=tensor_map.TensorMapSwizzle.s128b
    )
    issue_kernel(kv_map, clocks, sums, kind, operations).launch(
        grid=[clocks.shape[0], 1, 1],
        cluster=[2 if kind == "st.async" else 1, 1, 1],
        block=[WARPGROUP_SIZE, 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
    )


def clocks_an_operation(kind: str, emulated: bool) -> float | None:
    """Measure the issuing warp on the slowest SM; None on ptxemu, which only shows that it runs."""
    ctas = 2 if emulated else torch.cuda.get_device_properties(0).multi_processor_count
    device = "cpu" if emulated else "cuda"
    rows = ctas * WARPS * MANY * 4
    kv = torch.zeros(rows, DIMS, dtype=torch.bfloat16, device=device)
    sums = torch.zeros(rows * (ADDED // 4), device=device)
    found = []
    for operations in (FEW, MANY):
        symbol, words = cute.sym_int32(), cute.sym_int32()
        function = cute.compile(
            launch_issue,
            make_fake_compact_tensor(
                BFloat16, (symbol, DIMS), stride_order=(1, 0), assumed_align=16
            ),
            make_fake_compact_tensor(Int32, (cute.sym_int32(),), assumed_align=4),
            make_fake_compact_tensor(Float32, (words,), assumed_align=16),
            kind,
            operations,
            make_fake_stream(use_tvm_ffi_env_stream=True),
            options="--enable-tvm-ffi --gpu-arch sm_100a",
        )
        clocks = torch.zeros(ctas, dtype=torch.int32, device=device)
        if emulated:
            import ptxemu.cutedsl

            with ptxemu.cutedsl.emulate(arch="sm_100a", on_finding="raise"):
                function(kv, clocks, sums)
            continue
        for _ in range(3):  # the first launches load the code
            function(kv, clocks, sums)
        found.append(int(clocks.max()))
    return None if emulated else (found[1] - found[0]) / (MANY - FEW) / ROUNDS
