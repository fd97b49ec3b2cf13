"""cuDNN Frontend's compression attention of Native Sparse Attention (SM100) against torch."""

import math

import torch
from cudnn import NSA

HEADS, GROUPS, LENGTH, WIDTH = 2, 1, 128, 128
generator = torch.Generator().manual_seed(0)


def random(heads: int) -> torch.Tensor:
    """Normal numbers, (batch, heads, length, width); heads lie inside of length in memory."""
    numbers = torch.randn(1, LENGTH, heads, WIDTH, generator=generator)
    return numbers.bfloat16().transpose(1, 2).cuda()


q, k, v = random(HEADS), random(GROUPS), random(GROUPS)
scale = 1 / math.sqrt(WIDTH)
got = NSA.compression_attention_wrapper(q, k, v, scale_softmax=scale)["o_tensor"]
scores = q.float() @ k.float().transpose(2, 3) * scale
later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
expected = torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ v.float()
error = ((got.float() - expected).norm() / expected.norm()).item()
assert error < 1e-2, f"O: relative error {error:.2e}"
