"""Training the indexer in torch: its target, its scores at given slots, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashdsa.backends.cpu.gather import GatheredRows, gather_rows
from flashdsa.backends.cpu.sparse_mla import add_rows, compute_dtype, exponents
from flashdsa.backends.cpu.tiling import CPU, Mode, QueryTile, query_tiles, spans
from flashdsa.problem import INDEX_HEAD_DIM

if TYPE_CHECKING:
    from flashdsa.ops.indexer_loss import IndexerKlBwdOperands, IndexerKlOperands
    from flashdsa.ops.indexer_training import (
        AttentionTargetOperands,
        IndexerBwdOperands,
        IndexerScoresOperands,
    )


def attention_target(
    operands: AttentionTargetOperands, *, sm_scale: float, mode: Mode = CPU
) -> Tensor:
    """P (S, topk) = sum_h exp(sm_scale q . kv - lse'), 0 where a slot is invalid."""
    q, kv, lse, indices, topk_length, attn_sink = operands
    num_queries, num_heads, d_qk = q.shape
    dtype = compute_dtype(q)
    target = q.new_zeros(indices.shape, dtype=dtype)
    if kv.shape[0] == 0:
        return target
    if attn_sink is not None:
        lse = torch.logaddexp(lse, attn_sink.to(lse.dtype).contiguous().expand_as(lse))
    bytes_per_key = dtype.itemsize * (num_heads + d_qk) + kv.element_size() * d_qk
    for tile in query_tiles(num_queries, indices.shape[1], bytes_per_key, mode.workspace):
        rows = slice(tile.first, tile.last)
        q_rows = q[rows].to(dtype)
        for columns, gathered in _gathered(kv, indices, topk_length, tile, dtype, mode):
            keys_t = gathered.rows.transpose(1, 2)
            # A head that attends nowhere has lse = +inf: exp(-inf) adds nothing.
            p = exponents(q_rows, keys_t, sm_scale, lse[rows], mode.reads).exp_()
            p.masked_fill_((lse[rows] == math.inf)[..., None], 0)
            sums = p.sum(1)
            if gathered.valid is not None:
                sums.masked_fill_(~gathered.valid, 0)
            target[rows, columns] = sums.to(dtype)
    return target


def scores(operands: IndexerScoresOperands, *, mode: Mode = CPU) -> Tensor:
    """I (S, topk) = sum_h weights relu(q_index . k_index), -inf where a slot is invalid."""
    q, k, weights, indices, topk_length = operands
    dtype = compute_dtype(q)
    result = q.new_full(indices.shape, -math.inf, dtype=dtype)
    if k.shape[0] == 0:
        return result
    per_key = _bytes_per_key(q, k, dtype)
    for tile in query_tiles(len(q), indices.shape[1], per_key, mode.workspace):
        rows = slice(tile.first, tile.last)
        q_rows, w_rows = q[rows].to(dtype), weights[rows].to(dtype)
        for columns, gathered in _gathered(k, indices, topk_length, tile, dtype, mode):
            z = torch.bmm(q_rows, gathered.rows.transpose(1, 2))
            summed = torch.bmm(w_rows[:, None], z.relu_())[:, 0]
            if gathered.valid is not None:
                summed.masked_fill_(~gathered.valid, -math.inf)
            result[rows, columns] = summed
    return result


def backward(
    operands: IndexerBwdOperands, *, deterministic: bool, dk_dtype: torch.dtype, mode: Mode = CPU
) -> tuple[Tensor, Tensor, Tensor]:
    """dq_index in q_index's dtype, dk_index in `dk_dtype`, d_weights in weights' dtype.

    Let z = q_index . k_index and g the gradient of the scores: d_weights = sum_i g relu(z), A = g
    weights [z > 0], dq_index = A K, dk_index = A^T Q. Tiles run in order; only
    on a GPU a key's sums have another order if that is allowed.
    """
    q, k, weights, indices, grad_scores, topk_length = operands
    dtype = compute_dtype(q)
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    dk = torch.zeros_like(k, dtype=dtype, memory_format=torch.contiguous_format)
    d_weights = torch.zeros_like(weights, memory_format=torch.contiguous_format)
    if k.shape[0] == 0:
        return dq, dk.to(dk_dtype), d_weights
    per_key = 2 * _bytes_per_key(q, k, dtype)
    for tile in query_tiles(len(q), indices.shape[1], per_key, mode.workspace):
        rows = slice(tile.first, tile.last)
        q_rows, w_rows = q[rows].to(dtype), weights[rows].to(dtype)
        tile_dq, tile_dw = torch.zeros_like(q_rows), torch.zeros_like(w_rows)
        for columns, gathered in _gathered(k, indices, topk_length, tile, dtype, mode):
            g = grad_scores[rows, columns]
            z = torch.bmm(q_rows, gathered.rows.transpose(1, 2))
            if gathered.valid is not None:
                # INVARIANT: selected, not multiplied: whatever an invalid slot holds adds 0.
                g = g.masked_fill(~gathered.valid, 0)
                z.masked_fill_(~gathered.valid[:, None], 0)
            tile_dw += torch.bmm(z.relu(), g[..., None])[..., 0]
            a = (w_rows[..., None] * g[:, None]).masked_fill_(~(z > 0), 0)
            tile_dq.baddbmm_(a, gathered.rows)
            dk_rows = torch.bmm(a.transpose(1, 2), q_rows)  # (queries, keys, 128)
            add_rows(dk, gathered, dk_rows, mode, deterministic)
        dq[rows], d_weights[rows] = tile_dq.to(q.dtype), tile_dw.to(weights.dtype)
    return dq, dk.to(dk_dtype), d_weights


def kl(operands: IndexerKlOperands) -> Tensor:
    """KL (S,) of the normalised target to the softmax of the scores; 0 for rows without either."""
    scores, target = operands
    p, log_prediction, counts = _distributions(scores, target)
    terms = torch.where(p > 0, p * (p.log() - log_prediction), p)
    terms.masked_fill_(~counts[:, None] | (scores == -math.inf), 0)
    return terms.sum(1).to(scores.dtype)


def kl_backward(operands: IndexerKlBwdOperands) -> Tensor:
    """d_scores (S, topk) = grad_kl (softmax of the scores - normalised target)."""
    scores, target, grad_kl = operands
    p, log_prediction, counts = _distributions(scores, target)
    d_scores = grad_kl.double()[:, None] * (log_prediction.exp() - p)
    d_scores.masked_fill_(~counts[:, None] | (scores == -math.inf), 0)
    return d_scores.to(scores.dtype)


def _distributions(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The target over its sum, the logarithm of the prediction, and the rows that have both.

    All in float64: p log p - p I cancels. A slot whose score is -inf is invalid, and its target
    counts as 0.
    """
    invalid = scores == -math.inf
    wide = target.double().masked_fill(invalid, 0)
    total = wide.sum(1, keepdim=True)
    counts = (total != 0)[:, 0] & ~invalid.all(1)
    return wide / total, scores.double().log_softmax(1), counts


def _gathered(
    keys: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    tile: QueryTile,
    dtype: torch.dtype,
    mode: Mode,
) -> Iterator[tuple[slice, GatheredRows]]:
    """A tile's slots, some columns at a time, with the rows of `keys` that they name."""
    rows = slice(tile.first, tile.last)
    lengths = None if topk_length is None else topk_length[rows]
    for first, last in spans(indices.shape[1], tile.k_block):
        columns = slice(first, last)
        of_tile = indices[rows, columns], first, lengths, dtype
        yield columns, gather_rows(keys, *of_tile, mode=mode)


def _bytes_per_key(q: Tensor, k: Tensor, dtype: torch.dtype) -> int:
    """Workspace of one slot: its products with every head, and its row."""
    return dtype.itemsize * (q.shape[1] + INDEX_HEAD_DIM) + k.element_size() * INDEX_HEAD_DIM
