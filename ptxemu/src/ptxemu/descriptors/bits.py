"""Reading and writing bit fields of an integer."""

from __future__ import annotations


def take(value: int, low: int, count: int) -> int:
    """Bits [low, low + count) of `value`."""
    return value >> low & ((1 << count) - 1)


def put(value: int, low: int, count: int, name: str) -> int:
    """`value` at bit `low`.

    Raises:
        ValueError: it does not fit into `count` bits; names the field.
    """
    if not 0 <= value < 1 << count:
        raise ValueError(f"{name}: expected {count} bits; got {value}")
    return value << low
