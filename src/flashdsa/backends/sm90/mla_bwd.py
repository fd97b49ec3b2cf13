"""The backward of sparse MLA on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from flashdsa.backends.cpu.sparse_mla import sink_backward
from flashdsa.backends.memory import readable
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.mla_bwd_fused import Call, Launch, bind_either, bind_fused
from flashdsa.backends.sm90.mla_bwd_slots import bind_slots, is_far
from flashdsa.backends.sm90.mla_bwd_spool import bind_large, buffers_for, grouping_for
from flashdsa.operands import MlaBwdOperands

Gradients = tuple[Tensor, Tensor, Tensor]
"""dQ (S, H, d_qk), dKV (S_kv, d_qk), d_sink (H,), which is empty without a sink."""


def backward(
    runner: Runner,
    operands: MlaBwdOperands,
    *,
    sm_scale: float,
    deterministic: bool,
    dkv_dtype: torch.dtype,
) -> Gradients:
    """Of one call."""
    bound = bind(
        runner, operands, sm_scale=sm_scale, deterministic=deterministic, dkv_dtype=dkv_dtype
    )
    return bound(operands)


def bind(
    runner: Runner,
    operands: MlaBwdOperands,
    *,
    sm_scale: float,
    deterministic: bool,
    dkv_dtype: torch.dtype,
) -> Callable[[MlaBwdOperands], Gradients]:
    """`backward` of operands that differ from these in what they hold alone."""
    kv, topk = operands.kv, operands.indices.shape[1]
    num_queries, num_heads, _ = operands.q.shape
    if not num_queries or not kv.shape[0]:
        return partial(without_keys, dkv_dtype=dkv_dtype)
    grouping = grouping_for(
        num_queries, num_heads, topk, runner.num_sms, deterministic=deterministic
    )
    buffers = (buffers_for(kv.shape[0]),) if deterministic and grouping else ()
    dkv_shape = *buffers, *kv.shape
    call = Call(runner, num_queries, num_heads, kv.shape[0], topk, sm_scale, grouping)
    bind_small = bind_slots if deterministic or is_far(num_heads, kv.shape[0]) else bind_fused
    if grouping is None:
        launch: Launch = bind_small(call)
    else:
        large = bind_large(runner, grouping, deterministic=deterministic)
        launch = bind_either(call, large, bind_small)
    every = runner.empty(0, dtype=torch.int32)

    def serve(operands: MlaBwdOperands) -> Gradients:
        q, kv, dO, lse, O, indices, topk_length, attn_sink = operands
        dkv = runner.empty(*dkv_shape, dtype=torch.float32).zero_()
        dq = runner.empty(*q.shape, dtype=q.dtype)
        delta = runner.empty(*lse.shape, dtype=torch.float32)
        lengths = every if topk_length is None else topk_length.contiguous()
        with_sink = lse
        if attn_sink is not None:
            with_sink = torch.logaddexp(lse, attn_sink.to(lse.dtype).expand_as(lse))
        whole = MlaBwdOperands(
            readable(q),
            readable(kv),
            readable(dO),
            with_sink.contiguous(),
            readable(O),
            indices.contiguous(),
            lengths,
        )
        launch(whole, (delta, dq, dkv))
        if attn_sink is None:
            d_sink = runner.empty(0, dtype=torch.float32)
        else:
            d_sink = sink_backward(lse, attn_sink, delta)[1]
        if buffers:
            dkv = dkv[0] if buffers == (1,) else dkv.sum(0)
        return dq, dkv.to(dkv_dtype), d_sink

    return serve


def without_keys(operands: MlaBwdOperands, dkv_dtype: torch.dtype) -> Gradients:
    """Zeros: there is no key, or no query."""
    q, kv, sink = operands.q, operands.kv, operands.attn_sink
    d_sink = q.new_zeros(0 if sink is None else sink.shape[0], dtype=torch.float32)
    return q.new_zeros(q.shape), kv.new_zeros(kv.shape, dtype=dkv_dtype), d_sink
