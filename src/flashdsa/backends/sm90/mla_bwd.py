"""The backward of sparse MLA on Hopper GPUs."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flashdsa.backends.cpu.sparse_mla import sink_backward
from flashdsa.backends.memory import readable
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.mla_bwd_fused import launch_either, launch_fused
from flashdsa.backends.sm90.mla_bwd_slots import is_far, launch_slots
from flashdsa.backends.sm90.mla_bwd_spool import buffers_for, grouping_for, launch_large
from flashdsa.operands import MlaBwdOperands


def backward(
    runner: Runner,
    operands: MlaBwdOperands,
    *,
    sm_scale: float,
    deterministic: bool,
    dkv_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ (S, H, d_qk), dKV (S_kv, d_qk), d_sink (H,), which is empty without a sink."""
    q, kv, dO, lse, O, indices, topk_length, attn_sink = operands
    num_queries, num_heads, _ = q.shape
    sink_size = 0 if attn_sink is None else num_heads
    if not num_queries or not kv.shape[0]:
        d_sink = torch.zeros(sink_size, dtype=torch.float32, device=q.device)
        dkv = torch.zeros(kv.shape, dtype=dkv_dtype, device=q.device)
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device), dkv, d_sink
    topk = indices.shape[1]
    grouping = grouping_for(
        num_queries, num_heads, topk, runner.num_sms, deterministic=deterministic
    )
    buffers = buffers_for(kv.shape[0]) if deterministic and grouping else 1
    shape = (buffers, *kv.shape) if deterministic and grouping else kv.shape
    dkv = torch.zeros(shape, dtype=torch.float32, device=q.device)
    dq = runner.empty(*q.shape, dtype=q.dtype)
    delta = runner.empty(*lse.shape, dtype=torch.float32)
    with_sink = (
        lse if attn_sink is None else torch.logaddexp(lse, attn_sink.to(lse.dtype).expand_as(lse))
    )
    every = runner.empty(0, dtype=torch.int32)
    whole = MlaBwdOperands(
        readable(q),
        readable(kv),
        readable(dO),
        with_sink.contiguous(),
        readable(O),
        indices.contiguous(),
        every if topk_length is None else topk_length.contiguous(),
    )
    outputs = delta, dq, dkv
    launch = launch_slots if deterministic or is_far(num_heads, kv.shape[0]) else launch_fused
    if grouping is None:
        launch(runner, whole, outputs, sm_scale)
    else:
        launch_else = partial(launch_large, runner, grouping)
        launch_either(runner, whole, grouping, outputs, sm_scale, (launch_else, launch))
    d_sink = torch.zeros(0, dtype=torch.float32, device=q.device)
    if attn_sink is not None:
        d_sink = sink_backward(lse, attn_sink, delta)[1]
    if dkv.ndim > kv.ndim:
        dkv = dkv.sum(0) if buffers > 1 else dkv[0]
    return dq, dkv.to(dkv_dtype), d_sink
