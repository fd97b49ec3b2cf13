"""The backward of sparse MLA on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.memory import readable
from flashdsa.backends.packed_rows import num_rows
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.mla_bwd_choice import Call, Part, choose, explain
from flashdsa.backends.sm90.mla_bwd_grouped import bind_choice
from flashdsa.backends.sm90.mla_bwd_joined import bind_join, of_sources, rows_of
from flashdsa.backends.sm90.mla_bwd_per_item import Inputs, Launch, Outputs, bind_per_item
from flashdsa.backends.sparse_mla_launches import is_joined, slots_of
from flashdsa.kernels.attention.sm90.core.tile import Tile
from flashdsa.kernels.catalog import MLA_BWD_PADDED_HEADS, MLA_BWD_SINK

if TYPE_CHECKING:
    from flashdsa.ops.attention_backward import MlaBwdOperands

EXTRA_KV = 9
"""Place of the second source among the operands."""
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
    call = call_of(runner, operands, index_block, deterministic=deterministic)
    parts = choose(call)
    runner.explain(partial(explain, parts))
    if not parts:
        return partial(without_keys, dkv_dtype=dkv_dtype)
    join = bind_join(runner, operands, index_block) if call.joined else None
    launches = [
        (slice_of(joint, call.num_queries), [bind_part(runner, x, sm_scale) for x in of_joint])
        for joint, of_joint in groupby(parts, key=lambda part: part.joint)
    ]
    every, kind = runner.empty(0, dtype=torch.int32), type(operands)
    num_heads, row_shape = call.num_heads, (call.num_keys, call.tile.d_qk)
    allocate_dkv = runner.allocator(*row_shape, dtype=torch.float32)
    allocate_dq = runner.allocator(*operands.q.shape, dtype=operands.q.dtype)
    allocate_delta = runner.allocator(*operands.lse.shape, dtype=torch.float32)
    allocate_d_sink = runner.allocator(num_heads, dtype=torch.float32)
    allocate_nothing = runner.allocator(0, dtype=torch.float32)
    allocate_no_extra = runner.allocator(0, dtype=dkv_dtype)
    sink_gradient = None
    if operands.attn_sink is not None:
        sink_gradient = runner.function(MLA_BWD_SINK, MLA_BWD_SINK.plan)

    def serve(operands: Sequence[Any]) -> Gradients:
        q, kv, dO, lse, O, indices, topk_length, attn_sink = operands[:8]
        dkv, dq, delta = allocate_dkv().zero_(), allocate_dq(), allocate_delta()
        with_sink = lse = lse.contiguous()
        if attn_sink is not None:
            attn_sink = attn_sink.contiguous()
            with_sink = torch.logaddexp(lse, attn_sink)
        if join is None:
            rows, slots = readable(kv), indices.contiguous()
            lengths = every if topk_length is None else topk_length.contiguous()
        else:
            given = kind(*operands)
            rows = rows_of(given)
        for joint, of_joint in launches:
            if join is not None:
                slots, lengths = join(given, rows, joint)
            for launch in of_joint:
                launch((q, rows, dO, with_sink, O, slots, lengths), (delta, dq, dkv))
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


def call_of(
    runner: Runner, operands: MlaBwdOperands, index_block: int, *, deterministic: bool
) -> Call:
    """Sizes and options of a call; joint lists have lengths."""
    num_queries, num_heads, d_qk = operands.q.shape
    num_keys, joined = num_rows(operands.kv, operands.extra_kv), is_joined(operands, index_block)
    return Call(
        num_queries,
        num_heads,
        num_keys,
        sum(slots_of(operands, index_block)) if joined else operands.indices.shape[1],
        runner.num_sms,
        Tile(d_qk),
        deterministic,
        joined or operands.topk_length is not None,
        joined,
        operands.ends is not None or operands.extra_ends is not None,
    )


def slice_of(some: range, count: int) -> slice | None:
    """None: all of `count`."""
    return None if len(some) == count else slice(some.start, some.stop)


def bind_part(runner: Runner, part: Part, sm_scale: float) -> Launch:
    """Bind the launches of a part; they take a call's tensors, and slots and lengths of the part's
    joint queries."""
    small = bind_per_item(runner, part, sm_scale)
    launch: Launch = small
    if part.large is not None:
        launch = bind_choice(runner, part, part.large, sm_scale, small)
    if part.kernel_heads != part.call.num_heads:
        launch = bind_padded(runner, part, launch)
    queries, joint = part.queries, part.joint
    some = slice_of(queries, part.call.num_queries)
    of_lists = range(queries.start - joint.start, queries.stop - joint.start)
    listed = slice_of(of_lists, len(joint))

    def launch_part(inputs: Inputs, outputs: Outputs) -> None:
        q, rows, dO, lse, O, slots, lengths = inputs
        if some is not None:
            delta, dq, dkv = outputs
            q, dO, lse, O = q[some], dO[some], lse[some], O[some]
            outputs = delta[some], dq[some], dkv
        if listed is not None:
            slots, lengths = slots[listed], lengths[listed]
        launch((readable(q), rows, readable(dO), lse, readable(O), slots, lengths), outputs)

    return launch_part


def bind_padded(runner: Runner, part: Part, launch: Launch) -> Launch:
    """Bind `launch` of some of the heads, with others for padding."""
    call, heads = part.call, slice(part.heads.start, part.heads.stop)
    pad = runner.function(MLA_BWD_PADDED_HEADS, MLA_BWD_PADDED_HEADS.plan)
    own, shape, bf16 = len(part.heads), (len(part.queries), part.kernel_heads), torch.bfloat16
    of_qk = runner.allocator(*shape, call.tile.d_qk, dtype=bf16)
    of_v = runner.allocator(*shape, call.tile.d_v, dtype=bf16)
    of_head = runner.allocator(*shape, dtype=torch.float32)

    def launch_padded(inputs: Inputs, outputs: Outputs) -> None:
        q, rows, dO, lse, O, slots, lengths = inputs
        delta, dq, dkv = outputs
        q_part, dq_part, lse_part, delta_part = of_qk(), of_qk(), of_head(), of_head()
        dO_part, O_part = of_v(), of_v()
        pad(q, dO, O, lse, q_part, dO_part, O_part, lse_part, heads.start, own)
        padded = q_part, rows, dO_part, lse_part, O_part, slots, lengths
        launch(padded, (delta_part, dq_part, dkv))
        dq[:, heads], delta[:, heads] = dq_part[:, :own], delta_part[:, :own]

    return launch_padded


def without_keys(operands: Sequence[Any], dkv_dtype: torch.dtype) -> Gradients:
    """Zero gradients of a call without keys or without queries; operands as in `MlaBwdOperands`."""
    q, kv, sink, extra_kv = operands[0], operands[1], operands[7], operands[9]
    d_sink = q.new_zeros(0 if sink is None else sink.shape[0], dtype=torch.float32)
    extra = 0 if extra_kv is None else extra_kv.shape
    dkv, dextra_kv = (kv.new_zeros(shape, dtype=dkv_dtype) for shape in (kv.shape, extra))
    return q.new_zeros(q.shape), dkv, dextra_kv, d_sink
