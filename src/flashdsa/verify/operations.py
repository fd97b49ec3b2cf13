"""Names of checked operations, in their order. No import of torch here, so --help is fast."""

from __future__ import annotations

COMPOSED = (
    "merge_attention",
    "lse_for_merge",
    "lse_to_base2",
    "lse_from_base2",
    "quantize_kv",
    "write_kv_cache",
    "read_kv_cache",
    "causal_ranges",
    "fake_quantize_index",
    "indexer_kl_loss_dense",
)
"""Operations without a backend: products of torch where their tensors are."""
OPERATIONS = (
    "sparse_mla_fwd",
    "sparse_mla_fwd_out",
    "mla_bwd",
    "sparse_mla",
    "indexer_logits",
    "dsa_topk_indexer",
    "topk_indices",
    "prefill_logits",
    "dsa_topk_prefill",
    "quantize_index_k",
    "quantize_index_q",
    "write_index_k_cache",
    "read_index_k_cache",
    "attention_target",
    "indexer_scores",
    "indexer_bwd",
    "indexer_kl",
    "indexer_kl_bwd",
    "indexer_kl_loss",
    *COMPOSED,
)
