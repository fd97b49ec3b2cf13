"""FlashAttention-4's kernels against torch: forward, backward, split keys, pages."""

import math
import sys

import torch
from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
from torch import Tensor

generator = torch.Generator().manual_seed(0)


def random(*shape: int) -> Tensor:
    """A bf16 tensor of normal numbers on the device."""
    return torch.randn(*shape, generator=generator).bfloat16().cuda()


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last query sees all keys, those before it fewer: (batch, sequence, heads, dim), fp32."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.float().repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k) / math.sqrt(q.shape[-1])
    queries, keys = scores.shape[-2:]
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    scores = scores.masked_fill(hidden, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def check(name: str, got: Tensor, expected: Tensor) -> None:
    """Within what bf16 operands and results allow."""
    got, expected = got.detach().double(), expected.detach().double()
    error = ((got - expected).norm() / expected.norm()).item()
    assert error < 5e-3, f"{name}: relative error {error:.2e}"


def forward() -> None:
    """Several tiles of queries, the last one not full, and grouped heads in one tile."""
    q, k, v = random(1, 130, 4, 128), random(1, 200, 2, 128), random(1, 200, 2, 128)
    check("O", flash_attn_func(q, k, v, causal=True)[0], attention(q, k, v))


def backward() -> None:
    """Four kernels: the forward one, the sums of dO and O, the products, dQ in bf16."""
    operands = [random(1, 160, 1, int(sys.argv[2])).requires_grad_() for _ in range(3)]
    out = flash_attn_func(*operands, causal=True)[0]
    gradient = random(*out.shape)
    expected = torch.autograd.grad(attention(*operands), operands, gradient.float())
    got = torch.autograd.grad(out, operands, gradient)
    for name, ours, theirs in zip(("dQ", "dK", "dV"), got, expected, strict=True):
        check(name, ours, theirs)


def split() -> None:
    """Partial results of key ranges, and the kernel that combines them."""
    q, k, v = random(1, 16, 2, 64), random(1, 384, 1, 64), random(1, 384, 1, 64)
    check("O", flash_attn_func(q, k, v, causal=True, num_splits=3)[0], attention(q, k, v))


def paged() -> None:
    """Keys and values in pages, too small for TMA: each row by cp.async."""
    q, pages = random(1, 8, 2, 64), torch.randperm(10, generator=generator)
    k, v = random(10, 16, 1, 64), random(10, 16, 1, 64)
    used, table = torch.tensor([150]).int().cuda(), pages[None].int().cuda()
    options = {"page_table": table, "seqused_k": used, "max_seqlen_k": 160, "causal": True}
    whole = (x[pages].reshape(1, 160, 1, 64)[:, :150] for x in (k, v))
    check("O", flash_attn_varlen_func(q, k, v, **options)[0], attention(q, *whole))


{f.__name__: f for f in (forward, backward, split, paged)}[sys.argv[1]]()
