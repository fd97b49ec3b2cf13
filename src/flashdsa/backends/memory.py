"""Tensors in memory as bulk copies and 16-byte moves take them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashdsa.errors import ArgumentValueError
from flashdsa.hw import BULK_ALIGNMENT


def readable(x: Tensor) -> Tensor:
    """Return `x`, or a copy if it has gaps or an address that a kernel cannot read 16 bytes
    from."""
    if x.is_contiguous() and not x.data_ptr() % BULK_ALIGNMENT:
        return x
    return aligned(x.contiguous())


def aligned(x: Tensor) -> Tensor:
    """Return `x`, which has no gaps, or a copy if a kernel cannot read 16 bytes from its
    address."""
    return x.clone() if x.data_ptr() % BULK_ALIGNMENT else x


def lie_densely(operands: Iterable[Tensor | None]) -> bool:
    """Whether no tensor of the operands has gaps."""
    return all(x is None or x.is_contiguous() for x in operands)


def written_apart(serve: Callable[..., object], operands: Any, name: str) -> Callable[..., object]:
    """`serve`, which writes the operand `name` without gaps, for operands like these, a NamedTuple:
    if that one has gaps, a copy without them is written, then the operand."""
    if getattr(operands, name).is_contiguous():
        return serve
    number = operands._fields.index(name)

    def run(given: Sequence[Any]) -> None:
        out = given[number]
        dense = torch.empty_like(out, memory_format=torch.contiguous_format)
        serve((*given[:number], dense, *given[number + 1 :]))
        out.copy_(dense)

    return run


def require_writable(name: str, x: Tensor) -> None:
    """Require that a kernel can write 16 bytes to the address of `x`, which has no gaps.

    Raises:
        ArgumentValueError: it cannot.
    """
    if x.data_ptr() % BULK_ALIGNMENT:
        raise ArgumentValueError(
            f"{name}: expected an address that is a multiple of {BULK_ALIGNMENT}; "
            f"got {x.data_ptr():#x}"
        )
