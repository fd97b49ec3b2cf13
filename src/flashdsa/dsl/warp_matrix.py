"""Matrices of 16-bit numbers in the registers of a warp."""

from collections.abc import Sequence
from typing import Any

from flashdsa.dsl import ptx


def pack_bf16(low: Any, high: Any) -> Any:
    """Two fp32 as two bf16 in a word."""
    return ptx.word("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", low, high)


def transpose_8x8(word: Any) -> Any:
    """The warp's 8 x 8 matrix transposed: lane 4 r + c has elements (r, 2 c) and (r, 2 c + 1)."""
    return ptx.word("movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", word)


def store_matrices(to: Any, words: Sequence[Any], *, transposed: bool = False) -> None:
    """Store four 8 x 8 matrices to shared memory, a word of each a lane; the warp calls.

    Args:
        to: the lane's address of 16 bytes, of row lane % 8 of matrix lane // 8.
        words: of the matrices. transposed: columns are stored in place of rows.
    """
    trans = ".trans" * transposed
    ptx.run(
        f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 "
        "[{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        to,
        *words,
    )
