"""FlashMLA's sparse prefill and decode: `from flashdsa.adapters import flash_mla`.

The names, order and defaults are those of `flash_mla` (and of SGLang's `sgl-flash-mla` 1.0.0, which
has more parameters). Unlike there any number of heads and any `topk` is served, and a slot past
`topk_length` contributes nothing even if the row that it names holds NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.adapters.arguments import require_default, with_a_column
from flashdsa.errors import ArgumentValueError, UnsupportedError
from flashdsa.ops.attention import sparse_mla_fwd
from flashdsa.ops.kv_cache import read_kv_cache
from flashdsa.ops.merge import lse_to_base2
from flashdsa.problem import D_V
from flashdsa.row_formats import INTERLEAVED, ROW_FORMATS, find_row_format

SPLIT = ROW_FORMATS["v41"], ROW_FORMATS["v41_fp4"]
"""Formats for which the legacy kernels take rows of 528 and 288 bytes."""


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
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Sparse prefill, by `flashdsa.sparse_mla_fwd`.

    Args:
        q: (S, H, d_qk). kv: (S_kv, 1, d_qk). indices: (S, 1, topk) int32.
        sm_scale, d_v, attn_sink, topk_length: as for `flashdsa.sparse_mla_fwd`.
        use_legacy: not used: it chooses among FlashMLA's kernels.
        return_log2_lse: True: both statistics in base 2; False: None in the place of both.
        out: (S, H, d_v) buffer for the result, as in vLLM's FlashMLA.

    Returns:
        out (S, H, d_v), max_logits and lse (S, H) fp32, -inf and +inf for a query without a valid
        slot.
    """
    result, lse, max_logits = sparse_mla_fwd(
        q,
        kv,
        with_a_column(indices),
        d_v=d_v,
        sm_scale=sm_scale,
        topk_length=topk_length,
        attn_sink=attn_sink,
        return_max_logits=True,
        out=out,
    )
    if return_log2_lse is False:
        return result, None, None
    if return_log2_lse:
        return result, lse_to_base2(max_logits), lse_to_base2(lse)
    return result, max_logits, lse


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
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sparse decode from one or two paged caches of bf16 rows, or of packed rows.

    If the backend does not read these packed rows, torch first makes the selected ones bf16, which
    is slow.

    Args:
        q: (b, s_q, H, d) bf16, d 576 or 512.
        k_cache: (pages, page_size, 1, d) bf16, or (pages, page_size, 1, bytes) of a row of
            `flashdsa.quantize_kv`'s formats. Gaps between pages are allowed, of bf16 whole rows.
        block_table, cache_seqlens, tile_scheduler_metadata, num_splits: not used.
        enable_batch_invariant: `batch_invariant` of `flashdsa.sparse_mla_fwd`; otherwise bits of
            results depend on the batch.
        head_dim_v: 512.
        softmax_scale: ``d ** -0.5`` by default.
        causal: False.
        is_fp8_kvcache: None takes it from the dtype of `k_cache`.
        indices: (b, s_q, topk) int32, ``page * page_size + offset``; -1, and what lies outside the
            cache, is invalid.
        attn_sink: (H,) fp32.
        topk_length: (b,) int32, slots in use of each sequence's queries.
        extra_k_cache, extra_indices_in_kvcache, extra_topk_length: a second cache in the same
            softmax, its (b, s_q, n) ids and their lengths; a row that both name counts twice.
        use_legacy, kv_format: what packed rows of 528 and 288 bytes are. By default DeepSeek-V4.1's
            with each row's scales behind its codes, as FlashMLA has them since its release of
            2026-09-30. The legacy kernels have them behind all codes of a page; kv_format names one
            of their formats, with and without `use_legacy`: "V32_NO_ROPE" has 528 bytes, too.
        descale_q, descale_k: None; they belong to other formats.
        out: (b, s_q, H, 512) contiguous buffer for the result, as in vLLM's FlashMLA.

    Returns:
        out (b, s_q, H, 512) and lse (b, H, s_q) fp32, the natural logarithm, +inf for a query
        without a valid slot.
    """
    name = "flash_mla_with_kvcache"
    other = "scales are in the packed rows"
    require_default(name, "descale_q", descale_q, instead=other)
    require_default(name, "descale_k", descale_k, instead=other)
    require_default(
        name, "causal", causal, default=False, instead="indices say what each query sees"
    )
    if indices is None:
        raise UnsupportedError(f"{name}: indices=None asks for dense attention; flashdsa is sparse")
    if (extra_k_cache is None) != (extra_indices_in_kvcache is None):
        raise ArgumentValueError(
            f"{name}: expected extra_k_cache and extra_indices_in_kvcache together; got one of them"
        )
    if q.dim() != 4 or k_cache.dim() != 4 or indices.dim() != 3:
        raise ArgumentValueError(
            f"{name}: expected q [b, s_q, H, d], k_cache [pages, page_size, 1, row], "
            f"indices [b, s_q, topk]; got {list(q.shape)}, {list(k_cache.shape)}, "
            f"{list(indices.shape)}"
        )
    batch, num_queries, num_heads, _ = q.shape
    is_packed = k_cache.element_size() == 1
    if is_fp8_kvcache is not None and is_fp8_kvcache != is_packed:
        raise ArgumentValueError(
            f"is_fp8_kvcache: {is_fp8_kvcache}, but k_cache has dtype {k_cache.dtype}"
        )
    queries = q.flatten(0, 1).contiguous()
    sources = [_Source(k_cache, with_a_column(indices), topk_length)]
    if extra_k_cache is not None and extra_indices_in_kvcache is not None:
        more = with_a_column(extra_indices_in_kvcache)
        sources.append(_Source(extra_k_cache, more, extra_topk_length))
    row_format = _row_format(k_cache, use_legacy, kv_format) if is_packed else kv_format

    def attend(sources: Sequence[_Source], row_format: str | None) -> tuple[Tensor, ...]:
        (kv, slots, lengths), *extra = (one.arguments(num_queries) for one in sources)
        further = zip(("extra_kv", "extra_indices", "extra_topk_length"), *extra, strict=False)
        return sparse_mla_fwd(
            queries,
            kv,
            slots,
            d_v=head_dim_v,
            sm_scale=softmax_scale,
            topk_length=lengths,
            attn_sink=attn_sink,
            kv_format=row_format,
            batch_invariant=enable_batch_invariant,
            out=None if out is None else out.view(batch * num_queries, num_heads, head_dim_v),
            **(dict(further) if extra else {}),
        )

    try:
        result, lse = attend(sources, row_format)
    except UnsupportedError:
        if not is_packed:
            raise
        result, lse = attend([one.selected(num_queries, row_format) for one in sources], None)
    by_sequence = lse.view(batch, num_queries, num_heads).transpose(1, 2).contiguous()
    return result.view(batch, num_queries, num_heads, head_dim_v), by_sequence


def _row_format(cache: Tensor, use_legacy: bool, kv_format: str | None) -> str | None:
    """The name of a cache's packed rows; None where their bytes tell it."""
    if kv_format is not None:
        return kv_format.lower()
    forms = SPLIT if use_legacy else INTERLEAVED
    return next((form.name for form in forms if form.row_bytes == cache.shape[-1]), None)


