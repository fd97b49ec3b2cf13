"""The indexer of many queries over shared keys by Triton: pieces of queries are scored, then
ranked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.prefill import ranges_of
from flashdsa.backends.cpu.tiling import spans
from flashdsa.backends.indexer.tensors import values_are_checked
from flashdsa.backends.memory import readable, written_apart
from flashdsa.backends.runner import Runner
from flashdsa.backends.triton.indexer import Keys, rows_at_once, score
from flashdsa.backends.triton.launch import PREFILL_RUN, has_fp8
from flashdsa.backends.triton.topk import Scores, choose

if TYPE_CHECKING:
    from flashdsa.ops.prefill import PrefillOperands, TopkPrefillOperands


def bind(
    runner: Runner, operands: TopkPrefillOperands, *, sorted: bool
) -> Callable[[Sequence[Any]], None]:
    """Write each query's best key rows into `topk_indices`, as `cpu.prefill.topk_prefill` does;
    ranges are clamped to the keys."""
    kind = type(operands)

    def serve(given: Sequence[Any]) -> None:
        x = kind(*given)
        q, keys = _of(runner, x.inputs)
        queries, width = len(q), len(keys.rows)
        if not queries or not width:
            x.topk_indices.fill_(-1)
            return
        unscored = 0 if sorted else x.topk_indices.shape[1]
        for first, end in spans(queries, rows_at_once(width, PREFILL_RUN)):
            own = slice(first, end)
            begins = None if x.starts is None else x.starts[own].contiguous()
            ends = x.ends[own].contiguous()
            bits = runner.empty(end - first, width, dtype=torch.int32)
            score(runner, keys, q[own], x.weights[own], begins, ends, bits, PREFILL_RUN, unscored)
            choose(runner, Scores(bits, ends, begins), x.topk_indices[own], sorted=sorted)

    return runner.on_device(written_apart(serve, operands, "topk_indices"))


def bind_logits(runner: Runner, operands: PrefillOperands) -> Callable[[Sequence[Any]], Tensor]:
    """Scores (S, S_kv) fp32, -inf outside each query's range. Bit-equal to what is ranked."""
    kind = type(operands)

    def serve(given: Sequence[Any]) -> Tensor:
        x = kind(*given)
        q, keys = _of(runner, x)
        scores = runner.empty(len(q), len(keys.rows), dtype=torch.float32).fill_(-math.inf)
        if scores.numel():
            begins = None if x.starts is None else x.starts.contiguous()
            bits, ends = scores.view(torch.int32), x.ends.contiguous()
            score(runner, keys, q, x.weights, begins, ends, bits, PREFILL_RUN)
        return scores

    return runner.on_device(serve)


def _of(runner: Runner, x: PrefillOperands) -> tuple[Tensor, Keys]:
    """Queries and keys as the products take them.

    Raises:
        ArgumentValueError: a range is none of the keys, where FLASHDSA_CHECK is set.
    """
    if values_are_checked():
        ranges_of(x)
    q, k = x.q_index, x.k_index
    if k.dtype == torch.float8_e4m3fn and not has_fp8(runner):
        q, k = q.to(torch.bfloat16), k.to(torch.bfloat16)
    scales = None if x.k_scale is None else x.k_scale.contiguous()
    return readable(q), Keys(readable(k), scales)
