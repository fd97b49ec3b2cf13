"""The indexer's scores on Hopper GPUs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.indexer import check_values
from flashdsa.backends.sm90.device import num_ctas, values_are_checked
from flashdsa.backends.sm90.indexer import require_layout
from flashdsa.errors import ArgumentValueError
from flashdsa.jit.loader import load
from flashdsa.kernels.catalog import INDEXER_LOGITS
from flashdsa.kernels.indexer.sm90.logits_plan import LogitsPlan
from flashdsa.operands import IndexerOperands


def logits(operands: IndexerOperands, *, max_len: int) -> Tensor:
    """Scores (B, max_len) fp32 of the tokens before `seq_lens`, -inf beyond and in bad pages.

    Bit-equal to what the fused kernel ranks. A row longer than `max_len` or its table is scored as
    far as both go; with FLASHDSA_CHECK=1 that, a negative length and a bad page id are errors,
    which waits for the device.
    """
    q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table = operands
    scores = torch.empty(
        q_index_fp8.shape[0], max_len, dtype=torch.float32, device=q_index_fp8.device
    )
    require_layout(*operands, scores)
    check_if_asked(seq_lens, block_table, k_index_cache_fp8.shape[0], max_len)
    if scores.shape[0] == 0 or k_index_cache_fp8.shape[0] == 0:
        return scores.fill_(-torch.inf)
    function = _function(q_index_fp8.shape[1])
    with torch.cuda.device(scores.device):
        function(
            q_index_fp8,
            k_index_cache_fp8.view(torch.uint8),
            weights,
            seq_lens,
            block_table,
            scores,
            num_ctas(scores.device),
        )
    return scores


@lru_cache
def _function(num_heads: int) -> Any:
    return load(INDEXER_LOGITS, LogitsPlan(num_heads=num_heads))


def check_if_asked(seq_lens: Tensor, block_table: Tensor, num_pages: int, max_len: int) -> None:
    """With FLASHDSA_CHECK=1, raise ArgumentValueError for a bad length or page id."""
    if not values_are_checked():
        return
    check_values(seq_lens.cpu(), block_table.cpu(), num_pages)
    longest = int(seq_lens.max()) if len(seq_lens) else 0
    if longest > max_len:
        raise ArgumentValueError(
            f"max_len: expected at least the longest of seq_lens, {longest}; got {max_len}"
        )
