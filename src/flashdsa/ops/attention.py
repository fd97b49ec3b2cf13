"""The custom ops flashdsa::sparse_mla_fwd and flashdsa::mla_bwd with fakes and autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.catalog import registry
from flashdsa.errors import DoubleBackwardError
from flashdsa.ops.attention_checks import backward_problem, forward_problem, lse_dtype

_FORWARD = "flashdsa::sparse_mla_fwd"
_BACKWARD = "flashdsa::mla_bwd"


@torch.library.custom_op(
    _FORWARD,
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, int d_v, "
        "float sm_scale, bool deterministic, str backend) -> (Tensor, Tensor)"
    ),
)
def sparse_mla_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    d_v: int,
    sm_scale: float,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """O (S, H, d_v) and lse (S, H); `deterministic` is for the backward that autograd runs."""
    problem = forward_problem(q, kv, indices, topk_length, attn_sink, d_v, deterministic)
    run = registry.select(problem, backend).load()
    out, lse = run(
        q,
        kv,
        indices,
        d_v=d_v,
        sm_scale=sm_scale,
        topk_length=topk_length,
        attn_sink=attn_sink,
    )
    return out, lse


@sparse_mla_fwd.register_fake
def _(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    d_v: int,
    sm_scale: float,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    forward_problem(q, kv, indices, topk_length, attn_sink, d_v, deterministic)
    num_queries, num_heads, _ = q.shape
    return (
        q.new_empty(num_queries, num_heads, d_v),
        q.new_empty(num_queries, num_heads, dtype=lse_dtype(q)),
    )


@torch.library.custom_op(
    _BACKWARD,
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor kv, Tensor dO, Tensor lse, Tensor O, Tensor indices, "
        "Tensor? topk_length, Tensor? attn_sink, float sm_scale, bool deterministic, "
        "ScalarType? dkv_dtype, str backend) -> (Tensor, Tensor, Tensor)"
    ),
)
def mla_bwd(  # noqa: PLR0913 - the operation has these operands
    q: Tensor,
    kv: Tensor,
    dO: Tensor,
    lse: Tensor,
    O: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    sm_scale: float,
    deterministic: bool,
    dkv_dtype: torch.dtype | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ (S, H, d_qk), dKV (S_kv, d_qk), d_sink (H,), which is empty where there is no sink."""
    problem = backward_problem(
        q, kv, dO, lse, O, indices, topk_length, attn_sink, deterministic, dkv_dtype
    )
    run = registry.select(problem, backend).load()
    dq, dkv, d_sink = run(
        q,
        kv,
        dO,
        lse,
        O,
        indices,
        sm_scale=sm_scale,
        topk_length=topk_length,
        attn_sink=attn_sink,
        deterministic=deterministic,
        dkv_dtype=dkv_dtype or lse_dtype(q),
    )
    return dq, dkv, d_sink


@mla_bwd.register_fake
def _(  # noqa: PLR0913 - the operation has these operands
    q: Tensor,
    kv: Tensor,
    dO: Tensor,
    lse: Tensor,
    O: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    sm_scale: float,
    deterministic: bool,
    dkv_dtype: torch.dtype | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    backward_problem(q, kv, dO, lse, O, indices, topk_length, attn_sink, deterministic, dkv_dtype)
    sums = lse_dtype(q)
    return (
        q.new_empty(q.shape),
        kv.new_empty(kv.shape, dtype=dkv_dtype or sums),
        q.new_empty(0, dtype=sums) if attn_sink is None else torch.empty_like(attn_sink),
    )


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, kv, indices, topk_length, attn_sink, _, sm_scale, deterministic, backend = inputs
    out, lse = output
    ctx.save_for_backward(q, kv, indices, topk_length, attn_sink, out, lse)
    ctx.mark_non_differentiable(lse)
    ctx.sm_scale, ctx.deterministic, ctx.backend = sm_scale, deterministic, backend


def _forward_backward(ctx: Any, dO: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the forward's nine inputs: q, kv and attn_sink, in the inputs' dtypes."""
    q, kv, indices, topk_length, attn_sink, out, lse = ctx.saved_tensors
    dq, dkv, d_sink = mla_bwd(
        q,
        kv,
        dO.contiguous(),
        lse,
        out,
        indices,
        topk_length,
        attn_sink,
        ctx.sm_scale,
        ctx.deterministic,
        kv.dtype,
        ctx.backend,
    )
    return dq, dkv, None, None, None if attn_sink is None else d_sink, None, None, None, None


def _no_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise DoubleBackwardError(
        "mla_bwd: no gradient of a gradient is available; the backward of sparse_mla cannot be "
        "differentiated (create_graph=True)"
    )


sparse_mla_fwd.register_autograd(_forward_backward, setup_context=_save_for_backward)
mla_bwd.register_autograd(_no_double_backward)
