"""What the forwards of the GPUs share on the host: results, parts of the queries, launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.memory import readable
from flashdsa.backends.runner import Runner
from flashdsa.operands import SparseMlaOperands, SparseMlaOutOperands

UNION_BYTES = 5
"""Of a slot in the groups' lists: a row number and the queries that name it."""
MOST_UNION_BYTES = 256 << 20
"""Of the lists of one launch; queries that need more are launched in parts."""

Launch = Callable[[], None]
"""Writes the results of fixed tensors, on torch's current stream."""


def with_results(
    runner: Runner, operands: SparseMlaOperands, d_v: int, max_logits: bool
) -> tuple[SparseMlaOutOperands, tuple[Tensor, Tensor, Tensor]]:
    """The operands with new buffers, and those: O (S, H, d_v) in q's dtype, lse and max_logits
    (S, H) fp32, the latter without an element where it is not asked for."""
    q, kv, indices, topk_length, attn_sink = operands
    rows = q.shape[:2]
    out = runner.empty(*rows, d_v, dtype=q.dtype)
    lse = runner.empty(*rows, dtype=torch.float32)
    largest = runner.empty(*(rows if max_logits else (0,)), dtype=torch.float32)
    asked = largest if max_logits else None
    into = SparseMlaOutOperands(q, kv, indices, out, lse, asked, topk_length, attn_sink)
    return into, (out, lse, largest)


def launches(
    runner: Runner, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]
) -> Launch:
    """The compiled function with the arguments of each call, one behind the other."""

    def launch() -> None:
        with runner.launching():
            for arguments in calls:
                function(*arguments)

    return launch


def arguments_of(
    runner: Runner,
    group: int,
    operands: SparseMlaOutOperands,
    sm_scale: float,
    last: Callable[[int], tuple[Any, ...]],
) -> list[tuple[Any, ...]]:
    """Of each launch of a forward; some operands are copied for it.

    Launches of a stream follow each other, so all have the same groups' lists.

    Args:
        group: queries of a group; without lists for 1.
        last: what a kernel takes besides, for so many queries.
    """
    q, kv, indices, out, lse, max_logits, topk_length, attn_sink = operands
    num_queries = q.shape[0]
    q, kv, indices = readable(q), readable(kv), indices.contiguous()
    every = runner.empty(0, dtype=torch.int32)
    lengths = every if topk_length is None else topk_length.contiguous()
    none = runner.empty(0, dtype=torch.float32)
    sink = none if attn_sink is None else attn_sink.to(torch.float32).contiguous()
    if group == 1:
        largest = none if max_logits is None else max_logits.view(-1)
        return [(q, kv, indices, lengths, sink, out, lse, largest, sm_scale, *last(num_queries))]
    most = group * indices.shape[1]
    groups_at_a_time = max(1, MOST_UNION_BYTES // (UNION_BYTES * most))
    groups_at_a_time = min(groups_at_a_time, -(-num_queries // group))
    rows = runner.empty(groups_at_a_time, most, dtype=torch.int32)
    members = runner.empty(groups_at_a_time, most, dtype=torch.uint8)
    counts = runner.empty(groups_at_a_time, dtype=torch.int32)
    calls: list[tuple[Any, ...]] = []
    for first in range(0, num_queries, group * groups_at_a_time):
        part = slice(first, first + group * groups_at_a_time)
        queries = q[part].shape[0]
        groups = -(-queries // group)
        largest = none if max_logits is None else max_logits[part].view(-1)
        of_queries = (q[part], kv, indices[part], lengths[part], sink)
        lists = (rows[:groups], members[:groups], counts[:groups])
        results = (out[part], lse[part], largest)
        calls.append((*of_queries, *results, *lists, sm_scale, *last(queries)))
    return calls
