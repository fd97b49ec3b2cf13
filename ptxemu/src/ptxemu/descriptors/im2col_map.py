"""Tensor maps in im2col mode: what cuTensorMapEncodeIm2col makes.

A copy in this mode moves some channels of a column of pixels, which it finds by stepping through a
bounding box in every image, width first (PTX ISA, "Im2col mode").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ptxemu.descriptors import tensor_map_bits as bits
from ptxemu.descriptors.tensor_map import TensorMap, decode


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
