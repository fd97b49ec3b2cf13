"""cuDNN Frontend's radix top-k against a sort."""

import torch
from cudnn.deepseek_sparse_attention import indexer_top_k_wrapper

BATCH, LENGTH, TOPK = 2, 4096, 2048
scores = torch.randn(BATCH, LENGTH, generator=torch.Generator().manual_seed(0)).cuda()
lengths = torch.full((BATCH,), LENGTH, dtype=torch.int32, device="cuda")
indices = indexer_top_k_wrapper(scores, lengths, TOPK, return_val=False)["indices"]
got = scores.gather(1, indices.long()).sort(1, descending=True).values
assert torch.equal(got, scores.topk(TOPK, dim=1).values)
