"""Parts of both backward algorithms: products over 64 keys or rows, and the order of dims in them.

Lane j of a row has columns 2 j and 2 j + 1 of each eight in a wgmma's accumulator, and an addition
to dKV takes four neighbouring dims. So words 2 j and 2 j + 1 of every 16 dims of Q and dO, two dims
each, lie in shared memory as word j of the first and of the second eight columns.
"""

from typing import Any

from flashdsa.dsl.cp_async import COPY_BYTES
from flashdsa.dsl.fragments import MMA_K
from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.wgmma import descriptor_behind, multiply_bf16
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import BF16, CHUNK, ROWS

PAIR_DIMS = 16
"""Dims of two neighbouring groups of 8 columns, four of them in each thread of a row."""
WORD_BYTES = CHUNK * BF16 // WARP_SIZE
"""Bytes of a row of a chunk, copied by a lane: no more, as neighbouring words go to different
addresses. Exchanges between lanes, after the products, would take as long or longer."""
WORD_DIMS = WORD_BYTES // BF16
QUERY_ROWS = 8
"""Neighbouring rows of one query: the number of heads is a multiple."""
STEPS = ROWS // MMA_K
"""wgmmas along 64 keys or rows."""


def place_of_word(word: Any) -> Any:
    """Offset of one of a row's 32 words of two dims in its line of a chunk, not swizzled. Lane j of
    a row has the four neighbouring dims from 4 j on."""
    return (word // 8 * 2 + word % 2) * COPY_BYTES + word % 8 // 2 * WORD_BYTES


def four_dims(acc: Any, pair: int, h: int) -> list[Any]:
    """The four neighbouring dims of a pair of groups, in one of the thread's rows."""
    return [acc[8 * pair + 4 * group + 2 * h + e] for group in range(2) for e in range(2)]


def multiply(
    acc: Any, columns: int, a: tuple[Any, int], b: tuple[Any, int], *, transposed: bool, clear: bool
) -> None:
    """Issue acc += A B over 64 keys or rows; with `clear` acc = A B. `acc`: this thread's columns /
    2 fp32, or more, of which these are the first. `a`, `b`: low word of the operand's descriptor,
    and bytes from one step along K to the next. `transposed`: A's rows are along its lines; else
    its K is."""
    (a_low, a_step), (b_low, b_step) = a, b
    a_low, b_low = opaque(a_low), opaque(b_low)
    for step in range(STEPS):
        multiply_bf16(
            acc,
            columns,
            descriptor_behind(a_low, step * a_step),
            descriptor_behind(b_low, step * b_step),
            accumulate=not clear or step > 0,
            transposes=(int(transposed), 1),
        )
