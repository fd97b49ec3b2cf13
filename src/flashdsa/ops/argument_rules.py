"""Rules of single operands and parameters: what the columns of the table cannot say."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from flashdsa.operands import (
    IndexerBwdOperands,
    MlaBwdOperands,
    PrefillOperands,
    SparseMlaOperands,
    TopkPrefillOperands,
)
from flashdsa.ops.checks import INT32_MAX, dtype_name, require_shape
from flashdsa.ops.spec import Sizes
from flashdsa.problem import D_QK, INDEX_TOKEN_BYTES, KV_ROW_BYTES, MAX_NEXT_N, PAGE_SIZE

MAX_PAGES = 2**31 // PAGE_SIZE
"""Token ids are int32."""
PACKED = (torch.uint8, torch.int8)
"""dtypes of packed kv rows."""
SCALE_BYTES = 4
"""Bytes of a key's fp32 scale, which lies among bytes in the index-K cache."""


def same_dtype(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The first operand's."""
    return (dtype,)


def kv_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The first operand's, or bytes: packed rows."""
    return (dtype, *PACKED)


def kv_columns(name: str, kv: Tensor, sizes: Sizes) -> None:
    """Require as many columns as q has, or a packed row's 656 bytes instead of 576 columns."""
    rows, d_qk = sizes["S_kv"], sizes["d_qk"]
    if kv.dtype not in PACKED:
        require_shape(name, kv, (rows, d_qk), "[S_kv, d_qk] or [S_kv, 1, d_qk]")
        return
    require_shape(name, kv, (rows, KV_ROW_BYTES), f"[S_kv, {KV_ROW_BYTES}] of packed rows")
    if d_qk != D_QK:
        raise ArgumentValueError(
            f"{name}: packed rows are of {D_QK} columns; expected as many of q, got {d_qk}"
        )


def pages_of_requests(name: str, table: Tensor, sizes: Sizes) -> None:
    """A row for each query, or for each 2 to 4 neighbouring ones: notes how many as next_n."""
    rows, requests = sizes["B"], table.shape[0]
    next_n = 1
    if rows != requests:
        next_n = rows // requests if requests else 0
    if rows != next_n * requests or not 1 <= next_n <= MAX_NEXT_N:
        why = f" (or one row for each 2 to {MAX_NEXT_N} neighbouring queries)"
        require_shape(name, table, (rows, table.shape[1]), "[B, max_pages]", why)
    sizes["next_n"] = next_n


def refuse_packed(kv: Tensor, operation: str = "mla_bwd") -> None:
    """Raise UnsupportedError where a gradient is asked for and kv has packed rows."""
    if kv.dtype in PACKED:
        raise UnsupportedError(
            f"{operation}: packed rows of kv have no gradient; `read_kv_cache` gives bf16 rows, "
            "which have one"
        )


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of lse and of the dKV sums: fp32, or fp64 where q is."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def lse_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the dtypes of lse, for q of `dtype`."""
    return (sum_dtype(dtype),)


def sink_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the dtypes of attn_sink, for q of `dtype`."""
    wide = dtype == torch.float64
    return (torch.float32, torch.float64) if wide else (torch.float32,)


def index_weight_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the index heads' weights, for q_index of `dtype`: that of sums, and
    q_index's."""
    return tuple(dict.fromkeys((sum_dtype(dtype), dtype)))


def dk_dtype_fits(name: str, value: torch.dtype | None, operands: IndexerBwdOperands) -> None:
    """dk_index in the precision of its sums, or in k_index's dtype."""
    dtype = operands.k_index.dtype
    _one_of(name, value, (sum_dtype(dtype), dtype), dtype)


def scales_of_e4m3_keys(operands: PrefillOperands | TopkPrefillOperands) -> None:
    """Keys have scales if they are e4m3, and otherwise none."""
    dtype, scales = operands.k_index.dtype, operands.k_scale
    if dtype == torch.float8_e4m3fn and scales is None:
        raise ArgumentTypeError(
            "k_scale: expected the scales of e4m3 keys, as quantize_index_k gives them; got None"
        )
    if dtype != torch.float8_e4m3fn and scales is not None:
        raise ArgumentTypeError(
            f"k_scale: expected None, as keys of {dtype_name(dtype)} have no scales; got a tensor"
        )


def d_v_at_most_d_qk(name: str, d_v: int, operands: SparseMlaOperands) -> None:
    """V is the first columns of kv."""
    d_qk = operands.q.shape[2]
    if d_v > d_qk:
        raise ArgumentValueError(
            f"{name}: expected at most q's last dimension, {d_qk}, since V is the first d_v "
            f"columns of kv; got {d_v}"
        )


def rows_within_int32(name: str, tensor: Tensor, sizes: Sizes) -> None:
    """Rows are named by int32."""
    if tensor.shape[0] > INT32_MAX:
        raise ArgumentValueError(
            f"{name}: expected at most {INT32_MAX} rows (int32 ids); got {tensor.shape[0]}"
        )


def columns_of_v(name: str, tensor: Tensor, sizes: Sizes) -> None:
    """dO has d_v columns, of the d_qk that kv has."""
    if not 1 <= sizes["d_v"] <= sizes["d_qk"]:
        raise ArgumentValueError(
            f"{name}: expected a last dimension d_v in [1, {sizes['d_qk']}] (q's last dimension); "
            f"got {tensor.shape[2]}"
        )


def without_gaps(name: str, tensor: Tensor, sizes: Sizes) -> None:
    """A result is written whole; V's columns are of those that kv has."""
    if not tensor.is_contiguous():
        raise ArgumentValueError(
            f"{name}: expected a contiguous tensor to write to; got strides {list(tensor.stride())}"
        )
    if not 1 <= sizes.get("d_v", 1) <= sizes["d_qk"]:
        raise ArgumentValueError(
            f"{name}: expected a last dimension d_v in [1, {sizes['d_qk']}] (q's last dimension); "
            f"got {sizes['d_v']}"
        )


def dkv_dtype_fits(name: str, value: torch.dtype | None, operands: MlaBwdOperands) -> None:
    """dKV in the precision of its sums; of bf16 inputs in bf16 too."""
    dtype = operands.q.dtype
    _one_of(name, value, (sum_dtype(dtype), dtype), dtype)


def _one_of(
    name: str, value: torch.dtype | None, allowed: tuple[torch.dtype, ...], inputs: torch.dtype
) -> None:
    """Raise unless `value` is None or one of the `allowed` dtypes for `inputs`."""
    if value is not None and value not in allowed:
        names = " or ".join(dtype_name(dtype) for dtype in dict.fromkeys(allowed))
        raise ArgumentTypeError(
            f"{name}: expected {names} or None for {dtype_name(inputs)} inputs; "
            f"got {dtype_name(value)}"
        )


def packed_pages(name: str, cache: Tensor, sizes: Sizes) -> None:
    """Each page's 8,448 bytes are contiguous, its scales aligned, its ids within int32."""
    if cache.stride(3) != 1 or cache.stride(1) != INDEX_TOKEN_BYTES:
        raise ArgumentValueError(
            f"{name}: expected each page's bytes to be contiguous; got strides "
            f"{list(cache.stride())}"
        )
    if cache.stride(0) % SCALE_BYTES or cache.storage_offset() % SCALE_BYTES:
        raise ArgumentValueError(
            f"{name}: expected pages aligned to {SCALE_BYTES} bytes for their fp32 scales; "
            f"got page stride {cache.stride(0)} and offset {cache.storage_offset()}"
        )
    if sizes["num_pages"] > MAX_PAGES:
        raise ArgumentValueError(
            f"{name}: expected at most {MAX_PAGES} pages (int32 token ids); "
            f"got {sizes['num_pages']}"
        )
