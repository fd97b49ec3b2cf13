"""Offsets of a row's 16-byte pieces in swizzled tiles of shared memory."""

from typing import Any


def swizzled_128(row: Any, unit: Any) -> Any:
    """Byte offset of 16-byte piece `unit` (0-7) of a row of 128 bytes, from a multiple of 1024."""
    return row * 128 + ((unit ^ (row & 7)) << 4)


def swizzled_64(row: Any, unit: Any) -> Any:
    """The same for rows of 64 bytes; `unit` 0-3."""
    return row * 64 + ((unit ^ ((row >> 1) & 3)) << 4)
