"""Run the operations that train the indexer and judge every output against the reference."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.verify import calls, tolerances
from flashdsa.verify.compare import Comparison, compare, compare_exact, compare_scores, judge_bias
from flashdsa.verify.indexer_training_cases import IndexerTrainingInputs
from flashdsa.verify.judge_sparse_mla import empty_queries, forward_results, unnamed_rows

GRADIENTS = ("dq_index", "dk_index", "d_weights")


def _sums(inputs: IndexerTrainingInputs) -> torch.dtype:
    """Return the dtype of scores, targets and sums."""
    return inputs.grad_scores.dtype


def _limits(inputs: IndexerTrainingInputs, operation: str, output: str) -> float | None:
    """Return the norm's limit; None for data that the norm rule does not judge."""
    limit = tolerances.tolerance(operation, output, inputs.case.attention.dtype).norm
    return limit if inputs.case.attention.judges_norms else None


def check_target(inputs: IndexerTrainingInputs, backend: str) -> list[Comparison]:
    """Run and judge `attention_target` on the reference's lse."""
    _, lse = forward_results(inputs.attention)
    found = calls.attention_target(inputs, lse, backend)
    return [judge_target(inputs, lse, found, backend)]


def judge_target(
    inputs: IndexerTrainingInputs, lse: Tensor, target: Tensor, backend: str
) -> Comparison:
    """The verdict on the `target` that a backend has of that lse."""
    attention = inputs.attention
    operands = (attention.q, attention.kv, lse, attention.indices)
    limits = tolerances.tolerance("attention_target", "target", inputs.case.attention.dtype)
    assert limits.absolute is not None and limits.relative is not None
    ref = reference.attention_target(*operands, **attention.options)
    besides = torch.full_like(ref, limits.absolute)
    if backend in tolerances.WGMMA_SUMS:
        roundings = (
            math.ceil(inputs.case.attention.d_qk / tolerances.WGMMA_K)
            + tolerances.TARGET_EXPONENT_CUTS
        )
        slope = reference.attention_target(*operands, slope=True, **attention.options)
        besides += tolerances.WGMMA_CUT * roundings * slope
    return compare_scores(
        "target", target, ref, ref, c=limits.relative, besides=besides, dtype=_sums(inputs)
    )


def check_index_scores(inputs: IndexerTrainingInputs, backend: str) -> list[Comparison]:
    """Run and judge `indexer_scores`."""
    return [judge_index_scores(inputs, calls.indexer_scores(inputs, backend))]


def judge_index_scores(inputs: IndexerTrainingInputs, scores: Tensor) -> Comparison:
    """The verdict on scores."""
    options: dict[str, Any] = {"topk_length": inputs.attention.topk_length}
    q, k, weights, indices = inputs.operands
    absolute = reference.indexer_scores(q, k, weights.abs(), indices, **options)
    products = reference.indexer_scores(q.abs(), k.abs(), weights.abs(), indices, **options)
    valid = absolute != -torch.inf
    share = tolerances.TRAINED_SCORES[inputs.case.attention.dtype]
    return compare_scores(
        "scores",
        scores,
        reference.indexer_scores(*inputs.operands, **options),
        torch.where(valid, absolute, 0),
        c=share,
        besides=torch.where(valid, products, 0) * min(share, tolerances.TRAINED_SCORE_CUT),
        dtype=_sums(inputs),
    )


def check_index_backward(
    inputs: IndexerTrainingInputs, backend: str, *, deterministic: bool = False
) -> list[Comparison]:
    """Run and judge `indexer_bwd` with a random gradient of the scores."""
    found = calls.indexer_bwd(inputs, backend, deterministic=deterministic)
    return judge_index_backward(inputs, found, backend)


