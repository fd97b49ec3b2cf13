"""Indexer: the fused top-k and its single steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from flashdsa.dispatch.checks import require_rank, require_shape, wants_positions
from flashdsa.dispatch.dtypes import E4M3, FP32, INT32
from flashdsa.dispatch.registration import call, register
from flashdsa.dispatch.rows import Operand, Output, Parameter, Sizes
from flashdsa.dispatch.spec import OpSpec
from flashdsa.errors import ArgumentValueError
from flashdsa.ops.index_k_cache import CACHE, MAX_PAGES
from flashdsa.problem import INDEX_HEAD_DIM, INT32_MAX, MAX_NEXT_N, PAGE_SIZE

__all__ = ["dsa_topk_indexer", "indexer_logits", "topk_indices"]


def _require_pages_of_requests(name: str, table: Tensor, sizes: Sizes) -> None:
    """A row for each query, or for each 2 to 4 neighbouring ones: notes how many as next_n."""
    rows, requests = sizes["B"], table.shape[0]
    next_n = 1
    if rows != requests:
        next_n = rows // requests if requests else 0
    if rows != next_n * requests or not 1 <= next_n <= MAX_NEXT_N:
        why = f" (or one row for each 2 to {MAX_NEXT_N} neighbouring queries)"
        require_shape(name, table, (rows, table.shape[1]), "[B, max_pages]", why)
    sizes["next_n"] = next_n


def _rows_of_requests(operands: TopkIndexerOperands) -> TopkIndexerOperands:
    """The operands of B * next_n rows, as views, or copies where the requests lie apart;
    `block_table` keeps a row for each request.

    The same tuple where queries have no dimension of their own.

    Args:
        operands: those with a row for each query have the queries of a request as the second
            dimension: q (B, next_n, H, 128), seq_lens (B, next_n) and so on.

    Raises:
        ArgumentTypeError, ArgumentValueError: names the argument.
    """
    queries = operands.q_index_fp8
    # Nothing else has the queries of a request: the shape of q is the wrong one.
    ranks = (3,) if operands.weights.dim() == 2 and operands.seq_lens.dim() == 1 else (3, 4)
    layout = "[B, H, 128]" if ranks == (3,) else "[B, H, 128] or [B, next_n, H, 128]"
    require_rank("q_index_fp8", queries, ranks, layout)
    if queries.dim() == 3:
        _require_table_of_rows(operands)
        return operands
    requests, next_n, heads = queries.shape[:3]
    if not 1 <= next_n <= MAX_NEXT_N:
        raise ArgumentValueError(
            f"q_index_fp8: expected next_n of 1 to {MAX_NEXT_N} in [B, next_n, H, 128]; "
            f"got {list(queries.shape)}"
        )
    require_rank("block_table", operands.block_table, (2,), "[B, max_pages]")
    table_shape = (requests, operands.block_table.shape[1])
    require_shape("block_table", operands.block_table, table_shape, "[B, max_pages]")
    flat: dict[str, Tensor] = {}
    for row, tensor in zip(DSA_TOPK_INDEXER.operands, operands, strict=True):
        name, (rows, *dims) = row.name, row.shape.split()
        if tensor is None or rows != "B":
            continue
        own = tensor.shape[-1] if tensor.dim() else 0
        sizes = {"H": heads, str(INDEX_HEAD_DIM): INDEX_HEAD_DIM}
        shape = [sizes.get(dim, own) for dim in dims]
        layout = f"[{', '.join(['B', 'next_n', *dims])}]"
        require_shape(name, tensor, (requests, next_n, *shape), layout)
        apart = next_n > 1 and requests > 1 and tensor.stride(0) != next_n * tensor.stride(1)
        if row.written and apart:
            raise ArgumentValueError(
                f"{name}: expected the queries of all requests at one distance; "
                f"got strides {list(tensor.stride())}"
            )
        flat[name] = tensor.reshape(requests * next_n, *shape)
    return operands._replace(**flat)


def _require_table_of_rows(operands: TopkIndexerOperands) -> None:
    """`block_table` has a row for each query, where queries have no dimension of their own."""
    queries, table = operands.q_index_fp8, operands.block_table
    if table.dim() != 2:
        return  # what the operation's table says of it
    # A trace would take the comparison for a constant.
    if not torch._C._get_tracing_state() and table.shape[0] != queries.shape[0]:
        shape = (queries.shape[0], table.shape[1])
        require_shape("block_table", table, shape, "[B, max_pages]")


Queries = Annotated[
    Tensor,
    Operand(
        f"B H {INDEX_HEAD_DIM}", E4M3, nonempty="expected shape [B, H, 128] with H >= 1; got H = 0"
    ),
]
Weights = Annotated[Tensor, Operand("B H", FP32)]
SeqLens = Annotated[Tensor, Operand("B", INT32)]
_TABLE = Operand("B max_pages", INT32)
_TABLE_OF_REQUESTS = Operand(
    "requests max_pages",
    INT32,
    rule=_require_pages_of_requests,
    among={"next_n": tuple(range(1, MAX_NEXT_N + 1))},
    free={"max_pages": INT32_MAX},
)
_CACHE_OF_ANY_SIZE = replace(CACHE, free={"num_pages": MAX_PAGES})
_CHOSEN = Operand(
    "B topk", INT32, written=True, nonempty="expected shape [B, topk] with topk >= 1; got 0"
)


class IndexerOperands(NamedTuple):
    """Operands of `indexer_logits`."""

    q_index_fp8: Queries
    k_index_cache_fp8: Annotated[Tensor, CACHE]
    weights: Weights
    seq_lens: SeqLens
    block_table: Annotated[Tensor, _TABLE]


class TopkIndexerOperands(NamedTuple):
    """Operands of `dsa_topk_indexer`: the indexer's, and the ids, written."""

    q_index_fp8: Queries
    k_index_cache_fp8: Annotated[Tensor, _CACHE_OF_ANY_SIZE]
    weights: Weights
    seq_lens: SeqLens
    block_table: Annotated[Tensor, _TABLE_OF_REQUESTS]
    topk_indices: Annotated[Tensor, _CHOSEN]
    candidates: Annotated[Tensor | None, Operand("B num_candidates", INT32)] = None

    @property
    def inputs(self) -> IndexerOperands:
        """The operands without the output."""
        return IndexerOperands(*self[:5])


