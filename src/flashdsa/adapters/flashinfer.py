"""FlashInfer's sparse MLA and top-k: `from flashdsa.adapters import flashinfer`.

The functions of FlashInfer 0.7.4 by their names, order and defaults. Its lse is in base 2 where it
decodes (`return_lse_base="basee"` asks for the natural logarithm), and -inf for an empty row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashdsa.adapters.arguments import TopKTieBreak as TopKTieBreak
from flashdsa.adapters.arguments import best_positions, copy_into, require_default, with_a_column
from flashdsa.backends.indexer.tensors import values_are_checked
from flashdsa.dispatch.checks import require_shape
from flashdsa.dispatch.transforms import as_autocast_casts
from flashdsa.errors import ArgumentValueError, UnsupportedError
from flashdsa.ops.attention import sparse_mla_fwd
from flashdsa.ops.attention_backward import mla_bwd
from flashdsa.ops.merge import lse_for_merge, lse_to_base2
from flashdsa.problem import D_QK, D_V

PACKED_FORMATS = {656: "v32", 528: "v32_no_rope"}
"""Packed rows by their bytes, with fp32 scales."""
Destination = Callable[[], Tensor | tuple[Tensor, Tensor]]
"""Returns a buffer of gradients, or it and the row of each key."""


def top_k(
    input: Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
) -> tuple[Tensor, Tensor]:
    """The k largest of each row, by `flashdsa.topk_indices`, exact.

    Args:
        input: (B, d) fp32, bf16 or fp16; k <= d.
        sorted: in descending order; otherwise in ascending index.
        deterministic, dsa_graph_safe: not used: always so.
        tie_break: a `TopKTieBreak`; NONE takes the smallest index, too.

    Returns:
        values (B, k) in input's dtype, indices (B, k) int64.
    """
    if not 1 <= k <= input.shape[1]:
        raise ArgumentValueError(
            f"k: expected 1 to {input.shape[1]}, the columns of input; got {k}"
        )
    lengths = torch.full((len(input),), input.shape[1], dtype=torch.int32, device=input.device)
    indices = best_positions(input, lengths, k, tie_break, sorted=sorted).long()
    return input.gather(1, indices), indices


def top_k_page_table_transform(
    input: Tensor,
    src_page_table: Tensor,
    lengths: Tensor,
    k: int,
    row_to_batch: Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: Tensor | None = None,
    page_table_row_starts: Tensor | None = None,
    *,
    page_size: int = 1,
    out: Tensor | None = None,
    out_raw_indices: Tensor | None = None,
) -> Tensor:
    """The k best scores of each row as slots of a paged cache.

    Args:
        input: (rows, max_len) scores, fp32, bf16 or fp16.
        src_page_table: (B, width) int32, pages of `page_size` tokens.
        lengths: (rows,) int32. row_to_batch: (rows,) int32, the table's row of each; its own by
            default.
        deterministic, dsa_graph_safe: not used: always so. tie_break: see `top_k`.
        row_starts: (rows,) int32, the column at which a row's scores begin; 0 by default.
        page_table_row_starts: (rows,) int32, the entry at which its pages begin; row_starts by
            default, which wants pages of one token.
        out, out_raw_indices: (rows, k) int32 buffers for the slots and for the positions.

    Returns:
        (rows, k) int32 slots, -1 behind those of a short row.
    """
    if page_size > 1 and row_starts is not None and page_table_row_starts is None:
        raise ArgumentValueError(
            "page_table_row_starts: expected where row_starts is given and page_size > 1"
        )
    positions = best_positions(input, lengths, k, tie_break, row_starts=row_starts)
    table = with_a_column(src_page_table)
    table = table if row_to_batch is None else table[row_to_batch.long()]
    first = row_starts if page_table_row_starts is None else page_table_row_starts
    entry = positions.clamp_min(0) // page_size
    if first is not None:
        entry = entry + first[:, None]
    pages = table.gather(1, entry.clamp_(0, table.shape[1] - 1).long())
    slots = pages * page_size + positions % page_size
    slots = torch.where(positions < 0, -1, slots).to(torch.int32)
    if out_raw_indices is not None:
        out_raw_indices.copy_(positions)
    return copy_into(out, slots)


def top_k_ragged_transform(
    input: Tensor,
    offsets: Tensor,
    lengths: Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: Tensor | None = None,
) -> Tensor:
    """The k best scores of each row as ids of packed keys: position + ``offsets[row]``, or -1.

    Args: as for `top_k_page_table_transform`, and offsets: (rows,) int32.
    """
    positions = best_positions(input, lengths, k, tie_break, row_starts=row_starts)
    return torch.where(positions < 0, -1, positions + offsets[:, None]).to(torch.int32)


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor | None,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    sinks: list[Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    sparse_mla_top_k_lens: Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sparse decode of absorbed queries, by `flashdsa.sparse_mla_fwd`.

    Args:
        query: (B, q_len, H, 576) bf16, or (B, q_len, H, 512) of rows without RoPE.
        kv_cache: (pages, page_size, 576) bf16 or (pages, 1, page_size, 576); or bytes of packed
            rows, 656 of 576 columns or 528 of 512, in place of 576.
        block_tables: (B, q_len, topk) int32, slots ``page * page_size + offset``; -1 is invalid.
        sparse_mla_top_k: topk, at least 1: dense decode is not served.
        out: (B, q_len, H, 512) buffer. lse: (B * q_len, H) or (B, q_len, H) fp32 buffer.
        bmm1_scale: float, the factor of the logits, all of it.
        bmm2_scale: 1.
        sinks: [(H,) fp32].
        sparse_mla_top_k_lens: (B * q_len,) or (B, q_len) int32, slots in use.
        seq_lens: (B * q_len,) or (B, q_len) int32, the same where sparse_mla_top_k_lens is None. A
            length per sequence of several queries, (B,), is not used, as in FlashInfer's kernels
            for SM120; what those of trtllm-gen do with it is not public.
        kv_scale_format: of packed rows "auto", "pow2_fp32" or "arbitrary_fp32": any fp32 scales.
        return_lse_base: "base2" (the default) or "basee".
        workspace_buffer, qk_nope_head_dim, max_seq_len, enable_pdl, backend, is_var_seq,
            cute_dsl_impl, max_q_len, multi_ctas_kv_counter_buffer, cp_world, cp_rank,
            use_fp16_softmax: not used. The others must keep their defaults.

    Returns:
        out, or with `return_lse` out and lse (B * q_len, H). lse counts the sink, as FlashInfer's
        kernels for SM120 have it; -inf without a sink for a query without a valid slot.
    """
    name = "trtllm_batch_decode_with_kv_cache_mla"
    if sparse_mla_top_k < 1:
        raise UnsupportedError(
            f"{name}: sparse_mla_top_k=0 asks for dense decode; flashdsa is sparse"
        )
    row_format = _packed_format(kv_cache, kv_lora_rank, qk_rope_head_dim, kv_scale_format)
    if isinstance(bmm1_scale, Tensor):
        raise UnsupportedError(f"{name}: bmm1_scale as a tensor is not served here; pass a float")
    for argument, value, default, instead in (
        ("bmm2_scale", bmm2_scale, 1.0, "scale the output"),
        ("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx, True, "K and V share their rows"),
        (
            "skip_softmax_threshold_scale_factor",
            skip_softmax_threshold_scale_factor,
            None,
            "softmax is exact",
        ),
        ("cum_seq_lens_q", cum_seq_lens_q, None, "pass [B, q_len, H, 576]"),
        ("enable_dcp", enable_dcp, False, "merge parts by flashdsa.merge_attention"),
        ("causal_seqlens_kv_global", causal_seqlens_kv_global, None, "indices say what is seen"),
    ):
        require_default(name, argument, value, default=default, instead=instead)
    if return_lse_base not in (None, "base2", "basee"):
        raise ArgumentValueError(
            f'return_lse_base: expected "base2" or "basee"; got {return_lse_base!r}'
        )
    batch, q_len, num_heads, _ = query.shape
    rows = kv_cache.squeeze(1) if kv_cache.dim() == 4 else kv_cache
    rows = rows if row_format is None else rows.view(torch.uint8)
    lengths = sparse_mla_top_k_lens
    if lengths is None and seq_lens is not None and seq_lens.numel() == batch * q_len:
        lengths = seq_lens
    direct = None
    if out is not None and out.is_contiguous() and out.dtype == query.dtype:
        direct = out.view(batch * q_len, num_heads, D_V)
    result, natural = sparse_mla_fwd(
        query.flatten(0, 1),
        rows.reshape(-1, rows.shape[-1]),
        with_a_column(block_tables.flatten(0, -2)),
        sm_scale=float(bmm1_scale),
        topk_length=None if lengths is None else lengths.flatten(),
        attn_sink=sinks[0] if sinks else None,
        kv_format=row_format,
        out=direct,
    )
    result = result.view(batch, q_len, num_heads, D_V)
    result = copy_into(out, result) if out is None or direct is None else out
    if not return_lse:
        return result
    natural = lse_for_merge(natural)
    if sinks:
        natural = torch.logaddexp(natural, sinks[0].to(natural.dtype))
    shown = natural if return_lse_base == "basee" else lse_to_base2(natural)
    return result, copy_into(lse, shown)


def _packed_format(kv_cache: Tensor, rank: int, rope: int, scale_format: str) -> str | None:
    """Return the name of the packed rows' format, None of bf16 rows.

    Raises:
        UnsupportedError: for other sizes, or for scales that these rows have not.
    """
    width = kv_cache.shape[-1]
    form = None if kv_cache.element_size() > 1 else PACKED_FORMATS.get(width)
    expected = D_QK - D_V if form in (None, "v32") else 0
    if (rank, rope) != (D_V, expected) or (form is None and width != D_QK):
        raise UnsupportedError(
            f"trtllm_batch_decode_with_kv_cache_mla: kv_lora_rank={rank}, qk_rope_head_dim={rope} "
            f"and rows of {width} {kv_cache.dtype} are not served here, only {D_V} and "
            f"{D_QK - D_V} with rows of 576 bf16 or 656 bytes, {D_V} and 0 with rows of 528 bytes"
        )
    formats = ("auto",) if form is None else ("auto", "pow2_fp32", "arbitrary_fp32")
    if scale_format.lower().replace("-", "_") not in formats:
        raise UnsupportedError(
            f"kv_scale_format: expected one of {', '.join(formats)} with these rows; got "
            f"{scale_format!r}"
        )
    return form


def dsa_sparse_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_latent: Tensor,
    k_rope: Tensor,
    indices: Tensor,
    *,
    topk_length: Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    key_passes: int | None = None,
    backend: str = "cake",
    dkv_acc: Tensor | Destination | None = None,
    dkv_dst_map: Tensor | None = None,
    dkv_direct: bool | None = None,
    check_dst_map: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Differentiable sparse attention of latent and RoPE columns apart; they are concatenated.

    Args:
        q_latent: (T, H, 512). q_rope: (T, H, 64). kv_latent: (S, 512). k_rope: (S, 64), all bf16
            (on the CPU fp32 too).
        indices: (T, topk) int32; -1 and what lies outside is invalid, wherever it stands.
        topk_length: (T,) int32. softmax_scale: ``576 ** -0.5`` by default.
        key_passes, backend, dkv_direct: not used: they choose among kernels, with the same sums.
        dkv_acc: (S_dst, >= 576) fp32; the keys' gradients are added to it, and theirs are None. Or
            a function that the backward calls without arguments for it, or for it and a map.
        dkv_dst_map: (S,) int32, the row of `dkv_acc` of each key; its own by default.
        check_dst_map: whether each backward looks at the map's values, which waits for the device;
            by default on the CPU and with FLASHDSA_CHECK=1.

    Returns:
        out (T, H, 512), or with `return_lse` out and lse (T, H), the natural logarithm, -inf for a
        query without a valid slot.
    """
    indices = with_a_column(indices)
    q = torch.cat([q_latent, q_rope], dim=-1)
    kv = torch.cat([kv_latent, k_rope], dim=-1)
    if dkv_acc is not None:
        out, lse = _AccumulatingAttention.apply(  # type: ignore[no-untyped-call]
            as_autocast_casts(q),
            as_autocast_casts(kv),
            indices,
            topk_length,
            softmax_scale,
            dkv_acc,
            dkv_dst_map,
            check_dst_map,
        )
    else:
        if dkv_dst_map is not None:
            raise ArgumentValueError("dkv_dst_map: expected with dkv_acc only")
        out, lse = sparse_mla_fwd(q, kv, indices, sm_scale=softmax_scale, topk_length=topk_length)
    return (out, lse_for_merge(lse)) if return_lse else out


class _AccumulatingAttention(torch.autograd.Function):
    """Sparse MLA whose backward adds dKV, in fp32, to the caller's buffer."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        topk_length: Tensor | None,
        sm_scale: float | None,
        dkv_acc: Tensor | Destination,
        dkv_dst_map: Tensor | None,
        check_dst_map: bool | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = sparse_mla_fwd(q, kv, indices, sm_scale=sm_scale, topk_length=topk_length)
        ctx.save_for_backward(q, kv, indices, topk_length, out, lse, dkv_dst_map)
        ctx.sm_scale, ctx.dkv_acc, ctx.check = sm_scale, dkv_acc, check_dst_map
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, indices, topk_length, out, lse, given_map = ctx.saved_tensors
        target, rows = _destination(ctx.dkv_acc, given_map, kv.shape, ctx.check)
        dq, dkv, *_ = mla_bwd(
            q,
            kv,
            gradients[0].contiguous(),
            lse,
            out,
            indices,
            sm_scale=ctx.sm_scale,
            topk_length=topk_length,
        )
        if rows is None:
            target[: len(dkv)] += dkv
        else:
            target.index_add_(0, rows.long(), dkv)
        return dq, None, None, None, None, None, None, None


def _destination(
    dkv_acc: Tensor | Destination, dkv_dst_map: Tensor | None, shape: torch.Size, check: bool | None
) -> tuple[Tensor, Tensor | None]:
    """The caller's columns for gradients of `shape`, and the row of each, None: its own."""
    if not isinstance(dkv_acc, Tensor):
        made = dkv_acc()
        dkv_acc, own = made if isinstance(made, tuple) else (made, None)
        if own is not None and dkv_dst_map is not None:
            raise ArgumentValueError("dkv_dst_map: expected one; dkv_acc() returned another")
        dkv_dst_map = own if dkv_dst_map is None else dkv_dst_map
    num_keys, width = shape
    least = 0 if dkv_dst_map is not None else num_keys
    if (
        dkv_acc.dtype != torch.float32
        or dkv_acc.dim() != 2
        or len(dkv_acc) < least
        or dkv_acc.shape[1] < width
    ):
        raise ArgumentValueError(
            f"dkv_acc: expected float32 of at least [{least}, {width}]; got "
            f"{dkv_acc.dtype} {list(dkv_acc.shape)}"
        )
    if dkv_dst_map is not None:
        require_shape("dkv_dst_map", dkv_dst_map, (num_keys,), "[S]")
        if check is None:
            check = dkv_dst_map.device.type == "cpu" or values_are_checked()
        if check:
            _require_rows(dkv_dst_map, len(dkv_acc))
    return dkv_acc[:, :width], dkv_dst_map


def _require_rows(dkv_dst_map: Tensor, num_rows: int) -> None:
    least, most = dkv_dst_map.min(), dkv_dst_map.max()
    if least < 0 or most >= num_rows:
        raise ArgumentValueError(
            f"dkv_dst_map: expected rows of dkv_acc, in [0, {num_rows}); got {int(least)} to "
            f"{int(most)}"
        )
