"""The trained layer's own tensors through every operation, against the float64 reference."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashdsa import indexer_logits, mla_bwd, prefill_logits, reference, sparse_mla_fwd
from flashdsa.demo.attention import run_sparse, sparse_operands
from flashdsa.demo.device import served_operations
from flashdsa.demo.indexer import (
    IndexerOperands,
    LightningIndexer,
    SharedOperands,
    quantise,
    quantise_shared,
    select_shared,
)
from flashdsa.demo.model import D_LATENT, SM_SCALE, ByteModel
from flashdsa.demo.options import DemoOptions
from flashdsa.demo.paging import PagePool
from flashdsa.demo.result import ErrorRow
from flashdsa.demo.train import cut_windows, language_loss
from flashdsa.verify.compare import Comparison, compare, compare_exact, compare_lse, compare_scores
from flashdsa.verify.tolerances import (
    PRODUCT_TOLERANCE_ANY_DATA,
    SCORE_TOLERANCES,
    tolerance,
)

# The reference takes one query after another; so many keep it within seconds.
ATTENDING_QUERIES = 256
SCORED_QUERIES = 8


class LayerTensors(NamedTuple):
    """One held-out window's operands, as the trained layer makes them."""

    q: Tensor  # [S, H, 576] bf16
    kv: Tensor  # [num_pages * 64, 576] bf16, NaN in spare rows
    indices: Tensor  # [S, topk] int32
    d_out: Tensor  # [S, H, 512] bf16, the language loss's gradient
    paged: IndexerOperands  # of evaluation
    shared: SharedOperands  # of training


def error_table(
    model: ByteModel, indexer: LightningIndexer, text: Tensor, options: DemoOptions
) -> tuple[ErrorRow, ...]:
    """Compare forward, backward and indexer on the first window of text [n] uint8."""
    tensors = _layer_tensors(model, indexer, text, options)
    return (
        *_attention_rows(tensors, options.backend),
        *_indexer_rows(tensors, options),
    )


def _layer_tensors(
    model: ByteModel, indexer: LightningIndexer, text: Tensor, options: DemoOptions
) -> LayerTensors:
    tokens, targets = cut_windows(text, torch.zeros(1, 1, dtype=torch.int64), options.window)
    generator = torch.Generator().manual_seed(options.seed)
    pool = PagePool.shuffled(1, options.window, generator, options.device)
    tokens, targets = tokens.to(options.device), targets.to(options.device)
    output = run_sparse(
        model,
        indexer,
        tokens,
        pool,
        num_queries=options.num_queries,
        topk=options.topk,
        backend=options.backend,
    )
    loss = language_loss(output.logits, targets)
    (d_attended,) = torch.autograd.grad(loss, output.attended)
    q, kv = sparse_operands(output.projections, pool)
    return LayerTensors(
        q.detach(),
        kv.detach(),
        output.indices,
        d_attended.flatten(0, 1),
        quantise(pool, output.index_inputs),
        quantise_shared(output.index_inputs),
    )


def _attention_rows(tensors: LayerTensors, backend: str) -> list[ErrorRow]:
    """All queries run, as in training; of many, the others have no gradient and are not judged."""
    rows = _spread(len(tensors.q), ATTENDING_QUERIES).to(tensors.q.device)
    q, kv, indices = tensors.q, tensors.kv, tensors.indices
    dO = torch.zeros_like(tensors.d_out).index_copy(0, rows, tensors.d_out[rows])
    every = sparse_mla_fwd(q, kv, indices, d_v=D_LATENT, sm_scale=SM_SCALE, backend=backend)
    gradients = mla_bwd(
        q,
        kv,
        dO,
        every[1],
        every[0],
        indices,
        sm_scale=SM_SCALE,
        deterministic=True,
        backend=backend,
    )
    (O, lse), dQ, dKV = (one[rows] for one in every), gradients[0][rows], gradients[1]
    q, indices, dO = q[rows], indices[rows], dO[rows]
    keywords = {"d_v": D_LATENT, "sm_scale": SM_SCALE}
    O64, lse64 = reference.sparse_mla_fwd(q, kv, indices, **keywords)
    saved = (q, kv, dO, lse, O, indices)
    dQ64, dKV64, _ = reference.mla_bwd(*saved, sm_scale=SM_SCALE)
    dQ_size, dKV_size = reference.mla_bwd_magnitude(*saved, sm_scale=SM_SCALE)
    O_size = reference.sparse_mla_fwd_magnitude(q, kv, indices, **keywords)
    lse_limits = tolerance("sparse_mla_fwd", "lse", q.dtype)
    assert lse_limits.absolute is not None and lse_limits.relative is not None
    unnamed = torch.ones(kv.shape[0], dtype=torch.bool)
    unnamed[indices[indices >= 0].long().cpu()] = False
    # The norm rule is for standard-normal data; these are a trained layer's, so rows are judged.
    comparisons = [
        ("sparse_mla_fwd", O, compare("O", O, O64, norm_tolerance=None, magnitude=O_size)),
        (
            "sparse_mla_fwd",
            lse,
            compare_lse(
                "lse", lse, lse64, absolute=lse_limits.absolute, relative=lse_limits.relative
            ),
        ),
        ("mla_bwd", dQ, compare("dQ", dQ, dQ64, norm_tolerance=None, magnitude=dQ_size)),
        (
            "mla_bwd",
            dKV,
            compare("dKV", dKV, dKV64, norm_tolerance=None, magnitude=dKV_size, zero_rows=unnamed),
        ),
    ]
    return [_row(operation, out, verdict) for operation, out, verdict in comparisons]


