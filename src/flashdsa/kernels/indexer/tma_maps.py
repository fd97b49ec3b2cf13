"""Tensor maps of the cache's pages and the rows' queries, as the producer's TMA takes them."""

from typing import Any

from cutlass import Uint8, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.kernels.indexer.sizes import CACHE_ROW_BYTES, PAGE_ROWS
from flashdsa.problem import INDEX_HEAD_DIM


def make_tensor_maps(cache: cute.Tensor, queries: cute.Tensor, plan: Any) -> tuple[Any, Any]:
    """(cache as rows of 128 bytes, box of a page's `page_box_rows`; queries likewise, of a row)."""
    num_pages = cache.shape[0]
    cache_rows = cute.make_tensor(
        cache.iterator,
        cute.make_layout((num_pages * PAGE_ROWS, CACHE_ROW_BYTES), stride=(CACHE_ROW_BYTES, 1)),
    )
    query_rows = cute.make_tensor(
        cute.recast_ptr(queries.iterator, dtype=Uint8),
        cute.make_layout(
            (queries.shape[0] * plan.num_heads, INDEX_HEAD_DIM), stride=(INDEX_HEAD_DIM, 1)
        ),
    )
    swizzle = tensor_map.TensorMapSwizzle.s128b
    return (
        tensor_map.create_tensor_map_tiled_from_view(
            cache_rows, box_dims=(plan.page_box_rows, CACHE_ROW_BYTES), swizzle=swizzle
        ),
        tensor_map.create_tensor_map_tiled_from_view(
            query_rows, box_dims=(plan.tile_heads, INDEX_HEAD_DIM), swizzle=swizzle
        ),
    )
