"""Tensors in awkward memory: strided views amid poison, as a caller may legitimately pass them."""

import torch
from torch import Tensor

PAD_ELEMS = 8
"""Poison columns before and after each row: 16 bytes of bf16, which keeps rows aligned for TMA."""


def poison_value(dtype: torch.dtype) -> float | int:
    """NaN for floating dtypes, else a value that is no valid index, id or length."""
    return float("nan") if dtype.is_floating_point else 0x7B if dtype.itemsize == 1 else 0x7B7B7B7B


def poisoned_rows(*shape: int, device: torch.device, strided: bool) -> Tensor:
    """Full of poison: a buffer of int32 ids (rows, topk)."""
    poison = poison_value(torch.int32)
    buffer = torch.full(shape, poison, dtype=torch.int32, device=device)
    return strided_copy(buffer) if strided else buffer


def pages_apart(x: Tensor, gap: int = 6 * PAD_ELEMS) -> Tensor:
    """Pages (num_pages, ...) with x's values, `gap` elements of poison between them: of bytes NaN
    in every format."""
    num_pages, *page = x.shape
    size = x[0].numel()
    poison = 0xFF if x.dtype is torch.uint8 else poison_value(x.dtype)
    buffer = torch.full((num_pages, size + gap), poison, dtype=x.dtype, device=x.device)
    return buffer[:, :size].view(num_pages, *page).copy_(x)


def strided_copy(x: Tensor) -> Tensor:
    """A view with x's values whose rows lie apart, amid poison; the last dimension is contiguous.

    Every leading dimension has stride 2 in a larger buffer; 1-D tensors get an offset only.
    """
    *leading, columns = x.shape
    buffer = torch.full(
        [2 * n for n in leading] + [columns + 2 * PAD_ELEMS],
        poison_value(x.dtype),
        dtype=x.dtype,
        device=x.device,
    )
    apart = tuple(slice(None, None, 2) for _ in leading)
    view = buffer[(*apart, slice(PAD_ELEMS, PAD_ELEMS + columns))]
    view.copy_(x)
    return view
