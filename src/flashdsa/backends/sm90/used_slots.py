"""Lists that end at their last slot that names a row, which the device finds first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.packed_rows import num_rows
from flashdsa.backends.runner import Runner
from flashdsa.backends.sparse_mla_launches import Write
from flashdsa.kernels.catalog import SPARSE_MLA_USED_SLOTS
from flashdsa.problem import INT32_MAX

if TYPE_CHECKING:
    from flashdsa.ops.attention import SparseMlaOperands, SparseMlaOutOperands


def lack_lengths(operands: SparseMlaOperands) -> bool:
    """Whether a source has lists of ids without lengths."""
    x = operands
    of_main = x.ends is None and x.topk_length is None
    of_extra = x.extra_ends is None and x.extra_topk_length is None
    return of_main or (x.extra_indices is not None and of_extra)


def with_used_slots(
    runner: Runner, write: Write, operands: SparseMlaOperands, index_block: int
) -> Write:
    """`write` of lists of ids that end at their last slot that names a row: -1 that fill a table
    up, or a larger length, cost nothing then, and change no share of a list."""
    of_main = operands.ends is None
    of_extra = operands.extra_indices is not None and operands.extra_ends is None
    if not of_main and not of_extra:
        return write
    function = runner.function(SPARSE_MLA_USED_SLOTS, SPARSE_MLA_USED_SLOTS.plan)
    num_queries = operands.q.shape[0]
    every = runner.empty(0, dtype=torch.int32)
    no_slots = runner.empty(num_queries, 0, dtype=torch.int32)
    nothing = no_slots, every, 0
    new_lengths = runner.allocator(num_queries, dtype=torch.int32)

    def lists_of(
        ids: Tensor | None, lengths: Tensor | None, kv: Tensor | None, block: int
    ) -> tuple[Any, ...]:
        if ids is None or kv is None:
            return nothing
        count = min(-(-num_rows(kv) // block), INT32_MAX)
        return ids.contiguous(), every if lengths is None else lengths.contiguous(), count

    def write_used(given: SparseMlaOutOperands) -> None:
        main, more, used, extra_used = nothing, nothing, new_lengths(), every
        if of_main:
            main = lists_of(given.indices, given.topk_length, given.kv, index_block)
        if of_extra:
            more = lists_of(given.extra_indices, given.extra_topk_length, given.extra_kv, 1)
            extra_used = new_lengths()
        function(*main, used, *more, extra_used)
        if of_main:
            given = given._replace(topk_length=used)
        if of_extra:
            given = given._replace(extra_topk_length=extra_used)
        write(given)

    return write_used
