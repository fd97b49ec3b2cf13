"""Two Triton kernels on torch tensors: a masked sum, and a product of matrices in float16."""

import torch
import triton
import triton.language as tl


@triton.jit
def add(x, y, out, size, block: tl.constexpr):
    """out = x + y, `block` elements a program."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < size
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def product(a, b, out, n, k, tile: tl.constexpr, step: tl.constexpr):
    """out (m, n) = a (m, k) @ b (k, n), a tile of out a program."""
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    columns = tl.program_id(1) * tile + tl.arange(0, tile)
    depth = tl.arange(0, step)
    total = tl.zeros((tile, tile), dtype=tl.float32)
    for first in range(0, k, step):
        left = tl.load(a + rows[:, None] * k + (depth + first)[None, :])
        right = tl.load(b + (depth + first)[:, None] * n + columns[None, :])
        total = tl.dot(left, right, total)
    tl.store(out + rows[:, None] * n + columns[None, :], total)


torch.manual_seed(0)
x, y = torch.randn(2, 1000, device="cuda")
out = torch.empty_like(x)
add[(4,)](x, y, out, 1000, block=256)
assert torch.equal(out, x + y)
a, b = torch.randn(2, 128, 128, device="cuda", dtype=torch.float16)
out = torch.empty(128, 128, device="cuda")
product[(2, 2)](a, b, out, 128, 128, tile=64, step=32)
torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-4, atol=1e-4)
