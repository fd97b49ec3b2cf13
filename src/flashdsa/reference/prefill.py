"""The indexer over shared keys in float64: every query's scores, and a plain sort of its range."""

from typing import Literal

import torch
from torch import Tensor

from flashdsa.reference.indexer import two_levels
from flashdsa.reference.quant import decode_e4m3, f64, full

__all__ = ["causal_ranges", "dsa_topk_prefill", "expand_blocks", "prefill_logits"]


def _values(x: Tensor) -> Tensor:
    if x.dtype == torch.float8_e4m3fn:
        return decode_e4m3(x)
    return f64(x)


def prefill_logits(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    starts: Tensor | None,
    ends: Tensor,
    *,
    k_scale: Tensor | None = None,
    absolute: Literal["weights", "products"] | None = None,
) -> Tensor:
    """`score[s, t] = k_scale[t] * sum_h weights[s, h] * relu(q[s, h] . k[t])`, float64 `[S, S_kv]`.

    q `[S, H, 128]`, k `[S_kv, 128]`, weights `[S, H]`, k_scale `[S_kv]` or None: 1. Outside
    `[starts, ends)` of a query it is -inf. `absolute`: see `indexer_logits`.
    """
    q, k = _values(q_index), _values(k_index)
    w = f64(weights)
    w = w.abs() if absolute else w
    if absolute == "products":
        q, k = q.abs(), k.abs()
    scale = full(k, k.shape[:1], 1.0) if k_scale is None else _values(k_scale)
    scores = full(q, (q.shape[0], k.shape[0]), -torch.inf)
    for s in range(q.shape[0]):
        low, high = 0 if starts is None else int(starts[s]), int(ends[s])
        dots = q[s] @ k[low:high].T  # [H, keys]
        scores[s, low:high] = scale[low:high] * (w[s][:, None] * torch.relu(dots)).sum(dim=0)
    return scores


def dsa_topk_prefill(
    scores: Tensor,
    starts: Tensor | None,
    ends: Tensor,
    topk: int,
    *,
    sorted: bool = False,
    block: int = 1,
    candidates: Tensor | None = None,
) -> Tensor:
    """The rows of each query's best keys, int32 `[S, topk]`, then -1.

    `scores` `[S, S_kv]` are the reference's, or what a kernel computed itself: a selection is
    judged by the scores that it was made from. The order is ascending row, or with `sorted`
    descending score (ties by row); NaN ranks last. `block` and `candidates` are those of
    `two_levels`, of positions behind `starts`.
    """
    picked = torch.full((scores.shape[0], topk), -1, dtype=torch.int32)
    table = f64(scores).tolist()
    for s, row in enumerate(table):
        low, high = 0 if starts is None else int(starts[s]), int(ends[s])
        listed = None if candidates is None else candidates[s].tolist()
        seen = list(range(high - low))
        best = two_levels(row[low:high], seen, topk, block, listed, high - low, by_score=sorted)
        if block == 1 or listed is not None:
            best = [low + t for t in best]
        picked[s, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return picked


def expand_blocks(
    indices: list[list[int]], block: int, positions: list[int] | None = None
) -> list[list[int]]:
    """Rows of each query's blocks, and with `positions` those up to its own of the incomplete block
    that it is in: `block - 1` further columns; -1 where there is no row."""
    table = []
    for s, ids in enumerate(indices):
        rows = [i * block + r if i >= 0 else -1 for i in ids for r in range(block)]
        if positions is not None:
            tail = list(range((positions[s] + 1) // block * block, positions[s] + 1))
            rows += tail + [-1] * (block - 1 - len(tail))
        table.append(rows)
    return table


def causal_ranges(
    cu_seqlens_q: list[int], cu_seqlens_k: list[int], ratio: int = 1
) -> list[tuple[int, int]]:
    """(start, end) of each query: the last query of a sequence sees all its keys, the one before
    it all but the last, and so on; one without a key has an empty range at the sequence's start.

    Keys are entries of `ratio` tokens, sequence by sequence; `cu_seqlens_k` counts tokens.
    """
    ranges = []
    first_entry = 0
    for b in range(len(cu_seqlens_q) - 1):
        first_key, last_key = cu_seqlens_k[b], cu_seqlens_k[b + 1]
        for query in range(cu_seqlens_q[b], cu_seqlens_q[b + 1]):
            unseen = cu_seqlens_q[b + 1] - 1 - query
            tokens = max(0, last_key - unseen - first_key)
            ranges.append((first_entry, first_entry + tokens // ratio))
        first_entry += (last_key - first_key) // ratio
    return ranges
