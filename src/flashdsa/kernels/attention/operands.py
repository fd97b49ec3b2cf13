"""First arguments of every launch of a forward and of a decode, in order.

`fake_operands.py` compiles with it, the kernels' launches take it apart, the backends fill it.
Nothing here imports CuTe DSL or torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Operands(NamedTuple):
    """Tensors without gaps, and the scale; each kernel's launch documents what follows them."""

    q: Any  # (S, H, 576) bf16; None where a kernel gets it as it is or by its tensor map
    kv: Any  # (S_kv, 576) bf16, or of a decode packed rows, (S_kv, row_bytes)
    indices: Any  # (S, topk) int32
    topk_length: Any  # (S,) int32, or (0,): every slot counts
    attn_sink: Any  # (H,) fp32, or (0,): none
    out: Any  # (S, H, 512) bf16, written
    lse: Any  # (S, H) fp32, written
    sm_scale: Any  # fp32


class MoreOperands(NamedTuple):
    """Arguments of kernels of two sources, after `Operands`."""

    ends: Any  # (S,) int32, `indices` (S, 1) being the first rows of ranges; or (0,): they are ids
    extra_kv: Any  # (S_extra, d_qk) bf16; without a second source (0, d_qk)
    extra_indices: Any  # (S, any) int32; without a second source (S, 0)
    extra_topk_length: Any  # (S,) int32, or (0,): every slot counts
    extra_ends: Any  # (S,) int32, or (0,), as `ends`
    block_log2: Any  # int32, log2 of the rows that an id of `indices` names


def split(arguments: tuple[Any, ...]) -> tuple[Operands, tuple[Any, ...]]:
    """Split a launch's arguments into the operands and the rest."""
    count = len(Operands._fields)
    return Operands(*arguments[:count]), arguments[count:]


def split_more(arguments: tuple[Any, ...], joined: bool) -> tuple[Any, tuple[Any, ...]]:
    """Split what follows the operands into `MoreOperands`, of one source None, and the rest."""
    if not joined:
        return None, arguments
    count = len(MoreOperands._fields)
    return MoreOperands(*arguments[:count]), arguments[count:]
