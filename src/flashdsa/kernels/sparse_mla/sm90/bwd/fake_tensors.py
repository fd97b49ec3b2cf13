"""Tensors to compile with: types, shapes and alignments, no memory."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Uint8, Uint16, cute
from cutlass.cute.runtime import make_fake_compact_tensor

from flashdsa.hw import BULK_ALIGNMENT
from flashdsa.kernels.sparse_mla.sm90.members import members_bits


def fake_tensor(dtype: Any, shape: tuple[Any, ...], align: int = BULK_ALIGNMENT) -> Any:
    """Without gaps, the last dimension innermost."""
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def fake_lists(queries: int) -> list[Any]:
    """Of a launch: rows, members, counts, present and named of groups of so many queries."""
    groups, capacity = cute.sym_int32(), cute.sym_int32()
    member = Uint8 if members_bits(queries) == Uint8.width else Uint16
    return [
        fake_tensor(Int32, (groups, capacity), 4),
        fake_tensor(member, (groups, capacity), member.width // 8),
        *(fake_tensor(Int32, (groups,), 4) for _ in range(3)),
    ]
