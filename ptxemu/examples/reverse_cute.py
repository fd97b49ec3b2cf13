"""Turns blocks of 64 numbers around, as written for a GPU."""

import torch
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator


@cute.kernel
def reverse_kernel(source: cute.Tensor, target: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    staged = SmemAllocator().allocate_tensor(Int32, cute.make_layout(64))
    staged[thread] = source[block * 64 + thread]
    cute.arch.sync_threads()
    target[block * 64 + thread] = staged[63 - thread]


@cute.jit
def reverse(source: cute.Tensor, target: cute.Tensor) -> None:
    grid = (cute.size(source) // 64, 1, 1)
    reverse_kernel(source, target).launch(grid=grid, block=(64, 1, 1))


if __name__ == "__main__":
    x = torch.arange(128, dtype=torch.int32, device="cuda")
    y = torch.zeros_like(x)
    reverse(from_dlpack(x), from_dlpack(y))
    assert torch.equal(y, x.view(2, 64).flip(1).view(-1))