def _indexer_rows(tensors: LayerTensors, options: DemoOptions) -> list[ErrorRow]:
    rows = _spread(len(tensors.indices), SCORED_QUERIES).to(tensors.q.device)
    ids = tensors.indices[rows]
    return [
        *_paged_rows(tensors.paged, rows, ids, options),
        *_shared_rows(tensors.shared, rows, options),
    ]


def _paged_rows(
    operands: IndexerOperands, rows: Tensor, ids: Tensor, options: DemoOptions
) -> list[ErrorRow]:
    """Scores of the queries `rows` [n] over pages, and ids [n, topk], what they chose by them."""
    some = operands._replace(
        q_index_fp8=operands.q_index_fp8[rows],
        weights=operands.weights[rows],
        seq_lens=operands.seq_lens[rows],
        block_table=operands.block_table[rows],
    )
    longest = int(some.seq_lens.max())
    scores = indexer_logits(*some, longest, backend=options.backend)
    verdict = _judge_scores(
        scores,
        reference.indexer_logits(*some, longest),
        reference.indexer_score_magnitude(*some, longest),
        reference.indexer_product_magnitude(*some, longest),
        _backend_of("dsa_topk_indexer", options),
    )
    expected = reference.dsa_topk_indexer(*some, ids.shape[1], scores=scores)
    return [
        _row("indexer_logits", scores, verdict),
        _row("dsa_topk_indexer", ids, _judge_sets(ids, expected)),
    ]


def _shared_rows(operands: SharedOperands, rows: Tensor, options: DemoOptions) -> list[ErrorRow]:
    """Scores of the queries `rows` [n] over shared keys, and what they choose by them."""
    some = operands._replace(
        q_index_fp8=operands.q_index_fp8[rows],
        weights=operands.weights[rows],
        starts=operands.starts[rows],
        ends=operands.ends[rows],
    )
    shared, k_scale = some[:-1], some.k_scale
    scores = prefill_logits(*shared, k_scale=k_scale, backend=options.backend)
    outside = scores.cpu() == -torch.inf
    size = reference.prefill_score_magnitude(*shared, k_scale=k_scale)
    products = reference.prefill_product_magnitude(*shared, k_scale=k_scale)
    verdict = _judge_scores(
        scores,
        reference.prefill_logits(*shared, k_scale=k_scale),
        size.masked_fill(outside, 0),
        products.masked_fill(outside, 0),
        _backend_of("dsa_topk_prefill", options),
    )
    ids = select_shared(some, options.topk, options.backend)
    expected = reference.dsa_topk_prefill(scores, some.starts, some.ends, options.topk)
    return [
        _row("prefill_logits", scores, verdict),
        _row("dsa_topk_prefill", ids, _judge_sets(ids, expected)),
    ]


def _judge_scores(
    scores: Tensor, expected: Tensor, size: Tensor, products: Tensor, backend: str
) -> Comparison:
    """Against float64; size and products: what a score is a sum of, as the reference has them."""
    # Tensor cores add the products, of data that are not standard-normal.
    besides = None if backend == "cpu" else PRODUCT_TOLERANCE_ANY_DATA * products
    limit = SCORE_TOLERANCES[backend]
    return compare_scores("scores", scores, expected, size, c=limit, besides=besides)


def _judge_sets(ids: Tensor, expected: Tensor) -> Comparison:
    """A set per query: its order is the backend's own."""
    return compare_exact("chosen keys", ids.sort().values, expected.sort().values)


def _backend_of(operation: str, options: DemoOptions) -> str:
    """The backend that served the operation."""
    served = served_operations(options.device, options.backend)
    return next(one.backend for one in served if one.operation == operation)


def _spread(num_queries: int, most: int) -> Tensor:
    """At most so many of the queries, evenly: int64, ascending."""
    return torch.linspace(0, num_queries - 1, min(num_queries, most)).round().long()


def _row(operation: str, out: Tensor, verdict: Comparison) -> ErrorRow:
    return ErrorRow(
        operation,
        verdict.output,
        str(out.dtype).removeprefix("torch."),
        verdict.norm_error,
        verdict.row_error,
        0.0 if verdict.row_limit is None else verdict.row_limit,
        verdict.passed,
    )
