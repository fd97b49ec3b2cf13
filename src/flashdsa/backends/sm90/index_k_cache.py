"""The packed index-K cache on Hopper GPUs: writing and reading by slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.index_k_cache import check_slots, put_keys, read_slots
from flashdsa.backends.indexer.tensors import values_are_checked
from flashdsa.backends.memory import readable
from flashdsa.backends.mxfp4 import has_mxfp4
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.quantize import dtype_name
from flashdsa.errors import UnsupportedError
from flashdsa.hw import BULK_ALIGNMENT
from flashdsa.kernels.catalog import WRITE_INDEX_K_CACHE
from flashdsa.kernels.indexer.sm90.quantize_plan import QuantizePlan
from flashdsa.settings import Settings

if TYPE_CHECKING:
    from flashdsa.ops.index_k_cache import CacheReadOperands, CacheWriteOperands


def bind_write(
    runner: Runner, operands: CacheWriteOperands, *, power_of_two: bool
) -> Callable[[Sequence[Any]], None]:
    """Quantise `k` (T, 128) and write token t into slot `slots[t]` = page * 64 + offset.

    Slots of -1 are padding and are skipped, as is any slot outside the cache; a slot that is named
    twice gets bytes of any of its keys. Both are errors if FLASHDSA_CHECK=1, which
    waits for the device.

    The function that it returns raises UnsupportedError if pages begin at addresses that are no
    multiples of 16. Scales that are powers of two, MXFP4's among them, are written by torch.
    """
    k, _, cache = operands
    by_torch = has_mxfp4(cache) or power_of_two
    check, is_empty = Settings.from_environment().check, not (k.shape[0] and cache.shape[0])
    if not is_empty and not by_torch:
        function = runner.function(WRITE_INDEX_K_CACHE, QuantizePlan(dtype_name(k)))

    def serve(operands: Sequence[Any]) -> None:
        k, slots, cache = operands
        if not by_torch:
            _require_aligned_pages(cache)
        if check and values_are_checked():
            given = slots.cpu()
            check_slots(given[given != -1], cache, distinct=True)
        if by_torch and not is_empty:
            put_keys(k, slots, cache, power_of_two=power_of_two)
        elif not is_empty:
            words = slots.contiguous().view(torch.int32)
            function(readable(k), words, cache.view(torch.uint8).flatten(1))

    return runner.on_device(serve)


def bind_read(_: Runner, __: CacheReadOperands) -> Callable[[Sequence[Any]], tuple[Tensor, Tensor]]:
    """The stored keys (T, 128) e4m3 and scales (T,) fp32 of `slots` (T,), by torch.

    A slot outside the cache reads as 0; with FLASHDSA_CHECK=1 it is an error, which waits for the
    device.
    """
    return _read


def _read(operands: Sequence[Any]) -> tuple[Tensor, Tensor]:
    cache, slots = operands
    if values_are_checked():
        check_slots(slots.cpu(), cache, distinct=False)
    return read_slots(cache, slots)


def _require_aligned_pages(cache: Tensor) -> None:
    """Raise UnsupportedError for a cache that the kernel cannot write to 16 bytes at a time."""
    stride = cache.stride(0) if cache.shape[0] > 1 else 0
    if (cache.data_ptr() | stride) % BULK_ALIGNMENT:
        raise UnsupportedError(
            f"cache: the Hopper kernel needs pages at multiples of {BULK_ALIGNMENT} bytes; "
            f"got address {cache.data_ptr():#x} and page stride {cache.stride(0)}"
        )
