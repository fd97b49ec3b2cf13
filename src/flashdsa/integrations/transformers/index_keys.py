"""A sequence's quantised index keys, kept with the model's own cache from one token to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashdsa.integrations.transformers.seen_keys import SeenKeys
from flashdsa.ops.index_k_cache import write_index_k_cache
from flashdsa.problem import INDEX_TOKEN_BYTES, PAGE_SIZE

ATTRIBUTE = "_flashdsa_index_keys"
"""Attribute of a layer of the model's cache."""
MORE_TOKENS = 256
"""Minimum room, in tokens, after the present ones if the cache grows."""


@dataclass
class IndexKeys:
    """Keys of B sequences as the indexer reads them: those that queries see, without gaps.

    Attributes:
        cache: (B * pages, 64, 1, 132) uint8, pages of one sequence behind the other's.
        table: (B, pages) int32, the pages of each.
        seen: numbers of the keys at the last call; a key's number is its slot in the pages.
        source: the model's own keys (B, T, 128), that these were written from.
        version: of `source`; None where torch counts none.
    """

    cache: Tensor
    table: Tensor
    seen: SeenKeys
    source: Tensor
    version: int | None

    def continues(self, layer: Any, seen: SeenKeys, num_new: int) -> bool:
        """Return whether these are the first keys that the model's cache has and the call sees.

        Also after tokens were rejected. There must be room for `num_new` tokens more. A cache that
        was reordered has another tensor; one that was written to by others has another version;
        another mask of the earlier tokens gives other numbers.
        """
        kept: Tensor | None = layer.indexer_keys
        if kept is None or not is_begin(kept, self.source):
            return False
        if self.version != version_of(self.source):
            return False
        if is_static(layer):
            return seen.agrees_with(self.seen, layer.indexer_cumulative_length)
        num_kept = kept.shape[1]
        room = self.table.shape[1] * PAGE_SIZE
        return num_kept + num_new <= room and seen.agrees_with(self.seen, num_kept)

    def append(self, keys: Tensor, layer: Any, seen: SeenKeys) -> None:
        """Write the newest keys (B, n, 128), which the model's cache has got."""
        num_new = keys.shape[1]
        if is_static(layer):
            back = torch.arange(-num_new, 0, device=keys.device)
            number = seen.number.index_select(1, layer.indexer_cumulative_length + back)
        else:
            stop = layer.indexer_keys.shape[1]
            number = seen.number[:, stop - num_new : stop]
        self._write(keys, number)
        self.seen = seen
        self.source, self.version = layer.indexer_keys, version_of(layer.indexer_keys)

    def _write(self, keys: Tensor, number: Tensor) -> None:
        """Write keys (B, n, 128) with these numbers (B, n) into their slots."""
        first_slot = self.table[:, :1].long() * PAGE_SIZE
        slots = torch.where(number < 0, -1, number + first_slot)
        write_index_k_cache(keys.flatten(0, 1), slots.flatten(), self.cache)


def quantise(keys: Tensor, seen: SeenKeys, layer: Any) -> IndexKeys:
    """Write all keys that queries see into new pages, with room for more if a cache grows.

    Args:
        keys: (B, T, 128). seen: their numbers.
        layer: of the model's cache, or None.
    """
    batch, num_keys, _ = keys.shape
    grows = layer is not None and not is_static(layer)
    room = max(MORE_TOKENS, num_keys // 4) if grows else 0
    pages = -(-(num_keys + room) // PAGE_SIZE)
    cache = keys.new_zeros(batch * pages, PAGE_SIZE, 1, INDEX_TOKEN_BYTES, dtype=torch.uint8)
    table = torch.arange(batch * pages, dtype=torch.int32, device=keys.device).view(batch, pages)
    source = keys if layer is None else layer.indexer_keys
    found = IndexKeys(cache, table, seen, source, version_of(source))
    found._write(keys, seen.number)
    return found


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