def judge_index_backward(
    inputs: IndexerTrainingInputs, found: tuple[Tensor, ...], backend: str
) -> list[Comparison]:
    """The verdicts on dq_index, dk_index and d_weights of a backend."""
    options: dict[str, Any] = {"topk_length": inputs.attention.topk_length}
    ref = reference.indexer_bwd(*inputs.operands, inputs.grad_scores, **options)
    empty, unnamed = empty_queries(inputs.attention), unnamed_rows(inputs.attention)

    rounds = backend in tolerances.BF16_OPERANDS and inputs.case.attention.dtype == torch.bfloat16
    norms = {name: _limits(inputs, "indexer_bwd", name) for name in GRADIENTS}
    dk_gates = dk_along = ref.dk_gates
    if rounds:
        # A gradient of q . k is rounded to bf16 for the tensor cores.
        dk_along = dk_gates + tolerances.along_limit(*ref.dk_along)
        dk_gates = dk_gates + tolerances.BF16_ROUNDING * ref.dk_spread
        if norms["dq_index"] is not None and norms["dk_index"] is not None:
            of_dq, of_dk = float(ref.dq_index.norm()), float(ref.dk_index.norm())
            norms["dq_index"] = tolerances.dq_limit(norms["dq_index"], of_dq, ref.dq_rounding)
            norms["dk_index"] = tolerances.dk_limit(norms["dk_index"], of_dk, ref.dk_spread)

    def judge(
        name: str,
        out: Tensor,
        expected: Tensor,
        size: Tensor,
        zero_rows: Tensor,
        gates: Tensor | None,
        dtype: torch.dtype,
        along: Tensor | None = None,
    ) -> Comparison:
        verdict = compare(
            name,
            out,
            expected,
            norm_tolerance=norms[name],
            magnitude=size,
            rounding=gates,
            zero_rows=zero_rows,
            dtype=dtype,
        )
        return judge_bias(verdict, out, expected, size, rounding=gates if along is None else along)

    dq, dk, dw = found
    return [
        judge("dq_index", dq, ref.dq_index, ref.dq_size, empty, ref.dq_gates, inputs.q_index.dtype),
        judge(
            "dk_index", dk, ref.dk_index, ref.dk_size, unnamed, dk_gates, _sums(inputs), dk_along
        ),
        judge("d_weights", dw, ref.d_weights, ref.dw_size, empty, None, inputs.weights.dtype),
    ]


def _scores_and_target(inputs: IndexerTrainingInputs) -> tuple[Tensor, Tensor]:
    """The reference's, in the dtype that right kernels hand on; the target NaN where invalid."""
    attention = inputs.attention
    options: dict[str, Any] = {"topk_length": attention.topk_length}
    scores = reference.indexer_scores(*inputs.operands, **options)
    _, lse = forward_results(attention)
    target = reference.attention_target(
        attention.q, attention.kv, lse, attention.indices, **attention.options
    )
    if inputs.case.attention.poison:
        target[scores == -torch.inf] = torch.nan
    dtype = _sums(inputs)
    return attention.lay_out(scores.to(dtype)), attention.lay_out(target.to(dtype))


def check_kl(inputs: IndexerTrainingInputs, backend: str) -> list[Comparison]:
    """Run and judge `indexer_kl`."""
    scores, target = _scores_and_target(inputs)
    ref, size = reference.indexer_kl(scores, target)
    share = tolerances.KL_TOLERANCE[inputs.case.attention.dtype]
    return [
        compare_scores(
            "kl",
            flashdsa.indexer_kl(scores, target, backend=backend),
            ref,
            size,
            c=share,
            besides=torch.full_like(size, share),
            dtype=_sums(inputs),
        )
    ]


def check_kl_backward(inputs: IndexerTrainingInputs, backend: str) -> list[Comparison]:
    """Run and judge `indexer_kl`'s gradient, rows of weight 0 and of negative weight included."""
    scores, target = _scores_and_target(inputs)
    row_weight = torch.tensor([1.5, 0.0, -2.0]).repeat(len(scores) // 3 + 1)[: len(scores)]
    row_weight = row_weight.to(scores)
    found, plain = calls.indexer_kl_bwd(scores, target, row_weight, backend)
    ref = reference.indexer_kl_bwd(scores, target, row_weight)
    p = target.double().masked_fill(scores == -torch.inf, 0)
    p = (p / p.sum(1, keepdim=True)).nan_to_num()
    size = row_weight.double().abs()[:, None] * (p + scores.double().softmax(1))
    return [
        compare(
            "d_scores",
            found,
            ref,
            norm_tolerance=None,
            magnitude=size.nan_to_num(),
            zero_rows=empty_queries(inputs.attention) | (row_weight == 0),
            dtype=_sums(inputs),
        ),
        compare_exact("d_scores, without autograd", plain, found),
    ]
