"""The backward of sparse MLA on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.memory import readable
from flashdsa.backends.packed_rows import num_rows
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.mla_bwd_grouped import bind_large, grouping_for
from flashdsa.backends.sm90.mla_bwd_joined import (
    bind_join,
    of_sources,
    queries_at_a_time,
    rows_of,
    some_of,
)
from flashdsa.backends.sm90.mla_bwd_lists import WAVE
from flashdsa.backends.sm90.mla_bwd_per_item import (
    Call,
    Inputs,
    Launch,
    Outputs,
    bind_either,
)
from flashdsa.backends.sm90.mla_bwd_slots import bind_either_way, bind_slots
from flashdsa.backends.sparse_mla_launches import is_joined, slots_of
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import HEADS
from flashdsa.kernels.attention.sm90.core.tile import ROWS, Tile
from flashdsa.kernels.attention.sm90.padded_heads.plan import PaddedHeadsPlan
from flashdsa.kernels.attention.sm90.sink.plan import SinkPlan
from flashdsa.kernels.catalog import MLA_BWD_PADDED_HEADS, MLA_BWD_SINK

if TYPE_CHECKING:
    from flashdsa.ops.attention_backward import MlaBwdOperands

EXTRA_KV = 9
"""Place of the second source among the operands."""
LEAST_SPREAD = 256
"""Slots of a query from which on few queries are spread over more groups: padding, and the
copies back, take some 10 us, as much as three tiles of keys."""
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
    num_queries, num_heads, d_qk = operands.q.shape
    num_keys = num_rows(operands.kv, operands.extra_kv)
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
    parts: list[tuple[slice | None, Launch]] = []
    for first in range(0, num_queries, at_a_time):
        some = slice(first, min(first + at_a_time, num_queries))
        of_part = sizes._replace(num_queries=some.stop - first, from_zero=first == 0)
        bound = bind_part(of_part, num_heads, deterministic=deterministic)
        parts.append((some if num_queries > at_a_time else None, bound))
    launch = parts[0][1]
    every, kind = runner.empty(0, dtype=torch.int32), type(operands)
    allocate_dkv = runner.allocator(num_keys, d_qk, dtype=torch.float32)
    allocate_dq = runner.allocator(*operands.q.shape, dtype=operands.q.dtype)
    allocate_delta = runner.allocator(*operands.lse.shape, dtype=torch.float32)
    allocate_d_sink = runner.allocator(num_heads, dtype=torch.float32)
    allocate_nothing = runner.allocator(0, dtype=torch.float32)
    allocate_no_extra = runner.allocator(0, dtype=dkv_dtype)
    sink_gradient = None
    if operands.attn_sink is not None:
        sink_gradient = runner.function(MLA_BWD_SINK, SinkPlan())

    def serve(operands: Sequence[Any]) -> Gradients:
        q, kv, dO, lse, O, indices, topk_length, attn_sink = operands[:8]
        dkv, dq, delta = allocate_dkv().zero_(), allocate_dq(), allocate_delta()
        lengths = every if topk_length is None else topk_length.contiguous()
        with_sink = lse = lse.contiguous()
        if attn_sink is not None:
            attn_sink = attn_sink.contiguous()
            with_sink = torch.logaddexp(lse, attn_sink)
        slots = indices.contiguous()
        if join is None:
            rows = readable(kv)
            launch((q, rows, dO, with_sink, O, slots, lengths), (delta, dq, dkv))
        else:
            given = kind(*operands)
            rows = rows_of(given)
            for some, launch_part in parts:
                of_part = (some_of(x, some) for x in (q, dO, with_sink, O))
                q_part, dO_part, lse_part, O_part = of_part
                of_queries = dO_part, lse_part, O_part, *join(given, rows, some)
                written = some_of(delta, some), some_of(dq, some), dkv
                launch_part((q_part, rows, *of_queries), written)
        if sink_gradient is None:
            d_sink = allocate_nothing()
        else:
            d_sink = allocate_d_sink()
            sink_gradient(lse, attn_sink, delta, d_sink)
        if operands[EXTRA_KV] is None:
            if dkv_dtype is not torch.float32:
                dkv = dkv.to(dkv_dtype)
            return dq, dkv, allocate_no_extra(), d_sink
        return dq, *of_sources(dkv, len(kv), dkv_dtype), d_sink

    return runner.on_device(serve)


def bind_part(sizes: Sizes, num_heads: int, *, deterministic: bool) -> Launch:
    """Bind the launches of some queries and all heads, those that kernels take at a time."""
    spread = sizes.num_queries if sizes.topk >= LEAST_SPREAD else 1
    parts = []
    for heads, padded in head_parts(num_heads, spread):
        of_heads = sizes._replace(from_zero=sizes.from_zero and heads.start == 0)
        parts.append((heads, padded, bind_heads(of_heads, padded, deterministic=deterministic)))
    runner = sizes.runner
    if parts[0][1] == num_heads:
        launch_all = parts[0][2]

        def launch(inputs: Inputs, outputs: Outputs) -> None:
            q, keys, dO, lse, O, slots, lengths = inputs
            of_rows = readable(dO), lse, readable(O)
            launch_all((readable(q), keys, *of_rows, slots, lengths), outputs)

        return launch

    pad = runner.function(MLA_BWD_PADDED_HEADS, PaddedHeadsPlan(sizes.tile))
    padded_parts = []
    for heads, padded, launch_heads in parts:
        rows, bf16 = (sizes.num_queries, padded), torch.bfloat16
        of_qk = runner.allocator(*rows, sizes.tile.d_qk, dtype=bf16)
        of_v = runner.allocator(*rows, sizes.tile.d_v, dtype=bf16)
        of_head = runner.allocator(*rows, dtype=torch.float32)
        padded_parts.append((heads, launch_heads, of_qk, of_v, of_head))

    def launch_padded(inputs: Inputs, outputs: Outputs) -> None:
        q, keys, dO, lse, O, slots, lengths = inputs
        delta, dq, dkv = outputs
        given = readable(q), readable(dO), readable(O), lse
        for heads, launch_heads, of_qk, of_v, of_head in padded_parts:
            q_part, dq_part, lse_part, delta_part = of_qk(), of_qk(), of_head(), of_head()
            dO_part, O_part = of_v(), of_v()
            own = heads.stop - heads.start
            pad(*given, q_part, dO_part, O_part, lse_part, heads.start, own)
            of_rows = dO_part, lse_part, O_part
            written = delta_part, dq_part, dkv
            launch_heads((q_part, keys, *of_rows, slots, lengths), written)
            dq[:, heads], delta[:, heads] = dq_part[:, :own], delta_part[:, :own]

    return launch_padded


def head_parts(num_heads: int, spread: int = 1) -> list[tuple[slice, int]]:
    """Heads of each part, and the number of heads in its kernel: the rest is padding.

    Args:
        spread: queries that are spread over as many groups as run at once: the more heads a kernel
            has, the fewer queries has a group; 1: heads are padded only where they must be.
    """
    parts = []
    for first in range(0, num_heads, max(HEADS)):
        heads = slice(first, min(first + max(HEADS), num_heads))
        padded = min(n for n in HEADS if n >= heads.stop - first)
        while padded < ROWS and spread > 1 and spread * 2 * padded <= WAVE * ROWS:
            padded *= 2
        parts.append((heads, padded))
    return parts


class Sizes(NamedTuple):
    """Sizes of a call, or of a part of it, but for its heads; from_zero: it is the first part."""

    runner: Runner
    num_queries: int
    num_keys: int
    topk: int
    sm_scale: float
    has_lengths: bool
    tile: Tile
    ranges: bool
    from_zero: bool = False


def bind_heads(sizes: Sizes, num_heads: int, *, deterministic: bool) -> Launch:
    """Bind the launches of `num_heads` heads, one of HEADS."""
    runner, num_queries, num_keys, topk, sm_scale, has_lengths, tile, ranges, from_zero = sizes
    grouping = grouping_for(
        num_queries,
        num_heads,
        topk,
        runner.num_sms,
        num_keys=num_keys,
        deterministic=deterministic,
        tile=tile,
        ranges=ranges,
    )
    by_queries = grouping, has_lengths, tile, from_zero
    call = Call(runner, num_queries, num_heads, num_keys, topk, sm_scale, *by_queries)
    bind_small = bind_slots if deterministic else bind_either_way
    if grouping is None:
        return bind_small(call)
    of_rows = num_heads, sm_scale
    large = partial(bind_large, runner, grouping, of_rows, num_keys, deterministic=deterministic)
    return bind_either(call, large, bind_small)


def without_keys(operands: Sequence[Any], dkv_dtype: torch.dtype) -> Gradients:
    """Zero gradients of a call without keys or without queries; operands as in `MlaBwdOperands`."""
    q, kv, sink, extra_kv = operands[0], operands[1], operands[7], operands[9]
    d_sink = q.new_zeros(0 if sink is None else sink.shape[0], dtype=torch.float32)
    extra = 0 if extra_kv is None else extra_kv.shape
    dkv, dextra_kv = (kv.new_zeros(shape, dtype=dkv_dtype) for shape in (kv.shape, extra))
    return q.new_zeros(q.shape), dkv, dextra_kv, d_sink
