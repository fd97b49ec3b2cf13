"""The first operand of a product from rows in shared memory: e4m3 become f16 in registers.

A 16-bit element of a packed row is two e4m3:
- K: a lane gets four neighbouring bytes. The first two are its elements of the first 8 columns of
  K of a product, the others those of the last 8; Q's columns lie likewise (`query.py`).
- V, transposed: a lane gets two dims of two keys, and a row of the product is every other dim.
"""

from typing import Any

from cutlass import Int32, cute

from flashdsa.dsl.fragments import MMA_K
from flashdsa.kernels.attention.sm90.core.tile import CHUNK

LOAD_BYTES = 32
"""Bytes of a row that one ldmatrix reads along it."""
CHUNK_STEPS = CHUNK // MMA_K


def load_matrices(address: Any, transposed: bool = False) -> list[Any]:
    """ldmatrix of four 8x8 matrices; the lane's address is of row lane % 8 of matrix lane // 8."""
    trans = ".trans" if transposed else ""
    return list(
        cute.arch.inline_ptx(
            f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared::cta.b16 "
            "{{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[address],
        )
    )


def to_f16(word: Any) -> list[Any]:
    """Four e4m3 as two words of f16."""
    return list(
        cute.arch.inline_ptx(
            "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
            "cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
            write_only_types=[Int32, Int32],
            read_only_args=[word],
        )
    )


def by_dim(word: Any) -> Any:
    """Two dims of two keys, in bytes: the first dim of both keys, then the second one."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r0}, 0x3120;", write_only_types=[Int32], read_only_args=[word]
    )
