"""Exact top-k of given scores on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.topk import check_lengths
from flashdsa.backends.indexer.tensors import values_are_checked
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.ranking import bind_ranking
from flashdsa.kernels.indexer.sm90.rank.plan import Of
from flashdsa.settings import Settings

if TYPE_CHECKING:
    from flashdsa.ops.indexer import TopkOperands


def bind(
    runner: Runner, operands: TopkOperands, *, topk: int, sorted: bool
) -> Callable[[Sequence[Any]], Tensor]:
    """Positions (B, topk) int32 of the best `min(topk, length)` scores of each row, then -1.

    Lengths are clamped to [0, max_len]; with FLASHDSA_CHECK=1 others are errors, which waits for
    the device. Order and ties as on the CPU.
    """
    rows, max_len = operands.scores.shape
    check, is_empty = Settings.from_environment().check, not operands.scores.numel()
    empty_ids = runner.allocator(rows, topk, dtype=torch.int32)
    no_pages, from_0 = (runner.empty(*none, dtype=torch.int32) for none in ((0, 0), (0,)))
    rank = None if is_empty else bind_ranking(runner, Of.SCORES, rows, topk, sorted=sorted)

    def serve(operands: Sequence[Any]) -> Tensor:
        scores, lengths = operands
        if check and values_are_checked():
            check_lengths(lengths.cpu(), max_len)
        ids = empty_ids()
        if rank is None:
            return ids.fill_(-1)
        return rank(scores, from_0, lengths.contiguous(), no_pages, 0, 0, ids)

    return runner.on_device(serve)