class _Source(NamedTuple):
    """A cache, the ids (b, s_q, n) of its rows, and lengths (b,)."""

    cache: Tensor
    ids: Tensor
    lengths: Tensor | None

    def arguments(self, num_queries: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """kv, and the list of each query: ids and length."""
        ids, lengths = self.ids.flatten(0, 1), self.lengths
        if lengths is not None:
            lengths = lengths.repeat_interleave(num_queries)
        if self.cache.element_size() == 1:
            return self.cache.view(torch.uint8), ids, lengths
        return *_without_gaps(self.cache, ids), lengths

    def selected(self, num_queries: int, row_format: str | None) -> _Source:
        """The packed rows that valid slots name, in bf16, and the slots as ids of these rows."""
        rows, ids, lengths = self.arguments(num_queries)
        valid = (ids >= 0) & (ids < rows.shape[0] * rows.shape[1])
        if lengths is not None:
            valid &= torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        used, places = torch.unique(ids[valid], return_inverse=True)
        renamed = torch.full_like(ids, -1).masked_scatter_(valid, places.to(ids.dtype))
        form = find_row_format("k_cache", rows.shape, row_format, alone=False).name
        kept = read_kv_cache(rows, used, kv_format=form)[None, :, None]
        return _Source(kept, renamed.view(self.ids.shape), self.lengths)


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
