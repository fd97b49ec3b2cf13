"""Dtypes that operands of several operations may have, some as functions of the first operand's."""

from __future__ import annotations

import torch

from flashdsa.dispatch.checks import dtype_name
from flashdsa.errors import ArgumentTypeError

ATTENTION_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
E4M3 = (torch.float8_e4m3fn,)
FP32 = (torch.float32,)
INT32 = (torch.int32,)


def same_dtype(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The first operand's."""
    return (dtype,)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of lse and of the dKV sums: fp32, or fp64 where q is."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The same as the only dtype that an operand may have."""
    return (sum_dtype(dtype),)


def sums_or_same(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtype of sums, and the first operand's."""
    return tuple(dict.fromkeys((sum_dtype(dtype), dtype)))


def require_sums_or_same(name: str, value: torch.dtype | None, inputs: torch.dtype) -> None:
    """`value` is None or one of the two for `inputs`."""
    allowed = sums_or_same(inputs)
    if value is not None and value not in allowed:
        names = " or ".join(dtype_name(dtype) for dtype in allowed)
        raise ArgumentTypeError(
            f"{name}: expected {names} or None for {dtype_name(inputs)} inputs; "
            f"got {dtype_name(value)}"
        )
