"""Memory that is written: no element of it twice, and none that an operand besides it has."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from flashdsa.errors import ArgumentValueError


def require_addresses_of_its_own(name: str, tensor: Tensor) -> None:
    """No two elements of `tensor`, which is written, lie at one address."""
    if overlaps_itself(tensor):
        raise ArgumentValueError(
            f"{name}: expected an address for each element that is written; got shape "
            f"{list(tensor.shape)} with strides {list(tensor.stride())}"
        )


def require_apart(names: Sequence[str], tensors: Sequence[Any], written: Sequence[int]) -> None:
    """No tensor of the numbers `written` shares memory with another one; None is no tensor."""
    # Compiled code reads its inputs before it writes to them; a trace takes numbers for constants.
    if torch.compiler.is_dynamo_compiling() or torch._C._get_tracing_state():
        return
    for number in written:
        for other, tensor in enumerate(tensors):
            if other != number and share_memory(tensors[number], tensor):
                raise ArgumentValueError(
                    f"{names[number]}: expected memory of its own to write to; it shares memory "
                    f"with {names[other]}"
                )


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may lie at one address: each stride steps over all that the smaller ones
    reach, or they may."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def share_memory(tensor: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors may have a byte in common; one that stands for others has none."""
    first, second = _address(tensor), _address(other)
    if tensor is None or other is None or not first or not second:
        return False
    if first + num_bytes(tensor) <= second or second + num_bytes(other) <= first:
        return False
    return not _interleave(tensor, other, second - first)


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes from the first element to the end of the last one."""
    return _reach(_steps(tensor), tensor.itemsize) if tensor.numel() else 0


def _address(tensor: Tensor | None) -> int:
    """Return the first byte's address; 0 if it has no data (a fake or a transform's tensor)."""
    if tensor is None or type(tensor) not in (Tensor, Parameter):
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _steps(tensor: Tensor) -> list[tuple[int, int]]:
    """(bytes, elements) of each dimension that has more than one element."""
    return [
        (stride * tensor.itemsize, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    ]


def _reach(steps: list[tuple[int, int]], itemsize: int) -> int:
    """Return the bytes from the first element to the end of the last one."""
    return itemsize + sum(step * (size - 1) for step, size in steps)


def _interleave(tensor: Tensor, other: Tensor, distance: int) -> bool:
    """Whether no byte is common since rows of one lie between rows of the other, as columns of one
    buffer do: every row begins at a multiple of the pitch from its tensor's first.

    Args:
        distance: from the first to the second, in bytes.
    """
    steps, others = _steps(tensor), _steps(other)
    for shortest, _ in (*steps, *others):
        pitch = gcd(*(step for step, _ in (*steps, *others) if step >= shortest))
        if not pitch:
            continue
        row = _reach([x for x in steps if x[0] < shortest], tensor.itemsize)
        other_row = _reach([x for x in others if x[0] < shortest], other.itemsize)
        if row <= distance % pitch <= pitch - other_row:
            return True
    return False
