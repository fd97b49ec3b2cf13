"""A call of every public operation on a GPU, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import flashdsa

H, S, S_KV, TOPK, PAGES = 64, 300, 2048, 512, 8


class Tensors:
    """Operands of all operations, on the GPU."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        cuda = torch.device("cuda")
        self.q = torch.randn(S, H, 576, device=cuda).bfloat16()
        self.kv = torch.randn(S_KV, 576, device=cuda).bfloat16()
        self.indices = torch.rand(S, S_KV, device=cuda).topk(TOPK).indices.int()
        self.attention = self.q, self.kv, self.indices
        self.out, self.lse = flashdsa.sparse_mla_fwd(*self.attention)
        self.buffers = torch.empty_like(self.out), torch.empty_like(self.lse)
        self.into = *self.attention, *self.buffers
        self.bound_forward = flashdsa.bind("sparse_mla_fwd_out", self.into)
        dO = torch.randn_like(self.out)
        self.backward = self.q, self.kv, dO, self.lse, self.out, self.indices
        self.packed = flashdsa.quantize_kv(self.kv)
        self.q_index = torch.randn(S, H, 128, device=cuda).bfloat16()
        self.k_index = torch.randn(S_KV, 128, device=cuda).bfloat16()
        self.weights = torch.rand(S, H, device=cuda)
        self.index = self.q_index, self.k_index, self.weights
        q_fp8, folded = flashdsa.quantize_index_q(self.q_index, self.weights)
        k_fp8, self.k_scale = flashdsa.quantize_index_k(self.k_index)
        self.ends = torch.arange(S, dtype=torch.int32, device=cuda) + (S_KV - S)
        self.prefill = q_fp8, k_fp8, folded, None, self.ends
        self.cache = torch.zeros(PAGES, 64, 1, 132, dtype=torch.uint8, device=cuda)
        self.kv_cache = torch.zeros(PAGES, 64, 576, dtype=torch.bfloat16, device=cuda)
        self.packed_cache = torch.zeros(PAGES, 64, 656, dtype=torch.uint8, device=cuda)
        self.slots = torch.arange(PAGES * 64, dtype=torch.int32, device=cuda)
        self.lengths = torch.full((S,), PAGES * 64, dtype=torch.int32, device=cuda)
        table = torch.arange(PAGES, dtype=torch.int32, device=cuda).repeat(S, 1)
        self.ids = torch.empty(S, TOPK, dtype=torch.int32, device=cuda)
        self.paged = q_fp8, self.cache, folded, self.lengths, table
        self.bound_indexer = flashdsa.bind("dsa_topk_indexer", (*self.paged, self.ids))
        flashdsa.write_index_k_cache(self.k_index[: len(self.slots)], self.slots, self.cache)
        self.logits = flashdsa.indexer_logits(*self.paged, PAGES * 64)
        self.scores = flashdsa.indexer_scores(*self.index, self.indices)
        self.target = flashdsa.attention_target(self.q, self.kv, self.lse, self.indices)
        self.grad_kl = torch.rand(S, device=cuda)
        self.offsets = torch.tensor([0, S], dtype=torch.int32, device=cuda)


