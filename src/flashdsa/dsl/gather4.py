"""Blackwell's gather of rows by their numbers, into shared memory."""

from collections.abc import Sequence
from typing import Any

from cutlass import Int32, cute


def gather4(address: Any, tensor_map: Any, column: Any, rows: Sequence[Any], barrier: Any) -> None:
    """Four rows of a box, one behind the other; rows outside of the tensor come as zeros.

    PTX ISA, "cp.async.bulk.tensor", .tile::gather4.

    Args:
        address: in shared memory. tensor_map: pointer to one whose box is one row high.
        column: first element of the box in each row. rows: four numbers.
        barrier: pointer to the mbarrier that counts the bytes.
    """
    cute.arch.inline_ptx(
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}, {{$r2}, {$r3}, {$r4}, {$r5}, {$r6}}], [{$r7}];",
        read_only_args=[
            Int32(address),
            tensor_map,
            Int32(column),
            *rows,
            Int32(barrier.toint()),
        ],
    )
