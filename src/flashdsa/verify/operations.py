"""Names of checked operations, in their order."""

from __future__ import annotations

from flashdsa import ops

COMPOSED = (
    "merge_attention",
    "lse_for_merge",
    "lse_to_base2",
    "lse_from_base2",
    "quantize_kv",
    "write_kv_cache",
    "read_kv_cache",
    "causal_ranges",
    "expand_blocks",
    "fake_quantize_index",
    "indexer_kl_loss_dense",
    "rotate_tail",
)
"""Operations without a backend: products of torch where their tensors are."""
OPERATIONS = (*ops.OPERATIONS, "sparse_mla", "indexer_kl_loss", *COMPOSED)
