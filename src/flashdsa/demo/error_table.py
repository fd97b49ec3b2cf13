"""The trained layer's own tensors through every operation, against the float64 reference."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashdsa import indexer_logits, mla_bwd, reference, sparse_mla_fwd
from flashdsa.demo.attention import run_sparse, sparse_operands
from flashdsa.demo.indexer import IndexerOperands, LightningIndexer, quantise
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

# The reference scores one token at a time; this many queries keep it within seconds.
SCORED_QUERIES = 8


class LayerTensors(NamedTuple):
    """One held-out window's operands, as the trained layer makes them."""

    q: Tensor  # [S, H, 576] bf16
    kv: Tensor  # [num_pages * 64, 576] bf16, NaN in spare rows
    indices: Tensor  # [S, topk] int32
    d_out: Tensor  # [S, H, 512] bf16, the language loss's gradient
    operands: IndexerOperands


def error_table(
    model: ByteModel, indexer: LightningIndexer, text: Tensor, options: DemoOptions
) -> tuple[ErrorRow, ...]:
    """Compare forward, backward and indexer on the first window of text [n] uint8."""
    tensors = _layer_tensors(model, indexer, text, options)
    return (
        *_attention_rows(tensors, options.backend),
        *_indexer_rows(tensors, options.backend),
    )


def _layer_tensors(
    model: ByteModel, indexer: LightningIndexer, text: Tensor, options: DemoOptions
) -> LayerTensors:
    tokens, targets = cut_windows(text, torch.zeros(1, 1, dtype=torch.int64), options.window)
    generator = torch.Generator().manual_seed(options.seed)
    pool = PagePool.shuffled(1, options.window, generator)
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
    operands = quantise(pool, output.index_inputs)
    return LayerTensors(q.detach(), kv.detach(), output.indices, d_attended.flatten(0, 1), operands)


def _attention_rows(tensors: LayerTensors, backend: str) -> list[ErrorRow]:
    q, kv, indices, dO, _ = tensors
    keywords = {"d_v": D_LATENT, "sm_scale": SM_SCALE}
    O, lse = sparse_mla_fwd(q, kv, indices, d_v=D_LATENT, sm_scale=SM_SCALE, backend=backend)
    O64, lse64 = reference.sparse_mla_fwd(q, kv, indices, **keywords)
    saved = (q, kv, dO, lse, O, indices)
    dQ, dKV = mla_bwd(*saved, sm_scale=SM_SCALE, backend=backend)[:2]
    dQ64, dKV64, _ = reference.mla_bwd(*saved, sm_scale=SM_SCALE)
    dQ_size, dKV_size = reference.mla_bwd_magnitude(*saved, sm_scale=SM_SCALE)
    O_size = reference.sparse_mla_fwd_magnitude(q, kv, indices, **keywords)
    lse_limits = tolerance("sparse_mla_fwd", "lse", q.dtype)
    assert lse_limits.absolute is not None and lse_limits.relative is not None
    unnamed = torch.ones(kv.shape[0], dtype=torch.bool)
    unnamed[indices[indices >= 0].long()] = False
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


def _indexer_rows(tensors: LayerTensors, backend: str) -> list[ErrorRow]:
    topk = tensors.indices.shape[1]
    rows = torch.linspace(0, len(tensors.indices) - 1, SCORED_QUERIES).long()
    rows = rows.unique()
    operands = tensors.operands
    some = operands._replace(
        q_index_fp8=operands.q_index_fp8[rows],
        weights=operands.weights[rows],
        seq_lens=operands.seq_lens[rows],
        block_table=operands.block_table[rows],
    )
    longest = int(some.seq_lens.max())
    scores = indexer_logits(*some, longest, backend=backend)
    score_limit = SCORE_TOLERANCES.get(backend, SCORE_TOLERANCES["cpu"])
    besides = None
    if backend not in ("auto", "cpu"):  # tensor cores, and data that are not standard-normal
        products = reference.indexer_product_magnitude(*some, longest)
        besides = PRODUCT_TOLERANCE_ANY_DATA * products
    score_verdict = compare_scores(
        "scores",
        scores,
        reference.indexer_logits(*some, longest),
        reference.indexer_score_magnitude(*some, longest),
        c=score_limit,
        besides=besides,
    )
    ids = tensors.indices[rows]
    ids64 = reference.dsa_topk_indexer(*some, topk, scores=scores)
    # A set per query: its order is the backend's own.
    set_verdict = compare_exact("chosen keys", ids.sort().values, ids64.sort().values)
    return [
        _row("indexer_logits", scores, score_verdict),
        _row("dsa_topk_indexer", ids, set_verdict),
    ]


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
