"""quack's kernels against torch: softmax, cross_entropy, topk, gemm.

quack_kernel.py KERNEL [M N K]
"""

import sys

import torch
from torch import Tensor

ROWS, COLUMNS, DEPTH = 16, 512, 128
generator = torch.Generator().manual_seed(0)
x = torch.randn(ROWS, COLUMNS, generator=generator).bfloat16().cuda()


def softmax() -> tuple[Tensor, Tensor]:
    """Rows of probabilities."""
    from quack.softmax import softmax as kernel

    return kernel(x), torch.softmax(x.float(), -1)


def cross_entropy() -> tuple[Tensor, Tensor]:
    """Losses."""
    from quack.cross_entropy import cross_entropy as kernel

    target = torch.randint(0, COLUMNS, (ROWS,), generator=generator).cuda()
    expected = torch.nn.functional.cross_entropy(x.float(), target, reduction="none")
    return kernel(x, target, reduction="none"), expected


def topk() -> tuple[Tensor, Tensor]:
    """The 32 largest values."""
    from quack.topk import topk as kernel

    return kernel(x, 32)[0], x.float().topk(32).values


def gemm() -> tuple[Tensor, Tensor]:
    """A matrix product through TMA and the architecture's tensor cores."""
    from quack.gemm_interface import gemm as kernel

    m, n, k = map(int, sys.argv[2:]) if len(sys.argv) > 2 else (128, 256, DEPTH)
    a = torch.randn(m, k, generator=generator).bfloat16().cuda()
    b = torch.randn(n, k, generator=generator).bfloat16().cuda()
    return kernel(a, b.T, tuned=False), a.float() @ b.float().T


got, expected = {f.__name__: f for f in (softmax, cross_entropy, topk, gemm)}[sys.argv[1]]()
error = ((got.double() - expected.double()).norm() / expected.double().norm()).item()
assert error < 4e-3, f"{sys.argv[1]}: relative error {error:.2e}"
