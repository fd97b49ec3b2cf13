"""The tensors of each operation as one NamedTuple, which travels from the custom op to the backend.

A backend's function takes the operation's tuple and its parameters by keyword:
`backward(operands, *, sm_scale, deterministic, dkv_dtype)`. Shapes and dtypes are checked before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class SparseMlaOperands(NamedTuple):
    """Operands of `sparse_mla_fwd`: q (S, H, d_qk), kv (S_kv, d_qk) or packed rows (S_kv, 656) of
    bytes, indices (S, topk) int32, topk_length (S,) int32, attn_sink (H,)."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    topk_length: Tensor | None = None
    attn_sink: Tensor | None = None


class SparseMlaOutOperands(NamedTuple):
    """Operands of `sparse_mla_fwd_out`: the forward's, and its outputs out (S, H, d_v), lse (S, H),
    max_logits (S, H)."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    out: Tensor
    lse: Tensor
    max_logits: Tensor | None = None
    topk_length: Tensor | None = None
    attn_sink: Tensor | None = None

    @property
    def inputs(self) -> SparseMlaOperands:
        """The operands without the outputs."""
        return SparseMlaOperands(self.q, self.kv, self.indices, self.topk_length, self.attn_sink)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """out, lse and, if asked for, max_logits."""
        return tuple(x for x in (self.out, self.lse, self.max_logits) if x is not None)


class MlaBwdOperands(NamedTuple):
    """Operands of `mla_bwd`: the forward's, and dO, O (S, H, d_v), lse (S, H)."""

    q: Tensor
    kv: Tensor
    dO: Tensor
    lse: Tensor
    O: Tensor
    indices: Tensor
    topk_length: Tensor | None = None
    attn_sink: Tensor | None = None


class IndexerOperands(NamedTuple):
    """Operands of `indexer_logits`: q_index_fp8 (B, H, 128) e4m3,
    k_index_cache_fp8 (num_pages, 64, 1, 132) bytes, weights (B, H) fp32,
    seq_lens (B,) int32, block_table (B, max_pages) int32."""

    q_index_fp8: Tensor
    k_index_cache_fp8: Tensor
    weights: Tensor
    seq_lens: Tensor
    block_table: Tensor


class TopkIndexerOperands(NamedTuple):
    """Operands of `dsa_topk_indexer`: the indexer's, and topk_indices (B, topk) int32, written."""

    q_index_fp8: Tensor
    k_index_cache_fp8: Tensor
    weights: Tensor
    seq_lens: Tensor
    block_table: Tensor
    topk_indices: Tensor

    @property
    def inputs(self) -> IndexerOperands:
        """The operands without the output."""
        return IndexerOperands(*self[:5])


class TopkOperands(NamedTuple):
    """Operands of `topk_indices`: scores (B, max_len) fp32, lengths (B,) int32."""

    scores: Tensor
    lengths: Tensor


class PrefillOperands(NamedTuple):
    """Operands of `prefill_logits`: q_index (S, H, 128) and k_index (S_kv, 128) of one dtype,
    weights (S, H) fp32, ends (S,) int32, starts (S,) int32, k_scale (S_kv,) fp32 of e4m3 keys."""

    q_index: Tensor
    k_index: Tensor
    weights: Tensor
    ends: Tensor
    starts: Tensor | None = None
    k_scale: Tensor | None = None


class TopkPrefillOperands(NamedTuple):
    """Operands of `dsa_topk_prefill`: those of `prefill_logits`, and topk_indices (S, topk) int32,
    written."""

    q_index: Tensor
    k_index: Tensor
    weights: Tensor
    ends: Tensor
    topk_indices: Tensor
    starts: Tensor | None = None
    k_scale: Tensor | None = None

    @property
    def inputs(self) -> PrefillOperands:
        """The operands without the output."""
        return PrefillOperands(*self[:4], self.starts, self.k_scale)


class IndexKOperands(NamedTuple):
    """Operand of `quantize_index_k`: k (T, 128) bf16 or fp32."""

    k: Tensor


class IndexQOperands(NamedTuple):
    """Operands of `quantize_index_q`: q (B, H, 128) bf16 or fp32, weights (B, H) fp32."""

    q: Tensor
    weights: Tensor


class CacheWriteOperands(NamedTuple):
    """Operands of `write_index_k_cache`: k (T, 128), slots (T,) int32 or int64, cache, written."""

    k: Tensor
    slots: Tensor
    cache: Tensor


class CacheReadOperands(NamedTuple):
    """Operands of `read_index_k_cache`: cache (num_pages, 64, 1, 132) bytes, slots (T,)."""

    cache: Tensor
    slots: Tensor


class AttentionTargetOperands(NamedTuple):
    """Operands of `attention_target`: those of `sparse_mla_fwd`, and its lse (S, H)."""

    q: Tensor
    kv: Tensor
    lse: Tensor
    indices: Tensor
    topk_length: Tensor | None = None
    attn_sink: Tensor | None = None


class IndexerScoresOperands(NamedTuple):
    """Operands of `indexer_scores`: q_index (S, H, 128), k_index (S_kv, 128), weights (S, H),
    indices (S, topk) int32, topk_length (S,) int32."""

    q_index: Tensor
    k_index: Tensor
    weights: Tensor
    indices: Tensor
    topk_length: Tensor | None = None


class IndexerBwdOperands(NamedTuple):
    """Operands of `indexer_bwd`: those of `indexer_scores`, and the gradient of the scores
    (S, topk)."""

    q_index: Tensor
    k_index: Tensor
    weights: Tensor
    indices: Tensor
    grad_scores: Tensor
    topk_length: Tensor | None = None


class IndexerKlOperands(NamedTuple):
    """Operands of `indexer_kl`: scores and target (S, topk)."""

    scores: Tensor
    target: Tensor


class IndexerKlBwdOperands(NamedTuple):
    """Operands of `indexer_kl_bwd`: scores and target (S, topk), and the gradient of each row's KL
    (S,)."""

    scores: Tensor
    target: Tensor
    grad_kl: Tensor
