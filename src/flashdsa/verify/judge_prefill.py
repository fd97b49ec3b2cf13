"""Run the indexer over shared keys on a backend and judge it against the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa import reference
from flashdsa.verify import calls
from flashdsa.verify.compare import Comparison, compare_scores
from flashdsa.verify.judge_indexer import ASCENDING_POSITION, judge_selection
from flashdsa.verify.prefill_cases import PrefillInputs
from flashdsa.verify.tolerances import PRODUCT_TOLERANCE, SCORE_TOLERANCES, TRAINED_SCORE_CUT


def check_prefill_scores(inputs: PrefillInputs, backend: str) -> tuple[Tensor, list[Comparison]]:
    """Run and judge `prefill_logits`; the scores come back for judging the selection."""
    operands, options = inputs.operands, inputs.options
    scores = calls.prefill_logits(inputs, backend)
    besides = None
    if backend != "cpu":
        fp8 = inputs.case.dtype == torch.float8_e4m3fn
        share = PRODUCT_TOLERANCE if fp8 else TRAINED_SCORE_CUT
        products = reference.prefill_logits(*operands, absolute="products", **options)
        besides = share * _inside(products)
    verdict = compare_scores(
        "scores",
        scores,
        reference.prefill_logits(*operands, **options),
        _inside(reference.prefill_logits(*operands, absolute="weights", **options)),
        c=SCORE_TOLERANCES[backend],
        besides=besides,
    )
    return scores, [verdict]


def check_prefill_selection(
    inputs: PrefillInputs, scores: Tensor, backend: str
) -> list[Comparison]:
    """Run `dsa_topk_prefill` into a poisoned buffer; judge it by the backend's own scores."""
    case = inputs.case
    ids = calls.dsa_topk_prefill(inputs, backend)
    rows = inputs.starts, inputs.ends
    expected = reference.dsa_topk_prefill(scores, *rows, case.topk, **inputs.choices)
    exact_order = case.sorted or backend in ASCENDING_POSITION
    return [judge_selection("topk_indices", ids, expected, exact_order=exact_order)]


def _inside(sizes: Tensor) -> Tensor:
    """0 where the scores are -inf."""
    return torch.where(sizes == -torch.inf, 0, sizes)
