"""The indexer's scores on GPUs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flashdsa.backends.cpu.indexer import check_values
from flashdsa.backends.indexer.tensors import require_layout, values_are_checked
from flashdsa.backends.runner import Runner
from flashdsa.errors import ArgumentValueError
from flashdsa.operands import IndexerOperands
from flashdsa.plan.kernel_spec import KernelSpec


def logits(spec: KernelSpec, runner: Runner, operands: IndexerOperands, *, max_len: int) -> Tensor:
    """Scores (B, max_len) fp32 of the tokens before `seq_lens`, -inf beyond and in bad pages.

    Bit-equal to what the fused kernel ranks. A row longer than `max_len` or its table is scored as
    far as both go; with FLASHDSA_CHECK=1 that, a negative length and a bad page id are errors,
    which waits for the device.
    """
    q_index_fp8, cache, weights, seq_lens, block_table = operands
    rows, num_heads, _ = q_index_fp8.shape
    scores = runner.empty(rows, max_len, dtype=torch.float32)
    require_layout(*operands, scores)
    _check_if_asked(operands, max_len)
    if not rows or not cache.shape[0]:
        return scores.fill_(-torch.inf)
    key = spec, num_heads
    function = runner.launches.get(key)
    if function is None:
        plan = replace(spec.plans[0], num_heads=num_heads)
        function = runner.launches[key] = runner.function(spec, plan)
    with runner.launching():
        function(
            q_index_fp8,
            cache.view(torch.uint8),
            weights,
            seq_lens,
            block_table,
            scores,
            runner.num_sms,  # a CTA each
        )
    return scores


def _check_if_asked(operands: IndexerOperands, max_len: int) -> None:
    """Raise ArgumentValueError for a bad length or page id, if FLASHDSA_CHECK=1."""
    if not values_are_checked():
        return
    seq_lens = operands.seq_lens.cpu()
    check_values(seq_lens, operands.block_table.cpu(), operands.k_index_cache_fp8.shape[0])
    longest = int(seq_lens.max()) if len(seq_lens) else 0
    if longest > max_len:
        raise ArgumentValueError(
            f"max_len: expected at least the longest of seq_lens, {longest}; got {max_len}"
        )
