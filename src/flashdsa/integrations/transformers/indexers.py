"""The models' indexer with bounded memory: by the model's own scores, or in fp8.

Several queries of a sequence share its keys and are selected for by `dsa_topk_prefill`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flashdsa.dispatch.registration import is_served
from flashdsa.errors import UnsupportedError
from flashdsa.integrations.transformers.attention import marked_visible
from flashdsa.integrations.transformers.index_keys import ATTRIBUTE, quantise
from flashdsa.integrations.transformers.releases import by_meaning, require_parameters, unknown
from flashdsa.integrations.transformers.seen_keys import SeenKeys, allowed, numbered
from flashdsa.ops.index_k_cache import quantize_index_k, quantize_index_q
from flashdsa.ops.indexer import (
    DSA_TOPK_INDEXER,
    TopkIndexerOperands,
    dsa_topk_indexer,
    topk_indices,
)
from flashdsa.ops.prefill import DSA_TOPK_PREFILL, TopkPrefillOperands, dsa_topk_prefill
from flashdsa.problem import INDEX_HEAD_DIM

ROTARY: Mapping[str, str] = {
    "DeepseekV32Indexer": "apply_rotary_pos_emb",
    "GlmMoeDsaIndexer": "apply_rotary_pos_emb_interleave",
}
"""Function of the module that rotates queries and keys, by the indexer's class."""
PARAMETERS = (
    "hidden_states",
    "q_resid",
    "position_embeddings",
    "attention_mask",
    "position_ids",
    "cache",
)
FEW_QUERIES = 32
"""Most queries of a sequence that are rows of `dsa_topk_indexer`, each with its own choice: the
tokens of a draft, whose keys are the only new ones."""
CHUNK_ELEMENTS = 2**26
"""Scores of heads, queries and keys that are held at once (fp32: 256 MiB)."""


def require_known(indexer: Any, name: str) -> None:
    """Raise UnsupportedError for an indexer whose forward is not the one that is replaced, or whose
    keys the function of this name in `INDEXERS` does not take."""
    kind, advice = type(indexer), "; use indexer='model'"
    if kind.__name__ not in ROTARY:
        raise unknown(f"indexer: expected one of {', '.join(ROTARY)}; got {kind.__name__}{advice}")
    require_parameters(kind, "forward", PARAMETERS, advice)
    if name == "fp8" and indexer.head_dim != INDEX_HEAD_DIM:
        raise UnsupportedError(
            f"indexer='fp8': expected index_head_dim {INDEX_HEAD_DIM}; got {indexer.head_dim}"
        )


