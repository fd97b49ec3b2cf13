"""Ids, lengths and contexts of a draw as tensors, made on the device without a loop over queries.

k distinct numbers below n are one of each k-th part of them: exact in their count, in their mean
and in what two lists share on average, and made without sorting.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PRIMES = (7919, 104_729, 1_299_709, 15_485_863, 32_452_843, 49_979_687, 67_867_967, 86_028_121)
"""Steps through the slots of a list: prime and above any topk, hence prime to each length."""
Kind = tuple[Any, ...]


def draw_ids(kind: Kind, rows: Tensor, k: int, keys: int, g: torch.Generator) -> Tensor:
    """int32 (S, k) of `rows`, the keys (S,) that each query sees; -1 fills up."""
    if kind[0] in ("corr", "random"):
        return _renewed(len(rows), k, keys, kind[1] if kind[0] == "corr" else 1.0, g)
    if kind[0] == "prefix":
        slots = torch.arange(k, device=rows.device, dtype=torch.int32)
        return slots.where(slots < _prefix(kind, len(rows), k, g)[:, None], -1)
    newest = min(kind[1], k) if kind[0] == "window" else 0
    return positions(newest, rows, k, g).int()


def positions(newest: int, rows: Tensor, k: int, g: torch.Generator) -> Tensor:
    """int64 (S, k): the last `newest` of each query's `rows` keys, the rest distinct older ones,
    slots shuffled; then -1 where there are fewer than k."""
    slots, seen = torch.arange(k, device=rows.device), rows.long()[:, None]
    older, at = (seen - newest).clamp(min=0), slots - newest
    low, high = (at * older // max(1, k - newest) for at in (at, at + 1))
    drawn = low + (_uniform((len(rows), k), g) * (high - low)).long().clamp(max=high - low - 1)
    few = at.where(at < older, -1)
    ids = drawn.where(older >= k - newest, few)
    ids = ids.where(slots >= newest, (seen - 1 - slots).clamp(min=-1))
    return _shuffled(ids, seen.clamp(max=k), g)


def _shuffled(ids: Tensor, filled: Tensor, g: torch.Generator) -> Tensor:
    """The first `filled` (S, 1) slots of each list in another order."""
    rows, k = ids.shape
    slots = torch.arange(k, device=ids.device)
    primes = torch.tensor(PRIMES, device=ids.device)
    step = primes[torch.randint(len(PRIMES), (rows, 1), generator=g, device=ids.device)]
    begin = torch.randint(k, (rows, 1), generator=g, device=ids.device)
    moved = (slots * step + begin) % filled.clamp(min=1)
    return ids.gather(1, moved.where(slots < filled, slots))


def _renewed(queries: int, k: int, keys: int, share: float, g: torch.Generator) -> Tensor:
    """Lists of which each slot is drawn anew in a query with probability `share`: a slot has its
    own part of a random order of the keys, so that none repeats."""
    parts = torch.arange(k + 1, device=g.device) * keys // k
    sizes = parts.diff()
    fresh = parts[:-1] + (_uniform((queries, k), g) * sizes).long().clamp(max=sizes - 1)
    if share < 1:
        query = torch.arange(queries, device=g.device)[:, None]
        anew = query * (_uniform((queries, k), g) < share)
        fresh = fresh.gather(0, anew.cummax(0).values)
    order = torch.randperm(keys, generator=g, device=g.device, dtype=torch.int32)
    ids: Tensor = order.take(fresh)
    return ids


def _uniform(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=g, device=g.device)


def _prefix(kind: Kind, queries: int, k: int, g: torch.Generator) -> Tensor:
    return (torch.arange(queries, device=g.device) + int(kind[1])).clamp(max=k)


def draw_lengths(kind: Kind | None, queries: int, k: int, g: torch.Generator) -> Tensor | None:
    """int32 (S,), slots in use; None: all of them."""
    if kind is None:
        return None
    if kind[0] == "prefix":
        return _prefix(kind, queries, k, g).int()
    low, high = max(1, int(kind[1] * k)), max(1, int(kind[2] * k))
    return torch.randint(low, high + 1, (queries,), generator=g, device=g.device).int()


def causal_rows(queries: int, keys: int, device: str) -> Tensor:
    """Keys that each of the last `queries` of `keys` tokens sees, itself included: at least one."""
    return (torch.arange(queries, device=device) + keys - queries + 1).clamp(min=1)


def shuffled_pages(tokens: Tensor, page: int, g: torch.Generator) -> tuple[Tensor, int]:
    """A block table int64 (requests, most pages) of own pages in random order, and the pool."""
    pages = (tokens + page - 1) // page
    pool = int(pages.sum())
    order = torch.randperm(pool, generator=g, device=g.device)
    begins = pages.cumsum(0) - pages
    most = torch.arange(int(pages.max()), device=g.device)
    return order[(begins[:, None] + most).clamp(max=pool - 1)], pool
