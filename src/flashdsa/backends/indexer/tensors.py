"""Requirements of the indexer's kernels on tensors beyond the operations' own checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from flashdsa.backends.memory import readable
from flashdsa.errors import UnsupportedError
from flashdsa.hw import BULK_ALIGNMENT
from flashdsa.kernels.indexer.sizes import page_step
from flashdsa.problem import PAGE_SIZE
from flashdsa.settings import Settings


def as_read(
    gathers: bool, queries: Tensor, cache: Tensor, weights: Tensor, lengths: Tensor, *others: Tensor
) -> tuple[Tensor, ...]:
    """The indexer's operands as its kernels read them: the same ones, or copies of queries, weights
    and lengths that have gaps or begin at an odd address.

    Args:
        gathers: the table has a slot for each token.
        others: block tables, whose rows may lie apart, and outputs.

    Raises:
        UnsupportedError: the kernel cannot read the cache as it lies.
    """
    step, page = page_step(gathers), cache.shape[1] * cache.shape[3]
    apart = cache.stride(0) if len(cache) > 1 else page
    if cache.data_ptr() % BULK_ALIGNMENT or apart % step or apart < page:
        raise UnsupportedError(
            f"k_index_cache_fp8: the kernel takes pages at multiples of {step} bytes from the "
            f"first one, at least {page}, and that one at a multiple of {BULK_ALIGNMENT}; got "
            f"strides {list(cache.stride())} at {cache.data_ptr():#x}"
        )
    if cache.stride(0) != apart:
        cache = cache.as_strided(cache.shape, (apart, *cache.stride()[1:]))
    return readable(queries), cache, readable(weights), lengths.contiguous(), *others


def slots_of_tokens(block_table: Tensor, of_entry: int, num_pages: int) -> Tensor:
    """The table (rows, max_pages * of_entry) with a slot for each token; -1 of bad entries.

    Args:
        block_table: (rows, max_pages) int32; an entry names `of_entry` tokens.
    """
    table = block_table.unsqueeze(2)
    bad = (table < 0) | (table >= num_pages * (PAGE_SIZE // of_entry))
    offsets = torch.arange(of_entry, dtype=torch.int32, device=table.device)
    return torch.where(bad, -1, table * of_entry + offsets).flatten(1)


def require_dense_ids(topk_indices: Tensor, rows: int, topk: int) -> None:
    """Require ids (rows, topk) without gaps, before the first of several launches.

    Raises:
        ValueError: they are not.
    """
    if topk_indices.shape != (rows, topk) or not topk_indices.is_contiguous():
        raise ValueError(f"topk_indices: expected shape {[rows, topk]}, without gaps")


_have_values: ContextVar[bool] = ContextVar("flashdsa_have_values", default=True)


@contextmanager
def without_values() -> Iterator[None]:
    """In this context tensors have no values that could be checked."""
    token = _have_values.set(False)
    try:
        yield
    finally:
        _have_values.reset(token)


def values_are_checked() -> bool:
    """Whether the values of device tensors are read: asked for, there, and no graph is captured."""
    if not Settings.from_environment().check or not _have_values.get():
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