@by_meaning
def exact_forward(
    indexer: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    position_ids: Tensor | None = None,
    cache: Any = None,
) -> Tensor:
    """The indexer's choice from its own scores.

    `dsa_topk_prefill` makes it if that serves the model's dtype and heads and each query sees
    neighbouring keys; otherwise torch makes it for some queries at a time. Of one query the scores
    are few and the host's time is what counts: the model's own forward makes it.

    Args: of the model's forward; attention_mask is (B, S, T).

    Returns:
        (B, S, topk) int32 positions; what the mask forbids is -1 or is masked later. Of several
        queries ties go to the smallest position.
    """
    if hidden_states.shape[1] == 1 and attention_mask.shape[-1] > indexer.index_topk:
        own = hidden_states, q_resid, position_embeddings, attention_mask, position_ids, cache
        chosen: Tensor = type(indexer).forward(indexer, *own)
        return chosen
    with torch.no_grad():
        q, k, weights = _project(indexer, hidden_states, q_resid, position_embeddings, cache)
        batch, num_queries, num_heads, _ = q.shape
        num_keys = k.shape[1]
        if num_keys <= indexer.index_topk:
            every = torch.arange(num_keys, dtype=torch.int32, device=k.device)
            return every.expand(batch, num_queries, num_keys)
        if not torch.compiler.is_compiling():
            seen = numbered(attention_mask, indexer.layer_idx, batch)
            scaled = weights * indexer.softmax_scale
            shared = _shared_operands(q, k, scaled, seen, indexer.index_topk)
            if shared is not None:
                return marked_visible(_select_shared(shared, seen))
        keys = k.transpose(-1, -2).float().unsqueeze(1)
        step = max(1, CHUNK_ELEMENTS // (batch * num_heads * num_keys))
        parts = []
        for first in range(0, num_queries, step):
            rows = slice(first, first + step)
            # Autocast would round the scores.
            with torch.autocast(k.device.type, enabled=False):
                scores = torch.relu(torch.matmul(q[:, rows].float(), keys) * indexer.softmax_scale)
                scores = torch.matmul(weights[:, rows].float().unsqueeze(-2), scores).squeeze(-2)
            may = allowed(attention_mask[:, rows])
            scores = scores.masked_fill(~may, -torch.inf).flatten(0, 1)
            lengths = torch.full((len(scores),), num_keys, dtype=torch.int32, device=k.device)
            positions = topk_indices(scores.contiguous(), lengths, indexer.index_topk)
            is_seen = scores.gather(1, positions.clamp_min(0).long()).isneginf().logical_not()
            positions = torch.where(is_seen, positions, -1)
            parts.append(positions.view(batch, -1, indexer.index_topk))
        return torch.cat(parts, dim=1)


@by_meaning
def fp8_forward(
    indexer: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    position_ids: Tensor | None = None,
    cache: Any = None,
) -> Tensor:
    """The indexer's choice from fp8 keys and queries: of several queries a sequence by
    `flashdsa.dsa_topk_prefill`, of one by `flashdsa.dsa_topk_indexer`.

    The model's cache keeps its own keys. The quantised ones stay with it, so that only new tokens
    are quantised, also behind tokens that were rejected; a cache that others changed, or another
    mask of earlier tokens, quantises all again. Keys that no query sees (padding, holes) take no
    part. Where a query sees others than neighbours among the rest, `exact_forward` chooses.

    Args, Returns: as for `exact_forward`; what the mask forbids is not among them.
    """
    with torch.no_grad():
        batch, num_queries = hidden_states.shape[:2]
        layer = None if cache is None else cache.layers[indexer.layer_idx]
        seen = numbered(attention_mask, indexer.layer_idx, batch)
        if not seen.has_ranges():
            if layer is not None:
                layer.__dict__.pop(ATTRIBUTE, None)  # it misses what is appended now
            own = hidden_states, q_resid, position_embeddings, attention_mask, position_ids, cache
            exact: Tensor = exact_forward(indexer, *own)
            return exact
        kept = None
        if layer is not None and not torch.compiler.is_compiling():
            kept = getattr(layer, ATTRIBUTE, None)
            if kept is not None and not kept.continues(layer, seen, num_queries):
                kept = None
        q, k, weights = _queries_and_keys(
            indexer, hidden_states, q_resid, position_embeddings, indexer.softmax_scale
        )
        every = k if layer is None else cache.update_indexer(k, indexer.layer_idx)
        if kept is not None:
            kept.append(_quantisable(k), layer, seen)
        else:
            kept = quantise(_quantisable(every), seen, layer)
            if layer is not None:
                setattr(layer, ATTRIBUTE, kept)
        lengths = seen.lengths.flatten()
        fp8, folded = quantize_index_q(_quantisable(q).flatten(0, 1), weights.flatten(0, 1))
        chosen = lengths.new_empty(len(fp8), indexer.index_topk)
        table = kept.table
        if num_queries > 1:
            table = table.repeat_interleave(num_queries, dim=0)
        few = TopkIndexerOperands(fp8, kept.cache, folded, lengths, table, chosen)
        is_few = num_queries <= FEW_QUERIES and seen.has_prefixes()
        if num_queries == 1 or (is_few and _serves_positions(few)):
            dsa_topk_indexer(*few.inputs, chosen, ids="position")
            return marked_visible(seen.positions_of(chosen.view(batch, num_queries, -1)))
        compacted = _quantisable(seen.compacted(every)).flatten(0, 1)
        keys, k_scale = quantize_index_k(compacted)
        starts, ends = _rows_of(seen)
        shared = TopkPrefillOperands(fp8, keys, folded, ends, chosen, starts, k_scale)
        return marked_visible(_select_shared(shared, seen))


INDEXERS: Mapping[str, Callable[..., Tensor]] = {"exact": exact_forward, "fp8": fp8_forward}
"""Forwards by `enable`'s name."""


def _project(
    indexer: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    cache: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, S, H, D), all keys (B, T, D) of the cache, head weights (B, S, H) fp32."""
    q, k, weights = _queries_and_keys(indexer, hidden_states, q_resid, position_embeddings, 1.0)
    if cache is not None:
        k = cache.update_indexer(k, indexer.layer_idx)
    return q, k, weights


def _queries_and_keys(
    indexer: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens' own queries (B, S, H, D), keys (B, S, D), head weights (B, S, H) fp32, which
    `scale` multiplies."""
    # A class derived from the model's (torchtitan makes some) is in another module.
    module = sys.modules[type(indexer).forward.__module__]
    rotate = getattr(module, ROTARY[type(indexer).__name__])
    cos, sin = position_embeddings
    rope = indexer.qk_rope_head_dim
    q = indexer.wq_b(q_resid).view(*hidden_states.shape[:2], indexer.n_heads, indexer.head_dim)
    k = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    q_rotated, k_rotated = rotate(q[..., :rope], k[..., :rope], cos, sin, unsqueeze_dim=2)
    q = torch.cat([q_rotated, q[..., rope:]], dim=-1)
    k = torch.cat([k_rotated, k[..., rope:]], dim=-1).squeeze(2)
    projected = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype))
    return q, k, projected.float() * (scale * indexer.n_heads**-0.5)


