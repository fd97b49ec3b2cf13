"""The two ways to attend with the same weights: the sparse op, and densely in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashdsa import sparse_mla
from flashdsa.demo.indexer import (
    IndexerActivations,
    LightningIndexer,
    quantise,
    quantise_shared,
    select,
    select_shared,
)
from flashdsa.demo.model import D_LATENT, SM_SCALE, ByteModel, Projections
from flashdsa.demo.paging import PagePool


class SparseOutput(NamedTuple):
    """One sparse forward pass and the choices behind it."""

    logits: Tensor  # [batch, S, 256]
    attended: Tensor  # [batch, S, H, D_LATENT] bf16
    indices: Tensor  # [batch * S, topk] int32, rows of kv
    projections: Projections
    index_inputs: IndexerActivations


def run_sparse(
    model: ByteModel,
    indexer: LightningIndexer,
    tokens: Tensor,
    pool: PagePool | None,
    *,
    num_queries: int,
    topk: int,
    backend: str,
) -> SparseOutput:
    """tokens [batch, T] -> the indexer selects, `sparse_mla` attends in bf16.

    Keys lie in the pages of `pool`, as where text is generated; without one they follow each other
    in reading order and the queries of a window share them, as in training.
    """
    projections = model.project(tokens, num_queries)
    index_inputs = indexer.project(projections.hidden, projections.key_input)
    if pool is None:
        indices = select_shared(quantise_shared(index_inputs), topk, backend)
    else:
        indices = select(quantise(pool, index_inputs), topk, backend)
    q, kv = sparse_operands(projections, pool)
    flat = sparse_mla(
        q, kv, indices, d_v=D_LATENT, sm_scale=SM_SCALE, deterministic=True, backend=backend
    )
    attended = flat.unflatten(0, (len(tokens), num_queries))
    logits = model.read_out(projections.hidden, attended)
    return SparseOutput(logits, attended, indices, projections, index_inputs)


def sparse_operands(projections: Projections, pool: PagePool | None) -> tuple[Tensor, Tensor]:
    """q [batch * S, H, 576] and kv, [num_pages * 64, 576] in page order or, without a pool,
    [batch * T, 576] in reading order, both bf16."""
    kv = projections.kv.bfloat16()
    return projections.q.flatten(0, 1).bfloat16(), pool.place(kv) if pool else kv.flatten(0, 1)


def dense_probabilities(projections: Projections, rows: Tensor) -> Tensor:
    """Causal softmax over every visible key, float32 [batch, H, n, T], of the queries `rows` [n].

    Row r of S is the query at position T - S + r.
    """
    num_queries, window = projections.q.shape[1], projections.kv.shape[1]
    q = projections.q[:, rows].float()
    logits = torch.einsum("bshd,btd->bhst", q, projections.kv.float()) * SM_SCALE
    position = rows + window - num_queries  # [n]
    future = torch.arange(window, device=rows.device) > position[:, None]  # [n, T]
    visible: Tensor = logits.masked_fill(future, -torch.inf)
    return visible.softmax(dim=-1)


def dense_attended(projections: Projections) -> Tensor:
    """Dense attention's latents [batch, S, H, 512], float32."""
    rows = torch.arange(projections.q.shape[1], device=projections.q.device)
    probabilities = dense_probabilities(projections, rows)
    return torch.einsum("bhst,btc->bshc", probabilities, projections.kv[..., :D_LATENT].float())
