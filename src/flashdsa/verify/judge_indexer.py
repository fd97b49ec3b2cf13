"""Run the indexer's public operations, over pages and over shared keys, and judge every output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.problem import PAGE_SIZE
from flashdsa.verify import calls
from flashdsa.verify.compare import Comparison, compare_exact, compare_scores
from flashdsa.verify.indexer_cases import IndexerInputs
from flashdsa.verify.prefill_cases import PrefillInputs
from flashdsa.verify.tolerances import PRODUCT_TOLERANCE, SCORE_TOLERANCES, TRAINED_SCORE_CUT

ASCENDING_POSITION = ("cpu", "torch", "triton", "emulate-triton")
"""Backends whose default order is ascending token position; the order of others is their own."""


def _canonical(ids: Tensor, counts: list[int]) -> Tensor:
    """Each row's first `counts[b]` ids in ascending order; what follows them stays in place."""
    ids = ids.detach().clone()
    for b, count in enumerate(counts):
        ids[b, :count] = ids[b, :count].sort().values
    return ids


def judge_selection(output: str, ids: Tensor, expected: Tensor, *, exact_order: bool) -> Comparison:
    """Judge ids `[B, topk]` by the reference's: as they stand, or as multisets before the -1s."""
    if not exact_order and ids.shape == expected.shape:
        counts = (expected != -1).sum(1).tolist()
        ids, expected = _canonical(ids, counts), _canonical(expected, counts)
    return compare_exact(output, ids, expected)


def check_scores(inputs: IndexerInputs, backend: str) -> tuple[Tensor, list[Comparison]]:
    """Run and judge `indexer_logits`; the scores come back for judging the selection."""
    scores = calls.indexer_logits(inputs, backend)
    return scores, [
        judge_scores(
            inputs.operands_of_rows,
            inputs.max_len,
            scores,
            backend,
            table_page_size=inputs.case.table_page_size,
        )
    ]


def judge_scores(
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    max_len: int,
    scores: Tensor,
    backend: str,
    *,
    table_page_size: int = PAGE_SIZE,
) -> Comparison:
    """The verdict on a backend's scores (B, max_len) of the indexer's operands, a row each."""
    besides = None
    given = (*operands, max_len, table_page_size)
    if backend != "cpu":  # tensor cores add the fp8 products
        besides = PRODUCT_TOLERANCE * reference.indexer_logits(*given, absolute="products")
    return compare_scores(
        "scores",
        scores,
        reference.indexer_logits(*given),
        reference.indexer_logits(*given, absolute="weights"),
        c=SCORE_TOLERANCES[backend],
        besides=besides,
    )


def check_selection(inputs: IndexerInputs, scores: Tensor, backend: str) -> list[Comparison]:
    """Run `dsa_topk_indexer` into a poisoned buffer; judge it by the backend's own scores."""
    case = inputs.case
    ids = calls.dsa_topk_indexer(inputs, backend)
    expected = reference.dsa_topk_indexer(
        *inputs.operands,
        case.topk,
        positions=case.positions,
        scores=scores,
        candidates=inputs.candidates,
        **case.choices,
    )
    exact_order = case.sorted or backend in ASCENDING_POSITION
    return [judge_selection("topk_indices", ids, expected, exact_order=exact_order)]


def check_bound(inputs: IndexerInputs, backend: str) -> list[Comparison]:
    """Run `warm_up`, and `bind` on a part of the cache: the ids of the call with checks."""
    case = inputs.case
    flashdsa.warm_up("dsa_topk_indexer", H=case.num_heads, topk=case.topk, backend=backend)
    expected, ids = calls.dsa_topk_indexer(inputs, backend), inputs.output_buffer()
    q, cache, weights, lengths, table = inputs.operands
    some = q, cache[:1], weights, lengths, table[:, :1].contiguous(), inputs.output_buffer()
    serve = flashdsa.bind("dsa_topk_indexer", some, backend=backend)
    serve((*inputs.operands, ids))
    return [compare_exact("topk_indices", ids, expected)]


def check_topk(
    scores: Tensor, lengths: Tensor, topk: int, backend: str, *, sorted: bool = False
) -> list[Comparison]:
    """Run and judge `topk_indices` on any scores `[B, max_len]`."""
    positions = flashdsa.topk_indices(scores, lengths, topk, sorted=sorted, backend=backend)
    expected = reference.topk_indices(scores, lengths, topk, sorted=sorted)
    exact_order = sorted or backend in ASCENDING_POSITION
    return [judge_selection("positions", positions, expected, exact_order=exact_order)]


def check_quantize_k(k: Tensor, backend: str, **rule: Any) -> list[Comparison]:
    """Run and judge `quantize_index_k`: bytes and scales, bit for bit. `rule`: mxfp4, scale."""
    fp8, scale = flashdsa.quantize_index_k(k, **rule, backend=backend)
    codes, ref_scale = reference.quantize_index_k(k, **rule)
    return _judge_bytes("fp8", fp8, codes, "scale", scale, ref_scale)


def check_quantize_q(q: Tensor, weights: Tensor, backend: str, **rule: Any) -> list[Comparison]:
    """Run and judge `quantize_index_q`: bytes and folded weights, bit for bit."""
    fp8, folded = flashdsa.quantize_index_q(q, weights, **rule, backend=backend)
    codes, ref_folded = reference.quantize_index_q(q, weights, **rule)
    return _judge_bytes("fp8", fp8, codes, "folded weights", folded, ref_folded)


def check_cache_write(
    k: Tensor, slots: Tensor, cache: Tensor, backend: str, *, scale: str = "fp32"
) -> list[Comparison]:
    """Run and judge `write_index_k_cache`: every byte of the cache. The cache is not changed."""
    written = cache.clone()
    flashdsa.write_index_k_cache(k, slots, written, scale=scale, backend=backend)
    expected = reference.write_index_k_cache(k, slots, cache, scale=scale)
    return [compare_exact("cache", written.view(torch.uint8), expected)]


def check_cache_read(cache: Tensor, slots: Tensor, backend: str) -> list[Comparison]:
    """Run and judge `read_index_k_cache`: bytes and scales, bit for bit."""
    fp8, scale = flashdsa.read_index_k_cache(cache, slots, backend=backend)
    codes, ref_scale = reference.read_index_k_cache(cache, slots)
    return _judge_bytes("fp8", fp8, codes, "scale", scale, ref_scale)


def _judge_bytes(
    fp8_name: str, fp8: Tensor, codes: Tensor, scale_name: str, scale: Tensor, ref_scale: Tensor
) -> list[Comparison]:
    return [
        compare_exact(fp8_name, fp8, codes.view(torch.float8_e4m3fn)),
        compare_exact(scale_name, scale, ref_scale),
    ]


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
