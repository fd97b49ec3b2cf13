"""Blocks, and tokens of listed blocks, on Hopper GPUs: all positions are scored, then ranked.

A chunk of rows is scored into memory by the kernel of the scores alone, and ranked by a second
launch, which of listed blocks reads their scores only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.indexer import check_values
from flashdsa.backends.cpu.tiling import spans
from flashdsa.backends.indexer.logits import plan_of
from flashdsa.backends.indexer.tensors import as_read, values_are_checked
from flashdsa.backends.memory import written_apart
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90 import prefill
from flashdsa.backends.sm90.prefill_scores import bind_ranked
from flashdsa.backends.sm90.ranking import bind_choice, rows_at_once
from flashdsa.kernels.catalog import INDEXER_LOGITS
from flashdsa.kernels.indexer.sm90.plan import BLOCK
from flashdsa.problem import PAGE_SIZE

if TYPE_CHECKING:
    from flashdsa.ops.indexer import TopkIndexerOperands
    from flashdsa.ops.prefill import TopkPrefillOperands


def bind(
    runner: Runner,
    operands: TopkIndexerOperands,
    *,
    sorted: bool,
    positions: bool,
    block: int,
    check: bool,
) -> Callable[[Sequence[Any]], None]:
    """Write the ids of blocks, or of tokens of candidates, into `topk_indices`, in the CPU's order.

    Args: as for `topk_indexer.bind`; `block` is at most 64.
    """
    kind = type(operands)
    of_blocks = block > 1 and operands.candidates is None
    each = BLOCK if of_blocks and block % BLOCK == 0 else 1  # tokens of a written score
    plan = plan_of(INDEXER_LOGITS, operands, PAGE_SIZE)
    score = runner.function(INDEXER_LOGITS, replace(plan, of_blocks=each > 1))
    positions = positions or of_blocks
    rank = bind_choice(runner, operands, block, each, sorted=sorted, positions=positions,
                       paged=True)  # fmt: skip
    from_0 = runner.empty(0, dtype=torch.int32)

    def serve(given: Sequence[Any]) -> None:
        x = kind(*as_read(False, *given))
        table, num_pages = x.block_table, len(x.k_index_cache_fp8)
        width = table.shape[1] * PAGE_SIZE
        if check and values_are_checked():
            check_values(x.seq_lens.cpu(), table.cpu(), num_pages, PAGE_SIZE)
        rows = len(x.seq_lens)
        if not num_pages or not width or is_empty(x.candidates):
            x.topk_indices.fill_(-1)
            return
        if rows > len(table):
            table = table.repeat_interleave(rows // len(table), dim=0)
        pages = x.k_index_cache_fp8.view(torch.uint8)
        for first, end in spans(rows, rows_at_once(width)):
            own, lengths = slice(first, end), x.seq_lens[first:end]
            scores = runner.empty(end - first, width // each, dtype=torch.float32)
            score(x.q_index_fp8[own], pages, x.weights[own], lengths, table[own], scores,
                  runner.num_sms)  # fmt: skip
            rank(scores, from_0, lengths, table[own], num_pages, own, x)

    return runner.on_device(written_apart(serve, operands, "topk_indices"))


def bind_prefill(
    runner: Runner, operands: TopkPrefillOperands, *, sorted: bool, block: int
) -> Callable[[Sequence[Any]], None]:
    """Write the ids of blocks, or the rows of candidates, into `topk_indices`, in the CPU's order.

    Ranges are clamped to the keys; with FLASHDSA_CHECK=1 others are errors, as in `prefill.bind`.
    """
    kind = type(operands)
    serve: Callable[..., object]
    if not len(operands.q_index) or not len(operands.k_index) or is_empty(operands.candidates):
        serve = prefill.bind_none(operands)
    else:
        serve = bind_ranked(runner, operands, sorted=sorted, block=block)
    serve = runner.on_device(written_apart(serve, operands, "topk_indices"))
    return prefill.with_ranges_checked(serve, lambda given: kind(*given).inputs)


def is_empty(candidates: Tensor | None) -> bool:
    """Whether there are candidates, but no column of them."""
    return candidates is not None and not candidates.shape[1]
