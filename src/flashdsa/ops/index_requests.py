"""Requests with several queries each, for multi-token prediction, as rows of the indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.errors import ArgumentValueError
from flashdsa.operands import TopkIndexerOperands
from flashdsa.ops.checks import require_rank, require_shape
from flashdsa.problem import INDEX_HEAD_DIM, MAX_NEXT_N

_WITH_QUERIES = {
    "q_index_fp8": "[B, next_n, H, 128]",
    "weights": "[B, next_n, H]",
    "seq_lens": "[B, next_n]",
    "topk_indices": "[B, next_n, topk]",
}


def rows_of_requests(operands: TopkIndexerOperands) -> TopkIndexerOperands:
    """The operands of B * next_n rows, as views; `block_table` keeps a row for each request.

    The same tuple where queries have no dimension of their own.

    Args:
        operands: with the queries of a request as the second dimension: q (B, next_n, H, 128),
            weights (B, next_n, H), seq_lens (B, next_n), topk_indices (B, next_n, topk).

    Raises:
        ArgumentTypeError, ArgumentValueError: names the argument.
    """
    queries = operands.q_index_fp8
    if queries.dim() != 4:
        require_table_of_rows(operands)
        return operands
    requests, next_n, heads = queries.shape[:3]
    if not 1 <= next_n <= MAX_NEXT_N:
        raise ArgumentValueError(
            f"q_index_fp8: expected next_n of 1 to {MAX_NEXT_N} in [B, next_n, H, 128]; "
            f"got {list(queries.shape)}"
        )
    topk = operands.topk_indices.shape[-1] if operands.topk_indices.dim() else 0
    shapes = {
        "q_index_fp8": (requests, next_n, heads, INDEX_HEAD_DIM),
        "weights": (requests, next_n, heads),
        "seq_lens": (requests, next_n),
        "topk_indices": (requests, next_n, topk),
    }
    require_rank("block_table", operands.block_table, (2,), "[B, max_pages]")
    table_shape = (requests, operands.block_table.shape[1])
    require_shape("block_table", operands.block_table, table_shape, "[B, max_pages]")
    flat: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensor: Tensor = getattr(operands, name)
        require_shape(name, tensor, shape, _WITH_QUERIES[name])
        if next_n > 1 and requests > 1 and tensor.stride(0) != next_n * tensor.stride(1):
            raise ArgumentValueError(
                f"{name}: expected the queries of all requests at one distance; "
                f"got strides {list(tensor.stride())}"
            )
        flat[name] = tensor.view(requests * next_n, *shape[2:])
    return operands._replace(**flat)


def require_table_of_rows(operands: TopkIndexerOperands) -> None:
    """`block_table` has a row for each query, where queries have no dimension of their own."""
    queries, table = operands.q_index_fp8, operands.block_table
    if not queries.dim() or table.dim() != 2:
        return  # what the operation's table says of them
    # A trace would take the comparison for a constant.
    if not torch._C._get_tracing_state() and table.shape[0] != queries.shape[0]:
        shape = (queries.shape[0], table.shape[1])
        require_shape("block_table", table, shape, "[B, max_pages]")
