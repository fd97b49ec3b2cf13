"""Copies that CuTe DSL compiles: its host code's tensor maps, its swizzled layouts, its fences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

cutlass = pytest.importorskip("cutlass", reason="needs CuTe DSL")
torch = pytest.importorskip("torch")
cute = pytest.importorskip("cutlass.cute")

from cutlass.cute.nvgpu import cpasync  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

import ptxemu.cutedsl  # noqa: E402
from ptxemu.descriptors.swizzle import Swizzle  # noqa: E402
from ptxemu.descriptors.tensor_map import decode, encode_tiled  # noqa: E402

ROWS, COLUMNS = 40, 96
TILE_ROWS = 16


@cute.kernel
def kernel(
    load: cute.CopyAtom,
    source: cute.Tensor,
    store: cute.CopyAtom,
    target: cute.Tensor,
    plain: cute.Tensor,
    layout: cute.ComposedLayout,
) -> None:
    """A tile by TMA into shared memory; back by TMA, and by threads through CuTe's layout."""
    thread, _, _ = cute.arch.thread_idx()
    x, y, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    allocator = cutlass.memory.SmemAllocator()
    barrier = allocator.allocate_array(cutlass.Int64, 1)
    tile = allocator.allocate_tensor(
        plain.element_type, layout.outer, byte_alignment=1024, swizzle=layout.inner
    )
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.barrier()
    shape = cute.shape(layout)
    whole = cute.make_layout(1)
    grouped = cute.group_modes(tile, 0, 2)
    to_shared, from_global = cpasync.tma_partition(
        load, 0, whole, grouped, cute.group_modes(cute.local_tile(source, shape, (x, y)), 0, 2)
    )
    from_shared, to_global = cpasync.tma_partition(
        store, 0, whole, grouped, cute.group_modes(cute.local_tile(target, shape, (x, y)), 0, 2)
    )
    if warp == 0:
        with cute.arch.elect_one():
            size = cute.size_in_bytes(plain.element_type, layout)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
        cute.copy(load, from_global, to_shared, tma_bar_ptr=barrier)
    cute.arch.mbarrier_wait(barrier, 0)
    if warp == 0:
        cute.copy(store, from_shared, to_global)
        cute.arch.cp_async_bulk_commit_group()
    for row in cutlass.range_constexpr(shape[0]):
        column = y * shape[1] + thread
        if thread < shape[1] and x * shape[0] + row < plain.shape[0] and column < plain.shape[1]:
            plain[x * shape[0] + row, column] = tile[row, thread]
    if warp == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def copied(
    arch: str, dtype: Any, columns: int, swizzle: tuple[int, int, int], dump: Path
) -> tuple[Any, ...]:
    """Run the kernel; the arrays and the launch."""
    load_op, store_op = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    bits, base, shift = swizzle

    @cute.jit
    def host(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor) -> None:
        flat = cute.make_layout((TILE_ROWS, columns), stride=(columns, 1))
        layout = cute.make_composed_layout(cute.make_swizzle(bits, base, shift), 0, flat)
        load, source = cpasync.make_tiled_tma_atom(load_op, x, layout, (TILE_ROWS, columns))
        store, target = cpasync.make_tiled_tma_atom(store_op, y, layout, (TILE_ROWS, columns))
        grid = (-(-ROWS // TILE_ROWS), -(-COLUMNS // columns), 1)
        kernel(load, source, store, target, z, layout).launch(grid=grid, block=(64, 1, 1))

    x = torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS).to(dtype)
    y, z = torch.zeros_like(x), torch.zeros_like(x)
    tensors = [from_dlpack(t, assumed_align=16) for t in (x, y, z)]
    with ptxemu.cutedsl.emulate(arch=arch) as run:
        cute.compile(host, *tensors, options=f"--keep-ptx --dump-dir={dump}")(*tensors)
    return x, y, z, run.launches[0].launch


@pytest.mark.parametrize(
    ("arch", "dtype", "columns", "swizzle", "expected"),
    [
        ("sm_90a", "float16", 64, (3, 4, 3), Swizzle.B128),
        ("sm_90a", "int16", 32, (2, 4, 3), Swizzle.B64),
        ("sm_100a", "float16", 16, (1, 4, 3), Swizzle.B32),
        ("sm_100a", "float32", 32, (2, 5, 2), Swizzle.B128_ATOM_32B),
    ],
)
def test_tile_is_where_cutedsl_expects_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arch: str,
    dtype: str,
    columns: int,
    swizzle: tuple[int, int, int],
    expected: Swizzle,
) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", arch)
    x, y, z, launch = copied(arch, getattr(torch, dtype), columns, swizzle, tmp_path)
    assert torch.equal(x, y)
    assert torch.equal(x, z)
    size = x.element_size()
    data_type = {"float16": 6, "int16": 1, "float32": 7}[dtype]
    made = encode_tiled(
        data_type,
        x.data_ptr(),
        (COLUMNS, ROWS),
        (COLUMNS * size,),
        (columns, TILE_ROWS),
        swizzle=int(expected),
        l2_promotion=2,
    )
    found = launch.parameters[:128]
    assert decode(found) == decode(made)
    first, second = (np.frombuffer(raw, np.uint64)[:8].copy() for raw in (found, made))
    first[1] &= ~np.uint64(0xF)  # CuTe DSL writes 2 there, the driver 0
    assert first.tolist() == second.tolist()
