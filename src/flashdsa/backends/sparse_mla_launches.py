"""What the forwards of the GPUs share on the host: results, parts of the queries, launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.memory import readable
from flashdsa.backends.packed_rows import is_packed
from flashdsa.backends.runner import Runner
from flashdsa.kernels.sparse_mla.operands import Operands
from flashdsa.operands import SparseMlaOperands, SparseMlaOutOperands

UNION_BYTES = 5
"""Of a slot in the groups' lists: a row number and the queries that name it."""
MOST_UNION_BYTES = 256 << 20
"""Of the lists of one launch; queries that need more are launched in parts."""
OF_QUERIES = ("q", "indices", "topk_length", "out", "lse")
"""Of `Operands`, those with a row for each query."""

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


def launch_operands(runner: Runner, operands: SparseMlaOutOperands, sm_scale: float) -> Operands:
    """What every launch begins with; some operands are copied for it.

    Args:
        operands: out and lse are written, without gaps.
    """
    q, kv, indices, topk_length, attn_sink = operands.inputs
    lengths = _absent(runner, torch.int32)
    if topk_length is not None:
        lengths = topk_length.contiguous()
    sink = _absent(runner, torch.float32)
    if attn_sink is not None:
        sink = attn_sink.to(torch.float32).contiguous()
    kv = readable(kv)
    rows = kv.view(torch.uint8) if is_packed(kv) else kv
    slots = indices.contiguous(), lengths
    return Operands(readable(q), rows, *slots, sink, operands.out, operands.lse, sm_scale)


def _absent(runner: Runner, dtype: torch.dtype) -> Tensor:
    """In the place of a tensor that is not there: the runner's without an element."""
    key = "absent", dtype
    found: Tensor | None = runner.launches.get(key)
    if found is None:
        found = runner.launches[key] = runner.empty(0, dtype=dtype)
    return found


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
        last: what a kernel takes behind max_logits, for so many queries.
    """
    x = launch_operands(runner, operands, sm_scale)
    max_logits = operands.max_logits
    largest = _absent(runner, torch.float32) if max_logits is None else max_logits
    num_queries, topk = x.indices.shape
    if group == 1:
        return [(*x, largest.view(-1), *last(num_queries))]
    most = group * topk
    groups_at_a_time = max(1, MOST_UNION_BYTES // (UNION_BYTES * most))
    groups_at_a_time = min(groups_at_a_time, -(-num_queries // group))
    rows = runner.empty(groups_at_a_time, most, dtype=torch.int32)
    members = runner.empty(groups_at_a_time, most, dtype=torch.uint8)
    counts = runner.empty(groups_at_a_time, dtype=torch.int32)
    calls: list[tuple[Any, ...]] = []
    for first in range(0, num_queries, group * groups_at_a_time):
        part = slice(first, first + group * groups_at_a_time)
        of_part = {name: getattr(x, name)[part] for name in OF_QUERIES}
        queries = of_part["q"].shape[0]
        groups = -(-queries // group)
        lists = (rows[:groups], members[:groups], counts[:groups])
        calls.append((*x._replace(**of_part), largest[part].view(-1), *last(queries), *lists))
    return calls
