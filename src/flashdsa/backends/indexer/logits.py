"""The indexer's scores on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.indexer import check_logits
from flashdsa.backends.indexer.tensors import as_read, slots_of_tokens, values_are_checked
from flashdsa.backends.mxfp4 import has_mxfp4
from flashdsa.backends.runner import Runner
from flashdsa.plan.kernel_spec import KernelSpec
from flashdsa.problem import PAGE_SIZE
from flashdsa.settings import Settings

if TYPE_CHECKING:
    from flashdsa.ops.indexer import IndexerOperands, TopkIndexerOperands


def bind(
    spec: KernelSpec,
    runner: Runner,
    operands: IndexerOperands,
    *,
    max_len: int,
    table_page_size: int,
) -> Callable[[Sequence[Any]], Tensor]:
    """Scores (B, max_len) fp32 of the tokens before `seq_lens`, -inf beyond and in bad pages.

    Bit-equal to what the fused kernel ranks. A row longer than `max_len` or its table is scored as
    far as both go; with FLASHDSA_CHECK=1 that, a negative length and a bad page id are errors,
    which waits for the device.
    """
    rows = operands.q_index_fp8.shape[0]
    empty_scores = runner.allocator(rows, max_len, dtype=torch.float32)
    check = Settings.from_environment().check
    function: Callable[..., Any] | None = None
    if rows and operands.k_index_cache_fp8.shape[0]:
        function = runner.function(spec, plan_of(spec, operands, table_page_size))
    num_ctas, kind, gathers = runner.num_sms, type(operands), table_page_size < PAGE_SIZE

    def serve(operands: Sequence[Any]) -> Tensor:
        if check and values_are_checked():  # not while a graph is captured
            check_logits(kind(*operands), max_len, table_page_size)
        q_index_fp8, cache, weights, seq_lens, block_table = as_read(gathers, *operands)
        scores = empty_scores()
        if 1 < table_page_size < PAGE_SIZE:
            block_table = slots_of_tokens(block_table, table_page_size, cache.shape[0])
        if function is None:
            return scores.fill_(-torch.inf)
        pages = cache.view(torch.uint8)
        function(q_index_fp8, pages, weights, seq_lens, block_table, scores, num_ctas)
        return scores

    return runner.on_device(serve)


def plan_of(
    spec: KernelSpec, operands: IndexerOperands | TopkIndexerOperands, table_page_size: int
) -> Any:
    """Plan of the kernel that scores a call's keys."""
    kind_of_keys: dict[str, bool] = {"gathers": True} if table_page_size < PAGE_SIZE else {}
    if has_mxfp4(operands.k_index_cache_fp8):
        kind_of_keys["mxfp4"] = True
    return replace(spec.plans[0], num_heads=operands.q_index_fp8.shape[1], **kind_of_keys)
