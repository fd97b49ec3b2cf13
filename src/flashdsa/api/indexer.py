"""The indexer: the fused top-k, its launch without checks, its warm-up, and its single steps."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.backends.catalog import registry
from flashdsa.backends.gpu.context import THREAD
from flashdsa.backends.registry import resolve_backend
from flashdsa.operands import IndexerOperands, TopkIndexerOperands, TopkOperands
from flashdsa.ops.checks import capability, require_positive, wants_positions
from flashdsa.ops.indexer_launch import (
    REFUSALS,
    find_launch,
    launch_again,
    serve_unchecked,
)
from flashdsa.ops.plain import is_plain_eager
from flashdsa.ops.registration import call
from flashdsa.ops.table import DSA_TOPK_INDEXER, INDEXER_LOGITS, TOPK_INDICES
from flashdsa.problem import (
    INDEX_HEAD_DIM,
    INDEX_TOKEN_BYTES,
    INDEX_TOPK,
    NUM_INDEX_HEADS,
    PAGE_SIZE,
    Operation,
)

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
    positions = wants_positions(ids)
    # NOTE: torch's dispatcher takes 5 us of host time where a launch takes as much.
    if (
        not torch.compiler.is_dynamo_compiling()
        and type(q_index_fp8) is Tensor
        and type(k_index_cache_fp8) is Tensor
        and type(weights) is Tensor
        and type(seq_lens) is Tensor
        and type(block_table) is Tensor
        and type(topk_indices) is Tensor
        and q_index_fp8.dim() == 3
        and is_plain_eager()
        and launch_again(
            q_index_fp8,
            k_index_cache_fp8,
            weights,
            seq_lens,
            block_table,
            topk_indices,
            sorted,
            positions,
            backend,
        )
    ):
        return
    operands = q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices
    call(DSA_TOPK_INDEXER, operands, backend, sorted=sorted, positions=positions, check=True)


def dsa_topk_indexer_launch(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices: Tensor,
) -> None:
    """`dsa_topk_indexer` of slots without argument checks, for callers that have made their own.

    Negative lengths count as 0, a too narrow table clamps the length, tokens of a page outside
    the cache are never emitted, and nothing outside the buffers is touched.
    """
    # NOTE: of 6 us of host time 5 are spent in the kernel's function: hence no calls here but the
    # tensors' fastest. A function that was compiled for other tensors refuses these.
    launch = find_launch((q_index_fp8.numel(), topk_indices.numel(), topk_indices.get_device()))
    if launch is not None and k_index_cache_fp8.numel() and THREAD.has_context:
        function, first, second = launch
        try:
            function(
                q_index_fp8,
                k_index_cache_fp8,
                weights,
                seq_lens,
                block_table,
                topk_indices,
                first,
                second,
            )
            return
        except REFUSALS:  # nothing was launched: the backend serves the call or says why not
            pass
    serve_unchecked(
        TopkIndexerOperands(
            q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices
        )
    )


def compile_kernel(
    num_heads: int = NUM_INDEX_HEADS, topk: int = INDEX_TOPK, *, backend: str = "auto"
) -> None:
    """Build and warm up `dsa_topk_indexer` for these sizes, so that the first call is not slow.

    Runs the operation on one page of zeros, in either order: one row, with a table that is narrow
    or as wide as that of a row of a million tokens, and more rows than a GPU has SMs, by position
    also as two queries of each request. Backends that compile do so then.

    Args:
        num_heads: indexer heads H, 64 in the model.
        topk: width of the output, 2048 in the model.
        backend: "auto" or the name of one.
    """
    require_positive("num_heads", num_heads)
    require_positive("topk", topk)
    device = _device_of_indexers(backend)
    page = torch.zeros(1, PAGE_SIZE, 1, INDEX_TOKEN_BYTES, dtype=torch.uint8)
    wide = 2**20 // PAGE_SIZE
    for by_score, rows, num_pages in (
        (False, (1,), 1),
        (False, (1,), wide),
        (False, (MANY_ROWS,), 1),
        (False, (MANY_ROWS // 2, 2), 1),
        (True, (1,), 1),
        (True, (MANY_ROWS,), 1),
    ):
        queries = torch.zeros(*rows, num_heads, INDEX_HEAD_DIM, dtype=torch.float8_e4m3fn)
        dsa_topk_indexer(
            queries.to(device),
            page.to(device),
            torch.zeros(*rows, num_heads, dtype=torch.float32, device=device),
            torch.full(rows, PAGE_SIZE, dtype=torch.int32, device=device),
            torch.zeros(rows[0], num_pages, dtype=torch.int32, device=device),
            torch.empty(*rows, topk, dtype=torch.int32, device=device),
            sorted=by_score,
            backend=backend,
        )


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
    operands = IndexerOperands(q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table)
    scores: Tensor = call(INDEXER_LOGITS, operands, backend, max_len=max_len)
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
    positions: Tensor = call(
        TOPK_INDICES, TopkOperands(scores, lengths), backend, topk=topk, sorted=sorted
    )
    return positions


def _device_of_indexers(backend: str) -> str:
    """Return the device of a backend's indexer; for "auto" this machine's GPU if one serves."""
    if not torch.cuda.is_available():
        return "cpu"
    here = capability(torch.device("cuda", torch.cuda.current_device()))
    backend = resolve_backend(backend)
    on_gpu = any(
        "cuda" in implementation.features.devices
        and (backend != "auto" or here in implementation.features.capabilities)
        for implementation in registry.implementations(Operation.DSA_TOPK_INDEXER)
        if backend in ("auto", implementation.backend)
    )
    return "cuda" if on_gpu else "cpu"
