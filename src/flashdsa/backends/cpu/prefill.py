"""The indexer of many queries over shared keys by torch: some queries at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.cpu.indexer import TOKEN_BLOCK, score
from flashdsa.backends.cpu.tiling import CPU, Mode, spans
from flashdsa.backends.cpu.topk import choose, rows_at_once
from flashdsa.backends.indexer.tensors import values_are_checked
from flashdsa.errors import ArgumentValueError

if TYPE_CHECKING:
    from flashdsa.ops.prefill import PrefillOperands, TopkPrefillOperands


class Queries(NamedTuple):
    """Some queries: their numbers, scores (n, width) fp32 of the keys from `first_key` on, and
    their ranges' starts and ends (n, 1) from there."""

    numbers: slice
    scores: Tensor
    first_key: int
    starts: Tensor
    ends: Tensor


def topk_prefill(
    operands: TopkPrefillOperands, *, sorted: bool, block: int, mode: Mode = CPU
) -> None:
    """Write each query's best key rows into `topk_indices` (S, topk) int32.

    Default order: ascending row; `sorted`: descending score, ties by row.

    Args:
        block: if not 1, ids are those of blocks of `block` rows from a query's first; with
            candidates, these are blocks to choose rows from.

    Raises:
        ArgumentValueError: a range that is no range of the keys, where values are read, before
            anything is written; otherwise ranges are clamped.
    """
    _check(operands.inputs, mode)
    x, topk = operands, operands.topk_indices.shape[1]
    of_blocks = block > 1 and x.candidates is None
    everything = 0 if sorted or of_blocks else topk
    for some in _scored(x.inputs, mode, everything):
        scores, lengths = some.scores, some.ends - some.starts
        offset = torch.arange(scores.shape[1], device=scores.device)
        selectable = (offset >= some.starts) & (offset < some.ends)
        # Blocks are counted from a query's first key on.
        moves = block > 1 or x.candidates is not None
        if moves:
            moved = (offset + some.starts).clamp(max=max(len(offset) - 1, 0))
            scores, selectable = scores.gather(1, moved), offset < lengths
        listed = None if x.candidates is None else x.candidates[some.numbers]
        chosen = choose(
            scores, selectable, lengths, topk, block=block, candidates=listed, sorted=sorted
        )
        if not of_blocks:
            first = some.starts + some.first_key if moves else some.first_key
            chosen = torch.where(chosen < 0, -1, chosen + first).to(torch.int32)
        x.topk_indices[some.numbers] = chosen


def logits(operands: PrefillOperands, *, mode: Mode = CPU) -> Tensor:
    """Scores (S, S_kv) fp32, -inf outside each query's range.

    Raises:
        ArgumentValueError: a range that is no range of the keys, where values are read.
    """
    _check(operands, mode)
    shape = len(operands.ends), len(operands.k_index)
    out = operands.weights.new_full(shape, -math.inf)
    for some in _scored(operands, mode, 0):
        key = torch.arange(some.scores.shape[1], device=out.device)
        outside = (key < some.starts) | (key >= some.ends)
        keys = slice(some.first_key, some.first_key + len(key))
        out[some.numbers, keys] = some.scores.masked_fill(outside, -math.inf)
    return out


def _check(x: PrefillOperands, mode: Mode) -> None:
    if mode.reads or values_are_checked():
        ranges_of(x)


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


def _scored(x: PrefillOperands, mode: Mode, everything: int) -> Iterator[Queries]:
    """All queries, some at a time.

    A mode that reads values looks at keys from the first to the last of their ranges, and leaves
    scores 0 if no range has more than `everything` keys, which are all chosen.
    """
    (count, num_heads, _), num_keys = x.q_index.shape, len(x.k_index)
    ends = x.ends.clamp(0, num_keys)
    starts = torch.zeros_like(ends) if x.starts is None else x.starts.clamp(0, num_keys)
    of_token = 2 * mode.index_dtype.itemsize * num_heads
    of_tokens = of_token * min(TOKEN_BLOCK, num_keys) // max(num_keys, 1)
    for first, last in spans(count, rows_at_once(num_keys, mode, of_tokens)):
        numbers = slice(first, last)
        start, end = starts[numbers, None], ends[numbers, None]
        low, high, scored = 0, num_keys, True
        if mode.reads:
            scored = bool(((end - start) > everything).any())
            low, high = int(start.min()), int(end.max())
        q, weights = x.q_index[numbers].to(mode.index_dtype), x.weights[numbers]
        scores = x.weights.new_zeros(last - first, max(high - low, 0))
        for begin, behind in spans(scores.shape[1] if scored else 0, TOKEN_BLOCK):
            keys = x.k_index[low + begin : low + behind].t()
            scores[:, begin:behind] = score(q, weights, keys, mode)
        if x.k_scale is not None:
            scores *= x.k_scale[low : low + scores.shape[1]]
        yield Queries(numbers, scores, low, start - low, end - low)
