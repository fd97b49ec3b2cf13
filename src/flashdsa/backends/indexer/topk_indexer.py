"""The fused indexer on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.indexer import check_values
from flashdsa.backends.indexer.launch import REFUSALS, Kernels, Launches, Others
from flashdsa.backends.indexer.tensors import as_read, slots_of_tokens, values_are_checked
from flashdsa.backends.memory import written_apart
from flashdsa.backends.runner import Runner
from flashdsa.plan.kernel_spec import KernelSpec
from flashdsa.problem import PAGE_SIZE
from flashdsa.settings import Settings

if TYPE_CHECKING:
    from flashdsa.ops.indexer import TopkIndexerOperands


def bind(
    spec: KernelSpec,
    order: KernelSpec,
    others: Others | None,
    runner: Runner,
    operands: TopkIndexerOperands,
    *,
    sorted: bool,
    positions: bool,
    table_page_size: int,
    check: bool,
) -> Callable[[Sequence[Any]], None]:
    """Write each row's best token ids into `topk_indices`, on the current stream.

    Default order: ascending token position; `sorted`: descending score, ties by position.

    Args:
        spec: the architecture's fused kernel. order: the one that sorts lists.
        others: None: it has no others.
        positions: an id is the token's position in its row, not its slot.
        table_page_size: tokens that an entry of the block table names; the table of 2 to 32 is
            spelt out as slots, 4 bytes a token beside the 132 that are read of each.
        check: with FLASHDSA_CHECK=1 bad lengths and page ids are errors, which waits for the
            device (and is left out while a CUDA graph is captured); otherwise lengths are clamped
            and tokens of bad pages are never emitted.
    """
    q_index_fp8, cache, _, seq_lens, block_table, topk_indices = operands[:6]
    rows, signed = seq_lens.numel(), cache.dtype is torch.int8
    gathers, spelt_out = table_page_size < PAGE_SIZE, 1 < table_page_size < PAGE_SIZE
    read = partial(as_read, gathers)
    in_place = all(map(is_, operands[:6], read(*operands[:6])))
    launches: Launches | None = None
    if rows and cache.numel():
        num_heads, topk = q_index_fp8.shape[1], topk_indices.shape[1]
        kernels = Kernels(spec, order, others, num_heads, topk, sorted, positions, gathers)
        launches = Launches(kernels, runner, rows, block_table.shape[0])
        # Loads the kernel of tables like this one.
        launches.of_width(block_table.shape[1] * (table_page_size if spelt_out else 1))

    def launch(
        q_index_fp8: Tensor,
        cache: Tensor,
        weights: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        topk_indices: Tensor,
    ) -> None:
        if launches is None:  # no rows, or no pages
            topk_indices.fill_(-1)
            return
        pages = cache.view(torch.uint8) if signed else cache
        if spelt_out:
            block_table = slots_of_tokens(block_table, table_page_size, cache.shape[0])
        kernel = launches.of_width(block_table.shape[1])
        kernel(q_index_fp8, pages, weights, seq_lens, block_table, topk_indices)

    def serve(given: Sequence[Any]) -> None:
        tensors = given[:6] if in_place else read(*given[:6])
        try:
            launch(*tensors)
        except REFUSALS:  # nothing was launched
            launch(*read(*tensors))

    run = written_apart(serve, operands, "topk_indices")
    if not check or not Settings.from_environment().check:
        return runner.on_device(run)

    def serve_checked(given: Sequence[Any]) -> None:
        _, cache, _, seq_lens, block_table = given[:5]
        if values_are_checked():
            values = seq_lens.cpu(), block_table.cpu()
            check_values(*values, cache.shape[0], table_page_size)
        run(given)

    return runner.on_device(serve_checked)
