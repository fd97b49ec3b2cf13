"""cuDNN Frontend's sparse MLA backward (SM90 or SM100 by CUTE_DSL_ARCH) against the reference.

dsa_backward.py HEADS [QUERIES KEYS TOPK]
"""

import sys

import torch
from cudnn.deepseek_sparse_attention import sparse_attention_backward_wrapper

from flashdsa import reference

num_heads, *sizes = map(int, sys.argv[1:])
NUM_QUERIES, S_KV, TOPK = sizes or (2, 128, 64)
generator = torch.Generator().manual_seed(0)
q = torch.randn(NUM_QUERIES, num_heads, 576, generator=generator).bfloat16().cuda()
kv = torch.randn(S_KV, 576, generator=generator).bfloat16().cuda()
d_out = torch.randn(NUM_QUERIES, num_heads, 512, generator=generator).bfloat16().cuda()
indices = torch.stack(
    [torch.randperm(S_KV, generator=generator)[:TOPK] for _ in range(NUM_QUERIES)]
).int()
out, lse = reference.sparse_mla_fwd(q, kv, indices)
out, lse = out.bfloat16().cuda(), lse.float().cuda()
expected = reference.mla_bwd(q, kv, d_out, lse, out, indices)[:2]
no_sink = torch.full((num_heads,), float("-inf"), device="cuda")
got = sparse_attention_backward_wrapper(
    q, kv, out, d_out, lse, no_sink, indices.cuda(), softmax_scale=576**-0.5
)
for name, reference_gradient in zip(("dq", "dkv"), expected, strict=True):
    error = (got[name].cpu().double() - reference_gradient).norm() / reference_gradient.norm()
    assert error < 4e-3, f"{name}: relative error {error:.2e}"
