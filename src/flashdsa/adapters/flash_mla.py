"""FlashMLA's sparse prefill and decode: `from flashdsa.adapters import flash_mla`.

The names, order and defaults are those of `flash_mla` (and of SGLang's `sgl-flash-mla` 1.0.0, which
has more parameters). Unlike there any number of heads and any `topk` is served, and a slot past
`topk_length` contributes nothing even if the row that it names holds NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashdsa.adapters.arguments import require_default
from flashdsa.errors import ArgumentValueError, UnsupportedError
from flashdsa.ops.attention import sparse_mla_fwd
from flashdsa.ops.kv_cache import read_kv_cache
from flashdsa.ops.merge import lse_to_base2
from flashdsa.problem import D_V, KV_ROW_BYTES


@dataclass
class FlashMLASchedMeta:
    """Stands for FlashMLA's scheduling data; flashdsa needs none."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Return `tile_scheduler_metadata` for `flash_mla_with_kvcache`; arguments are not used."""
    return FlashMLASchedMeta(), None


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = D_V,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sparse prefill, by `flashdsa.sparse_mla_fwd`.

    Args:
        q: (S, H, d_qk). kv: (S_kv, 1, d_qk). indices: (S, 1, topk) int32.
        sm_scale, d_v, attn_sink, topk_length: as for `flashdsa.sparse_mla_fwd`.
        use_legacy: not used: chooses among FlashMLA's kernels.
        return_log2_lse: True: lse in base 2; False: None in its place.

    Returns:
        out (S, H, d_v), max_logits and lse (S, H) fp32, -inf and +inf for a query without a valid
        slot; max_logits are natural, whatever the base of lse.
    """
    out, lse, max_logits = sparse_mla_fwd(
        q,
        kv,
        indices,
        d_v=d_v,
        sm_scale=sm_scale,
        topk_length=topk_length,
        attn_sink=attn_sink,
        return_max_logits=True,
    )
    if return_log2_lse is False:
        return out, max_logits, None
    return out, max_logits, lse_to_base2(lse) if return_log2_lse else lse


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sparse decode from a paged cache of bf16 rows, or of DeepSeek-V3.2's fp8 rows.

    If the backend does not read packed rows, torch first makes the selected ones bf16, which is
    slow.

    Args:
        q: (b, s_q, H, 576) bf16.
        k_cache: (pages, page_size, 1, 576) bf16, or (pages, page_size, 1, 656) bytes. Gaps
            of whole rows between pages are allowed.
        block_table, cache_seqlens, tile_scheduler_metadata, num_splits, use_legacy: not used.
        enable_batch_invariant: `batch_invariant` of `flashdsa.sparse_mla_fwd`; otherwise bits of
            results depend on the batch.
        head_dim_v: 512.
        softmax_scale: ``576 ** -0.5`` by default.
        causal: False.
        is_fp8_kvcache: None takes it from the dtype of `k_cache`.
        indices: (b, s_q, topk) int32, ``page * page_size + offset``; -1, and what lies outside the
            cache, is invalid.
        attn_sink: (H,) fp32.
        topk_length: (b,) int32, slots in use of each sequence's queries.
        extra_k_cache, extra_indices_in_kvcache, extra_topk_length, kv_format, descale_q, descale_k:
            None; they belong to other formats.

    Returns:
        out (b, s_q, H, 512) and lse (b, H, s_q) fp32, the natural logarithm, +inf for a query
        without a valid slot.
    """
    name = "flash_mla_with_kvcache"
    other = "flashdsa serves DeepSeek-V3.2's rows: 576 bf16 values, or 656 bytes"
    require_default(name, "extra_k_cache", extra_k_cache, instead=other)
    require_default(name, "extra_indices_in_kvcache", extra_indices_in_kvcache, instead=other)
    require_default(name, "extra_topk_length", extra_topk_length, instead=other)
    require_default(name, "descale_q", descale_q, instead=other)
    require_default(name, "descale_k", descale_k, instead=other)
    require_default(name, "kv_format", kv_format, instead=other)
    require_default(
        name, "causal", causal, default=False, instead="indices say what each query sees"
    )
    if indices is None:
        raise UnsupportedError(f"{name}: indices=None asks for dense attention; flashdsa is sparse")
    if q.dim() != 4 or k_cache.dim() != 4 or indices.dim() != 3:
        raise ArgumentValueError(
            f"{name}: expected q [b, s_q, H, d], k_cache [pages, page_size, 1, row], "
            f"indices [b, s_q, topk]; got {list(q.shape)}, {list(k_cache.shape)}, "
            f"{list(indices.shape)}"
        )
    batch, num_queries, num_heads, _ = q.shape
    ids = indices.flatten(0, 1)
    lengths = None if topk_length is None else topk_length.repeat_interleave(num_queries)
    is_packed = k_cache.element_size() == 1
    if is_fp8_kvcache is not None and is_fp8_kvcache != is_packed:
        raise ArgumentValueError(
            f"is_fp8_kvcache: {is_fp8_kvcache}, but k_cache has dtype {k_cache.dtype}"
        )
    rows = _packed_pages(k_cache) if is_packed else k_cache
    queries = q.flatten(0, 1).contiguous()

    def attend(kv: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        return sparse_mla_fwd(
            queries,
            kv,
            slots,
            d_v=head_dim_v,
            sm_scale=softmax_scale,
            topk_length=lengths,
            attn_sink=attn_sink,
            batch_invariant=enable_batch_invariant,
        )

    try:
        out, lse = attend(*_without_gaps(rows, ids))
    except UnsupportedError:
        if not is_packed:
            raise
        out, lse = attend(*_selected_rows(rows, ids, lengths))
    by_sequence = lse.view(batch, num_queries, num_heads).transpose(1, 2).contiguous()
    return out.view(batch, num_queries, num_heads, head_dim_v), by_sequence


def _packed_pages(k_cache: Tensor) -> Tensor:
    """The cache's bytes (pages, page_size, 1, 656)."""
    if k_cache.shape[2:] != (1, KV_ROW_BYTES):
        raise UnsupportedError(
            f"k_cache: flashdsa reads packed rows of {KV_ROW_BYTES} bytes (DeepSeek-V3.2), shape "
            f"[pages, page_size, 1, {KV_ROW_BYTES}]; got {list(k_cache.shape)}"
        )
    return k_cache.view(torch.uint8)


def _without_gaps(cache: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The cache and the ids; of a cache with gaps between its pages every row from the first to the
    last, gaps included, and the ids as numbers of those."""
    num_pages, page_size = cache.shape[:2]
    page, row = cache.stride(0), cache.stride(1)
    if num_pages <= 1 or page == page_size * row or not row or page % row:
        return cache, ids
    rows_a_page = page // row
    num_rows = (num_pages - 1) * rows_a_page + page_size
    rows = cache.as_strided((num_rows, cache.shape[3]), (row, cache.stride(3)))
    inside = (ids >= 0) & (ids < num_pages * page_size)
    return rows, torch.where(inside, ids + ids // page_size * (rows_a_page - page_size), -1)


def _selected_rows(rows: Tensor, ids: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the packed rows that valid slots name, in bf16, and the slots as ids of these rows."""
    num_slots = rows.shape[0] * rows.shape[1]
    valid = (ids >= 0) & (ids < num_slots)
    if lengths is not None:
        valid &= torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    used, places = torch.unique(ids[valid], return_inverse=True)
    renamed = torch.full_like(ids, -1).masked_scatter_(valid, places.to(ids.dtype))
    return read_kv_cache(rows, used), renamed
