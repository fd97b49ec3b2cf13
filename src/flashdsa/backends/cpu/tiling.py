"""Tiling of a problem in torch: its workspace stays bounded, and values are read or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

WORKSPACE_BYTES = 48 * 2**20
"""Aim for the temporaries of one tile; a single query with one key block may exceed it.

Measured on 2 cores: from 24 to 96 MiB the forward's time changes by less than 5%.
"""
DEVICE_WORKSPACE_BYTES = 2**28
"""The same on a GPU, where a tile costs some 20 launches."""
MAX_K_BLOCK = 2048
"""Keys of one query that are gathered at once: DSA's topk, so that its softmax is one pass."""

INVARIANT_K_BLOCK = 256
"""The same where a query's bits must not depend on the others, nor on the width of a table."""


class Mode(NamedTuple):
    """A backend's way with values.

    Attributes:
        reads: whether they decide about the work; a GPU would have to be waited for.
        workspace: bytes of a tile's temporaries.
        index_dtype: of the indexer's products. In fp64 those of e4m3 numbers are exact in any order
            (multiples of 2^-18 below 2^25: 43 bits).
    """

    reads: bool
    workspace: int
    index_dtype: torch.dtype


CPU = Mode(True, WORKSPACE_BYTES, torch.float64)
DEVICE = Mode(False, DEVICE_WORKSPACE_BYTES, torch.float32)


@dataclass(frozen=True)
class QueryTile:
    """Queries [`first`, `last`) and the number of their keys worked on at once."""

    first: int
    last: int
    k_block: int


def query_tiles(
    num_queries: int, topk: int, bytes_per_key: int, workspace: int = WORKSPACE_BYTES
) -> Iterator[QueryTile]:
    """Cut `num_queries` queries of `topk` keys, each key needing `bytes_per_key` of workspace."""
    k_block = max(1, min(topk, MAX_K_BLOCK))
    queries = max(1, workspace // (k_block * bytes_per_key))
    for first in range(0, num_queries, queries):
        yield QueryTile(first, min(first + queries, num_queries), k_block)


def one_by_one(num_queries: int) -> Iterator[QueryTile]:
    """A tile for each query, so that torch's products have the same sizes in any batch."""
    for first in range(num_queries):
        yield QueryTile(first, first + 1, INVARIANT_K_BLOCK)


def spans(length: int, step: int) -> Iterator[tuple[int, int]]:
    """[first, last) spans of at most `step` that cover `length`."""
    for first in range(0, length, step):
        yield first, min(first + step, length)
