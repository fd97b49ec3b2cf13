"""Tensors to compile with: types, shapes and alignments, no memory."""

from __future__ import annotations

from math import prod
from typing import Any

from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from flashdsa.hw import BULK_ALIGNMENT

WORD_ALIGNMENT = 4


def fake_tensor(dtype: Any, shape: tuple[Any, ...], align: int = BULK_ALIGNMENT) -> Any:
    """A fake tensor without gaps, the last dimension innermost; its address is a multiple of
    `align` bytes."""
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def fake_pages(dtype: Any, page: tuple[Any, ...], apart: int = BULK_ALIGNMENT) -> Any:
    """A fake tensor of pages of bytes without gaps inside, at multiples of `apart` bytes from the
    first one."""
    inner = tuple(prod(page[dim + 1 :]) for dim in range(len(page)))
    strides = cute.sym_int64(divisibility=apart), *inner
    shape = cute.sym_int32(), *page
    return make_fake_tensor(dtype, shape, stride=strides, assumed_align=BULK_ALIGNMENT)


def symbols(count: int) -> tuple[Any, ...]:
    """Sizes that a call tells, each its own."""
    return tuple(cute.sym_int32() for _ in range(count))


def bf16(*shape: Any) -> Any:
    """A fake tensor of bf16 at a multiple of 16 bytes."""
    return fake_tensor(BFloat16, shape)


def words(*shape: Any) -> Any:
    """A fake tensor of int32 at a multiple of 4 bytes."""
    return fake_tensor(Int32, shape, WORD_ALIGNMENT)


def numbers(*shape: Any) -> Any:
    """A fake tensor of fp32 at a multiple of 4 bytes."""
    return fake_tensor(Float32, shape, WORD_ALIGNMENT)


def rows_apart(dtype: Any, rows: Any, width: Any) -> Any:
    """A fake matrix of 32-bit numbers whose rows may have any distance."""
    stride = cute.sym_int64(), 1
    return make_fake_tensor(dtype, (rows, width), stride=stride, assumed_align=WORD_ALIGNMENT)
