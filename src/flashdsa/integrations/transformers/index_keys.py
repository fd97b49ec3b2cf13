"""A sequence's quantised index keys, kept with the model's own cache from one token to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashdsa.ops.index_k_cache import write_index_k_cache
from flashdsa.problem import INDEX_TOKEN_BYTES, PAGE_SIZE

ATTRIBUTE = "_flashdsa_index_keys"
"""Attribute of a layer of the model's cache."""
MORE_TOKENS = 256
"""Minimum room, in tokens, after the present ones if the cache grows."""


@dataclass
class IndexKeys:
    """Keys of B sequences as the indexer reads them.

    Attributes:
        cache: (B * pages, 64, 1, 132) uint8, pages of one sequence behind the other's.
        table: (B, pages) int32, the pages of each.
        first: (B,) int32, the first key of each that is no padding; it has the first slot.
        slots: (B, positions) int64: the slot of the key at each position, -1 of padding.
        source: the model's own keys (B, T, 128), that these were written from.
        version: of `source`; None where torch counts none.
        padded: whether any sequence begins with padding; None: the device was not asked yet.
    """

    cache: Tensor
    table: Tensor
    first: Tensor
    slots: Tensor
    source: Tensor
    version: int | None
    padded: bool | None = None

    def continues(self, layer: Any, num_new: int) -> bool:
        """Whether the model's cache still has the keys that these were written from, or the first
        of them, as it has when tokens were rejected, and there is room for `num_new` tokens more.

        A cache that was reordered has another tensor; one that was written to by others has another
        version.
        """
        kept: Tensor | None = layer.indexer_keys
        if kept is None or not is_begin(kept, self.source):
            return False
        if self.version != version_of(self.source):
            return False
        return is_static(layer) or kept.shape[1] + num_new <= self.slots.shape[1]

    def append(self, keys: Tensor, layer: Any) -> None:
        """Write the newest keys (B, n, 128), which the model's cache has got."""
        num_new = keys.shape[1]
        if is_static(layer):
            back = torch.arange(-num_new, 0, device=keys.device)
            slots = self.slots.index_select(1, layer.indexer_cumulative_length + back)
        else:
            stop = layer.indexer_keys.shape[1]
            slots = self.slots[:, stop - num_new : stop]
        write_index_k_cache(keys.flatten(0, 1), slots.flatten(), self.cache)
        self.source, self.version = layer.indexer_keys, version_of(layer.indexer_keys)

    def positions_of(self, chosen: Tensor) -> Tensor:
        """The model's positions (B, n, topk) of tokens `chosen` (B * n, topk) in their pages, -1
        where there is none. Waits for the device once, unless this is compiled."""
        chosen = chosen.view(len(self.first), -1, chosen.shape[1])
        if self.padded is None and not torch.compiler.is_compiling():
            self.padded = bool(self.first.any())
        if self.padded is False:
            return chosen
        return (chosen + self.first[:, None, None]).masked_fill_(chosen < 0, -1)


def quantise(keys: Tensor, first: Tensor, layer: Any) -> IndexKeys:
    """All keys (B, T, 128), to be continued where there is a layer of a cache.

    Args:
        first: (B,), the first key of each sequence that is no padding.
        layer: of the model's cache, or None.
    """
    batch, num_keys, _ = keys.shape
    grows = layer is not None and not is_static(layer)
    room = max(MORE_TOKENS, num_keys // 4) if grows else 0
    pages = -(-(num_keys + room) // PAGE_SIZE)
    position = torch.arange(pages * PAGE_SIZE, device=keys.device)
    of_sequence = torch.arange(batch, device=keys.device)[:, None] * (pages * PAGE_SIZE)
    slots = position - first[:, None]
    slots = torch.where(slots < 0, -1, slots + of_sequence)
    cache = keys.new_zeros(batch * pages, PAGE_SIZE, 1, INDEX_TOKEN_BYTES, dtype=torch.uint8)
    write_index_k_cache(keys.flatten(0, 1), slots[:, :num_keys].flatten(), cache)
    table = torch.arange(batch * pages, dtype=torch.int32, device=keys.device)
    source = keys if layer is None else layer.indexer_keys
    return IndexKeys(
        cache, table.view(batch, pages), first.int(), slots, source, version_of(source)
    )


def is_begin(part: Tensor, whole: Tensor) -> bool:
    """Whether keys (B, t, 128) are the first ones of (B, T, 128), in the same memory."""
    return part is whole or (
        part.data_ptr() == whole.data_ptr()
        and part.stride() == whole.stride()
        and part.shape[0] == whole.shape[0]
        and part.shape[1] <= whole.shape[1]
    )


def is_static(layer: Any) -> bool:
    """Whether the layer's keys have their places from the beginning."""
    return getattr(layer, "indexer_cumulative_length", None) is not None


def version_of(x: Tensor) -> int | None:
    """Return how often `x` was written to; None if torch does not count (inference mode)."""
    return None if x.is_inference() else x._version
