"""Parts of Python's own objects that machine code reads: bits of an integer, data of an array.

Both have fixed offsets in CPython and NumPy; `is_layout_known` tries whether they hold here.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import numpy as np

from ptxemu.compiled.loops import I1, I32, I64, Value, constant

_SIZE, _DIGITS = 16, 24
"""Offsets, in an integer, of its number of digits and of its 30-bit digits, the lowest first."""
_DATA, _STRIDES = 16, 40
"""Offsets, in an array, of the addresses of its data and of its strides."""
_DIGIT_BITS = 30
_SIZE_SHIFT = 3 if sys.version_info >= (3, 12) else 0
"""Lowest bits of the size that say something else."""


def bit_of(integer: Value, number: Value) -> Any:
    """A bit of an integer object that is not negative."""
    b = number.b
    digit, bit = (Value(b, divide(number.ir, constant(_DIGIT_BITS))) for divide in (b.udiv, b.urem))
    is_there = digit.is_below((integer + _SIZE)[0].shifted_right(_SIZE_SHIFT))
    # Every integer has a place for a first digit.
    place = (integer + _DIGITS).pointer(I32, is_there.choice(digit, 0))
    shifted = b.lshr(b.zext(b.load(place), I64), bit.ir)
    return Value(b, b.trunc(shifted, I1)) & is_there


def data_of(array: Value) -> Any:
    """The address of an array's data."""
    return (array + _DATA)[0]


def row_bytes_of(array: Value) -> Any:
    """Bytes between the rows of an array of two dimensions."""
    return (array + _STRIDES)[0][0]


@cache
def is_layout_known() -> bool:
    """Whether objects are laid out as machine code takes them to be."""
    if sys.implementation.name != "cpython" or sys.int_info.bits_per_digit != _DIGIT_BITS:
        return False
    word, half = ctypes.c_int64.from_address, ctypes.c_uint32.from_address
    for number in (0, 1, 1 << 29, (1 << 30) + 5, (7 << 900) + (3 << 31) + 1):
        place, digits = id(number), -(-number.bit_length() // _DIGIT_BITS)
        if word(place + _SIZE).value >> _SIZE_SHIFT != digits:
            return False
        found = [half(place + _DIGITS + 4 * k).value for k in range(digits)]
        if sum(digit << _DIGIT_BITS * k for k, digit in enumerate(found)) != number:
            return False
    array = np.zeros((3, 5), dtype=np.int32)
    if word(id(array) + _DATA).value != array.ctypes.data:
        return False
    return word(word(id(array) + _STRIDES).value).value == array.strides[0]
