"""Fragments of a wgmma in registers: rows of a thread, exchanges of four lanes, bf16 words."""

from typing import Any

from cutlass import cute

from flashdsa.dsl import ptx
from flashdsa.hw import WARP_SIZE

MMA_K = 16
MMA_ROWS = 16
"""Rows of a warp in a wgmma."""
THREAD_ROWS = 2
BLOCK_DIMS = 32
"""Dims that four lanes exchange and store at once, 8 each."""
BF16_KIND = "bf16"
F16_KIND = "f16"
"""Kinds of the operands of a product."""


def row_of_thread(thread: Any) -> Any:
    """The first of the thread's two rows in an accumulator."""
    return thread // WARP_SIZE * MMA_ROWS + thread % WARP_SIZE // 4


def exp2(value: Any) -> Any:
    """2^value; 0 of -inf."""
    return cute.math.exp2(value, fastmath=True)


def quad_reduce(value: Any, combine: Any) -> Any:
    """Reduce over the four lanes that share a row; all four get the result."""
    for offset in (1, 2):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset))
    return value


def pack(low: Any, high: Any, kind: str = BF16_KIND) -> Any:
    """Two fp32 as two bf16, or two of `kind`, in a word."""
    return ptx.word(f"cvt.rn.{kind}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};", low, high)


@cute.jit
def transpose_quad(words: list[Any], odd: Any, upper: Any) -> list[Any]:
    """Word i of lane j of four becomes word j of lane i."""
    a, b, c, d = words
    x = cute.arch.shuffle_sync_bfly(a if odd else b, 1)
    y = cute.arch.shuffle_sync_bfly(c if odd else d, 1)
    a, b = (x if odd else a), (b if odd else x)
    c, d = (y if odd else c), (d if odd else y)
    x = cute.arch.shuffle_sync_bfly(a if upper else c, 2)
    y = cute.arch.shuffle_sync_bfly(b if upper else d, 2)
    a, b = (x if upper else a), (y if upper else b)
    c, d = (c if upper else x), (d if upper else y)
    return [a, b, c, d]
