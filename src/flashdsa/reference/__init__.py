"""The oracle: every public operation in float64, plain enough to be read as its definition.

Nothing here is blocked, fused or shared with a backend; speed is no goal.  Inputs may have any
floating dtype and live on any device; outputs are float64 (or the exact integers and bytes).
"""

from flashdsa.reference.dense_kl import indexer_kl_loss_dense
from flashdsa.reference.entries import (
    CompressGradients,
    compress_kv,
    compress_kv_bwd,
    rotate_tail,
)
from flashdsa.reference.indexer import (
    dsa_topk_indexer,
    indexer_logits,
    indexer_product_magnitude,
    indexer_score_magnitude,
    topk_indices,
)
from flashdsa.reference.indexer_training import (
    attention_target,
    attention_target_slope,
    indexer_bwd,
    indexer_kl,
    indexer_kl_bwd,
    indexer_scores,
)
from flashdsa.reference.kv_cache import read_kv_cache, write_kv_cache
from flashdsa.reference.merge import merge_attention
from flashdsa.reference.packed_kv import fields, quantize_kv, unpack_kv
from flashdsa.reference.prefill import (
    causal_ranges,
    dsa_topk_prefill,
    expand_blocks,
    prefill_logits,
    prefill_product_magnitude,
    prefill_score_magnitude,
)
from flashdsa.reference.quant import (
    decode_e4m3,
    encode_e4m3,
    fake_quantize_index,
    quantize_index_k,
    quantize_index_q,
    read_index_k_cache,
    write_index_k_cache,
)
from flashdsa.reference.sparse_mla import (
    join_sources,
    mla_bwd,
    mla_bwd_dkv_along,
    mla_bwd_dkv_spread,
    mla_bwd_dq_rounding,
    mla_bwd_magnitude,
    mla_bwd_sink_magnitude,
    num_rows,
    sparse_mla_fwd,
    sparse_mla_fwd_magnitude,
    sparse_mla_max_logits,
    valid_slots,
)

__all__ = [
    "CompressGradients",
    "attention_target",
    "attention_target_slope",
    "causal_ranges",
    "compress_kv",
    "compress_kv_bwd",
    "decode_e4m3",
    "dsa_topk_indexer",
    "dsa_topk_prefill",
    "encode_e4m3",
    "expand_blocks",
    "fake_quantize_index",
    "fields",
    "indexer_bwd",
    "indexer_kl",
    "indexer_kl_bwd",
    "indexer_kl_loss_dense",
    "indexer_logits",
    "indexer_product_magnitude",
    "indexer_score_magnitude",
    "indexer_scores",
    "join_sources",
    "merge_attention",
    "mla_bwd",
    "mla_bwd_dkv_along",
    "mla_bwd_dkv_spread",
    "mla_bwd_dq_rounding",
    "mla_bwd_magnitude",
    "mla_bwd_sink_magnitude",
    "num_rows",
    "prefill_logits",
    "prefill_product_magnitude",
    "prefill_score_magnitude",
    "quantize_index_k",
    "quantize_index_q",
    "quantize_kv",
    "read_index_k_cache",
    "read_kv_cache",
    "rotate_tail",
    "sparse_mla_fwd",
    "sparse_mla_fwd_magnitude",
    "sparse_mla_max_logits",
    "topk_indices",
    "unpack_kv",
    "valid_slots",
    "write_index_k_cache",
    "write_kv_cache",
]
