"""Tensor maps of queries, keys and scales."""

from typing import Any

from cutlass import Uint8, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.kernels.indexer.sm90.prefill.plan import QUERY_GROUP, SPAN_BYTES, TILE_KEYS
from flashdsa.problem import INDEX_HEAD_DIM


def row_bytes(plan: Any) -> int:
    """Bytes of a query head, or of a key."""
    return int(plan.chunks * SPAN_BYTES)


def query_map(q_index: cute.Tensor, plan: Any) -> Any:
    """Boxes of a span of all heads of four queries, in the order of columns: column 8 c + 2 j + o
    is head 2 c + o of query j, so that a lane of a product has all heads of one query."""
    of_head = row_bytes(plan)
    of_query = plan.num_heads * of_head
    view = cute.make_tensor(
        cute.recast_ptr(q_index.iterator, dtype=Uint8),
        cute.make_layout(
            (of_head, 2, q_index.shape[0], plan.num_heads // 2),
            stride=(1, of_head, of_query, 2 * of_head),
        ),
    )
    return tensor_map.create_tensor_map_tiled_from_view(
        view,
        box_dims=(SPAN_BYTES, 2, QUERY_GROUP, plan.num_heads // 2),
        stride_order=(0, 1, 2, 3),
        swizzle=tensor_map.TensorMapSwizzle.s128b,
    )


def key_map(k_index: cute.Tensor, plan: Any) -> Any:
    """Boxes of a span of 64 keys."""
    of_key = row_bytes(plan)
    view = cute.make_tensor(
        cute.recast_ptr(k_index.iterator, dtype=Uint8),
        cute.make_layout((of_key, k_index.shape[0]), stride=(1, of_key)),
    )
    return tensor_map.create_tensor_map_tiled_from_view(
        view,
        box_dims=(SPAN_BYTES, TILE_KEYS),
        stride_order=(0, 1),
        swizzle=tensor_map.TensorMapSwizzle.s128b,
    )


def scale_map(k_scale: cute.Tensor) -> Any:
    """Boxes of the scales of 64 keys."""
    return tensor_map.create_tensor_map_tiled_from_view(
        k_scale, box_dims=(TILE_KEYS,), stride_order=(0,)
    )


assert INDEX_HEAD_DIM == SPAN_BYTES  # an e4m3 row is one span
