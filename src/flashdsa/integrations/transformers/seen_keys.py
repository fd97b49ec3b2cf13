"""Which keys the queries of one model call see, as the indexers need it: numbered without gaps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

NO_RANGES = (
    "each query must see neighbouring keys, but for those that no query sees; use indexer='exact' "
    "outside torch.compile and graphs"
)
MASK_ELEMENTS = 2**26
"""Elements of a mask that are looked at together (64 MiB of bool)."""


@dataclass(eq=False)
class SeenKeys:
    """Keys that a mask lets queries see, numbered per sequence in the order of their positions.

    Padding and other keys that no query of the call sees have no number. So packed documents,
    padding on either side and holes that all queries share leave each query a range of numbers.

    Attributes:
        number: (B, T) int64, each key's number; -1 where no query sees it.
        position: (B, T) int64, the position of the key with each number; behind the last, anything.
        first: (B, S) int64, the smallest number that each query sees; 0 where it sees none.
        lengths: (B, S) int32, how many keys each query sees.
        are_ranges: bool scalar, whether every query sees `lengths` consecutive numbers.
    """

    number: Tensor
    position: Tensor
    first: Tensor
    lengths: Tensor
    are_ranges: Tensor
    _shape: tuple[bool, bool] | None = None
    # Weak: else each step of a generation would keep the one before, and so all of them.
    _agrees: list[tuple[weakref.ref[SeenKeys], bool]] = field(default_factory=list)

    def has_ranges(self) -> bool:
        """Return whether every query sees consecutive numbers.

        It waits for the device once per model call. Where nothing may wait, a mask that leaves
        other keys stops the device.
        """
        if self.has_one_query():
            return True
        if not may_wait(self.number):
            torch._assert_async(self.are_ranges, "attention_mask: " + NO_RANGES)
            return True
        return self._read_shape()[0]

    def has_prefixes(self) -> bool:
        """Return whether it is known that every query sees the numbers from 0 on."""
        return self.has_one_query() or (may_wait(self.number) and self._read_shape()[1])

    def has_one_query(self) -> bool:
        """Return whether there is one query per sequence: all numbers are of keys that it sees."""
        return self.first.shape[1] == 1

    def _read_shape(self) -> tuple[bool, bool]:
        if self._shape is None:
            prefixes = self.are_ranges & (self.first == 0).all()
            ranges, from_begin = torch.stack([self.are_ranges, prefixes]).tolist()
            self._shape = ranges, from_begin
        return self._shape

    def agrees_with(self, before: SeenKeys, num_kept: int | Tensor) -> bool:
        """Return whether the first `num_kept` positions have the numbers of an earlier call.

        It waits for the device once per model call, because layers share both calls' numbers.
        Where nothing may wait they are taken to agree.
        """
        for other, answer in self._agrees:
            if other() is before:
                return answer
        if not may_wait(self.number):
            return True
        width = min(self.number.shape[1], before.number.shape[1])
        mine, theirs = self.number[:, :width], before.number[:, :width]
        kept = torch.arange(width, device=mine.device) < num_kept
        answer = not bool(((mine != theirs) & (mine >= 0) & kept).any())
        self._agrees.append((weakref.ref(before), answer))
        return answer

    def positions_of(self, chosen: Tensor) -> Tensor:
        """Return positions of chosen numbers.

        Args:
            chosen: (B, S, topk) int32 numbers, -1 where there is none.

        Returns:
            (B, S, topk) int32, -1 where there is none.
        """
        rows = chosen.clamp_min(0).long().flatten(1)
        found = self.position.gather(1, rows).view(chosen.shape).to(torch.int32)
        return found.masked_fill_(chosen < 0, -1)

    def compacted(self, keys: Tensor) -> Tensor:
        """Return keys (B, T, D) in the order of their numbers; behind the last, anything."""
        return keys.gather(1, self.position[..., None].expand(-1, -1, keys.shape[2]))


def may_wait(tensor: Tensor) -> bool:
    """Return whether the host may read a value of `tensor` here."""
    if torch.compiler.is_compiling():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def seen_by(mask: Tensor, batch: int) -> SeenKeys:
    """Number the keys that a mask lets any of its queries see.

    Args:
        mask: (B, S, T) or (1, S, T) bool, True where a query may look, or what is added to logits.
            It is looked at in parts, because it may be the largest tensor of the call.
        batch: B.
    """
    parts = mask.split(max(1, MASK_ELEMENTS // (len(mask) * mask.shape[-1])), dim=1)
    any_seen = torch.stack([allowed(part).any(dim=1) for part in parts]).any(dim=0)
    number = torch.where(any_seen, any_seen.cumsum(1) - 1, -1)
    num_keys = mask.shape[-1]
    place = torch.arange(num_keys, device=mask.device).expand_as(number)
    # A column more takes the keys without a number.
    position = number.new_zeros(len(number), num_keys + 1)
    position.scatter_(1, torch.where(any_seen, number, num_keys), place)
    firsts, lengths, right = zip(*(_ranges(part, number) for part in parts), strict=True)
    return SeenKeys(
        number.expand(batch, -1),
        position[:, :num_keys].expand(batch, -1),
        torch.cat(firsts, dim=1).expand(batch, -1),
        torch.cat(lengths, dim=1).expand(batch, -1),
        torch.stack(right).all(),
    )


def _ranges(mask: Tensor, number: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (first, lengths, are_ranges) of a part of the queries, see `SeenKeys`."""
    may = allowed(mask)
    lengths = may.sum(dim=2, dtype=torch.int32)
    first = number.gather(1, may.to(torch.uint8).argmax(dim=2)).clamp_min(0)
    of_key = number[:, None]
    within = (of_key >= first[..., None]) & (of_key < (first + lengths)[..., None])
    return first, lengths, (may == within).all()


def allowed(mask: Tensor) -> Tensor:
    """Return a mask as bool, True where a query may look."""
    return mask if mask.dtype == torch.bool else mask >= 0


class OncePerCall:
    """Compute something from a mask once per model call, for all layers that get views of it.

    A layer takes the result of a layer before it if both got the same memory. The first layer of a
    call always computes, because a caller may write another mask into the same memory.
    """

    def __init__(self, compute: Callable[..., Any]) -> None:
        self._compute = compute
        self._last: tuple[Any, ...] | None = None

    def __call__(self, mask: Tensor, layer: int, *others: Any) -> Any:
        """Return `compute(mask, *others)`; `layer` is the number of the layer that asks."""
        if torch.compiler.is_compiling():
            return self._compute(mask, *others)
        key = mask.storage_offset(), mask.shape, mask.stride(), mask.dtype, others
        storage = StorageWeakRef(mask.untyped_storage())
        result = None
        if self._last is not None:
            its_storage, its_key, its_layer, its_result = self._last
            if its_storage == storage and not its_storage.expired() and its_key == key:
                result = its_result if layer > its_layer else None
        if result is None:
            result = self._compute(mask, *others)
        self._last = storage, key, layer, result
        return result


numbered = OncePerCall(seen_by)
"""`seen_by(mask, batch)` once per model call: `numbered(mask, layer, batch)`."""
