"""The indexer: the fused top-k, its launch without checks, its warm-up, and its single steps."""

from __future__ import annotations

from torch import Tensor

from flashdsa.ops.checks import wants_positions
from flashdsa.ops.registration import call
from flashdsa.ops.table import DSA_TOPK_INDEXER, INDEXER_LOGITS, TOPK_INDICES

MANY_ROWS = 256
"""More than GPUs have SMs."""


def dsa_topk_indexer(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices: Tensor,
    *,
    sorted: bool = False,
    ids: str = "slot",
    backend: str = "auto",
) -> None:
    """Write the ids of each row's best-scoring tokens into `topk_indices`.

    ``score[t] = scale[t] * sum_h weights[b, h] * relu(q[b, h] . k[t])``. Exactly
    ``min(topk, seq_lens[b])`` ids are written, then -1. Ties at the cut-off go to the smallest
    token position; NaN scores rank last. An id is a cache slot, ``page * 64 + offset``, or with
    ``ids="position"`` the token's position in its row.

    Multi-token prediction has ``next_n`` queries a request, 1 to 4, over the same pages. Every
    operand but the cache and `block_table` may then have them as a second dimension: q
    (B, next_n, H, 128), weights (B, next_n, H), seq_lens (B, next_n), topk_indices (B, next_n,
    topk). A request's pages are then read together; the results are those of B * next_n rows.

    Args:
        q_index_fp8: (B, H, 128) float8_e4m3fn, from `quantize_index_q`.
        k_index_cache_fp8: (num_pages, 64, 1, 132) uint8 or int8. A page is 64 x 128 e4m3 bytes,
            then 64 fp32 scales; see `write_index_k_cache`.
        weights: (B, H) fp32, with the queries' scales folded in; may be negative.
        seq_lens: (B,) int32, tokens of each row.
        block_table: (B, max_pages) int32, the pages of each row in order.
        topk_indices: (B, topk) int32, the output; may be uninitialised.
        sorted: descending score, ties by position. Otherwise the order is a backend's own,
            deterministic; the CPU's is ascending token position.
        ids: "slot" or "position".
        backend: "auto" or the name of one.

    Raises:
        TypeError, ValueError: a wrong argument, and where values are checked (on the CPU, or with
            FLASHDSA_CHECK=1) a negative length, a table too narrow for its length, a page id
            outside the cache. Nothing is written then.
        NotImplementedError: no implementation serves the call.
    """
    positions = ids != "slot" and wants_positions(ids)
    operands = q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices
    call(DSA_TOPK_INDEXER, operands, (sorted, positions, True), backend)


def indexer_logits(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_len: int,
    *,
    backend: str = "auto",
) -> Tensor:
    """The scores that `dsa_topk_indexer` ranks, bit for bit.

    Args: as for `dsa_topk_indexer`, and
        max_len: width of the result; at least the longest of `seq_lens`.

    Returns:
        (B, max_len) fp32, -inf from ``seq_lens[b]`` on.
    """
    operands = q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table
    scores: Tensor = call(INDEXER_LOGITS, operands, (max_len,), backend)
    return scores


def topk_indices(
    scores: Tensor, lengths: Tensor, topk: int, *, sorted: bool = False, backend: str = "auto"
) -> Tensor:
    """Positions of each row's best scores, exact, by the indexer's tie rule.

    Args:
        scores: (B, max_len) fp32; entries at or beyond `lengths` are ignored; NaN ranks last.
        lengths: (B,) int32 in [0, max_len].
        topk: how many.
        sorted: descending score, ties by position; otherwise the backend's own order (the CPU's
            is ascending position).
        backend: "auto" or the name of one.

    Returns:
        (B, topk) int32: ``min(topk, lengths[b])`` positions, then -1.
    """
    positions: Tensor = call(TOPK_INDICES, (scores, lengths), (topk, sorted), backend)
    return positions
