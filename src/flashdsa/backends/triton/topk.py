"""Exact top-k of rows of scores by Triton: the launches that choose among a row's parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.cpu.topk import check_lengths
from flashdsa.backends.indexer.tensors import values_are_checked
from flashdsa.backends.runner import Runner
from flashdsa.backends.triton.launch import (
    Shape,
    has_many_rows,
    launch,
    shape_of_selection,
    short_rows,
)

if TYPE_CHECKING:
    from flashdsa.ops.indexer import TopkOperands

UNSIGNED = 2**32 - 1


class Scores(NamedTuple):
    """Rows to choose from.

    Attributes:
        bits: (rows, width) int32, of fp32 scores. marked: some are `index_scores.NEVER`.
        ends: (rows,) int32. begins: likewise, or None for 0.
        table: (rows / next_n, max_pages) int32 and the tokens that its entries name, for ids that
            are slots.
    """

    bits: Tensor
    ends: Tensor
    begins: Tensor | None = None
    marked: bool = False
    table: Tensor | None = None
    table_page: int = 0


def bind(
    runner: Runner, operands: TopkOperands, *, topk: int, sorted: bool
) -> Callable[[Sequence[Any]], Tensor]:
    """Positions (B, topk) int32 of the best `min(topk, length)` scores of each row, then -1.

    Lengths are clamped to [0, max_len]; with FLASHDSA_CHECK=1 others are errors, which waits for
    the device. Order and ties as on the CPU.
    """

    def serve(given: Sequence[Any]) -> Tensor:
        scores, lengths = given
        if values_are_checked():
            check_lengths(lengths, scores.shape[1])
        out = runner.empty(len(scores), topk, dtype=torch.int32)
        bits = scores.view(torch.int32)
        choose(runner, Scores(bits, lengths.contiguous()), out, sorted=sorted)
        return out

    return runner.on_device(serve)


def choose(runner: Runner, x: Scores, out: Tensor, *, sorted: bool) -> None:
    """Write the best of each row into `out` (rows, topk) int32, without gaps, then -1: ids in
    ascending position, or `sorted` in descending score, ties by position."""
    from flashdsa.kernels.triton.selection import select

    (rows, topk), width = out.shape, x.bits.shape[1]
    if not rows or not width:
        out.fill_(-1)
        return
    rank = torch.empty_like(out) if sorted else out  # keys, or nothing
    table = x.ends if x.table is None else x.table
    begins = x.ends if x.begins is None else x.begins
    many = has_many_rows(runner, rows)
    most = shape_of_selection(width, many).keys

    def launch_level(
        scores: Tensor, positions: Tensor, ids: Tensor, keys: Tensor, shape: Shape, parts: int,
        level: int, least: int, *, short: bool = False,
    ) -> None:  # fmt: skip
        launch(
            runner, select, (rows, parts, 1),
            (scores, positions, begins, x.ends, table, ids, keys, out, rank, scores.stride(0),
             width, topk, rows // len(table), table.stride(0), least),
            shape, BLOCK=shape.keys, MOST=most, LEVEL=level, LAST=parts == 1, SHORT=short,
            FROM_0=x.begins is None, MARKED=x.marked and not level, TABLE_PAGE=x.table_page,
            SORTED=sorted,
        )  # fmt: skip

    least = -1
    for short in short_rows(width, many):
        shape = shape_of_selection(short, many)
        launch_level(x.bits, x.ends, out, rank, shape, 1, 0, least, short=True)
        least = short
    scores, positions, more, level = x.bits, x.ends, width, 0
    while more:
        shape = shape_of_selection(more, many)
        parts = -(-more // shape.keys)
        some = rows, parts * topk
        ids, keys = (
            (out, rank) if parts == 1 else (runner.empty(*some, dtype=torch.int32) for _ in "ik")
        )
        launch_level(scores, positions, ids, keys, shape, parts, level, least)
        scores, positions, more, level = keys, ids, 0 if parts == 1 else parts * topk, level + 1
    if sorted:  # keys are unsigned; 0 behind the last one
        order = (rank.long() & UNSIGNED).argsort(dim=1, descending=True, stable=True)
        out.copy_(out.gather(1, order))
