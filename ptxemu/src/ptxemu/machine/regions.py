"""Runs of bytes that lanes can address: a CTA's shared memory, an allocation, a warp's local bytes.

A region's words are at the addresses that instructions use, generic windows and CTA ranks included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptxemu.events import Space
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.lanes import WARP_SIZE
from ptxemu.machine.state import Region
from ptxemu.memory.address import (
    CONST_WINDOW,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_BASE,
    SHARED_RANK_SHIFT,
    SHARED_WINDOW,
    WINDOW_BYTES,
    in_window,
)
from ptxemu.memory.words import Words

if TYPE_CHECKING:
    from ptxemu.machine.state import Cta, Warp

_WINDOW_BITS = WINDOW_BYTES.bit_length() - 1
SHARED_TOP = SHARED_WINDOW >> _WINDOW_BITS
LOCAL_TOP = LOCAL_WINDOW >> _WINDOW_BITS
LOW_BITS = WINDOW_BYTES - 1
_LOCAL_ALIGNMENT = 32


def _shared(cta: Cta, window: int) -> Region:
    origin = window + (cta.rank << SHARED_RANK_SHIFT)
    first = 0 if cta.machine.layout.uses_reserved_shared else SHARED_BASE
    return Region(Words(origin + first, cta.shared[first:]), Space.SHARED, cta, origin)


shared_region: EngineState[Cta, Region] = EngineState(lambda cta: _shared(cta, 0))
"""A CTA's shared memory at its 32-bit shared addresses."""
generic_shared_region: EngineState[Cta, Region] = EngineState(
    lambda cta: _shared(cta, SHARED_WINDOW)
)
"""A CTA's shared memory at its generic addresses."""


def local_stride(warp: Warp) -> int:
    """Bytes between the local memories of neighbouring lanes."""
    return -(-warp.cta.machine.layout.local_bytes // _LOCAL_ALIGNMENT) * _LOCAL_ALIGNMENT


def _local(warp: Warp) -> Region:
    data = np.zeros(WARP_SIZE * local_stride(warp), dtype=np.uint8)
    return Region(Words(0, data), Space.LOCAL, None, 0)


local_region = EngineState(_local)
"""Local memories of a warp's lanes, one after another, at lane * stride + offset."""


def global_region(warp: Warp, address: int, size: int) -> Region | None:
    """The allocation that holds [address, address + size), a parameter or a constant; or None."""
    words = warp.cta.machine.memory.words_at(address, size)
    if words is None:
        return None
    if in_window(address, PARAM_WINDOW):
        return Region(words, Space.PARAM, None, PARAM_WINDOW, is_writable=False)
    return Region(words, Space.GLOBAL, None, 0, is_writable=words.data.flags.writeable)


def describe_generic(address: int) -> str:
    """The state space that a generic address names."""
    windows = {
        "shared": SHARED_WINDOW,
        "local": LOCAL_WINDOW,
        "param": PARAM_WINDOW,
        "const": CONST_WINDOW,
    }
    return next((name for name, w in windows.items() if in_window(address, w)), "global")