CALLS: dict[str, Callable[[Tensors], Any]] = {
    "sparse_mla_fwd": lambda x: flashdsa.sparse_mla_fwd(*x.attention),
    "sparse_mla_fwd, packed": lambda x: flashdsa.sparse_mla_fwd(x.q, x.packed, x.indices),
    "sparse_mla_fwd, 16 heads": lambda x: flashdsa.sparse_mla_fwd(x.q[:, :16], x.kv, x.indices),
    "sparse_mla_fwd, decode": lambda x: flashdsa.sparse_mla_fwd(x.q[:3], x.kv, x.indices[:3]),
    "sparse_mla_fwd, out": lambda x: flashdsa.sparse_mla_fwd(
        *x.attention, out=x.buffers[0], lse=x.buffers[1]
    ),
    "bind, sparse_mla_fwd_out": lambda x: x.bound_forward(x.into) or x.buffers,
    "sparse_mla": lambda x: flashdsa.sparse_mla(*x.attention),
    "mla_bwd": lambda x: flashdsa.mla_bwd(*x.backward),
    "mla_bwd, deterministic": lambda x: flashdsa.mla_bwd(*x.backward, deterministic=True),
    "dsa_topk_indexer": lambda x: flashdsa.dsa_topk_indexer(*x.paged, x.ids) or x.ids,
    "dsa_topk_indexer, sorted": lambda x: (
        flashdsa.dsa_topk_indexer(*x.paged, x.ids, sorted=True) or x.ids
    ),
    "bind, dsa_topk_indexer": lambda x: x.bound_indexer((*x.paged, x.ids)) or x.ids,
    "indexer_logits": lambda x: flashdsa.indexer_logits(*x.paged, PAGES * 64),
    "topk_indices": lambda x: flashdsa.topk_indices(x.logits, x.lengths, TOPK),
    "dsa_topk_prefill": lambda x: (
        flashdsa.dsa_topk_prefill(*x.prefill, x.ids, k_scale=x.k_scale) or x.ids
    ),
    "prefill_logits": lambda x: flashdsa.prefill_logits(*x.prefill, k_scale=x.k_scale),
    "causal_ranges": lambda x: flashdsa.causal_ranges(x.offsets, num_queries=S),
    "quantize_index_q": lambda x: flashdsa.quantize_index_q(x.q_index, x.weights),
    "quantize_index_k": lambda x: flashdsa.quantize_index_k(x.k_index),
    "fake_quantize_index": lambda x: flashdsa.fake_quantize_index(x.k_index),
    "quantize_kv": lambda x: flashdsa.quantize_kv(x.kv),
    "write_index_k_cache": lambda x: (
        flashdsa.write_index_k_cache(x.k_index[: len(x.slots)], x.slots, x.cache) or x.cache
    ),
    "read_index_k_cache": lambda x: flashdsa.read_index_k_cache(x.cache, x.slots),
    "write_kv_cache": lambda x: (
        flashdsa.write_kv_cache(x.kv[: len(x.slots)], x.slots, x.kv_cache) or x.kv_cache
    ),
    "write_kv_cache, packed": lambda x: (
        flashdsa.write_kv_cache(x.kv[: len(x.slots)], x.slots, x.packed_cache) or x.packed_cache
    ),
    "read_kv_cache": lambda x: flashdsa.read_kv_cache(x.packed_cache, x.slots),
    "attention_target": lambda x: flashdsa.attention_target(x.q, x.kv, x.lse, x.indices),
    "indexer_scores": lambda x: flashdsa.indexer_scores(*x.index, x.indices),
    "indexer_bwd": lambda x: flashdsa.indexer_bwd(*x.index, x.indices, x.scores),
    "indexer_bwd, deterministic": lambda x: flashdsa.indexer_bwd(
        *x.index, x.indices, x.scores, deterministic=True
    ),
    "indexer_kl": lambda x: flashdsa.indexer_kl(x.scores, x.target),
    "indexer_kl_bwd": lambda x: flashdsa.indexer_kl_bwd(x.scores, x.target, x.grad_kl),
    "indexer_kl_loss": lambda x: flashdsa.indexer_kl_loss(*x.index, x.indices, target=x.target),
    "indexer_kl_loss_dense": lambda x: flashdsa.indexer_kl_loss_dense(
        *x.index, x.q, x.kv, x.lse, x.ends
    ),
    "merge_attention": lambda x: flashdsa.merge_attention([x.out, x.out], [x.lse, x.lse]),
    "lse_for_merge": lambda x: flashdsa.lse_for_merge(x.lse),
    "lse_to_base2": lambda x: flashdsa.lse_to_base2(x.lse),
    "lse_from_base2": lambda x: flashdsa.lse_from_base2(x.lse),
}
