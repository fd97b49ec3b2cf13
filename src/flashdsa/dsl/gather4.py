"""Blackwell's gather of rows by their numbers, into shared memory."""

from collections.abc import Sequence
from typing import Any

from cutlass import Int32

from flashdsa.dsl import ptx

FIRST_OF_PAIR = ~(1 << 24)
"""Mask of a shared::cluster address: gives the same offset in the CTA of the pair whose rank is
even."""


def gather4(
    address: Any,
    tensor_map: Any,
    column: Any,
    rows: Sequence[Any],
    barrier: Any,
    of_pair: bool = False,
) -> None:
    """Copy four rows of a box, one after the other; rows outside of the tensor come as zeros.

    PTX ISA, "cp.async.bulk.tensor", .tile::gather4.

    Args:
        address: in shared memory. tensor_map: pointer to one whose box is one row high.
        column: first element of the box in each row. rows: four numbers.
        barrier: pointer to the mbarrier that counts the bytes.
        of_pair: the bytes are counted by that mbarrier of the pair's first CTA (.cta_group::2).
    """
    space, group, counted_by = "shared::cta", "", Int32(barrier.toint())
    if of_pair:
        space, group, counted_by = "shared::cluster", ".cta_group::2", counted_by & FIRST_OF_PAIR
    ptx.run(
        f"cp.async.bulk.tensor.2d.{space}.global.tile::gather4.mbarrier::complete_tx::bytes{group} "
        "[{$r0}], [{$r1}, {{$r2}, {$r3}, {$r4}, {$r5}, {$r6}}], [{$r7}];",
        Int32(address),
        tensor_map,
        Int32(column),
        *rows,
        counted_by,
    )
