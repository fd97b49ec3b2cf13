"""The public operations of flashdsa: signatures, meanings, and the way into the custom ops."""

from flashdsa.api.attention import (
    lse_for_merge,
    lse_from_base2,
    lse_to_base2,
    mla_bwd,
    sparse_mla,
    sparse_mla_fwd,
)
from flashdsa.api.bound import bind, warm_up
from flashdsa.api.indexer import dsa_topk_indexer, indexer_logits, topk_indices
from flashdsa.api.indexer_training import (
    attention_target,
    indexer_bwd,
    indexer_kl,
    indexer_kl_bwd,
    indexer_kl_loss,
    indexer_scores,
)
from flashdsa.api.indexer_warm_up import indexer_kl_loss_dense
from flashdsa.api.kv_cache import quantize_kv, read_kv_cache, write_kv_cache
from flashdsa.api.merge import merge_attention
from flashdsa.api.prefill import causal_ranges, dsa_topk_prefill, prefill_logits
from flashdsa.api.quantization import (
    fake_quantize_index,
    quantize_index_k,
    quantize_index_q,
    read_index_k_cache,
    write_index_k_cache,
)

__all__ = [
    "attention_target",
    "bind",
    "causal_ranges",
    "dsa_topk_indexer",
    "dsa_topk_prefill",
    "fake_quantize_index",
    "indexer_bwd",
    "indexer_kl",
    "indexer_kl_bwd",
    "indexer_kl_loss",
    "indexer_kl_loss_dense",
    "indexer_logits",
    "indexer_scores",
    "lse_for_merge",
    "lse_from_base2",
    "lse_to_base2",
    "merge_attention",
    "mla_bwd",
    "prefill_logits",
    "quantize_index_k",
    "quantize_index_q",
    "quantize_kv",
    "read_index_k_cache",
    "read_kv_cache",
    "sparse_mla",
    "sparse_mla_fwd",
    "topk_indices",
    "warm_up",
    "write_index_k_cache",
    "write_kv_cache",
]
