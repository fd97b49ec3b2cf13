"""The order of columns in shared memory, in which a lane has four neighbours of a row of dKV.

Lane j of a row has columns 2 j and 2 j + 1 of each eight in a wgmma's accumulator, and an addition
of 16 bytes takes four neighbours. So the words 2 j and 2 j + 1 of every 16 dims, two dims each,
become word j of the first and of the second eight columns. Q and dO are copied so; S and dP need
the keys in the same order, of which a small kernel makes a copy.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from flashdsa.kernels.attention.union.choice import SECOND, is_taken

THREADS = 256
PIECE_DIMS = 16
WORDS = 4
"""Words of eight dims."""


@cute.kernel
def permute_kernel(kv: cute.Tensor, copy: cute.Tensor, choice: Any):
    """16 dims a thread; arguments as in `launch_permute`."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    piece = Int64(block) * THREADS + thread
    taken = Boolean(True)
    if cutlass.const_expr(choice is not None):
        taken = is_taken(choice, Int32(SECOND))
    if taken and piece < Int64(kv.shape[0]) * (kv.shape[1] // PIECE_DIMS):
        source = cute.recast_ptr(kv.iterator + piece * PIECE_DIMS, dtype=Int32)
        to = cute.recast_ptr(copy.iterator + piece * PIECE_DIMS, dtype=Int32)
        words = [load_four(source + half * WORDS) for half in range(2)]
        every = [words[half][i] for half in range(2) for i in range(WORDS)]
        for half in cutlass.range_constexpr(2):
            store_four(to + half * WORDS, every[half::2])


def load_four(pointer: Any) -> Any:
    """16 bytes."""
    return prims.load_ext(pointer.to_llvm_ptr(), dtype=Int32, count=WORDS)


def store_four(pointer: Any, words: list[Any]) -> None:
    """Store 16 bytes."""
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[pointer, *words],
    )


@cute.jit
def launch_permute(kv: cute.Tensor, copy: cute.Tensor, choice: Any, stream: Any):
    """Launch on `stream`.

    Args:
        kv: (S_kv, 576) bf16. copy: the same with its columns in order, written.
        choice: written where it is SECOND, see `choice.py`; None: written.
    """
    pieces = kv.shape[0] * (kv.shape[1] // PIECE_DIMS)
    permute_kernel(kv, copy, choice).launch(
        grid=[(pieces + THREADS - 1) // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream
    )