class TopkOperands(NamedTuple):
    """Operands of `topk_indices`."""

    scores: Annotated[Tensor, Operand("B max_len", FP32)]
    lengths: Annotated[Tensor, Operand("B", INT32)]


_SORTED = Parameter("sorted", "bool")
_TABLE_PAGE_SIZE = Parameter(
    "table_page_size", "int", default=lambda _: PAGE_SIZE, divides=PAGE_SIZE
)
BLOCK = Parameter("block", "int", default=lambda _: 1, divides=PAGE_SIZE)
"""Positions of a block, whose ids are chosen, or of a candidate."""
DSA_TOPK_INDEXER = register(
    OpSpec(
        "dsa_topk_indexer",
        TopkIndexerOperands,
        cpu="indexer:topk_indexer",
        parameters=(
            _SORTED,
            Parameter("positions", "bool", given=False),
            _TABLE_PAGE_SIZE,
            BLOCK,
            Parameter("check", "bool", given=False),
        ),
        normalise=_rows_of_requests,
    )
)
INDEXER_LOGITS = register(
    OpSpec(
        "indexer_logits",
        IndexerOperands,
        cpu="indexer:logits",
        parameters=(Parameter("max_len", "int"), _TABLE_PAGE_SIZE),
        outputs=(Output("scores", "B max_len", FP32),),
    )
)
TOPK_INDICES = register(
    OpSpec(
        "topk_indices",
        TopkOperands,
        cpu="topk:topk_positions",
        parameters=(Parameter("topk", "int"), _SORTED),
        outputs=(Output("positions", "B topk", INT32),),
    )
)


def dsa_topk_indexer(  # noqa: PLR0913 - operands, and what is chosen
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices: Tensor,
    *,
    sorted: bool = False,
    ids: str = "slot",
    table_page_size: int = PAGE_SIZE,
    block: int = 1,
    candidates: Tensor | None = None,
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
    topk), candidates (B, next_n, n). A request's pages are then read together; the results are
    those of B * next_n rows.

    A choice in two levels (DeepSeek-V4.1) is two calls: with ``block=8`` the best blocks are
    written, block j for positions ``8 j`` to ``8 j + 7``, by the best score in each; the block of
    the last position is always among them. With ``block=8, candidates=blocks`` the best tokens of
    those blocks are, and of no others.

    Args:
        q_index_fp8: (B, H, 128) float8_e4m3fn, from `quantize_index_q`.
        k_index_cache_fp8: (num_pages, 64, 1, 132) uint8 or int8. A page is 64 x 128 e4m3 bytes,
            then 64 fp32 scales; see `write_index_k_cache`. Or (num_pages, 64, 1, 68): MXFP4. Pages
            may lie apart; kernels want multiples of 16 bytes.
        weights: (B, H) fp32, with the queries' scales folded in; may be negative.
        seq_lens: (B,) int32, tokens of each row.
        block_table: (B, max_pages) int32, the pages of each row in order.
        topk_indices: (B, topk) int32, the output; may be uninitialised.
        sorted: descending score, ties by position. Otherwise the order is a backend's own,
            deterministic; the CPU's is ascending token position.
        ids: "slot" or "position".
        table_page_size: tokens that an entry of `block_table` names, a divisor of 64. The cache's
            pages stay as they are: entry e names the slots from ``e * table_page_size`` on, so
            that with 1 the table has a slot for each token, in any order.
        block: positions of a block, a divisor of 64.
        candidates: (B, n) int32, the blocks to choose tokens from, in any order. An id of no
            visible block, -1 say, names none.
        backend: "auto" or the name of one.

    Raises:
        TypeError, ValueError: a wrong argument, and where values are checked (on the CPU, or with
            FLASHDSA_CHECK=1) a negative length, a table too narrow for its length, a page id
            outside the cache. Nothing is written then.
        NotImplementedError: no implementation serves the call.
    """
    positions = ids != "slot" and wants_positions(ids)
    inputs = q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table
    operands = *inputs, topk_indices, candidates
    call(DSA_TOPK_INDEXER, operands, (sorted, positions, table_page_size, block, True), backend)


def indexer_logits(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_len: int,
    *,
    table_page_size: int = PAGE_SIZE,
    backend: str = "auto",
) -> Tensor:
    """The scores that `dsa_topk_indexer` ranks, bit for bit.

    Args: as for `dsa_topk_indexer`, and
        max_len: width of the result; at least the longest of `seq_lens`.

    Returns:
        (B, max_len) fp32, -inf from ``seq_lens[b]`` on.
    """
    operands = q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table
    scores: Tensor = call(INDEXER_LOGITS, operands, (max_len, table_page_size), backend)
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
