"""Copies from device memory into shared memory that complete bytes of an mbarrier."""

from collections.abc import Sequence
from typing import Any

from cutlass import Int64
from cutlass.experimental import primitives as prims

EVICT_FIRST = 0x12F0000000000000
"""Policies of the second-level cache as CUTLASS encodes them (TMA::CacheHintSm90)."""
EVICT_LAST = 0x14F0000000000000


def load_box(
    target: Any,
    tensor_map: Any,
    coordinates: Sequence[Any],
    barrier: Any,
    policy: int | None = None,
) -> None:
    """One thread: copy a box of a tensor.

    Args:
        target: pointer to shared memory. tensor_map: pointer to it.
        coordinates: of the box's first element, innermost dimension first.
        barrier: pointer to the mbarrier that counts the bytes. policy: EVICT_FIRST or EVICT_LAST.
    """
    hint = {} if policy is None else {"l2_cache_hint": Int64(policy)}
    prims.cp_async_bulk_tensor_shared_cluster_global(
        target.to_llvm_ptr(), tensor_map, list(coordinates), barrier.to_llvm_ptr(), [], **hint
    )


def load_bytes(target: Any, source: Any, count: Any, barrier: Any) -> None:
    """One thread: copy `count` neighbouring bytes; both pointers and the count are multiples of
    16."""
    prims.cp_async_bulk_shared_cluster_global(
        target.to_llvm_ptr(), source.to_llvm_ptr(), barrier.to_llvm_ptr(), count
    )
