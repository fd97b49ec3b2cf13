"""cuDNN Frontend's sparse MLA forward (SM100) against the reference."""

import sys

import torch
from cudnn.deepseek_sparse_attention import sparse_attention_forward_wrapper

from flashdsa import reference

NUM_QUERIES, S_KV, TOPK = 2, 192, 128
num_heads, d_qk = int(sys.argv[1]), int(sys.argv[2])
generator = torch.Generator().manual_seed(0)
q = torch.randn(NUM_QUERIES, num_heads, d_qk, generator=generator).bfloat16().cuda()
kv = torch.randn(S_KV, d_qk, generator=generator).bfloat16().cuda()
indices = torch.stack(
    [torch.randperm(S_KV, generator=generator)[:TOPK] for _ in range(NUM_QUERIES)]
).int()
expected, _ = reference.sparse_mla_fwd(q, kv, indices)
got = sparse_attention_forward_wrapper(q, kv, indices.cuda(), softmax_scale=d_qk**-0.5)
error = (got["out"].cpu().double() - expected).norm() / expected.norm()
assert error < 4e-3, f"O: relative error {error:.2e}"
