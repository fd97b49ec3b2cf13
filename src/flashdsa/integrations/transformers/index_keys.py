"""A sequence's quantised index keys, kept with the model's own cache from one token to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashdsa.api import write_index_k_cache
from flashdsa.problem import INDEX_TOKEN_BYTES, PAGE_SIZE

ATTRIBUTE = "_flashdsa_index_keys"
"""Of a layer of the model's cache."""
MORE_TOKENS = 256
"""Room for at least so many tokens behind the ones that are there, where the cache grows."""


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
    """

    cache: Tensor
    table: Tensor
    first: Tensor
    slots: Tensor
    source: Tensor
    version: int | None

    def continues(self, layer: Any) -> bool:
        """Whether the model's cache still has the keys that these were written from, and there is
        room for one more token. A cache that was cropped or reordered has another tensor; one that
        was written to by others has another version."""
        source: Tensor = self.source
        if layer.indexer_keys is not source or self.version != version_of(source):
            return False
        return is_static(layer) or source.shape[1] < self.slots.shape[1]

    def append(self, key: Tensor, layer: Any) -> None:
        """Write the newest key (B, 1, 128), which the model's cache has got."""
        if is_static(layer):
            slots = self.slots.index_select(1, layer.indexer_cumulative_length - 1)
        else:
            slots = self.slots[:, layer.indexer_keys.shape[1] - 1]
        write_index_k_cache(key.flatten(0, 1), slots.flatten(), self.cache)
        self.source, self.version = layer.indexer_keys, version_of(layer.indexer_keys)


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


def is_static(layer: Any) -> bool:
    """Whether the layer's keys have their places from the beginning."""
    return getattr(layer, "indexer_cumulative_length", None) is not None


def version_of(x: Tensor) -> int | None:
    """How often `x` was written to; None where torch does not count (inference mode)."""
    return None if x.is_inference() else x._version
