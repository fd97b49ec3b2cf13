"""Arithmetic of integers."""

from typing import Any

from cutlass import Int32, Uint32


def divide(number: Any, by: Any) -> Int32:
    """The quotient of two numbers from 0 on, rounded down: half the instructions of `//`, which
    looks at signs."""
    return Int32(Uint32(number) // Uint32(by))
