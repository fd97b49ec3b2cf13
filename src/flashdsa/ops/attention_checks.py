"""Turns the tensors of sparse_mla_fwd and mla_bwd into a Problem, or says what is wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.errors import ArgumentTypeError, ArgumentValueError
from flashdsa.ops.checks import (
    ATTENTION_DTYPES,
    dtype_name,
    require_dense_rows,
    require_device,
    require_dtype,
    require_positive,
    require_rank,
    require_shape,
)
from flashdsa.problem import Operation, Problem


def lse_dtype(q: Tensor) -> torch.dtype:
    """dtype of lse and of the dKV sums: fp32, or fp64 where q is."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def forward_problem(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    d_v: int,
    deterministic: bool,
) -> Problem:
    """Check the operands of the forward, q (S, H, d_qk), kv (S_kv, d_qk), indices (S, topk)."""
    _check_operands(q, kv, indices, topk_length, attn_sink)
    require_positive("d_v", d_v)
    if d_v > q.shape[2]:
        raise ArgumentValueError(
            f"d_v: expected at most q's last dimension, {q.shape[2]}, since V is the first d_v "
            f"columns of kv; got {d_v}"
        )
    return _problem(
        Operation.SPARSE_MLA_FWD, q, indices, topk_length, attn_sink, d_v, deterministic
    )


def backward_problem(
    q: Tensor,
    kv: Tensor,
    dO: Tensor,
    lse: Tensor,
    O: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    deterministic: bool,
    dkv_dtype: torch.dtype | None,
) -> Problem:
    """Check the operands of the backward: the forward's, dO and O (S, H, d_v), lse (S, H)."""
    _check_operands(q, kv, indices, topk_length, attn_sink)
    num_queries, num_heads, d_qk = q.shape
    require_rank("dO", dO, (3,), "[S, H, d_v]")
    d_v = dO.shape[2]
    if not 1 <= d_v <= d_qk:
        raise ArgumentValueError(
            f"dO: expected a last dimension d_v in [1, {d_qk}] (q's last dimension); got {d_v}"
        )
    for name, tensor in (("dO", dO), ("O", O)):
        require_dtype(name, tensor, q.dtype)
        require_shape(name, tensor, (num_queries, num_heads, d_v), "[S, H, d_v]")
        require_device(name, tensor, q.device, "q")
        require_dense_rows(name, tensor)
    require_dtype("lse", lse, lse_dtype(q))
    require_shape("lse", lse, (num_queries, num_heads), "[S, H]")
    require_device("lse", lse, q.device, "q")
    require_dense_rows("lse", lse)
    _check_dkv_dtype(q, dkv_dtype)
    return _problem(Operation.MLA_BWD, q, indices, topk_length, attn_sink, d_v, deterministic)


def _check_operands(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
) -> None:
    require_dtype("q", q, *ATTENTION_DTYPES)
    require_rank("q", q, (3,), "[S, H, d_qk]")
    num_queries, num_heads, d_qk = q.shape
    if num_heads < 1 or d_qk < 1:
        raise ArgumentValueError(
            f"q: expected shape [S, H, d_qk] with H >= 1 and d_qk >= 1; got {list(q.shape)}"
        )
    require_dtype("kv", kv, q.dtype)
    require_shape("kv", kv, (kv.shape[0], d_qk), "[S_kv, d_qk] or [S_kv, 1, d_qk]")
    require_dtype("indices", indices, torch.int32)
    require_shape("indices", indices, (num_queries, indices.shape[1]), "[S, topk]")
    if indices.shape[1] < 1:
        raise ArgumentValueError("indices: expected topk >= 1 columns; got 0")
    if topk_length is not None:
        require_dtype("topk_length", topk_length, torch.int32)
        require_shape("topk_length", topk_length, (num_queries,), "[S]")
    if attn_sink is not None:
        sink_dtypes = (torch.float32, torch.float64)[: 1 + (q.dtype == torch.float64)]
        require_dtype("attn_sink", attn_sink, *sink_dtypes)
        require_shape("attn_sink", attn_sink, (num_heads,), "[H]")
    for name, tensor in (
        ("q", q),
        ("kv", kv),
        ("indices", indices),
        ("topk_length", topk_length),
        ("attn_sink", attn_sink),
    ):
        if tensor is not None:
            require_device(name, tensor, q.device, "q")
            require_dense_rows(name, tensor)


def _check_dkv_dtype(q: Tensor, dkv_dtype: torch.dtype | None) -> None:
    if dkv_dtype is not None and not isinstance(dkv_dtype, torch.dtype):
        raise ArgumentTypeError(
            f"dkv_dtype: expected a torch.dtype or None; got {type(dkv_dtype).__name__}"
        )
    allowed = {
        torch.bfloat16: (torch.float32, torch.bfloat16),
        torch.float32: (torch.float32,),
        torch.float64: (torch.float64,),
    }[q.dtype]
    if dkv_dtype is not None and dkv_dtype not in allowed:
        names = " or ".join(dtype_name(dtype) for dtype in allowed)
        raise ArgumentTypeError(
            f"dkv_dtype: expected {names} or None for {dtype_name(q.dtype)} inputs; "
            f"got {dtype_name(dkv_dtype)}"
        )


def _problem(
    operation: Operation,
    q: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    d_v: int,
    deterministic: bool,
) -> Problem:
    return Problem(
        operation=operation,
        device=q.device.type,
        dtype=dtype_name(q.dtype),
        num_heads=q.shape[1],
        d_qk=q.shape[2],
        d_v=d_v,
        topk=indices.shape[1],
        attn_sink=attn_sink is not None,
        topk_length=topk_length is not None,
        deterministic=deterministic,
    )
