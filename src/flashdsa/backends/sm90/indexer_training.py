"""The indexer's training on Hopper GPUs, forward: target, scores at slots, divergence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.memory import aligned, lie_densely
from flashdsa.backends.reasons import Candidate, Choice
from flashdsa.backends.runner import Runner
from flashdsa.heuristics.h200 import IndexScores
from flashdsa.kernels import catalog
from flashdsa.kernels.indexer_training.sm90.head_sums import plan as of_target
from flashdsa.kernels.indexer_training.sm90.kl.plan import KlPlan
from flashdsa.kernels.indexer_training.sm90.scores.plan import NUM_HEADS, TILE_KEYS, ScoresPlan
from flashdsa.plan.row_tiles import TILE_ROWS

if TYPE_CHECKING:
    from flashdsa.ops.indexer_loss import IndexerKlBwdOperands, IndexerKlOperands
    from flashdsa.ops.indexer_training import AttentionTargetOperands, IndexerScoresOperands

Serve = Callable[[Sequence[Any]], Tensor]
"""Function of the operands."""


@cache
def target_plan(num_heads: int, width: int) -> of_target.TargetPlan:
    """The plan with the fewest columns for `num_heads` heads, and rows of `width`."""
    heads = next(size for size in of_target.TARGET_HEADS if size >= num_heads)
    return of_target.target_plan(heads, width)


def bind_target(runner: Runner, operands: AttentionTargetOperands, *, sm_scale: float) -> Serve:
    """P (S, topk) fp32 = sum_h exp(sm_scale q . kv - lse'), 0 where a slot is invalid."""
    num_queries, topk = operands.indices.shape
    if not operands.kv.shape[0] or not operands.indices.numel():
        return lambda _: runner.empty(num_queries, topk, dtype=torch.float32).zero_()
    function = runner.function(catalog.ATTENTION_TARGET, target_plan(*operands.q.shape[1:]))
    every = runner.empty(0, dtype=torch.int32)
    no_sink = runner.empty(0, dtype=torch.float32)
    num_ctas = min(num_queries * -(-topk // TILE_ROWS), runner.num_sms)
    empty_target = runner.allocator(num_queries, topk, dtype=torch.float32)
    dense = lie_densely(operands)

    def serve(operands: Sequence[Any]) -> Tensor:
        q, kv, lse, indices, topk_length, attn_sink = operands
        lengths = every if topk_length is None else topk_length
        sink = no_sink if attn_sink is None else attn_sink
        if not dense:
            q, kv, lse, indices = (x.contiguous() for x in (q, kv, lse, indices))
            lengths, sink = lengths.contiguous(), sink.contiguous()
        out = empty_target()
        function(aligned(q), aligned(kv), indices, lengths, lse, sink, out, sm_scale, num_ctas)
        return out

    return runner.on_device(serve)


@cache
def scores_plan(num_heads: int) -> ScoresPlan:
    """The plan with the fewest columns for `num_heads` heads."""
    return ScoresPlan(next(size for size in NUM_HEADS if size >= num_heads))


@cache
def parts_for(num_queries: int, tiles: int, ctas: int, num_sms: int) -> int:
    """CTAs that share a query: as many as run at once, unless others leave fewer SMs idle at the
    end. `tiles`: of a query. `ctas`: that an SM runs at once."""
    at_once = ctas * num_sms
    usual = max(1, min(at_once // num_queries, tiles))

    def duration(parts: int) -> float:
        left = num_queries * parts % at_once
        last = max(IndexScores.ALONE, -(-left // num_sms)) if left else 0
        each = -(-tiles // parts) + IndexScores.OVERHEAD
        return each * (num_queries * parts // at_once * ctas + last)

    best = min(range(1, min(IndexScores.MOST_PARTS, tiles) + 1), key=duration)
    return best if duration(best) < IndexScores.GAIN * duration(usual) else usual


def explain_parts(plan: ScoresPlan, parts: int) -> Choice:
    """Say why so many CTAs share a query."""
    rule = "with that many the fewest SMs are idle at the end, by an estimate"
    kind = f"{parts} CTA{'s' * (parts > 1)} for each query"
    return Choice("CTAs of a query", (Candidate(plan.name, kind, rule),))


def bind_scores(runner: Runner, operands: IndexerScoresOperands) -> Serve:
    """I (S, topk) fp32 = sum_h weights relu(q_index . k_index), -inf where a slot is invalid."""
    num_queries, topk = operands.indices.shape
    if not operands.k_index.shape[0] or not operands.indices.numel():
        return lambda _: runner.empty(num_queries, topk, dtype=torch.float32).fill_(-torch.inf)
    plan = scores_plan(operands.q_index.shape[1])
    function = runner.function(catalog.INDEXER_SCORES, plan)
    parts = parts_for(num_queries, -(-topk // TILE_KEYS), plan.ctas, runner.num_sms)
    runner.explain(partial(explain_parts, plan, parts))
    every = runner.empty(0, dtype=torch.int32)
    empty_scores = runner.allocator(num_queries, topk, dtype=torch.float32)
    dense = lie_densely(operands) and operands.weights.dtype is torch.float32

    def serve(operands: Sequence[Any]) -> Tensor:
        q, k, weights, indices, topk_length = operands
        lengths = every if topk_length is None else topk_length
        if not dense:
            q, k = q.contiguous(), k.contiguous()
            weights = weights.to(torch.float32).contiguous()
            indices, lengths = indices.contiguous(), lengths.contiguous()
        out = empty_scores()
        function(aligned(q), aligned(k), indices, lengths, weights, out, parts)
        return out

    return runner.on_device(serve)


def bind_kl(runner: Runner, operands: IndexerKlOperands) -> Serve:
    """KL (S,) fp32; 0 for rows without a valid slot or a target."""
    return _bind_kl(runner, KlPlan(), operands, operands.scores.shape[:1])


def bind_kl_backward(runner: Runner, operands: IndexerKlBwdOperands) -> Serve:
    """d_scores (S, topk) fp32 = grad_kl (softmax of the scores - normalised target)."""
    return _bind_kl(runner, KlPlan(gradient=True), operands, operands.scores.shape)


def _bind_kl(
    runner: Runner,
    plan: KlPlan,
    operands: IndexerKlOperands | IndexerKlBwdOperands,
    shape: Sequence[int],
) -> Serve:
    """Bind the launch that writes a result of this shape."""
    if not operands.scores.numel():
        return lambda _: runner.empty(*shape, dtype=torch.float32).zero_()
    function = runner.function(catalog.INDEXER_KL, plan)
    empty = runner.allocator(*shape, dtype=torch.float32)
    dense = lie_densely(operands)

    def serve(operands: Sequence[Tensor]) -> Tensor:
        out = empty()
        function(*(operands if dense else [x.contiguous() for x in operands]), out)
        return out

    return runner.on_device(serve)
