"""Tensor maps in im2col mode: what cuTensorMapEncodeIm2col makes, and the driver's checks.

A copy in this mode moves some channels of a column of pixels, which it finds by stepping through a
bounding box in every image, width first (PTX ISA, "Im2col mode").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ptxemu.descriptors import tensor_map_bits as bits
from ptxemu.descriptors.swizzle import Swizzle
from ptxemu.descriptors.tensor_map import TensorMap, check_modes, check_place, decode, require

MAX_CHANNELS = 256
MAX_PIXELS = 1024
_CORNER_BITS = {3: 16, 4: 8, 5: 5}
"""Bits of a coordinate of a corner, signed, by rank."""


@dataclass(frozen=True)
class Im2colMap(TensorMap):
    """Images in global memory: dims are channels, width, height, depth (as far as there), images.

    `box` has one entry, the channels of a pixel that a copy moves.

    Attributes:
        lower: first position in each spatial dimension, relative to 0.
        upper: the last one, relative to the last of the tensor.
        pixels: pixels that a copy moves.
    """

    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    pixels: int = 1

    @property
    def last(self) -> tuple[int, ...]:
        """The last position in each spatial dimension."""
        pairs = zip(self.dims[1:-1], self.upper, strict=True)
        return tuple(extent - 1 + corner for extent, corner in pairs)

    @cached_property
    def rows(self) -> int:
        """Rows of channels that a copy moves."""
        return self.pixels

    def encode(self) -> bytes:
        """The 128-byte form."""
        words = np.zeros(bits.TENSOR_MAP_BYTES // 8, dtype=np.uint64)
        self.put_common(words)
        bits.put_im2col(words, self.box[0], self.pixels, self.lower, self.upper)
        return words.tobytes()


@lru_cache(maxsize=4096)
def decode_map(raw: bytes) -> TensorMap:
    """The map of either mode that 128 bytes are.

    Raises:
        ValueError: they are none.
    """
    common = decode(raw)
    words = np.frombuffer(raw, dtype=np.uint64, count=bits.TENSOR_MAP_BYTES // 8)
    if bits.MODE.get(words) != bits.IM2COL_MODE:
        return common
    if common.rank < 3:
        raise ValueError("an im2col map needs rank 3 or more")
    channels, pixels, lower, upper = bits.get_im2col(words, common.rank - 2)
    return Im2colMap(
        common.address,
        common.dtype,
        common.dims,
        common.strides,
        (channels,),
        common.element_strides,
        common.interleave,
        common.swizzle,
        common.l2_promotion,
        common.fill,
        lower,
        upper,
        pixels,
    )


def encode_im2col(made: Im2colMap) -> bytes:
    """Return the tensor map that cuTensorMapEncodeIm2col makes of its arguments.

    Raises:
        LaunchError: the driver refuses an argument; the message names it.
    """
    require("dims", made.dims, 3 <= made.rank <= bits.MAX_RANK, "3 to 5 dimensions")
    check_modes(made, box_rank=1)
    check_place(made)
    _check_column(made)
    return made.encode()


def _check_column(made: Im2colMap) -> None:
    require("channels", made.box[0], 1 <= made.box[0] <= MAX_CHANNELS, f"1..{MAX_CHANNELS}")
    require("pixels", made.pixels, 1 <= made.pixels <= MAX_PIXELS, f"1..{MAX_PIXELS}")
    for step in made.element_strides:
        require("element_strides", made.element_strides, 1 <= step <= 8, "each in 1..8")
    limit = 1 << (_CORNER_BITS[made.rank] - 1)
    for argument, corner in (("lower", made.lower), ("upper", made.upper)):
        require(argument, corner, len(corner) == made.rank - 2, f"{made.rank - 2} values")
        fits = all(-limit <= value < limit for value in corner)
        require(argument, corner, fits, f"each in {-limit}..{limit - 1} for rank {made.rank}")
    holds = all(low <= last for low, last in zip(made.lower, made.last, strict=True))
    require("upper", made.upper, holds, "a box that is not empty")
    inner = made.shared_row_bytes
    if made.interleave == 0:
        require("channels", made.box[0], inner % 16 == 0, "a row to be a multiple of 16 bytes")
        if made.swizzle is not Swizzle.NONE:
            span = made.swizzle.span
            require("channels", made.box[0], inner <= span, f"a row of at most {span} bytes")
