"""First arguments of every launch of a forward and of a decode, in order.

`fake_operands.py` compiles with it, the kernels' launches take it apart, the backends fill it.
Nothing here imports CuTe DSL or torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Operands(NamedTuple):
    """Tensors without gaps, and the scale. Each kernel's launch documents the arguments after
    them."""

    q: Any  # (S, H, 576) bf16
    kv: Any  # (S_kv, 576) bf16, or of a decode packed rows, (S_kv, row_bytes)
    indices: Any  # (S, topk) int32
    topk_length: Any  # (S,) int32, or (0,): every slot counts
    attn_sink: Any  # (H,) fp32, or (0,): none
    out: Any  # (S, H, 512) bf16, written
    lse: Any  # (S, H) fp32, written
    sm_scale: Any  # fp32


def split(arguments: tuple[Any, ...]) -> tuple[Operands, tuple[Any, ...]]:
    """Split a launch's arguments into the operands and the rest."""
    count = len(Operands._fields)
    return Operands(*arguments[:count]), arguments[count:]
