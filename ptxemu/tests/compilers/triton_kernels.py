"""Kernels in Triton that lean on what its compiler makes of them: record.py compiles them.

Triton takes the source of a function as it stands here, without this module's annotations.
"""

import triton
import triton.language as tl


@triton.jit
def softmax(x, out, n, N: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, N)
    values = tl.load(x + row * n + column, mask=column < n, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * n + column, powers / tl.sum(powers, 0), mask=column < n)


@triton.jit
def product(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Three products on one accumulator and one scratch buffer: the three parts of tf32x3."""
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + i[:, None] * K + k[None, :])
    right = tl.load(b + j[None, :] * K + k[:, None])
    result = tl.dot(left, right, input_precision="tf32x3")
    tl.store(out + i[:, None] * N + j[None, :], result)


@triton.jit
def descriptors(a, b, out, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """A matrix product through tensor maps that the kernel itself makes."""
    left = tl.make_tensor_descriptor(a, [m, k], [k, 1], [M, K])
    right = tl.make_tensor_descriptor(b, [n, k], [k, 1], [N, K])
    target = tl.make_tensor_descriptor(out, [m, n], [n, 1], [M, N])
    row, column = tl.program_id(0) * M, tl.program_id(1) * N
    total = tl.zeros((M, N), tl.float32)
    for step in range(0, k, K):
        total = tl.dot(left.load([row, step]), right.load([column, step]).T, total)
    target.store([row, column], total.to(tl.bfloat16))


@triton.jit
def conversions(x, out, N: tl.constexpr):
    column = tl.arange(0, N)
    values = tl.load(x + column)
    small = values.to(tl.float8e4nv)
    tl.store(out + column, small.to(tl.bfloat16))
    tl.store(out + N + column, values.to(tl.float8e5).to(tl.bfloat16))
