"""The 128-byte form of a tensor map: where each field lies.

The layout was read off maps that the CUDA driver 580 encoded on an H200 (`tests/memory/
tensor_maps.json`) and off `tensormap.replace` there; the chunk size of a swizzle (`atomicity`)
and the codes of the sub-byte types only off maps that CuTe DSL 4.8 builds for sm_100a.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

TENSOR_MAP_BYTES = 128
MAX_RANK = 5

Words: TypeAlias = NDArray[np.uint64]
"""The map as 16 little-endian words of 64 bits; the driver keeps notes in the upper 8."""


@dataclass(frozen=True, slots=True)
class Field:
    """Bits of one word."""

    word: int
    shift: int
    width: int

    def get(self, words: Words) -> int:
        """The field's value."""
        return (int(words[self.word]) >> self.shift) & ((1 << self.width) - 1)

    def put(self, words: Words, value: int) -> None:
        """Replace the field; bits of `value` beyond its width are dropped."""
        mask = (1 << self.width) - 1
        kept = int(words[self.word]) & ~(mask << self.shift)
        words[self.word] = np.uint64(kept | ((value & mask) << self.shift))


ADDRESS = Field(0, 0, 64)
RANK = Field(1, 4, 3)
"""Rank - 1."""
TYPE = Field(1, 7, 4)
INTERLEAVE = Field(1, 11, 2)
SWIZZLE = Field(1, 13, 2)
FILL = Field(1, 15, 1)
TF32 = Field(1, 16, 1)
"""Rounds to tf32 when loading; only with the type f32."""
L2_PROMOTION = Field(1, 17, 2)
ATOMICITY = Field(1, 19, 2)
DIMS = (*(Field(4 + k // 2, 32 * (k % 2), 32) for k in range(4)), Field(6, 0, 32))
"""Elements - 1."""
BOX = (Field(6, 56, 8), *(Field(7, 8 * k, 8) for k in range(4)))
"""Elements - 1."""
ELEMENT_STRIDES = tuple(Field(6, 32 + 3 * k, 3) for k in range(MAX_RANK))
"""Stride - 1."""
_STRIDES_LOW = (Field(1, 32, 32), Field(2, 0, 32), Field(2, 32, 32), Field(3, 0, 32))
_STRIDES_HIGH = tuple(Field(3, 32 + 4 * k, 4) for k in range(4))
MODE = Field(1, 0, 4)
IM2COL_MODE = 3
"""MODE of maps in im2col mode, whose fields replace the box."""
_CHANNELS = Field(6, 56, 8)
"""Channels - 1."""
_PIXELS = Field(7, 32, 10)
"""Pixels - 1."""
_CORNERS = (Field(7, 0, 16), Field(7, 16, 16))
"""The lower corner and the upper one: 16, 8 or 5 bits a coordinate by rank."""
_CORNER_BITS = (16, 8, 5)
TRANSFER_BYTES = Field(8, 0, 32)
"""The driver's note: bytes of a box."""
SHARED_ALIGNMENT = Field(9, 0, 32)
"""The driver's note: after how many bytes of shared memory the swizzle repeats."""

TYPE_CODES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 7, 8, 11, 12, 13)
"""Hardware's code by the number that tensormap.replace and `TYPE_NAMES` use."""
TYPE_NAMES = (
    *("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32.ftz", "f64", "bf16", "tf32"),
    *("tf32.ftz", "b4x16", "b4x16_p64", "b6x16_p32"),
)
"""The types of `tensormap.replace.tile.elemtype`, by its operand."""
_FIRST_TF32 = TYPE_NAMES.index("tf32")


def get_stride(words: Words, k: int) -> int:
    """Bytes between neighbours along dimension k + 1."""
    return (_STRIDES_HIGH[k].get(words) << 36) | (_STRIDES_LOW[k].get(words) << 4)


def put_stride(words: Words, k: int, value: int) -> None:
    """Set the bytes between neighbours along dimension k + 1; a multiple of 16."""
    _STRIDES_LOW[k].put(words, value >> 4)
    _STRIDES_HIGH[k].put(words, value >> 36)


def put_im2col(
    words: Words, channels: int, pixels: int, lower: tuple[int, ...], upper: tuple[int, ...]
) -> None:
    """Set the fields of im2col mode."""
    width = _CORNER_BITS[len(lower) - 1]
    for field, corner in zip(_CORNERS, (lower, upper), strict=True):
        masked = (value & ((1 << width) - 1) for value in corner)
        field.put(words, sum(value << (width * k) for k, value in enumerate(masked)))
    _CHANNELS.put(words, channels - 1)
    _PIXELS.put(words, pixels - 1)
    MODE.put(words, IM2COL_MODE)


def get_im2col(words: Words, spatial: int) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """Channels, pixels, the lower and the upper corner of `spatial` dimensions."""
    width = _CORNER_BITS[spatial - 1]
    half = 1 << (width - 1)
    lower, upper = (
        tuple(
            ((field.get(words) >> (width * k) & (2 * half - 1)) ^ half) - half
            for k in range(spatial)
        )
        for field in _CORNERS
    )
    return _CHANNELS.get(words) + 1, _PIXELS.get(words) + 1, lower, upper


def get_type(words: Words) -> str | None:
    """The element type; None for a code that no type has."""
    code = TYPE.get(words)
    if code in (7, 8) and TF32.get(words):
        return TYPE_NAMES[_FIRST_TF32 + code - 7]
    return TYPE_NAMES[TYPE_CODES.index(code)] if code in TYPE_CODES else None


def put_type(words: Words, number: int) -> None:
    """Set the element type by its number in TYPE_NAMES.

    As hardware does, the types but tf32 leave the tf32 bit as it was.
    """
    TYPE.put(words, TYPE_CODES[number])
    if TYPE_NAMES[number].startswith("tf32"):
        TF32.put(words, 1)


def replace_field(words: Words, field: str, ordinal: int, value: int) -> None:
    """tensormap.replace: set one field of a map, nothing else.

    Args:
        field: as the instruction names it; ordinal: the dimension, where there are several.
        value: the instruction's operand: the rank less one, but the true extents and strides.
    """
    _REPLACE[field](words, ordinal, value)


_REPLACE: dict[str, Callable[[Words, int, int], None]] = {
    "global_address": lambda words, _, value: ADDRESS.put(words, value),
    "rank": lambda words, _, value: RANK.put(words, value),
    "box_dim": lambda words, k, value: BOX[k].put(words, value - 1),
    "global_dim": lambda words, k, value: DIMS[k].put(words, value - 1),
    "global_stride": put_stride,
    "element_stride": lambda words, k, value: ELEMENT_STRIDES[k].put(words, value - 1),
    "elemtype": lambda words, _, value: put_type(words, value),
    "interleave_layout": lambda words, _, value: INTERLEAVE.put(words, value),
    "swizzle_mode": lambda words, _, value: SWIZZLE.put(words, value),
    "swizzle_atomicity": lambda words, _, value: ATOMICITY.put(words, value),
    "fill_mode": lambda words, _, value: FILL.put(words, value),
}
REPLACEABLE = tuple(_REPLACE)
"""The fields that tensormap.replace knows."""
