"""Tensor maps: what a tensor copy moves, to and from their 128-byte form, with the driver's checks.

See `tensor_map_bits` for what is certain about the form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from ptxemu.descriptors import tensor_map_bits as bits
from ptxemu.descriptors.swizzle import PERIOD, Swizzle
from ptxemu.descriptors.tensor_map_bits import MAX_RANK, TENSOR_MAP_BYTES, TYPE_NAMES
from ptxemu.errors import LaunchError

MAX_BOX_BYTES = 233472
"""The largest box that the driver accepts: the 228 KiB of an SM."""
MAX_ADDRESS = 1 << 57
INTERLEAVES = ("none", "16B", "32B")

ELEMENT_BITS = {
    **dict.fromkeys(("u8",), 8),
    **dict.fromkeys(("u16", "f16", "bf16"), 16),
    **dict.fromkeys(("u32", "s32", "f32", "f32.ftz", "tf32", "tf32.ftz"), 32),
    **dict.fromkeys(("u64", "s64", "f64"), 64),
    **dict.fromkeys(("b4x16", "b4x16_p64"), 4),
    "b6x16_p32": 6,
}
"""Bits of an element in global memory."""
PADDED = ("b4x16_p64", "b6x16_p32")
"""Types whose 16 elements, 8 or 12 bytes, take 16 bytes of shared memory."""
SWIZZLES_OF_PADDED = (Swizzle.NONE, Swizzle.B128, Swizzle.B128_ATOM_32B, Swizzle.B128_ATOM_64B)
DRIVER_TYPES = (
    *("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32.ftz", "tf32"),
    *("tf32.ftz", "b4x16", "b4x16_p64", "b6x16_p32"),
)
"""CUtensorMapDataType, in its order."""


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box of it that one copy moves.

    Dimensions are listed innermost first.

    Attributes:
        address: of the tensor's first element.
        dtype: element type as `tensor_map_bits.TYPE_NAMES` has it.
        dims: elements along each dimension.
        strides: bytes between neighbours along each dimension but the first.
        box: elements that a copy spans along each dimension.
        element_strides: of these only every n-th is copied; the first dimension's is ignored.
        interleave: 0 none, 1 16 B, 2 32 B.
        swizzle: how shared memory is permuted.
        l2_promotion: 0 to 3, without effect.
        fill: 0: elements outside the tensor read as zero; 1: as NaN.
    """

    address: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int = 0
    swizzle: Swizzle = Swizzle.NONE
    l2_promotion: int = 0
    fill: int = 0

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @cached_property
    def element_bits(self) -> int:
        """Bits of an element in global memory."""
        return ELEMENT_BITS[self.dtype]

    @cached_property
    def is_padded(self) -> bool:
        """Whether 16 elements take 16 bytes of shared memory, though they have fewer."""
        return self.dtype in PADDED

    @cached_property
    def landed(self) -> tuple[int, ...]:
        """Elements along each dimension that a copy moves."""
        steps = zip(self.box[1:], self.element_strides[1:], strict=True)
        return (self.box[0], *(-(-extent // step) for extent, step in steps))

    @cached_property
    def rows(self) -> int:
        """Rows along the first dimension that a copy moves."""
        return prod(self.landed[1:])

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row in global memory."""
        return self.box[0] * self.element_bits // 8

    @cached_property
    def shared_row_bytes(self) -> int:
        """Bytes that a row takes in shared memory, padding of sub-byte types included."""
        return self.box[0] if self.is_padded else self.row_bytes

    @cached_property
    def pitch(self) -> int:
        """Bytes between rows in shared memory: swizzled rows take at least the swizzle's span."""
        span = 0 if self.swizzle is Swizzle.NONE else self.swizzle.span
        return max(self.shared_row_bytes, span)

    @cached_property
    def needs_sm100(self) -> bool:
        """Whether Hopper's driver refuses it: sub-byte types, larger swizzle atoms."""
        return self.element_bits < 8 or self.swizzle.atomicity > 0

    def encode(self) -> bytes:
        """The 128-byte form, as the driver makes it."""
        words = np.zeros(TENSOR_MAP_BYTES // 8, dtype=np.uint64)
        self.put_common(words)
        for k in range(self.rank):
            bits.BOX[k].put(words, self.box[k] - 1)
        steps = zip(self.box, self.element_strides, strict=True)
        noted = prod(extent // step for extent, step in steps) * self.element_bits // 8
        bits.TRANSFER_BYTES.put(words, noted)
        swizzles = self.swizzle is not Swizzle.NONE
        bits.SHARED_ALIGNMENT.put(words, 128 << self.swizzle.mode if swizzles else 16)
        return words.tobytes()

    def put_common(self, words: bits.Words) -> None:
        """Set the fields that all modes have."""
        bits.ADDRESS.put(words, self.address)
        bits.RANK.put(words, self.rank - 1)
        bits.put_type(words, TYPE_NAMES.index(self.dtype))
        bits.INTERLEAVE.put(words, self.interleave)
        bits.SWIZZLE.put(words, self.swizzle.mode)
        bits.ATOMICITY.put(words, self.swizzle.atomicity)
        bits.FILL.put(words, self.fill)
        bits.L2_PROMOTION.put(words, self.l2_promotion)
        for k in range(self.rank):
            bits.DIMS[k].put(words, self.dims[k] - 1)
            bits.ELEMENT_STRIDES[k].put(words, self.element_strides[k] - 1)
        for k, stride in enumerate(self.strides):
            bits.put_stride(words, k, stride)


@lru_cache(maxsize=4096)
def decode(raw: bytes) -> TensorMap:
    """The map that 128 bytes are.

    Raises:
        ValueError: they are none: an unknown type or rank.
    """
    words = np.frombuffer(raw, dtype=np.uint64, count=TENSOR_MAP_BYTES // 8)
    rank = bits.RANK.get(words) + 1
    dtype = bits.get_type(words)
    if rank > MAX_RANK or dtype is None:
        raise ValueError("the 128 bytes are no tensor map")
    return TensorMap(
        bits.ADDRESS.get(words),
        dtype,
        tuple(field.get(words) + 1 for field in bits.DIMS[:rank]),
        tuple(bits.get_stride(words, k) for k in range(rank - 1)),
        tuple(field.get(words) + 1 for field in bits.BOX[:rank]),
        tuple(field.get(words) + 1 for field in bits.ELEMENT_STRIDES[:rank]),
        bits.INTERLEAVE.get(words),
        Swizzle.of(bits.SWIZZLE.get(words), bits.ATOMICITY.get(words)),
        bits.L2_PROMOTION.get(words),
        bits.FILL.get(words),
    )


def encode_tiled(
    data_type: int,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int] = (),
    interleave: int = 0,
    swizzle: int = 0,
    l2_promotion: int = 0,
    fill: int = 0,
) -> bytes:
    """Return the tensor map that cuTensorMapEncodeTiled makes; the rank is the number of `dims`.

    The enumerations are the driver's: `data_type` a CUtensorMapDataType, `swizzle` a
    CUtensorMapSwizzle and so on. Arguments that a Hopper driver refuses and one for Blackwell takes
    are let through: see `TensorMap.needs_sm100`. Element strides default to 1.

    Raises:
        LaunchError: the driver refuses an argument; the message names it.
    """
    require("data_type", data_type, 0 <= data_type < len(DRIVER_TYPES), "a CUtensorMapDataType")
    require("swizzle", swizzle, 0 <= swizzle < len(Swizzle), "a CUtensorMapSwizzle")
    made = TensorMap(
        address,
        DRIVER_TYPES[data_type],
        tuple(dims),
        tuple(strides),
        tuple(box),
        tuple(element_strides) or (1,) * len(dims),
        interleave,
        Swizzle(swizzle),
        l2_promotion,
        fill,
    )
    check_modes(made)
    check_place(made)
    _check_box(made)
    return made.encode()


def require(argument: str, value: object, holds: bool, expected: str) -> None:
    """Refuse a value as the driver does."""
    if not holds:
        raise LaunchError(
            f"tensor map: {argument}: expected {expected}; got {value} (CUDA_ERROR_INVALID_VALUE)"
        )


def check_modes(made: TensorMap) -> None:
    """Refuse counts and enumerations."""
    rank, dtype = made.rank, made.dtype
    require("dims", made.dims, 1 <= rank <= MAX_RANK, "1 to 5 dimensions")
    for argument, values, count in (
        ("strides", made.strides, rank - 1),
        ("box", made.box, rank),
        ("element_strides", made.element_strides, rank),
    ):
        require(argument, values, len(values) == count, f"{count} values for rank {rank}")
    interleave = made.interleave
    require("interleave", interleave, 0 <= interleave < 3, "a CUtensorMapInterleave")
    require("interleave", INTERLEAVES[interleave], not interleave or rank > 2, "rank 3 or more")
    promotion = made.l2_promotion
    require("l2_promotion", promotion, 0 <= promotion < 4, "a CUtensorMapL2promotion")
    require("fill", made.fill, made.fill in (0, 1), "a CUtensorMapFloatOOBfill")
    is_float = dtype.startswith(("f", "bf", "tf"))
    require("fill", f"NaN for {dtype}", not made.fill or is_float, "NaN only of a float type")
    if made.is_padded:
        require("swizzle", made.swizzle.name, made.swizzle in SWIZZLES_OF_PADDED, "another mode")
        require("interleave", INTERLEAVES[interleave], not interleave, f"none for {dtype}")


def check_place(made: TensorMap) -> None:
    """Refuse addresses, extents and strides."""
    unit = 32 if made.is_padded or made.interleave == 2 else 16
    address = made.address
    require("address", hex(address), address % unit == 0, f"a multiple of {unit}")
    require("address", hex(address), 0 <= address < MAX_ADDRESS, "less than 2**57")
    for extent in made.dims:
        require("dims", made.dims, 1 <= extent <= 1 << 32, "each in 1..2**32")
    for stride in made.strides:
        require("strides", made.strides, stride % unit == 0, f"multiples of {unit}")
        require("strides", made.strides, 0 <= stride < 1 << 40, "each less than 2**40")
    if made.element_bits < 8:
        multiple = 128 if made.is_padded else 2
        inner = made.dims[0]
        require("dims", made.dims, inner % multiple == 0, f"the first a multiple of {multiple}")


def _check_box(made: TensorMap) -> None:
    for extent in made.box:
        require("box", made.box, 1 <= extent <= 256, "each in 1..256")
    for step in made.element_strides:
        require("element_strides", made.element_strides, 1 <= step <= 8, "each in 1..8")
    inner = made.shared_row_bytes
    if made.is_padded:
        require("box", made.box, made.box[0] == 128, f"128 elements of {made.dtype} a row")
    if made.interleave == 0:
        whole = made.box[0] * made.element_bits % 128 == 0
        require("box", made.box, whole, "a row to be a multiple of 16 bytes")
        if made.swizzle is not Swizzle.NONE:
            span = made.swizzle.span
            require("box", made.box, inner <= span, f"a row of at most {span} bytes to swizzle")
    steps = zip(made.box, made.element_strides, strict=True)
    total = prod(extent // step for extent, step in steps) * made.element_bits // 8
    require("box", made.box, total <= MAX_BOX_BYTES, f"at most {MAX_BOX_BYTES} bytes")


assert 128 << Swizzle.B128.mode == PERIOD


# Tensor maps in im2col mode: what cuTensorMapEncodeIm2col makes.
#
# A copy in this mode moves some channels of a column of pixels, which it finds by stepping through
# a bounding box in every image, width first (PTX ISA, "Im2col mode").


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
