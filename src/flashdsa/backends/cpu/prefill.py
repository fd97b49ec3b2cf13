"""The indexer of many queries over shared keys on the CPU: a block of queries at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashdsa.backends.cpu import indexer
from flashdsa.backends.cpu.tiling import spans
from flashdsa.errors import ArgumentValueError

if TYPE_CHECKING:
    from flashdsa.ops.prefill import PrefillOperands, TopkPrefillOperands

SCORE_BLOCK_ELEMENTS = 2**22
"""Aim for scores held at once over a block of queries (16 MiB)."""


def topk_prefill(operands: TopkPrefillOperands, *, sorted: bool, block: int) -> None:
    """Write each query's best key rows into `topk_indices` (S, topk) int32.

    Default order: ascending row; `sorted`: descending score, ties by row.

    Args:
        block: if not 1, ids are those of blocks of so many rows from a query's first; with
            candidates, these are blocks to choose rows from.

    Raises:
        ArgumentValueError: a range that is no range of the keys; nothing is written.
    """
    topk_indices, topk = operands.topk_indices, operands.topk_indices.shape[1]
    candidates, ranges = operands.candidates, ranges_of(operands.inputs)
    of_blocks = block if candidates is None else 1
    topk_indices.fill_(-1)
    scored = []
    for query, (start, end) in enumerate(ranges):
        if sorted or of_blocks > 1 or candidates is not None or end - start > topk:
            scored.append(query)
        else:
            topk_indices[query, : end - start] = torch.arange(start, end, dtype=torch.int32)
    for query, first_key, scores in _scores(operands.inputs, ranges, scored):
        listed = (
            None if candidates is None else indexer.among(candidates[query], len(scores), block)
        )
        chosen = indexer.select_blocks(scores, listed, topk, of_blocks, sorted=sorted)
        if of_blocks == 1:
            chosen = chosen + first_key
        topk_indices[query, : len(chosen)] = chosen.to(torch.int32)


def logits(operands: PrefillOperands) -> Tensor:
    """Scores (S, S_kv) fp32, -inf outside each query's range.

    Raises:
        ArgumentValueError: a range that is no range of the keys.
    """
    ranges = ranges_of(operands)
    shape = operands.q_index.shape[0], operands.k_index.shape[0]
    out = torch.full(shape, -math.inf, dtype=torch.float32)
    for query, first_key, scores in _scores(operands, ranges, list(range(len(ranges)))):
        out[query, first_key : first_key + len(scores)] = scores
    return out


def ranges_of(operands: PrefillOperands) -> list[tuple[int, int]]:
    """(start, end) of each query's keys.

    Raises:
        ArgumentValueError: names the first that is no range of the keys.
    """
    num_keys, ends = operands.k_index.shape[0], operands.ends.tolist()
    starts = [0] * len(ends) if operands.starts is None else operands.starts.tolist()
    ranges = list(zip(starts, ends, strict=True))
    for query, (start, end) in enumerate(ranges):
        if not 0 <= start <= num_keys:
            raise ArgumentValueError(
                f"starts: expected values in [0, {num_keys}], the rows of k_index; "
                f"got starts[{query}] = {start}"
            )
        if not start <= end <= num_keys:
            raise ArgumentValueError(
                f"ends: expected values in [starts, {num_keys}], the rows of k_index; "
                f"got ends[{query}] = {end} where it starts at {start}"
            )
    return ranges


def _scores(
    operands: PrefillOperands, ranges: list[tuple[int, int]], wanted: list[int]
) -> Iterator[tuple[int, int, Tensor]]:
    """(query, its first key, its scores (end - start,) fp32) of the `wanted` queries."""
    for block in _blocks(ranges, wanted, operands.q_index.shape[1]):
        first = min(ranges[query][0] for query in block)
        last = max(ranges[query][1] for query in block)
        q = operands.q_index[block].double()  # (queries, H, 128), exact
        weights = operands.weights[block]
        scores = torch.empty(len(block), last - first, dtype=torch.float32)
        for begin, end in spans(last - first, indexer.TOKEN_BLOCK):
            rows = slice(first + begin, first + end)
            keys = operands.k_index[rows].double().t()
            scale = torch.ones(end - begin, dtype=torch.float32)
            if operands.k_scale is not None:
                scale = operands.k_scale[rows]
            scores[:, begin:end] = indexer.score(q, weights, keys, scale)
        for member, query in enumerate(block):
            start, end = ranges[query]
            yield query, start, scores[member, start - first : end - first]


def _blocks(
    ranges: list[tuple[int, int]], wanted: list[int], num_heads: int
) -> Iterator[list[int]]:
    """Runs of wanted queries whose ranges meet, as many as the workspace holds."""
    block: list[int] = []
    first = last = 0
    for query in wanted:
        start, end = ranges[query]
        low, high = min(first, start), max(last, end)
        span, count = high - low, len(block) + 1
        full = (
            count * num_heads * min(span, indexer.TOKEN_BLOCK) > indexer.ROW_BLOCK_ELEMENTS
            or count * span > SCORE_BLOCK_ELEMENTS
        )
        if block and (full or start > last or end < first):
            yield block
            block = []
        if not block:
            low, high = start, end
        block.append(query)
        first, last = low, high
    if block:
        yield block
