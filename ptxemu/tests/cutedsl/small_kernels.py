"""Small CuTe DSL kernels: shared memory, a cluster, tensor copies, a race, large launches."""

import cutlass
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.experimental import primitives as prims
from cutlass.experimental.cuda import tensor_map
from cutlass.memory import SmemAllocator

TILE = 64


@cute.kernel
def reverse_kernel(
    source: cute.Tensor, target: cute.Tensor, factor: Int32, synchronised: cutlass.Constexpr
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    staged = SmemAllocator().allocate_tensor(Int32, cute.make_layout(TILE))
    staged[thread] = source[block * TILE + thread] * factor
    if cutlass.const_expr(synchronised):
        cute.arch.sync_threads()
    target[block * TILE + thread] = staged[TILE - 1 - thread]


@cute.jit
def reverse_twice(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, factor: Int32):
    """b: a's tiles reversed and scaled; c: the same of b."""
    grid = (cute.size(a) // TILE, 1, 1)
    reverse_kernel(a, b, factor, True).launch(grid=grid, block=(TILE, 1, 1))
    reverse_kernel(b, c, factor, True).launch(grid=grid, block=(TILE, 1, 1))


@cute.jit
def reverse(a: cute.Tensor, b: cute.Tensor, stream: cuda.CUstream, synchronised: cutlass.Constexpr):
    grid = (cute.size(a) // TILE, 1, 1)
    reverse_kernel(a, b, Int32(1), synchronised).launch(
        grid=grid, block=(TILE, 1, 1), stream=stream
    )


@cute.kernel
def shift_kernel(source: cute.Tensor, target: cute.Tensor, shift: Int32):
    thread, _, _ = cute.arch.thread_idx()
    target[thread] = source[thread + shift]


@cute.jit
def shift_left(a: cute.Tensor, b: cute.Tensor, shift: Int32):
    """Reads beyond the end of `a` where shift > 0."""
    shift_kernel(a, b, shift).launch(grid=(1, 1, 1), block=(TILE, 1, 1))


@cute.jit
def shift_cooperatively(a: cute.Tensor, b: cute.Tensor, ctas: Int32):
    shift_kernel(a, b, Int32(0)).launch(grid=(ctas, 1, 1), block=(TILE, 1, 1), cooperative=True)


@cute.kernel
def swap_ranks_kernel(source: cute.Tensor, target: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    peer = cute.arch.block_idx_in_cluster() ^ 1
    pointer = cute.recast_ptr(SmemAllocator().allocate(TILE * 4, 128), dtype=Float32)
    staged = cute.make_tensor(pointer, cute.make_layout(TILE))
    staged[thread] = source[block, thread]
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    value = cute.arch.inline_ptx(
        "ld.shared::cluster.f32 {$w0}, [{$r0}];",
        write_only_types=[Float32],
        read_only_args=[cute.arch.map_dsmem_ptr(pointer + thread, peer)],
    )
    target[block, thread] = value
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def swap_ranks(a: cute.Tensor, b: cute.Tensor, cluster: cutlass.Constexpr):
    """Row r of b is row r ^ 1 of a, read out of the other CTA's shared memory."""
    swap_ranks_kernel(a, b).launch(
        grid=(a.shape[0], 1, 1), block=(TILE, 1, 1), cluster=(cluster, 1, 1)
    )


@cute.kernel
def tma_copy_kernel(
    load: cute.CopyAtom, source: cute.Tensor, store: cute.CopyAtom, target: cute.Tensor
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    shared = SmemAllocator()
    barrier = shared.allocate_array(Int64, 1)
    tile = shared.allocate_tensor(Float32, cute.make_ordered_layout((32, 32), order=(1, 0)), 1024)
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    loaded, read = cpasync.tma_partition(
        load,
        0,
        cute.make_layout(1),
        cute.group_modes(tile, 0, 2),
        cute.group_modes(cute.local_tile(source, (32, 32), (block, 0)), 0, 2),
    )
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 32 * 32 * 4)
        cute.copy(load, read, loaded, tma_bar_ptr=barrier)
    cute.arch.mbarrier_wait(barrier, 0)
    for i in cutlass.range_constexpr(32 * 32 // TILE):
        at = thread + i * TILE
        tile[at // 32, at % 32] = tile[at // 32, at % 32] * 2.0
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    kept, written = cpasync.tma_partition(
        store,
        0,
        cute.make_layout(1),
        cute.group_modes(tile, 0, 2),
        cute.group_modes(cute.local_tile(target, (32, 32), (block, 0)), 0, 2),
    )
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        cute.copy(store, kept, written)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def tma_double(a: cute.Tensor, b: cute.Tensor):
    """b = 2 a, (n, 32) float32 in tiles of 32 rows; the host code makes the tensor maps itself."""
    layout = cute.make_ordered_layout((32, 32), order=(1, 0))
    load, source = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), a, layout, (32, 32)
    )
    store, target = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(), b, layout, (32, 32)
    )
    tma_copy_kernel(load, source, store, target).launch(
        grid=(cute.ceil_div(a.shape[0], 32), 1, 1), block=(TILE, 1, 1)
    )


@cute.kernel
def encoded_map_kernel(described: cutlass.GridConstant[tensor_map.TensorMap], target: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    shared = SmemAllocator()
    barrier = shared.allocate_array(Int64, 1)
    box = shared.allocate(4 * 64, 1024)
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if thread < 32:  # noqa: SIM102 - the compiler rewrites the ifs
        if prims.elect_sync():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 4 * 64)
            prims.cp_async_bulk_tensor_shared_cluster_global(
                box.to_llvm_ptr(),
                described.get_ptr(),
                [Int32(16), Int32(2)],
                barrier.to_llvm_ptr(),
                [],
            )
    cute.arch.mbarrier_wait(barrier, 0)
    values = cute.make_tensor(cute.recast_ptr(box, dtype=Float32), cute.make_layout(TILE))
    target[thread] = values[thread]


@cute.jit
def load_encoded_box(a: cute.Tensor, b: cute.Tensor):
    """b: the box of 4 rows and 16 columns of a that starts at row 2, column 16."""
    described = tensor_map.create_tensor_map_tiled_from_view(a, box_dims=(4, 16))
    encoded_map_kernel(described, b).launch(grid=(1, 1, 1), block=(TILE, 1, 1))


@cute.kernel
def large_shared_kernel(target: cute.Tensor, size: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    pointer = cute.recast_ptr(SmemAllocator().allocate(size, 1024), dtype=Float32)
    staged = cute.make_tensor(pointer, cute.make_layout(TILE))
    staged[thread] = Float32(thread)
    target[thread] = staged[thread]


@cute.jit
def large_shared(b: cute.Tensor, size: cutlass.Constexpr):
    large_shared_kernel(b, size).launch(grid=(1, 1, 1), block=(TILE, 1, 1))
