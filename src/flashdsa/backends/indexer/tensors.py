"""Requirements of the indexer's kernels on tensors beyond the operations' own checks."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.errors import UnsupportedError
from flashdsa.hw import BULK_ALIGNMENT
from flashdsa.problem import PAGE_SIZE
from flashdsa.settings import Settings

_NAMES = ("q_index_fp8", "k_index_cache_fp8", "weights", "seq_lens", "block_table")
_NUM_COPIED = 3
"""First operands, which TMA and bulk copies read."""


def require_layout(*tensors: Tensor) -> None:
    """Require aligned addresses, and no gaps but between the rows of `block_table`.

    Args:
        tensors: the indexer's operands, in order, and what is written.

    Raises:
        UnsupportedError: names the argument.
    """
    q_index_fp8, k_index_cache_fp8, weights, _, block_table, _ = tensors
    if all([_takes(x, x is block_table) for x in tensors]) and not (
        (q_index_fp8.data_ptr() | k_index_cache_fp8.data_ptr() | weights.data_ptr())
        % BULK_ALIGNMENT
    ):
        return
    for name, tensor in zip((*_NAMES, "topk_indices"), tensors, strict=True):
        if not _takes(tensor, tensor is block_table):
            raise UnsupportedError(
                f"{name}: the kernel takes contiguous tensors only; "
                f"got shape {list(tensor.shape)} with strides {list(tensor.stride())}"
            )
        if name in _NAMES[:_NUM_COPIED] and tensor.data_ptr() % BULK_ALIGNMENT:
            raise UnsupportedError(
                f"{name}: the kernel needs addresses aligned to {BULK_ALIGNMENT} bytes; "
                f"got {tensor.data_ptr():#x}"
            )


def _takes(tensor: Tensor, rows_apart: bool) -> bool:
    return tensor.is_contiguous() or (rows_apart and tensor.stride(-1) == 1)


def slots_of_tokens(block_table: Tensor, of_entry: int, num_pages: int) -> Tensor:
    """The table (rows, max_pages * of_entry) with a slot for each token; -1 of bad entries.

    Args:
        block_table: (rows, max_pages) int32; an entry names `of_entry` tokens.
    """
    table = block_table.unsqueeze(2)
    bad = (table < 0) | (table >= num_pages * (PAGE_SIZE // of_entry))
    offsets = torch.arange(of_entry, dtype=torch.int32, device=table.device)
    return torch.where(bad, -1, table * of_entry + offsets).flatten(1)


def values_are_checked() -> bool:
    """Whether the values of device tensors are read: asked for, and no graph is captured."""
    captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return Settings.from_environment().check and not captures
