"""Sparse MLA in torch: forward with an online softmax, backward from O and lse, tile by tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.gather import GatheredRows, RowList, row_lists
from flashdsa.backends.cpu.tiling import CPU, Mode, QueryTile, one_by_one, query_tiles

if TYPE_CHECKING:
    from flashdsa.ops.attention import SparseMlaOperands, SparseMlaOutOperands
    from flashdsa.ops.attention_backward import MlaBwdOperands

LARGE_LOGIT = 64.0
"""Logit above which the rounding of an fp32 dot product, some 1e-6 of it, would show in exp(s)."""


def forward(
    operands: SparseMlaOperands, *, d_v: int, max_logits: bool, **choices: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """O (S, H, d_v) in q's dtype, lse and max_logits (S, H) in fp32 (fp64 for fp64 inputs).

    Args:
        d_v: columns of kv that are V.
        max_logits: whether they are asked for; else they have no element.
        choices: of `forward_out`.
    """
    q, kv, indices, *lists = operands
    rows, dtype = q.shape[:2], compute_dtype(q)
    out, lse = q.new_empty(*rows, d_v), q.new_empty(rows, dtype=dtype)
    largest = q.new_empty(rows if max_logits else 0, dtype=dtype)
    asked = largest if max_logits else None
    forward_out(operands.into(q, kv, indices, out, lse, asked, *lists), **choices)
    return out, lse, largest


def forward_out(
    operands: SparseMlaOutOperands,
    *,
    sm_scale: float,
    index_block: int,
    batch_invariant: bool,
    kv_format: str | None,
    mode: Mode = CPU,
) -> None:
    """out (S, H, d_v), lse and, if asked for, max_logits (S, H), written."""
    q, kv, _, out, lse, max_logits, _, attn_sink = operands[:8]
    num_queries, num_heads, d_qk = q.shape
    d_v, dtype = out.shape[2], compute_dtype(q)
    lists = row_lists(operands, index_block, kv_format, mode)
    slots = max(one.slots for one in lists)
    if slots == 0:
        write_without_keys(operands)
        return
    bytes_per_key = dtype.itemsize * (num_heads + d_qk) + kv.element_size() * d_qk
    tiles = query_tiles(num_queries, slots, bytes_per_key, mode.workspace)
    if batch_invariant:
        tiles, lists = one_by_one(num_queries), [one.in_whole_blocks() for one in lists]
    for tile in tiles:
        rows = slice(tile.first, tile.last)
        acc, row_max, row_sum, empty = _attend(q[rows].to(dtype), lists, d_v, sm_scale, tile)
        tile_lse = row_max + row_sum.log()  # float64; -inf where every logit is
        acc /= row_sum.masked_fill(empty, 1)[..., None].to(dtype)
        if attn_sink is not None:
            kept = torch.sigmoid(tile_lse - attn_sink).masked_fill(empty, 0)
            acc *= kept[..., None].to(dtype)
            # A sink of +inf takes everything: 0, also of values that are not finite.
            acc.masked_fill_((attn_sink == math.inf)[:, None], 0)
        out[rows] = acc.to(q.dtype)
        lse[rows] = tile_lse.masked_fill(empty, math.inf)
        if max_logits is not None:
            max_logits[rows] = row_max


def write_without_keys(operands: SparseMlaOutOperands) -> None:
    """Write the results of a call in which no query has a valid slot."""
    operands.out.zero_()
    operands.lse.fill_(math.inf)
    if operands.max_logits is not None:
        operands.max_logits.fill_(-math.inf)


def _attend(
    q: Tensor, lists: list[RowList], d_v: int, sm_scale: float, tile: QueryTile
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unnormalised output (queries, H, d_v), running maximum and sum (queries, H) of one tile, and
    which queries have no valid slot (queries, 1).

    Where logits may be float64, maximum and sum are: one rounded to fp32 would shift them. They do
    not tell a query without a valid slot from one whose logits are all -inf.
    """
    queries, num_heads, _ = q.shape
    reads = lists[0].mode.reads
    wide = torch.float64 if reads else q.dtype
    row_max = q.new_full((queries, num_heads), -math.inf, dtype=wide)
    row_sum = torch.zeros_like(row_max)
    acc = q.new_zeros(queries, num_heads, d_v)
    empty = q.new_ones(queries, 1, dtype=torch.bool)
    for gathered in chain.from_iterable(one.gather(tile, q.dtype) for one in lists):
        s = logits(q, gathered.rows.transpose(1, 2), sm_scale, reads)  # (queries, H, keys)
        if gathered.valid is None:
            empty.fill_(False)
        else:
            s.masked_fill_(~gathered.valid[:, None], -math.inf)
            empty &= ~gathered.valid.any(1, keepdim=True)
        new_max = torch.maximum(row_max, s.amax(-1).to(wide))
        # A row without a valid key so far has maximum -inf; subtracting 0 keeps exp(-inf) = 0.
        shift = new_max.masked_fill(new_max == -math.inf, 0)
        p = s.sub_(shift[..., None].to(s.dtype)).exp_().to(q.dtype)
        rescale = (row_max - shift).exp_()
        row_sum = row_sum * rescale + p.sum(-1)
        acc = acc.mul_(rescale[..., None].to(q.dtype)).baddbmm_(p, gathered.rows[..., :d_v])
        row_max = new_max
    return acc, row_max, row_sum, empty


