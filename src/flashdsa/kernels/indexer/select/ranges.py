"""Ranges of entries, and their division into bins in a round.

An entry is (key, position); of equal keys the smaller position is better.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Uint32, cute

from flashdsa.kernels.indexer.select.bins import step_bits


class Part(NamedTuple):
    """The caller's part of a row, as positions, and the number of its listed entries."""

    first: Int32
    end: Int32
    entries: Int32


class Range(NamedTuple):
    """Entries that may be the threshold: keys and inverted positions, both ends included.

    Positions are inverted (~position), so that a larger number is better, as with keys.
    """

    low: Uint32
    high: Uint32
    inv_low: Uint32
    inv_high: Uint32


@cute.jit
def inside(range_: Range, key: Uint32, inv_position: Uint32) -> cutlass.Boolean:
    """Whether an entry is in the range."""
    return (
        key >= range_.low
        and key <= range_.high
        and inv_position >= range_.inv_low
        and inv_position <= range_.inv_high
    )


def cut_to_part(range_: Range, part: Part) -> Range:
    """The range, cut to the part's positions."""
    return Range(range_.low, range_.high, ~Uint32(part.end - 1), ~Uint32(part.first))


class Steps(NamedTuple):
    """Division of a range into bins: by keys, or by inverted positions when one key is left."""

    by_position: cutlass.Boolean
    base: Uint32
    top: Uint32
    shift: Int32


@cute.jit
def steps_of(range_: Range) -> Steps:
    """Divide the range into up to 4096 equal steps."""
    by_position = range_.low == range_.high
    base = range_.inv_low if by_position else range_.low
    top = range_.inv_high if by_position else range_.high
    return Steps(by_position, base, top, step_bits(top - base))


@cute.jit
def narrowed(range_: Range, steps: Steps, chosen: Int32) -> Range:
    """One step of the range."""
    low = steps.base + (Uint32(chosen) << Uint32(steps.shift))
    # Not min(low + step, top): that sum wraps around in the last bin below 2**32.
    high = low + cutlass.min((Uint32(1) << Uint32(steps.shift)) - 1, steps.top - low)
    return Range(
        low=range_.low if steps.by_position else low,
        high=range_.high if steps.by_position else high,
        inv_low=low if steps.by_position else range_.inv_low,
        inv_high=high if steps.by_position else range_.inv_high,
    )
