"""Sparse MLA by Triton: counts of slots, tiles, splits, and the launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.cpu.sparse_mla import sink_backward, write_without_keys
from flashdsa.backends.memory import readable
from flashdsa.backends.runner import Runner
from flashdsa.backends.triton.launch import BACKWARD, launch, shape_of_forward
from flashdsa.problem import INT32_MAX

if TYPE_CHECKING:
    from flashdsa.ops.attention import SparseMlaOperands, SparseMlaOutOperands
    from flashdsa.ops.attention_backward import MlaBwdOperands

LOG2_E = math.log2(math.e)
MOST_SPLITS = 16
Serve = Callable[[Sequence[Any]], Any]


class Source(NamedTuple):
    """Rows and each query's list of them, as the kernels take it."""

    kv: Tensor
    ids: Tensor
    """(S, width) ids, or (S,) first rows."""
    counts: Tensor
    """(S,) int32, or int64 where sizes ask for it: slots in use."""
    width: int
    slots: int
    """Slots of a query at most."""
    rows_of_id: int
    """0: the list is a range."""


def _source(
    kv: Tensor, ids: Tensor, length: Tensor | None, ends: Tensor | None, block: int
) -> Source:
    rows = len(kv)
    block = max(1, min(block, rows))  # any id but 0 stays invalid
    if ends is not None:
        starts = ids[:, 0].clamp(0, rows)
        counts = (ends.clamp(0, rows) - starts).clamp(min=0)
        return Source(kv, starts, counts, 1, rows, 0)
    width = ids.shape[1]
    counts = ids.new_full((len(ids),), width) if length is None else length.clamp(0, width)
    if width * block > INT32_MAX:
        counts = counts.long()
    return Source(kv, ids.contiguous(), counts * block, width, width * block if rows else 0, block)


def _sources(x: Any, block: int) -> tuple[Source, Source, dict[str, Any]]:
    """kv and extra_kv, or kv again, and what the kernels are compiled for."""
    first = second = _source(x.kv, x.indices, x.topk_length, x.ends, block)
    if x.extra_kv is not None:
        second = _source(x.extra_kv, x.extra_indices, x.extra_topk_length, x.extra_ends, 1)
    constants = {
        "RANGE": not first.rows_of_id,
        "ROWS_OF_ID": first.rows_of_id,
        "EXTRA": x.extra_kv is not None,
        "EXTRA_RANGE": not second.rows_of_id,
    }
    return first, second, constants


def bind(
    runner: Runner, operands: SparseMlaOperands, *, d_v: int, max_logits: bool, **choices: Any
) -> Serve:
    """Serve `sparse_mla_fwd`: O (S, H, d_v), lse and, if asked for, max_logits (S, H)."""

    def serve(given: Sequence[Any]) -> tuple[Tensor, ...]:
        x: Any = type(operands)(*given)
        rows = x.q.shape[:2]
        out, lse = runner.empty(*rows, d_v, dtype=x.q.dtype), runner.empty(*rows, dtype=torch.float)
        largest = runner.empty(*(rows if max_logits else (0,)), dtype=torch.float)
        asked = largest if max_logits else None
        _forward(runner, x.into(*x[:3], out, lse, asked, *x[3:]), **choices)
        return out, lse, largest

    return runner.on_device(serve)


def bind_out(runner: Runner, operands: SparseMlaOutOperands, **choices: Any) -> Serve:
    """Serve `sparse_mla_fwd_out`."""
    kind = type(operands)
    return runner.on_device(lambda given: _forward(runner, kind(*given), **choices))


