"""Training the indexer by Triton: the attention's target, scores at given slots, their gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.tiling import spans
from flashdsa.backends.memory import readable
from flashdsa.backends.runner import Runner
from flashdsa.backends.triton.attention import LOG2_E, Source
from flashdsa.backends.triton.attention_bwd import WORKSPACE_BYTES, add_sums
from flashdsa.backends.triton.launch import fenced, launch, tile

FILL = 2
"""Programs for each SM below which those of a query share its slots."""

if TYPE_CHECKING:
    from flashdsa.ops.indexer_training import (
        AttentionTargetOperands,
        IndexerBwdOperands,
        IndexerScoresOperands,
    )


def bind_target(
    runner: Runner, operands: AttentionTargetOperands, *, sm_scale: float
) -> Callable[[Sequence[Any]], Tensor]:
    """P (S, topk) = sum_h exp(sm_scale q . kv - lse'), 0 where a slot is invalid."""
    from flashdsa.kernels.triton import indexer_training

    kind = type(operands)

    def serve(given: Sequence[Any]) -> Tensor:
        x = kind(*given)
        lse = x.lse if x.attn_sink is None else torch.logaddexp(x.lse, x.attn_sink)
        (queries, num_heads, columns), width = x.q.shape, x.indices.shape[1]
        out = runner.empty(queries, width, dtype=torch.float32)
        ids, limits, listed = _list(x.indices, x.topk_length)
        if out.numel():
            shape = tile("target", runner.capability, num_heads)
            launch(
                runner,
                indexer_training.target,
                (queries, -(-width // shape.keys), 1),
                (readable(x.q), readable(x.kv), readable(lse * LOG2_E), ids, limits, out,
                 num_heads, len(x.kv), width, sm_scale * LOG2_E),
                shape, BLOCK_T=shape.keys, BLOCK_H=shape.heads, D=columns, LIST=listed,
                FENCED=fenced(runner),
            )  # fmt: skip
        return out

    return runner.on_device(serve)


def bind_scores(
    runner: Runner, operands: IndexerScoresOperands
) -> Callable[[Sequence[Any]], Tensor]:
    """I (S, topk) = sum_h weights relu(q_index . k_index), -inf where a slot is invalid."""
    from flashdsa.kernels.triton import indexer_training

    kind = type(operands)

    def serve(given: Sequence[Any]) -> Tensor:
        x = kind(*given)
        (queries, num_heads, _), width = x.q_index.shape, x.indices.shape[1]
        out = runner.empty(queries, width, dtype=torch.float32)
        ids, limits, listed = _list(x.indices, x.topk_length)
        if out.numel():
            shape = tile("index scores", runner.capability, num_heads)
            parts = max(1, min(FILL * runner.num_sms // queries, -(-width // shape.keys)))
            launch(
                runner,
                indexer_training.scores,
                (queries * parts, 1, 1),
                (readable(x.q_index), readable(x.k_index), readable(x.weights.float()), ids,
                 limits, out, num_heads, len(x.k_index), width, parts),
                shape, BLOCK_T=shape.keys, BLOCK_H=shape.heads, LIST=listed,
                FENCED=fenced(runner),
            )  # fmt: skip
        return out

    return runner.on_device(serve)


def _list(indices: Tensor, topk_length: Tensor | None) -> tuple[Tensor, Tensor, str]:
    """Ids (S, topk), limits and their kind, as `slots_of` takes them."""
    ids = indices.contiguous()
    return (
        (ids, ids, "whole") if topk_length is None else (ids, topk_length.contiguous(), "lengths")
    )


def bind_backward(
    runner: Runner, operands: IndexerBwdOperands, *, deterministic: bool, dk_dtype: torch.dtype
) -> Callable[[Sequence[Any]], tuple[Tensor, Tensor, Tensor]]:
    """dq_index in q_index's dtype, dk_index in `dk_dtype`, d_weights in weights' dtype."""
    kind = type(operands)

    def serve(given: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
        x = kind(*given)
        q, k, weights = readable(x.q_index), readable(x.k_index), readable(x.weights.float())
        x = x._replace(q_index=q, k_index=k, weights=weights, grad_scores=readable(x.grad_scores))
        dq, d_weights = torch.empty_like(q), torch.empty_like(weights)
        dk = k.new_zeros(k.shape, dtype=torch.float32)
        _add_gradients(runner, x, dq, dk, d_weights, deterministic)
        return dq, dk.to(dk_dtype), d_weights.to(given[2].dtype)

    return runner.on_device(serve)


def _add_gradients(
    runner: Runner, x: IndexerBwdOperands, dq: Tensor, dk: Tensor, d_weights: Tensor, ordered: bool
) -> None:
    """Write dq and d_weights, and add to dk: if ordered some queries at a time, whose rows are
    added up by the order of slots."""
    from flashdsa.kernels.triton.indexer_training import backward

    (queries, num_heads, columns), width = x.q_index.shape, x.indices.shape[1]
    shape = tile("indexer's backward", runner.capability, num_heads)
    heads = range(0, num_heads, shape.heads)
    ids, limits, kind = _list(x.indices, x.topk_length)
    step = max(1, WORKSPACE_BYTES // (4 * columns * width)) if ordered else max(queries, 1)
    for first, end in spans(queries, step):
        own = slice(first, end)
        to = dk.new_zeros(end - first, width, columns) if ordered else dk
        for first_head in heads if ordered else (0,):
            launch(
                runner,
                backward,
                (end - first, 1 if ordered else len(heads), 1),
                (x.q_index[own], x.k_index, x.weights[own], ids[own], limits[own],
                 x.grad_scores[own], dq[own], to, d_weights[own], num_heads, first_head, len(dk),
                 width),
                shape, BLOCK_T=shape.keys, BLOCK_H=shape.heads, LIST=kind, ORDERED=ordered,
                FENCED=fenced(runner),
            )  # fmt: skip
        if ordered and len(dk):
            rows = Source(dk, columns, 1, len(dk), ids[own], limits[own], width, width)
            constants = {"D_V": columns, "D_ROPE": 0, "LIST": kind, "ROWS_OF_ID": 1}
            add_sums(runner, rows, to, dk, constants)