def _shared_operands(
    q: Tensor, k: Tensor, weights: Tensor, seen: SeenKeys, topk: int
) -> TopkPrefillOperands | None:
    """Return operands of `dsa_topk_prefill` with all sequences' keys one after the other.

    None if no backend serves them, or a query sees keys that are no neighbours; this last check
    waits for the device.

    Args:
        q: (B, S, H, D). k: (B, T, D). weights: (B, S, H) fp32.
        seen: numbers of the keys; rows of the operands are in their order.
    """
    batch, num_queries, _, dim = q.shape
    if dim != INDEX_HEAD_DIM or k.dtype != q.dtype:
        return None
    starts, ends = _rows_of(seen)
    chosen = ends.new_empty(batch * num_queries, topk)
    flat = q.flatten(0, 1), seen.compacted(k).flatten(0, 1), weights.flatten(0, 1)
    operands = TopkPrefillOperands(*flat, ends, chosen, starts)
    if not is_served(DSA_TOPK_PREFILL, operands, "auto"):
        return None
    return operands if seen.has_ranges() else None


def _serves_positions(operands: TopkIndexerOperands) -> bool:
    """Whether a backend picks positions for these rows."""
    return is_served(DSA_TOPK_INDEXER, operands, "auto", positions=True, check=True)


def _rows_of(seen: SeenKeys) -> tuple[Tensor, Tensor]:
    """Return the first row (B * S,) int32 of all sequences' keys that each query sees, and the row
    after the last one; the keys are in the order of their numbers."""
    batch, num_keys = seen.number.shape
    sequence = torch.arange(batch, device=seen.first.device)[:, None]
    starts = (seen.first + sequence * num_keys).flatten().to(torch.int32)
    return starts, starts + seen.lengths.flatten()


def _select_shared(operands: TopkPrefillOperands, seen: SeenKeys) -> Tensor:
    """Return positions (B, S, topk) int32, each in its sequence, -1 where a query sees too few
    keys."""
    q, k, weights, ends, chosen, starts, k_scale, _ = operands
    dsa_topk_prefill(q, k, weights, starts, ends, chosen, k_scale=k_scale)
    batch, num_keys = seen.number.shape
    rows = chosen.view(batch, -1, chosen.shape[1])
    sequence = torch.arange(batch, dtype=torch.int32, device=rows.device)[:, None, None]
    return seen.positions_of((rows - sequence * num_keys).masked_fill_(rows < 0, -1))


def _quantisable(x: Tensor) -> Tensor:
    """Return `x` in a dtype that the quantisation takes."""
    return x if x.dtype in (torch.bfloat16, torch.float32) else x.float()