def _forward(
    runner: Runner,
    x: SparseMlaOutOperands,
    *,
    sm_scale: float,
    index_block: int,
    batch_invariant: bool,
) -> None:
    """out, lse and, if asked for, max_logits, written."""
    from flashdsa.kernels.triton import attention

    (num_queries, num_heads, d_qk), d_v = x.q.shape, x.out.shape[2]
    extra_kv = None if x.extra_kv is None else readable(x.extra_kv)
    x = x._replace(q=readable(x.q), kv=readable(x.kv), extra_kv=extra_kv)
    first, second, constants = _sources(x, index_block)
    if not num_queries or not first.slots + second.slots:
        write_without_keys(x)
        return
    shape = shape_of_forward(num_heads, runner.capability)
    blocks = -(-num_heads // shape.heads)
    splits = 1
    if not batch_invariant:
        wanted = min(runner.num_sms // (num_queries * blocks), first.slots // (4 * shape.keys))
        splits = 1 << max(min(wanted, MOST_SPLITS), 1).bit_length() - 1
    rows = num_queries * num_heads
    parts = runner.empty(splits * rows * (d_v + 2) if splits > 1 else 1, dtype=torch.float)
    written = x.out, x.lse, torch.empty_like(x.lse) if x.max_logits is None else x.max_logits
    sink = x.lse if x.attn_sink is None else x.attn_sink.contiguous()
    constants |= {"D_V": d_v, "SINK": x.attn_sink is not None, "SPLITS": splits}
    launch(
        runner,
        attention.forward,
        (num_queries, blocks, splits),
        (x.q, *first[:3], *second[:3], sink, *written, parts, num_heads, len(first.kv),
         first.width, d_qk, len(second.kv), second.width, d_qk, sm_scale * LOG2_E),
        shape,
        BLOCK_H=shape.heads, BLOCK_K=shape.keys, D_ROPE=d_qk - d_v, **constants,
    )  # fmt: skip
    if splits > 1:
        launch(
            runner,
            attention.merge,
            (rows, 1, 1),
            (parts, sink, *written, rows, num_heads),
            shape._replace(warps=4),
            **{name: constants[name] for name in ("D_V", "SINK", "SPLITS")},
        )


def bind_backward(runner: Runner, operands: MlaBwdOperands, **choices: Any) -> Serve:
    """Serve `mla_bwd`."""
    kind = type(operands)
    return runner.on_device(lambda given: _backward(runner, kind(*given), **choices))


def _backward(
    runner: Runner, x: MlaBwdOperands, *, sm_scale: float, dkv_dtype: torch.dtype, index_block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ, dKV, dextra_kv and d_sink; those of operands that are not there are empty."""
    from flashdsa.kernels.triton import attention_bwd

    (num_queries, num_heads, d_qk), d_v = x.q.shape, x.dO.shape[2]
    x = x._replace(**{n: readable(v) for n, v in x._asdict().items() if v is not None})
    delta = (x.O.float() * x.dO.float()).sum(-1)
    lse, d_sink = x.lse, x.lse.new_empty(0)
    if x.attn_sink is not None:
        lse, d_sink = sink_backward(lse, x.attn_sink, delta)
    first, second, constants = _sources(x, index_block)
    dq = torch.zeros_like(x.q)
    dkv = x.lse.new_zeros(len(x.kv), d_qk)
    dextra = x.lse.new_zeros(0 if x.extra_kv is None else len(x.extra_kv), d_qk)
    if num_queries and first.slots + second.slots:
        launch(
            runner,
            attention_bwd.backward,
            (num_queries, -(-num_heads // BACKWARD.heads), 1),
            (x.q, x.kv, x.dO, lse * LOG2_E, delta, *first[1:3], *second[:3], dq, dkv,
             dextra if len(dextra) else dkv, num_heads, len(x.kv), first.width, len(second.kv),
             second.width, sm_scale * LOG2_E, sm_scale),
            BACKWARD,
            BLOCK_H=BACKWARD.heads, BLOCK_K=BACKWARD.keys, D_V=d_v, D_ROPE=d_qk - d_v, **constants,
        )  # fmt: skip
    return dq, dkv.to(dkv_dtype), dextra.to(dkv_dtype), d_sink
