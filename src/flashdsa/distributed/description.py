"""Description of a rank's tensors, which the other ranks compare."""

from __future__ import annotations

from torch import Tensor

from flashdsa.dispatch.checks import dtype_name


def describe(value: object, *, of_each_row: bool = False) -> str:
    """ "bfloat16 [64, 576]" of a tensor; with `of_each_row` without the first dimension."""
    if not isinstance(value, Tensor):
        return "none" if value is None else type(value).__name__
    sizes = [str(size) for size in value.shape]
    if of_each_row and sizes:
        sizes[0] = "any"
    return f"{dtype_name(value.dtype)} [{', '.join(sizes)}] on {value.device.type}"
