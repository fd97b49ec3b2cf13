"""Keys and bins: scores as unsigned integers in the same order, and a monotone function of them.

The bins are a window of 32 binary exponents around 1 with 64 bins each, for either sign; keys
outside fall into the end bins, which costs the threshold's search a round, not exactness.
"""

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from flashdsa.kernels.indexer.sizes import NUM_BINS

KEY_SHIFT = 17
"""Bits of a key below a bin: sign, 8 exponent bits and 6 mantissa bits stay."""
HALF_BINS = NUM_BINS // 2
MIDDLE = 1 << (31 - KEY_SHIFT)
"""Shifted key of +0."""
WINDOW_START = 112 * 64
"""Shifted magnitude of 2**-15, where the window begins."""
BIN_BITS = 12
NO_POSITION = -(2**31)
"""The position of no token; as an unsigned number it is above all positions."""


@cute.jit
def sortable(score: Float32) -> Uint32:
    """The score as an unsigned integer in the same order; -0 counts as +0, NaN gets the smallest
    key of a token, 1. Key 0 is that of no token: a list that was compacted before it had topk
    tokens accepts any other key afterwards."""
    bits = (score + Float32(0.0)).bitcast(Uint32)
    key = bits | Uint32(0x80000000)
    if bits >> 31 == 1:
        key = ~bits
    if score != score:
        key = Uint32(1)
    return key


@cute.jit
def bin_of(key: Uint32) -> Int32:
    """The key's bin."""
    signed = Int32(key >> KEY_SHIFT) - MIDDLE
    magnitude = signed ^ (signed >> 31)
    within = cutlass.min(cutlass.max(magnitude - WINDOW_START, Int32(0)), Int32(HALF_BINS - 1))
    return HALF_BINS + within if signed >= 0 else HALF_BINS - 1 - within


@cute.jit
def lowest_key(bin_index: Int32) -> Uint32:
    """The smallest key of a bin; of the bin after the last one, a key that no score has."""
    shifted = MIDDLE + WINDOW_START + bin_index - HALF_BINS
    if bin_index < HALF_BINS:
        shifted = MIDDLE - 1 - (HALF_BINS - 1 - bin_index + WINDOW_START)
    if bin_index == HALF_BINS:
        shifted = Int32(MIDDLE)
    if bin_index <= 0:
        shifted = Int32(0)
    lowest = Uint32(shifted) << KEY_SHIFT
    if bin_index >= NUM_BINS:
        lowest = Uint32(0xFFFFFFFF)
    return lowest


@cute.jit
def highest_key(bin_index: Int32) -> Uint32:
    """The largest key of a bin."""
    return lowest_key(bin_index + 1) - 1


@cute.jit
def step_bits(width: Uint32) -> Int32:
    """Right shift after which values in [0, width] number fewer than the bins."""
    return cutlass.max(Int32(32 - BIN_BITS) - Int32(cute.arch.clz(width)), Int32(0))


@cute.jit
def accepts(key: Uint32, position: Uint32, at_key: Uint32, at_position: Uint32) -> cutlass.Boolean:
    """Whether an entry is at least as good as the threshold."""
    return (key > at_key) or (key == at_key and position <= at_position)