def backward(
    operands: MlaBwdOperands,
    *,
    sm_scale: float,
    deterministic: bool,
    dkv_dtype: torch.dtype,
    index_block: int,
    mode: Mode = CPU,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ (S, H, d_qk) in q's dtype, dKV (S_kv, d_qk) and dextra_kv (S_extra, d_qk) in `dkv_dtype`,
    d_sink like the sink; those of operands that are not there are empty.

    Let P = exp(s - lse'), lse' = logaddexp(lse, sink), delta = sum_d O dO: dS = P (dP - delta)
    sm_scale, dQ = dS K, dKV = dS^T Q + [P^T dO, 0] (FlashAttention-2, section 3.2, with V the first
    columns of K). Tiles run in order; only on a GPU a row's sums have another order if that is
    allowed.
    """
    q, kv, dO, lse, O, _, _, attn_sink = operands[:8]
    num_queries, num_heads, d_qk = q.shape
    d_v = dO.shape[-1]
    dtype = compute_dtype(q)
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lists = row_lists(operands, index_block, mode=mode)
    of_sources = [q.new_zeros(one.kv.shape[0], d_qk, dtype=dtype) for one in lists]
    slots = max(one.slots for one in lists)
    d_sink = q.new_zeros(0 if attn_sink is None else num_heads, dtype=dtype)
    sink_dtype = dtype if attn_sink is None else attn_sink.dtype
    bytes_per_key = dtype.itemsize * (4 * num_heads + 2 * d_qk) + kv.element_size() * d_qk
    for tile in query_tiles(num_queries if slots else 0, slots, bytes_per_key, mode.workspace):
        rows = slice(tile.first, tile.last)
        tile_lse = lse[rows]
        d_out = dO[rows].to(dtype)
        delta = (O[rows].to(dtype) * d_out).sum(-1)
        if attn_sink is not None:
            tile_lse, tile_d_sink = sink_backward(tile_lse, attn_sink, delta)
            d_sink += tile_d_sink
        # (queries, 2H, d_qk): q above dO padded with zeros, so that one product gives dK + [dV, 0].
        q_and_do = q.new_zeros(len(delta), 2 * num_heads, d_qk, dtype=dtype)
        q_and_do[:, :num_heads] = q[rows]
        q_and_do[:, num_heads:, :d_v] = d_out
        dq[rows] = _backward_tile(
            q_and_do, d_v, tile_lse, delta, lists, of_sources, sm_scale, tile, deterministic
        ).to(q.dtype)
    dkv, dextra_kv = (*of_sources, d_sink.new_empty(0))[:2]
    return dq, dkv.to(dkv_dtype), dextra_kv.to(dkv_dtype), d_sink.to(sink_dtype)


def _backward_tile(
    q_and_do: Tensor,
    d_v: int,
    lse: Tensor,
    delta: Tensor,
    lists: Sequence[RowList],
    of_sources: Sequence[Tensor],
    sm_scale: float,
    tile: QueryTile,
    deterministic: bool,
) -> Tensor:
    """dQ (queries, H, d_qk) of one tile; its gradients of rows are added to each source's."""
    queries, both_heads, d_qk = q_and_do.shape
    num_heads = both_heads // 2
    q = q_and_do[:, :num_heads].contiguous()
    d_out = q_and_do[:, num_heads:, :d_v].contiguous()
    dq = q.new_zeros(queries, num_heads, d_qk)
    pairs = zip(lists, of_sources, strict=True)
    spans = ((dkv, span) for one, dkv in pairs for span in one.gather(tile, q.dtype))
    for dkv, gathered in spans:
        rows, valid = gathered.rows, gathered.valid
        keys_t = rows.transpose(1, 2)
        ds_and_p = q.new_empty(queries, both_heads, rows.shape[1])
        ds, p = ds_and_p[:, :num_heads], ds_and_p[:, num_heads:]
        p.copy_(exponents(q, keys_t, sm_scale, lse, lists[0].mode.reads)).exp_()
        if valid is not None:
            p.masked_fill_(~valid[:, None], 0)
        dp = torch.bmm(d_out, keys_t[:, :d_v])
        torch.sub(dp, delta[..., None], out=ds).mul_(p).mul_(sm_scale)
        if valid is not None:
            ds.masked_fill_(~valid[:, None], 0)
        dq.baddbmm_(ds, rows)
        dkv_rows = torch.bmm(ds_and_p.transpose(1, 2), q_and_do)  # (queries, keys, d_qk)
        add_rows(dkv, gathered, dkv_rows, lists[0].mode, deterministic)
    return dq


def add_rows(
    total: Tensor, gathered: GatheredRows, rows: Tensor, mode: Mode, deterministic: bool
) -> None:
    """Add rows (queries, keys, d) to those of `total` that were gathered for them.

    INVARIANT: only rows that a valid slot names are added to; 0 * Inf stays out.
    """
    ids, valid = gathered.row_ids, gathered.valid
    if valid is not None and mode.reads:
        total.index_add_(0, ids[valid], rows[valid])
        return
    if valid is not None:
        rows = rows.masked_fill(~valid[..., None], 0)
    flat = ids.reshape(-1), rows.reshape(-1, rows.shape[-1])
    # On a GPU index_put_ sorts, and index_add_ has no order; on a CPU it is the other way.
    if deterministic and total.device.type != "cpu":
        total.index_put_((flat[0].long(),), flat[1], accumulate=True)
    else:
        total.index_add_(0, *flat)


def logits(q: Tensor, keys_t: Tensor, sm_scale: float, reads: bool = True) -> Tensor:
    """Logits (queries, H, keys); in float64 when fp32 sums would blur exp(s), or overflow, if their
    sizes may be read.

    q is scaled after the product: products of bf16 numbers are exact in fp32, scaled ones are not.
    """
    s = torch.bmm(q, keys_t).mul_(sm_scale)
    if not reads:
        return s
    low, high = s.aminmax()
    if s.dtype == torch.float64 or max(-low, high) <= LARGE_LOGIT:
        return s
    # Also where a NaN hides the others' size: aminmax gives NaN then, and no comparison holds.
    return torch.bmm(q.double(), keys_t.double()).mul_(sm_scale)


def exponents(q: Tensor, keys_t: Tensor, sm_scale: float, lse: Tensor, reads: bool) -> Tensor:
    """Logits minus lse (queries, H), rounded once where both are fp32."""
    if reads:
        return logits(q, keys_t, sm_scale).sub_(lse[..., None])
    return torch.add(-lse[..., None], torch.bmm(q, keys_t), alpha=sm_scale)


def sink_backward(lse: Tensor, attn_sink: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """lse' = logaddexp(lse, sink) (queries, H), and the tile's d_sink (H,).

    The sink's share exp(sink - lse') is inf - inf for a sink of +inf and for rows without a valid
    key (lse = +inf); delta is 0 in these cases, hence the contribution too.
    """
    sink = attn_sink.to(lse.dtype).contiguous()  # torch's bits depend on strides
    with_sink = torch.logaddexp(lse, sink.expand_as(lse))
    share = (sink - with_sink).exp_()
    nothing = (lse == math.inf) | (sink.abs() == math.inf)
    return with_sink, -(share * delta).masked_fill_(nothing, 0).sum(0)


def compute_dtype(q: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64 inputs."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32
