"""Tensors in memory as bulk copies and 16-byte moves take them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from flashdsa.errors import ArgumentValueError
from flashdsa.hw import BULK_ALIGNMENT


def readable(x: Tensor) -> Tensor:
    """`x`, or a copy where it has gaps or an address that a kernel cannot read 16 bytes from."""
    return aligned(x.contiguous())


def aligned(x: Tensor) -> Tensor:
    """`x`, which has no gaps, or a copy where a kernel cannot read 16 bytes from its address."""
    return x.clone() if x.data_ptr() % BULK_ALIGNMENT else x


def lie_densely(operands: Iterable[Tensor | None]) -> bool:
    """Whether no tensor of the operands has gaps."""
    return all(x is None or x.is_contiguous() for x in operands)


def require_writable(name: str, x: Tensor) -> None:
    """`x`, which has no gaps, has an address that a kernel can write 16 bytes to.

    Raises:
        ArgumentValueError: says so.
    """
    if x.data_ptr() % BULK_ALIGNMENT:
        raise ArgumentValueError(
            f"{name}: expected an address that is a multiple of {BULK_ALIGNMENT}; "
            f"got {x.data_ptr():#x}"
        )
