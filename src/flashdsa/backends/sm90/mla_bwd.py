"""The backward of sparse MLA on Hopper GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.cpu.sparse_mla import sink_backward
from flashdsa.backends.memory import readable
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.mla_bwd_grouped import bind_large, buffers_for, grouping_for
from flashdsa.backends.sm90.mla_bwd_joined import (
    bind_join,
    num_rows,
    of_sources,
    queries_at_a_time,
    rows_of,
    some_of,
)
from flashdsa.backends.sm90.mla_bwd_per_item import (
    Call,
    Launch,
    Outputs,
    bind_either,
    bind_per_item,
)
from flashdsa.backends.sm90.mla_bwd_slots import bind_slots, is_far
from flashdsa.backends.sparse_mla_launches import is_joined, slots_of
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import HEADS
from flashdsa.kernels.attention.sm90.core.tile import Tile

if TYPE_CHECKING:
    from flashdsa.ops.attention_backward import MlaBwdOperands

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
"""dQ (S, H, d_qk), dKV (S_kv, d_qk), dextra_kv (S_extra, d_qk), d_sink (H,); what has no operand is
empty."""


def bind(
    runner: Runner,
    operands: MlaBwdOperands,
    *,
    sm_scale: float,
    deterministic: bool,
    dkv_dtype: torch.dtype,
    index_block: int = 1,
) -> Callable[[MlaBwdOperands], Gradients]:
    """Gradients of calls of these sizes; two sources, ranges and blocks are joined first."""
    (num_queries, num_heads, d_qk), num_keys = operands.q.shape, num_rows(operands)
    if not num_queries or not num_keys:
        return partial(without_keys, dkv_dtype=dkv_dtype)
    topk, has_lengths = operands.indices.shape[1], operands.topk_length is not None
    at_a_time, join = num_queries, None
    if is_joined(operands, index_block):
        topk, has_lengths = sum(slots_of(operands, index_block)), True
        at_a_time, join = queries_at_a_time(topk), bind_join(runner, operands, index_block)
    ranges = operands.ends is not None or operands.extra_ends is not None
    of_lists = topk, sm_scale, has_lengths, Tile(d_qk), ranges
    sizes = Sizes(runner, num_queries, num_keys, *of_lists)
    parts: list[tuple[slice | None, Bound]] = []
    for first in range(0, num_queries, at_a_time):
        some = slice(first, min(first + at_a_time, num_queries))
        of_part = sizes._replace(num_queries=some.stop - first)
        bound = bind_part(of_part, num_heads, deterministic=deterministic)
        parts.append((some if num_queries > at_a_time else None, bound))
    buffers = max(bound.buffers for _, bound in parts)
    every, kind = runner.empty(0, dtype=torch.int32), type(operands)
    q, lse = operands.q, operands.lse
    shape = (*([buffers] * bool(buffers)), num_keys, d_qk)
    allocate_dkv = runner.allocator(*shape, dtype=torch.float32)
    allocate_dq = runner.allocator(*q.shape, dtype=q.dtype)
    allocate_delta = runner.allocator(*lse.shape, dtype=torch.float32)

    def serve(operands: MlaBwdOperands) -> Gradients:
        given = kind(*operands)
        lse, indices, topk_length, attn_sink = given.lse, *given[5:8]
        dkv, dq, delta = allocate_dkv().zero_(), allocate_dq(), allocate_delta()
        lengths = every if topk_length is None else topk_length.contiguous()
        with_sink = lse
        if attn_sink is not None:
            with_sink = torch.logaddexp(lse, attn_sink.to(lse.dtype).expand_as(lse))
        rows = rows_of(given)
        slots = indices.contiguous()
        for some, (launch, _) in parts:
            of_part = (some_of(x, some) for x in (given.q, given.dO, with_sink, given.O))
            q, dO, lse_part, O = of_part
            if join is not None:
                slots, lengths = join(given, rows, some)
            written = some_of(delta, some), some_of(dq, some), dkv
            launch(kind(q, rows, dO, lse_part, O, slots, lengths), written)
        if attn_sink is None:
            d_sink = runner.empty(0, dtype=torch.float32)
        else:
            d_sink = sink_backward(lse, attn_sink, delta)[1]
        if buffers:
            dkv = dkv[0] if buffers == 1 else dkv.sum(0)
        return dq, *of_sources(dkv, given, dkv_dtype), d_sink

    return runner.on_device(serve)


def bind_part(sizes: Sizes, num_heads: int, *, deterministic: bool) -> Bound:
    """Bind the launches of some queries and all heads, those that kernels take at a time."""
    parts = [
        (heads, padded, bind_heads(sizes, padded, deterministic=deterministic))
        for heads, padded in head_parts(num_heads)
    ]
    runner = sizes.runner

    def launch(operands: MlaBwdOperands, outputs: Outputs) -> None:
        q, keys, dO, lse, O, slots, lengths = operands[:7]
        delta, dq, dkv = outputs
        for heads, padded, (launch_heads, _) in parts:
            of_part = tuple(
                readable(padded_heads(x, heads, padded, empty))
                for x, empty in ((q, 0.0), (dO, 0.0), (lse, math.inf), (O, 0.0))
            )
            q_part, dO_part, lse_part, O_part = of_part
            part = type(operands)(q_part, keys, dO_part, lse_part, O_part, slots, lengths)
            if len(parts) == 1 and padded == q.shape[1]:
                launch_heads(part, outputs)
                continue
            dq_part = runner.empty(*q_part.shape, dtype=q.dtype)
            delta_part = runner.empty(*lse_part.shape, dtype=torch.float32)
            launch_heads(part, (delta_part, dq_part, dkv))
            own = heads.stop - heads.start
            dq[:, heads], delta[:, heads] = dq_part[:, :own], delta_part[:, :own]

    return Bound(launch, max(bound.buffers for _, _, bound in parts))


def head_parts(num_heads: int) -> list[tuple[slice, int]]:
    """Heads of each part, and the number of heads in its kernel: the rest is padding."""
    parts = []
    for first in range(0, num_heads, max(HEADS)):
        heads = slice(first, min(first + max(HEADS), num_heads))
        parts.append((heads, min(n for n in HEADS if n >= heads.stop - first)))
    return parts


def padded_heads(x: Tensor, heads: slice, padded: int, empty: float) -> Tensor:
    """Some heads of (S, H, ...), then others that hold `empty`."""
    if heads == slice(0, x.shape[1]) and padded == x.shape[1]:
        return x
    made = x.new_full((x.shape[0], padded, *x.shape[2:]), empty)
    made[:, : heads.stop - heads.start] = x[:, heads]
    return made


class Sizes(NamedTuple):
    """Sizes of a call but for its heads."""

    runner: Runner
    num_queries: int
    num_keys: int
    topk: int
    sm_scale: float
    has_lengths: bool
    tile: Tile
    ranges: bool


class Bound(NamedTuple):
    """Launches of some heads or queries; buffers: dKVs that they add to, 0: one without the
    dimension."""

    launch: Launch
    buffers: int


def bind_heads(sizes: Sizes, num_heads: int, *, deterministic: bool) -> Bound:
    """Bind the launches of `num_heads` heads, one of HEADS."""
    runner, num_queries, num_keys, topk, sm_scale, has_lengths, tile, ranges = sizes
    grouping = grouping_for(
        num_queries,
        num_heads,
        topk,
        runner.num_sms,
        deterministic=deterministic,
        tile=tile,
        ranges=ranges,
    )
    by_queries = grouping, has_lengths, tile
    call = Call(runner, num_queries, num_heads, num_keys, topk, sm_scale, *by_queries)
    bind_small = bind_slots if deterministic or is_far(call) else bind_per_item
    if grouping is None:
        return Bound(bind_small(call), 0)
    large = bind_large(runner, grouping, deterministic=deterministic)
    buffers = buffers_for(num_keys, tile.d_qk) if deterministic else 0
    return Bound(bind_either(call, large, bind_small), buffers)


def without_keys(operands: Sequence[Any], dkv_dtype: torch.dtype) -> Gradients:
    """Zero gradients of a call without keys or without queries; operands as in `MlaBwdOperands`."""
    q, kv, sink, extra_kv = operands[0], operands[1], operands[7], operands[9]
    d_sink = q.new_zeros(0 if sink is None else sink.shape[0], dtype=torch.float32)
    extra = 0 if extra_kv is None else extra_kv.shape
    dkv, dextra_kv = (kv.new_zeros(shape, dtype=dkv_dtype) for shape in (kv.shape, extra))
    return q.new_zeros(q.shape), dkv, dextra_kv, d_sink
