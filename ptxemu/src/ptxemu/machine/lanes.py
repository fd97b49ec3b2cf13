"""Lanes of a warp: masks, and the NumPy types that registers of each PTX type are kept in."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

WARP_SIZE = 32

Mask: TypeAlias = NDArray[np.bool_]
Lanes: TypeAlias = NDArray[Any]
"""One value a lane: shape (32,), or (32, 2) uint64 for b128. Contiguous,
and never changed in place."""

FULL: Mask = np.ones(WARP_SIZE, dtype=np.bool_)
"""All lanes. `mask is FULL` is the quick test; where a mask may be another array, `mask.all()`."""
FULL.flags.writeable = False
NOBODY: Mask = np.zeros(WARP_SIZE, dtype=np.bool_)
"""No lane."""
NOBODY.flags.writeable = False
_FULL_BYTES, _NO_BYTES = FULL.tobytes(), NOBODY.tobytes()
LANE_IDS: NDArray[np.uint32] = np.arange(WARP_SIZE, dtype=np.uint32)
LANE_IDS.flags.writeable = False
ALL_BITS = 0xFFFFFFFF
"""All lanes, a bit each."""
_DIGITS = bytes.maketrans(b"\0\1", b"01")

STORAGE: dict[str, np.dtype[Any]] = {
    "pred": np.dtype(np.bool_),
    **{t: np.dtype(np.uint16) for t in ("b8", "u8", "s8", "b16", "u16", "s16", "f16", "bf16")},
    **{t: np.dtype(np.uint32) for t in ("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32")},
    **{t: np.dtype(np.uint64) for t in ("b64", "u64", "s64", "f64", "f32x2", "b128")},
}
"""Storage of a register of a declared type: unsigned integers of its width (8-bit in 16); a b128
register is an array (32, 2) of its low and high half."""

VALUE: dict[str, np.dtype[Any]] = {
    "pred": np.dtype(np.bool_),
    "b8": np.dtype(np.uint8),
    "u8": np.dtype(np.uint8),
    "s8": np.dtype(np.int8),
    "b16": np.dtype(np.uint16),
    "u16": np.dtype(np.uint16),
    "s16": np.dtype(np.int16),
    "b32": np.dtype(np.uint32),
    "u32": np.dtype(np.uint32),
    "s32": np.dtype(np.int32),
    "b64": np.dtype(np.uint64),
    "u64": np.dtype(np.uint64),
    "s64": np.dtype(np.int64),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "bf16": np.dtype(np.uint16),
    "f16x2": np.dtype(np.uint32),
    "bf16x2": np.dtype(np.uint32),
    "f32x2": np.dtype(np.uint64),
    "b128": np.dtype(np.uint64),
    "tf32": np.dtype(np.uint32),
}
"""View of an operand for an instruction of a type: the same bits (8-bit: truncated)."""


def count_lanes(mask: Mask) -> int:
    """Return the number of lanes in `mask`."""
    return WARP_SIZE if mask is FULL else mask.tobytes().count(1)


def held_lanes(mask: Mask, predicate: Mask, *, negated: bool) -> Mask:
    """The lanes of `mask` where `predicate` holds, or with `negated` does not.

    FULL, NOBODY or `mask` itself where that is the answer, so that `is` tells.
    """
    # NOTE: comparing the bytes takes a tenth of the time of `all` and `any`.
    held = predicate.tobytes()
    if held == _FULL_BYTES:
        return NOBODY if negated else mask
    if held == _NO_BYTES:
        return mask if negated else NOBODY
    if mask is FULL:
        return ~predicate if negated else predicate
    lanes = mask & ~predicate if negated else mask & predicate
    held = lanes.tobytes()
    if held == _NO_BYTES:
        return NOBODY
    return mask if held == mask.tobytes() else lanes


def merged(mask: Mask, new: Lanes, old: Lanes) -> Lanes:
    """`new` in the lanes of `mask`, `old` elsewhere; same storage dtype."""
    if mask is FULL:
        return new
    return np.where(mask if new.ndim == 1 else mask[:, None], new, old)


def first_lane(mask: Mask) -> int:
    """The lowest lane of a mask that is not empty."""
    return int(mask.argmax())


def only_lane(mask: Mask) -> int:
    """The lane of a mask that has one; -1 of others."""
    lanes = mask.tobytes()
    return lanes.find(1) if lanes.count(1) == 1 else -1


def are_alike(lanes: Lanes) -> bool:
    """Whether all lanes have the same bits."""
    bits = lanes.tobytes()
    return bits == bits[: len(bits) // WARP_SIZE] * WARP_SIZE


def mask_of(bits: int) -> Mask:
    """The lanes whose bit is set."""
    return ((np.uint32(bits) >> LANE_IDS) & np.uint32(1)).astype(np.bool_)


def bits_of(mask: Mask) -> int:
    """A mask as 32 bits, lane 0 lowest."""
    if mask is FULL:
        return ALL_BITS
    return int(mask.tobytes().translate(_DIGITS)[::-1], 2)


def lane_names(mask: Mask) -> str:
    """Return the lanes of `mask` for a message: "0-15, 20"."""
    lanes = [int(lane) for lane in np.flatnonzero(mask)]
    ranges: list[list[int]] = []
    for lane in lanes:
        if ranges and lane == ranges[-1][1] + 1:
            ranges[-1][1] = lane
        else:
            ranges.append([lane, lane])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
