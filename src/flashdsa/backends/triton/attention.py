"""Sparse MLA by Triton: counts of slots, tiles, splits, and the launches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.sparse_mla import sink_backward, write_without_keys
from flashdsa.backends.triton.launch import BACKWARD, Launch, shape_of_forward

if TYPE_CHECKING:
    from flashdsa.ops.attention import SparseMlaOutOperands
    from flashdsa.ops.attention_backward import MlaBwdOperands

LOG2_E = math.log2(math.e)
MOST_SPLITS = 16


def used(ids: Tensor, length: Tensor | None, ends: Tensor | None, rows: int, block: int) -> Any:
    """A list as the kernels take it: ids or first rows, (S,) slots in use, its width, constants."""
    if ends is None:
        slots = ids.shape[1]
        count = ids.new_full((len(ids),), slots) if length is None else length.clamp(0, slots)
        return ids, count.int() * block, slots, {"RANGE": False, "ROWS_OF_ID": block}
    starts = ids[:, 0].clamp(0, rows)
    count = (ends.clamp(0, rows) - starts).clamp(min=0)
    return starts.int(), count.int(), 1, {"RANGE": True, "ROWS_OF_ID": 1}


def lists(x: Any, block: int) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
    """kv's list and extra_kv's, or kv's again, and what the kernels are compiled for."""
    first = used(x.indices, x.topk_length, x.ends, len(x.kv), block)
    constants = first[3] | {"EXTRA": x.extra_kv is not None, "EXTRA_RANGE": False}
    second = first
    if x.extra_kv is not None:
        extra = x.extra_indices, x.extra_topk_length, x.extra_ends
        second = used(*extra, len(x.extra_kv), 1)
        constants["EXTRA_RANGE"] = second[3]["RANGE"]
    return first, second, constants


def forward_out(
    launch: Launch,
    x: SparseMlaOutOperands,
    *,
    sm_scale: float,
    index_block: int,
    batch_invariant: bool,
    capability: tuple[int, int],
    num_sms: int,
) -> None:
    """out, lse and, if asked for, max_logits, written."""
    from flashdsa.kernels.triton import attention

    (num_queries, num_heads, d_qk), d_v = x.q.shape, x.out.shape[2]
    (ids, count, width, _), (more, extra_count, extra_width, _), constants = lists(x, index_block)
    if not num_queries or not len(x.kv):
        write_without_keys(x)
        return
    shape = shape_of_forward(num_heads, capability)
    blocks = -(-num_heads // shape.heads)
    slots = max(width * index_block, 1) if x.ends is None else len(x.kv)
    splits = 1
    if not batch_invariant:
        wanted = min(num_sms // (num_queries * blocks), slots // (4 * shape.slots), MOST_SPLITS)
        splits = 1 << max(wanted, 1).bit_length() - 1
    rows = num_queries * num_heads
    parts = x.lse.new_empty(splits * rows * (d_v + 2) if splits > 1 else 1)
    largest = torch.empty_like(x.lse) if x.max_logits is None else x.max_logits
    extra_kv = x.kv if x.extra_kv is None else x.extra_kv
    sink = x.lse if x.attn_sink is None else x.attn_sink
    written = x.out, x.lse, largest
    launch(
        attention.forward,
        (num_queries, blocks, splits),
        (x.q, x.kv, ids, count, extra_kv, more, extra_count, sink, *written, parts, num_heads,
         len(x.kv), width, d_qk, len(extra_kv), extra_width, d_qk, sm_scale * LOG2_E),
        shape,
        BLOCK_H=shape.heads, BLOCK_K=shape.slots, D_V=d_v, D_ROPE=d_qk - d_v,
        SINK=x.attn_sink is not None, SPLITS=splits, **constants,
    )  # fmt: skip
    if splits > 1:
        launch(
            attention.merge, (rows, 1, 1), (parts, sink, *written, rows, num_heads),
            shape._replace(warps=4), D_V=d_v, SINK=x.attn_sink is not None, SPLITS=splits,
        )  # fmt: skip


def backward(
    launch: Launch, x: MlaBwdOperands, *, sm_scale: float, dkv_dtype: torch.dtype, index_block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ, dKV, dextra_kv and d_sink; those of operands that are not there are empty."""
    from flashdsa.kernels.triton import attention_bwd

    (num_queries, num_heads, d_qk), d_v = x.q.shape, x.dO.shape[2]
    delta = (x.O.float() * x.dO.float()).sum(-1)
    lse, d_sink = x.lse, x.lse.new_empty(0)
    if x.attn_sink is not None:
        lse, d_sink = sink_backward(lse, x.attn_sink, delta)
    dq = torch.zeros_like(x.q, memory_format=torch.contiguous_format)
    dkv = x.lse.new_zeros(len(x.kv), d_qk)
    extra_kv = x.kv if x.extra_kv is None else x.extra_kv
    dextra = x.lse.new_zeros(0 if x.extra_kv is None else len(extra_kv), d_qk)
    (ids, count, width, _), (more, extra_count, extra_width, _), constants = lists(x, index_block)
    if num_queries and len(x.kv):
        launch(
            attention_bwd.backward,
            (num_queries, -(-num_heads // BACKWARD.heads), 1),
            (x.q, x.kv, x.dO, lse * LOG2_E, delta, ids, count, extra_kv, more, extra_count, dq, dkv,
             dextra if len(dextra) else dkv, num_heads, len(x.kv), width, len(extra_kv),
             extra_width, sm_scale * LOG2_E, sm_scale),
            BACKWARD,
            BLOCK_H=BACKWARD.heads, BLOCK_K=BACKWARD.slots, D_V=d_v, D_ROPE=d_qk - d_v, **constants,
        )  # fmt: skip
    return dq, dkv.to(dkv_dtype), dextra.to(dkv_dtype), d_sink
