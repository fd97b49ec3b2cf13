"""The top-k indexer in float64: a token's score, and the choice among scores by a plain sort.

Shapes: B queries, H indexer heads, pages of 64 tokens; position t of row b is the token
`block_table[b, t // n] * n + t % n` of a table whose entries name n tokens, `table_page_size`.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from flashdsa.reference.quant import PAGE_TOKENS, decode_e4m3, f64, full, page_tokens

__all__ = ["dsa_topk_indexer", "indexer_logits", "topk_indices"]


def _candidates(
    seq_lens: Tensor, block_table: Tensor, num_pages: int, table_page_size: int
) -> list[tuple[Tensor, Tensor]]:
    """Each row's positions and token ids, int64, in order of position.

    A negative length counts as 0, a table too narrow for the length clamps it, and the positions
    of a page outside the cache are left out.
    """
    rows = []
    n, num_tokens = table_page_size, num_pages * PAGE_TOKENS
    for length, pages in zip(seq_lens.tolist(), block_table.long(), strict=True):
        t = torch.arange(min(max(length, 0), len(pages) * n), device=pages.device)
        tokens = pages[t // n] * n + t % n
        inside = (tokens >= 0) & (tokens < num_tokens)
        rows.append((t[inside], tokens[inside]))
    return rows


def indexer_logits(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_len: int,
    table_page_size: int = PAGE_TOKENS,
    *,
    absolute: Literal["weights", "products"] | None = None,
) -> Tensor:
    """`score[t] = scale[t] * sum_h weights[b, h] * relu(q[b, h] . k[t])`, float64 `[B, max_len]`.

    q `[B, H, 128]` e4m3, cache `[num_pages, 64, 1, 132]` bytes, weights `[B, H]`, seq_lens `[B]`,
    block_table `[B, max_pages]`.  Positions at or beyond seq_len are -inf.

    `absolute` "weights": of |weights|, what is summed into each score, whatever cancels;
    "products": of |q| and |k| too, the unit of a tensor core's fp8 accumulation.
    """
    q = decode_e4m3(q_index_fp8)
    q = q.abs() if absolute == "products" else q
    w = f64(weights)
    w = w.abs() if absolute else w
    scores = full(q, (q.shape[0], max_len), -torch.inf)
    rows = _candidates(seq_lens, block_table, k_index_cache_fp8.shape[0], table_page_size)
    for b, (positions, tokens) in enumerate(rows):
        pages, number = (tokens // PAGE_TOKENS).unique(return_inverse=True)
        codes, scale = page_tokens(k_index_cache_fp8, pages)
        keys = decode_e4m3(codes)
        dots = q[b] @ (keys.abs() if absolute == "products" else keys).mT  # [pages, H, 64]
        of_pages = scale * (w[b][:, None] * torch.relu(dots)).sum(dim=1)
        scores[b, positions] = of_pages[number, tokens % PAGE_TOKENS]
    return scores


def _best(scores: list[float], positions: list[int], topk: int, *, by_score: bool) -> list[int]:
    """The topk best positions: higher score first, NaN last, ties to the smaller position."""

    def rank(t: int) -> tuple[bool, float, int]:
        missing = math.isnan(scores[t])
        return missing, 0.0 if missing else -scores[t], t

    best: list[int] = sorted(positions, key=rank)[:topk]
    return best if by_score else sorted(best)


def two_levels(
    scores: list[float],
    positions: list[int],
    topk: int,
    block: int,
    candidates: list[int] | None,
    length: int,
    *,
    by_score: bool,
) -> list[int]:
    """The best positions of blocks of `block` that `candidates` names, or without those the best
    blocks: each by its best position, the one of position `length - 1` before all."""
    if candidates is not None:
        wanted = set(candidates)
        inside = [t for t in positions if t // block in wanted]
        return _best(scores, inside, topk, by_score=by_score)
    if block == 1:
        return _best(scores, positions, topk, by_score=by_score)
    members: dict[int, list[float]] = {}
    for t in positions:
        members.setdefault(t // block, []).append(scores[t])
    best = [math.nan] * (1 + max(members, default=-1))
    for j, found in members.items():
        best[j] = max((x for x in found if not math.isnan(x)), default=math.nan)
        if j == (length - 1) // block:
            best[j] = math.inf
    return _best(best, list(members), topk, by_score=by_score)


def topk_indices(scores: Tensor, lengths: Tensor, topk: int, *, sorted: bool = False) -> Tensor:
    """The `min(topk, length)` best positions `< lengths[b]` of scores `[B, max_len]`, then -1.

    -> int32 `[B, topk]`, in ascending position, or with `sorted` in descending score (ties by
    position).
    """
    picked = torch.full((scores.shape[0], topk), -1, dtype=torch.int32)
    rows = f64(scores).tolist()
    for b, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
        best = _best(row, list(range(min(max(length, 0), len(row)))), topk, by_score=sorted)
        picked[b, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return picked


def dsa_topk_indexer(  # noqa: PLR0913 - operands, and what is chosen
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk: int,
    *,
    sorted: bool = False,
    positions: bool = False,
    scores: Tensor | None = None,
    table_page_size: int = PAGE_TOKENS,
    block: int = 1,
    candidates: Tensor | None = None,
) -> Tensor:
    """The ids `page * 64 + offset` of each row's best tokens, int32 `[B, topk]`, then -1; with
    `positions` their positions in the row.

    `scores` `[B, max_len]`, where given, is what a kernel computed itself, and is ranked instead
    of the float64 scores: a selection is judged by the scores it was made from.

    `block_table` `[B / next_n, max_pages]` has one row for `next_n` neighbouring queries.
    `block` and `candidates` are those of `two_levels`.
    """
    if len(block_table):
        block_table = block_table.repeat_interleave(len(seq_lens) // len(block_table), dim=0)
    rows = _candidates(seq_lens, block_table, k_index_cache_fp8.shape[0], table_page_size)
    if scores is None:
        table = block_table, block_table.shape[1] * table_page_size, table_page_size
        scores = indexer_logits(q_index_fp8, k_index_cache_fp8, weights, seq_lens, *table)
    picked = torch.full((len(rows), topk), -1, dtype=torch.int32)
    ranked = f64(scores).tolist()
    lengths = seq_lens.clamp(0, block_table.shape[1] * table_page_size).tolist()
    for b, named in enumerate(rows):
        token_at = dict(zip(*(x.tolist() for x in named), strict=True))
        listed = None if candidates is None else candidates[b].tolist()
        best = two_levels(
            ranked[b], list(token_at), topk, block, listed, lengths[b], by_score=sorted
        )
        are_tokens = not positions and (block == 1 or listed is not None)
        ids = [token_at[t] for t in best] if are_tokens else best
        picked[b, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return picked
