"""Tensors of every launch of the Blackwell backward, and what stands for them at compilation."""

from typing import Any, NamedTuple

from cutlass import BFloat16, Float32, Int32, cute

from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.hw import SECTOR_BYTES
from flashdsa.problem import D_QK, D_V


class Operands(NamedTuple):
    """Arguments of every launch, in order."""

    q: Any  # (S * H, 576) bf16 with H heads of a query
    kv: Any  # (S_kv, 576) bf16
    do: Any  # (S * H, 512) bf16
    lse: Any  # (S, H) fp32
    out: Any  # (S * H, 512) bf16
    indices: Any  # (S, topk) int32
    topk_length: Any  # (S,) int32: slots of each query that may be valid
    delta: Any  # (S, H) fp32, written
    dq: Any  # as q, written
    dkv: Any  # (S_kv, 576) fp32, added to


def fake_operands(heads: int) -> Operands:
    """Operands without memory, of so many heads a query; other sizes are dynamic."""
    rows, queries, keys, topk = (cute.sym_int32() for _ in range(4))
    return Operands(
        fake_tensor(BFloat16, (rows, D_QK)),
        fake_tensor(BFloat16, (keys, D_QK)),
        fake_tensor(BFloat16, (rows, D_V)),
        fake_tensor(Float32, (queries, heads), 4),
        fake_tensor(BFloat16, (rows, D_V)),
        fake_tensor(Int32, (queries, topk), 4),
        fake_tensor(Int32, (queries,), 4),
        fake_tensor(Float32, (queries, heads), 4),
        fake_tensor(BFloat16, (rows, D_QK), SECTOR_BYTES),
        fake_tensor(Float32, (keys, D_QK)),
    )
