"""The pool of pages: which physical row holds which byte of which window, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAGE_SIZE = 64
BYTES_PER_TOKEN = 132  # 128 e4m3 values and one fp32 scale
# Pages that belong to nobody: their rows hold NaN, so a read through a wrong id shows at once.
SPARE_PAGES = 4


@dataclass(frozen=True)
class PagePool:
    """A shuffled assignment of `batch` windows of `window` tokens to physical pages.

    The indexer's key cache and `kv` lie in the same page order, so the ids that the indexer gives
    address rows of `kv`.
    """

    window: int
    num_pages: int
    block_table: Tensor  # [batch, pages_per_window] int32
    slots: Tensor  # [batch, window] int64: token -> physical row
    owner: Tensor  # [num_pages * PAGE_SIZE] int64: physical row -> window, -1 where unused
    position: Tensor  # [num_pages * PAGE_SIZE] int64: physical row -> position, -1 where unused

    @classmethod
    def shuffled(
        cls, batch: int, window: int, generator: torch.Generator, device: str = "cpu"
    ) -> PagePool:
        """Give every window its pages in random physical order, with spare pages in between.

        The order is the same on every device; `generator` is of the CPU.
        """
        pages_per_window = -(-window // PAGE_SIZE)
        num_pages = batch * pages_per_window + SPARE_PAGES
        order = torch.randperm(num_pages, generator=generator).to(device)
        block_table = order[: batch * pages_per_window].view(batch, pages_per_window)
        token = torch.arange(window, device=device)
        slots = block_table[:, token // PAGE_SIZE] * PAGE_SIZE + token % PAGE_SIZE
        owner = torch.full((num_pages * PAGE_SIZE,), -1, device=device)
        position = owner.clone()
        owner[slots] = torch.arange(batch, device=device)[:, None].expand_as(slots)
        position[slots] = token.expand_as(slots)
        return cls(window, num_pages, block_table.int(), slots, owner, position)

    @property
    def batch(self) -> int:
        """Number of windows in the pool."""
        return self.slots.shape[0]

    def place(self, rows: Tensor) -> Tensor:
        """[batch, window, D] in reading order -> [num_pages * 64, D] in page order; spare rows NaN.

        Differentiable: gradients of the used rows flow back, those of spare rows go nowhere.
        """
        pool = rows.new_full((self.num_pages * PAGE_SIZE, rows.shape[-1]), float("nan"))
        return pool.index_copy(0, self.slots.flatten(), rows.flatten(0, 1))

    def empty_index_cache(self) -> Tensor:
        """[num_pages, 64, 1, 132] uint8, every byte 0xFF: NaN keys and NaN scales."""
        shape = (self.num_pages, PAGE_SIZE, 1, BYTES_PER_TOKEN)
        return torch.full(shape, 0xFF, dtype=torch.uint8, device=self.slots.device)

    def tables_per_query(self, num_queries: int) -> Tensor:
        """[batch * num_queries, pages_per_window] int32: a query uses its window's pages."""
        return self.block_table.repeat_interleave(num_queries, dim=0)

    def positions_of(self, indices: Tensor, num_queries: int) -> Tensor:
        """Physical ids [batch * num_queries, topk] -> positions of the same shape.

        -1 stays -1. An id of a row that is not the query's window's raises RuntimeError.
        """
        window_of_query = torch.arange(self.batch, device=indices.device)
        expected = window_of_query.repeat_interleave(num_queries)[:, None]  # [S, 1]
        valid = indices >= 0
        row = indices.clamp_min(0).long()
        if bool((valid & (self.owner[row] != expected)).any()):
            raise RuntimeError("indices: an id names a row outside the query's own window")
        return torch.where(valid, self.position[row], -1)
