"""Pages of MXFP4 keys: codes of e2m1 in shared memory become a product's left operand, e4m3.

A key is e4m3 times 2^-6 of the largest of its four scales (backends/mxfp4.py). A group of 32
columns is what one product takes along K, and has one scale, so its eight magnitudes in e4m3 are a
table of eight bytes. Of a token's four lanes each converts the table of one group and gives it to
the others; a byte permutation then looks up four columns at once. The conversion rounds as the
contract says, so wide spans need no case of their own.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint16, cute

from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.problem import PAGE_SIZE

GROUPS = 4
TOP = 6
"""Exponent with which the numbers of the largest scale are held."""
DEEPEST = -20
"""Exponent, below the largest, at which every code is 0."""
NAN_SCALE = 255
FP32_BIAS, FP32_MANTISSA = 127, 23
LOWER_ROWS = 8
"""Tokens from a lane's first one to its second."""


def place_of_codes(thread: Int32) -> Int32:
    """Half word of a page at which the codes of the caller's first token, group 0, begin. Two
    tokens share a row of 128 bytes; the swizzle exchanges 16 bytes, a group, by the row."""
    lane = thread % WARP_SIZE
    token = thread % WARPGROUP_SIZE // WARP_SIZE * 16 + lane // 4
    row, group = token // 2, token % 2 * GROUPS
    return row * 64 + (group ^ (row % 8)) * 8 + lane % 4


@cute.jit
def load_keys(words: cute.Tensor, page: Any, place: Int32, plan: cutlass.Constexpr) -> None:
    """Convert the page's keys into registers. words: (16,) Int32, the left operand: of each group
    the first 16 columns of both tokens, then the others. page: pointer to its bytes. place: see
    `place_of_codes`."""
    lane = cute.arch.lane_idx()
    # place = 64 row + ..., so that the token is known again.
    token = place // 64 * 2 + ((place // 8) ^ (place // 64)) // GROUPS % 2
    scales = cute.recast_ptr(page, dtype=Int32) + plan.page_key_bytes // 4
    tables = []
    for second in cutlass.range_constexpr(2):
        word = token + second * LOWER_ROWS
        if word >= PAGE_SIZE // 2:  # the second row of scales: neighbouring 16 bytes exchanged
            word = word ^ 4
        tables += _table((scales + word).load(), lane % GROUPS)
    codes = cute.recast_ptr(page, dtype=Uint16)
    for group in cutlass.range_constexpr(GROUPS):
        owner = lane // GROUPS * GROUPS + group
        mine = [cute.arch.shuffle_sync(table, owner) for table in tables]
        for half in cutlass.range_constexpr(2):
            for second in cutlass.range_constexpr(2):
                # Eight tokens are four rows further, where the swizzle exchanges 64 bytes more.
                own = ((place + second * 256) ^ (second * 32)) ^ (group * 8)
                four = Int32((codes + own + half * 4).load())
                words[4 * group + 2 * half + second] = _look_up(four, *mine[2 * second :][:2])


def _table(scales: Int32, group: Int32) -> list[Any]:
    """e4m3 of the magnitudes 0 to 7 of a group, 4 in a word, for its key's four scales."""
    below = ((scales >> (8 * group)) & 255) - _largest(scales)
    exponent = cutlass.max(below, Int32(DEEPEST)) + (TOP + FP32_BIAS)
    unit = (exponent << FP32_MANTISSA).bitcast(Float32)
    sizes = [unit * Float32(size) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
    return [
        cute.arch.inline_ptx(
            "{.reg .b16 low, high;\n"
            "cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};\n"
            "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2};\n"
            "mov.b32 {$w0}, {low, high};}",
            write_only_types=[Int32],
            read_only_args=sizes[first : first + 4],
        )
        for first in (0, 4)
    ]


def _look_up(codes: Int32, low: Int32, high: Int32) -> Int32:
    """Four codes of 4 bits as e4m3, by the tables of their magnitudes; bit 3 is the sign."""
    return cute.arch.inline_ptx(
        "{.reg .b32 size, sign, odd;\n"
        "and.b32 size, {$r0}, 0x7777;\n"
        "prmt.b32 size, {$r1}, {$r2}, size;\n"
        "prmt.b32 sign, {$r0}, {$r0}, 0x1100;\n"
        "and.b32 odd, sign, 0x80008000;\n"
        "shl.b32 sign, sign, 4;\n"
        "and.b32 sign, sign, 0x00800080;\n"
        "or.b32 size, size, odd;\n"
        "or.b32 {$w0}, size, sign;}",
        write_only_types=[Int32],
        read_only_args=[codes, low, high],
    )


def _largest(scales: Int32) -> Int32:
    """Return the largest of four bytes."""
    bytes_ = [(scales >> (8 * i)) & 255 for i in range(GROUPS)]
    return cutlass.max(cutlass.max(bytes_[0], bytes_[1]), cutlass.max(bytes_[2], bytes_[3]))


@cute.jit
def scale_of_key(scales: Int32) -> Float32:
    """Scale of a key, 2^-6 of the largest of its four; below 2^-126 it is a subnormal number, a
    single bit. NaN if that is 255."""
    largest = _largest(scales)
    bits = (largest - TOP) << FP32_MANTISSA
    if largest <= TOP:
        bits = Int32(1) << (largest + (FP32_MANTISSA - 1 - TOP))
    if largest == NAN_SCALE:
        bits = Int32(0x7FC00000)
    return bits.bitcast(Float32)
